"""The online figures over gloo, where the back-end's own thread tells when a collective is complete."""

import pytest
import torch
from odd_model import OddModel, flat, loss_of, tokens_of, trainable
from pool import Rank

import megabucket as mb
from megabucket.trace import Lane, StepTrace

pytestmark = pytest.mark.dist

MODES = [{}, {"use_distributed_optimizer": True}, {"use_distributed_optimizer": True, "overlap_param_gather": True}]


def traces_and_weights(rank: Rank, switches: dict[str, object]) -> tuple[list[StepTrace | None], torch.Tensor]:
    model = OddModel("float32", seed=0)
    ddp = mb.DistributedDataParallel(
        model, mb.DistributedDataParallelConfig(bucket_size=1, **switches), process_group=rank.group
    )
    optimizer = mb.DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.01), ddp)
    traces = []
    for step in range(3):
        loss_of(ddp, tokens_of(step, rank.index, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        traces.append(ddp.last_step_trace)
    ddp.finish_param_sync()
    weights = flat(trainable(model))
    ddp.detach()
    return traces, weights


@pytest.mark.parametrize("switches", MODES, ids=["all-reduce", "reduce-scatter", "gather in forward"])
def test_every_launch_is_timed_and_the_result_does_not_depend_on_it(pool, switches):
    traced = pool.run(traces_and_weights, {**switches, "step_traces": True}, ranks=2)
    plain = pool.run(traces_and_weights, switches, ranks=2)

    for (traces, weights), (none, plain_weights) in zip(traced, plain, strict=True):
        assert none == [None] * 3
        assert torch.equal(weights, plain_weights)
        assert [trace.step for trace in traces] == [0, 1, 2]
        for trace in traces:
            assert 0 < trace.comm_s <= trace.duration_s
            assert trace.overlap_fraction <= 1
            reductions = [launch for launch in trace.launches if launch.label.startswith("bucket")]
            assert len(reductions) > 3
            for launch in reductions:
                # Completion is told before the waiting thread goes on.
                assert launch.launched_s <= launch.done_s <= launch.wait_stop_s <= trace.stop_s
    labels = [{launch.label for launch in traces[1].launches} for traces, _ in traced]
    assert labels[0] == labels[1]


def test_a_gather_that_forward_waits_for_is_on_the_comm_lane_of_both_steps(pool):
    (traces, _), _ = pool.run(traces_and_weights, {**MODES[2], "step_traces": True}, ranks=2)

    second = traces[1]
    waited = {part.label for part in second.intervals if part.lane is Lane.WAIT and part.label.startswith("param gather")}
    launched = {launch.label for launch in traces[0].launches if launch.label.startswith("param gather")}
    assert waited == launched


Range = tuple[str, float, float]


def ranges_in_torch_profiler(rank: Rank, switches: dict[str, object]) -> tuple[list[str], list[Range], torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    config = mb.DistributedDataParallelConfig(bucket_size=1, **switches)
    ddp = mb.DistributedDataParallel(model, config, process_group=rank.group)
    optimizer = mb.DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.01), ddp)

    def step() -> None:
        ddp(torch.full((2, 8), 1.0 + rank.index)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ddp.finish_param_sync()  # torch's profiler may fail where it ends, or begins, while a collective is on its way

    step()  # nothing overlaps in the first step
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        step()
    found = [(e.name, e.time_range.start, e.time_range.end) for e in profiler.events() if e.name.startswith("megabucket")]
    groups, weights = [group.label for group in ddp.bucket_groups], flat(trainable(model))
    ddp.detach()
    return groups, found, weights


@pytest.mark.parametrize("switches", MODES[::2], ids=["all-reduce", "gather in forward"])
def test_torch_profiler_shows_a_range_of_each_launch_and_wait_and_of_the_optimizer(pool, switches):
    named = pool.run(ranges_in_torch_profiler, {**switches, "profiler_ranges": True}, ranks=2)
    plain = pool.run(ranges_in_torch_profiler, switches, ranks=2)

    for (groups, found, weights), (_, none, plain_weights) in zip(named, plain, strict=True):
        assert none == []
        assert torch.equal(weights, plain_weights)
        gathers = [group.replace("bucket", "param gather") for group in groups] if switches else []
        labels = [*groups, *gathers, "fence", *(["grad norm"] if switches else [])]
        names = sorted(name.removeprefix("megabucket: ") for name, _, _ in found)
        calls = [f"{call} {label}" for call in ("launch", "wait for") for label in labels]
        assert names == sorted(["optimizer", *calls])
        # As ranges of one thread, two are apart or one is in the other.
        spans = sorted((start, -stop) for _, start, stop in found)
        assert all(-b_stop <= -a_stop or b >= -a_stop for i, (a, a_stop) in enumerate(spans) for b, b_stop in spans[i + 1 :])
