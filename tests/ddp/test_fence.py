"""The fence on the loopback world: what makes it hold or not, what it sends, and what happens to an abandoned one."""

import pytest
import torch

from megabucket.comm import LocalCommunicator
from megabucket.ddp.fence import Failure, Fence, LateGrads, ModelChange, NonFinite, StepReport, UnusedParams
from megabucket.testing import LoopbackWorld

CPU = torch.device("cpu")

COUNTS = {
    "step_number": 10,
    "num_microbatches": 2,
    "num_skipped_forwards": 3,
    "num_dropped_steps": 1,
    "num_updates": 1,
    "checksum": 2**62 - 1,
    "is_committing": True,
    "force_all_reduce": True,
}
FAULTS = {
    "failure": Failure("forward", "ValueError: boom"),
    "change": ModelChange("main_grad", params=("a",)),
    "late": LateGrads(("a",), bucket=0, phase="in flight"),
    "unused": UnusedParams(("a",), bucket=0),
    "nonfinite": NonFinite("a", bucket=0, finding="nan", num_others=0),
}
FENCE = "fence [all_reduce max of 18 x int64]"  # 8 pairs and 2 flags
RECORDS = "step report [all_gather of 32784 x uint8]"  # 2 * (8 + 16384)


def ranks_of(size, **kwargs):
    world = LoopbackWorld(size, timeout_s=5, **kwargs)
    return world, [Fence(world.communicator(rank), device=CPU) for rank in range(size)]


def launched(fences, *changes, nonfinite=None):
    """One fence, launched on every rank with its changes of the report."""
    flags = nonfinite or [None] * len(fences)
    return [
        fence.launch(StepReport(rank, **change), nonfinite=flag)
        for rank, (fence, change, flag) in enumerate(zip(fences, changes, flags, strict=True))
    ]


def are_whole(*changes, nonfinite=None):
    _, fences = ranks_of(len(changes))

    return [fence.is_whole() for fence in launched(fences, *changes, nonfinite=nonfinite)]


class TestWhatHolds:
    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.parametrize("report", [{}, COUNTS], ids=["zeros", "others"])
    def test_equal_reports_without_faults(self, size, report):
        assert are_whole(*[report] * size) == [True] * size

    @pytest.mark.parametrize("field", COUNTS)
    @pytest.mark.parametrize("odd_rank", [0, 2])
    @pytest.mark.parametrize("is_less", [True, False])
    def test_a_number_that_differs_on_one_rank_is_seen_by_all(self, field, odd_rank, is_less):
        value = COUNTS[field]
        odd, others = (COUNTS | {field: False if isinstance(value, bool) else value - 1}), COUNTS
        if not is_less:
            odd, others = others, odd

        assert are_whole(*(odd if rank == odd_rank else others for rank in range(3))) == [False] * 3

    @pytest.mark.parametrize("field", FAULTS)
    def test_a_fault_of_one_rank_is_seen_by_all(self, field):
        assert are_whole({}, {field: FAULTS[field]}, {}) == [False] * 3

    @pytest.mark.parametrize("field", FAULTS)
    def test_a_fault_of_all_ranks_is_seen_although_they_agree(self, field):
        assert are_whole(*[{field: FAULTS[field]}] * 2) == [False] * 2

    def test_a_finding_that_only_the_device_of_one_rank_knows_is_seen_by_all(self):
        assert are_whole({}, {}, nonfinite=[torch.tensor(False), torch.tensor(True)]) == [False] * 2

    def test_a_device_that_found_nothing_changes_nothing(self):
        assert are_whole({}, {}, nonfinite=[torch.tensor(False)] * 2) == [True] * 2

    def test_a_device_that_found_nothing_hides_no_finding_of_the_host(self):
        finding = {"nonfinite": FAULTS["nonfinite"]}

        assert are_whole(finding, {}, nonfinite=[torch.tensor(False)] * 2) == [False] * 2

    def test_a_wish_to_stop_is_no_fault_and_is_heard_by_all(self):
        _, fences = ranks_of(3)
        pending = launched(fences, {}, {"wants_stop": True}, {})

        assert [fence.is_whole() for fence in pending] == [True] * 3
        assert [fence.stop_is_wanted for fence in pending] == [True] * 3

    @pytest.mark.parametrize("field", FAULTS)
    def test_a_fault_is_seen_beside_a_wish_to_stop(self, field):
        assert are_whole({"wants_stop": True}, {field: FAULTS[field]}) == [False] * 2
        assert are_whole({"wants_stop": True, field: FAULTS[field]}) == [False]

    def test_the_answer_stays_the_same_when_the_next_fence_holds(self):
        _, fences = ranks_of(2)
        broken = launched(fences, {}, {"num_microbatches": 1})
        first_answers = [fence.is_whole() for fence in broken]

        later = [fence.is_whole() for _ in range(2) for fence in launched(fences, {}, {})]

        assert first_answers == [fence.is_whole() for fence in broken] == [False, False]
        assert later == [True] * 4


class TestWhatIsSent:
    def test_a_fence_that_holds_is_one_small_collective(self):
        world, fences = ranks_of(2)

        for fence in launched(fences, COUNTS, COUNTS):
            fence.is_whole()

        assert world.schedule(0) == world.schedule(1) == (FENCE,)

    def test_a_launch_does_not_wait_and_says_that_the_rank_is_at_its_fence(self):
        world, fences = ranks_of(2)

        fences[0].launch(StepReport(0))

        assert (world.schedule(0), world.schedule(1)) == ((FENCE,), ())
        assert fences[0].communicator.progress.phase == "fence"

    def test_the_reports_of_all_ranks_come_in_rank_order(self):
        world, fences = ranks_of(2)

        def play(rank):
            fence = fences[rank].launch(StepReport(rank, num_microbatches=rank))
            return fence.is_whole(), fence.reports()

        expected = [StepReport(0), StepReport(1, num_microbatches=1)]
        assert world.run(play) == [(False, expected)] * 2
        assert world.schedule(0) == world.schedule(1) == (FENCE, RECORDS)

    def test_what_was_learnt_since_the_launch_is_what_is_sent(self):
        world, fences = ranks_of(2)
        found = StepReport(1, nonfinite=FAULTS["nonfinite"])

        def play(rank):
            fence = fences[rank].launch(StepReport(rank), nonfinite=torch.tensor(rank == 1))
            fence.is_whole()
            return fence.reports(found if rank == 1 else None)

        assert world.run(play) == [[StepReport(0), found]] * 2

    def test_a_rank_that_failed_can_send_its_report_without_waiting_and_sends_it_only_once(self):
        world, fences = ranks_of(2)
        failed = StepReport(0, failure=FAULTS["failure"])

        first = fences[0].launch(failed)
        first.send_report()
        schedule_at_once = world.schedule(0)
        second = fences[1].launch(StepReport(1, failure=FAULTS["failure"]))
        second.send_report()

        assert schedule_at_once == (FENCE, RECORDS)
        assert first.reports(StepReport(0, num_microbatches=9)) == second.reports()
        assert first.reports()[0] == failed
        assert world.schedule(0) == world.schedule(1) == (FENCE, RECORDS)

    def test_the_report_of_a_rank_that_failed_waits_for_the_others(self):
        world, fences = ranks_of(2)

        def play(rank):
            fence = fences[rank].launch(StepReport(rank, failure=FAULTS["failure"] if rank == 1 else None))
            return fence.is_whole(), [report.failure for report in fence.reports()]

        assert world.run(play) == [(False, [None, FAULTS["failure"]])] * 2

    def test_an_abandoned_fence_may_be_in_flight_when_the_next_one_is_launched(self):
        world, fences = ranks_of(2, completion="manual")

        launched(fences, {}, {"num_microbatches": 1})  # nobody asks for its answer any more
        following = launched(fences, COUNTS, COUNTS)  # a shared vector would be a write in flight
        for sequence in (0, 1):
            world.complete(sequence)
        third = launched(fences, {}, {})

        assert [fence.is_whole() for fence in following] == [True, True]
        assert [fence.is_whole() for fence in third] == [True, True]


class TestWithoutOthers:
    @pytest.mark.parametrize("communicator", [None, LocalCommunicator()], ids=["asks nobody", "is alone"])
    def test_a_rank_is_whole_unless_it_has_a_fault_itself(self, communicator):
        fence = Fence(communicator, device=CPU)

        assert fence.communicator is None
        assert fence.launch(StepReport(0, **COUNTS)).is_whole()
        assert fence.launch(StepReport(0), nonfinite=torch.tensor(False)).is_whole()
        assert not fence.launch(StepReport(0), nonfinite=torch.tensor(True)).is_whole()
        for field, fault in FAULTS.items():
            assert not fence.launch(StepReport(0, **{field: fault})).is_whole(), field
            assert not fence.launch(StepReport(0, **{field: fault}), nonfinite=torch.tensor(False)).is_whole(), field

    def test_its_reports_are_its_own(self):
        fence = Fence(None, device=CPU)
        report = StepReport(0, failure=FAULTS["failure"])
        more = StepReport(0, nonfinite=FAULTS["nonfinite"])

        assert fence.launch(report).reports() == [report]
        assert fence.launch(report).reports(more) == [more]
        assert fence.exchange(report) is None

    def test_a_world_of_one_launches_nothing(self):
        world, (fence,) = ranks_of(1)

        fence.launch(StepReport(0, failure=FAULTS["failure"])).reports()

        assert world.schedule(0) == ()
