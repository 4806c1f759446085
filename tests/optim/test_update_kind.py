"""Optimizers are tried, not guessed: copies step on small tensors, together, alone and cut, before they get those of a rank."""

import copy
import functools
import math
import random

import pytest
import torch
from stand_ins import ScheduleFree
from torch.optim.optimizer import register_optimizer_step_pre_hook

import megabucket as mb
from megabucket.errors import ConfigError
from megabucket.optim.update_kind import _ELEMENTWISE, UpdateKind, find_update_kind, refuse_coupled

ELEMENTWISE, TENSOR, COUPLED = UpdateKind


def kind_of(optimizer):
    return find_update_kind(optimizer).kind


def params(*shapes):
    return [torch.nn.Parameter(torch.linspace(0.1, 1.0, max(1, torch.Size(shape).numel())).view(shape)) for shape in shapes]


def tried(optimizer):
    """Return it as one of a subclass, which is not known."""
    optimizer.__class__ = type(type(optimizer).__name__, (type(optimizer),), {})
    return optimizer


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
def test_what_looks_at_whole_tensors_is_found_under_any_name(rule, kind):
    assert kind_of(type(kind, (Rule,), {})(params((3, 4), (5,)), rule)) is TENSOR


BY_ELEMENT = {
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
@pytest.mark.parametrize("build", BY_ELEMENT.values(), ids=BY_ELEMENT)
def test_elementwise_optimizers_are_taken_also_at_the_start_of_a_warmup(build, has_stepped):
    own = params((3, 4), (5,), ())
    optimizer = build(own)
    for _ in range(2 if has_stepped else 0):
        for param in own:
            param.grad = torch.ones_like(param)
        optimizer.step()

    assert find_update_kind(tried(optimizer)) == (ELEMENTWISE, "")


def test_those_of_torch_that_are_known_pass_the_trial_above():
    assert {type(build(params((2,)))) for build in BY_ELEMENT.values()} - {Rule} == _ELEMENTWISE


@pytest.mark.parametrize("has_stepped", [False, True], ids=["fresh", "has stepped"])
@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor])
def test_of_torchs_own_matrix_optimizers_it_is_known_what_the_trial_finds(kind, has_stepped):
    (own,) = params((3, 4))
    optimizer = kind([own])
    if has_stepped:
        own.grad = torch.ones_like(own)
        optimizer.step()

    assert kind_of(optimizer) is kind_of(tried(optimizer)) is TENSOR


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
        assert kind_of(tried(optimizer)) is ELEMENTWISE
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

    assert kind_of(LayerWise(params((3, 4)), lr=0.1)) is TENSOR


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

    assert kind_of(optimizer) is ELEMENTWISE
    assert optimizer.param_groups[0]["train_mode"] is (ends_in == "train")
    assert torch.equal(own, before)


def test_each_kind_of_group_is_tried():
    def rule(grad, param, state, group):  # a Muon that steps on vectors as AdamW does
        return orthogonalized(grad, param, state, group) if group["use_muon"] else grad

    first, second = params((5,), (3, 4))
    optimizer = Rule([{"params": [first]}, {"params": [second], "use_muon": True}], rule, use_muon=False)

    assert kind_of(optimizer) is TENSOR


def test_an_optimizer_in_an_optimizer_is_tried_on_tensors_of_its_own():
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base):
            super().__init__(base.param_groups, base.defaults)
            self.base, self.param_groups = base, base.param_groups

        def step(self, closure=None):
            self.base.step()

    own = params((3, 4))
    before = copy.deepcopy(own)

    assert kind_of(Lookahead(torch.optim.AdamW(own))) is ELEMENTWISE
    assert torch.equal(own[0], before[0])


def test_noise_is_refused_and_draws_nothing():
    seed = torch.get_rng_state()
    optimizer = Rule(params((3, 4)), lambda grad, *_: grad + torch.randn_like(grad))

    with pytest.raises(ConfigError, match="it draws random numbers, so no two copies agree"):
        find_update_kind(optimizer)
    assert torch.equal(seed, torch.get_rng_state())


# Groups: tensors of the dimensions that they hold #


def test_groups_of_matrices_are_tried_with_matrices_both_wide_and_tall():
    seen = set()

    def rule(grad, param, state, group):
        seen.add(tuple(param.shape))
        if param.ndim != 2:
            raise ValueError("a matrix, please")
        return orthogonalized(grad, param, state, group)

    assert kind_of(Rule(params((3, 4)), rule)) is TENSOR
    of_matrices = [shape for shape in seen if len(shape) == 2]
    assert {rows > columns for rows, columns in of_matrices} == {False, True}
    assert len(of_matrices) == len(seen) - 1  # the first flat piece


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (4, 3, 3, 3), (2, 1, 3, 1, 2)], ids=str)
def test_only_the_dimensions_of_the_groups_are_tried(shape):
    seen = set()

    def rule(grad, param, state, group):
        seen.add(param.ndim)
        return grad

    assert kind_of(Rule(params(shape), rule)) is ELEMENTWISE
    assert seen == {len(shape), 1}


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (4, 3, 3, 3), (2, 1, 3, 1, 2)], ids=str)
def test_norms_and_couplings_are_found_in_any_dimension(shape):
    assert kind_of(Rule(params(shape), lambda grad, *_: grad / (1 + grad.norm()))) is TENSOR
    assert kind_of(Coupled(params(shape), clips_all(1.0))) is COUPLED


def test_vectors_and_matrices_in_one_group_may_have_other_state():
    def rule(grad, param, state, group):
        if param.ndim == 2:
            return orthogonalized(grad, param, state, group)
        state["second"] = 0.9 * state.get("second", torch.zeros_like(grad)) + 0.1 * grad.square()
        return grad / (state["second"].sqrt() + 1e-3)

    own = params((3, 4), (5,))
    optimizer = Rule(own, rule)
    for param in own:
        param.grad = torch.ones_like(param)
    optimizer.step()

    assert kind_of(optimizer) is TENSOR


def test_what_only_large_tensors_do_is_found():
    def of_large(grad, param, state, group):  # as 8-bit optimizers, which leave small tensors alone
        return quantized(grad, 256) if grad.numel() >= 4096 else grad

    assert kind_of(Rule(params((3, 4)), of_large)) is TENSOR
    assert kind_of(Rule(params((5,)), of_large)) is TENSOR
    assert kind_of(Rule(params((3, 4)), factored)) is TENSOR


def test_matrices_of_equal_shape_may_be_stacked():
    def couple(updates, params, shared):  # in products of low precision, which are rounded as the number of matrices wants it
        by_shape = {}
        for update in updates:
            by_shape.setdefault(update.shape, []).append(update)
        scales = {shape: 1 + 0.004 * len(own) for shape, own in by_shape.items() if len(own) > 1}
        return [orthogonalized(update, None, {}, None) * scales.get(update.shape, 1.0) for update in updates]

    assert kind_of(Coupled(params((3, 4)), couple)) is TENSOR


class Shampoo(torch.optim.Optimizer):
    """Multiplies by an inverse root of a sum of squares along each dimension, of which it keeps a list in its state."""

    largest = 0  # number of rows that any step has decomposed

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for param in (param for group in self.param_groups for param in group["params"]):
            update = param.grad
            sums = self.state[param].setdefault("sums", [torch.eye(numel) for numel in param.shape])
            for dim, total in enumerate(sums):
                along = param.grad.movedim(dim, 0).flatten(1) if param.ndim > 1 else param.grad[:, None]
                total.add_(along @ along.T)
                values, vectors = torch.linalg.eigh(total)
                root = vectors @ torch.diag(values.clamp(min=1e-6) ** (-0.5 / param.ndim)) @ vectors.T
                update = torch.tensordot(root, update.movedim(dim, 0), 1).movedim(0, dim)
                Shampoo.largest = max(Shampoo.largest, len(total))
            param.sub_(0.1 * update)


@pytest.mark.parametrize("has_stepped", [False, True], ids=["fresh", "has stepped"])
def test_matrix_optimizers_never_allocate_by_the_square_of_a_long_tensor(monkeypatch, has_stepped):
    monkeypatch.setattr(Shampoo, "largest", 0)
    own = params((300, 2), (5,))
    optimizer = Shampoo(own)
    for param in own if has_stepped else ():
        param.grad = torch.ones_like(param)
    if has_stepped:
        optimizer.step()
        Shampoo.largest = 0

    assert kind_of(optimizer) is TENSOR
    assert 0 < Shampoo.largest <= 192


# State of 16 and 8 bits #


class AdamWithMoments(torch.optim.Optimizer):
    """AdamW with moments of a dtype of its own, computed in place as they are; perhaps trusted by layer, as LAMB."""

    def __init__(self, params, dtype, trust=lambda *_: 1.0):
        super().__init__(params, {"lr": 1e-3, "weight_decay": 0.0})
        self.dtype, self.trust = dtype, trust

    @torch.no_grad()
    def step(self, closure=None):
        for group, param in ((one, param) for one in self.param_groups for param in one["params"]):
            state, grad = self.state[param], param.grad.to(self.dtype)
            if not state:
                state["first"], state["second"] = (torch.zeros_like(param, dtype=self.dtype) for _ in range(2))
            first = state["first"].mul_(0.9).add_(grad, alpha=0.1)
            second = state["second"].mul_(0.999).addcmul_(grad, grad, value=0.001)
            update = first.float() / (second.float().sqrt() + 1e-4) + group["weight_decay"] * param
            param.sub_(group["lr"] * self.trust(param, update) * update)


@pytest.mark.parametrize("has_stepped", [False, True], ids=["fresh", "has stepped"])
@pytest.mark.parametrize("shape", [(5,), (3, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_state_of_16_bits_is_judged_by_its_own_precision(dtype, shape, has_stepped):
    def build(*trust):
        own = params(shape)
        optimizer = AdamWithMoments(own, dtype, *trust)
        for _ in range(2 if has_stepped else 0):
            own[0].grad = torch.ones_like(own[0])
            optimizer.step()
        return optimizer

    assert kind_of(build()) is ELEMENTWISE
    assert kind_of(build(lambda param, update: param.norm() / update.norm())) is TENSOR
    # By far less than the precision of bfloat16, which is 0.8 %.
    assert kind_of(build(lambda _, update: 1 + 1e-3 * torch.sin(update.norm()))) is TENSOR


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, ELEMENTWISE), (torch.float32, TENSOR)], ids=str)
def test_last_elements_rounded_otherwise_are_no_evidence_if_state_has_16_bits(dtype, kind):
    def rule(grad, param, state, group):  # the last four, as where a vectorized loop ends
        mean = state.setdefault("mean", torch.zeros_like(grad, dtype=dtype))
        exact = 0.9 * mean.float() + grad
        exact.flatten()[-4:] = (0.9 * mean.bfloat16() + grad.bfloat16()).flatten()[-4:].float()
        return mean.copy_(exact).float()

    assert kind_of(Rule(params((5,)), rule)) is kind


def quantized(values, block_numel):
    """Round to 8 bits, relative to the largest of each block of the flat values."""
    flat = values.flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % block_numel)).view(-1, block_numel)
    scales = padded.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return ((padded / scales).round().to(torch.int8) * scales).flatten()[: len(flat)].view_as(values)


class Adam8Bit(torch.optim.Optimizer):
    """Keeps one moment in blocks of 8-bit integers with scales."""

    def __init__(self, params, dtype=torch.int8, block_numel=256):
        super().__init__(params, {"lr": 1e-3})
        self.dtype, self.block_numel, self.offset = dtype, block_numel, 128 if dtype is torch.uint8 else 0

    @torch.no_grad()
    def step(self, closure=None):
        for group, param in ((one, param) for one in self.param_groups for param in one["params"]):
            state, numel = self.state[param], param.numel()
            blocks = torch.nn.functional.pad(param.grad.flatten(), (0, -numel % self.block_numel)).view(-1, self.block_numel)
            if state:
                blocks = 0.9 * (state["moment"].float() - self.offset) * state["scales"] + blocks
            state["scales"] = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            state["moment"] = ((blocks / state["scales"]).round() + self.offset).to(self.dtype)
            moment = (state["moment"].float() - self.offset) * state["scales"]
            param.sub_(group["lr"] * moment.flatten()[:numel].view_as(param))


@pytest.mark.parametrize("has_stepped", [False, True], ids=["fresh", "has stepped"])
@pytest.mark.parametrize("block_numel", [64, 128, 256, 2048])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(5,), (3, 4)], ids=str)
def test_state_of_8_bits_in_blocks_belongs_to_a_tensor(shape, dtype, block_numel, has_stepped):
    own = params(shape)
    optimizer = Adam8Bit(own, dtype, block_numel)
    if has_stepped:
        own[0].grad = torch.ones_like(own[0])
        optimizer.step()

    assert kind_of(optimizer) is TENSOR


# Couplings #


class Coupled(torch.optim.Optimizer):
    """Moves each parameter against its update, which ``couple`` makes of those of all."""

    def __init__(self, params, couple, rule=lambda grad, *_: grad, **defaults):
        super().__init__(params, {"lr": 0.1, "weight_decay": 0.0, **defaults})
        self.couple, self.rule, self.shared = couple, rule, {}

    @torch.no_grad()
    def step(self, closure=None):
        of_groups = [(group, param) for group in self.param_groups for param in group["params"] if param.grad is not None]
        updates = [self.rule(param.grad, param, self.state[param], group) for group, param in of_groups]
        updates = self.couple(updates, [param for _, param in of_groups], self.shared)
        for (group, param), update in zip(of_groups, updates, strict=True):
            param.sub_(group["lr"] * update)


def norm_of(tensors):
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm())


def by(factor, updates):
    return [factor * update for update in updates]


def clips_all(max_norm):
    """By the norm of all gradients, as far as it is too large."""
    return lambda updates, params, _: by(min(1.0, max_norm / (norm_of([param.grad for param in params]) + 1e-6)), updates)


def largest_of_all(updates, params, shared):
    return by(1 / (1e-3 + max(float(update.abs().max()) for update in updates)), updates)


def leading(updates, params, shared):
    """By the sum of products of gradients with their average."""
    means = shared.setdefault("means", [torch.zeros_like(update) for update in updates])
    product = sum(float((update * mean).sum()) for update, mean in zip(updates, means, strict=True))
    for mean, update in zip(means, updates, strict=True):
        mean.mul_(0.9).add_(update)
    return by(1 + 0.1 * math.tanh(product), updates)


def shared_mean(updates, params, shared):
    shared["mean"] = 0.9 * shared.get("mean", 0.0) + sum(float(update.mean()) for update in updates)
    return [update + 0.1 * shared["mean"] for update in updates]


def shared_by_shape(updates, params, shared):
    moved = []
    for update in updates:
        shared[update.shape] = 0.9 * shared.get(update.shape, 0.0) + update
        moved.append(shared[update.shape])
    return moved


def counts_params(updates, params, shared):
    return by(1 / len(updates), updates)


def counts_calls(updates, params, shared):
    moved = []
    for update in updates:
        shared["calls"] = shared.get("calls", 0) + 1
        moved.append(update / (1 - 0.95 ** shared["calls"]))
    return moved


def counts_elements(updates, params, shared):
    return by(sum(update.numel() for update in updates) ** -0.5, updates)


def after_the_one_before(updates, params, shared):
    return [update + 0.05 * before.mean() for update, before in zip(updates, [updates[-1], *updates[:-1]], strict=True)]


def halves_when_norms_grow(updates, params, shared):
    norm = norm_of(updates)
    shared["rate"] = shared.get("rate", 1.0) * (0.5 if norm > 2 * shared.get("norm", norm) else 1.01)
    shared["norm"] = norm
    return by(shared["rate"] * (1 + 1e-3 * math.sin(norm)), updates)


def slightly_by_weights(updates, params, shared):
    return by(1 + 1e-3 * math.sin(norm_of(params)), updates)


def relative_to_the_mean_norm(updates, params, shared):
    norms = [float(update.norm()) for update in updates]
    return [update * (1 + norm / (sum(norms) + 1e-6)) for update, norm in zip(updates, norms, strict=True)]


COUPLINGS = [
    *map(clips_all, (0.01, 1.0, 30.0, 1000.0)),
    largest_of_all,
    leading,
    shared_mean,
    shared_by_shape,
    counts_params,
    counts_calls,
    counts_elements,
    after_the_one_before,
    halves_when_norms_grow,
    slightly_by_weights,
    relative_to_the_mean_norm,
]


@pytest.mark.parametrize("couple", COUPLINGS)
def test_couplings_between_parameters_are_found(couple):
    found = find_update_kind(Coupled(params((3, 4), (5,)), couple))

    assert found.kind is COUPLED
    assert "becomes another when it is alone" in found.reason


class Estimating(torch.optim.Optimizer):
    """Enlarges its steps as far as gradients have led: Prodigy ("products" with the way from the start), D-Adaptation ("sums").

    Args:
        alone: each parameter has an estimate of its own.
    """

    def __init__(
        self, params, way, *, d0=1e-6, growth=math.inf, coefficient=1.0, lr=1.0, betas=(0.9, 0.999), corrects=False, alone=False
    ):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "betas": betas})
        self.way, self.d0, self.growth, self.coefficient = way, d0, growth, coefficient
        self.corrects, self.alone, self.estimates = corrects, alone, {}

    @torch.no_grad()
    def step(self, closure=None):
        every = [(group, param) for group in self.param_groups for param in group["params"] if param.grad is not None]
        for own in [[one] for one in every] if self.alone else [every]:
            self.update(own)

    def update(self, own):
        shared = self.state[own[0][1]].setdefault("estimate", {}) if self.alone else self.estimates
        d = shared.setdefault("d", self.d0)
        root = own[0][0]["betas"][1] ** 0.5
        for key in ("numerator", "count"):
            shared.setdefault(key, 0.0)
        shared["count"] += 1
        shared["numerator"] *= root
        total = 0.0
        for group, param in own:
            grad, state, (beta1, beta2) = param.grad, self.state[param], group["betas"]
            if "start" not in state:
                state["start"] = param.clone()
                state["first"], state["second"], state["sum"] = (torch.zeros_like(param) for _ in range(3))
            scale = (
                group["lr"]
                * d
                * ((1 - beta2 ** shared["count"]) ** 0.5 / (1 - beta1 ** shared["count"]) if self.corrects else 1)
            )
            if self.way == "products":
                shared["numerator"] += (1 - root) * scale * d / self.d0**2 * float((grad * (state["start"] - param)).sum())
                state["sum"].mul_(root).add_(grad, alpha=(1 - root) * scale * d / self.d0**2)
                state["first"].mul_(beta1).add_(grad, alpha=(1 - beta1) * d)
                state["second"].mul_(beta2).addcmul_(grad, grad, value=(1 - beta2) * d * d)
                total += float(state["sum"].abs().sum())
            else:
                state["second"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                inner = grad * state["sum"] / (state["second"].sqrt() + 1e-8)
                shared["numerator"] += (1 - root) * scale * float(inner.sum())
                state["sum"].mul_(root).add_(grad, alpha=(1 - root) * scale)
                state["first"].mul_(beta1).add_(grad, alpha=(1 - beta1) * scale)
                total += (1 - root) * float(state["sum"].abs().sum())
        if total > 0:
            shared["d"] = max(d, min(self.coefficient * shared["numerator"] / total, d * self.growth))
        for group, param in own:
            state = self.state[param]
            if self.way == "products":
                param.mul_(1 - group["lr"] * d * group["weight_decay"])
                param.sub_(group["lr"] * d * state["first"] / (state["second"].sqrt() + d * 1e-8))
            else:
                param.sub_(state["first"] / (state["second"].sqrt() + 1e-8))


@pytest.mark.parametrize("growth", [math.inf, 2.0, 1.02])
@pytest.mark.parametrize("d0", [1e-8, 1e-6, 1e-3])
@pytest.mark.parametrize("shapes", [((3, 4), (5,)), ((3, 4),), ((5,),)], ids=str)
@pytest.mark.parametrize("lr", [1.0, 0.0], ids=["rate 1", "warmup"])
@pytest.mark.parametrize("way", ["products", "sums"])
def test_couplings_that_grow_slowly_from_nothing_are_found(way, lr, shapes, d0, growth):
    assert kind_of(Estimating(params(*shapes), way, d0=d0, growth=growth, lr=lr)) is COUPLED
    assert kind_of(Estimating(params(*shapes), way, d0=d0, growth=growth, lr=lr, alone=True)) is TENSOR


def test_one_that_fails_alone_is_coupled():
    found = find_update_kind(Coupled(params((5,)), lambda updates, *_: by(float(updates[1].sum()), updates)))

    assert found.kind is COUPLED
    assert "a copy of it with one tensor fails (IndexError" in found.reason


def test_groups_that_depend_on_each_other_are_coupled():
    def rule(updates, params, shared):  # only the second group is changed, by the first
        return [
            update * (1 + updates[0].norm()) if param.ndim == 1 else update
            for update, param in zip(updates, params, strict=True)
        ]

    first, second = params((3, 4), (5,))

    assert kind_of(Coupled([{"params": [first]}, {"params": [second], "is_second": True}], rule, is_second=False)) is COUPLED


def test_the_refusal_of_a_coupled_one_says_what_to_do():
    optimizer = Coupled(params((3, 4)), clips_all(1.0))

    with pytest.raises(ConfigError) as caught:
        refuse_coupled(optimizer, find_update_kind(optimizer))

    text = str(caught.value)
    assert text.startswith(
        "Coupled updates one parameter depending on others: on small tensors a parameter of shape (16, 8) becomes another when "
        "it is alone (after step "
    )
    assert "use_distributed_optimizer=False" in text
    assert text.endswith('declare it: optimizer.update_kind = "tensor".')


class TestDeclarations:
    @pytest.mark.parametrize("declared", ["elementwise", "tensor", "coupled", *UpdateKind])
    def test_replace_the_trial(self, declared):
        optimizer = Rule(params((3, 4)), lambda *_: 1 / 0)
        optimizer.update_kind = declared

        assert kind_of(optimizer) is UpdateKind(declared)

    def test_replace_what_is_known(self):
        optimizer = torch.optim.AdamW(params((3, 4)))
        optimizer.update_kind = "tensor"

        assert find_update_kind(optimizer) == (TENSOR, "it declares update_kind = 'tensor'")

    def test_may_be_made_by_the_class(self):
        class Mine(Rule):
            update_kind = "elementwise"

        assert kind_of(Mine(params((3, 4)), lamb)) is ELEMENTWISE

    @pytest.mark.parametrize("declared", ["flat", "TENSOR", True, 3, ["tensor"]])
    def test_of_another_value_are_refused_with_the_choices(self, declared):
        optimizer = Rule(params((3, 4)), lamb)
        optimizer.update_kind = declared

        with pytest.raises(ConfigError, match=r"^Rule declares update_kind = .* one of 'elementwise', 'tensor', 'coupled', or"):
            find_update_kind(optimizer)


class TestWithoutAnAnswer:
    def test_one_that_cannot_be_copied(self):
        optimizer = Rule(params((3, 4)), lambda grad, *_: grad)
        optimizer.lines = (line for line in ())

        with pytest.raises(ConfigError, match="a copy fails with TypeError: cannot pickle 'generator' object"):
            find_update_kind(optimizer)

    @pytest.mark.parametrize(
        ("rule", "reason"),
        [
            (lambda grad, *_: grad.view(3, 4), "a copy fails with RuntimeError: shape"),
            (lambda grad, *_: 0 * grad, "5 steps of a copy change nothing, so there is nothing to compare"),
            (lambda grad, *_: grad / 0, "its steps give nan or infinite values"),
        ],
        ids=["fails", "does nothing", "overflows"],
    )
    def test_one_that_cannot_be_tried_is_told_how_to_declare(self, rule, reason):
        with pytest.raises(ConfigError) as caught:
            find_update_kind(Rule(params((3, 4)), rule))

        text = str(caught.value)
        assert text.startswith(f"how Rule updates could not be tried on small tensors: {reason}")
        assert 'Declare it: optimizer.update_kind = "elementwise" if it updates each element by itself, "tensor" if' in text

    @pytest.mark.parametrize("declares", [False, True])
    def test_one_that_wants_sparse_gradients_is_refused_whatever_it_declares(self, declares):
        optimizer = torch.optim.SparseAdam(params((3, 4)))
        if declares:
            optimizer.update_kind = "elementwise"

        with pytest.raises(ConfigError, match=r"^SparseAdam steps on sparse gradients only, and the buffers hold dense ones"):
            find_update_kind(optimizer)

    @pytest.mark.parametrize("declares", [False, True])
    def test_one_that_requires_a_closure_is_refused_whatever_it_declares(self, declares):
        optimizer = torch.optim.LBFGS(params((3, 4)))
        if declares:
            optimizer.update_kind = "elementwise"

        with pytest.raises(ConfigError, match=r"^LBFGS.step\(\) requires a closure and calls it many times") as caught:
            find_update_kind(optimizer)
        assert "update_kind" not in str(caught.value)

    def test_a_declaration_overrides_the_trial_both_ways(self):
        def wrap(optimizer_of, declared):
            module = torch.nn.Linear(3, 2)
            ddp = mb.DistributedDataParallel(module, mb.DistributedDataParallelConfig(use_distributed_optimizer=True))
            optimizer = optimizer_of(ddp.parameters())
            optimizer.update_kind = declared
            return mb.DistributedOptimizer(optimizer, ddp)

        wrap(lambda p: Rule(p, lamb), "elementwise")
        with pytest.raises(ConfigError, match="it declares update_kind = 'coupled'"):
            wrap(torch.optim.AdamW, "coupled")


# Random rules: elementwise operations, with something about the tensor among them, or about all tensors behind them #

POINTWISE = [
    lambda x, _: x,
    lambda x, _: x.sign() * x.abs().sqrt(),
    lambda x, _: torch.tanh(x),
    lambda x, _: x / (x.abs() + 0.1),
    lambda x, w: x + 0.1 * w,
    lambda x, w: x * (1 + w.square()).clamp(max=100.0),  # so that steps do not overflow
    lambda x, _: x.clamp(-2.0, 2.0),
    lambda x, w: torch.where(w > 0, x, 0.5 * x),
    lambda x, w: x.bfloat16().float() + 0.01 * w,
]


def polar(x, _):
    if x.ndim < 2:
        return x / (x.norm() + 1e-3)
    left, _, right = torch.linalg.svd(x.flatten(1), full_matrices=False)
    return (left @ right).view(x.shape)


def rank_one(x, _):
    if x.ndim < 2:
        return x / (x.square().mean().sqrt() + 1e-3)
    squares = x.square().flatten(1) + 1e-6
    return x / (squares.mean(1, keepdim=True) * squares.mean(0, keepdim=True) / squares.mean()).sqrt().view(x.shape)


OF_TENSORS = [
    lambda x, _: x / (x.norm() + 1e-3),
    lambda x, w: x * w.norm(),
    lambda x, _: x - 0.3 * x.mean(),
    lambda x, _: x / (x.abs().max() + 1e-3),
    lambda x, _: x / x.numel() ** 0.5,
    lambda x, _: x - 0.2 * x.roll(1),
    lambda x, _: x.flatten().cumsum(0).view(x.shape) / 10,
    lambda x, _: x * (x.abs() > x.abs().median()),
    lambda x, _: x + 0.1 * x.sum(-1, keepdim=True).tanh(),
    lambda x, _: x * min(1.0, 5.0 / float(x.norm() + 1e-3)),
    lambda x, _: x * (1 + 0.01 * torch.linspace(0, 1, x.numel()).view(x.shape)),
    lambda x, _: x.clamp(max=float(x.flatten().quantile(0.9))),
    lambda x, _: quantized(x, 64),
    lambda x, _: quantized(x, 256),
    lambda x, _: quantized(x, 128) if x.numel() >= 4096 else x,
    polar,
    rank_one,
]
OF_MATRICES = [  # other than vectors
    lambda x, _: x * (1 + x.ndim / 4),
    lambda x, _: x - x.mean(0, keepdim=True) if x.ndim > 1 else x,
    lambda x, _: x / (1 + x.flatten(1).norm(dim=0).view(1, *x.shape[1:])) if x.ndim > 1 else x,
    lambda x, _: x - x.mean() if x.ndim > 1 and x.numel() >= 4096 else x,
    lambda x, w: x + 0.1 * w if x.ndim > 1 else x,
]
SHAPES = [((3, 4),), ((3, 4), (5,)), ((2, 3, 2, 2), (5,), ()), ((5,),), ((5,), (7,), ())]


def random_optimizer(seed):
    """Return an optimizer, and how it updates."""
    draw = random.Random(seed)
    kind, shapes = draw.choice(list(UpdateKind)), draw.choice(SHAPES)
    groups = [{"params": [one]} for one in params(*shapes)] if draw.random() < 0.3 else params(*shapes)
    for index, group in enumerate(groups if isinstance(groups[0], dict) else ()):
        group["number"] = index  # another kind of group
    if kind is not ELEMENTWISE and draw.random() < 0.3:
        options = {
            "d0": 10 ** draw.uniform(-8, -3),
            "growth": draw.choice([math.inf, 2.0, 1.1, 1.02]),
            "coefficient": draw.uniform(0.5, 2.0),
            "lr": draw.choice([0.0, 1e-3, 1.0]),
            "betas": draw.choice([(0.9, 0.999), (0.9, 0.99), (0.95, 0.95)]),
            "corrects": draw.random() < 0.5,
        }
        return Estimating(groups, draw.choice(["products", "sums"]), alone=kind is TENSOR, **options), kind
    parts = draw.choices(POINTWISE, k=draw.randint(1, 3))
    if kind is TENSOR or (kind is COUPLED and draw.random() < 0.3):
        of_tensors = OF_TENSORS + (OF_MATRICES if len(shapes[0]) > 1 else [])
        parts.insert(draw.randint(0, len(parts)), draw.choice(of_tensors))
    beta, starts = draw.choice([0.0, 0.5, 0.9]), draw.choice([0, 0, 1])  # some only from their second step on
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])

    def rule(grad, param, state, group):
        state["count"] = state.get("count", 0) + 1
        mean = state.setdefault("mean", torch.zeros_like(grad, dtype=dtype)).mul_(beta).add_(grad.to(dtype))
        update = mean.to(grad.dtype, copy=True)
        for part in parts if state["count"] > starts else ():
            update = part(update, param)
        return update + group["weight_decay"] * param

    return (Coupled(groups, draw.choice(COUPLINGS), rule) if kind is COUPLED else Rule(groups, rule)), kind


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 2200), marks=pytest.mark.nightly)], ids=["60", "2140"])
def test_none_of_the_random_rules_is_put_wrongly(seeds):
    wrong = []
    for seed in seeds:
        optimizer, kind = random_optimizer(seed)
        if (found := find_update_kind(optimizer)).kind is not kind:
            wrong.append((seed, kind, found))

    assert wrong == []
