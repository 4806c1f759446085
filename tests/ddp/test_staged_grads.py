"""Small gradients wait in ``param.grad`` and come into the buffer many in one call; nobody outside of backward can tell."""

import pytest
import torch
from loop_ranks import Ranks, Weights, main_grads
from torch.utils.checkpoint import checkpoint

from megabucket.buffer import GradPhase
from megabucket.buffer.bucket_group import MOST_STAGED
from megabucket.errors import PeerFailedError


class Many(torch.nn.Module):
    """Many small vectors."""

    def __init__(self, num_small):
        super().__init__()
        self.small = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(16)) for _ in range(num_small)])

    def forward(self, factor=1.0):
        return torch.stack([(param * factor).sum() for param in self.small]).sum()


def learned(ddp, **factors):
    """Run the first step, which adds to zeros and learns what to expect: in the next one gradients are copied."""
    ddp(**factors).backward()
    ddp.finish_grad_sync()
    ddp.zero_grad()


def test_a_group_is_sent_with_its_last_gradient():
    """Groups are launched as d, c, b, a. Here gradients come as c, d, b, a."""
    (ddp,) = Ranks(1, Weights("abcd"), bucket_size=1).ddps
    learned(ddp, a=1.0, b=1.0, c=1.0, d=1.0)
    num_sent_at = {}

    def note(name):
        def hook(_):
            num_sent_at[name] = sum(group.grad_phase is GradPhase.IN_FLIGHT for group in ddp.bucket_groups)

        return hook

    terms = {}
    for name in "abdc":
        terms[name] = getattr(ddp.module, name) * 2.0
        terms[name].register_hook(note(name))  # runs just before the gradient of the parameter comes
    sum(term.sum() for term in terms.values()).backward()

    assert num_sent_at == {"c": 0, "d": 0, "b": 2, "a": 3}
    assert main_grads(ddp.module) == dict.fromkeys("abcd", 2.0)


def test_hooks_of_modules_find_all_gradients_that_have_come():
    (ddp,) = Ranks(1, torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)]), overlap_grad_reduce=False).ddps
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(2):
        ddp.zero_grad()
        ddp(x).sum().backward()
    whole = [param.main_grad.clone() for param in ddp.parameters()]
    ddp.zero_grad()

    def halve(module, *_):
        if module.weight.grad is not None:
            module.weight.grad.mul_(0.5)

    handles = [layer.register_full_backward_hook(lambda *_: halve(ddp.module[2])) for layer in ddp.module[:2]]
    ddp(x).sum().backward()
    for handle in handles:
        handle.remove()

    expected = [*whole[:4], whole[4] / 4, whole[5]]
    assert all(torch.equal(param.main_grad, grad) for param, grad in zip(ddp.parameters(), expected, strict=True))


def test_sparse_gradients_take_the_place_of_those_of_the_step_before():
    class Sparse(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(3, 2, sparse=True)
            self.dense = torch.nn.Parameter(torch.ones(4))

        def forward(self, *rows):
            return self.embedding(torch.tensor(rows)).sum() + self.dense.sum()

    (ddp,) = Ranks(1, Sparse()).ddps
    for rows, counts in (((0, 0), [2, 0, 0]), ((1, 2), [0, 1, 1]), ((2, 2), [0, 0, 2])):
        ddp(*rows).backward()

        assert ddp.module.embedding.weight.main_grad[:, 0].tolist() == counts
        assert ddp.module.dense.main_grad.tolist() == [1.0] * 4
        ddp.zero_grad()


class Rerun(torch.nn.Module):
    """Layers that are rerun in backward, as often as there are factors; each time gradients of ``a`` and ``b`` share memory."""

    def __init__(self):
        super().__init__()
        for name in "abc":
            self.register_parameter(name, torch.nn.Parameter(torch.ones(2, 2)))

    def forward(self, *factors):
        y = self.c.view(-1) * 1.0
        for factor in factors:
            y = checkpoint(lambda y, factor=factor: y + (self.a.view(-1) + self.b.view(-1)) * factor, y, use_reentrant=True)
        return y.sum()


def test_a_second_gradient_is_not_added_to_what_waits_and_so_not_to_what_shares_its_memory():
    (ddp,) = Ranks(1, Rerun()).ddps
    for _ in range(2):
        ddp(1.0).backward()  # so one gradient each is expected
        ddp.zero_grad()

    with ddp.no_sync():
        ddp(2.0, 3.0).backward()

    assert [param.main_grad[0, 0].item() for param in ddp.parameters()] == [5.0, 5.0, 1.0]


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_graph_of_gradients_makes_new_sums_that_count():
    """What is rerun comes first, in a backward of its own that makes no graph."""
    (ddp,) = Ranks(1, Rerun()).ddps
    for _ in range(3):
        with ddp.no_sync():
            ddp(1.0).backward()
            ddp(1.0).backward(create_graph=True)
        ddp(1.0).backward()
        assert [param.main_grad[0, 0].item() for param in ddp.parameters()] == [3.0, 3.0, 3.0]
        ddp.zero_grad()


def test_a_failed_backward_that_a_block_has_caught_leaves_nothing_waiting():
    (ddp,) = Ranks(1, Weights("abc"), bucket_size=1).ddps
    learned(ddp, a=1.0, b=1.0, c=1.0)
    middle = ddp.module.a * 1.0

    def boom(_):
        raise KeyError("boom")

    middle.register_hook(boom)
    found = []

    def step():
        with ddp.step():
            with ddp.no_sync(), pytest.raises(KeyError):
                (middle.sum() + ddp(b=1.0, c=1.0)).backward()
            found.extend((len(group.staging), group.staging.room) for group in ddp.bucket_groups)

    with pytest.raises(PeerFailedError):
        step()
    assert found == [(0, 0)] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_layer_that_is_rerun_twice_brings_the_sum(dtype, sharded):
    """Reentrant checkpointing of a shared layer: two gradients in one backward, whose sum bfloat16 cannot hold."""

    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used_twice = torch.nn.Parameter(torch.ones(16, dtype=dtype))
            self.others = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(16, dtype=dtype)) for _ in range(5)])

        def forward(self, x):
            y = checkpoint(lambda x: self.used_twice * x, x, use_reentrant=True)
            for other in self.others:
                y = y + other * x
            return (y.float() + checkpoint(lambda x: self.used_twice * x, x / 256, use_reentrant=True).float()).sum()

    (ddp,) = Ranks(1, Shared(), use_distributed_optimizer=sharded).ddps
    x = torch.ones(16, dtype=dtype, requires_grad=True)
    for _ in range(3):
        ddp.zero_grad()
        ddp(x).backward()
        ddp.finish_grad_sync()

        assert torch.equal(ddp.module.used_twice.main_grad, torch.full((16,), 1 + 1 / 256))


def test_a_gradient_more_than_expected_is_added_to_those_that_came_before():
    """It comes while its group waits for another one, after the place was filled and ``param.grad`` cleared for the launch."""
    (ddp,) = Ranks(1, Many(num_small=2 * MOST_STAGED)).ddps
    learned(ddp)
    small = ddp.module.small
    x = torch.ones(16, requires_grad=True)

    # Backward runs the last term first. What is rerun brings a gradient of its own, far behind the first one.
    y = 0.0
    for index, param in enumerate(small):
        y = y + (param * 2.0).sum()
        if index == 20:
            y = y + checkpoint(lambda x: small[-1] * x, x, use_reentrant=True).sum()
    y.backward()

    assert [param.main_grad[0].item() for param in small] == [2.0] * (len(small) - 1) + [3.0]


@pytest.mark.parametrize("sharded", [False, True])
def test_what_waits_when_a_backward_fails_is_forgotten_on_all_ranks(sharded):
    ranks = Ranks(2, Many(num_small=10), use_distributed_optimizer=sharded)

    def run(rank, ddp):
        learned(ddp)
        x = torch.ones((), requires_grad=True)
        y = x * 1.0

        def boom(_):
            raise KeyError("boom")

        if rank == 1:
            y.register_hook(boom)
        told = []
        try:
            (ddp(1.0) + (sum(param.sum() for param in ddp.module.small) * y if rank else 0)).backward()
            ddp.finish_grad_sync()
        except Exception as error:
            told.append(type(error).__name__)
        ddp.zero_grad()
        ddp(5.0).backward()
        ddp.finish_grad_sync()
        return told, len(ddp.bucket_groups[0].staging), ddp.bucket_groups[0].staging.room

    results = ranks.run(run)

    assert results == [(["PeerFailedError"], 0, 0), (["KeyError"], 0, 0)]
    for ddp in ranks.ddps:
        shard = [param.main_grad[0].item() for param in ddp.module.small]
        assert 5.0 in shard if sharded else shard == [5.0] * 10


@pytest.mark.parametrize("sharded", [False, True])
def test_a_fault_that_is_found_only_when_waiting_gradients_are_stored_is_told_to_the_others(sharded):
    """A gradient in another shape than its place: only the end of backward comes to look."""
    ranks = Ranks(2, Weights("abcd"), use_distributed_optimizer=sharded, unused_parameters="zero")

    def run(rank, ddp):
        module = ddp.module
        learned(ddp, a=1.0, b=1.0, c=1.0, d=1.0)
        whole, told = module.c.data, []
        if rank == 1:
            module.c.data = whole[:1]
        try:
            ddp(b=1.0, c=1.0, d=1.0).backward()  # without a: never complete
            ddp.finish_grad_sync()
        except Exception as error:
            told.append(type(error).__name__)
        module.c.data = whole
        ddp.zero_grad()
        ddp(a=1.0, b=2.0, c=3.0, d=4.0).backward()
        ddp.finish_grad_sync()
        return told, main_grads(module)

    (here, first), (there, second) = ranks.run(run)

    assert (here, there) == (["PeerFailedError"], ["RuntimeError"])
    shown = first if not sharded else {"c": first["c"], "d": first["d"], "a": second["a"], "b": second["b"]}
    assert shown == {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
