"""Collective calls inside a backward: a fault of their own rank, which is told once, and the next step is right."""

import pytest
import torch
from loop_ranks import Ranks, Weights
from torch.utils.checkpoint import checkpoint

from megabucket import AgreedStop, DistributedDataParallel, DistributedOptimizer, ShardedEMA, finalize_grads
from megabucket.errors import MegabucketError, PeerFailedError

MODES = [pytest.param(False, id="all-reduce"), pytest.param(True, id="reduce-scatter")]
FAULTY, FAULTY_STEP, NUM_STEPS = 1, 1, 4

CALLS = {
    "check_replicas()": lambda ddp, _: ddp.check_replicas(),
    "broadcast_params()": lambda ddp, _: ddp.broadcast_params(),
    "rebuild()": lambda ddp, _: ddp.rebuild(),
    "state_dict()": lambda _, optimizer: optimizer.state_dict(),
    "state_dict() of an average": lambda _, optimizer: ShardedEMA(optimizer, decay=0.5).values(),
    "load_state_dict()": lambda _, optimizer: optimizer.load_state_dict({"state": {}, "param_groups": []}),
    "DistributedOptimizer()": lambda ddp, _: DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp),
    "a step of the optimizer": lambda _, optimizer: optimizer.step(),
    "a step of the optimizer, by clip_grad_norm_()": lambda _, optimizer: optimizer.clip_grad_norm_(1.0),
    "zero_grad()": lambda _, optimizer: optimizer.zero_grad(),
    "start_grad_sync()": lambda ddp, _: ddp.start_grad_sync(),
    "finish_grad_sync()": lambda ddp, _: ddp.finish_grad_sync(),
    "finalize_grads()": lambda ddp, _: finalize_grads(ddp),
}


class CallsInBackward(torch.autograd.Function):
    """The identity, whose backward makes a call."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None


class Calling(Weights):
    """Makes a call in its backward."""

    def __init__(self, where):
        super().__init__("ab")
        self.where, self.call = where, None

    def forward(self, **factors):
        def inner(weight):
            if torch._C._current_graph_task_id() >= 0:
                self.call()
            return weight.sin() * 0 + weight

        rows = [weight * factors[name] for name, weight in self.named_parameters()]
        if self.where == "a node":
            rows[0] = CallsInBackward.apply(rows[0], self.call)
        elif self.where == "a hook":
            rows[0].register_hook(lambda _: self.call())
        else:
            rows[0] = checkpoint(inner, rows[0], use_reentrant=False)
        return sum(row.sum() for row in rows)


@pytest.mark.pairs
@pytest.mark.parametrize("where", ["a node", "a hook", "a recomputation"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("is_sharded", MODES)
def test_it_is_refused_on_its_rank_once_and_the_next_step_is_right(is_sharded, name, where):
    ranks = Ranks(2, Calling(where), use_distributed_optimizer=is_sharded)

    def program(rank, ddp):
        optimizer, seen = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp), []

        def call():
            if (rank, step) == (FAULTY, FAULTY_STEP):
                CALLS[name](ddp, optimizer)

        ddp.module.call = call
        for step in range(NUM_STEPS):
            try:
                ddp(a=4**step, b=4**step).backward()
                optimizer.step()
            except MegabucketError as error:
                seen.append((step, type(error).__name__, str(error)))
            optimizer.zero_grad()
        ddp.finish_param_sync()
        return seen, 1 - ddp.module.a[0].item(), ddp.last_error

    for rank, (seen, moved, agreed) in enumerate(ranks.run(program)):
        ((step, kind, text),) = seen
        assert (step, kind) == (FAULTY_STEP, "PhaseError" if rank == FAULTY else "PeerFailedError")
        assert rank != FAULTY or f"{name.split(',')[0].removesuffix(' of an average')} was called inside a backward" in text
        assert (type(agreed), agreed.phase) == (PeerFailedError, "backward")
        assert moved == sum(4**step for step in range(NUM_STEPS) if step != FAULTY_STEP)


@pytest.mark.parametrize("is_sharded", MODES)
def test_wrapping_and_polling_are_refused_there_too(is_sharded):
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=is_sharded, fence=False)

    def program(rank, ddp):
        texts = []

        def call():
            for make in (lambda: DistributedDataParallel(torch.nn.Linear(2, 2)), AgreedStop(ddp).poll):
                with pytest.raises(MegabucketError) as caught:
                    make()
                texts.append(str(caught.value))

        CallsInBackward.apply(torch.ones(1, requires_grad=True), call).backward()
        return ["inside a backward" in text for text in texts]

    assert ranks.run(program) == [[True, True]] * 2
