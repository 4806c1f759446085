"""With overlap_param_gather a parameter is NaN until it was gathered, and every module that is called gets gathered ones."""

import pytest
import torch
from loop_ranks import Ranks

from megabucket import DistributedOptimizer
from megabucket.errors import CollectiveError, NonFiniteGradientError, PhaseError

OVERLAPPED = {"use_distributed_optimizer": True, "overlap_param_gather": True, "bucket_size": 1}


class Owner(torch.nn.Module):
    """Owns a vector; calling it scales it."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(100))

    def forward(self, factor):
        return (self.w * factor).sum()


class ReadsAnother(torch.nn.Module):
    """Reads the parameter of a module it never calls, and one of a list, beside a module it calls."""

    def __init__(self):
        super().__init__()
        self.called = Owner()
        self.never_called = Owner()
        self.listed = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(100))])

    def forward(self, factor):
        return self.called(factor) + (self.never_called.w * factor).sum() + (self.listed[0] * factor).sum()


def train(rank, ddp, *, steps=3):
    optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
    results = []
    for _ in range(steps):
        ddp(4.0 * rank).backward()
        results.append(optimizer.step())
        optimizer.zero_grad()
    return [(result.updated, result.grad_norm) for result in results]


def test_parameters_of_modules_that_are_never_called_are_gathered_before_they_are_read():
    ranks = Ranks(2, ReadsAnother(), **OVERLAPPED)

    by_rank = ranks.run(train)

    # The gradient is 2 everywhere (mean of 0 and 4), in 300 elements: norm sqrt(300 * 4).
    assert by_rank == [[(True, pytest.approx(1200**0.5))] * 3] * 2
    for ddp in ranks.ddps:
        values = ranks_values(ddp)
        assert values == {"called.w": -5.0, "never_called.w": -5.0, "listed.0": -5.0}  # 1 - 3 * 2


def ranks_values(ddp):
    for group in ddp.bucket_groups:
        group.finish_param_sync()
    return {name: param.unique().item() for name, param in ddp.module.named_parameters()}


def test_what_is_written_after_the_step_is_refused_until_the_sync_is_finished():
    ranks = Ranks(2, ReadsAnother(), **OVERLAPPED)

    def write(rank, ddp):
        train(rank, ddp, steps=1)
        with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
            ddp.module.called.w.clamp_(-0.1, 0.1)
        ddp.finish_param_sync()
        return ddp.module.called.w.unique().item()

    assert ranks.run(write) == [-1.0] * 2


def step_with_a_penalty(ddp, optimizer):
    penalty = ddp.module.never_called.w.exp().sum()  # exp keeps its result for backward: NaN
    (ddp(1.0) + penalty).backward()
    result = optimizer.step()
    optimizer.zero_grad()
    return result


def test_a_term_of_the_loss_that_reads_too_early_is_refused_by_name_instead_of_using_old_values():
    ranks = Ranks(2, ReadsAnother(), **OVERLAPPED)

    def steps(rank, ddp):
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
        assert step_with_a_penalty(ddp, optimizer).updated
        with pytest.raises(NonFiniteGradientError) as caught:
            step_with_a_penalty(ddp, optimizer)
        return caught.value.param, caught.value.finding, str(caught.value)

    first, second = ranks.run(steps)

    assert first == second
    assert first[:2] == ("never_called.w", "nan in 100 of 100 elements, first at [0]")


@pytest.mark.parametrize("policy", ["allow", "skip_step"])
def test_where_nonfinite_gradients_are_no_error_it_stops_the_update(policy):
    ranks = Ranks(2, ReadsAnother(), nonfinite_gradients=policy, **OVERLAPPED)

    def steps(rank, ddp):
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
        return [step_with_a_penalty(ddp, optimizer).updated for _ in range(2)]

    assert ranks.run(steps) == [[True, False]] * 2


@pytest.mark.parametrize("part", ["module", "never_called"])
def test_assigning_a_state_dict_is_refused_on_every_submodule(part):
    ranks = Ranks(1, ReadsAnother(), **OVERLAPPED)
    module = ranks.ddps[0].module
    target = module if part == "module" else getattr(module, part)

    with pytest.raises(PhaseError, match="assign=True"):
        target.load_state_dict(target.state_dict(), assign=True)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own inner workings
def test_a_compiled_module_waits_as_well():
    (ddp,) = Ranks(1, torch.compile(ReadsAnother(), backend="eager"), **OVERLAPPED).ddps

    assert train(1, ddp) == [(True, pytest.approx(4800**0.5))] * 3  # a gradient of 4 in 300 elements
    ddp.finish_param_sync()
    assert [param.unique().tolist() for param in ddp.parameters()] == [[-11.0]] * 3  # 1 - 3 * 4


def test_detaching_gives_real_values_back_even_when_the_gather_failed():
    ranks = Ranks(2, ReadsAnother(), **OVERLAPPED)
    ranks.run(lambda rank, ddp: train(rank, ddp, steps=1))
    ddp = ranks.ddps[0]
    for group in ddp.bucket_groups:
        group._param_handle = None  # what an interrupt before the launch leaves behind

    with pytest.raises(CollectiveError):  # it is launched once more, and the other rank does not come
        ddp.detach()

    for param in ddp.module.parameters():
        assert param.is_contiguous()
        assert not param.isnan().any()
