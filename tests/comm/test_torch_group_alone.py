"""The communicator over ``torch.distributed``, as far as one process can show it. Several processes: tests/ranks."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megabucket.comm import (
    AllGather,
    AllReduce,
    AllToAll,
    Batch,
    Broadcast,
    Call,
    Communicator,
    Handle,
    Liveness,
    LocalCommunicator,
    ProcessGroupCommunicator,
    ReduceOp,
    ReduceScatter,
    discover_communicator,
)
from megabucket.comm.communicator import RankState
from megabucket.errors import CollectiveError, GroupDestroyedError
from megabucket.testing import ListRecorder
from megabucket.trace.recorder import CollectiveRecord


def launch(communicator: Communicator, calls: list[Call], label: str) -> Handle:
    """Launch below the port, which sends nothing for one rank."""
    record = CollectiveRecord(calls[0].kind, label, len(calls), payload_bytes=0, num_ranks=1)
    handle = communicator._handle(Batch(calls), record, is_kept=False)
    handle.start()
    return handle


@pytest.fixture
def alone(monkeypatch):
    """A process that no launcher has started."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class TestDiscovery:
    def test_a_process_alone_talks_to_nobody(self, alone):
        assert isinstance(discover_communicator(None), LocalCommunicator)

    @pytest.mark.parametrize("launched", ["1", "", "many"])
    def test_a_world_size_that_is_not_more_than_one_process_is_a_process_alone(self, monkeypatch, launched):
        monkeypatch.setenv("WORLD_SIZE", launched)

        assert isinstance(discover_communicator(None), LocalCommunicator)

    def test_the_default_group_is_found(self, group):
        communicator = discover_communicator(None)

        assert isinstance(communicator, ProcessGroupCommunicator)
        assert (communicator.rank, communicator.size) == (0, 1)

    def test_a_given_group_is_used(self, group):
        communicator = discover_communicator(dist.new_group([0]))

        assert isinstance(communicator, ProcessGroupCommunicator)
        assert (communicator.rank, communicator.size) == (0, 1)


def test_a_group_this_process_is_not_in_is_refused(group):
    with pytest.raises(CollectiveError) as caught:
        ProcessGroupCommunicator(dist.GroupMember.NON_GROUP_MEMBER)

    assert str(caught.value) == (
        "global rank 0 is not a member of the process group it was given; wrap the module on the group's members only, or "
        "pass a group that contains this rank."
    )


def test_a_group_that_was_destroyed_is_refused(group):
    communicator = ProcessGroupCommunicator(group)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    with pytest.raises(GroupDestroyedError) as caught:
        launch(communicator, [AllReduce(torch.ones(2))], "bucket 3")

    assert caught.value.operation == "bucket 3 was launched"


def test_settings_that_are_not_in_order_with_the_group_are_refused_only_where_they_are_used(group):
    """A group of one rank has nobody to watch."""
    communicator = ProcessGroupCommunicator(group, liveness=Liveness(heartbeat_s=2.0, dead_after_s=1.0))

    communicator.close()

    assert communicator.size == 1


class TestLaunches:
    """Below the port, which sends nothing for one rank: each kind reaches gloo with the right arguments."""

    @pytest.mark.parametrize(
        "calls_of",
        [
            *(partial(lambda op, full: [AllReduce(full, op)], op) for op in ReduceOp),
            lambda full: [ReduceScatter(full[0:4], full)],
            lambda full: [AllGather(full, full[0:4])],
            lambda full: [Broadcast(full), Broadcast(torch.ones(2))],
        ],
        ids=[*(f"all-reduce {op.value}" for op in ReduceOp), "reduce-scatter in place", "all-gather", "broadcast"],
    )
    def test_each_kind(self, group, calls_of):
        full = torch.arange(4.0)

        launch(ProcessGroupCommunicator(group), calls_of(full), "a").wait()

        assert torch.equal(full, torch.arange(4.0))

    def test_a_batch_of_several_dtypes_is_sent_as_one_batch_per_dtype(self, group):
        tensors = [torch.full((3,), float(i), dtype=dtype) for i, dtype in enumerate([torch.float32, torch.bfloat16] * 2)]

        launch(ProcessGroupCommunicator(group), [AllReduce(tensor) for tensor in tensors], "a").wait()

        assert [tensor[0].item() for tensor in tensors] == [0.0, 1.0, 2.0, 3.0]

    def test_a_batch_of_gathers_fills_every_buffer(self, group):
        fulls = [torch.ones(2), torch.full((3,), 2.0)]

        launch(ProcessGroupCommunicator(group), [AllGather(full, full[:]) for full in fulls], "a").wait()

        assert [full.tolist() for full in fulls] == [[1.0, 1.0], [2.0, 2.0, 2.0]]

    def test_a_batch_of_all_to_alls_fills_every_tensor(self, group):
        sent = [torch.arange(3.0), torch.from_numpy(np.array([])), torch.tensor([True])]  # the second one has a stride of 0
        received = [torch.zeros_like(tensor) for tensor in sent]
        calls = [
            AllToAll(target, source, (source.numel(),), (source.numel(),))
            for target, source in zip(received, sent, strict=True)
        ]

        launch(ProcessGroupCommunicator(group), calls, "a").wait()

        assert [tensor.tolist() for tensor in received] == [[0.0, 1.0, 2.0], [], [True]]

    def test_a_batch_that_gloo_refuses_leaves_the_group_as_it_was(self, group):
        communicator = ProcessGroupCommunicator(group)
        wrong = [AllReduce(torch.ones(2, dtype=torch.complex64), ReduceOp.MAX) for _ in range(2)]
        values = torch.arange(4.0)

        with pytest.raises(RuntimeError, match="complex"):
            launch(communicator, wrong, "a").wait()
        launch(communicator, [AllReduce(values)], "b").wait()
        launch(communicator, [AllReduce(values), AllReduce(torch.ones(2))], "c").wait()

        assert torch.equal(values, torch.arange(4.0))

    def test_waiting_again_does_nothing(self, group):
        handle = launch(ProcessGroupCommunicator(group), [AllReduce(torch.ones(2))], "a")

        handle.wait()
        handle.wait()

    @pytest.mark.parametrize("numel", [2, 1 << 17])
    def test_a_recorder_that_wants_times_learns_when_all_of_a_batch_was_complete(self, group, numel):
        recorder = ListRecorder()
        calls = [AllReduce(torch.ones(numel)), AllReduce(torch.ones(3, dtype=torch.float64))]

        launch(ProcessGroupCommunicator(group, state=RankState(recorder)), calls, "a").wait()

        (record,) = recorder.launches
        assert record.launched <= record.done <= record.wait_stop
        assert record.launched <= record.wait_start <= record.wait_stop

    def test_a_recorder_that_wants_no_times_gets_none(self, group):
        recorder = ListRecorder(records_time=False)

        launch(ProcessGroupCommunicator(group, state=RankState(recorder)), [AllReduce(torch.ones(2))], "a").wait()

        (record,) = recorder.launches
        assert (record.launched, record.done, record.wait_start, record.wait_stop) == (None,) * 4
