"""The communicator port: what every implementation gets for free."""

import pytest
import torch

from megabucket.comm import (
    AllGather,
    AllReduce,
    AllToAll,
    Batch,
    Broadcast,
    Communicator,
    LocalCommunicator,
    ReduceOp,
    ReduceScatter,
)
from megabucket.comm.communicator import DoneHandle
from megabucket.errors import CollectiveError, InvariantError
from megabucket.testing import ListRecorder, LoopbackWorld
from megabucket.trace.recorder import CollectiveKind, CollectiveRecord

RECORD = CollectiveRecord(CollectiveKind.ALL_REDUCE, "bucket 0", num_calls=1, payload_bytes=4, num_ranks=1)


def launch_on_all(world, make_calls, label="test"):
    """Launch the calls of each rank, rank by rank, and wait on every rank."""
    handles = [world.communicator(rank).launch(make_calls(rank), label=label) for rank in range(world.size)]
    for handle in handles:
        handle.wait()


def test_calls_on_empty_tensors_never_reach_the_implementation():
    world = LoopbackWorld(2)

    launch_on_all(world, lambda _: [AllReduce(torch.empty(0)), AllReduce(torch.ones(3)), AllReduce(torch.empty(0, 4))])

    assert world.schedule(0) == ("test [all_reduce sum of 3 x float32]",)


def test_a_batch_of_nothing_but_empty_tensors_is_done_at_once_and_leaves_no_trace():
    world, recorder = LoopbackWorld(2), ListRecorder()

    handle = world.communicator(0, recorder).launch([AllReduce(torch.empty(0))], label="nothing")

    assert isinstance(handle, DoneHandle)
    assert world.schedule(0) == ()
    assert recorder.collectives == []


def empty_all_to_all(size: int) -> AllToAll:
    return AllToAll(torch.empty(0), torch.empty(0), (0,) * size, (0,) * size)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_an_all_to_all_of_a_rank_that_sends_and_receives_nothing_is_not_dropped(is_prepared):
    world, recorder = LoopbackWorld(2), ListRecorder()
    communicator = world.communicator(0, recorder)
    calls = [empty_all_to_all(2)]

    handle = communicator.launch(communicator.prepare(calls) if is_prepared else calls, label="pieces")

    assert world.schedule(0) == ("pieces [all_to_all of float32]",)
    assert not handle.has_arrived()  # the other rank has not launched it
    assert recorder.collectives == [CollectiveRecord(CollectiveKind.ALL_TO_ALL, "pieces", 1, payload_bytes=0, num_ranks=2)]


def test_an_all_to_all_is_recorded_with_the_bytes_that_the_rank_sends_to_others():
    recorder = ListRecorder()
    calls = [
        AllToAll(torch.zeros(7), torch.zeros(8), (3, 4, 0), (0, 4, 4)),
        AllToAll(torch.zeros(0).bfloat16(), torch.zeros(5).bfloat16(), (0, 0, 0), (5, 0, 0)),
    ]

    LoopbackWorld(3).communicator(1, recorder).launch(calls, label="pieces")

    (record,) = recorder.collectives
    assert record.payload_bytes == (0 + 4) * 4 + (5 + 0) * 2
    assert record.wire_bytes == record.payload_bytes


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            AllToAll(torch.zeros(3), torch.zeros(4), (3,), (2, 2)),
            "an all-to-all of 2 ranks has 1 received parts, it needs one for each rank",
        ),
        (
            AllToAll(torch.zeros(3), torch.zeros(4), (2, 1), (2, 1)),
            "the sent parts of an all-to-all, [2, 1], do not make up its tensor of 4 elements",
        ),
        (
            AllToAll(torch.zeros(3), torch.zeros(4), (5, -2), (2, 2)),
            "the received parts of an all-to-all, [5, -2], do not make up its tensor of 3 elements",
        ),
        (
            AllToAll(torch.zeros(1, 3), torch.zeros(3), (2, 1), (2, 1)),
            "the received tensor of an all-to-all must be 1D and contiguous, got [1, 3]",
        ),
        (
            AllToAll(torch.zeros(3), torch.zeros(6)[::2], (2, 1), (2, 1)),
            "the sent tensor of an all-to-all must be 1D and contiguous, got [3]",
        ),
        (
            AllToAll(torch.zeros(3), torch.zeros(3).bfloat16(), (2, 1), (2, 1)),
            "an all-to-all receives torch.float32 but sends torch.bfloat16",
        ),
        (
            AllToAll(torch.zeros(3), torch.zeros(4), (2, 1), (3, 1)),
            "rank 0 sends 3 elements to itself but receives 2 from itself",
        ),
    ],
)
def test_parts_of_an_all_to_all_that_do_not_fit_are_our_bug_and_say_so(call, text):
    with pytest.raises(InvariantError) as caught:
        LoopbackWorld(2).communicator(0).handle([call], label="pieces")

    assert str(caught.value) == f"pieces: {text}"


def test_an_all_to_all_of_one_rank_is_a_copy_at_its_start():
    communicator = LocalCommunicator()
    calls = [AllToAll(torch.zeros(numel), torch.arange(1.0, numel + 1), (numel,), (numel,)) for numel in (2, 0, 3)]

    handle = communicator.handle(calls, label="pieces")
    before = [call.received.tolist() for call in calls]
    is_started_before, is_done_before = handle.is_started, handle.poll()
    handle.start()
    calls[0].sent.fill_(9.0)
    handle.start()
    handle.wait()

    assert (is_started_before, is_done_before) == (False, False)
    assert before == [[0.0, 0.0], [], [0.0, 0.0, 0.0]]
    assert handle.is_started
    assert handle.poll()
    assert [call.received.tolist() for call in calls] == [[1.0, 2.0], [], [1.0, 2.0, 3.0]]


def test_an_empty_batch_is_done_at_once():
    assert isinstance(LoopbackWorld(2).communicator(0).launch([], label="nothing"), DoneHandle)


def test_a_batch_of_different_kinds_is_our_bug_and_says_so():
    world = LoopbackWorld(2)

    with pytest.raises(InvariantError) as caught:
        world.communicator(0).launch([AllReduce(torch.ones(2)), Broadcast(torch.ones(2))], label="bucket 3")

    assert str(caught.value) == "bucket 3: a batch must hold calls of one kind, got ['all_reduce', 'broadcast']"


def test_a_batch_of_different_kinds_is_found_on_one_rank_too():
    with pytest.raises(InvariantError, match="a batch must hold calls of one kind"):
        LocalCommunicator().launch([AllReduce(torch.ones(2)), Broadcast(torch.ones(2))], label="bucket 3")


def test_a_prepared_batch_is_checked_once_on_one_rank_too():
    communicator, full = LocalCommunicator(), torch.zeros(4)
    batch = communicator.prepare([AllGather(full, full[:])])

    communicator.launch(batch, label="bucket 3")
    record = batch.record
    communicator.launch(batch, label="bucket 3")

    assert batch.record is record is not None


def part_of(full: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    numel = full.numel() // communicator.size
    return full[communicator.rank * numel : (communicator.rank + 1) * numel]


@pytest.mark.parametrize("kind", [ReduceScatter, AllGather])
@pytest.mark.parametrize("cut", [slice(0, 2), slice(3, 6), None], ids=["another size", "another rank's", "memory of its own"])
def test_a_shard_that_is_not_this_ranks_part_of_its_buffer_is_our_bug_and_says_so(kind, cut):
    full = torch.zeros(6)
    shard = torch.zeros(3) if cut is None else full[cut]
    call = ReduceScatter(shard, full) if kind is ReduceScatter else AllGather(full, shard)

    with pytest.raises(InvariantError) as caught:
        LoopbackWorld(2).communicator(0).launch([call], label="bucket 0")

    text = f"bucket 0: a shard of {shard.numel()} elements is not part 0 of 2 of a buffer of 6"
    assert str(caught.value) == text


def test_every_launch_is_recorded_with_the_bytes_of_the_full_buffers():
    world, recorder = LoopbackWorld(2), ListRecorder()
    half, single, double = torch.zeros(8, dtype=torch.bfloat16), torch.zeros(4), torch.zeros(8)

    for communicator in (world.communicator(0, recorder), world.communicator(1)):
        communicator.launch([ReduceScatter(part_of(full, communicator), full) for full in (single, double)], label="a")
        communicator.launch([AllGather(half, part_of(half, communicator))], label="b")
        communicator.launch([AllReduce(single)], label="c")
        communicator.launch([Broadcast(half)], label="d")

    assert recorder.collectives == [
        CollectiveRecord(CollectiveKind.REDUCE_SCATTER, "a", num_calls=2, payload_bytes=4 * 4 + 8 * 4, num_ranks=2),
        CollectiveRecord(CollectiveKind.ALL_GATHER, "b", num_calls=1, payload_bytes=8 * 2, num_ranks=2),
        CollectiveRecord(CollectiveKind.ALL_REDUCE, "c", num_calls=1, payload_bytes=4 * 4, num_ranks=2),
        CollectiveRecord(CollectiveKind.BROADCAST, "d", num_calls=1, payload_bytes=8 * 2, num_ranks=2),
    ]


def test_a_prepared_batch_is_recorded_at_each_launch_and_under_the_label_it_is_given():
    recorder, tensor = ListRecorder(), torch.zeros(6)
    communicator = LoopbackWorld(2).communicator(0, recorder)
    batch = communicator.prepare([AllReduce(torch.empty(0)), ReduceScatter(tensor[:3], tensor)])

    for label in ("a", "a", "b"):
        communicator.launch(batch, label=label)

    assert recorder.collectives == [
        CollectiveRecord(CollectiveKind.REDUCE_SCATTER, label, num_calls=1, payload_bytes=24, num_ranks=2) for label in "aab"
    ]


def test_a_prepared_batch_is_looked_at_again_by_ranks_of_another_number():
    tensor = torch.zeros(6)
    batch = LoopbackWorld(2).communicator(0).prepare([ReduceScatter(tensor[:3], tensor)])
    LoopbackWorld(2).communicator(0).launch(batch, label="a")

    with pytest.raises(InvariantError, match="is not part 0 of 3 of a buffer of 6"):
        LoopbackWorld(3).communicator(0).launch(batch, label="a")


def test_a_communicator_counts_what_was_launched():
    communicator = LoopbackWorld(2).communicator(0)
    communicator.launch([AllReduce(torch.empty(0))], label="nothing")
    communicator.launch([AllReduce(torch.ones(1)), AllReduce(torch.ones(2))], label="a")
    communicator.launch([Broadcast(torch.ones(1))], label="b")

    assert communicator.launches.last == 2


def test_closing_a_communicator_that_has_nothing_to_end_is_allowed_again_and_again():
    communicator = LocalCommunicator()

    communicator.close()
    communicator.close()


def test_a_launch_knows_the_moments_of_its_life():
    world, recorder = LoopbackWorld(2), ListRecorder()

    first = world.communicator(0, recorder).launch([AllReduce(torch.zeros(1))], label="a")
    (launch,) = recorder.launches
    assert (launch.done, launch.wait_start, launch.wait_stop) == (None, None, None)
    world.communicator(1).launch([AllReduce(torch.zeros(1))], label="a")
    first.wait()

    assert launch.launched < launch.done < launch.wait_start < launch.wait_stop


def test_no_clock_is_read_for_a_recorder_that_wants_no_times():
    world, recorder = LoopbackWorld(2), ListRecorder(records_time=False)

    launch_on_all(world, lambda _: [AllReduce(torch.zeros(1))])
    world.communicator(0, recorder).launch([AllReduce(torch.zeros(1))], label="a")

    assert [(launch.launched, launch.done) for launch in recorder.launches] == [(None, None)]


def test_a_handle_sends_nothing_before_it_is_started_and_nothing_twice():
    world = LoopbackWorld(2)
    handle = world.communicator(0).handle([AllReduce(torch.ones(1))], label="sum")

    with pytest.raises(CollectiveError, match="sum was not launched, so there is nothing to wait for"):
        handle.wait()
    assert (handle.is_started, world.schedule(0)) == (False, ())

    handle.start()
    handle.start()
    assert (handle.is_started, world.schedule(0)) == (True, ("sum [all_reduce sum of 1 x float32]",))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
def test_every_reduction_comes_divided(op):
    world = LoopbackWorld(2)
    whole, parts = [torch.full((2,), 12.0) for _ in range(2)], [torch.full((2,), 12.0) for _ in range(2)]

    launch_on_all(world, lambda rank: [AllReduce(whole[rank], op, divisor=3.0)])
    launch_on_all(world, lambda rank: [ReduceScatter(parts[rank][rank : rank + 1], parts[rank], op, divisor=3.0)])

    expected = 8.0 if op is ReduceOp.SUM else 4.0  # (12 + 12) / 3, and half of it
    assert [tensor.tolist() for tensor in whole] == [[expected] * 2] * 2
    assert [parts[rank][rank].item() for rank in range(2)] == [expected] * 2


class TestOneRank:
    def test_reducing_changes_nothing(self):
        values = torch.tensor([1.0, -0.0, float("nan")])
        bits = values.clone().view(torch.int32)

        LocalCommunicator().launch([AllReduce(values)], label="a").wait()
        LocalCommunicator().launch([Broadcast(values)], label="b").wait()

        assert torch.equal(values.view(torch.int32), bits)

    def test_a_shard_that_is_the_buffer_itself_is_left_alone(self):
        full = torch.arange(4.0)
        version = full._version

        LocalCommunicator().launch([ReduceScatter(full[0:4], full)], label="a").wait()
        LocalCommunicator().launch([AllGather(full, full[0:4])], label="b").wait()

        assert full._version == version  # no pass over memory

    def test_nothing_is_recorded_because_nothing_goes_over_a_wire(self):
        recorder = ListRecorder()

        LoopbackWorld(1).communicator(0, recorder).launch([AllReduce(torch.ones(3))], label="a").wait()

        assert recorder.collectives == []

    def test_a_launch_past_the_port_is_our_bug(self):
        with pytest.raises(InvariantError) as caught:
            LocalCommunicator()._handle(Batch([AllReduce(torch.ones(1))]), RECORD, is_kept=False)

        assert str(caught.value) == "bucket 0: a single rank launches no collectives, got 1 calls"


def test_waiting_again_does_nothing():
    world = LoopbackWorld(2)
    tensors = [torch.tensor([1.0]), torch.tensor([2.0])]
    handles = [world.communicator(rank).launch([AllReduce(tensors[rank])], label="sum") for rank in range(2)]

    for handle in (*handles, *handles, DoneHandle(), DoneHandle()):
        handle.wait()

    assert [tensor.item() for tensor in tensors] == [3.0, 3.0]  # not 6: the sum was taken once


def test_the_port_itself_cannot_be_used():
    with pytest.raises(TypeError, match="abstract"):
        Communicator(rank=0, size=1)
