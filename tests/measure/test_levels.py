"""Times inside hosts and across them: lines through them on a known link, and on ranks that say they are on two hosts."""

from __future__ import annotations

import pytest
from launched import run_launched

from megabucket.cli.calibrate import _host_lines
from megabucket.comm import HostMap, Place
from megabucket.errors import ConfigError
from megabucket.measure.calibrate import Calibration
from megabucket.measure.collectives import Cell, Timing
from megabucket.measure.hosts import HostLevels, Level, line_of, measure_levels
from megabucket.measure.ranks import refuse_loopback
from megabucket.planning.links import RingLink
from megabucket.trace import CollectiveKind

INSIDE, ACROSS = RingLink(latency_s=1e-5, bytes_per_s=1e10), RingLink(latency_s=2e-3, bytes_per_s=1e8)
KINDS = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER)


def level_of(ring, num_ranks, *, num_copying=0, off=1.0):
    timings = [
        Timing(Cell(kind, "float32", size), (ring.collective_s(kind, size, num_ranks) * (off if size == 4096 else 1),))
        for kind in KINDS
        for size in (1024, 4096, 2**20)
    ]
    return Level(num_ranks, tuple(timings), num_copying=num_copying, num_groups=2)


def calibration_of(levels, obstacle=""):
    timings = [Timing(Cell(KINDS[0], "float32", size), (1e-3 + 1e-9 * size,)) for size in (1024, 4096)]
    facts = {"backend": "gloo", "device": "x86_64", "repetitions": 1}
    return Calibration.of(timings, 4, facts).with_levels(levels, obstacle)


def test_the_rings_of_both_levels_are_recovered():
    link = HostLevels(level_of(INSIDE, 2), level_of(ACROSS, 3)).link

    assert link.ranks_per_node == 2
    for found, given in ((link.inside, INSIDE), (link.between, ACROSS)):
        assert found.latency_s == pytest.approx(given.latency_s)
        assert found.bytes_per_s == pytest.approx(given.bytes_per_s)


def test_the_calibration_keeps_the_levels_and_prints_them():
    calibration = calibration_of(HostLevels(level_of(INSIDE, 2, num_copying=2), level_of(ACROSS, 3)))

    assert calibration.link.hosts == calibration.levels.link
    assert list(_host_lines(calibration)) == [
        "inside a host: 2 ranks, copies between memories: 10.0 us + 10 GB/s from one rank to the next, up to 0% off",
        "across hosts: 3 ranks, sockets: 2.00 ms + 0.1 GB/s from one rank to the next, up to 0% off",
    ]
    assert not [name for name in calibration.link.facts if name.startswith("remark")]


def test_times_that_are_no_ring_are_remarked_on():
    calibration = calibration_of(HostLevels(level_of(INSIDE, 2), level_of(ACROSS, 3, off=3.0)))

    assert [name for name in calibration.link.facts if name.startswith("remark")] == ["remark across hosts"]


def test_hosts_with_different_numbers_of_ranks_have_no_levels_and_it_is_said_why():
    calibration = calibration_of(None, HostMap(("a", "b", "b")).obstacle)

    assert calibration.link.hosts is None
    assert calibration.link.facts["remark hosts"] == (
        "no times inside hosts and across them: hosts have different numbers of ranks (a 1, b 2); start equally many ranks on "
        "each host"
    )


def test_a_loopback_address_across_hosts_is_refused_by_name_before_gloo_tries_it():
    with pytest.raises(
        ConfigError, match=r"makes rank 1 on b reachable at 127\.0\.1\.1, the loopback .* set GLOO_SOCKET_IFNAME"
    ):
        refuse_loopback(0, [Place("a", "", "10.0.0.1"), Place("b", "", "127.0.1.1")])
    refuse_loopback(0, [Place("a", "", "127.0.0.1"), Place("a", "", "127.0.0.1")])


def four_ranks_on_two_hosts():
    import os

    from megabucket.measure.ranks import joined_ranks

    with joined_ranks(os.environ) as ranks:
        levels = measure_levels(ranks, HostMap(("a", "a", "b", "b")), max_bytes=2**21, repetitions=1)
        assert measure_levels(ranks, HostMap(("a", "b", "b", "b")), max_bytes=2**21) is None
    assert (levels.inside.num_ranks, levels.inside.num_groups) == (2, 2)
    assert levels.inside.num_copying == 2, levels.inside.way
    assert (levels.across.num_ranks, levels.across.num_groups) == (2, 2)
    assert max(timing.cell.num_bytes for timing in levels.across.timings) == 2**20  # shards of the largest buffer
    least_s, bytes_per_s = line_of(levels.across)
    print(levels.link.ranks_per_node, least_s > 0, bytes_per_s > 0, levels.link)


@pytest.mark.dist
def test_four_ranks_measure_both_levels_alike_and_copy_inside_a_host(tmp_path):
    result = run_launched(four_ranks_on_two_hosts, (), tmp_path / "said", num_ranks=4, warnings_are_errors=True)

    assert result.returncode == 0, result.stderr
    said = result.stdout.splitlines()
    assert len(said) == 4
    assert len(set(said)) == 1
    assert said[0].startswith("2 True True ")
