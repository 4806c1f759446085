"""The right numbers: every gradient and weight is a whole multiple of its pattern, so one Python number each says all.

Programs are read a second time, without torch: what a rank has accumulated, what the reduction of that is, and what each
update makes of the weights of each rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from megabucket.chaos.loopback_soak.acts import Act, Backward, Forward, Zero
from megabucket.chaos.loopback_soak.model import first_weight, pattern
from megabucket.chaos.loopback_soak.program import Call, Episode, ModelSpec, WorldSpec

Multiples = dict[str, float]
"""A whole number (or nan, inf) by parameter name."""


@dataclass
class RankNumbers:
    """The weights of one rank."""

    weights: Multiples
    velocity: Multiples = field(default_factory=dict)
    saved: Multiples = field(default_factory=dict)
    is_spoiled: bool = False
    """Whether nobody knows the weights."""

    def update(self, grads: Mapping[str, float], momentum: float) -> None:
        """Step as SGD with a learning rate of one does."""
        for name, grad in grads.items():
            self.velocity[name] = momentum * self.velocity.get(name, 0) + grad
            self.weights[name] -= self.velocity[name]

    def forget_velocity(self, param: str) -> str:
        """Begin anew with the momentum of a parameter; return that nothing is wrong."""
        self.velocity.pop(param, None)
        return ""

    def save(self) -> str:
        """Remember the weights; return that nothing is wrong."""
        self.saved = dict(self.weights)
        return ""

    def restore(self) -> str:
        """Go back to what was saved; return that nothing is wrong."""
        self.weights, self.velocity, self.is_spoiled = dict(self.saved), {}, False
        return ""


class Oracle:
    """The numbers of all ranks of a world, and what they last agreed on."""

    def __init__(self, spec: WorldSpec) -> None:
        self.spec = spec
        names = spec.model.numels
        self.ranks = [
            RankNumbers({name: first_weight(index) for index, name in enumerate(names)}) for _ in range(spec.num_ranks)
        ]
        self.trained = frozenset(names) - {"frozen"}
        self.last_error: str | None = str(None)
        """Text of the last error that all ranks agreed on; ``None`` where nobody has looked at it."""
        self.may_lag = False
        """Whether all ranks may still have to learn that the last step was dropped."""
        self._patterns = {name: pattern(numel) for name, numel in names.items()}
        self._square_sums = {name: float(values.square().sum()) for name, values in self._patterns.items()}

    def copy(self) -> Oracle:
        """Return an oracle that can go on in another way."""
        other = copy.copy(self)
        other.ranks = [
            RankNumbers(dict(rank.weights), dict(rank.velocity), dict(rank.saved), rank.is_spoiled) for rank in self.ranks
        ]
        return other

    def loss(self, rank: int, call: Call) -> float:
        """Return what a forward of one rank must give."""
        weights = self.ranks[rank].weights
        model = self.spec.model
        return sum(
            use.factor * sum(weights[name] * self._square_sums[name] for name in model.params_of(use.layer))
            for use in call.uses
        )

    def reduced(self, episode: Episode, index: int) -> Multiples:
        """Return the reduced gradient of the blocks at one position of an episode."""
        divisor = self.spec.num_ranks if self.spec.averages else 1
        totals: Multiples = dict.fromkeys(self.trained, 0.0)
        for blocks in episode.programs:
            acts = [act for block in blocks[: index + 1] for act in block.acts]
            own = blocks[index].acts if index < len(blocks) else ()
            for name, value in _accumulated(self.spec.model, acts, own).items():
                if name in totals:
                    totals[name] += value
        return {name: value / divisor for name, value in totals.items()}

    def flat(self, multiples: Mapping[str, float]) -> torch.Tensor:
        """Return values, 1D and float64, in order of registration."""
        return torch.cat([values * multiples[name] for name, values in self._patterns.items() if name in multiples])


def _accumulated(model: ModelSpec, acts: Iterable[Act], own: Iterable[Act]) -> Multiples:
    """Return what one rank accumulates in the acts ``own``; forwards may be anywhere in ``acts``."""
    calls = {act.slot: act.call for act in acts if isinstance(act, Forward)}
    sums: Multiples = {}
    starts_over = False  # what is cleared after the last backward was reduced before
    for act in own:
        if isinstance(act, Forward):
            calls[act.slot] = act.call
        elif isinstance(act, Zero):
            starts_over = True
        elif isinstance(act, Backward):
            sums, starts_over = ({} if starts_over else sums), False
            uses = [*calls[act.slot].uses, *(calls[act.joins].uses if act.joins >= 0 else ())]
            for use in uses:
                for name in model.params_of(use.layer):
                    sums[name] = sums.get(name, 0.0) + use.factor
    return sums


def first_difference(found: torch.Tensor, right: torch.Tensor, model: ModelSpec, names: Iterable[str]) -> str:
    """Return where two flat tensors differ, in words; empty if nowhere. NaN equals NaN."""
    if found.shape != right.shape:
        return f"{found.numel()} elements instead of {right.numel()}"
    wrong = ~((found == right) | (found.isnan() & right.isnan()))
    if not bool(wrong.any()):
        return ""
    index = place = int(wrong.nonzero()[0])
    wanted = set(names)
    for name, numel in model.numels.items():
        if name in wanted:
            if place < numel:
                return (
                    f"{name}[{place}] is {found[index]:g} and should be {right[index]:g} ({int(wrong.sum())} elements differ)"
                )
            place -= numel
    return f"element {index} differs"
