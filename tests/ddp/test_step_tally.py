"""What one rank counts between two fences, and what it finds in its bucket groups."""

import math

import numpy as np
import pytest
import torch
from bucket_ranks import bucket_ranks

from megabucket.ddp.fence import (
    Failure,
    LateGrads,
    ModelChange,
    NonFinite,
    StepReport,
    StepTally,
    UnusedParams,
    nonfinite_params,
    step_number_of,
    unused_params,
)
from megabucket.errors import ConfigError

FAILURE = Failure("forward", "ValueError: boom")
CHANGE = ModelChange("main_grad", params=("a",))
LATE = LateGrads(("a",), bucket=1, phase="in flight")
UNUSED = UnusedParams(("b",), bucket=0)
NONFINITE = NonFinite("a", bucket=1, finding="nan", num_others=0)
HYPERPARAMETERS = (("lr of group 0", 0.25),)


def report_of(tally, *, force_all_reduce=False, is_committing=False, nonfinite=None):
    return tally.report(force_all_reduce=force_all_reduce, is_committing=is_committing, nonfinite=nonfinite)


NOTHING = report_of(StepTally(0, counts_skipped_forwards=True)).checksum


def skipped(tally):
    return report_of(tally).num_skipped_forwards


def filled():
    tally = StepTally(2, counts_skipped_forwards=True)
    tally.step_number, tally.num_microbatches, tally.num_dropped_steps, tally.num_updates = 10, 3, 4, 5
    tally.num_loads, tally.kept, tally.grad_scale = 6, ("a",), 0.5
    tally.hyperparameters = HYPERPARAMETERS
    tally.failure, tally.change, tally.late, tally.unused = FAILURE, CHANGE, LATE, UNUSED
    tally.begin_forward()
    return tally


class TestCounts:
    def test_a_rank_that_has_done_nothing_reports_nothing(self):
        report = report_of(StepTally(2, counts_skipped_forwards=True))

        expected = StepReport(2, checksum=NOTHING)
        assert report == expected
        assert repr(report) == repr(expected)  # tells False from 0 and None

    def test_a_report_has_every_count_and_finding_in_its_place(self):
        report = report_of(filled(), force_all_reduce=True, is_committing=True, nonfinite=NONFINITE)

        assert report == StepReport(
            rank=2,
            step_number=10,
            num_microbatches=3,
            num_skipped_forwards=1,
            num_dropped_steps=4,
            num_updates=5,
            checksum=report.checksum,
            num_loads=6,
            kept=("a",),
            hyperparameters=("lr of group 0=0.25", "scale_gradients()=0.5"),
            is_committing=True,
            force_all_reduce=True,
            failure=FAILURE,
            change=CHANGE,
            late=LATE,
            unused=UNUSED,
            nonfinite=NONFINITE,
        )

    def test_after_a_fence_only_the_step_number_and_open_forwards_are_left(self):
        tally = filled()

        tally.start_step()

        expected = StepReport(2, step_number=10, num_skipped_forwards=1, checksum=NOTHING)
        assert report_of(tally) == expected
        assert repr(report_of(tally)) == repr(expected)

    def test_after_a_dropped_step_only_the_step_number_is_left(self):
        tally = filled()

        tally.start_over()

        assert repr(report_of(tally)) == repr(StepReport(2, step_number=10, checksum=NOTHING))

    def test_what_was_found_about_forgotten_gradients_is_forgotten_with_them(self):
        tally = filled()

        tally.forget_grads()

        expected = StepReport(
            2,
            step_number=10,
            num_skipped_forwards=1,
            num_dropped_steps=4,
            num_updates=5,
            checksum=report_of(tally).checksum,
            num_loads=6,
            failure=FAILURE,
            change=CHANGE,
            unused=UNUSED,
        )
        assert tally.grad_scale == 1.0
        assert repr(report_of(tally)) == repr(expected)


class TestChecksum:
    """What has to be equal on all ranks, and is too long for the fence."""

    def tally(self):
        return StepTally(0, counts_skipped_forwards=True)

    def test_it_fits_into_an_integer_that_has_a_negative(self):
        tally, checksums = self.tally(), set()
        for num_loads in range(100):
            tally.num_loads = num_loads
            checksums.add(report_of(tally).checksum)

        assert len(checksums) == 100
        assert min(checksums) >= 0
        assert max(checksums) < 2**62

    @pytest.mark.parametrize(
        "change",
        [{"num_loads": 1}, {"kept": ("a",)}, {"hyperparameters": HYPERPARAMETERS}, {"grad_scale": 0.5}],
        ids=lambda change: next(iter(change)),
    )
    def test_it_tells_each_fact_from_nothing(self, change):
        tally = self.tally()
        before = report_of(tally, is_committing=True).checksum

        for name, value in change.items():
            setattr(tally, name, value)

        assert report_of(tally, is_committing=True).checksum != before

    @pytest.mark.parametrize("names", [("a", "b"), ("ab",)], ids=str)
    def test_it_tells_which_gradients_were_kept(self, names):
        tally = self.tally()
        tally.kept = ("a",)
        before = report_of(tally).checksum

        tally.kept = names

        assert report_of(tally).checksum != before

    def test_of_interrupted_gradients_it_tells_whether_there_are_any(self):
        tally = self.tally()

        checksums = [
            tally.report(force_all_reduce=False, is_committing=False, nonfinite=None, interrupted=names).checksum
            for names in [(), ("a",), ("b", "c")]
        ]

        assert checksums[0] == NOTHING
        assert checksums[1] == checksums[2] != NOTHING

    def test_the_numbers_of_an_update_to_come_count_only_where_it_comes(self):
        tally = self.tally()
        tally.hyperparameters = HYPERPARAMETERS

        assert report_of(tally).checksum == NOTHING
        assert report_of(tally, is_committing=True).checksum != NOTHING

    def test_the_numbers_of_updates_since_the_last_fence_count_whatever_their_order(self):
        first, second = (("lr of group 0", 1.0),), (("lr of group 0", 2.0),)
        checksums = []
        for updates in [(first, second), (second, first), (first, first)]:
            tally = self.tally()
            for numbers in updates:
                tally.note_update(numbers)
            tally.num_updates = 0
            checksums.append(report_of(tally).checksum)

        assert checksums[0] == checksums[1] != checksums[2]

    def test_an_update_whose_numbers_were_compared_only_counts(self):
        tally = self.tally()

        tally.note_update(())

        assert (report_of(tally).num_updates, report_of(tally).checksum) == (1, NOTHING)

    def test_a_report_that_is_exchanged_says_what_it_is_of(self):
        tally = self.tally()
        tally.note_update(HYPERPARAMETERS)
        tally.grad_scale = 0.5
        tally.note_update(HYPERPARAMETERS)

        detailed = tally.report(force_all_reduce=False, is_committing=False, nonfinite=None, is_detailed=True)

        assert report_of(tally).hyperparameters == ()
        assert detailed.hyperparameters == (
            "lr of group 0 in update 0=0.25",
            "scale_gradients() in update 0=0.5",
            "lr of group 0 in update 1=0.25",
            "scale_gradients() in update 1=1.0",
        )
        assert detailed.checksum == report_of(tally).checksum

    def test_after_a_fence_updates_are_compared_anew(self):
        tally = self.tally()
        tally.note_update(HYPERPARAMETERS)

        tally.start_step()

        assert report_of(tally).checksum == NOTHING


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
        tally = StepTally(0, counts_skipped_forwards=True)
        tally.begin_forward()
        note_first = tally.reached_forward()
        tally.begin_forward()
        tally.reached_forward()

        before = skipped(tally)
        note_first()

        assert (before, skipped(tally)) == (2, 1)

    def test_a_backward_that_reaches_a_forward_again_counts_once(self):
        tally = StepTally(0, counts_skipped_forwards=True)
        for _ in range(3):
            tally.begin_forward()
        note = tally.reached_forward()

        for _ in range(3):
            note()

        assert skipped(tally) == 2

    def test_forwards_from_before_a_dropped_step_do_not_count_any_more(self):
        tally = StepTally(0, counts_skipped_forwards=True)
        tally.begin_forward()
        note = tally.reached_forward()
        tally.start_over()
        tally.begin_forward()

        note()

        assert skipped(tally) == 1

    def test_each_dropped_step_makes_the_forwards_before_it_old(self):
        tally = StepTally(0, counts_skipped_forwards=True)
        notes = []
        for _ in range(3):
            tally.begin_forward()
            notes.append(tally.reached_forward())
            tally.start_over()
        tally.begin_forward()

        for note in notes:
            note()

        assert skipped(tally) == 1

    def test_a_fence_leaves_open_forwards_open(self):
        tally = StepTally(0, counts_skipped_forwards=True)
        tally.begin_forward()
        note = tally.reached_forward()

        tally.start_step()
        before = skipped(tally)
        note()

        assert (before, skipped(tally)) == (1, 0)

    def test_forwards_are_not_reported_where_they_do_not_count(self):
        tally = StepTally(0, counts_skipped_forwards=False)
        tally.begin_forward()

        assert skipped(tally) == 0


def test_late_gradients_are_listed_once_each_with_the_bucket_and_phase_of_the_first():
    tally = StepTally(0, counts_skipped_forwards=True)

    for param, bucket, phase in [("c", 1, "in flight"), ("a", 0, "already reduced"), ("c", 1, "in flight")]:
        tally.note_late(param, bucket=bucket, phase=phase)

    assert tally.late == LateGrads(("c", "a"), bucket=1, phase="in flight")


class TestUnused:
    def test_a_step_with_all_gradients_has_none(self):
        _, (rank,) = bucket_ranks(1)
        rank.bring(a=1, b=1, c=1, d=1)
        rank.send()

        assert unused_params(rank.groups, had_local_grads=True) is None
        assert unused_params(rank.groups, had_local_grads=False) is None

    def test_parameters_without_a_gradient_are_named_in_launch_order_with_the_bucket_of_the_first(self):
        _, (rank,) = bucket_ranks(1)
        rank.bring(c=1, d=1)
        rank.send()

        assert unused_params(rank.groups, had_local_grads=True) == UnusedParams(("b", "a"), bucket=1)

    def test_both_groups_may_have_some(self):
        _, (rank,) = bucket_ranks(1)
        rank.bring(c=1, a=1)
        rank.send()

        assert unused_params(rank.groups, had_local_grads=True) == UnusedParams(("d", "b"), bucket=0)

    def test_without_a_backward_what_stands_in_zeroed_places_counts_and_old_values_do_not(self):
        _, (rank,) = bucket_ranks(1)
        rank.bring(a=1, b=1, c=1, d=1)
        rank.send()
        rank.start_over()
        for name in "abc":  # as zero_grad_buffer() does; d keeps values of the step before
            rank.slots[name].view.zero_()
            rank.slots[name].is_clean = True
        rank.send()

        assert unused_params(rank.groups, had_local_grads=False) == UnusedParams(("d",), bucket=0)
        assert unused_params(rank.groups, had_local_grads=True) == UnusedParams(("d", "c", "b", "a"), bucket=0)


class TestNonFinite:
    def test_finite_gradients_are_no_finding(self):
        _, (rank,) = bucket_ranks(1)
        rank.bring(a=1, b=1, c=1, d=1)
        rank.send()

        assert nonfinite_params(rank.groups) is None

    @pytest.mark.parametrize(
        ("bad", "expected"),
        [
            ("a", NonFinite("a", 1, "inf in 4 of 4 elements, first at [0]", num_others=0)),
            ("ac", NonFinite("c", 0, "inf in 4 of 4 elements, first at [0]", num_others=1)),
            ("abcd", NonFinite("d", 0, "inf in 4 of 4 elements, first at [0]", num_others=3)),
        ],
    )
    def test_the_first_in_launch_order_is_named_and_the_others_are_counted(self, bad, expected):
        _, (rank,) = bucket_ranks(1)
        rank.bring(**{name: math.inf if name in bad else 1 for name in "abcd"})
        rank.send()

        assert nonfinite_params(rank.groups) == expected
