"""What one rank counts between two fences, and what it finds in its bucket groups."""

import math

import pytest
import torch
from bucket_ranks import bucket_ranks

from megabucket.ddp.step_report import Failure, LateGrads, ModelChange, NonFinite, StepReport, UnusedParams
from megabucket.ddp.step_tally import StepTally, keeps_grads, nonfinite_params, unused_params

FAILURE = Failure("forward", "ValueError: boom")
CHANGE = ModelChange("main_grad", params=("a",))
LATE = LateGrads(("a",), bucket=1, phase="in flight")
UNUSED = UnusedParams(("b",), bucket=0)
NONFINITE = NonFinite("a", bucket=1, finding="nan", num_others=0)


def report_of(tally, *, force_all_reduce=False, is_committing=False, nonfinite=None):
    return tally.report(force_all_reduce=force_all_reduce, is_committing=is_committing, nonfinite=nonfinite)


def skipped(tally):
    return report_of(tally).num_skipped_forwards


def filled():
    tally = StepTally(2, counts_skipped_forwards=True)
    tally.step_number, tally.num_microbatches, tally.num_dropped_steps, tally.num_updates = 10, 3, 4, 5
    tally.keeps_reduced_grads = True
    tally.failure, tally.change, tally.late, tally.unused = FAILURE, CHANGE, LATE, UNUSED
    tally.begin_forward()
    return tally


class TestCounts:
    def test_a_rank_that_has_done_nothing_reports_nothing(self):
        report = report_of(StepTally(2, counts_skipped_forwards=True))

        assert report == StepReport(2)
        assert repr(report) == repr(StepReport(2))  # tells False from 0 and None

    def test_a_report_has_every_count_and_finding_in_its_place(self):
        report = report_of(filled(), force_all_reduce=True, is_committing=True, nonfinite=NONFINITE)

        assert report == StepReport(
            rank=2,
            step_number=10,
            num_microbatches=3,
            num_skipped_forwards=1,
            num_dropped_steps=4,
            num_updates=5,
            keeps_reduced_grads=True,
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

        expected = StepReport(2, step_number=10, num_skipped_forwards=1)
        assert report_of(tally) == expected
        assert repr(report_of(tally)) == repr(expected)

    def test_after_a_dropped_step_only_the_step_number_is_left(self):
        tally = filled()

        tally.start_over()

        assert repr(report_of(tally)) == repr(StepReport(2, step_number=10))

    def test_what_was_found_about_forgotten_gradients_is_forgotten_with_them(self):
        tally = filled()

        tally.forget_grads()

        expected = StepReport(
            2,
            step_number=10,
            num_skipped_forwards=1,
            num_dropped_steps=4,
            num_updates=5,
            failure=FAILURE,
            change=CHANGE,
            unused=UNUSED,
        )
        assert repr(report_of(tally)) == repr(expected)


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


class TestKeptGradients:
    def after_a_step(self, **values):
        """A rank whose gradients of the last step are still in place."""
        _, (rank,) = bucket_ranks(1)
        rank.bring(**values)
        return rank

    def test_gradients_that_are_still_in_place_are_kept(self):
        assert keeps_grads(self.after_a_step(a=1, b=1, c=1, d=1).groups) is True

    @pytest.mark.parametrize("name", "abcd")
    def test_one_is_enough(self, name):
        assert keeps_grads(self.after_a_step(**{name: 1}).groups) is True

    def test_without_any_nothing_is_kept(self):
        assert keeps_grads(self.after_a_step().groups) is False

    def test_zeroed_gradients_are_not_kept(self):
        assert keeps_grads(self.after_a_step(a=0, b=0, c=0, d=0).groups) is False

    @pytest.mark.parametrize("value", [-1.0, 1e-44, math.inf, math.nan])
    def test_one_value_in_one_of_them_is_enough_however_small(self, value):
        rank = self.after_a_step(a=0, b=0, c=0, d=0)
        rank.slots["a"].view[3] = value

        assert keeps_grads(rank.groups) is True

    def test_a_place_whose_gradient_was_cleared_keeps_nothing(self):
        rank = self.after_a_step(a=1)
        rank.params["a"].grad = None

        assert torch.all(rank.slots["a"].view == 1)
        assert keeps_grads(rank.groups) is False

    def test_a_gradient_of_the_callers_own_is_not_one_of_the_last_step(self):
        rank = self.after_a_step(a=1)
        rank.params["a"].grad = torch.ones(4)

        assert keeps_grads(rank.groups) is False
