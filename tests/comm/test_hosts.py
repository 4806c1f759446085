"""Which ranks share a host, and the address at which gloo makes a process reachable."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megabucket.comm.hosts import HostMap, Place, find_place, gloo_address


def test_hosts_of_one_name_are_told_apart_by_their_space():
    places = [Place("pod", "one"), Place("pod", "one"), Place("pod", "two"), Place("node", "three")]

    assert HostMap.of(places).names == ("pod", "pod", "pod #2", "node")


def test_without_a_known_space_the_name_decides():
    assert HostMap.of([Place("a"), Place("a"), Place("b")]).ranks == {"a": (0, 1), "b": (2,)}


@pytest.mark.parametrize(
    ("names", "per_host", "obstacle"),
    [
        ("aabb", 2, ""),
        ("abc", 1, ""),
        ("aa", None, ""),
        ("aab", None, "hosts have different numbers of ranks (a 2, b 1)"),
        ("abab", None, "ranks of one host are not neighbours"),
        ("abba", None, "ranks of one host are not neighbours"),
    ],
)
def test_ranks_are_a_grid_of_hosts_or_it_is_said_why_not(names, per_host, obstacle):
    hosts = HostMap(tuple(names))

    assert (hosts.ranks_per_host, hosts.obstacle) == (per_host, obstacle)


def test_a_process_shares_a_host_with_itself_and_its_children():
    code = "import os; from megabucket.comm.hosts import find_place; print(find_place(os.environ, uses_gloo=False).space)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    own = find_place(os.environ, uses_gloo=False)

    assert own.space
    assert child.stdout.strip() == own.space
    assert (own.host, own.address) == (socket.gethostname(), "")


LISTENS = """
import os
from pathlib import Path
import torch.distributed as dist

gloo, interface = dist.ProcessGroupGloo, os.environ.get("GLOO_SOCKET_IFNAME")
device = gloo.create_device(interface=interface) if interface else gloo.create_default_device()
links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
    _, local, _, state, *rest = line.split()
    if state == "0A" and f"socket:[{rest[5]}]" in links:
        print(".".join(str(byte) for byte in reversed(bytes.fromhex(local.partition(":")[0]))))
"""


@pytest.mark.dist
@pytest.mark.skipif(
    not Path("/proc/self/net/tcp").exists(), reason="listening sockets are listed in /proc, which only Linux has"
)
@pytest.mark.parametrize("variables", [{}, {"GLOO_SOCKET_IFNAME": "lo"}], ids=["by name", "by interface"])
def test_the_address_is_that_at_which_gloo_listens(variables):
    listening = subprocess.run(
        [sys.executable, "-c", LISTENS], env=os.environ | variables, capture_output=True, text=True, check=True
    )

    address, _ = gloo_address(variables)

    assert listening.stdout.split() == [address]


def test_an_interface_that_is_not_there_has_no_address():
    assert gloo_address({"GLOO_SOCKET_IFNAME": "none0,lo"}) == ("", "none0")


def test_loopback_is_recognized_and_named():
    address, interface = gloo_address({"GLOO_SOCKET_IFNAME": "lo"})
    place = Place("a", "", address, interface)

    assert place.is_loopback
    assert place.reached_at == "127.0.0.1 (lo)"
    assert not Place("a", "", "10.0.0.1").is_loopback
    assert not Place("a").is_loopback
