"""Weight gradients that are computed apart from backward, as Megatron's ``delay_wgrad_compute`` has it.

The layer here keeps what its weight gradient is made of and computes it when asked. What is right is the same model without it.
"""

import copy
from contextlib import nullcontext

import pytest
import torch

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.errors import ConfigError, DelayedGradientError, LateGradientError, MegabucketError, PhaseError
from megabucket.testing import LoopbackWorld

NUM_RANKS = 2
SHARDED = {"use_distributed_optimizer": True}
EXPLICIT = {"finish": "explicit"}
MODES = [pytest.param(SHARDED, id="reduce-scatter"), pytest.param(EXPLICIT, id="all-reduce")]


class _Apart(torch.autograd.Function):
    """A product with a weight whose gradient is left for later."""

    @staticmethod
    def forward(ctx, inputs, weight, layer):
        ctx.save_for_backward(inputs, weight)
        ctx.layer = layer
        return inputs @ weight.T

    @staticmethod
    def backward(ctx, grad):
        inputs, weight = ctx.saved_tensors
        ctx.layer.waiting.append((inputs, grad))
        if ctx.layer.dummy is None:
            return grad @ weight, None, None
        weight.grad_added_to_main_grad = ctx.layer.dummy == "flagged"
        return grad @ weight, torch.full_like(weight, 1e6), None


class DelayedLinear(torch.nn.Module):
    """Weight gradients wait in ``waiting`` until ``compute`` is called.

    Args:
        dummy: what backward hands over in their place: nothing, or a tensor of no meaning, ``flagged`` or not.
        leaves_in: ``grad`` overwrites ``param.grad`` as Transformer Engine does; ``+=`` adds to it, as torch's zero-bubble
            schedules do; ``main_grad`` adds there as fused kernels do.
    """

    def __init__(self, dense, *, dummy=None, leaves_in="grad"):
        super().__init__()
        self.weight = torch.nn.Parameter(dense.weight.detach().clone())
        self.weight.skip_backward_post_hook = True
        self.dummy, self.leaves_in, self.waiting = dummy, leaves_in, []

    def forward(self, inputs):
        return _Apart.apply(inputs, self.weight, self)

    def compute(self, ddp):
        """Compute one gradient."""
        inputs, grad = self.waiting.pop(0)
        with torch.no_grad():
            if self.leaves_in == "+=" and self.weight.grad is not None:
                self.weight.grad += grad.T @ inputs
            elif self.leaves_in != "main_grad":
                self.weight.grad = grad.T @ inputs
            else:
                self.weight.main_grad.add_(grad.T @ inputs)
        ddp.grad_ready(self.weight)


def models(num_ranks=NUM_RANKS, **arguments):
    """Return a plain model and, by rank, the same with two layers whose gradients are delayed."""
    torch.manual_seed(0)
    sizes = [(6, 10), (10, 10), (10, 10), (10, 3)]
    plain = torch.nn.Sequential(*(torch.nn.Linear(a, b, bias=a != b) for a, b in sizes))
    delayed = [copy.deepcopy(plain) for _ in range(num_ranks)]
    for model in delayed:
        model[1], model[2] = DelayedLinear(model[1], **arguments), DelayedLinear(model[2], **arguments)
    return plain, delayed


def loss_of(model, step, microbatch, rank):
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    return model(torch.randn(8, 6, generator=generator)).square().mean()


def expected_weights(plain, *, num_steps, microbatches):
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(num_steps):
        optimizer.zero_grad()
        for microbatch in range(microbatches(step)):
            (sum(loss_of(plain, step, microbatch, rank) for rank in range(NUM_RANKS)) / NUM_RANKS).backward()
        optimizer.step()
    return dict(plain.named_parameters())


def wrapped(model, world, rank, fields, **arguments):
    config = DistributedDataParallelConfig(bucket_size=100, **fields)
    return DistributedDataParallel(model, config, communicator=world.communicator(rank), **arguments)


def run_step(ddp, step, rank, *, num_microbatches, waits):
    """Run the backwards of a step; ``waits`` leaves all delayed gradients to its end."""
    layers = [ddp.module[2], ddp.module[1]]
    for microbatch in range(num_microbatches):
        with ddp.no_sync() if microbatch + 1 < num_microbatches else nullcontext():
            loss_of(ddp, step, microbatch, rank).backward()
        while not waits and layers[0].waiting:
            for layer in layers:
                layer.compute(ddp)
    while layers[0].waiting:
        for layer in layers:
            layer.compute(ddp)


@pytest.mark.parametrize("dummy", [None, "flagged"])
@pytest.mark.parametrize("fields", MODES)
def test_a_hook_that_halves_other_gradients_leaves_delayed_ones_alone(fields, dummy):
    """Registered after wrapping. On delayed parameters it sees, in backward, a dummy or None."""
    world = LoopbackWorld(NUM_RANKS, timeout_s=20)
    plain, delayed = models(dummy=dummy)

    def halve(param):
        if param.grad is not None:
            param.grad.mul_(0.5)

    def program(rank):
        ddp = wrapped(delayed[rank], world, rank, fields)
        for param in ddp.parameters():
            param.register_post_accumulate_grad_hook(halve)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
        for step in range(3):
            run_step(ddp, step, rank, num_microbatches=1, waits=True)
            ddp.finish_grad_sync()
            optimizer.step()
            optimizer.zero_grad()
        return {name: param.detach().clone() for name, param in ddp.module.named_parameters()}

    results = world.run(program)
    for name, param in plain.named_parameters():
        if not name.startswith(("1.", "2.")):
            param.register_post_accumulate_grad_hook(halve)
    expected = expected_weights(plain, num_steps=3, microbatches=lambda _: 1)

    for weights in results:
        for name, param in expected.items():
            assert torch.allclose(weights[name], param, atol=1e-6), name


@pytest.mark.parametrize("waits", [False, True], ids=["each-microbatch", "all-at-the-end"])
@pytest.mark.parametrize(
    ("dummy", "leaves_in"),
    [(None, "grad"), ("flagged", "grad"), (None, "+="), (None, "main_grad"), ("flagged", "main_grad")],
)
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("fields", MODES)
def test_training_with_delayed_gradients_is_plain_training(fields, overlaps, dummy, leaves_in, waits):
    """W4: with overlap the bucket was sent before the gradient had come. The number of microbatches changes with the step."""
    world = LoopbackWorld(NUM_RANKS, timeout_s=20)
    plain, delayed = models(dummy=dummy, leaves_in=leaves_in)
    num_steps, microbatches = 4, lambda step: (1, 3, 2, 1)[step]

    def program(rank):
        ddp = wrapped(delayed[rank], world, rank, {**fields, "overlap_grad_reduce": overlaps})
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
        for step in range(num_steps):
            run_step(ddp, step, rank, num_microbatches=microbatches(step), waits=waits)
            ddp.finish_grad_sync()
            optimizer.step()
            optimizer.zero_grad()
        return {name: param.detach().clone() for name, param in ddp.module.named_parameters()}

    results = world.run(program)
    before = {name: param.detach().clone() for name, param in plain.named_parameters()}
    expected = expected_weights(plain, num_steps=num_steps, microbatches=microbatches)

    for weights in results:
        for name, value in expected.items():
            moved = (value - before[name]).abs().max()
            assert (weights[name] - value).abs().max() <= 1e-4 * moved, name


def test_a_bucket_is_launched_by_its_last_gradient_whether_that_is_delayed_or_not():
    world = LoopbackWorld(NUM_RANKS, timeout_s=20)
    _, delayed = models()

    def program(rank):
        ddp = wrapped(delayed[rank], world, rank, SHARDED)
        names = [[slot.name for slot in group.slots] for group in ddp.bucket_groups]
        launched = []
        for step in range(2):  # the first one only counts gradients
            loss_of(ddp, step, 0, rank).backward()
            launched.append([group.is_launched for group in ddp.bucket_groups])
            for layer in (ddp.module[2], ddp.module[1]):
                layer.compute(ddp)
                launched.append([group.is_launched for group in ddp.bucket_groups])
            ddp.finish_grad_sync()
            ddp.zero_grad()
        return names, launched

    for names, launched in world.run(program):
        assert names == [["3.bias", "3.weight", "2.weight"], ["1.weight"], ["0.bias", "0.weight"]]
        # In the first step only the bucket of nothing but a delayed gradient could go out, and it waits for the one before.
        assert launched[:3] == [[False] * 3] * 3
        # Then: after backward; after 2.weight; after 1.weight, on which the last bucket has waited as well.
        assert launched[3:] == [[False] * 3, [True, False, False], [True, True, True]]


# What is wrong is named #


def failing(program, error, *, match, fields=SHARDED, **arguments):
    """Run ``program(ddp, rank)``, expect the same error on all ranks, and a step after it that trains as ever."""
    world = LoopbackWorld(NUM_RANKS, timeout_s=20)
    plain, delayed = models(**arguments)

    def whole(rank):
        ddp = wrapped(delayed[rank], world, rank, fields)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
        with pytest.raises(error, match=match) as caught:
            program(ddp, rank)
        for layer in (ddp.module[2], ddp.module[1]):
            layer.waiting.clear()
            layer.dummy = None
        ddp.zero_grad()
        run_step(ddp, 0, rank, num_microbatches=1, waits=False)
        ddp.finish_grad_sync()
        optimizer.step()
        return str(caught.value), ddp.module[1].weight.detach().clone()

    results = world.run(whole)
    assert len({text for text, _ in results}) == 1
    expected = expected_weights(plain, num_steps=1, microbatches=lambda _: 1)["1.weight"]
    for _, weight in results:
        torch.testing.assert_close(weight, expected)


def test_a_gradient_that_is_missing_at_the_end_of_a_step_is_named_on_all_ranks():
    def program(ddp, rank):
        with ddp.no_sync():
            loss_of(ddp, 0, 0, rank).backward()
        loss_of(ddp, 0, 1, rank).backward()
        for layer in (ddp.module[2], ddp.module[1]):
            layer.compute(ddp)
        ddp.module[2].compute(ddp)
        if rank == 1:
            ddp.module[1].compute(ddp)
        ddp.finish_grad_sync()

    failing(
        program, DelayedGradientError, match=r"on rank 0 the delayed gradient of '1.weight' has come 1 times in 2 backwards"
    )


def test_a_gradient_that_comes_twice_for_one_backward_is_named():
    def program(ddp, rank):
        run_step(ddp, 0, rank, num_microbatches=1, waits=False)
        ddp.module[1].weight.grad = torch.ones(10, 10)
        ddp.grad_ready(ddp.module[1].weight)
        ddp.finish_grad_sync()

    failing(
        program,
        DelayedGradientError,
        match=r"'1.weight' has come 2 times in 1 backwards",
        fields={**SHARDED, "overlap_grad_reduce": False},
    )


def test_a_gradient_that_comes_when_its_bucket_is_on_its_way_is_named():
    def program(ddp, rank):
        loss_of(ddp, 0, 0, rank).backward()
        ddp.start_grad_sync()
        ddp.module[2].compute(ddp)
        ddp.finish_grad_sync()

    failing(
        program,
        LateGradientError,
        match=r"'2.weight' received a gradient although bucket 0 of 3 \(counted from 0\) is in flight",
    )


@pytest.mark.parametrize("fields", MODES)
def test_a_gradient_that_comes_after_the_sync_is_refused(fields):
    def program(ddp, rank):
        run_step(ddp, 0, rank, num_microbatches=1, waits=False)
        ddp.finish_grad_sync()
        ddp.module[1].weight.grad = torch.ones(10, 10)
        ddp.grad_ready(ddp.module[1].weight)

    world = LoopbackWorld(NUM_RANKS, timeout_s=20)
    _, delayed = models()

    def whole(rank):
        ddp = wrapped(delayed[rank], world, rank, fields)
        with pytest.raises(PhaseError, match=r"'1.weight' when the gradients of the step were reduced"):
            program(ddp, rank)

    world.run(whole)


@pytest.mark.parametrize("fields", [EXPLICIT, SHARDED])
def test_a_gradient_that_comes_after_the_sync_on_one_rank_is_named_on_all(fields):
    """With ``unused_parameters="zero"`` the step has taken zeros in its place."""
    world = LoopbackWorld(NUM_RANKS, timeout_s=20)
    _, delayed = models()

    def program(rank):
        ddp, errors = wrapped(delayed[rank], world, rank, {**fields, "unused_parameters": "zero"}), []
        for step in range(3):
            try:
                loss_of(ddp, step, 0, rank).backward()
                ddp.module[2].compute(ddp)
                if (rank, step) != (1, 0):
                    ddp.module[1].compute(ddp)
                ddp.finish_grad_sync()
                if (rank, step) == (1, 0):
                    ddp.module[1].weight.grad = torch.ones(10, 10)
                    with pytest.raises(PhaseError, match="when the gradients of the step were reduced"):
                        ddp.grad_ready(ddp.module[1].weight)
                ddp.zero_grad()
            except MegabucketError as error:
                errors.append((step, error is ddp.last_error))
            ddp.zero_grad()
        return errors, str(ddp.last_error)

    (first, told), (second, also) = world.run(program)

    assert told == also
    if fields is SHARDED:  # the others learn it before they update
        assert "rank 1 failed in grad_ready()" in told
        assert (first, second) == ([(0, True)], [])
    else:
        assert "on rank 1 the delayed gradient of '1.weight' has come after the gradients of its step were reduced" in told
        assert (first, second) == ([(1, True)], [(1, True)])


def test_a_tensor_that_nothing_marks_as_a_dummy_is_refused():
    """It may be a gradient: dropping it would be as wrong as adding a dummy."""

    def program(ddp, rank):
        run_step(ddp, 0, rank, num_microbatches=1, waits=False)
        ddp.finish_grad_sync()

    match = r"on rank 0 the delayed gradient of '2.weight', '1.weight' has come through autograd, in backward"
    failing(program, DelayedGradientError, match=match, dummy="unflagged")


def test_a_gradient_added_to_values_of_the_step_before_is_refused():
    """Plain torch clears ``param.grad``, not ``main_grad``, which holds reduced values then."""
    world = LoopbackWorld(NUM_RANKS, timeout_s=20)
    _, delayed = models(leaves_in="main_grad")

    def program(rank):
        ddp = wrapped(delayed[rank], world, rank, EXPLICIT)
        run_step(ddp, 0, rank, num_microbatches=1, waits=False)
        ddp.finish_grad_sync()
        torch.nn.Module.zero_grad(ddp.module)
        loss_of(ddp, 1, 0, rank).backward()
        with pytest.raises(PhaseError, match=r"added the gradient of '2.weight' to main_grad, which was not prepared"):
            ddp.module[2].compute(ddp)

    world.run(program)


def test_where_unused_parameters_count_as_zeros_a_gradient_may_be_missing():
    world = LoopbackWorld(NUM_RANKS, timeout_s=20)
    _, delayed = models()

    def program(rank):
        ddp = wrapped(delayed[rank], world, rank, {**EXPLICIT, "unused_parameters": "zero"})
        loss_of(ddp, 0, 0, rank).backward()
        ddp.module[2].compute(ddp)
        ddp.finish_grad_sync()
        return ddp.module[1].weight.grad.abs().max(), ddp.module[2].weight.grad.abs().max()

    for missing, found in world.run(program):
        assert missing == 0
        assert found > 0


def test_what_a_tied_weight_gets_from_its_other_use_counts():
    """``zero_out_wgrad``, as Megatron marks a shared embedding: the dummy is zeros, and autograd adds the other gradient."""
    world = LoopbackWorld(1)
    module = torch.nn.Linear(3, 3, bias=False)
    weight = module.weight
    weight.skip_backward_post_hook = weight.zero_out_wgrad = True
    ddp = wrapped(module, world, 0, EXPLICIT)

    for _ in range(2):
        ddp(torch.full((1, 3), 2.0)).sum().backward()  # the use that autograd sees
        weight.main_grad.add_(5)  # the delayed one
        ddp.grad_ready(weight)
        ddp.finish_grad_sync()
        assert torch.equal(weight.grad, torch.full((3, 3), 7.0))
        ddp.zero_grad()


def test_a_parameter_that_is_not_marked_is_refused():
    _, (model,) = models(num_ranks=1)
    ddp = wrapped(model, LoopbackWorld(1), 0, SHARDED)

    with pytest.raises(ConfigError, match=r"shape \(3,\).*skip_backward_post_hook = True before wrapping"):
        ddp.grad_ready(model[3].bias)


def test_gradients_that_come_after_backward_are_refused_where_backward_reduces():
    _, (model,) = models(num_ranks=1)

    with pytest.raises(ConfigError, match=r"'1.weight', '2.weight'.*finish='explicit'.*use_distributed_optimizer=True"):
        wrapped(model, LoopbackWorld(1), 0, {})
