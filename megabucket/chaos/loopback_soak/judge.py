"""What became of an episode: compares what every rank saw with each way in which it may end. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megabucket.chaos.loopback_soak.acts import (
    Act,
    Forward,
    LookAtGrads,
    LookAtWeights,
    ReadLastError,
    Rebuild,
    Restore,
    Save,
    Update,
)
from megabucket.chaos.loopback_soak.model_changes import Replace
from megabucket.chaos.loopback_soak.oracle import Multiples, Oracle, first_difference
from megabucket.chaos.loopback_soak.program import Agreed, Block, Ending, Episode, Outcome, Want
from megabucket.chaos.loopback_soak.seen import BlockSeen
from megabucket.errors import CollectiveError, InFlightWriteError, MegabucketError, MismatchedCollectiveError

SeenByRank = Sequence[Sequence[BlockSeen]]


class Verdict(enum.Enum):
    """What became of an episode. The first two are good."""

    RIGHT = "RIGHT"  # no error, every number right on every rank
    NAMED = "NAMED"  # the expected error with the same text on all ranks, weights untouched
    SILENT = "SILENT"  # some rank had no error where something was wrong
    WRONG = "WRONG"  # an error, but not the expected one, not on all ranks, or not alike
    HUNG = "HUNG"  # ranks waited for collectives that never came, or would have mixed different ones

    @property
    def is_good(self) -> bool:
        """Whether the promise was kept."""
        return self in (Verdict.RIGHT, Verdict.NAMED)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, why, and the error behind it."""

    verdict: Verdict
    reason: str = ""
    error: str = ""
    """Class of the error that ranks saw, if any."""
    text: str = ""


class _MismatchError(Exception):
    """An outcome that does not describe what was seen; ``is_silent`` when the rank had no error."""

    def __init__(self, reason: str, *, is_silent: bool) -> None:
        super().__init__(reason)
        self.is_silent = is_silent


def judge(episode: Episode, seen: SeenByRank, oracle: Oracle) -> tuple[Judgement, Oracle]:
    """Return the judgement, and the oracle after the episode (the given one if it went wrong)."""
    broken = _find_broken(seen)
    if broken is not None:
        verdict = Verdict.SILENT if isinstance(broken, InFlightWriteError) else Verdict.HUNG
        return Judgement(verdict, "a collective cannot give the right result", type(broken).__name__, str(broken)), oracle
    mismatches = []
    for outcome in episode.outcomes:
        after = oracle.copy()
        try:
            text = _Matcher(episode, outcome, seen, after).match()
        except _MismatchError as mismatch:
            mismatches.append(mismatch)
            continue
        if outcome.agreed is None:
            return Judgement(Verdict.NAMED if _has_error(outcome) else Verdict.RIGHT), after
        return Judgement(Verdict.NAMED, error=outcome.agreed.error, text=text), after
    first = mismatches[0]
    reason = "; or ".join(str(mismatch) for mismatch in mismatches)
    errors = [block.error for blocks in seen for block in blocks if block.error is not None]
    error = next((one for one in errors if isinstance(one, MegabucketError)), errors[0] if errors else None)
    verdict = Verdict.SILENT if error is None or first.is_silent else Verdict.WRONG
    return Judgement(verdict, reason, type(error).__name__ if error else "", str(error or "")), oracle


def _find_broken(seen: SeenByRank) -> CollectiveError | None:
    """Return a collective that cannot give the right result; those that explain the others first."""
    found = [block.broken for blocks in seen for block in blocks if block.broken is not None]
    causes = [error for error in found if isinstance(error, InFlightWriteError | MismatchedCollectiveError)]
    return (causes or found or [None])[0]


def _has_error(outcome: Outcome) -> bool:
    return any(want.ending is not Ending.FINE for wants in outcome.wants for want in wants)


class _Matcher:
    """Holds one outcome against what was seen; advances the oracle."""

    def __init__(self, episode: Episode, outcome: Outcome, seen: SeenByRank, oracle: Oracle) -> None:
        self._episode, self._outcome, self._seen, self._oracle = episode, outcome, seen, oracle
        self._text = ""
        self._skip_reasons: set[str] = set()

    def match(self) -> str:
        """Return the text all ranks agreed on; empty if there was nothing to agree on."""
        self._check_agreed()
        depth = max(len(blocks) for blocks in self._episode.programs)
        for index in range(depth):
            reduced = self._oracle.reduced(self._episode, index)
            for rank, blocks in enumerate(self._episode.programs):
                if index < len(blocks):
                    self._check_block(rank, index, blocks[index], reduced)
        if len(self._skip_reasons) > 1:
            raise _MismatchError(f"different reasons to skip: {sorted(self._skip_reasons)}", is_silent=False)
        return self._text

    def _want(self, rank: int, index: int) -> Want:
        wants = self._outcome.wants[rank]
        return wants[index] if index < len(wants) else Want()

    def _check_agreed(self) -> None:
        """Check the one error of all ranks, before anything else is compared with it."""
        agreed = self._outcome.agreed
        if agreed is None:
            return
        raised = self._blocks_ending_alike()
        if not raised:  # every rank has an exception of its own; what they agreed on stands in last_error
            self._find_unraised(agreed)
            return
        for rank, _, block in raised:
            if block.error is None:
                raise _MismatchError(f"rank {rank} raised nothing, expected {agreed.error}", is_silent=True)
        index = min(index for _, index, _ in raised)
        known = [block.step for _, _, block in raised] + [blocks[index].step for blocks in self._seen if index < len(blocks)]
        first = max(known) + agreed.later_by
        steps = frozenset({first, first + 1} if self._oracle.may_lag else {first})
        self._oracle.may_lag = False
        for rank, _, block in raised:
            problem = _difference(agreed, block.error, steps)
            if problem:
                raise _MismatchError(f"rank {rank}: {problem}", is_silent=False)
        texts = {str(block.error) for _, _, block in raised}
        if len(texts) > 1:
            raise _MismatchError(f"ranks raised different texts: {sorted(texts)}", is_silent=False)
        self._text = texts.pop()
        if agreed.is_last_error:
            self._oracle.last_error = self._text

    def _blocks_ending_alike(self) -> list[tuple[int, int, BlockSeen]]:
        """Return rank, index and what was seen of each block that must raise what all ranks agreed on."""
        return [
            (rank, index, block)
            for rank, blocks in enumerate(self._seen)
            for index, block in enumerate(blocks)
            if self._want(rank, index).ending is Ending.AGREED
        ]

    def _find_unraised(self, agreed: Agreed) -> None:
        """Take the error that no rank has raised from the first rank that has read it, if any."""
        self._oracle.may_lag = True
        for blocks in self._seen:
            for error in (error for block in blocks for error in block.last_errors):
                problem = _difference(agreed, error, frozenset())
                if problem:
                    raise _MismatchError(f"last_error: {problem}", is_silent=False)
                self._text = self._oracle.last_error = str(error)
                return
        self._oracle.last_error = None

    def _check_block(self, rank: int, index: int, block: Block, reduced: Multiples) -> None:
        want, seen = self._want(rank, index), self._seen[rank][index]
        where = f"rank {rank}, block {index}"
        error = seen.error
        if want.ending is Ending.FINE and error is not None:
            raise _MismatchError(f"{where}: {seen.describe()}, expected none", is_silent=False)
        if want.ending is not Ending.FINE and error is None:
            raise _MismatchError(f"{where}: no error, expected {want.error or want.ending.value}", is_silent=True)
        if want.ending in (Ending.OWN, Ending.REFUSED) and (type(error).__name__ != want.error or want.text not in str(error)):
            raise _MismatchError(f"{where}: {seen.describe()}, expected {want.error}: {want.text}", is_silent=False)
        if error is not None and want.at and seen.at != want.at:
            raise _MismatchError(f"{where}: {seen.describe()}, expected it at {want.at}", is_silent=False)
        self._check_acts(rank, where, block.acts[: seen.num_played], seen, reduced)
        if self._outcome.spoils_weights and index == 0:
            self._oracle.ranks[rank].is_spoiled = True

    def _check_acts(self, rank: int, where: str, acts: Sequence[Act], seen: BlockSeen, reduced: Multiples) -> None:
        """Read the acts that were played once more, and compare every number that was seen."""
        numbers = self._oracle.ranks[rank]
        losses, looks, updates = iter(seen.losses), iter(seen.looks), iter(seen.updates)
        weights, last_errors = iter(seen.weights), iter(seen.last_errors)
        compare: dict[type[Act], Callable[[Any], str]] = {
            Forward: lambda act: self._compare_loss(rank, act, next(losses)),
            LookAtGrads: lambda _: self._compare_grads(next(looks), reduced, seen),
            Update: lambda act: self._compare_update(rank, act, next(updates), reduced, seen),
            LookAtWeights: lambda _: self._compare_weights(rank, next(weights)),
            ReadLastError: lambda _: self._compare_last_error(str(next(last_errors))),
            Save: lambda _: numbers.save(),
            Restore: lambda _: numbers.restore(),
            Rebuild: self._rebuild,
            Replace: lambda act: numbers.forget_velocity(act.param),
        }
        for act in acts:
            problem = compare[type(act)](act) if type(act) in compare else ""
            if problem:
                raise _MismatchError(f"{where}: {problem}", is_silent=seen.error is None)

    def _rebuild(self, act: Rebuild) -> str:
        self._oracle.trained = act.trained
        return ""

    def _compare_weights(self, rank: int, found: Any) -> str:
        numbers = self._oracle.ranks[rank]
        if numbers.is_spoiled:
            return ""
        right = self._oracle.flat(numbers.weights)
        problem = first_difference(found, right, self._oracle.spec.model, numbers.weights)
        return problem and f"weight {problem}"

    def _compare_loss(self, rank: int, act: Forward, found: float) -> str:
        if self._oracle.ranks[rank].is_spoiled or not act.call.is_exact:
            return ""
        right = self._oracle.loss(rank, act.call)
        return "" if found == right else f"the forward gave {found:g} and should give {right:g}"

    def _compare_grads(self, look: Any, reduced: Multiples, seen: BlockSeen) -> str:
        names = tuple(name for name in self._oracle.spec.model.numels if name in reduced)
        if self._outcome.skips:
            return self._compare_skip(seen) or ("" if look.absent == names else "gradients are shown although nobody steps")
        if look.absent:
            return f"param.grad of {', '.join(look.absent)} is None"
        problem = first_difference(look.values, self._oracle.flat(reduced), self._oracle.spec.model, names)
        return problem and f"gradient {problem}"

    def _compare_skip(self, seen: BlockSeen) -> str:
        self._skip_reasons.add(seen.skip_reason)
        is_right = self._outcome.skips in seen.skip_reason
        return "" if is_right else f"the step was not skipped because of {self._outcome.skips!r}: {seen.skip_reason!r}"

    def _compare_update(self, rank: int, act: Update, found: bool | None, reduced: Multiples, seen: BlockSeen) -> str:
        if self._outcome.skips:
            return self._compare_skip(seen) or ("" if not found else "step() says that it has updated")
        if found is not None and found is not act.updates:
            return f"step() says updated={found}"
        if seen.skip_reason:
            return f"the step was skipped: {seen.skip_reason}"
        if act.updates:
            self._oracle.ranks[rank].update(reduced, self._oracle.spec.momentum)
        return ""

    def _compare_last_error(self, found: str) -> str:
        if self._oracle.last_error is None:
            self._oracle.last_error = found  # nobody has raised or read it yet
        right = self._oracle.last_error
        return "" if found == right else f"last_error is {found!r} and should be {right!r}"


def _difference(agreed: Agreed, error: BaseException | None, steps: frozenset[int]) -> str:
    """Return how an error differs from the expected one, in words; empty if not.

    Args:
        steps: in which it may have happened; empty if that is not known.
    """
    if type(error).__name__ != agreed.error:
        return f"{type(error).__name__} instead of {agreed.error}: {error}"
    fields = {"step": steps, **agreed.fields} if steps else agreed.fields
    for name, right in fields.items():
        found = getattr(error, name)
        if isinstance(right, frozenset):
            items = found if isinstance(found, tuple) else (found,)
            if not items or not set(items) <= right:
                return f"{agreed.error}.{name} is {found!r}, not in {sorted(right)!r}"
        elif found != right:
            return f"{agreed.error}.{name} is {found!r} instead of {right!r}"
    missing = [piece for piece in agreed.pieces if piece not in str(error)]
    return f"{agreed.error} does not say {missing[0]!r}: {error}" if missing else ""
