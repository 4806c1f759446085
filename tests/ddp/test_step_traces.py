"""``last_step_trace``: what the wrapper notes of its steps, in every way of taking one."""

import logging
import time
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from loop_ranks import Ranks, Weights

import megabucket as mb
from megabucket.cli.explain_text import resolve
from megabucket.config import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import PeerFailedError
from megabucket.testing import ListRecorder, LoopbackWorld
from megabucket.trace import Lane

TRACED = {"bucket_size": 1, "step_traces": True}
SHARDED = {"use_distributed_optimizer": True}
MODES = {
    "all-reduce": {},
    "no overlap": {"overlap_grad_reduce": False},
    "reduce-scatter": SHARDED,
    "gather in forward": {**SHARDED, "overlap_param_gather": True},
    "no fence": {"fence": False},
}
FACTORS = {"a": 1.0, "b": 2.0, "c": 3.0}


def optimizer_of(ddp, *, is_plain=False):
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    return sgd if is_plain else mb.DistributedOptimizer(sgd, ddp)


def take_step(ddp, optimizer, *, microbatches=1):
    for microbatch in range(microbatches):
        with nullcontext() if microbatch == microbatches - 1 else ddp.no_sync():
            ddp(**FACTORS).backward()
    optimizer.step()
    optimizer.zero_grad()
    return ddp.last_step_trace


def labels(trace):
    return [launch.label for launch in trace.launches]


@pytest.mark.parametrize("switches", MODES.values(), ids=MODES)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_each_step_has_a_trace_with_all_its_launches_and_phases(switches, microbatches):
    ranks = Ranks(2, Weights("abc"), **TRACED, **switches)

    def train(rank, ddp):
        optimizer = optimizer_of(ddp)
        return [take_step(ddp, optimizer, microbatches=microbatches) for _ in range(3)]

    for rank, traces in enumerate(ranks.run(train)):
        assert [(trace.step, trace.rank) for trace in traces] == [(0, rank), (1, rank), (2, rank)]
        assert all(one.stop_s <= next_one.start_s for one, next_one in pairwise(traces))
        launched = [label for label in ranks.schedule(rank) if label != "DistributedOptimizer()"]  # before the first step
        assert [label for trace in traces for label in labels(trace)] == launched
        for trace in traces:
            phases = [part.label for part in trace.intervals if part.lane is Lane.COMPUTE]
            assert phases == [*["forward", "backward"] * microbatches, "optimizer"]
            assert 0 <= trace.exposed_s <= trace.duration_s
            assert 0 <= trace.overlap_fraction <= 1
            for launch in trace.launches:
                assert trace.start_s <= launch.launched_s < trace.stop_s


@pytest.mark.parametrize("overlaps", [True, False])
def test_buckets_are_ready_in_backward_and_launched_there_if_they_overlap(overlaps):
    ranks = Ranks(2, Weights("abc"), **TRACED, overlap_grad_reduce=overlaps)

    def train(rank, ddp):
        optimizer = optimizer_of(ddp)
        return [take_step(ddp, optimizer) for _ in range(3)]

    first, *others = ranks.run(train)[0]
    # What completes a bucket is learned in the first step.
    assert [launch.ready_s for launch in first.launches if launch.label != "fence"] == [None] * 3
    for trace in others:
        buckets = [launch for launch in trace.launches if launch.label != "fence"]
        last_ready_s = max(launch.ready_s for launch in buckets)
        assert all(launch.ready_s <= launch.launched_s <= launch.done_s <= launch.wait_stop_s for launch in buckets)
        assert (buckets[0].launched_s < last_ready_s) == overlaps


def test_the_wait_for_a_gather_is_exposed_in_the_forward_that_needs_it():
    ranks = Ranks(2, Weights("abc"), **TRACED, **SHARDED, overlap_param_gather=True)

    def train(rank, ddp):
        optimizer = optimizer_of(ddp)
        return [take_step(ddp, optimizer) for _ in range(2)]

    first, second = ranks.run(train)[0]
    gathers = [launch for launch in first.launches if launch.label.startswith("param gather")]
    assert len(gathers) == 3
    assert all(launch.wait_start_s is None for launch in gathers)  # not in the step that launched them
    forward = next(part for part in second.intervals if part.label == "forward")
    waits = [part for part in second.intervals if part.lane is Lane.WAIT and part.label.startswith("param gather")]
    assert len(waits) == 3
    assert all(forward.start_s <= part.start_s <= part.stop_s <= forward.stop_s for part in waits)


def test_what_the_caller_does_between_its_backwards_and_the_optimizer_is_no_computation():
    ranks = Ranks(2, Weights("abc"), **TRACED, **SHARDED)

    def train(rank, ddp):
        optimizer = optimizer_of(ddp)
        returned_s = []
        for context in (ddp.no_sync(), nullcontext()):
            with context:
                ddp(**FACTORS).backward()
            returned_s.append(time.perf_counter())
        optimizer.step()
        return returned_s, ddp.last_step_trace

    for returned_s, trace in ranks.run(train):
        backwards = [part for part in trace.intervals if part.label == "backward"]
        assert all(part.stop_s <= moment_s for part, moment_s in zip(backwards, returned_s, strict=True))


def test_with_a_plain_optimizer_the_step_ends_with_it():
    ranks = Ranks(2, Weights("abc"), **TRACED)

    def train(rank, ddp):
        optimizer = optimizer_of(ddp, is_plain=True)
        ddp(**FACTORS).backward()
        reduced = ddp.last_step_trace
        optimizer.step()
        return reduced, ddp.last_step_trace

    reduced, stepped = ranks.run(train)[0]
    assert reduced.step == stepped.step == 0
    assert [part.label for part in reduced.intervals if part.lane is Lane.COMPUTE] == ["forward", "backward"]
    assert [part.label for part in stepped.intervals if part.lane is Lane.COMPUTE] == ["forward", "backward", "optimizer"]
    assert reduced.stop_s < stepped.stop_s


def test_with_an_explicit_finish_the_trace_ends_where_the_caller_finishes():
    ranks = Ranks(2, Weights("abc"), **TRACED, finish="explicit")

    def train(rank, ddp):
        ddp(**FACTORS).backward()
        before = ddp.last_step_trace
        ddp.finish_grad_sync()
        return before, ddp.last_step_trace

    for before, after in ranks.run(train):
        assert before is None
        assert labels(after) == ["bucket 0", "bucket 1", "bucket 2", "fence"]


def test_forwards_that_do_not_train_begin_no_step():
    ranks = Ranks(2, Weights("abc"), **TRACED)

    def train(rank, ddp):
        trace = take_step(ddp, optimizer_of(ddp))
        ddp.eval()
        with torch.no_grad():
            ddp(**FACTORS)
        return trace, ddp.last_step_trace

    for trace, later in ranks.run(train):
        assert trace == later


def failing_step(rank, ddp, optimizer):
    with ddp.step():
        loss = ddp(**FACTORS)
        if rank == 1:
            raise KeyError("boom")
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("switches", [{}, SHARDED], ids=["all-reduce", "reduce-scatter"])
def test_a_step_that_fails_ends_and_the_next_one_has_a_trace_of_its_own(switches):
    ranks = Ranks(2, Weights("abc"), **TRACED, **switches)

    def train(rank, ddp):
        optimizer = optimizer_of(ddp)
        take_step(ddp, optimizer)
        with pytest.raises(PeerFailedError):
            failing_step(rank, ddp, optimizer)
        optimizer.zero_grad()
        return ddp.last_step_trace, take_step(ddp, optimizer)

    for failed, after in ranks.run(train):
        assert (failed.step, after.step) == (1, 2)
        assert labels(failed)[:4] == ["bucket 0", "bucket 1", "bucket 2", "fence"]
        assert "optimizer" not in [part.label for part in failed.intervals]
        assert labels(after)[:4] == ["bucket 0", "bucket 1", "bucket 2", "fence"]
        assert failed.stop_s <= after.start_s


def test_a_rebuild_goes_on_with_the_new_buckets():
    ranks = Ranks(2, Weights("abc"), **TRACED)

    def train(rank, ddp):
        optimizer = optimizer_of(ddp)
        take_step(ddp, optimizer)
        ddp.module.b.requires_grad_(False)
        ddp.rebuild()
        return [take_step(ddp, optimizer) for _ in range(2)]

    for traces in ranks.run(train):
        assert [trace.step for trace in traces] == [1, 2]
        assert labels(traces[1]) == ["bucket 0", "bucket 1", "fence"]


def test_after_detach_nothing_is_noted_any_more_and_the_last_trace_stays():
    ranks = Ranks(2, Weights("abc"), **TRACED)

    def train(rank, ddp):
        trace = take_step(ddp, optimizer_of(ddp))
        module = ddp.detach()
        module(**FACTORS).backward()
        return trace == ddp.last_step_trace, ddp.communicator.recorders.active

    assert ranks.run(train) == [(True, ())] * 2


def test_without_step_traces_nobody_listens_and_there_is_no_trace():
    ranks = Ranks(2, Weights("abc"), bucket_size=1)

    def train(rank, ddp):
        take_step(ddp, optimizer_of(ddp))
        return ddp.last_step_trace, ddp.communicator.recorders.active

    assert ranks.run(train) == [(None, ())] * 2


def test_a_recorder_that_was_given_still_gets_everything():
    world, recorders = LoopbackWorld(2), [ListRecorder(), ListRecorder()]
    config = DistributedDataParallelConfig(**TRACED)

    def train(rank):
        communicator = world.communicator(rank, recorders[rank])
        ddp = DistributedDataParallel(Weights("ab"), config, communicator=communicator)
        recorders[rank].launches.clear()
        ddp(a=1.0, b=1.0).backward()
        return ddp.last_step_trace, communicator.recorders.active

    for (trace, _), recorder in zip(world.run(train), recorders, strict=True):
        assert tuple(recorder.collectives) == trace.collectives
        assert {one.record.label for one in recorder.launches if one.wait_stop is not None} == {"bucket 0", "bucket 1", "fence"}


def test_of_wrappers_that_share_a_communicator_the_last_one_has_the_figures():
    world = LoopbackWorld(1)
    communicator = world.communicator(0)
    config = DistributedDataParallelConfig(**TRACED)
    first, second = (DistributedDataParallel(Weights("ab"), config, communicator=communicator) for _ in range(2))

    for ddp in (first, second):
        ddp(a=1.0, b=1.0).backward()
    first.detach()

    assert first.last_step_trace is None
    assert second.last_step_trace.step == 0
    assert len(communicator.recorders.active) == 1


def test_one_rank_has_traces_without_communication():
    ddp = DistributedDataParallel(Weights("abc"), DistributedDataParallelConfig(**TRACED))

    trace = take_step(ddp, optimizer_of(ddp))

    assert (trace.comm_s, trace.overlap_fraction, trace.launches) == (0, None, ())
    assert trace.compute_s > 0


# The warning at the start #

OBSTACLES = {
    "one bucket": {},
    "bucket larger than the model": {"bucket_size": 10_000},
    "one batch": {"bucket_size": 1, "bucket_groups": "single"},
    "overlap off": {"bucket_size": 1, "overlap_grad_reduce": False, "step_traces": True},
}


@pytest.mark.parametrize("switches", OBSTACLES.values(), ids=OBSTACLES)
def test_the_first_rank_says_once_why_nothing_will_overlap_as_explain_does(switches, caplog):
    for _ in range(2):
        Ranks(2, Weights("abc"), **switches)

    config = DistributedDataParallelConfig(**switches)
    explained = resolve(config, dp_size=2, total_numel=300)["overlaps_backward"]
    assert explained.value is False
    assert [(record.name, record.levelno, record.getMessage()) for record in caplog.records] == [
        ("megabucket", logging.WARNING, f"megabucket: communication cannot overlap backward: {explained.reason}")
    ]


@pytest.mark.parametrize(
    ("size", "switches"),
    [(2, {"bucket_size": 1}), (2, {"overlap_grad_reduce": False}), (1, {"bucket_size": 1})],
    ids=["it overlaps", "the user has switched it off", "one rank"],
)
def test_nothing_is_said_where_nothing_is_amiss(size, switches, caplog):
    Ranks(size, Weights("abc"), **switches)

    assert caplog.records == []
