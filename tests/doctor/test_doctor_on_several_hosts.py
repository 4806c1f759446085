"""The doctor where ranks say that they are on several hosts: what differs is named by host, with advice."""

from dataclasses import replace

import pytest
import torch
from liars import line

from megabucket.cli.doctor import _lines
from megabucket.comm import HostMap, Place
from megabucket.config import DistributedDataParallelConfig
from megabucket.doctor import Status, run_doctor
from megabucket.doctor.hosts import address_fact, clock_fact
from megabucket.doctor.run import unreachable_report
from megabucket.testing import LoopbackWorld

HOSTS = HostMap(("a", "a", "b", "b"))
PLACES = tuple(Place(host, f"space of {host}", f"10.0.0.{index}", "eth0") for index, host in enumerate("aabb", start=1))


def on_loopback_address(place):
    return place._replace(address="127.0.1.1", interface="lo")


def examine(places, config_of=lambda _: None):
    world = LoopbackWorld(len(places), timeout_s=60)
    reports = world.run(lambda rank: run_doctor(config_of(rank), communicator=world.communicator(rank), place=places[rank]))
    assert [replace(report, wall_s=0) for report in reports] == [replace(reports[0], wall_s=0)] * len(places)
    return reports[0]


def test_ranks_of_one_host_are_asked_ten_questions_and_those_of_two_hosts_thirteen():
    assert len(examine(PLACES[:2]).lines) == 10

    report = examine(PLACES[1:3])

    assert report.is_healthy, report.findings
    assert [each.question for each in report.lines[10:]] == ["hosts and addresses", "clocks", "inside hosts and across"]
    assert report.hosts == ("a", "b")
    assert line(report, "hosts and addresses").answer == "a: rank 0 at 10.0.0.2 (eth0); b: rank 1 at 10.0.0.3 (eth0)"
    assert line(report, "clocks").answer.startswith("within ")
    assert line(report, "inside hosts and across").status is Status.NOTE  # loopback worlds have no process groups
    assert next(_lines(report)).endswith("2 ranks on 2 hosts")


def test_a_config_that_differs_on_one_host_is_a_finding_that_names_it_and_says_what_to_do():
    narrow = DistributedDataParallelConfig(bucket_size=1000)

    report = examine(PLACES[1:], lambda rank: narrow if rank == 0 else None)

    config = line(report, "config")
    assert config.status is Status.FINDING
    assert (config.ranks, config.hosts) == ((0,), "a")
    assert " on b (ranks 1, 2); " in config.answer
    assert config.answer.endswith(" on a (rank 0)")
    assert "about rank" in report.outcome
    assert " on a" in report.outcome
    assert f"what to do about config (a): {config.advice}" in list(_lines(report))


def test_versions_of_another_host_are_named_by_it(monkeypatch):
    monkeypatch.setattr("megabucket.doctor.questions.torch.__version__", "2.13.0")
    from megabucket.doctor import questions
    from megabucket.doctor.report import line_of
    from megabucket.doctor.run import QUESTIONS

    bench = type("Bench", (), {"device": torch.device("cpu"), "hosts": HOSTS})
    usual = questions.versions(bench)
    other = replace(usual, answer=usual.answer.replace("2.13.0", "2.12.0"), same=usual.same.replace("2.13.0", "2.12.0"))

    found = line_of(QUESTIONS[0], [usual, usual, other, other], HOSTS)

    assert found.status is Status.FINDING
    assert found.answer == f"{usual.answer} on a (ranks 0, 1); {other.answer} on b (ranks 2, 3)"
    assert found.hosts == "b"
    assert found.advice.startswith("install the same versions")


class TestAddresses:
    def test_loopback_across_hosts_is_a_finding_that_names_host_and_interface(self):
        places = (*PLACES[:2], *map(on_loopback_address, PLACES[2:]))

        report = unreachable_report(places, torch.device("cpu"))

        (finding,) = report.findings
        assert finding.answer == (
            "the ranks are on 2 hosts, but gloo makes ranks 2, 3 on b reachable at 127.0.1.1 (lo), the loopback interface, "
            "where no other host can connect"
        )
        assert (finding.ranks, finding.hosts) == ((2, 3), "b")
        assert "GLOO_SOCKET_IFNAME" in finding.advice
        assert not report.is_healthy

    @pytest.mark.parametrize(
        "places",
        [PLACES, tuple(map(on_loopback_address, PLACES[:2])), tuple(place._replace(address="") for place in PLACES)],
        ids=["real addresses", "one host", "another back-end"],
    )
    def test_nothing_is_found_where_every_rank_can_be_reached(self, places):
        assert unreachable_report(places, torch.device("cpu")) is None

    def test_ranks_that_are_no_grid_of_hosts_are_a_note(self):
        fact = address_fact([PLACES[0], PLACES[2], PLACES[1], PLACES[3]])

        assert fact.status is Status.NOTE
        assert fact.answer.startswith(
            "ranks of one host are not neighbours, so there can be no replicas by host: a: ranks 0, 2"
        )


class TestClocks:
    def rounds(self, ahead_s):
        """A first meeting to which rank 1 comes 3 s late, then two at which all are there at once."""
        meetings = ((0, 3, 0, 0), (0,) * 4, (0,) * 4)
        return [[100.0 + ahead + late for ahead, late in zip(ahead_s, lates, strict=True)] for lates in meetings]

    def test_clocks_that_agree_hold_although_a_rank_came_late_once(self):
        fact = clock_fact(HOSTS, self.rounds([0.0, 0.0, 0.2, 0.2]))

        assert (fact.status, fact.answer) == (Status.HOLDS, "within 200.00 ms on 2 hosts")

    @pytest.mark.parametrize(("ahead_s", "status"), [(-4.0, Status.NOTE), (-12.0, Status.FINDING)])
    def test_a_host_that_is_behind_is_named_and_a_finding_from_ten_seconds_on(self, ahead_s, status):
        fact = clock_fact(HOSTS, self.rounds([0.0, 0.0, ahead_s, ahead_s]))

        assert fact.status is status
        assert fact.answer == f"b is {-ahead_s:.1f} s behind a"
        assert fact.ranks == (2, 3)

    def test_of_three_hosts_the_one_that_is_off_is_named_even_if_it_is_the_first(self):
        fact = clock_fact(HostMap(("a", "b", "c", "d")), self.rounds([60.0, -0.1, 0.0, 0.1]))

        assert fact.answer == "a is 60.0 s ahead of c"
        assert fact.ranks == (0,)
