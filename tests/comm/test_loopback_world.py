"""The loopback world against direct computation, and what it finds: mismatches, deadlocks, writes in flight."""

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabucket.comm import AllGather, AllReduce, AllToAll, Broadcast, ReduceOp, ReduceScatter
from megabucket.errors import CollectiveError, WrapperBrokenError
from megabucket.testing import ListRecorder, LoopbackWorld
from megabucket.testing.loopback import CollectiveDeadlockError, InFlightWriteError, MismatchedCollectiveError


def launch_on_all(world, make_calls, label="test"):
    return [world.communicator(rank).launch(make_calls(rank), label=label) for rank in range(world.size)]


@pytest.fixture(params=["immediate", "manual"])
def completion(request):
    return request.param


@pytest.fixture(params=[1, 2, 3])
def world(request, completion):
    return LoopbackWorld(request.param, completion=completion)


class TestResults:
    """Rank r holds r + 1, r + 2, ...: sums, means and shards are computed beside the assertion."""

    @staticmethod
    def values(world, numel=6):
        return [torch.arange(1.0, numel + 1) + rank for rank in range(world.size)]

    @pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
    def test_all_reduce_leaves_the_sum_or_the_mean_on_every_rank(self, world, op):
        tensors = self.values(world)
        expected = torch.stack(self.values(world)).sum(dim=0) / (world.size if op is ReduceOp.AVG else 1)

        for handle in launch_on_all(world, lambda rank: [AllReduce(tensors[rank], op)]):
            handle.wait()

        assert all(torch.equal(tensor, expected) for tensor in tensors)

    def test_all_reduce_max_leaves_the_largest_value_of_any_rank(self, world):
        tensors = [torch.tensor([rank, -rank], dtype=torch.int64) for rank in range(world.size)]

        for handle in launch_on_all(world, lambda rank: [AllReduce(tensors[rank], ReduceOp.MAX)]):
            handle.wait()

        assert [tensor.tolist() for tensor in tensors] == [[world.size - 1, 0]] * world.size

    def test_reduce_scatter_leaves_each_rank_its_shard_of_the_sum(self, world):
        tensors = self.values(world)
        total = torch.stack(self.values(world)).sum(dim=0)
        cuts = [slice(rank * 6 // world.size, (rank + 1) * 6 // world.size) for rank in range(world.size)]
        shards = [tensors[rank][cuts[rank]] for rank in range(world.size)]

        for handle in launch_on_all(world, lambda rank: [ReduceScatter(shards[rank], tensors[rank])]):
            handle.wait()

        assert all(torch.equal(shards[rank], total[cuts[rank]]) for rank in range(world.size))

    def test_all_gather_leaves_all_shards_in_rank_order_on_every_rank(self, world):
        numel = 6 // world.size
        fulls = [torch.zeros(6) for _ in range(world.size)]
        shards = [fulls[rank][rank * numel : (rank + 1) * numel] for rank in range(world.size)]
        for rank, shard in enumerate(shards):
            shard.fill_(rank + 1)

        for handle in launch_on_all(world, lambda rank: [AllGather(fulls[rank], shards[rank])]):
            handle.wait()

        expected = torch.cat([torch.full((numel,), rank + 1.0) for rank in range(world.size)])
        assert all(torch.equal(full, expected) for full in fulls)

    def test_broadcast_leaves_the_values_of_the_first_rank(self, world):
        tensors = self.values(world)

        for handle in launch_on_all(world, lambda rank: [Broadcast(tensors[rank])]):
            handle.wait()

        assert all(torch.equal(tensor, torch.arange(1.0, 7.0)) for tensor in tensors)

    def test_every_call_of_a_batch_is_done(self, world):
        small, large = self.values(world, 2), self.values(world, 5)
        small_sum, large_sum = (torch.stack(self.values(world, numel)).sum(dim=0) for numel in (2, 5))

        for handle in launch_on_all(world, lambda rank: [AllReduce(small[rank]), AllReduce(large[rank])]):
            handle.wait()

        assert all(torch.equal(tensor, small_sum) for tensor in small)
        assert all(torch.equal(tensor, large_sum) for tensor in large)

    @pytest.mark.parametrize("shape", [(2, 3), ()], ids=str)
    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.int16])
    def test_any_dtype_and_shape_can_be_broadcast(self, world, dtype, shape):
        tensors = [torch.ones(shape).to(dtype), *[torch.zeros(shape).to(dtype) for _ in range(world.size - 1)]]

        for handle in launch_on_all(world, lambda rank: [Broadcast(tensors[rank])]):
            handle.wait()

        assert all(torch.equal(tensor, torch.ones(shape).to(dtype)) for tensor in tensors)


def tables_of_numels(size):
    """How many elements each rank sends to each, by source, then by destination. Shrinks towards empty parts."""
    rows = st.lists(st.integers(0, 4) | st.integers(0, 100), min_size=size, max_size=size)
    return st.lists(rows, min_size=size, max_size=size).map(np.array)


@given(
    batch=st.integers(1, 5).flatmap(lambda size: st.lists(tables_of_numels(size), min_size=1, max_size=3)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]),
    completion=st.sampled_from(["immediate", "manual"]),
)
def test_an_all_to_all_brings_every_part_to_its_rank(batch, dtype, completion):
    world = LoopbackWorld(len(batch[0]), completion=completion)
    calls, expected = [[] for _ in range(world.size)], [[] for _ in range(world.size)]
    for table in batch:
        values = [np.random.default_rng(source).integers(0, 100, numel) for source, numel in enumerate(table.sum(axis=1))]
        stops = table.cumsum(axis=1)
        for rank in range(world.size):
            received, sent = torch.zeros(int(table[:, rank].sum())).to(dtype), torch.from_numpy(values[rank]).to(dtype)
            calls[rank].append(AllToAll(received, sent, tuple(table[:, rank].tolist()), tuple(table[rank].tolist())))
            parts = [values[source][stop - table[source, rank] : stop] for source, stop in enumerate(stops[:, rank])]
            expected[rank].append(torch.from_numpy(np.concatenate(parts)).to(dtype))

    for handle in launch_on_all(world, lambda rank: calls[rank]):
        handle.wait()

    for of_rank, expected_of_rank in zip(calls, expected, strict=True):
        for call, result in zip(of_rank, expected_of_rank, strict=True):
            assert torch.equal(call.received, result)


def test_ranks_that_disagree_on_a_part_of_an_all_to_all_are_found():
    world = LoopbackWorld(3)
    world.communicator(0).launch([AllToAll(torch.zeros(4), torch.zeros(3), (1, 0, 3), (1, 0, 2))], label="pieces")
    world.communicator(1).launch([AllToAll(torch.zeros(0), torch.zeros(0), (0, 0, 0), (0, 0, 0))], label="pieces")

    with pytest.raises(MismatchedCollectiveError) as caught:
        world.communicator(2).launch([AllToAll(torch.zeros(1), torch.zeros(3), (1, 0, 0), (3, 0, 0))], label="pieces")

    assert (
        "rank 0 launched pieces [all_to_all of float32] with 2 elements for rank 2 and 3 from it, rank 2 launched pieces "
        "[all_to_all of float32] with 3 elements for rank 0 and 1 from it."
    ) in str(caught.value)


def test_a_write_into_what_an_all_to_all_sends_is_found():
    world = LoopbackWorld(2, completion="manual")
    sent = [torch.zeros(2), torch.zeros(2)]
    handles = launch_on_all(world, lambda rank: [AllToAll(torch.zeros(2), sent[rank], (1, 1), (1, 1))])
    sent[1][1] = 5.0

    with pytest.raises(InFlightWriteError, match="changed while it was in flight, first at element 1"):
        handles[0].wait()


@pytest.mark.parametrize(("in_rank_order", "sums"), [(False, [258.0, 256.0]), (True, [258.0, 258.0])])
def test_sums_run_in_the_order_of_the_ring_in_the_dtype_of_the_tensors_unless_rank_order_is_asked_for(in_rank_order, sums):
    # bfloat16 has 8 bits: 256 + 1 rounds back to 256, so the order shows: (256 + 1) + 1 = 256, but 256 + (1 + 1) = 258. The
    # ring adds the first of three chunks (of 2 elements) from rank 2 down, the second one from rank 0: 0, 2, 1. Rank order adds
    # 16 bits in float32, and rounds 258 once.
    values = [(256.0, 256.0), (1.0, 1.0), (1.0, 1.0)]
    tensors = [torch.tensor([one] * 2 + [other] * 2, dtype=torch.bfloat16) for one, other in values]

    launch_on_all(LoopbackWorld(3), lambda rank: [AllReduce(tensors[rank], in_rank_order=in_rank_order)])

    assert tensors[0].tolist() == [sums[0], sums[0], sums[1], sums[1]]


def test_one_rank_never_reaches_the_world():
    world = LoopbackWorld(1, completion="manual")

    world.communicator(0).launch([AllReduce(torch.ones(2))], label="a").wait()

    assert world.schedule(0) == ()


class TestManualCompletion:
    def test_nothing_happens_before_completion(self):
        world = LoopbackWorld(2, completion="manual")
        tensors = [torch.ones(2), torch.ones(2)]

        launch_on_all(world, lambda rank: [AllReduce(tensors[rank])])

        assert world.pending == (0,)
        assert torch.equal(tensors[0], torch.ones(2))

    @given(order=st.permutations(range(5)))
    def test_any_order_of_completion_gives_the_same_results(self, order):
        world = LoopbackWorld(2, completion="manual")
        tensors = [[torch.full((3,), float(10 * rank + i)) for i in range(5)] for rank in range(2)]
        for i in range(5):
            launch_on_all(world, lambda rank, i=i: [AllReduce(tensors[rank][i])])

        for done, sequence in enumerate(order):
            world.complete(sequence)
            assert len(world.pending) == 4 - done

        for i in range(5):
            assert torch.equal(tensors[0][i], torch.full((3,), 10.0 + 2 * i))  # i + (10 + i)

    def test_waiting_completes_what_is_pending(self):
        world = LoopbackWorld(2, completion="manual")
        tensors = [torch.ones(1), torch.ones(1)]
        first, _ = launch_on_all(world, lambda rank: [AllReduce(tensors[rank])])

        first.wait()

        assert world.pending == ()
        assert tensors[1].item() == 2.0

    def test_completing_twice_is_refused(self):
        world = LoopbackWorld(2, completion="manual")
        launch_on_all(world, lambda _: [AllReduce(torch.ones(1))])
        world.complete(0)

        with pytest.raises(CollectiveError) as caught:
            world.complete(0)

        assert str(caught.value) == "collective 0 cannot be completed; pending are []"

    def test_completing_before_every_rank_has_launched_is_refused(self):
        world = LoopbackWorld(2, completion="manual")
        tensor = torch.ones(1)
        world.communicator(0).launch([AllReduce(tensor)], label="a")

        with pytest.raises(CollectiveError, match=r"collective 0 cannot be completed; pending are \[\]"):
            world.complete(0)

        assert tensor.item() == 1.0  # no sum over the half of the ranks that was there


class TestMismatch:
    """The second rank's launch fails at once; both calls are in the text."""

    @staticmethod
    def mismatch(call, other, *, label="bucket 0", other_label="bucket 0"):
        world = LoopbackWorld(2)
        world.communicator(1).launch([call], label=label)
        with pytest.raises(MismatchedCollectiveError) as caught:
            world.communicator(0).launch([other], label=other_label)
        return caught.value

    def test_the_text_and_the_fields_name_both_calls(self):
        error = self.mismatch(AllReduce(torch.ones(4)), AllReduce(torch.ones(8)))

        assert (error.sequence, error.rank, error.other_rank) == (0, 0, 1)
        assert error.call == "bucket 0 [all_reduce sum of 8 x float32]"
        assert str(error) == (
            "collective 0 differs between ranks: rank 1 launched bucket 0 [all_reduce sum of 4 x float32], rank 0 launched "
            "bucket 0 [all_reduce sum of 8 x float32]. On a real process group this hangs or mixes unrelated data. All ranks "
            "must launch the same collectives in the same order."
        )

    @pytest.mark.parametrize(
        ("other", "label", "text"),
        [
            (Broadcast(torch.ones(4)), "bucket 0", "bucket 0 [broadcast of 4 x float32]"),
            (AllReduce(torch.ones(4, dtype=torch.int32)), "bucket 0", "bucket 0 [all_reduce sum of 4 x int32]"),
            (AllReduce(torch.ones(4), ReduceOp.AVG), "bucket 0", "bucket 0 [all_reduce avg of 4 x float32]"),
            (AllReduce(torch.ones(4)), "bucket 1", "bucket 1 [all_reduce sum of 4 x float32]"),
        ],
        ids=["kind", "dtype of the same size", "reduce op", "label"],
    )
    def test_any_difference_is_found(self, other, label, text):
        error = self.mismatch(AllReduce(torch.ones(4)), other, other_label=label)

        assert (error.other_call, error.call) == ("bucket 0 [all_reduce sum of 4 x float32]", text)

    def test_another_batch_size_is_found(self):
        world = LoopbackWorld(2)
        world.communicator(0).launch([AllReduce(torch.ones(4))], label="a")

        with pytest.raises(MismatchedCollectiveError):
            world.communicator(1).launch([AllReduce(torch.ones(4)), AllReduce(torch.ones(4))], label="a")

    def test_ranks_may_be_at_different_places_of_the_same_schedule(self):
        world = LoopbackWorld(2)
        for label in ("a", "b", "c"):
            world.communicator(0).launch([AllReduce(torch.ones(1))], label=label)

        for label in ("a", "b", "c"):
            world.communicator(1).launch([AllReduce(torch.ones(1))], label=label).wait()

        assert world.schedule(0) == world.schedule(1)


class TestInFlight:
    @staticmethod
    def write_in_flight(write, *, call=AllReduce):
        world = LoopbackWorld(2, completion="manual")
        tensors = [torch.tensor([1.0, 0.0, float("nan"), 4.0]) for _ in range(2)]
        launch_on_all(world, lambda rank: [call(tensors[rank])])
        write(tensors[1])
        return world

    def test_a_write_is_found_and_named_by_rank_and_element(self):
        world = self.write_in_flight(lambda tensor: tensor[3].add_(1))

        with pytest.raises(InFlightWriteError) as caught:
            world.complete(0)

        error = caught.value
        assert (error.sequence, error.rank, error.index) == (0, 1, 3)
        assert str(error) == (
            "[rank 1] the input of collective 0 (test [all_reduce sum of 4 x float32]) changed while it was in flight, first "
            "at element 3. On a real process group the reduced value would depend on timing. Nothing may write a buffer "
            "between launch and completion."
        )

    def test_a_write_is_found_by_a_wait_too(self):
        world = LoopbackWorld(2, completion="manual")
        tensors = [torch.ones(2), torch.ones(2)]
        handles = launch_on_all(world, lambda rank: [AllReduce(tensors[rank])])
        tensors[0][1] = 7

        with pytest.raises(InFlightWriteError, match="first at element 1"):
            handles[1].wait()

    @pytest.mark.parametrize(
        ("index", "value"), [(1, -0.0), (2, torch.tensor(-4194303, dtype=torch.int32).view(torch.float32).item())]
    )
    def test_a_write_that_compares_equal_is_found_by_its_bits(self, index, value):
        world = self.write_in_flight(lambda tensor: tensor[index].fill_(value))

        with pytest.raises(InFlightWriteError, match=f"first at element {index}"):
            world.complete(0)

    def test_a_nan_that_nobody_touched_is_no_write(self):
        self.write_in_flight(lambda _: None).complete(0)

    def test_the_parts_of_a_gather_that_are_only_received_may_change(self):
        world = LoopbackWorld(2, completion="manual")
        fulls = [torch.zeros(4), torch.zeros(4)]
        launch_on_all(world, lambda rank: [AllGather(fulls[rank], fulls[rank][2 * rank : 2 * rank + 2])])
        fulls[0][3] = 9.0  # belongs to rank 1

        world.complete(0)

        assert torch.equal(fulls[0], torch.zeros(4))


class TestDeadlock:
    def test_one_thread_that_waits_before_all_ranks_have_launched_is_told_at_once(self):
        world = LoopbackWorld(3)
        handle = world.communicator(0).launch([AllReduce(torch.ones(2))], label="bucket 0")

        with pytest.raises(CollectiveDeadlockError) as caught:
            handle.wait()

        assert caught.value.missing_ranks == (1, 2)
        assert str(caught.value) == (
            "[rank 0] waits for collective 0 (bucket 0 [all_reduce sum of 2 x float32]), which rank(s) 1, 2 have not launched. "
            "Launch it on every rank before waiting, or run the ranks in threads."
        )

    def test_a_rank_that_returned_without_launching_is_named_without_waiting_for_the_timeout(self):
        world = LoopbackWorld(2, timeout_s=60)
        started_s = time.perf_counter()

        def program(rank):
            if rank == 0:
                world.communicator(0).launch([AllReduce(torch.ones(2))], label="bucket 0").wait()

        with pytest.raises(CollectiveDeadlockError) as caught:
            world.run(program)

        assert caught.value.missing_ranks == (1,)
        assert time.perf_counter() - started_s < 30

    def test_a_rank_that_never_comes_is_named_after_the_timeout(self):
        world = LoopbackWorld(2, timeout_s=0.05)
        may_end = threading.Event()

        def program(rank):
            if rank == 1:
                may_end.wait(30)
                return
            try:
                world.communicator(0).launch([AllReduce(torch.ones(2))], label="bucket 0").wait()
            finally:
                may_end.set()

        with pytest.raises(CollectiveDeadlockError, match=r"rank\(s\) 1 have not launched"):
            world.run(program)


class TestRun:
    def test_ranks_may_launch_in_any_order_of_time(self, completion):
        world = LoopbackWorld(3, completion=completion)

        def program(rank):
            time.sleep(0.01 * ((rank + 1) % 3))
            communicator, sums = world.communicator(rank), []
            for step in range(20):
                tensor = torch.full((4,), float(rank + step))
                communicator.launch([AllReduce(tensor)], label=f"step {step}").wait()
                sums.append(tensor[0].item())
            return sums

        results = world.run(program)

        assert results == [[3.0 * step + 3 for step in range(20)]] * 3  # (0 + 1 + 2) + 3 * step

    def test_an_error_in_one_rank_ends_the_waits_of_the_others_and_is_the_one_that_is_raised(self):
        world, endings = LoopbackWorld(3, timeout_s=60), {}

        def program(rank):
            if rank == 1:
                raise KeyError("boom")
            try:
                world.communicator(rank).launch([AllReduce(torch.ones(1))], label="sum").wait()
            except CollectiveError as error:
                endings[rank] = str(error), type(error.__cause__)
                raise

        with pytest.raises(KeyError, match="boom"):
            world.run(program)

        text = "[rank {}] gave up waiting for collective 0: another rank failed with KeyError"
        assert endings == {rank: (text.format(rank), KeyError) for rank in (0, 2)}

    def test_a_mismatch_in_threads_is_raised_as_a_mismatch(self):
        world = LoopbackWorld(2, timeout_s=60)

        with pytest.raises(MismatchedCollectiveError):
            world.run(lambda rank: world.communicator(rank).launch([AllReduce(torch.ones(rank + 1))], label="a").wait())


class TestSubgroup:
    def test_its_collectives_are_those_of_its_members_in_the_order_given(self, completion):
        world = LoopbackWorld(4, completion=completion)
        group, gathered = world.subgroup([3, 1]), {rank: torch.full((2,), float(rank)) for rank in (1, 3)}
        sums = {rank: torch.tensor([10.0**rank]) for rank in (1, 3)}

        handles = [group[rank].launch([AllReduce(sums[rank])], label="sum") for rank in (1, 3)]
        handles += [
            group[rank].launch([AllGather(gathered[rank], gathered[rank][place : place + 1])], label="gather")
            for rank, place in ((1, 1), (3, 0))
        ]
        for handle in handles:
            handle.wait()

        assert [(group[rank].rank, group[rank].size, tuple(group[rank].members)) for rank in (1, 3)] == [
            (1, 2, (3, 1)),
            (0, 2, (3, 1)),
        ]
        assert [sums[rank].item() for rank in (1, 3)] == [1010.0, 1010.0]
        assert [gathered[rank].tolist() for rank in (1, 3)] == [[3.0, 1.0]] * 2

    def test_groups_have_orders_of_their_own_also_those_of_the_same_ranks(self):
        world = LoopbackWorld(2)
        first, second = world.subgroup([0, 1]), world.subgroup([0, 1])
        tensors = [torch.ones(1), torch.ones(1)]

        first[0].launch([AllReduce(tensors[0])], label="a")
        second[0].launch([Broadcast(torch.ones(3))], label="b")
        first[0].control.launch([Broadcast(torch.ones(2))], label="c")
        second[1].launch([Broadcast(torch.ones(3))], label="b").wait()
        first[1].launch([AllReduce(tensors[1])], label="a").wait()

        assert [text.split(" [")[0] for text in world.schedule(0)] == ["a", "b", "c"]
        assert [text.split(" [")[0] for text in world.schedule(1)] == ["b", "a"]
        assert [tensor.item() for tensor in tensors] == [2.0, 2.0]

    def test_a_mismatch_names_ranks_of_the_world(self):
        group = LoopbackWorld(6).subgroup([5, 2])
        group[5].launch([Broadcast(torch.ones(4), root=1)], label="a")

        with pytest.raises(MismatchedCollectiveError) as caught:
            group[2].launch([Broadcast(torch.ones(4))], label="a")

        assert (caught.value.rank, caught.value.other_rank) == (2, 5)
        assert caught.value.other_call == "a [broadcast from rank 2 of 4 x float32]"

    def test_a_write_in_flight_is_named_by_the_rank_of_the_world(self):
        world = LoopbackWorld(4, completion="manual")
        group, tensors = world.subgroup([3, 1]), {rank: torch.ones(2) for rank in (1, 3)}
        for rank, communicator in group.items():
            communicator.launch([AllReduce(tensors[rank])], label="a")
        tensors[3][1] = 7

        assert world.pending == (0,)
        with pytest.raises(InFlightWriteError, match=r"^\[rank 3\] the input of collective 0") as caught:
            world.complete(0)
        assert caught.value.index == 1

    def test_one_thread_is_told_which_members_are_missing(self):
        handle = LoopbackWorld(4).subgroup([3, 1, 0])[1].launch([AllReduce(torch.ones(2))], label="a")

        with pytest.raises(CollectiveDeadlockError) as caught:
            handle.wait()

        assert (caught.value.rank, caught.value.missing_ranks) == (1, (0, 3))

    def test_ranks_that_wait_for_each_other_in_two_groups_are_told_where(self):
        world = LoopbackWorld(3, timeout_s=60)
        left, right, endings = world.subgroup([0, 1]), world.subgroup([1, 0]), {}

        def program(rank):
            if rank == 2:
                return
            group = (left, right)[rank]
            try:
                group[rank].launch([AllReduce(torch.ones(1))], label=f"of rank {rank}").wait()
            except CollectiveError as error:
                endings[rank] = str(error)
                raise

        with pytest.raises(CollectiveDeadlockError) as caught:
            world.run(program)

        rank, number = caught.value.rank, caught.value.sequence  # of the one that began to wait last
        mine, others = (f"of rank {each} [all_reduce sum of 1 x float32]" for each in (rank, 1 - rank))
        assert endings[rank] == (
            f"[rank {rank}] waits for collective {number} ({mine}), which rank(s) {1 - rank} have not launched; "
            f"rank {1 - rank} waits for collective {1 - number} ({others}). "
            "Launch it on every rank before waiting, or run the ranks in threads."
        )
        assert endings[1 - rank] == (
            f"[rank {1 - rank}] gave up waiting for collective {1 - number}: another rank failed with CollectiveDeadlockError"
        )

    def test_a_rank_that_breaks_off_ends_the_waits_in_all_groups(self):
        world, has_ended = LoopbackWorld(3, timeout_s=60), threading.Event()
        group = world.subgroup([0, 1])

        def program(rank):
            if rank == 2:
                error = WrapperBrokenError(step=0, rank=2, phase="backward", cause="it was told to")
                world.communicator(2).break_off(error)
            elif rank == 1:
                assert has_ended.wait(30)
            else:
                with pytest.raises(WrapperBrokenError):
                    group[0].launch([AllReduce(torch.ones(1))], label="a").wait()
                has_ended.set()

        world.run(program)

    @pytest.mark.parametrize("is_first", [True, False])
    def test_its_launches_are_recorded_as_those_of_the_newest_communicator_of_the_rank(self, is_first):
        world, recorder = LoopbackWorld(2), ListRecorder()
        early = world.subgroup([0, 1]) if is_first else None
        world.communicator(0, ListRecorder())
        communicator = world.communicator(0, recorder)
        group = early or world.subgroup([0, 1])

        communicator.progress.enter(7, "backward")
        for member in group.values():
            member.launch([AllReduce(torch.ones(1))], label="a")
            member.control.launch([AllReduce(torch.ones(1))], label="b")

        assert [record.label for record in recorder.collectives] == ["a", "b"]
        assert (group[0].progress.step, group[0].launches.last, group[1].launches.last) == (7, 2, 2)

    @pytest.mark.parametrize("ranks", [[], [0, 0], [0, 2], [-1, 0]], ids=str)
    def test_ranks_that_are_no_group_of_the_world_are_refused(self, ranks):
        with pytest.raises(ValueError, match="a group in a world of 2 needs different ranks of it, got") as caught:
            LoopbackWorld(2).subgroup(ranks)

        assert str(caught.value).endswith(f"got {ranks}")


NUM_RANKS = 4
GROUPS = [(0, 1), (1, 2), (2, 3), (0, 3), (0, 1, 2, 3), (1, 3)]


def ends(programs):
    """Whether ranks that each do their collectives one after the other all come to an end."""
    done = [0] * NUM_RANKS  # collectives that each rank has launched; it waits for the last of them

    def num_launched(rank, group):
        return programs[rank][: done[rank]].count(group)

    def goes_on(rank):
        group = programs[rank][done[rank] - 1] if done[rank] else None
        return group is None or all(num_launched(other, group) >= num_launched(rank, group) for other in GROUPS[group])

    while moved := [rank for rank in range(NUM_RANKS) if done[rank] < len(programs[rank]) and goes_on(rank)]:
        for rank in moved:
            done[rank] += 1
    return all(done[rank] == len(programs[rank]) and goes_on(rank) for rank in range(NUM_RANKS))


IN_ONE_ORDER = st.lists(st.integers(0, len(GROUPS) - 1), max_size=8).map(
    lambda order: [[group for group in order if rank in GROUPS[group]] for rank in range(NUM_RANKS)]
)


@st.composite
def shuffled(draw):
    programs = [draw(st.permutations(program)) for program in draw(IN_ONE_ORDER)]
    dropped = draw(st.none() | st.integers(0, NUM_RANKS - 1))
    return [program[:-1] if rank == dropped else program for rank, program in enumerate(programs)]


@given(programs=IN_ONE_ORDER | shuffled())
def test_ranks_with_collectives_in_several_groups_come_to_an_end_or_are_told_that_they_cannot(programs):
    world = LoopbackWorld(NUM_RANKS, timeout_s=600)  # longer than a test may take: nothing here may be found by waiting
    groups = [world.subgroup(ranks) for ranks in GROUPS]

    def program(rank):
        results = []
        for group in programs[rank]:
            tensor = torch.tensor([2.0**rank])
            groups[group][rank].launch([AllReduce(tensor)], label=f"group {group}").wait()
            results.append(tensor.item())
        return results

    if ends(programs):
        sums = [sum(2.0**rank for rank in ranks) for ranks in GROUPS]
        assert world.run(program) == [[sums[group] for group in own] for own in programs]
    else:
        with pytest.raises(CollectiveDeadlockError):
            world.run(program)


@pytest.mark.parametrize("size", [0, -1])
def test_a_world_without_ranks_is_refused(size):
    with pytest.raises(ValueError, match=f"a world needs at least one rank, got size={size}"):
        LoopbackWorld(size)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(ValueError, match=rf"rank {rank} is not in a world of 2 \(ranks count from 0\)"):
        LoopbackWorld(2).communicator(rank)
