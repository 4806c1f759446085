"""What one rank counts and finds between two fences, and what its report says of it."""

import math

import numpy as np
import pytest
import torch

from megabucket.ddp.report import Problem, RankReport, StepCounters, describe, step_number_of
from megabucket.errors import ConfigError

HYPERPARAMETERS = (("lr of group 0", 0.25),)


def counters(rank=0, **switches):
    return StepCounters(rank, **({"counts_skipped_forwards": True} | switches))


def report_of(counted, *, force_all_reduce=False, is_committing=False, sent_buckets=False, **kwargs):
    return counted.report(force_all_reduce=force_all_reduce, is_committing=is_committing, sent_buckets=sent_buckets, **kwargs)


NOTHING = report_of(counters()).fingerprint


def skipped(counted):
    return report_of(counted).num_skipped_forwards


def filled():
    """Counters of rank 2 that have counted and found something of every kind."""
    counted = counters(2)
    counted.step_number, counted.num_microbatches, counted.kept = 10, 3, ("a",)
    counted.hyperparameters = HYPERPARAMETERS
    counted.num_open_forwards = 1
    for _ in range(4):
        counted.note_dropped_step()
    for _ in range(5):
        counted.note_update(())
    for _ in range(6):
        counted.note_load()
    counted.note_grad_scale(2.0)
    counted.note_grad_scale(0.25)
    counted.note_missed_update("x")
    counted.note_failure("forward", "ValueError: boom")
    counted.note_late("a", bucket=1, num_buckets=2, phase="in flight")
    return counted


class TestCounts:
    def test_a_rank_that_has_done_nothing_reports_nothing(self):
        report = report_of(counters(2))

        expected = RankReport(2, fingerprint=NOTHING)
        assert report == expected
        assert repr(report) == repr(expected)  # tells False from 0 and None

    def test_a_report_has_every_count_and_finding_in_its_place(self):
        counted = filled()

        report = report_of(counted, force_all_reduce=True, is_committing=True, sent_buckets=True)

        assert report == RankReport(
            rank=2,
            sent_buckets=True,
            problems=tuple(counted.problems.values()),
            fingerprint=report.fingerprint,
            step_number=10,
            num_microbatches=3,
            num_skipped_forwards=1,
            num_dropped_steps=4,
            num_updates=5,
            missed_update="x",
            num_loads=6,
            kept=("a",),
            hyperparameters=((*HYPERPARAMETERS, ("scale_gradients()", 0.5)),),
            is_committing=True,
            force_all_reduce=True,
        )
        assert [problem.kind for problem in report.problems] == ["PeerFailedError", "LateGradientError"]

    def test_nobody_is_asked_to_stop_at_first(self):
        assert (counters().wants_stop, counters().stop_is_wanted) == (False, False)

    def test_the_report_of_a_call_has_what_tells_of_updates(self):
        fields = {"problems": (Problem("PeerFailedError", {}),), "fingerprint": 7}

        report = filled().call_report("wrap", **fields)

        assert report == RankReport(2, "wrap", num_updates=5, missed_update="x", **fields)

    def test_after_a_rebuild_settings_and_updates_are_those_of_before(self):
        old, rebuilt = filled(), counters(2)
        old.note_update(HYPERPARAMETERS)
        old.wants_stop = old.stop_is_wanted = True

        rebuilt.continue_from(old)
        old.note_update(HYPERPARAMETERS)  # the old one is of no matter any more

        report = report_of(rebuilt)
        numbers = (*HYPERPARAMETERS, ("scale_gradients()", 0.5))
        assert report == RankReport(
            2, fingerprint=report.fingerprint, step_number=10, num_updates=6, missed_update="x", hyperparameters=(numbers,)
        )
        assert (rebuilt.wants_stop, rebuilt.stop_is_wanted) == (True, True)

    def test_after_a_fence_only_the_step_number_and_open_forwards_are_left(self):
        counted = filled()

        counted.start_step()

        numbers = {"step_number": 10, "num_skipped_forwards": 1}
        assert {name: getattr(report_of(counted), name) for name in numbers} == numbers
        assert report_of(counted, is_committing=True).hyperparameters == ((*HYPERPARAMETERS, ("scale_gradients()", 1.0)),)
        assert repr(report_of(counted)) == repr(RankReport(2, fingerprint=report_of(counted).fingerprint, **numbers))

    def test_after_a_dropped_step_only_the_step_number_is_left(self):
        counted = filled()

        counted.start_step(is_over=True)

        assert repr(report_of(counted)) == repr(RankReport(2, step_number=10, fingerprint=report_of(counted).fingerprint))

    def test_what_was_found_about_forgotten_gradients_is_forgotten_with_them(self):
        counted = filled()

        counted.forget_grads()

        report = report_of(counted, is_committing=True)
        assert (report.num_microbatches, report.kept) == (0, ())
        assert report.hyperparameters == ((*HYPERPARAMETERS, ("scale_gradients()", 1.0)),)
        assert [problem.kind for problem in report.problems] == ["PeerFailedError"]
        assert (report.num_dropped_steps, report.num_updates, report.num_loads) == (4, 5, 6)

    def test_without_a_finding_there_is_nothing_to_forget(self):
        counted = counters()

        counted.forget_grads()

        assert report_of(counted).fingerprint == NOTHING

    def test_a_broadcast_makes_loads_of_some_ranks_harmless(self):
        counted = filled()

        counted.note_broadcast()

        assert report_of(counted).num_loads == 0

    def test_the_first_cause_of_a_failure_counts_unless_a_later_one_is_certain(self):
        causes = []
        for certainty in ({}, {"is_certain": True}):
            counted = counters()
            counted.note_failure("forward", "first")
            counted.note_failure("backward", "second", **certainty)
            causes.append(counted.problems["failure"].fields)

        assert causes == [{"phase": "forward", "cause": "first"}, {"phase": "backward", "cause": "second"}]


class TestFingerprint:
    """Of what has to be equal on all ranks."""

    def test_it_fits_into_an_integer_that_has_a_negative(self):
        counted, fingerprints = counters(), set()
        for _ in range(100):
            counted.note_load()
            fingerprints.add(report_of(counted).fingerprint)

        assert len(fingerprints) == 100
        assert min(fingerprints) >= 0
        assert max(fingerprints) < 2**62

    @pytest.mark.parametrize("is_committing", [False, True])
    def test_it_is_the_same_for_the_same_step_of_another_rank(self, is_committing):
        first, second = filled(), filled()
        second._rank = 3

        prints = [report_of(one, is_committing=is_committing).fingerprint for one in (first, second)]

        assert prints[0] == prints[1]

    @pytest.mark.parametrize(
        "change",
        [
            lambda counted: counted.note_load(),
            lambda counted: counted.note_dropped_step(),
            lambda counted: counted.note_update(()),
            lambda counted: counted.note_grad_scale(0.5),
            lambda counted: setattr(counted, "kept", ("a",)),
            lambda counted: setattr(counted, "hyperparameters", HYPERPARAMETERS),
            lambda counted: setattr(counted, "step_number", 3),
            lambda counted: setattr(counted, "num_microbatches", 1),
            lambda counted: setattr(counted, "num_open_forwards", 1),
        ],
        ids=["load", "drop", "update", "scale", "kept", "hyperparameters", "step number", "microbatches", "forwards"],
    )
    def test_it_tells_each_fact_from_nothing(self, change):
        counted = counters()
        before = report_of(counted, is_committing=True).fingerprint

        change(counted)

        assert report_of(counted, is_committing=True).fingerprint != before

    @pytest.mark.parametrize("flag", ["is_committing", "force_all_reduce", "sent_buckets"])
    def test_it_tells_how_a_step_ends(self, flag):
        assert report_of(counters(), **{flag: True}).fingerprint != NOTHING

    @pytest.mark.parametrize("names", [("a", "b"), ("ab",)], ids=str)
    def test_it_tells_which_gradients_were_kept(self, names):
        counted = counters()
        counted.kept = ("a",)
        before = report_of(counted).fingerprint

        counted.kept = names

        assert report_of(counted).fingerprint != before

    def test_the_numbers_of_an_update_to_come_count_only_where_it_comes(self):
        counted = counters()
        counted.hyperparameters = HYPERPARAMETERS

        assert report_of(counted).fingerprint == NOTHING
        assert report_of(counted, is_committing=True).fingerprint != report_of(counters(), is_committing=True).fingerprint

    @pytest.mark.parametrize("other", [2.0, math.nan])
    def test_the_numbers_of_updates_since_the_last_fence_count_whatever_their_order(self, other):
        first, second = (("lr of group 0", 1.0),), (("lr of group 0", other),)
        fingerprints = []
        for updates in [(first, second), (second, first), (first, first)]:
            counted = counters()
            for numbers in updates:
                counted.note_update(numbers)
            fingerprints.append(report_of(counted).fingerprint)

        assert fingerprints[0] == fingerprints[1] != fingerprints[2]

    def test_the_numbers_of_16_updates_are_compared_and_all_are_counted(self):
        counted = counters()

        for _ in range(17):
            counted.note_update(HYPERPARAMETERS)

        assert (report_of(counted).num_updates, len(report_of(counted).hyperparameters)) == (17, 16)

    def test_an_update_whose_numbers_were_compared_only_counts(self):
        counted = counters()

        counted.note_update(())

        assert (report_of(counted).num_updates, report_of(counted).hyperparameters) == (1, ())

    def test_a_report_says_by_which_numbers_each_update_was_made(self):
        counted = counters()
        counted.note_update(HYPERPARAMETERS)
        counted.note_grad_scale(0.5)
        counted.note_update(HYPERPARAMETERS)

        sent = RankReport.from_bytes(report_of(counted).to_bytes())

        assert sent.hyperparameters == (
            "lr of group 0 in update 0=0.25",
            "scale_gradients() in update 0=0.5",
            "lr of group 0 in update 1=0.25",
            "scale_gradients() in update 1=1.0",
        )

    def test_after_a_fence_updates_are_compared_anew(self):
        counted = counters()
        counted.note_update(HYPERPARAMETERS)

        counted.start_step()

        assert report_of(counted).fingerprint == NOTHING


class NamelessError(Exception):
    """Somebody's own, whose text cannot be made."""

    def __str__(self):
        raise KeyError("name")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("boom"), "ValueError: boom"),
        ("abort_step()", "abort_step()"),
        (NamelessError(), "NamelessError (its text cannot be made: KeyError)"),
        (
            None,
            (
                "an exception that autograd keeps to itself; it stands in the log of that rank, and would stand here inside "
                "`with ddp.step():`"
            ),
        ),
    ],
    ids=["exception", "text", "without a text", "unknown"],
)
def test_a_failure_is_described_in_reports(error, text):
    assert describe(error) == text


class TestStepNumber:
    @pytest.mark.parametrize(
        ("number", "expected"), [(None, -1), (0, 0), (2**62 - 1, 2**62 - 1), (np.int64(3), 3), (torch.tensor(3), 3)]
    )
    def test_every_integer_is_one(self, number, expected):
        value = step_number_of(number)

        assert value == expected
        assert type(value) is int

    @pytest.mark.parametrize("number", [-1, 2**62, True, 1.5, "3", math.nan, np.float64(1.0), torch.tensor(1.0)], ids=repr)
    def test_nothing_else_is(self, number):
        with pytest.raises(ConfigError, match="step_number must be None or an integer from 0 to"):
            step_number_of(number)


class TestForwards:
    def test_a_forward_is_skipped_until_a_backward_reaches_it(self):
        counted = counters()
        counted.num_open_forwards += 1
        note_first = counted.reached_forward()
        counted.num_open_forwards += 1
        counted.reached_forward()

        before = skipped(counted)
        note_first()

        assert (before, skipped(counted)) == (2, 1)

    def test_a_backward_that_reaches_a_forward_again_counts_once(self):
        counted = counters()
        counted.num_open_forwards = 3
        note = counted.reached_forward()

        for _ in range(3):
            note()

        assert skipped(counted) == 2

    def test_each_dropped_step_makes_the_forwards_before_it_old(self):
        counted = counters()
        notes = []
        for _ in range(3):
            counted.num_open_forwards += 1
            notes.append(counted.reached_forward())
            counted.start_step(is_over=True)
        counted.num_open_forwards += 1

        for note in notes:
            note()

        assert skipped(counted) == 1

    def test_a_fence_leaves_open_forwards_open(self):
        counted = counters()
        counted.num_open_forwards += 1
        note = counted.reached_forward()

        counted.start_step()
        before = skipped(counted)
        note()

        assert (before, skipped(counted)) == (1, 0)

    def test_forwards_are_not_reported_where_they_do_not_count(self):
        counted = counters(counts_skipped_forwards=False)
        counted.num_open_forwards += 1

        assert skipped(counted) == 0


def test_late_gradients_are_listed_once_each_with_the_bucket_and_phase_of_the_first():
    counted = counters()

    for param, bucket, phase in [("c", 1, "in flight"), ("a", 0, "already reduced"), ("c", 1, "in flight")]:
        counted.note_late(param, bucket=bucket, num_buckets=2, phase=phase)

    fields = {"params": ["c", "a"], "bucket": 1, "num_buckets": 2, "phase": "in flight"}
    assert counted.problems["late"].fields == fields
    assert counted.late_phase == "in flight"
