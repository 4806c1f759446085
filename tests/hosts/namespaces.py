"""Hosts as Linux namespaces: each has its own processes, network, host name and ``/proc``, and they share the file system.

::

    alpha  10.99.0.1  eth0 <--- veth pair, each end limited to a rate ---> eth0  10.99.0.2  beta

A host lives as long as its first process, which reads a pipe of this process: whatever ends this process ends the hosts, all
their processes and the link. Needs root, util-linux 2.38 and iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

NAMES = ("alpha", "beta")
INTERFACE = "eth0"
FRAME_HEADER_BYTES = 14 + 20 + 32
"""Of Ethernet, IPv4 and TCP with timestamps, which the counters of an interface include, once for each packet."""

_TOOLS = ("unshare", "nsenter", "ip", "tc")
_NAMESPACES = ("--net", "--pid", "--uts", "--mount")
_FIRST_PROCESS = " && ".join(  # noqa: FLY002 - a line for each step
    [
        "mount -t proc proc /proc",
        "mount -t tmpfs tmpfs /mnt",
        r"printf '127.0.0.1 localhost\n10.99.0.1 alpha\n10.99.0.2 beta\n' > /mnt/hosts",
        "mount --bind /mnt/hosts /etc/hosts",
        "umount -l /mnt",
        "hostname $0",
        "ip link set lo up",
        "trap '' CHLD",
        "echo ready",
        "exec cat",
    ]
)
"""``cat`` ends with its input. With SIGCHLD ignored, the kernel buries the orphans of a host. Each host knows both names."""
_QUEUE = ("burst", "128kb", "latency", "400ms")


class Traffic(NamedTuple):
    """Counters of an interface since it was made."""

    received_bytes: int
    received_packets: int
    sent_bytes: int
    sent_packets: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(*(late - early for late, early in zip(self, earlier, strict=True)))

    @property
    def sent_payload_bytes(self) -> int:
        """Bytes sent, without headers. A real wire has more of them: here a packet may have 64 KiB."""
        return self.sent_bytes - FRAME_HEADER_BYTES * self.sent_packets


class Host:
    """A host. Made by ``two_hosts``.

    Args:
        name: of the host.
        address: of its ``eth0``, with the length of the prefix.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address.partition("/")[0]
        self._with_prefix = address
        command = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "sh", "-c", _FIRST_PROCESS, name]
        self._unshare = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if _pipe(self._unshare.stdout).readline() != b"ready\n":
            raise RuntimeError(f"the host {name} did not come up")
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text()
        self.pid = int(children.split()[0])
        """Of its first process, as seen from outside."""
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def entry(self) -> list[str]:
        """The beginning of a command line that runs the rest on this host."""
        return ["nsenter", "--target", str(self.pid), *_NAMESPACES, f"--wdns={Path.cwd()}", "--"]

    def connect(self, rate_mbit: float) -> None:
        """Give ``eth0`` its address and its rate."""
        self.run("ip", "address", "add", self._with_prefix, "dev", INTERFACE)
        self.run("ip", "link", "set", INTERFACE, "up")
        self.run("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", f"{rate_mbit}mbit", *_QUEUE)

    def run(self, *command: str) -> str:
        """Run a command to its end and return what it printed."""
        done = subprocess.run([*self.entry, *command], capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} on {self.name}: {done.stderr}")
        return done.stdout

    def start(self, command: Sequence[str], output: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command whose output goes into a file."""
        with output.open("wb") as file:
            started = subprocess.Popen([*self.entry, *command], env=os.environ | environment, stdout=file, stderr=file)
        self._started.append(started)
        return started

    def traffic(self, interface: str = INTERFACE) -> Traffic:
        """Return the counters of an interface."""
        return traffic_of(Path(f"/proc/{self.pid}/net/dev"), interface)

    def unplug(self) -> None:
        """Cut the link: packets vanish in both directions, and no connection is reset."""
        self.run("ip", "link", "set", INTERFACE, "down")

    def kill_all(self) -> None:
        """End all processes of the host at once with SIGKILL, except its first one, so that its network stays."""
        self.run("sh", "-c", "kill -KILL -1")

    def close(self) -> None:
        """Take the host down with all its processes. Idempotent."""
        _pipe(self._unshare.stdin).close()
        for process in (self._unshare, *self._started):
            process.wait(30)
        _pipe(self._unshare.stdout).close()


def traffic_of(table: Path, interface: str = INTERFACE) -> Traffic:
    """Return the counters of an interface from a file in the form of ``/proc/net/dev``."""
    fields = dict(line.split(":", 1) for line in table.read_text().splitlines()[2:])
    numbers = {name.strip(): [int(number) for number in values.split()] for name, values in fields.items()}[interface]
    return Traffic(*numbers[0:2], *numbers[8:10])


@contextmanager
def two_hosts(rate_mbit: float = 1000.0) -> Iterator[tuple[Host, Host]]:
    """Make two hosts joined by a link, and take them down in the end.

    Args:
        rate_mbit: of the link in each direction, in 1e6 bits per second.
    """
    hosts: list[Host] = []
    try:
        for number, name in enumerate(NAMES, start=1):
            hosts.append(Host(name, f"10.99.0.{number}/24"))
        ends = [("name", INTERFACE, "netns", str(host.pid)) for host in hosts]
        subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True, timeout=30)
        for host in hosts:
            host.connect(rate_mbit)
        _await_carrier(hosts)
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            host.close()


def why_not() -> str:
    """Return why this machine cannot make hosts; empty if it can."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"needs {', '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root, to make namespaces and a link between them"
    try:
        with two_hosts():
            return ""
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return f"namespaces cannot be made here: {error}"


def _await_carrier(hosts: Sequence[Host], limit_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not all("LOWER_UP" in host.run("ip", "link", "show", INTERFACE) for host in hosts):
        if time.monotonic() > deadline_s:
            raise RuntimeError("the link between the hosts did not come up")
        time.sleep(0.02)


def _pipe(file: IO[bytes] | None) -> IO[bytes]:
    assert file is not None
    return file
