"""What the stage relies on in ``torch.distributed.pipelining``, and what it refuses. Training: tests/ranks."""

import inspect
import logging

import pytest
import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.nn.functional import mse_loss

import megabucket as mb
from megabucket.ddp.step import StepState
from megabucket.errors import ConfigError, PeerFailedError
from megabucket.integrations.pipelining import PipelineStage
from megabucket.testing import LoopbackWorld

ROWS, MICROBATCHES = 8, 4


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Counting(torch.nn.Linear):
    """Counts its forwards, and fails in one of them."""

    num_forwards = 0
    failing = -1

    def forward(self, inputs):
        self.num_forwards += torch.is_grad_enabled()  # torch 2.11 infers shapes with the module itself
        if self.num_forwards == self.failing:
            raise ValueError("out of luck")
        return super().forward(inputs)


def make_stage(module=None, **fields):
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, **fields)
    ddp = mb.DistributedDataParallel(Counting(4, 4) if module is None else module, config)
    stage = PipelineStage(ddp, 0, 1, torch.device("cpu"))
    return ddp, stage, pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=stage.reporting(mse_loss))


def test_the_methods_of_torch_that_it_replaces_are_there_with_these_arguments():
    torchs = pipelining.PipelineStage
    names = ["forward_maybe_with_nosync", "backward_maybe_with_nosync", "scale_grads", "perform_reduce_grad"]

    for name in names:
        given, own = (list(inspect.signature(getattr(cls, name)).parameters) for cls in (torchs, PipelineStage))
        assert own == given, name


def test_the_forward_from_which_torch_infers_shapes_opens_no_step(one_rank):
    ddp, _, schedule = make_stage()
    states = []
    ddp.module.register_forward_hook(lambda *_: states.append(ddp.sync.state))
    batch = torch.randn(ROWS, 4)

    schedule.step(batch, target=batch)

    assert ddp.sync.counters.num_microbatches == MICROBATCHES
    # The first one is that of the inference, of a shallow copy of the module, which shares its hooks.
    assert states == [StepState.IDLE, *[StepState.OPEN] * MICROBATCHES]
    ddp.zero_grad()
    ddp.detach()


def test_an_evaluation_between_two_steps_is_part_of_none(one_rank):
    """Without ``no_grad()`` and ``eval()``, which torch's schedules do not ask for."""
    weights = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        ddp, _, schedule = make_stage()
        optimizer = mb.DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
        for _ in range(3):
            batch = torch.randn(ROWS, 4)
            if evaluates:
                outputs = schedule.eval(batch, target=batch, losses=(losses := []))
                # By microbatch: some processors round a product of two rows otherwise than one of eight.
                expected = [torch.nn.Linear.forward(ddp.module, part) for part in batch.chunk(MICROBATCHES)]
                assert torch.equal(outputs, torch.cat(expected))
                assert len(losses) == MICROBATCHES
                assert ddp.sync.state is StepState.IDLE
            schedule.step(batch, target=batch)
            assert optimizer.step().updated
            optimizer.zero_grad()
        ddp.detach()
        weights.append(ddp.module.weight)

    assert torch.equal(*weights)


def test_an_exception_in_the_loss_of_an_evaluation_is_that_of_its_caller(one_rank):
    def fail(*_):
        raise ValueError("no loss")

    ddp, stage, _ = make_stage()
    schedule = pipelining.ScheduleGPipe(stage, MICROBATCHES, loss_fn=stage.reporting(fail))
    batch = torch.randn(ROWS, 4)

    with pytest.raises(ValueError, match="no loss"):
        schedule.eval(batch, target=batch)

    assert ddp.sync.state is StepState.IDLE
    ddp.detach()


def test_a_failed_forward_ends_with_its_error_at_the_optimizers_step_and_is_logged_where_it_was(one_rank, caplog):
    ddp, _, schedule = make_stage()
    optimizer = mb.DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
    before, batch = ddp.module.weight.detach().clone(), torch.randn(ROWS, 4)
    ddp.module.failing = 2

    with caplog.at_level(logging.ERROR, logger="megabucket"):
        schedule.step(batch, target=batch, losses=(losses := []))
    with pytest.raises(PeerFailedError, match="failed in forward: ValueError: out of luck"):
        optimizer.step()

    assert "out of luck" in caplog.text
    assert "in forward\n" in caplog.text  # the traceback
    assert [bool(loss.isnan()) for loss in losses] == [False, True, True, True]
    assert torch.equal(ddp.module.weight, before)
    optimizer.zero_grad()
    schedule.step(batch, target=batch)
    assert optimizer.step().updated
    ddp.detach()


def test_a_module_that_is_not_wrapped_is_refused():
    with pytest.raises(ConfigError, match=r"got a Linear that megabucket has not wrapped.*Pass mb.DistributedDataParallel"):
        PipelineStage(torch.nn.Linear(4, 4), 0, 1, torch.device("cpu"))


def test_a_sync_that_would_wait_for_other_stages_in_the_schedule_is_refused():
    world = LoopbackWorld(2)
    alone = [world.subgroup([rank])[rank] for rank in range(2)]

    def program(rank):
        groups = mb.ParallelGroups({"dense": alone[rank]}, step_group=world.communicator(rank))
        ddp = mb.DistributedDataParallel(torch.nn.Linear(4, 4), groups=groups)
        with pytest.raises(ConfigError, match=r"2 ranks agree on the steps of a stage that 1 ranks hold.*finish='explicit'"):
            PipelineStage(ddp, rank, 2, torch.device("cpu"))

    world.run(program)
