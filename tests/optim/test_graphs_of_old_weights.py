"""A graph that was made before weights changed is refused as torch refuses it, whoever changed them; any other graph is not.

The expected outcome of each program is torch's own: the same program on a plain module with a plain optimizer.
"""

import copy

import pytest
import torch
from optim_ranks import Net, run_wrapped
from stand_ins import ScheduleFree

from megabucket import ChainedOptimizer, DistributedOptimizer, load_checkpoint, save_checkpoint

INPLACE = "modified by an inplace operation"
MODES = {
    "all-reduce, plain optimizer": {"grad_reduce_in_fp32": False},
    "all-reduce": {"bucket_size": 8},
    "reduce-scatter": {"use_distributed_optimizer": True, "bucket_size": 8},
    "overlapped gather": {"use_distributed_optimizer": True, "overlap_param_gather": True, "bucket_size": 8},
}
in_modes = pytest.mark.parametrize("mode", MODES)
in_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


class Shift(torch.nn.Module):
    """No backward through it needs a weight."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 2), torch.nn.Parameter(torch.ones(2))
        for value, param in enumerate(self.parameters()):
            torch.nn.init.constant_(param, 0.1 * (value + 1))

    def forward(self, x):
        return self.first(x) + self.last


def optimizer_of(mode):
    def make(ddp):
        sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
        return sgd if mode == "all-reduce, plain optimizer" else DistributedOptimizer(sgd, ddp)

    return make


def inputs(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 4, generator=generator).to(next(model.parameters()).dtype)


def backward_after_a_step(model, optimizer):
    early, late = model(inputs(model, 1)).square().mean(), model(inputs(model, 2)).square().mean()
    early.backward()
    optimizer.step()
    optimizer.zero_grad()
    late.backward()


def backward_twice(model, optimizer):
    loss = model(inputs(model, 1)).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()


def backward_before_the_step(model, optimizer):
    sum(model(inputs(model, seed)).square().mean() for seed in (1, 2)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(inputs(model, 3)).square().mean().backward()


PROGRAMS = {program.__name__: program for program in (backward_after_a_step, backward_twice, backward_before_the_step)}


def outcome(program, model, optimizer):
    """The kind and the beginning of what a program raises, the weights after it and after one more step."""
    raised = None
    try:
        program(model, optimizer)
    except RuntimeError as error:
        raised = type(error), INPLACE in str(error)
        optimizer.zero_grad()
    else:
        optimizer.step()
        optimizer.zero_grad()
    model(inputs(model, 4)).square().mean().backward()
    optimizer.step()
    return raised, list(copy.deepcopy(model.state_dict()).values())


@in_modes
@in_dtypes
@pytest.mark.parametrize("module", [Net, Shift])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_graph_is_refused_exactly_where_torch_refuses_it_and_the_next_step_is_right(program, module, dtype, mode):
    plain = module().to(dtype)
    raised, weights = outcome(PROGRAMS[program], plain, torch.optim.SGD(plain.parameters(), lr=0.1))

    first, second = run_wrapped(
        2,
        module().to(dtype),
        lambda _, ddp, optimizer: outcome(PROGRAMS[program], ddp, optimizer),
        optimizer_of(mode),
        **MODES[mode],
    )

    assert first[0] == second[0] == raised
    assert (raised is None) == (module is Shift or program == "backward_before_the_step")
    torch.testing.assert_close(first[1], second[1], rtol=0, atol=0)
    # Main parameters of 16-bit parameters are float32, so up to three steps differ from torch's by their rounding.
    torch.testing.assert_close(first[1], weights, rtol=1e-6, atol=0 if dtype == torch.float32 else 1e-3)


# Every way in which weights change #


def steps(model, optimizer):
    model(inputs(model, 1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@in_dtypes
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("is_skipped", [False, True])
def test_a_step_bumps_every_parameter_once_it_updates_and_nothing_if_it_is_skipped_or_frozen(is_skipped, is_frozen, dtype):
    def program(_, ddp, optimizer):
        before = {name: param._version for name, param in ddp.named_parameters()}
        steps(ddp, optimizer)
        return {name for name, param in ddp.module.named_parameters() if param._version != before[name]}

    model = Net().to(dtype)
    model.first.bias.requires_grad_(not is_frozen)

    by_rank = run_wrapped(
        3,
        model,
        program,
        lambda ddp: DistributedOptimizer(
            torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=1.0),
            ddp,
            grad_norm_skip_threshold=1e-9 if is_skipped else 1e9,
        ),
        use_distributed_optimizer=True,
    )

    everything = {"first.weight", "first.bias", "last.weight", "last.bias"}
    assert by_rank == [set() if is_skipped else everything - ({"first.bias"} if is_frozen else set())] * 3


def load_weights(ddp, *_):
    ddp.load_state_dict(ddp.state_dict())


def load_a_checkpoint(ddp, optimizer, directory):
    save_checkpoint(directory, ddp, optimizer, step=1)
    load_checkpoint(directory, ddp, optimizer)


def load_a_checkpoint_without_optimizer(ddp, optimizer, directory):
    save_checkpoint(directory, ddp, optimizer, step=1)
    load_checkpoint(directory, ddp)


def broadcast(ddp, *_):
    ddp.broadcast_params()


def rebuild(ddp, *_):
    ddp.rebuild()


def switch(_, optimizer, __):
    optimizer.eval()
    optimizer.train()


CHANGES = (load_weights, load_a_checkpoint, load_a_checkpoint_without_optimizer, broadcast, rebuild, switch)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_sharded", [False, True], ids=["all-reduce", "reduce-scatter"])
@in_dtypes
def test_a_graph_of_weights_that_other_code_then_wrote_is_refused(change, is_sharded, dtype, tmp_path):
    def program(_, ddp, optimizer):
        steps(ddp, optimizer)
        ddp.eval()  # no training forward waits for its backward, so the change comes between two steps
        loss = ddp(inputs(ddp, 2)).square().mean()
        ddp.train()
        change(ddp, optimizer, tmp_path)
        with pytest.raises(RuntimeError, match=INPLACE):
            loss.backward()
        ddp.zero_grad()
        steps(ddp, optimizer)
        return list(copy.deepcopy(ddp.state_dict()).values())

    def optimizer_of(ddp):
        schedule_free = ScheduleFree(ddp.parameters(), weight_decay=0.01)
        schedule_free.train()
        return DistributedOptimizer(schedule_free, ddp)

    first, second = run_wrapped(2, Net().to(dtype), program, optimizer_of, use_distributed_optimizer=is_sharded)

    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_graph_through_a_frozen_weight_is_refused_after_a_broadcast_as_after_torchs():
    def program(_, ddp, __):
        loss = ddp.eval()(inputs(ddp, 2)).square().mean()
        ddp.broadcast_params()
        with pytest.raises(RuntimeError, match=INPLACE):
            loss.backward()

    model = Net()
    model.last.weight.requires_grad_(False)

    run_wrapped(2, model, program, lambda _: None)


@in_dtypes
def test_a_chain_of_optimizers_bumps_the_parameters_of_each_wrapper(dtype):
    def program(_, ddp, optimizer):
        before = {name: param._version for name, param in ddp.module.named_parameters()}
        ddp(inputs(ddp, 1)).square().mean().backward()
        ChainedOptimizer([optimizer]).step()
        return [param._version - before[name] for name, param in ddp.module.named_parameters()]

    by_rank = run_wrapped(2, Net().to(dtype), program, optimizer_of("reduce-scatter"), **MODES["reduce-scatter"])

    assert by_rank == [[1, 1, 1, 1]] * 2


def test_a_gather_that_lands_in_the_next_forward_bumps_nothing():
    def program(_, ddp, optimizer):
        steps(ddp, optimizer)
        params = list(ddp.module.parameters())  # unlike those of the wrapper, not waited for
        before = [param._version for param in params]
        were_out = [bool(param.isnan().all()) for param in params]
        ddp(inputs(ddp, 2)).square().mean().backward()
        return were_out, [param._version for param in params] == before

    overlapped = "overlapped gather"

    assert run_wrapped(2, Net(), program, optimizer_of(overlapped), **MODES[overlapped]) == [([True] * 4, True)] * 2
