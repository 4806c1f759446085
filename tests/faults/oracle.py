"""The right answer of every step, computed by one process alone: plain torch, no buffers, no collectives.

Each rank has an oracle of its own and compares every gradient and every weight with it. It reads the acts of all ranks on a
plain copy of the model, adds their gradients up in float64, divides by the ranks, and steps a torch optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch

from .acts import Act, Acts, Do, Edit
from .cells import Combo
from .model import LEARNING_RATE, FaultModel, loss_of, make_batch, muon_and_adamw

_FACTORS = {"huge": 2.0**100, "doubled": 2.0, "replaced": 2.0, "cleared": 0.0}


def edited(grad: torch.Tensor, edit: Edit) -> torch.Tensor:
    """Return a gradient with one element that is not finite, or with all of them scaled."""
    if edit.what in _FACTORS:
        return grad * _FACTORS[edit.what]
    grad = grad.clone()
    grad.view(-1)[1] = float(edit.what)
    return grad


class Oracle:
    """A plain model and its plain optimizers, trained on the batches of all ranks.

    Args:
        model: is copied.
        seed: of the batches.
        combo: how the ranks are set up, whose gradients are averaged.
        rank: whose weights these are.
        zeros_for_unused: whether a parameter that no rank used has a gradient of zero (rather than none at all).
    """

    def __init__(
        self,
        model: FaultModel,
        combo: Combo,
        rank: int,
        *,
        seed: int,
        momentum: float = 0.0,
        zeros_for_unused: bool = True,
    ) -> None:
        self.model = copy.deepcopy(model)
        self._combo, self._rank = combo, rank
        self._seed, self._zeros_for_unused, self._momentum = seed, zeros_for_unused, momentum
        self.optimizers = self._make_optimizers()

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        if self._combo.has_owners:
            return muon_and_adamw(self.model)
        return [torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, momentum=self._momentum)]

    def compute(self, programs: Sequence[Acts]) -> dict[str, torch.Tensor | None]:
        """Return the mean gradient of one step, by parameter, and keep it for ``update``.

        That of an expert is the sum over the ranks that hold it, divided by all ranks.
        """
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        params = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        totals: dict[str, torch.Tensor] = {}
        for rank, acts in enumerate(programs):
            for name, grad in self._grads_of(self._combo.data_rank(rank), acts, params).items():
                if not self._combo.holds_same(self._rank, rank, name):
                    continue
                totals[name] = totals[name] + grad.double() if name in totals else grad.double()
        means: dict[str, torch.Tensor | None] = {}
        for name, param in params.items():
            absent = torch.zeros_like(param) if self._zeros_for_unused else None
            means[name] = (totals[name] / self._combo.num_ranks).to(param.dtype) if name in totals else absent
            param.grad = means[name]
        return means

    def _grads_of(self, rank: int, acts: Acts, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what the rank that reads the batches of ``rank`` accumulates up to its update."""
        sums: dict[str, torch.Tensor] = {}
        forwards: dict[int, Act] = {}
        for act in acts:
            if act.do in (Do.LOOK, Do.STEP):
                break
            if act.do is Do.FORWARD:
                forwards[act.slot] = act
            elif act.do is Do.ZERO:
                sums.clear()
            elif act.do is Do.BACKWARD:
                for slot in (act.slot, act.joins) if act.joins >= 0 else (act.slot,):
                    self._accumulate(sums, rank, forwards[slot], params, act.edits)
        return sums

    def _accumulate(
        self, sums: dict[str, torch.Tensor], rank: int, forward: Act, params: Mapping[str, torch.Tensor], edits: Sequence[Edit]
    ) -> None:
        inputs, targets = make_batch(seed=self._seed, batch=forward.batch, rank=rank, microbatch=forward.microbatch)
        loss = loss_of(self.model(inputs, forward.layers), targets)
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        by_param = {edit.param: edit for edit in edits}
        for name, grad in zip(params, grads, strict=True):
            if grad is not None:
                value = edited(grad, by_param[name]) if name in by_param else grad
                sums[name] = sums[name] + value if name in sums else value

    def update(self) -> None:
        """Step on the gradients computed last."""
        for optimizer in self.optimizers:
            optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights as they must be now."""
        return {name: param.detach() for name, param in self.model.named_parameters()}

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return the weights as values of their own: a checkpoint in memory."""
        return {name: value.clone() for name, value in self.weights().items()}

    @torch.no_grad()
    def restart_from(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Go on from other weights, with a new optimizer."""
        for name, param in self.model.named_parameters():
            param.copy_(weights[name])
        self.optimizers = self._make_optimizers()

    def follow(self, model: FaultModel) -> None:
        """Go on with another structure: take over parameters, trainability and values, and keep the momentum by name."""
        states = {id(param): state for optimizer in self.optimizers for param, state in optimizer.state.items()}
        state_of = {name: states.get(id(param)) for name, param in self.model.named_parameters()}
        self.model = copy.deepcopy(model)
        self.optimizers = self._make_optimizers()
        for name, param in self.model.named_parameters():
            for optimizer in self.optimizers if state_of.get(name) else ():
                if any(param is one for group in optimizer.param_groups for one in group["params"]):
                    optimizer.state[param] = state_of[name]


def first_difference(actual: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None]) -> str:
    """Return where two sets of tensors first differ in a bit that counts, as text; empty if nowhere. NaN equals NaN."""
    for name, right in expected.items():
        value = actual.get(name)
        if value is None or right is None:
            if value is not right:
                return f"{name}: is {_presence(value)}, but should be {_presence(right)}"
        elif difference := _difference(value, right):
            return f"{name}{difference}"
    return ""


def _presence(value: torch.Tensor | None) -> str:
    return "absent" if value is None else "there"


def _difference(value: torch.Tensor, right: torch.Tensor) -> str:
    if value.shape != right.shape:
        return f": shape {tuple(value.shape)} for {tuple(right.shape)}"
    if value.dtype == right.dtype and torch.equal(value, right):
        return ""
    found, wanted = (tensor.detach().to(torch.float64).reshape(-1) for tensor in (value, right))
    # The oracle is float32; a 16-bit value may have lost bits, but must be near.
    slack = float(wanted.abs().max()) / 16 if value.dtype.itemsize == 2 else 0.0
    wrong = ~(((found - wanted).abs() <= slack) | (found == wanted) | (found.isnan() & wanted.isnan()))
    if not bool(wrong.any()):
        return ""
    index = int(wrong.nonzero()[0])
    return f"[{index}] is {found[index]:g}, should be {wanted[index]:g} ({int(wrong.sum())} of {len(found)} differ)"
