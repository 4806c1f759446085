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
