"""The gradients of an optimizer's shards are there while it steps, and refuse to be used at any other time."""

import copy

import pytest
import torch
from loop_ranks import Ranks, Weights

from megabucket import DistributedOptimizer
from megabucket.buffer import WithheldGrad
from megabucket.errors import PeerFailedError, PhaseError

SHARDED = {"use_distributed_optimizer": True}
MODES = pytest.mark.parametrize("switches", [{}, SHARDED], ids=["all_reduce", "reduce_scatter"])
WITHHELD = (
    "which is valid only inside DistributedOptimizer.step(), and it is only this rank's shard. Clip with "
    "DistributedOptimizer(..., clip_grad=1.0) or its clip_grad_norm_(), which take the norm over all ranks. Call step() and "
    "zero_grad() of the DistributedOptimizer, not those of the torch optimizer in it. After ddp.detach() make both anew: this "
    "torch optimizer holds flat shards, not parameters of the module."
)
TOUCHED = (
    "the gradient of a flat shard ('a') was cleared or replaced between two steps, to no effect: a DistributedOptimizer steps "
    "on the reduced gradients in the buffers. Call its zero_grad(), not the torch optimizer's; change gradients of the model's "
    "parameters before the sync."
)


def mains(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def refusal_of(act, *args, **kwargs):
    with pytest.raises(PhaseError) as caught:
        act(*args, **kwargs)
    return str(caught.value)


def clip(optimizer):
    torch.nn.utils.clip_grad_norm_(mains(optimizer), 1.0)


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("completion", ["immediate", "manual"])
def test_clipping_them_between_backward_and_step_is_refused_and_the_step_is_right(switches, dtype, completion):
    ranks = Ranks(2, Weights("a", dtype=dtype), completion=completion, **switches)

    def program(rank, ddp):
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
        texts, norms = [], []
        for _ in range(3):  # before the first step there is none, after it there would be one of an earlier step
            ddp(a=4 * rank).backward()
            texts.append(refusal_of(clip, optimizer))
            norms.append(optimizer.step().grad_norm)
            texts.append(refusal_of(clip, optimizer))
            optimizer.zero_grad()
        return texts, norms, ddp.module.a.unique().tolist()

    text = f"linalg_vector_norm was called on the gradient of a flat shard ('a'), {WITHHELD}"
    assert ranks.run(program) == [([text] * 6, [20.0] * 3, [-5.0])] * 2  # the mean is 2, its norm 2 * sqrt(100)


@MODES
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("kernel", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_step_of_the_torch_optimizer_alone_changes_nothing(make, kernel, switches):
    (ddp,) = Ranks(1, Weights("a"), **switches).ddps
    inner = make(ddp.parameters(), lr=0.5, weight_decay=0.5, **kernel)
    optimizer = DistributedOptimizer(inner, ddp)
    ddp(a=1).backward()
    optimizer.step()
    optimizer.zero_grad()
    ddp(a=1).backward()
    before = ddp.module.a.tolist(), copy.deepcopy(list(inner.state.values()))

    text = refusal_of(inner.step)

    assert text == f"{make.__name__}.step() was called on the gradient of a flat shard ('a'), {WITHHELD}"
    assert (ddp.module.a.tolist(), str(list(inner.state.values()))) == (before[0], str(before[1]))
    assert optimizer.step().updated


@MODES
def test_zeroing_them_in_place_is_refused(switches):
    (ddp,) = Ranks(1, Weights("a"), **switches).ddps
    inner = torch.optim.SGD(ddp.parameters(), lr=1.0)
    DistributedOptimizer(inner, ddp)

    assert refusal_of(inner.zero_grad, set_to_none=False).endswith(f"the gradient of a flat shard ('a'), {WITHHELD}")


def replace_grads(optimizer, gradient):
    for main in mains(optimizer):
        main.grad = None if gradient is None else gradient[: main.numel()]


REPLACEMENTS = pytest.mark.parametrize("gradient", [None, torch.ones(100)], ids=["cleared", "replaced"])


@MODES
@REPLACEMENTS
def test_what_was_put_in_their_place_is_refused_and_the_next_step_is_right(gradient, switches):
    ranks = Ranks(2, Weights("a"), **switches)

    def program(rank, ddp):
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
        ddp(a=1).backward()
        replace_grads(optimizer, gradient)
        text = refusal_of(optimizer.step)
        optimizer.zero_grad()
        ddp(a=4 * rank).backward()
        return text, optimizer.step().updated, ddp.module.a.unique().tolist()

    assert ranks.run(program) == [(TOUCHED, True, [-1.0])] * 2


@REPLACEMENTS
def test_on_one_rank_only_it_is_named_on_all(gradient):
    ranks = Ranks(2, Weights("a"), **SHARDED)

    def program(rank, ddp):
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)

        def step(amount, *, is_touched=False):
            with ddp.step():
                ddp(a=amount).backward()
                if is_touched:
                    replace_grads(optimizer, gradient)
                optimizer.step()

        with pytest.raises(PeerFailedError) as caught:
            step(1, is_touched=rank == 1)
        step(4 * rank)
        return str(caught.value), ddp.module.a.unique().tolist()

    first, second = ranks.run(program)
    assert first == second
    assert first[0].startswith(f"step 0: rank 1 failed in optimizer.step(): PhaseError: {TOUCHED}")
    assert first[1] == [-1.0]


@MODES
def test_hooks_of_the_torch_optimizer_see_them(switches):
    ranks = Ranks(2, Weights("a"), **switches)

    def program(rank, ddp):
        inner = torch.optim.SGD(ddp.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(inner, ddp)
        seen = []
        inner.register_step_pre_hook(lambda *_: seen.extend(main.grad.unique().tolist() for main in mains(inner)))
        ddp(a=4 * rank).backward()
        optimizer.step()
        return seen

    assert ranks.run(program) == [[[2.0]]] * 2


@MODES
def test_they_are_withheld_again_when_the_torch_optimizer_has_failed(switches):
    class Fails(torch.optim.SGD):
        is_elementwise = True  # or a trial of it would fail, when the DistributedOptimizer is made

        def step(self, closure=None):
            raise ValueError("boom")

    (ddp,) = Ranks(1, Weights("a"), **switches).ddps
    optimizer = DistributedOptimizer(Fails(ddp.parameters(), lr=1.0), ddp)
    ddp(a=1).backward()

    with pytest.raises(ValueError, match="boom"):
        optimizer.step()

    assert all(isinstance(main.grad, WithheldGrad) for main in mains(optimizer))


@MODES
def test_after_a_rebuild_the_new_ones_are_withheld(switches):
    (ddp,) = Ranks(1, Weights("ab"), **switches).ddps
    optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
    ddp.module.b.requires_grad_(False)

    ddp.rebuild()

    shards = [main for main in mains(optimizer) if main is not ddp.module.b]
    assert shards
    assert all(isinstance(main.grad, WithheldGrad) for main in shards)
    assert ddp.module.b.grad is None
