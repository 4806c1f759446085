"""The questions that are asked only where the ranks are on several hosts: addresses, clocks, and the two levels of the link.

Every rank sees the places and times of all, so all of them return the same fact.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

from megabucket.comm import AllGather, AllReduce, HostMap, Place
from megabucket.comm.hosts import loopback_problem
from megabucket.doctor.questions import Bench
from megabucket.doctor.report import Fact, Status
from megabucket.errors import rank_list
from megabucket.measure.hosts import Level, line_of, measure_levels
from megabucket.measure.ranks import Ranks
from megabucket.units import format_bytes, format_seconds

CLOCK_NOTE_S: Final = 1.0
"""Above this the times in logs of several hosts are not comparable."""
CLOCK_FINDING_S: Final = 10.0
"""Torchrun takes a host for dead whose last sign of life, one every 5 s, is 15 s old by the clock of another host."""

_HOSTS_SHOWN: Final = 16
_CLOCK_ROUNDS: Final = 5
_LEVEL_BYTES: Final = 4 * 2**20
_LEVEL_REPETITIONS: Final = 3


def addresses(bench: Bench) -> Fact:
    """List hosts with ranks and addresses; find a loopback address, and name ranks that are not in order."""
    return address_fact(bench.places)


def address_fact(places: Sequence[Place]) -> Fact:
    """Return the answer that these places give.

    >>> address_fact([Place("a", address="10.0.0.1", interface="eth0"), Place("b", address="10.0.0.2")]).answer
    'a: rank 0 at 10.0.0.1 (eth0); b: rank 1 at 10.0.0.2'
    """
    hosts = HostMap.of(places)
    problem, ranks = loopback_problem(places)
    if problem:
        return Fact(problem, Status.FINDING, ranks)
    texts = []
    for host, of_host in list(hosts.ranks.items())[:_HOSTS_SHOWN]:
        at = list(dict.fromkeys(places[rank].reached_at for rank in of_host if places[rank].reached_at))
        texts.append(f"{host}: {rank_list(of_host)}" + (f" at {', '.join(at)}" if at else ""))
    if len(hosts.ranks) > _HOSTS_SHOWN:
        texts.append(f"{len(hosts.ranks) - _HOSTS_SHOWN} more hosts")
    if obstacle := hosts.obstacle:
        return Fact(f"{obstacle}, so there can be no replicas by host: {'; '.join(texts)}", Status.NOTE)
    return Fact("; ".join(texts))


def clocks(bench: Bench) -> Fact:
    """Compare the clocks of all ranks right after all have met."""
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        bench.launch(AllReduce(torch.zeros(1, dtype=torch.float32, device=bench.device)))
        times_s = torch.zeros(bench.size, dtype=torch.float64, device=bench.device)
        bench.shard(times_s).fill_(time.time())
        bench.launch(AllGather(times_s, bench.shard(times_s)))
        rounds.append(times_s.tolist())
    return clock_fact(bench.hosts, rounds)


def clock_fact(hosts: HostMap, rounds: Sequence[Sequence[float]]) -> Fact:
    """Return the answer that these times give.

    Args:
        rounds: of each meeting the time in seconds by the clock of each rank. A rank may have come late to one of them.

    >>> clock_fact(HostMap(("a", "a", "b")), [[5.0, 5.0, 65.0]] * 3).answer
    'b is 60.0 s ahead of a'
    """
    ahead_s = [statistics.median(offsets) for offsets in zip(*([each - row[0] for each in row] for row in rounds), strict=True)]
    by_host = {host: statistics.median(ahead_s[rank] for rank in ranks) for host, ranks in hosts.ranks.items()}
    in_order = sorted(by_host, key=by_host.__getitem__)
    # The middle one of three or more is taken to be right; of two nobody can tell.
    right = in_order[(len(in_order) - 1) // 2] if len(in_order) > 2 else next(iter(by_host))
    far = {host: by_host[host] - by_host[right] for host in by_host if abs(by_host[host] - by_host[right]) > CLOCK_NOTE_S}
    if not far:
        spread_s = by_host[in_order[-1]] - by_host[in_order[0]]
        return Fact(f"within {format_seconds(spread_s)} on {len(by_host)} hosts")
    texts = [f"{host} is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} {right}" for host, ahead in far.items()]
    status = Status.FINDING if max(map(abs, far.values())) > CLOCK_FINDING_S else Status.NOTE
    return Fact("; ".join(texts), status, tuple(rank for host in far for rank in hosts.ranks[host]))


def levels(bench: Bench) -> Fact:
    """Measure latency and bandwidth inside a host and across, and say which pairs of ranks copy and which use sockets."""
    hosts = bench.hosts
    if bench.group is None or dist.get_process_group_ranks(bench.group) != list(range(dist.get_world_size())):
        return Fact("not measured: these ranks are not a whole run over process groups", Status.NOTE)
    ranks = Ranks(bench.rank, bench.size, bench.device, "gloo", places=bench.places)
    measured = measure_levels(ranks, hosts, max_bytes=_LEVEL_BYTES, repetitions=_LEVEL_REPETITIONS)
    if measured is None:
        return Fact(f"not measured: {hosts.obstacle}", Status.NOTE)
    texts = [_level_text("across hosts", measured.across)]
    status = Status.HOLDS
    if measured.inside is not None:
        texts.insert(0, _level_text("inside a host", measured.inside))
        can_copy = bench.config.read_peer_memory and bench.device.type == "cpu"
        status = Status.NOTE if can_copy and measured.inside.num_copying < measured.inside.num_groups else Status.HOLDS
        if measured.inside.num_copying:
            texts.append("a group with ranks on several hosts uses sockets for all pairs, also for those of one host")
    return Fact("; ".join(texts), status)


def _level_text(name: str, level: Level) -> str:
    least_s, bytes_per_s = line_of(level)
    return (
        f"{name}, {level.way}: an all-reduce of {level.num_ranks} ranks takes {format_seconds(least_s)}, large ones run at "
        f"{format_bytes(int(bytes_per_s))}/s"
    )
