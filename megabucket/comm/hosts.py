"""Hosts: which ranks share one, and the address at which gloo makes a rank reachable. Does no communication.

Processes share a host if one could read the memory of the other: the same boot, process ids and network. Two containers of
one machine are two hosts.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from megabucket.comm.liveness.observations import identify_this_process
from megabucket.comm.samehost import network_space
from megabucket.errors import printable, rank_list

_LOOPBACK: Final = "127.0.0.1"
_GET_ADDRESS: Final = 0x8915  # SIOCGIFADDR


class Place(NamedTuple):
    """Where one rank runs, as it tells the others."""

    host: str
    """Its name."""
    space: str = ""
    """Equal for processes of one host; empty if unknown, then the name decides."""
    address: str = ""
    """At which gloo makes this rank reachable; empty if another back-end is used."""
    interface: str = ""
    """Of the address; empty if unknown."""

    @property
    def is_loopback(self) -> bool:
        """Whether no other host can reach the address."""
        return bool(self.address) and ipaddress.ip_address(self.address).is_loopback

    @property
    def reached_at(self) -> str:
        """The address and its interface."""
        return f"{self.address} ({self.interface})" if self.interface else self.address


def find_place(environment: Mapping[str, str], *, uses_gloo: bool) -> Place:
    """Return the place of this process.

    Args:
        environment: of the process; gloo reads its interface from ``GLOO_SOCKET_IFNAME``.
        uses_gloo: whether ranks reach each other over gloo.
    """
    process = identify_this_process()
    network = network_space()
    space = f"{process.pid_space} {network}" if process.pid_space and network else ""
    address, interface = gloo_address(environment) if uses_gloo else ("", "")
    return Place(process.host, space, address, interface)


def gloo_address(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the address that gloo binds to in this process and its interface, each empty if unknown.

    That of the first interface in ``GLOO_SOCKET_IFNAME``; else the first to which the name of this host leads and that exists
    here; else loopback (``ProcessGroupGloo::createDefaultDevice``).
    """
    addresses = _interface_addresses()
    if chosen := environment.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
        return next(((address, name) for address, name in addresses if name == chosen), ("", chosen))
    address = _LOOPBACK
    with suppress(OSError):
        for family, kind, protocol, _, found in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(found)
                address = str(found[0])
                break
    return address, dict(addresses).get(address, "")


def _interface_addresses() -> list[tuple[str, str]]:
    """Return address and name of the interfaces of this host. Of an interface with several IPv4 addresses only the first."""
    try:
        import fcntl  # only on Unix
    except ImportError:
        return []
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                found.append((socket.inet_ntoa(answer[20:24]), name))
    with suppress(OSError):  # only Linux has the file
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            found.append((str(ipaddress.ip_address(bytes.fromhex(digits))), name))
    return found


@dataclass(frozen=True, slots=True)
class HostMap:
    """The hosts of a group of ranks.

    >>> hosts = HostMap(("a", "a", "b", "b"))
    >>> hosts.is_several, hosts.ranks_per_host, hosts.names_of([2, 3])
    (True, 2, 'b')
    >>> HostMap(("a", "b", "b")).obstacle
    'hosts have different numbers of ranks (a 1, b 2)'
    """

    names: tuple[str, ...] = ()
    """Of the host of each rank. Empty: all ranks share one that has no name."""

    @classmethod
    def of(cls, places: Sequence[Place]) -> HostMap:
        """Return the hosts of all ranks. Different hosts of one name are told apart by a number."""
        keys = [place.space or place.host for place in places]
        named: dict[str, str] = {}
        for key, place in zip(keys, places, strict=True):
            if key not in named:
                name, same = printable(place.host, 60), sum(known.partition(" #")[0] == place.host for known in named.values())
                named[key] = f"{name} #{same + 1}" if same else name
        return cls(tuple(named[key] for key in keys))

    @property
    def ranks(self) -> dict[str, tuple[int, ...]]:
        """Ranks by host, in the order of their first rank."""
        return {host: tuple(rank for rank, name in enumerate(self.names) if name == host) for host in dict.fromkeys(self.names)}

    @property
    def is_several(self) -> bool:
        """Whether the ranks are on more than one host."""
        return len(set(self.names)) > 1

    @property
    def obstacle(self) -> str:
        """Why the ranks are no grid of hosts and ranks of each; empty if they are one."""
        sizes = {host: len(ranks) for host, ranks in self.ranks.items()}
        if len(set(sizes.values())) > 1:
            shown = ", ".join(f"{host} {size}" for host, size in list(sizes.items())[:5])
            return f"hosts have different numbers of ranks ({shown}{', ...' if len(sizes) > 5 else ''})"
        changes = sum(self.names[rank] != self.names[rank - 1] for rank in range(1, len(self.names)))
        return "ranks of one host are not neighbours" if changes >= max(len(sizes), 1) else ""

    @property
    def ranks_per_host(self) -> int | None:
        """Ranks of each host, if all have equally many, which are neighbours; ``None``: they have not, or there is one host."""
        return len(self.names) // len(self.ranks) if self.is_several and not self.obstacle else None

    def names_of(self, ranks: Sequence[int]) -> str:
        """Return the hosts of some ranks as words, at most five of them."""
        hosts = list(dict.fromkeys(self.names[rank] for rank in ranks)) if self.names else []
        return ", ".join(hosts[:5]) + (f" and {len(hosts) - 5} more" if len(hosts) > 5 else "")

    def by_host(self, values: Sequence[Any]) -> str:
        """Return the hosts of each value with their ranks, the rarest value last.

        >>> HostMap(("a", "a", "b", "b")).by_host(["1.0", "1.0", "1.0", "2.0"])
        '1.0 on a, b (ranks 0, 1, 2); 2.0 on b (rank 3)'
        """
        ranks_of: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            ranks_of.setdefault(str(value), []).append(rank)
        most_first = sorted(ranks_of.items(), key=lambda item: -len(item[1]))
        texts = [f"{value} on {self.names_of(ranks)} ({rank_list(ranks)})" for value, ranks in most_first[:5]]
        return "; ".join(texts) + (f"; {len(most_first) - 5} other values" if len(most_first) > 5 else "")


def loopback_problem(places: Sequence[Place]) -> tuple[str, tuple[int, ...]]:
    """Return what is wrong if other hosts are to reach ranks at a loopback address, and these ranks; empty if nothing is."""
    hosts = HostMap.of(places)
    ranks = tuple(rank for rank, place in enumerate(places) if place.is_loopback)
    if not hosts.is_several or not ranks:
        return "", ()
    first = places[ranks[0]]
    return (
        f"the ranks are on {len(hosts.ranks)} hosts, but gloo makes {rank_list(ranks)} on {hosts.names_of(ranks)} reachable at "
        f"{first.reached_at}, the loopback interface, where no other host can connect"
    ), ranks


LOOPBACK_ADVICE: Final = (
    "set GLOO_SOCKET_IFNAME on every host to the interface that leads to the others (ip addr shows it, for example eth0), or "
    "let /etc/hosts map the name of each host to its own address instead of 127.0.0.1 or 127.0.1.1"
)
