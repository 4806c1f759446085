"""A plain torch optimizer never steps on gradients that are not what it takes them for."""

import copy
import gc
import weakref

import pytest
import torch
from loop_ranks import Ranks, Weights
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.errors import ConfigError, MegabucketError, PlainOptimizerError, UnreducedGradientsError


def wrap(model, **switches):
    return DistributedDataParallel(model, DistributedDataParallelConfig(**switches))


def step_all(ddp, kind=torch.optim.SGD):
    kind(ddp.parameters(), lr=1.0).step()


def test_reduce_scattered_gradients_are_refused_with_the_way_out():
    ddp = wrap(Weights("abcdefg"), use_distributed_optimizer=True)
    ddp(a=1, b=1, c=1, d=1, e=1, f=1, g=1).backward()
    ddp.finish_grad_sync()

    with pytest.raises(PlainOptimizerError) as caught:
        step_all(ddp, torch.optim.AdamW)

    error = caught.value
    assert (error.optimizer, error.params, error.rank) == ("AdamW", tuple("abcdefg"), 0)
    assert str(error) == (
        "[rank 0] AdamW.step() would update whole parameters ('a', 'b', 'c', 'd', 'e' and 2 more), but "
        "use_distributed_optimizer=True reduce-scatters the gradients: this rank holds the reduced values of its own shard "
        "only, and the replicas would drift apart. Wrap the optimizer: megabucket.DistributedOptimizer(optimizer, ddp), one "
        "over all parameters of the wrapper, with groups in place of several optimizers; or set "
        "use_distributed_optimizer=False."
    )
    assert ddp.module.a[0].item() == 1.0  # nothing was updated


def test_they_are_refused_before_any_backward_too():
    with pytest.raises(PlainOptimizerError):
        step_all(wrap(Weights("a"), use_distributed_optimizer=True))


def test_local_gradients_are_refused_with_the_way_out():
    ddp = wrap(Weights("a"))
    with ddp.no_sync():
        ddp(a=1).backward()

    with pytest.raises(UnreducedGradientsError) as caught:
        step_all(ddp)

    assert caught.value.rank == 0
    assert str(caught.value) == (
        "step() was called, but the gradients are not reduced: since the last step or zero_grad(), no backward has run "
        "outside no_sync(), or finish_grad_sync() was not called where the config leaves that to the caller "
        "(finish='explicit'). Run the last backward of the step outside no_sync(), or call finish_grad_sync() yourself; "
        "clear gradients after step(), not before. To step on the gradients of one rank alone (local SGD), use the module "
        "without a wrapper."
    )
    assert ddp.module.a[0].item() == 1.0


def test_the_text_is_the_same_on_every_rank():
    ranks = Ranks(2, Weights("a"))

    def program(_, ddp):
        with ddp.no_sync():
            ddp(a=1).backward()
        with pytest.raises(UnreducedGradientsError) as caught:
            step_all(ddp)
        return str(caught.value)

    first, second = ranks.run(program)
    assert first == second


class TestClosure:
    """``step(closure)`` gets its gradients from the closure, as often as the optimizer calls it."""

    @pytest.mark.parametrize("by_name", [False, True])
    def test_the_last_backward_may_run_in_it(self, by_name):
        ddp = wrap(Weights("a"))
        with ddp.no_sync():
            ddp(a=1).backward()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)

        def closure():
            ddp(a=2).backward()
            return 7.0

        result = optimizer.step(closure=closure) if by_name else optimizer.step(closure)

        assert result == 7.0
        assert ddp.module.a[0].item() == 1.0 - (1.0 + 2.0)

    def test_local_gradients_from_it_are_refused(self):
        ddp = wrap(Weights("a"))

        def closure():
            with ddp.no_sync():
                ddp(a=1).backward()

        with pytest.raises(UnreducedGradientsError):
            torch.optim.SGD(ddp.parameters(), lr=1.0).step(closure)

        assert ddp.module.a[0].item() == 1.0

    def test_it_may_be_called_many_times(self):
        def train(model):
            optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, tolerance_grad=0.0)

            def closure():
                optimizer.zero_grad()
                loss = model(torch.ones(1, 2)).square().sum()
                loss.backward()
                return loss

            return [optimizer.step(closure).item() for _ in range(3)]

        plain = torch.nn.Linear(2, 1)
        module = copy.deepcopy(plain)

        assert train(wrap(module)) == train(plain)
        assert torch.equal(module.weight, plain.weight)

    def test_with_several_wrappers_gradients_of_each_are_checked_after_it(self):
        first, second = wrap(Weights("a")), wrap(Weights("a"))

        def closure():
            first(a=1).backward()
            with second.no_sync():
                second(a=1).backward()

        with pytest.raises(UnreducedGradientsError):
            torch.optim.SGD([first.module.a, second.module.a], lr=1.0).step(closure)

    def test_it_may_rebuild_the_wrapper(self):
        model = Weights("ab")
        model.b.requires_grad_(False)
        ddp = wrap(model)
        optimizer = torch.optim.SGD([model.a], lr=1.0)

        def closure():
            model.b.requires_grad_(True)
            optimizer.add_param_group({"params": [model.b]})
            ddp.rebuild()
            ddp(a=1, b=2).backward()

        optimizer.step(closure)

        assert (model.a[0].item(), model.b[0].item()) == (0.0, -1.0)

    def test_reduce_scattered_gradients_are_refused_before_it(self):
        ddp = wrap(Weights("a"), use_distributed_optimizer=True)

        with pytest.raises(PlainOptimizerError):
            torch.optim.SGD(ddp.parameters(), lr=1.0).step(pytest.fail)


def test_with_explicit_finish_a_step_before_it_is_refused():
    ddp = wrap(Weights("a"), finish="explicit")
    ddp(a=1).backward()

    with pytest.raises(UnreducedGradientsError, match=r"finish='explicit'"):
        step_all(ddp)

    ddp.finish_grad_sync()
    step_all(ddp)
    assert ddp.module.a[0].item() == 0.0


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_reduced_gradients_are_stepped_on(kind):
    ddp = wrap(Weights("a"))
    ddp(a=1).backward()

    step_all(ddp, kind)

    assert ddp.module.a[0].item() < 1.0


def test_an_optimizer_of_sparse_gradients_is_refused_by_name():
    ddp = wrap(torch.nn.Embedding(4, 2, sparse=True))
    ddp(torch.tensor([1, 2])).sum().backward()

    with pytest.raises(ConfigError) as caught:
        torch.optim.SparseAdam(ddp.parameters()).step()

    assert str(caught.value) == (
        "SparseAdam steps on sparse gradients only, and the buffers hold dense ones, so it cannot update 'weight'. Use Adam "
        "for them, or freeze them while wrapping."
    )


def test_optimizers_of_other_models_may_step_at_any_time():
    ddp, other = wrap(Weights("a"), use_distributed_optimizer=True), Weights("a")
    ddp(a=1).backward()
    other(a=1).backward()

    step_all(other)

    assert other.a[0].item() == 0.0


def test_an_optimizer_over_frozen_parameters_only_may_step():
    model = Weights("ab")
    model.b.requires_grad_(False)
    ddp = wrap(model, use_distributed_optimizer=True)

    torch.optim.SGD([ddp.module.b], lr=1.0).step()


def test_the_optimizer_inside_a_distributed_optimizer_is_not_mistaken_for_a_plain_one():
    ddp = wrap(Weights("a"), use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
    ddp(a=1).backward()

    assert optimizer.step().updated
    assert ddp.module.a[0].item() == 0.0


def test_after_detach_any_optimizer_may_step():
    model = wrap(Weights("a"), use_distributed_optimizer=True).detach()
    model(a=1).backward()

    step_all(model)

    assert model.a[0].item() == 0.0


def test_wrappers_that_come_and_go_leave_one_hook_in_torch_and_nothing_that_watches():
    def use():
        ddp = wrap(Weights("a"))
        ddp(a=1).backward()
        return weakref.ref(ddp.module)

    use()
    before = set(_global_optimizer_pre_hooks)
    module = use()
    gc.collect()
    wrap(Weights("a")).detach()

    assert set(_global_optimizer_pre_hooks) == before
    assert module() is None


@pytest.mark.parametrize(
    "change",
    [
        lambda wrappers: wrappers.append(wrap(Weights("a"))),
        lambda wrappers: wrappers.pop().detach(),
        lambda wrappers: wrappers.clear(),
    ],
    ids=["made", "detached", "collected"],
)
def test_a_wrapper_that_comes_or_goes_while_any_optimizer_steps_does_not_disturb_that_step(change):
    """Another thread may do so; torch walks through the hooks of all wrappers of the process meanwhile."""
    wrappers = [wrap(Weights("a"))]
    other = Weights("a")
    other(a=1).backward()

    def change_now(*_):
        change(wrappers)
        gc.collect()

    handles = [register_optimizer_step_pre_hook(hook) for hook in (change_now, lambda *_: None)]
    try:
        step_all(other)
    finally:
        for handle in handles:
            handle.remove()

    assert other.a[0].item() == 0.0


class TestStateOfTorch:
    """``get_optimizer_state_dict`` of an optimizer without state steps on zeros, with learning rates of zero."""

    @pytest.mark.parametrize("kind", [float, torch.tensor], ids=["a number", "a tensor"])
    def test_it_is_made_on_one_rank_alone_and_no_update_is_counted(self, kind):
        ranks = Ranks(2, Weights("ab"))

        def program(rank, ddp):
            optimizer = torch.optim.AdamW(ddp.parameters(), lr=kind(0.5))
            if rank == 0:
                _init_optim_state(optimizer)
                _init_optim_state(torch.optim.SGD(ddp.parameters(), lr=kind(0.5)))
            before = ddp.module.a[0].item()
            for _ in range(2):
                ddp(a=1, b=1).backward()
                optimizer.step()
                optimizer.zero_grad()
            return before, optimizer.state[ddp.module.a]["step"].item()

        assert ranks.run(program) == [(1.0, 3.0), (1.0, 2.0)]

    def test_it_is_made_after_a_forward_and_after_a_step(self):
        ddp = wrap(Weights("a"))
        loss = ddp(a=1)

        _init_optim_state(optimizer := torch.optim.AdamW(ddp.parameters(), lr=0.5))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _init_optim_state(other := torch.optim.AdamW(ddp.parameters(), lr=0.5))

        assert (len(optimizer.state), len(other.state)) == (1, 1)

    def test_over_reduce_scattered_gradients_it_is_refused(self):
        ddp = wrap(Weights("a"), use_distributed_optimizer=True)

        with pytest.raises(PlainOptimizerError):
            _init_optim_state(torch.optim.AdamW(ddp.parameters(), lr=0.5))

    @pytest.mark.parametrize(
        "change",
        [
            lambda optimizer, _: optimizer.param_groups[0].update(lr=1e-9),
            lambda optimizer, _: optimizer.param_groups[0].update(lr=torch.tensor(1e-9)),
            lambda _, ddp: ddp.module.b.grad[3].fill_(1e-9),
            lambda _, ddp: setattr(ddp.module.b, "grad", None),
            lambda _, ddp: setattr(ddp.module.b, "grad", ddp.module.b.main_grad.zero_()),
        ],
        ids=["a learning rate", "a tensor of one", "a gradient that is not zero", "no gradient", "zeros in the buffer"],
    )
    def test_any_other_step_without_a_sync_is_refused(self, change):
        ddp = wrap(Weights("ab"))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.0)
        for param in ddp.parameters():
            param.grad = torch.zeros_like(param)
        change(optimizer, ddp)

        with pytest.raises(UnreducedGradientsError):
            optimizer.step()

    def test_while_buckets_are_sent_it_is_refused(self):
        ddp = wrap(Weights("a"), finish="explicit")
        ddp(a=1).backward()
        ddp.module.a.grad = None

        with pytest.raises(UnreducedGradientsError):
            _init_optim_state(torch.optim.AdamW(ddp.parameters(), lr=0.5))

    def test_an_update_with_a_learning_rate_of_zero_is_counted(self):
        ranks = Ranks(2, Weights("a"))

        def program(rank, ddp):
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
            ddp(a=0).backward()
            if rank == 0:
                optimizer.step()
            ddp.zero_grad()
            ddp(a=1).backward()

        with pytest.raises(MegabucketError, match="optimizer updates since"):
            ranks.run(program)

    def test_one_that_fails_hides_no_later_update(self):
        ranks = Ranks(2, Weights("a"))

        def fail(*_):
            raise ZeroDivisionError

        def program(rank, ddp):
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
            handle = optimizer.register_step_pre_hook(fail)
            with pytest.raises(ZeroDivisionError):
                _init_optim_state(optimizer)
            handle.remove()
            optimizer.param_groups[0]["lr"] = 1.0 + rank
            ddp.module.a.grad = None
            ddp(a=1).backward()
            optimizer.step()
            ddp(a=1).backward()

        with pytest.raises(MegabucketError, match="lr of group 0"):
            ranks.run(program)


class TestMixedDtypes:
    """16-bit parameters with float32 gradients: torch's Adams and fused kernels cannot step on them."""

    def wrapped(self, **fields):
        module = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
        model = DistributedDataParallel(module, DistributedDataParallelConfig(**fields))
        model(torch.ones(3, 2, dtype=torch.bfloat16)).sum().backward()
        return model

    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam])
    def test_an_adam_is_refused_by_name(self, kind):
        model = self.wrapped()

        with pytest.raises(ConfigError) as caught:
            kind(model.parameters()).step()

        assert str(caught.value) == (
            f"torch's {kind.__name__} cannot mix dtypes in a step, and 'weight' is bfloat16 with a float32 gradient "
            "(grad_reduce_in_fp32=True). Wrap the optimizer: megabucket.DistributedOptimizer(optimizer, ddp) works in both "
            "modes and keeps float32 main parameters; or set grad_reduce_in_fp32=False."
        )

    def test_what_torch_can_mix_steps(self):
        model = self.wrapped()
        torch.nn.init.zeros_(model.module.weight)

        torch.optim.SGD(model.parameters(), lr=0.5).step()

        assert model.module.weight.tolist() == [[-1.5, -1.5]]  # gradient 3 in each

    def test_both_remedies_work(self):
        same_dtype, main_params = self.wrapped(grad_reduce_in_fp32=False), self.wrapped()

        torch.optim.AdamW(same_dtype.parameters()).step()

        assert DistributedOptimizer(torch.optim.AdamW(main_params.parameters()), main_params).step().updated
