"""Backwards that come to a parameter before any output of the module: a part of it was called, or another term of the loss.

Nothing but the hook of the first parameter tells that they have begun. All of this worked, and an attempt at cheaper hooks
(docs/decisions/gradients.md) broke most of it, some without a word, so it is said here.
"""

import contextlib

import pytest
import torch
from loop_ranks import Ranks, Weights, main_grads
from torch.utils.checkpoint import checkpoint

from megabucket.errors import MegabucketError, PeerFailedError


def learned(ddp):
    """Run two steps that bring gradients as d, c, b, a."""
    for _ in range(2):
        ddp(a=1.0, b=1.0, c=1.0, d=1.0).backward()
        ddp.finish_grad_sync()
        ddp.zero_grad()


def both_ranks(**switches):
    return Ranks(2, Weights(), **{"unused_parameters": "zero", **switches})


def boom(_):
    raise KeyError("boom")


def test_when_it_fails_on_one_rank_nobody_reduces_what_it_has_brought():
    def run(rank, ddp):
        learned(ddp)
        module, told = ddp.module, []
        middle = module.b * 1.0
        if rank == 1:
            middle.register_hook(boom)
        try:
            with ddp.step(), contextlib.suppress(KeyError):
                (module.a.sum() + middle.sum() + module.c.sum() + module.d.sum()).backward()
        except MegabucketError as error:
            told.append(type(error))
        ddp.zero_grad()
        ddp(a=5.0, b=5.0, c=5.0, d=5.0).backward()
        ddp.finish_grad_sync()
        return told, main_grads(module)

    assert both_ranks().run(run) == [([PeerFailedError], dict.fromkeys("abcd", 5.0))] * 2


def test_whoever_reads_or_clips_gradients_after_it_finds_the_reduced_ones():
    def run(rank, ddp):
        learned(ddp)
        weight = ddp.module.c
        (weight * (1.0 + 9.0 * rank)).sum().backward()
        read = weight.grad[0].item()
        torch.nn.utils.clip_grad_value_(ddp.module.parameters(), 5.0)
        torch.optim.SGD(ddp.module.parameters(), lr=1.0).step()
        return read, weight[0].item()

    assert both_ranks().run(run) == [(5.5, -4.0), (5.5, -4.0)]


def test_what_is_scaled_after_it_is_its_gradient():
    def run(_, ddp):
        learned(ddp)
        ddp.module.c.sum().backward()
        ddp.scale_gradients(0.5)
        torch.optim.SGD(ddp.module.parameters(), lr=1.0).step()
        return ddp.module.c[0].item()

    assert both_ranks().run(run) == [0.5, 0.5]


@pytest.mark.parametrize("terms", ["cd", "abcd"])
def test_a_sum_over_the_ranks_starts_anew_with_it(terms):
    def run(_, ddp):
        learned(ddp)
        found = []
        for _ in range(3):
            loss = sum(getattr(ddp.module, name).sum() * 2.0 for name in "cd")
            if terms == "abcd":
                loss = ddp(a=2.0, b=2.0) + loss  # the output comes last
            loss.backward()
            found.append({main_grads(ddp.module)[name] for name in terms})
            torch.optim.SGD(ddp.module.parameters(), lr=0.0).zero_grad()
        return found

    assert both_ranks(grad_reduction="sum").run(run) == [[{4.0}] * 3] * 2


def test_it_is_a_microbatch_of_its_own_on_every_rank():
    """Also where one rank has a hook of its own on a parameter, so that nothing waits there."""

    def run(rank, ddp):
        if rank == 0:
            ddp.module.a.register_post_accumulate_grad_hook(lambda _: None)
        learned(ddp)
        out = ddp(a=1.0, b=1.0, c=1.0, d=1.0)
        with ddp.no_sync():
            ddp.module.c.sum().backward()
            out.backward(retain_graph=True)
        out.backward()
        return main_grads(ddp.module)

    assert both_ranks().run(run) == [{"a": 2.0, "b": 2.0, "c": 3.0, "d": 2.0}] * 2


def test_in_no_sync_it_only_accumulates_although_an_exception_follows():
    def run(rank, ddp):
        learned(ddp)
        try:
            with ddp.no_sync():
                (ddp.module.c * 5.0).sum().backward()
                if rank == 1:
                    boom(None)
        except KeyError:
            pass
        ddp(a=1.0, b=1.0, c=1.0, d=1.0).backward()
        return main_grads(ddp.module)["c"]

    assert both_ranks().run(run) == [6.0, 6.0]


class RerunsLate(torch.nn.Module):
    """The gradient of ``c`` is a view of one that is still on its way to ``p`` when a layer that uses ``c``, too, is rerun."""

    def __init__(self):
        super().__init__()
        for name in "pcq":
            self.register_parameter(name, torch.nn.Parameter(torch.ones(2, 2)))

    def forward(self, *, reruns):
        h = self.p.view(-1) * 1.0
        z = self.q.view(-1) * 1.0
        if reruns:
            z = checkpoint(lambda z: z * self.c.view(-1) * 5.0, z, use_reentrant=True)
        return (((h + self.c.view(-1)) + z) * 1.0).sum()


def test_a_layer_that_is_rerun_for_the_first_time_leaves_the_gradients_of_others_alone():
    (ddp,) = Ranks(1, RerunsLate(), unused_parameters="zero").ddps
    for reruns, of_c, of_q in ((False, 1.0, 1.0), (False, 1.0, 1.0), (True, 6.0, 5.0), (True, 6.0, 5.0)):
        with ddp.no_sync():
            ddp(reruns=reruns).backward()
        found = {name: param.main_grad.flatten()[0].item() for name, param in ddp.module.named_parameters()}
        assert found == {"p": 1.0, "c": of_c, "q": of_q}
        ddp.zero_grad()
