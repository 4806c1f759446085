"""Optimizers are asked, not guessed: a copy of each steps on small tensors, whole and cut, before it gets flat shards."""

import copy
import functools
import random

import pytest
import torch
from stand_ins import ScheduleFree
from torch.optim.optimizer import register_optimizer_step_pre_hook

import megabucket as mb
from megabucket.errors import ConfigError
from megabucket.optim.elementwise import _KNOWN, check_elementwise, find_obstacle


def params(*shapes):
    return [torch.nn.Parameter(torch.linspace(0.1, 1.0, max(1, torch.Size(shape).numel())).view(shape)) for shape in shapes]


class Rule(torch.optim.Optimizer):
    """Moves each parameter against what ``rule(grad, param, state, group)`` returns."""

    def __init__(self, params, rule, **defaults):
        super().__init__(params, {"lr": 0.1, "weight_decay": 0.0, **defaults})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * self.rule(param.grad, param, self.state[param], group))


def momentum(grad, state):
    state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(grad)) + grad
    return state["momentum"]


def lars(grad, param, state, group):
    decay = group["weight_decay"]
    trust = param.norm() / (grad.norm() + decay * param.norm()) if decay else 1.0  # as apex: layer-wise with decay only
    return momentum(trust * (grad + decay * param), state)


def lamb(grad, param, state, group):
    update = momentum(grad, state) / (grad.square().sqrt() + 1e-6) + group["weight_decay"] * param
    return update * param.norm() / update.norm()


def novograd(grad, param, state, group):
    state["second"] = 0.9 * state.get("second", 0.0) + 0.1 * grad.square().sum()
    return grad / state["second"].sqrt()


def stable_adamw(grad, param, state, group):
    # Clips only when the gradient grows suddenly.
    state["second"] = 0.9 * state.get("second", grad.square()) + 0.1 * grad.square()
    update = grad / (state["second"].sqrt() + 1e-8)
    return update / max(1.0, float(update.square().mean().sqrt()))


def orthogonalized(grad, param, state, group):
    if grad.ndim != 2:
        return grad
    left, _, right = torch.linalg.svd(momentum(grad, state), full_matrices=False)
    return left @ right


def factored(grad, param, state, group):
    if grad.ndim != 2 or min(grad.shape) < 128:  # small matrices are not factored
        return grad / (grad.abs() + 1e-3)
    return grad / (grad.square().mean(0, keepdim=True) * grad.square().mean(1, keepdim=True)).sqrt().sqrt()


def decays_matrices_only(grad, param, state, group):
    return grad + (group["weight_decay"] * param if param.ndim > 1 else 0.0)


def centralized(grad, param, state, group):
    return grad - grad.mean() if grad.ndim > 1 else grad


def clipped(grad, param, state, group):
    return grad * min(1.0, 10.0 / float(grad.norm()))


WHOLE = [lars, lamb, novograd, stable_adamw, orthogonalized, factored, decays_matrices_only, centralized, clipped]


@pytest.mark.parametrize("kind", ["Adam", "Mine"])
@pytest.mark.parametrize("rule", WHOLE, ids=lambda rule: rule.__name__)
def test_what_looks_at_whole_tensors_is_refused_under_any_name(rule, kind):
    optimizer = type(kind, (Rule,), {})(params((3, 4), (5,)), rule)

    with pytest.raises(ConfigError, match=rf"^{kind} cannot step on flat shards .* depends on others"):
        check_elementwise(optimizer)


ELEMENTWISE = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9, nesterov=True, dampening=0.0),
    "Adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.0), foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True, maximize=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p, decoupled_weight_decay=True),
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
    "ASGD": lambda p: torch.optim.ASGD(p, t0=1),
    "Rprop": torch.optim.Rprop,
    "Lion": lambda p: Rule(p, lambda grad, _, state, __: momentum(grad, state).sign()),
    "named parameters": lambda p: torch.optim.AdamW([(f"p{i}", one) for i, one in enumerate(p)]),
    "no parameters yet": lambda _: torch.optim.AdamW([{"params": []}]),
}


@pytest.mark.parametrize("has_stepped", [False, True], ids=["fresh", "has stepped"])
@pytest.mark.parametrize("build", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_elementwise_optimizers_are_taken_also_at_the_start_of_a_warmup(build, has_stepped):
    own = params((3, 4), (5,), ())
    optimizer = build(own)
    for _ in range(2 if has_stepped else 0):
        for param in own:
            param.grad = torch.ones_like(param)
        optimizer.step()

    assert find_obstacle(optimizer) == ""


def test_those_of_torch_that_are_known_pass_the_trial_above():
    assert {type(build(params((2,)))) for build in ELEMENTWISE.values()} - {Rule} == _KNOWN


def test_the_optimizer_its_hooks_and_random_numbers_are_left_alone():
    own = params((3, 4), (5,))
    optimizer = torch.optim.AdamW([{"params": own[:1]}, {"params": own[1:], "weight_decay": 0.0}], lr=0.5)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a function in place of ``step``
    for param in own:
        param.grad = torch.ones_like(param)
    optimizer.step()
    hooked = []
    optimizer.register_step_pre_hook(lambda *_: hooked.append("called"))
    of_all_optimizers = register_optimizer_step_pre_hook(lambda *_: hooked.append("called for a copy"))
    before, seed = copy.deepcopy((own, optimizer.state_dict())), torch.get_rng_state()

    try:
        assert find_obstacle(optimizer) == ""
    finally:
        of_all_optimizers.remove()

    assert all(torch.equal(a, b) and bool((a.grad == 1).all()) for a, b in zip(own, before[0], strict=True))
    torch.testing.assert_close(optimizer.state_dict(), before[1], rtol=0, atol=0)
    assert [param for group in optimizer.param_groups for param in group["params"]] == own
    assert torch.equal(seed, torch.get_rng_state())
    assert hooked == []


def test_a_step_that_passes_for_the_one_of_its_base_is_tried_itself():
    class LayerWise(torch.optim.SGD):
        @functools.wraps(torch.optim.SGD.step)
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad /= param.grad.norm()
            return super().step(closure)

    torch.optim.SGD(params((3, 4)), lr=0.1)  # torch marks the step of the base

    assert "depends on others" in find_obstacle(LayerWise(params((3, 4)), lr=0.1))


@pytest.mark.parametrize("ends_in", ["train", "eval"])
@pytest.mark.parametrize("has_stepped", [False, True], ids=["fresh", "has stepped"])
def test_one_that_steps_in_train_mode_only_is_tried_in_it_and_stays_in_its_own(has_stepped, ends_in):
    (own,) = params((3, 4))
    optimizer = ScheduleFree([own])
    if has_stepped:
        optimizer.train()
        own.grad = torch.ones_like(own)
        optimizer.step()
    getattr(optimizer, ends_in)()
    before = own.detach().clone()

    assert find_obstacle(optimizer) == ""
    assert optimizer.param_groups[0]["train_mode"] is (ends_in == "train")
    assert torch.equal(own, before)


def test_each_kind_of_group_is_tried():
    def rule(grad, param, state, group):  # a Muon that steps on vectors as AdamW does
        return orthogonalized(grad, param, state, group) if group["use_muon"] else grad

    first, second = params((3, 4), (5,))
    optimizer = Rule([{"params": [first]}, {"params": [second], "use_muon": True}], rule, use_muon=False)

    assert "depends on others" in find_obstacle(optimizer)


def test_an_optimizer_in_an_optimizer_is_tried_on_tensors_of_its_own():
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base):
            super().__init__(base.param_groups, base.defaults)
            self.base, self.param_groups = base, base.param_groups

        def step(self, closure=None):
            self.base.step()

    own = params((3, 4))
    before = copy.deepcopy(own)

    assert find_obstacle(Lookahead(torch.optim.AdamW(own))) == ""
    assert torch.equal(own[0], before[0])


def test_noise_is_refused_and_draws_nothing():
    seed = torch.get_rng_state()
    optimizer = Rule(params((3, 4)), lambda grad, *_: grad + torch.randn_like(grad))

    assert "depends on others" in find_obstacle(optimizer)
    assert torch.equal(seed, torch.get_rng_state())


class TestWithoutAnAnswer:
    def test_one_that_cannot_be_copied(self):
        optimizer = Rule(params((3, 4)), lambda grad, *_: grad)
        optimizer.lines = (line for line in ())

        assert find_obstacle(optimizer) == (
            "a copy of it could not be tried on small tensors (TypeError: cannot pickle 'generator' object)"
        )

    @pytest.mark.parametrize(
        ("build", "reason"),
        [
            (torch.optim.Muon, "ValueError: Param gradient must be a 2D matrix"),
            (torch.optim.SparseAdam, "RuntimeError: SparseAdam does not support dense gradients"),
            (lambda p: Rule(p, lambda grad, *_: 0 * grad), "changed nothing, so there is nothing to compare"),
        ],
        ids=["Muon", "SparseAdam", "does nothing"],
    )
    def test_one_that_cannot_be_tried_is_refused_with_the_reason(self, build, reason):
        with pytest.raises(ConfigError, match=reason):
            check_elementwise(build(params((3, 4))))

    @pytest.mark.parametrize("declares", [False, True])
    def test_one_that_requires_a_closure_is_refused_whatever_it_declares(self, declares):
        optimizer = torch.optim.LBFGS(params((3, 4)))
        if declares:
            optimizer.is_elementwise = True

        with pytest.raises(ConfigError, match=r"^LBFGS.step\(\) requires a closure and calls it many times") as caught:
            check_elementwise(optimizer)
        assert "is_elementwise" not in str(caught.value)

    def test_a_declaration_overrides_the_trial_both_ways(self):
        def wrap(optimizer_of, declared):
            module = torch.nn.Linear(3, 2)
            ddp = mb.DistributedDataParallel(module, mb.DistributedDataParallelConfig(use_distributed_optimizer=True))
            optimizer = optimizer_of(ddp.parameters())
            optimizer.is_elementwise = declared
            return mb.DistributedOptimizer(optimizer, ddp)

        wrap(lambda p: Rule(p, lamb), True)
        with pytest.raises(ConfigError, match="it declares is_elementwise = False"):
            wrap(torch.optim.AdamW, False)


# Random rules: a handful of elementwise operations, and for half of them one thing about the tensor among them. #

POINTWISE = [
    lambda x, _: x,
    lambda x, _: x.sign() * x.abs().sqrt(),
    lambda x, _: torch.tanh(x),
    lambda x, _: x / (x.abs() + 0.1),
    lambda x, w: x + 0.1 * w,
    lambda x, w: x * (1 + w.square()),
    lambda x, _: x.clamp(-2.0, 2.0),
    lambda x, w: torch.where(w > 0, x, 0.5 * x),
]
OF_TENSORS = [
    lambda x, _: x / (x.norm() + 1e-3),
    lambda x, w: x * w.norm(),
    lambda x, _: x - 0.3 * x.mean(),
    lambda x, _: x / (x.abs().max() + 1e-3),
    lambda x, _: x * (1 + x.ndim / 4),
    lambda x, _: x / x.numel() ** 0.5,
    lambda x, _: x - 0.2 * x.roll(1),
    lambda x, _: x.flatten().cumsum(0).view(x.shape) / 10,
    lambda x, _: x * (x.abs() > x.abs().median()),
    lambda x, _: x + 0.1 * x.sum(-1, keepdim=True).tanh(),
    lambda x, _: x * min(1.0, 5.0 / float(x.norm() + 1e-3)),
    lambda x, _: x * (1 + 0.01 * torch.linspace(0, 1, x.numel()).view(x.shape)),
]


def random_rule(seed):
    """Return a rule, and whether it is elementwise."""
    draw = random.Random(seed)
    parts = draw.choices(POINTWISE, k=draw.randint(1, 3))
    is_elementwise = draw.random() < 0.5
    if not is_elementwise:
        parts.insert(draw.randint(0, len(parts)), draw.choice(OF_TENSORS))
    beta, starts = draw.choice([0.0, 0.5, 0.9]), draw.choice([0, 0, 1])  # some only from their second step on

    def rule(grad, param, state, group):
        state["count"] = state.get("count", 0) + 1
        state["mean"] = beta * state.get("mean", torch.zeros_like(grad)) + grad
        update = state["mean"]
        for part in parts if state["count"] > starts else ():
            update = part(update, param)
        return update + group["weight_decay"] * param

    return rule, is_elementwise


@pytest.mark.parametrize("seeds", [range(50), pytest.param(range(50, 1000), marks=pytest.mark.nightly)], ids=["50", "950"])
def test_none_of_a_thousand_random_rules_passes_or_fails_by_luck(seeds):
    wrong = []
    for seed in seeds:
        rule, is_elementwise = random_rule(seed)
        if (find_obstacle(Rule(params((3, 4)), rule)) == "") != is_elementwise:
            wrong.append((seed, is_elementwise))

    assert wrong == []
