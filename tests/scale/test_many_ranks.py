"""What grows with the number of ranks, and what does not, counted on real code: one rank of many, many ranks in one process."""

from dataclasses import replace

import pytest
import torch
from one_of_many import OneOfMany

import megabucket as mb
from megabucket.comm import AllGather, AllReduce, Broadcast, ReduceOp, ReduceScatter, exchange
from megabucket.config.resolve import resolve_step
from megabucket.ddp.fence import Fence
from megabucket.ddp.report import Problem, RankReport
from megabucket.errors import LayoutMismatchError, MegabucketError, PeerFailedError, ReplicasDivergedError, UnusedParameterError
from megabucket.testing import ListRecorder, LoopbackWorld
from megabucket.testing.loopback import MismatchedCollectiveError

pytestmark = pytest.mark.long_file

CPU = torch.device("cpu")
SIZES = (2, 1_024, 16_384)
CONFIGS = {
    "all-reduce": mb.DistributedDataParallelConfig(bucket_size=16_384),
    "reduce-scatter": mb.DistributedDataParallelConfig(bucket_size=16_384, use_distributed_optimizer=True),
    "gather in forward": mb.DistributedDataParallelConfig(
        bucket_size=16_384, use_distributed_optimizer=True, overlap_param_gather=True
    ),
}


def linears(num_linears, features=8):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(features, features) for _ in range(num_linears)])


class TestOneOfMany:
    """Its collectives are those of a world where all ranks contribute the same."""

    @pytest.mark.parametrize("op", ReduceOp)
    @pytest.mark.parametrize("kind", [AllReduce, ReduceScatter, AllGather, Broadcast])
    def test_gives_what_a_world_of_equal_ranks_gives(self, kind, op):
        size = 3

        def call_of(rank):
            full = torch.arange(6.0)
            shard = full[2 * rank : 2 * rank + 2]
            if kind is AllGather:
                shard.copy_(torch.tensor([5.0, 7.0]))
            calls = {
                AllReduce: AllReduce(full, op),
                ReduceScatter: ReduceScatter(shard, full, op),
                AllGather: AllGather(full, shard),
                Broadcast: Broadcast(full, root=2),
            }
            return calls[kind]

        world = LoopbackWorld(size)
        in_world = [call_of(rank) for rank in range(size)]
        for rank, call in enumerate(in_world):
            world.communicator(rank).launch([call], label="x")
        alone = [call_of(rank) for rank in range(size)]
        for rank, call in enumerate(alone):
            OneOfMany(size=size, rank=rank).launch([call], label="x").wait()

        for one, other in zip(alone, in_world, strict=True):
            kept = "shard" if kind is ReduceScatter else "full"  # what a reduce-scatter leaves in the rest is undefined
            assert torch.equal(getattr(one, kept), getattr(other, kept))

    @pytest.mark.parametrize("rank", [-1, 4])
    def test_refuses_a_rank_that_is_not_there(self, rank):
        with pytest.raises(ValueError, match=f"rank {rank} is not in a world of 4"):
            OneOfMany(size=4, rank=rank)


def records_of(size, config):
    """Collectives of wrapping, and of the third step, of one rank of many."""
    recorder = ListRecorder(records_time=False)
    params = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1_024)) for _ in range(32)])  # 16 fill a bucket, to the end
    ddp = mb.DistributedDataParallel(params, config, communicator=OneOfMany(size=size, recorder=recorder))
    optimizer = mb.DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.0), ddp)
    setup = list(recorder.collectives)
    for _ in range(3):
        recorder.launches.clear()
        if config.overlap_param_gather:
            ddp.finish_param_sync()
        sum(param.sum() for param in params).backward()
        optimizer.step()
        optimizer.zero_grad()
    return setup, list(recorder.collectives)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_step_launches_and_sends_the_same_whatever_the_number_of_ranks(config):
    first, *others = [[replace(record, num_ranks=0) for record in records_of(size, config)[1]] for size in SIZES]

    assert len([record for record in first if record.label.startswith("bucket")]) == 2
    assert len([record for record in first if record.label.startswith("param gather")]) == 2 * config.use_distributed_optimizer
    assert [record.payload_bytes for record in first if record.label == "fence"] == [48]
    assert all(other == first for other in others)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_wrapping_asks_four_times_with_48_bytes_whatever_the_number_of_ranks(config):
    for size in SIZES:
        setup, _ = records_of(size, config)

        sent = [(record.label, record.payload_bytes) for record in setup if record.label != "initial broadcast"]
        assert sent == [
            ("wrap", 48),
            ("wrap: buffers", 48),
            ("wrap: parameters", 48),  # only with init_sync=True
            ("DistributedOptimizer()", 48),
        ]


@pytest.mark.parametrize(("size", "record_bytes"), [(2, 16_384), (4_096, 16_384), (8_192, 8_192), (32_768, 4_096)])
def test_a_failed_step_sends_shorter_reports_where_there_are_more_ranks(size, record_bytes):
    recorder = ListRecorder(records_time=False)
    policy = resolve_step(mb.DistributedDataParallelConfig())
    fence = Fence(OneOfMany(size=size, recorder=recorder), num_buckets=1, policy=policy, device=CPU)
    names = [f"layers.{index}.weight" for index in range(3_000)]

    fence.send(RankReport(0, problems=(Problem("UnusedParameterError", {"params": names, "bucket": 0}),)))
    fence.take(list)

    report = recorder.collectives[-1]
    assert (report.label, report.payload_bytes) == ("step report", size * (8 + record_bytes))


def test_comparing_replicas_takes_sixteen_bytes_for_each_parameter_whatever_the_number_of_ranks():
    for size in SIZES:
        recorder = ListRecorder(records_time=False)
        ddp = mb.DistributedDataParallel(linears(3), communicator=OneOfMany(size=size, recorder=recorder))
        recorder.launches.clear()
        ddp.check_replicas()

        sent = [(record.label, record.payload_bytes) for record in recorder.collectives]
        assert sent == [("check_replicas()", 48), ("replica checksums", 16 * 6)]


class TestManyRanksInOneProcess:
    NUM_RANKS = 72

    def play(self, config, steps=2, odd=lambda *_: None):
        world = LoopbackWorld(self.NUM_RANKS, timeout_s=120)

        def run(rank):
            ddp = mb.DistributedDataParallel(linears(3), config, communicator=world.communicator(rank))
            optimizer = mb.DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.125), ddp)
            errors = []
            for step in range(steps):
                try:
                    if step == 0:
                        odd(rank, ddp, optimizer)
                    ddp(torch.full((1, 8), float(rank))).sum().backward()
                    optimizer.step()
                except MegabucketError as error:
                    errors.append(error)
                optimizer.zero_grad()
            return ddp.layout.fingerprint, [param.detach().clone() for param in ddp.parameters()], errors

        results = world.run(run)
        return world, *map(list, zip(*results, strict=True))

    @pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "reduce-scatter"])
    def test_all_have_the_same_layout_schedule_and_weights(self, sharded):
        config = mb.DistributedDataParallelConfig(use_distributed_optimizer=sharded, bucket_size=100)

        world, fingerprints, params, errors = self.play(config)

        assert len(set(fingerprints)) == 1
        assert len({world.schedule(rank) for rank in range(self.NUM_RANKS)}) == 1
        assert errors == [[]] * self.NUM_RANKS
        assert all(torch.equal(one, first) for of_rank in params for one, first in zip(of_rank, params[0], strict=True))
        start = linears(3)
        assert not any(torch.equal(one, first) for one, first in zip(start.parameters(), params[0], strict=True))

    def test_all_raise_the_error_of_one_and_the_next_step_is_right(self):
        def leave_out(rank, ddp, optimizer):
            if rank == 70:
                ddp.module[:2](torch.ones(1, 8)).sum().backward()
                optimizer.step()

        config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=100)
        _, _, params, errors = self.play(config, odd=leave_out)

        assert {(type(error), str(error)) for of_rank in errors for error in of_rank} == {
            (UnusedParameterError, str(errors[0][0]))
        }
        assert [len(of_rank) for of_rank in errors] == [1] * self.NUM_RANKS
        assert "got no gradient on rank 70 of 72 ranks" in str(errors[0][0])
        assert all(torch.equal(one, first) for of_rank in params for one, first in zip(of_rank, params[0], strict=True))


class TestWhatRanksTellWhenTheyDiffer:
    """Texts of one rank for each kind of content, whatever the number of ranks."""

    def differ(self, size, entry_of, failure_of=lambda _: None):
        world = LoopbackWorld(size, timeout_s=30)

        def ask(rank):
            ddp = mb.DistributedDataParallel(linears(1), communicator=world.communicator(rank))
            before = len(world.schedule(rank))

            def call():
                with ddp.sync.call("wrap") as call:
                    call.entries = entry_of(rank)
                    call.open(failure_of(rank))

            with pytest.raises(MegabucketError) as caught:
                call()
            return caught.value, world.schedule(rank)[before:]

        answers = world.run(ask)
        assert {str(error) for error, _ in answers} == {str(answers[0][0])}
        return answers[0]

    @pytest.mark.parametrize("size", [2, 100])
    def test_one_odd_rank_means_two_texts(self, size):
        error, schedule = self.differ(size, lambda rank: [("same",), ("odd" if rank == size - 1 else "even",)])

        assert isinstance(error, LayoutMismatchError)
        assert f"entry 1: rank 0 has even, rank {size - 1} has odd (1 of 2 entries differ)" in str(error)
        assert [text.count("broadcast") for text in schedule] == [0, 0, 0, 2]  # fingerprint, reports, length, texts

    def test_the_first_rank_that_differs_in_an_entry_is_named(self):
        error, _ = self.differ(9, lambda rank: [("a" if rank < 4 else "b",), ("c" if rank < 7 else "d",)])

        assert "entry 0: rank 0 has a, rank 4 has b; entry 1: rank 0 has c, rank 7 has d (2 of 2" in str(error)

    def test_no_more_than_eight_texts_are_sent(self):
        error, schedule = self.differ(30, lambda rank: [(f"rank {rank}",)])

        assert "entry 0: rank 0 has rank 0, rank 1 has rank 1 (1 of 1 entries differ)" in str(error)
        assert [text.count("broadcast") for text in schedule] == [0, 0, 0, 8]

    def test_of_ranks_that_failed_only_the_first_says_why(self):
        def failure_of(rank):
            return ValueError(f"no model on rank {rank}") if rank > 20 else None

        error, schedule = self.differ(30, lambda rank: [(f"rank {rank}",)], failure_of)

        assert isinstance(error, PeerFailedError)
        assert error.rank == 21
        assert "ValueError: no model on rank 21" in str(error)
        assert [text.count("broadcast") for text in schedule] == [0, 0]  # it stands in the report

    def test_what_some_say_reaches_all_whatever_its_length(self):
        world = LoopbackWorld(5)
        texts = [b"", b"one", b"two " * 1_000, b"three", b"four"]

        heard = world.run(
            lambda rank: exchange(world.communicator(rank), texts[rank], speakers=[2, 0, 4], device=CPU, label="x")
        )

        assert heard == [[texts[2], texts[0], texts[4]]] * 5

    def test_replicas_that_differ_are_found_without_sending_all_checksums_to_all(self):
        world = LoopbackWorld(50, timeout_s=30)

        def run(rank):
            ddp = mb.DistributedDataParallel(linears(2), communicator=world.communicator(rank))
            if rank in (7, 9):
                with torch.no_grad():
                    ddp.module[1].weight[3, 3] += rank
            with pytest.raises(ReplicasDivergedError) as caught:
                ddp.check_replicas()
            return caught.value

        errors = world.run(run)

        assert {str(error) for error in errors} == {str(errors[0])}
        assert "the bits of '1.weight' (CRC-32) differ between ranks: " in str(errors[0])
        assert len(set(errors[0].by_rank)) == 3
        assert [errors[0].by_rank.count(errors[0].by_rank[rank]) for rank in (0, 7, 9)] == [48, 1, 1]
        # 4 parameters, largest and smallest of each; then 4 bytes and their length of each rank
        assert world.schedule(0)[-2:] == (
            "replica checksums [all_reduce max of 8 x int64]",
            f"checksums that differ [all_gather of {50 * 12} x uint8]",
        )


@pytest.mark.parametrize("odd", [1, 3, 5])
def test_an_odd_launch_is_found_wherever_it_comes(odd):
    """The loopback world compares each launch with one that stands for all before it."""
    world = LoopbackWorld(6)
    tensors = [torch.ones(8 if rank == odd else 4) for rank in range(6)]
    for rank in range(odd):
        world.communicator(rank).launch([AllReduce(tensors[rank])], label="x")

    with pytest.raises(MismatchedCollectiveError, match=f"rank {odd} "):
        world.communicator(odd).launch([AllReduce(tensors[odd])], label="x")
