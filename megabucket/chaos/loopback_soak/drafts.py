"""Draws healthy training steps, which the kinds of fault then spoil on some ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from megabucket.chaos.loopback_soak.acts import (
    Act,
    Backward,
    Finish,
    Force,
    Forward,
    LookAtGrads,
    LookAtWeights,
    Number,
    ReadLastError,
    Update,
    Zero,
)
from megabucket.chaos.loopback_soak.program import Block, Call, Rerun, Use, WorldSpec

_GUARD_SHARE = 0.3


class Draft:
    """One training step of all ranks, still to be changed."""

    def __init__(self, calls: list[list[Call]], acts: list[list[Act]], guards: list[bool]) -> None:
        self.calls = calls
        """By rank and microbatch."""
        self.acts = acts
        """By rank."""
        self.guards = guards
        """Whether a rank is inside ``with ddp.step():``."""

    @property
    def num_microbatches(self) -> int:
        """Backwards of each rank."""
        return len(self.calls[0])

    def index(self, rank: int, kind: type[Act], nth: int = 0) -> int:
        """Return where the ``nth`` act of a kind is; negative counts from the last."""
        return [index for index, act in enumerate(self.acts[rank]) if isinstance(act, kind)][nth]

    def has(self, rank: int, kind: type[Act]) -> bool:
        """Return whether a rank has an act of a kind."""
        return any(isinstance(act, kind) for act in self.acts[rank])

    def change_call(self, rank: int, microbatch: int, change: Callable[[Call], Call]) -> None:
        """Let one forward be another one."""
        call = self.calls[rank][microbatch] = change(self.calls[rank][microbatch])
        self.acts[rank] = [
            replace(act, call=call) if isinstance(act, Forward) and act.slot == microbatch else act for act in self.acts[rank]
        ]

    def block(self, rank: int) -> Block:
        """Return the block of a rank."""
        return Block(tuple(self.acts[rank]), is_guarded=self.guards[rank])

    def copy(self) -> Draft:
        """Return a draft that can be changed on its own."""
        return Draft([list(calls) for calls in self.calls], [list(acts) for acts in self.acts], list(self.guards))


class Maker:
    """Draws steps of one world. Remembers what later steps depend on: the step number, and what is trained."""

    def __init__(self, spec: WorldSpec) -> None:
        self.spec = spec
        self.draw = random.Random(f"steps {spec.seed}")  # noqa: S311 - no secret
        self.trained = frozenset(spec.model.numels) - {"frozen"}
        self._number = 0

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.spec.num_ranks)

    def chance(self, share: float) -> bool:
        """Return true with the given probability."""
        return self.draw.random() < share

    def pick_rank(self) -> int:
        """Return some rank."""
        return self.draw.randrange(self.spec.num_ranks)

    def text(self) -> str:
        """Return the text of an error that no other error has."""
        return f"boom {self.draw.randrange(10**6)}"

    def zero(self) -> Zero:
        """Return how this training loop clears gradients."""
        return Zero(self.spec.clearing)

    def tail(self) -> Block:
        """Return what all ranks look at after an episode; reading weights early would hide gathers that nobody waits for."""
        acts: list[Act] = []
        if not self.spec.switch("overlap_param_gather", False) or self.chance(0.4):
            acts.append(LookAtWeights())
        if self.chance(0.6):
            acts.append(ReadLastError())
        return Block(tuple(acts))

    def step(self, *, num_microbatches: int | None = None, uses_all: bool = False) -> Draft:
        """Return a healthy step.

        Args:
            uses_all: whether each forward runs every layer.
        """
        num_microbatches = num_microbatches or self.draw.choice((1, 1, 2, 3))
        self._number += 1
        calls = [self._calls(num_microbatches, uses_all=uses_all) for _ in self.ranks]
        is_pipelined = num_microbatches > 1 and self.chance(0.2)
        all_inside = self.spec.is_explicit and self.chance(0.2)
        acts = [self._acts(calls[rank], is_pipelined=is_pipelined, all_inside=all_inside) for rank in self.ranks]
        is_guarded = self.chance(_GUARD_SHARE)
        return Draft(calls, acts, [is_guarded] * self.spec.num_ranks)

    def _calls(self, num_microbatches: int, *, uses_all: bool) -> list[Call]:
        """Return one rank's forwards: each layer is in at least one of them."""
        layers = range(len(self.spec.model.layers))
        trained = [layer for layer in layers if self.trained.intersection(self.spec.model.params_of(layer))]
        home = {layer: self.draw.randrange(num_microbatches) for layer in layers}
        calls = []
        for microbatch in range(num_microbatches):
            chosen = [layer for layer in layers if uses_all or home[layer] == microbatch or self.chance(0.8)]
            if not set(chosen).intersection(trained):
                chosen.append(self.draw.choice(trained))
            if self.chance(0.15):
                chosen.append(self.draw.choice(chosen))
            self.draw.shuffle(chosen)
            calls.append(Call(tuple(self._use(layer, chosen) for layer in chosen), is_direct=self.chance(0.1)))
        return calls

    def factor(self) -> int:
        """Return a factor whose mean over the ranks is a whole number."""
        return self.draw.randint(-3, 3) * self.spec.num_ranks

    def _use(self, layer: int, chosen: Sequence[int]) -> Use:
        rerun = Rerun.NONE
        if self.chance(0.1):
            # A parameter that reentrant checkpointing meets twice gets two gradients: that is a kind of its own.
            # One that is frozen it refuses to run.
            is_free = self.trained.issuperset(self.spec.model.params_of(layer)) and not self._is_shared(layer)
            is_reentrant = is_free and chosen.count(layer) == 1 and self.chance(0.5)
            rerun = Rerun.REENTRANT if is_reentrant else Rerun.NON_REENTRANT
        return Use(layer, self.factor(), rerun)

    def _is_shared(self, layer: int) -> bool:
        layers = self.spec.model.layers
        return layers[layer].shares_with >= 0 or any(other.shares_with == layer for other in layers)

    def _acts(self, calls: Sequence[Call], *, is_pipelined: bool, all_inside: bool) -> list[Act]:
        acts: list[Act] = [Number(self._number)] if self.spec.numbers_steps else []
        if self.spec.clears_first:
            acts.append(self.zero())
        last = len(calls) - 1
        forwards: list[Act] = [Forward(slot, call) for slot, call in enumerate(calls)]
        backwards: list[Act] = [
            Backward(slot, depth=self.draw.choice((1, 1, 2)) if slot < last or all_inside else 0) for slot in range(len(calls))
        ]
        if is_pipelined:
            acts += forwards + backwards
        else:
            acts += [act for pair in zip(forwards, backwards, strict=True) for act in pair]
        return acts + self.end_of_step()

    def end_of_step(self, update: Act | None = None) -> list[Act]:
        """Return what follows the last backward."""
        acts: list[Act] = [Finish()] if self.spec.is_explicit else []
        if not self.spec.is_sharded:
            acts.append(LookAtGrads())
        acts.append(update or Update())
        if not self.spec.clears_first:
            acts.append(self.zero())
        return acts

    def forced(self, draft: Draft) -> None:
        """Let a step all-reduce although the world scatters."""
        for rank, acts in enumerate(draft.acts):
            finish = [] if self.spec.is_explicit else [Finish()]
            at = draft.index(rank, Update)
            draft.acts[rank] = [Force(True), *acts[:at], *finish, LookAtGrads(), *acts[at:], Force(False)]
