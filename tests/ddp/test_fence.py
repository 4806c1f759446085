"""The fence on the loopback world: what makes it hold or not, and what it sends."""

import pytest
import torch

from megabucket.comm import LocalCommunicator
from megabucket.config import DistributedDataParallelConfig
from megabucket.config.resolve import resolve_step
from megabucket.ddp.calls import open_call
from megabucket.ddp.fence import Fence
from megabucket.ddp.report import Problem, RankReport
from megabucket.errors import CallMismatchError, ConfigError, LayoutMismatchError, PeerFailedError, PhaseError
from megabucket.planning.simulate import FENCE as PLANNED_FENCE
from megabucket.testing import LoopbackWorld

CPU = torch.device("cpu")
FAILED = Problem("PeerFailedError", {"phase": "forward", "cause": "ValueError: boom"})
NONFINITE = Problem("NonFiniteGradientError", {"param": "a"})
FENCE = "fence [all_reduce max of 6 x int64]"  # two pairs and two flags
RECORDS = "step report [all_gather of 32784 x uint8]"  # 2 * (8 + 16384)


def fence_on(communicator, **fields):
    policy = resolve_step(DistributedDataParallelConfig(**fields))
    return Fence(communicator, num_buckets=2, policy=policy, device=CPU)


def ranks_of(size, **fields):
    world = LoopbackWorld(size, timeout_s=5)
    return world, [fence_on(world.communicator(rank), **fields) for rank in range(size)]


def sent(fences, *changes, flags=None):
    """Send one fence on every rank, with its changes of the report."""
    for rank, (fence, change) in enumerate(zip(fences, changes, strict=True)):
        flag = flags[rank] if flags else None
        fence.send(RankReport(rank, **change), flag)


def taken(world, fences, *changes, flags=None):
    """The reports that each rank finds behind one fence."""
    sent(fences, *changes, flags=flags)
    return world.run(lambda rank: fences[rank].take(lambda: RankReport(rank, **changes[rank])))


def are_whole(*changes, flags=None):
    world, fences = ranks_of(len(changes))
    return [not reports for reports in taken(world, fences, *changes, flags=flags)]


class TestWhatHolds:
    def test_a_default_device_of_torch_changes_nothing(self):
        with torch.device("meta"):
            world, fences = ranks_of(2)
            for rank, fence in enumerate(fences):
                fence.counters.problems["nonfinite"] = NONFINITE
                fence.send(RankReport(rank, problems=(NONFINITE,)))
            reports = world.run(lambda rank: fences[rank].take(lambda: None))

        assert [len(each) for each in reports] == [2, 2]

    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.parametrize("report", [{}, {"fingerprint": 2**62 - 1}], ids=["zero", "the largest"])
    def test_equal_reports_without_faults(self, size, report):
        assert are_whole(*[report] * size) == [True] * size

    @pytest.mark.parametrize("odd_rank", [0, 2])
    @pytest.mark.parametrize("values", [(5, 4), (4, 5)], ids=["less", "more"])
    def test_a_fingerprint_that_differs_on_one_rank_is_seen_by_all(self, odd_rank, values):
        odd, others = ({"fingerprint": value} for value in values)

        assert are_whole(*(odd if rank == odd_rank else others for rank in range(3))) == [False] * 3

    def test_a_problem_of_one_rank_is_seen_by_all(self):
        assert are_whole({}, {"problems": (FAILED,)}, {}) == [False] * 3

    def test_a_problem_of_all_ranks_is_seen_although_they_agree(self):
        assert are_whole(*[{"problems": (FAILED,)}] * 2) == [False] * 2

    def test_a_finding_that_only_the_device_of_one_rank_knows_is_seen_by_all(self):
        assert are_whole({}, {}, flags=[torch.tensor(False), torch.tensor(True)]) == [False] * 2

    def test_a_device_that_found_nothing_changes_nothing(self):
        assert are_whole({}, {}, flags=[torch.tensor(False)] * 2) == [True] * 2

    def test_a_wish_to_stop_is_no_fault_and_is_heard_by_all(self):
        world, fences = ranks_of(3)
        fences[1].counters.wants_stop = True

        assert taken(world, fences, {}, {}, {}) == [[]] * 3
        assert [fence.counters.stop_is_wanted for fence in fences] == [True] * 3

    def test_a_fault_is_seen_beside_a_wish_to_stop(self):
        world, fences = ranks_of(2)
        fences[0].counters.wants_stop = True

        assert all(taken(world, fences, {}, {"problems": (FAILED,)}))

    @pytest.mark.parametrize(
        ("problems", "is_heard"), [((NONFINITE,), True), ((NONFINITE, FAILED), False)], ids=["alone", "both"]
    )
    def test_gradients_that_are_not_finite_hide_no_wish_to_stop_unlike_other_faults(self, problems, is_heard):
        world, fences = ranks_of(3)
        fences[0].counters.wants_stop = True
        fences[1].counters.problems["nonfinite"] = NONFINITE

        answers = taken(world, fences, {}, {"problems": problems}, {})

        assert [[bool(report.problems) for report in reports] for reports in answers] == [[False, True, False]] * 3
        assert [fence.counters.stop_is_wanted for fence in fences] == [is_heard] * 3

    def test_nobody_stops_unasked(self):
        world, fences = ranks_of(2)

        taken(world, fences, {}, {})

        assert [fence.counters.stop_is_wanted for fence in fences] == [False] * 2

    @pytest.mark.parametrize(("skipped_forwards", "num_skipped"), [("error", 1), ("allow", 0)])
    def test_the_policy_says_whether_skipped_forwards_count(self, skipped_forwards, num_skipped):
        counted = fence_on(LocalCommunicator(), skipped_forwards=skipped_forwards).counters
        counted.num_open_forwards = 1

        report = counted.report(is_committing=False, force_all_reduce=False, sent_buckets=False)

        assert report.num_skipped_forwards == num_skipped

    def test_one_fence_after_another_has_its_own_answer(self):
        world, fences = ranks_of(2)

        answers = [bool(taken(world, fences, {"fingerprint": 1}, {"fingerprint": last})[0]) for last in (1, 2, 1, 3, 1)]

        assert answers == [False, True, False, True, False]


class TestWhatIsSent:
    def test_the_planner_counts_the_bytes_of_this_message(self):
        kind, num_bytes = PLANNED_FENCE

        assert f"fence [{kind.value} max of {num_bytes // 8} x int64]" == FENCE

    def test_a_fence_that_holds_is_one_small_collective(self):
        world, fences = ranks_of(2)

        taken(world, fences, {}, {})

        assert world.schedule(0) == world.schedule(1) == (FENCE,)

    def test_sending_does_not_wait_and_says_that_the_rank_is_at_its_fence(self):
        world, fences = ranks_of(2)

        fences[0].send(RankReport(0))

        assert (world.schedule(0), world.schedule(1)) == ((FENCE,), ())
        assert fences[0].is_sent
        assert not fences[1].is_sent
        assert fences[0].communicator.progress.phase == "fence"

    def test_the_reports_of_all_ranks_come_in_rank_order(self):
        world, fences = ranks_of(2)

        found = taken(world, fences, {"fingerprint": 0}, {"fingerprint": 1, "num_microbatches": 1})

        assert found == [[RankReport(0), RankReport(1, fingerprint=1, num_microbatches=1)]] * 2
        assert world.schedule(0) == world.schedule(1) == (FENCE, RECORDS)
        assert not any(fence.is_sent for fence in fences)

    def test_what_a_device_knew_before_the_host_is_in_the_report(self):
        world, fences = ranks_of(2)
        committing = {"fingerprint": 1, "is_committing": True}  # what the rank was about to do stays in it
        sent(fences, committing, committing, flags=[torch.tensor(False), torch.tensor(True)])

        reports = world.run(lambda rank: fences[rank].take(lambda: fences[rank].counters.problems.update(nonfinite=NONFINITE)))

        assert reports == [[RankReport(0, **committing), RankReport(1, **committing, problems=(NONFINITE,))]] * 2

    def test_a_rank_with_a_problem_sends_its_report_without_waiting_and_only_once(self):
        world, fences = ranks_of(2)
        failed = RankReport(0, problems=(FAILED,))

        fences[0].send(failed)
        schedule_at_once = world.schedule(0)
        fences[1].send(RankReport(1))
        reports = world.run(lambda rank: fences[rank].take(lambda: RankReport(rank)))

        assert schedule_at_once == (FENCE, RECORDS)
        assert reports == [[failed, RankReport(1)]] * 2
        assert world.schedule(0) == world.schedule(1) == (FENCE, RECORDS)

    def test_an_answer_that_nothing_was_sent_for_cannot_be_taken(self):
        _, (fence, _) = ranks_of(2)

        with pytest.raises(PhaseError, match=r"^there is no fence to wait for$"):
            fence.take(lambda: RankReport(0))


class TestCalls:
    """Collective calls outside of a step begin with the same message."""

    def answers(self, *calls, **fields):
        world, fences = ranks_of(len(calls), **fields)
        return world.run(lambda rank: open_call(fences[rank], *calls[rank], step=3))

    @pytest.mark.parametrize("has_fence", [True, False], ids=["fence", "no fence"])
    def test_ranks_in_the_same_call_go_on(self, has_fence):
        fields = {} if has_fence else {"fence": False, "nonfinite_gradients": "allow"}

        assert self.answers(*[("save_checkpoint()", [("a", 1)], None)] * 2, **fields) == [(None, ())] * 2

    def test_ranks_in_different_calls_all_hear_who_is_in_which(self):
        (error, _), (other, _) = self.answers(("save_checkpoint()", [], None), ("check_replicas()", [], None))

        assert isinstance(error, CallMismatchError)
        assert error.step == 3
        assert str(error) == str(other)
        assert "'save_checkpoint()' on rank 0" in str(error) or "save_checkpoint() on rank 0" in str(error)
        assert str(error).endswith("None of these calls has done anything, and the next call of all ranks may run.")

    def test_ranks_at_different_places_of_one_call_hear_who_is_where(self):
        (error, _), (other, _) = self.answers(("state_dict()", [], None), ("state_dict(): optimizer state", [], None))

        assert isinstance(error, CallMismatchError)
        assert str(error) == str(other)
        assert "state_dict() on rank 0; state_dict(): optimizer state on rank 1" in str(error)

    def test_a_call_is_one_small_collective_with_its_name(self):
        world, fences = ranks_of(2)

        world.run(lambda rank: open_call(fences[rank], "rebuild", [("a", 1)], None))

        assert world.schedule(0) == world.schedule(1) == (FENCE.replace("fence", "rebuild"),)

    def test_entries_that_differ_are_shown_once_each(self):
        entries = [[("a", 1), ("b", (1,))], [("a", 2), ("b", (1,))], [("a", 3)]]

        answers = self.answers(*(("rebuild: parameters", of_rank, None) for of_rank in entries))

        expected = LayoutMismatchError(
            differences=["entry 0: rank 0 has a 1, rank 1 has a 2", "entry 1: rank 0 has b (1,), rank 2 has nothing"],
            num_different=2,
            num_entries=2,
            phase="rebuild",
        )
        assert [error.to_dict() for error, _ in answers] == [expected.to_dict()] * 3

    def test_of_ranks_with_the_same_entries_one_sends_its_own(self):
        world, fences = ranks_of(3)

        answers = world.run(lambda rank: open_call(fences[rank], "wrap", [("w", (4, 4, 5)[rank])], None))

        assert [error.differences for error, _ in answers] == [("entry 0: rank 0 has w 4, rank 2 has w 5",)] * 3
        labels = [line.partition(" [")[0] for line in world.schedule(0)]
        assert labels == ["wrap", "step report", "wrap texts length", "wrap texts"]

    def test_what_all_ranks_refuse_alike_is_their_own_error(self):
        refusals = [ConfigError("no"), ConfigError("no")]

        assert self.answers(*(("wrap", [], refusal) for refusal in refusals)) == [(refusal, ()) for refusal in refusals]

    @pytest.mark.parametrize("failures", [[ConfigError("a"), ConfigError("b")], [ValueError("a"), ValueError("a")]], ids=str)
    def test_of_ranks_that_fail_differently_or_for_no_reason_of_ours_the_first_is_named(self, failures):
        answers = self.answers(*(("wrap", [], failure) for failure in failures))

        text = f"{type(failures[0]).__name__}: a"
        expected = PeerFailedError(step=3, rank=0, phase="wrap", cause=text).to_dict()
        assert [error.to_dict() for error, _ in answers] == [expected] * 2

    def test_a_rank_that_failed_is_named_on_all(self):
        answers = self.answers(("wrap", [], None), ("wrap", [], ValueError("boom")))

        assert [(type(error), error.rank) for error, _ in answers] == [(PeerFailedError, 1)] * 2
        assert "ValueError: boom" in str(answers[0][0])

    def test_a_call_beside_a_step_is_seen_by_both(self):
        world, fences = ranks_of(2)

        def play(rank):
            if rank == 0:
                return open_call(fences[0], "check_replicas()", [], None)
            fences[1].send(RankReport(1, sent_buckets=True))
            return fences[1].take(lambda: RankReport(1))

        (error, seen), reports = world.run(play)

        assert isinstance(error, CallMismatchError)
        assert error.step == 0  # the call has not said which
        assert str(error).endswith(
            "has done anything, the step was dropped on all ranks, and the next call of all ranks may run."
        )
        assert [report.sent_buckets for report in seen] == [False, True]  # so rank 0 takes part in the buckets
        assert [report.doing for report in reports] == ["check_replicas()", "the end of a step"]


class Named(LocalCommunicator):
    """One rank, and the names under which it waits for its device: they stand in errors about lost ranks."""

    def __init__(self):
        super().__init__()
        self.names = []

    def read(self, values, *, label):
        self.names.append(label)
        return super().read(values, label=label)


class TestWithoutOthers:
    def test_the_wait_for_a_device_has_a_name(self):
        communicator = Named()
        fence = fence_on(communicator)

        fence.send(RankReport(0), torch.tensor(False))
        fence.take(lambda: None)

        assert communicator.names == ["finite test"]

    @pytest.mark.parametrize("is_alone", [True, False], ids=["is alone", "asks nobody"])
    def test_a_rank_is_whole_unless_it_has_a_fault_itself(self, is_alone):
        world = LoopbackWorld(2)
        fields = {} if is_alone else {"fence": False}
        fence = fence_on(LocalCommunicator() if is_alone else world.communicator(0), **fields)

        def reports_of(report, flag=None):
            fence.send(report, flag)
            return fence.take(lambda: report)

        assert reports_of(RankReport(0, num_microbatches=5)) == []
        assert reports_of(RankReport(0), torch.tensor(False)) == []
        assert reports_of(RankReport(0), torch.tensor(True)) == [RankReport(0)]
        assert reports_of(RankReport(0, problems=(FAILED,))) == [RankReport(0, problems=(FAILED,))]
        assert world.schedule(0) == ()

    def test_an_answer_is_taken_once(self):
        fence = fence_on(LocalCommunicator())
        fence.counters.wants_stop = True
        fence.send(RankReport(0))
        was_sent = fence.is_sent
        fence.take(lambda: None)

        assert (was_sent, fence.is_sent, fence.counters.stop_is_wanted) == (True, False, True)
        with pytest.raises(PhaseError, match=r"^there is no fence to wait for$"):
            fence.take(lambda: None)

    def test_a_call_fails_by_a_failure_of_its_own_only(self):
        fence, refusal = fence_on(LocalCommunicator()), ConfigError("no")

        assert open_call(fence, "wrap", [("a", 1)], None) == (None, ())
        assert open_call(fence, "wrap", [("a", 1)], refusal) == (refusal, ())
