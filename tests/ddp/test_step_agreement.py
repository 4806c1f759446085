"""One fence after another: what a step ends with on every rank, and with what the next one begins."""

import math

import pytest
import torch
from bucket_ranks import bucket_ranks
from megabucket.ddp.step_agreement import StepAgreement

from megabucket.config import DistributedDataParallelConfig
from megabucket.ddp.fence import UnusedParams
from megabucket.errors import (
    InvariantError,
    MicrobatchMismatchError,
    NonFiniteGradientError,
    PeerFailedError,
    ScheduleMismatchError,
    UnusedParameterError,
)


class Ranks:
    """The agreements of a world; ``agree`` takes all ranks through one fence."""

    def __init__(self, size=2, **switches):
        self.world, self.buckets = bucket_ranks(size)
        config = DistributedDataParallelConfig(**switches)
        self.agreements = [StepAgreement(rank.groups, config) for rank in self.buckets]

    def agree(self, launch=None):
        """Launch on every rank, by ``launch(rank, agreement)``, and conclude."""

        def play(rank):
            agreement = self.agreements[rank]
            if launch is None:
                agreement.launch(force_all_reduce=False)
            else:
                launch(rank, agreement)
            return agreement.conclude()

        return self.world.run(play)

    def send(self, *values):
        """Send a step of gradients, the same four for a rank that is not told otherwise."""
        for rank, value in zip(self.buckets, values, strict=True):
            rank.bring(**({"a": 1, "b": 1, "c": 1, "d": 1} | value))
            rank.send()

    def start_over(self):
        for rank in self.buckets:
            rank.start_over()


def said(errors):
    return [error.to_dict() for error in errors]


class TestWholeSteps:
    def test_a_step_is_counted_when_all_ranks_are_whole(self):
        ranks = Ranks()

        errors = [ranks.agree() for _ in range(3)]

        assert errors == [[None, None]] * 3
        assert [agreement.step for agreement in ranks.agreements] == [3, 3]
        assert [agreement.last_error for agreement in ranks.agreements] == [None, None]
        assert [agreement.skip_reason for agreement in ranks.agreements] == ["", ""]

    def test_before_the_first_step_there_is_nothing_to_tell(self):
        (agreement,) = Ranks(1).agreements

        assert (agreement.step, agreement.last_error, agreement.skip_reason) == (0, None, "")

    def test_one_group_is_enough(self):
        _, (rank,) = bucket_ranks(1)

        agreement = StepAgreement(rank.groups[:1], DistributedDataParallelConfig())
        agreement.launch(force_all_reduce=False)

        assert agreement.conclude() is None

    def test_a_fence_is_pending_from_launch_to_conclusion(self):
        (agreement,) = Ranks(1).agreements
        before = agreement.is_pending

        agreement.launch(force_all_reduce=False)
        between = agreement.is_pending
        agreement.conclude()

        assert (before, between, agreement.is_pending) == (False, True, False)

    def test_a_fence_that_was_not_launched_cannot_be_concluded(self):
        (agreement,) = Ranks(1).agreements

        with pytest.raises(InvariantError, match=r"^there is no fence to conclude$"):
            agreement.conclude()

    def test_the_next_step_counts_anew_but_for_open_forwards(self):
        ranks = Ranks()
        for agreement in ranks.agreements:
            agreement.tally.num_microbatches = 2
            agreement.tally.begin_forward()
        ranks.agreements[0].step = ranks.agreements[1].step = 5

        ranks.agree()
        ranks.agreements[0].tally.start_over()  # forgets the forward, which the other rank still has open
        (error, _) = ranks.agree()

        assert "step 6: training forwards that no backward has reached differ between ranks: 0 on rank 0; 1 on rank 1" in str(
            error
        )

    def test_what_is_not_said_is_neither_committing_nor_a_second_fence(self):
        ranks = Ranks()

        errors = ranks.agree(
            lambda rank, agreement: (
                agreement.launch(force_all_reduce=False)
                if rank
                else agreement.launch(force_all_reduce=False, is_committing=False, ends_step=True)
            )
        )

        assert errors == [None, None]
        assert [agreement.step for agreement in ranks.agreements] == [1, 1]

    def test_a_second_fence_does_not_end_the_step(self):
        ranks = Ranks()

        ranks.agree()
        ranks.agree(lambda _, agreement: agreement.launch(force_all_reduce=False, is_committing=True, ends_step=False))

        assert [agreement.step for agreement in ranks.agreements] == [1, 1]

    def test_the_step_number_and_the_last_error_outlive_a_rebuild(self):
        (old,), (new,) = Ranks(1).agreements, Ranks(1).agreements
        old.step, old.last_error, old.tally.step_number, old.tally.num_microbatches = 7, InvariantError("x"), 70, 2

        new.continue_from(old)

        assert (new.step, new.last_error, new.tally.step_number, new.tally.num_microbatches) == (7, old.last_error, 70, 0)


class TestDroppedSteps:
    def test_ranks_that_disagree_have_the_same_error_and_the_next_step_may_run(self):
        ranks = Ranks()
        ranks.agree()
        ranks.agreements[1].tally.num_microbatches = 1

        errors = ranks.agree()
        last_errors = [agreement.last_error for agreement in ranks.agreements]
        following = ranks.agree()

        assert said(errors) == said([MicrobatchMismatchError(step=1, by_rank=(0, 1))] * 2)
        assert last_errors == errors
        assert following == [None, None]
        assert [agreement.last_error for agreement in ranks.agreements] == errors  # until the next error
        assert [agreement.step for agreement in ranks.agreements] == [3, 3]

    def test_forwards_of_a_dropped_step_are_forgotten(self):
        ranks = Ranks()
        ranks.agreements[0].tally.begin_forward()
        (error, _) = ranks.agree()

        assert "training forwards that no backward has reached" in str(error)
        assert ranks.agree() == [None, None]

    @pytest.mark.parametrize(("policy", "is_error"), [("error", True), ("allow", False)])
    def test_skipped_forwards_are_compared_where_the_config_says_so(self, policy, is_error):
        ranks = Ranks(skipped_forwards=policy)
        ranks.agreements[0].tally.begin_forward()

        assert [error is not None for error in ranks.agree()] == [is_error] * 2

    @pytest.mark.parametrize("field", ["force_all_reduce", "is_committing"])
    def test_ranks_that_do_not_launch_alike_are_told(self, field):
        ranks = Ranks()

        errors = ranks.agree(lambda rank, agreement: agreement.launch(**({"force_all_reduce": False} | {field: rank == 1})))

        assert [type(error) for error in errors] == [ScheduleMismatchError] * 2
        assert errors[0].by_rank == (0, 1)

    def test_an_error_of_a_second_fence_is_about_the_step_that_was_counted_already(self):
        ranks = Ranks()
        for _ in range(3):
            ranks.agree()

        errors = ranks.agree(
            lambda rank, agreement: agreement.launch(force_all_reduce=False, is_committing=rank == 1, ends_step=False)
        )

        assert [error.step for error in errors] == [2, 2]  # counted from 0: the third
        assert [agreement.step for agreement in ranks.agreements] == [3, 3]

    def test_texts_count_the_buckets(self):
        ranks = Ranks()
        ranks.agreements[1].tally.unused = UnusedParams(("a",), bucket=1)

        errors = ranks.agree()

        assert said(errors) == said(
            [UnusedParameterError(step=0, ranks=(1,), params=("a",), bucket=1, num_buckets=2, num_ranks=2)] * 2
        )

    def test_without_a_fence_a_rank_asks_nobody(self):
        ranks = Ranks(fence=False)
        ranks.agreements[0].tally.num_microbatches = 1
        ranks.agreements[1].tally.unused = UnusedParams(("a",), bucket=1)

        errors = ranks.agree()

        assert errors[0] is None
        assert said(errors[1:]) == said(
            [UnusedParameterError(step=0, ranks=(1,), params=("a",), bucket=1, num_buckets=2, num_ranks=1)]
        )
        assert ranks.world.schedule(0) == ()


class TestFailures:
    @pytest.mark.parametrize(
        ("error", "cause"),
        [
            (ValueError("boom"), "ValueError: boom"),
            ("the caller gave up", "the caller gave up"),
            (
                None,
                (
                    "an exception that autograd keeps to itself; it stands in the log of that rank, and would stand here "
                    "inside `with ddp.step():`"
                ),
            ),
        ],
    )
    def test_a_rank_that_cannot_finish_tells_all_why(self, error, cause):
        ranks = Ranks()

        errors = ranks.agree(
            lambda rank, agreement: (
                agreement.launch_failure("backward", error, force_all_reduce=False, ends_step=True)
                if rank == 1
                else agreement.launch(force_all_reduce=False)
            )
        )

        assert said(errors) == said([PeerFailedError(step=0, rank=1, phase="backward", cause=cause)] * 2)
        assert ranks.agree() == [None, None]
        assert [agreement.step for agreement in ranks.agreements] == [2, 2]

    def test_a_failure_in_a_second_fence_does_not_end_the_step_again(self):
        ranks = Ranks()
        ranks.agree()

        errors = ranks.agree(
            lambda _, agreement: agreement.launch_failure("optimizer", "gone", force_all_reduce=False, ends_step=False)
        )

        assert said(errors) == said([PeerFailedError(step=0, rank=0, phase="optimizer", cause="gone")] * 2)
        assert [agreement.step for agreement in ranks.agreements] == [1, 1]


class TestNonFinite:
    def test_a_nan_of_one_rank_is_the_error_of_all(self):
        ranks = Ranks()
        ranks.send({}, {"a": math.nan, "c": math.inf})

        errors = ranks.agree()

        assert said(errors) == said(
            [
                NonFiniteGradientError(
                    step=0,
                    rank=1,
                    param="c",
                    bucket=0,
                    num_buckets=2,
                    finding="inf in 4 of 4 elements, first at [0]",
                    num_others=1,
                )
            ]
            * 2
        )

    def test_a_step_may_be_left_out_on_all_ranks_instead(self):
        ranks = Ranks(nonfinite_gradients="skip_step")
        for agreement in ranks.agreements:
            agreement.tally.begin_forward()
        ranks.send({}, {"a": math.nan})

        errors = ranks.agree()
        reasons = [agreement.skip_reason for agreement in ranks.agreements]

        assert errors == [None, None]
        assert reasons[0] == reasons[1]
        assert reasons[0].startswith("step 0: the gradient of 'a' on rank 1 (bucket 1 of 2, counted from 0) has nan in 4 of 4")
        assert [agreement.last_error for agreement in ranks.agreements] == [None, None]
        assert [agreement.step for agreement in ranks.agreements] == [1, 1]
        # The step was whole: its forwards stay open, and only whole steps take the reason away.
        assert [agreement.tally._num_skipped_forwards for agreement in ranks.agreements] == [1, 1]
        ranks.start_over()
        ranks.send({}, {})
        assert ranks.agree() == [None, None]
        assert [agreement.skip_reason for agreement in ranks.agreements] == ["", ""]

    def test_no_other_error_is_left_out(self):
        ranks = Ranks(nonfinite_gradients="skip_step")
        ranks.agreements[1].tally.num_microbatches = 1

        assert [type(error) for error in ranks.agree()] == [MicrobatchMismatchError] * 2

    def test_what_only_the_device_knows_is_named_after_the_fence(self):
        ranks = Ranks()
        ranks.send({}, {})
        # As on a device: a flag that the host has not read, and no names yet.
        ranks.buckets[1].slots["b"].view[2] = math.nan
        ranks.buckets[1].groups[1].finite_test.flag = torch.tensor(True)
        ranks.buckets[1].groups[0].finite_test.flag = torch.tensor(False)
        # The reduction has brought it to the other rank, too, whose own gradient was finite.
        ranks.buckets[0].slots["b"].view[2] = math.nan
        ranks.buckets[0].groups[1].finite_test.flag = torch.tensor(False)

        errors = ranks.agree()

        assert said(errors) == said(
            [
                NonFiniteGradientError(
                    step=0,
                    rank=1,
                    param="b",
                    bucket=1,
                    num_buckets=2,
                    finding="nan in 1 of 4 elements, first at [2]",
                )
            ]
            * 2
        )

    def test_flags_that_are_down_are_no_finding(self):
        ranks = Ranks()
        ranks.send({}, {})
        for group in ranks.buckets[1].groups:
            group.finite_test.flag = torch.tensor(False)

        assert ranks.agree() == [None, None]

    def test_a_fence_that_breaks_without_a_reason_is_our_bug(self):
        ranks = Ranks(1)
        ranks.agree()
        ranks.buckets[0].groups[0].finite_test.flag = torch.tensor(True)  # but all values are finite

        with pytest.raises(InvariantError, match=r"^\[rank 0\] the fence of step 1 does not hold, but no rank says why$"):
            ranks.agree()
