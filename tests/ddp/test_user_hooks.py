"""Post-accumulate hooks of the user: they see the gradient, and what they leave in ``.grad`` counts, as in plain torch."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
from loop_ranks import Ranks, Weights, grads, main_grads, optimizer_of
from torch.utils.checkpoint import checkpoint

from megabucket.errors import MegabucketError, PhaseError, UnreducedGradientsError, UnusedParameterError
from megabucket.fused import Linear

SHARDED = {"use_distributed_optimizer": True}
MODES = [pytest.param({}, id="all-reduce"), pytest.param(SHARDED, id="reduce-scatter")]
SIZE, STEPS, MICROBATCHES = 2, 3, 3


class Both(torch.nn.Module):
    """A small and a large parameter with hooks, and two without. Gradients are integers, so that all sums are exact.

    The gradient of ``small`` comes last, so that it completes the last bucket.
    """

    def __init__(self):
        super().__init__()
        for name, shape in (("small", (4, 4)), ("large", (400, 400)), ("other", (3,)), ("another", (5,))):
            self.register_parameter(name, torch.nn.Parameter(torch.ones(shape)))

    def forward(self, factor):
        return sum((param * factor).sum() for param in self.parameters())


def multiply(param):
    param.grad.mul_(3)


def replace(param):
    param.grad = param.grad * 3


def clear(param):
    param.grad = None


def read(param):
    assert param.grad.isfinite().all()


def factor_of(rank, step, microbatch):
    return float((rank + 1) * (step + 2) + microbatch)


class Hooked:
    """Registers ``hook`` on some parameters of one module, and notes the gradient that it sees each time."""

    def __init__(self, module, hook, names=("small", "large")):
        self.module, self.hook, self.names, self.seen, self.handles = module, hook, names, [], []

    def register(self):
        for name in self.names:

            def call(param, name=name):
                self.seen.append((name, str(None if param.grad is None else param.grad.sum().item())))
                self.hook(param)

            self.handles.append(getattr(self.module, name).register_post_accumulate_grad_hook(call))

    def remove(self):
        while self.handles:
            self.handles.pop().remove()


def plain(model, hook, on_event):
    """Train one plain copy per rank on the mean of their gradients. Return the weights and what the hooks saw on each rank."""
    modules = [copy.deepcopy(model) for _ in range(SIZE)]
    hooked = [Hooked(module, hook) for module in modules]
    for one in hooked:
        on_event(one, "before wrapping")
        on_event(one, "after wrapping")
    for step in range(STEPS):
        for rank, module in enumerate(modules):
            for microbatch in range(MICROBATCHES):
                on_event(hooked[rank], (step, microbatch))
                module(factor_of(rank, step, microbatch)).backward()
        for params in zip(*(module.parameters() for module in modules), strict=True):
            mean = sum(0 if param.grad is None else param.grad for param in params) / SIZE
            with torch.no_grad():
                for param in params:
                    param.sub_(mean)
                    param.grad = None
    return dict(modules[0].named_parameters()), [one.seen for one in hooked]


def wrapped(model, hook, on_event, **switches):
    """The same with the wrapper."""
    hooked = {}

    def prepare(rank, module):
        hooked[rank] = Hooked(module, hook)
        on_event(hooked[rank], "before wrapping")

    ranks = Ranks(SIZE, model, prepare=prepare, unused_parameters="zero", **switches)

    def train(rank, ddp):
        optimizer = optimizer_of(ddp)
        on_event(hooked[rank], "after wrapping")
        for step in range(STEPS):
            for microbatch in range(MICROBATCHES):
                on_event(hooked[rank], (step, microbatch))
                if microbatch < MICROBATCHES - 1:
                    with ddp.no_sync():
                        ddp(factor_of(rank, step, microbatch)).backward()
                else:
                    ddp(factor_of(rank, step, microbatch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        ddp.finish_param_sync()

    ranks.run(train)
    return dict(ranks.modules[0].named_parameters()), [hooked[rank].seen for rank in range(SIZE)]


def at(*events, removed_at=()):
    """Register at each of ``events``, and remove at those of ``removed_at``."""

    def on_event(hooked, event):
        if event in events:
            hooked.register()
        if event in removed_at:
            hooked.remove()

    return on_event


WHEN = {
    "before": at("before wrapping"),
    "after": at("after wrapping"),
    "both": at("before wrapping", "after wrapping"),
    "between-microbatches": at((1, 1)),
    "removed": at("before wrapping", "after wrapping", removed_at=[(2, 1)]),
    "again": at("before wrapping", (2, 0), removed_at=[(1, 0)]),
}


class TestAsInPlainTorch:
    @pytest.mark.parametrize("when", WHEN)
    @pytest.mark.parametrize("hook", [multiply, replace, clear, read])
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(
        "plan",
        [
            pytest.param({"bucket_size": 1}, id="bucket-each"),
            pytest.param({"bucket_size": None}, id="one-bucket"),
            pytest.param({"overlap_grad_reduce": False}, id="no-overlap"),
        ],
    )
    def test_the_hook_sees_the_gradient_and_what_it_leaves_counts(self, when, hook, mode, plan):
        if hook is clear and when == "both":
            pytest.skip("the second hook would fail")
        expected, expected_seen = plain(Both(), hook, WHEN[when])

        params, seen = wrapped(Both(), hook, WHEN[when], **plan, **mode)

        for name, param in expected.items():
            assert torch.equal(params[name], param), name
        assert [sorted(one) for one in seen] == [sorted(one) for one in expected_seen]
