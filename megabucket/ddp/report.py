"""What a rank says about a step, and what all ranks conclude from it.

``StepCounters`` counts what happens on this rank between two fences and makes its ``RankReport``. ``resolve_error`` builds the
error that all ranks raise from the reports of all: equal reports give equal errors. Does no communication.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import marshal
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from numbers import Real
from typing import Any, Final, NamedTuple

import torch

from megabucket import errors
from megabucket.errors import END_OF_STEP, MegabucketError, name_list

RECORD_BYTES: Final = 16_384
"""Room for one report on up to 4,096 ranks; lists of names are cut to fit."""
_NAMES_SENT: Final = (1_024, 512, 256, 128, 64, 32, 16, 8, 5, 1)  # names of each list: the largest number that fits
_NAME_CHARS: Final = 200
_TEXT_CHARS: Final = 2_000
_UPDATES_COMPARED: Final = 16
_SCALE: Final = "scale_gradients()"
CLEARED: Final = "zero_grad() was called after it, and the next forward began without a backward"
"""Why a rank gives a step up that zero_grad() has cleared."""

Entry = tuple[object, ...]
"""A name and values that must be equal on all ranks: text, numbers, tuples of these."""


class Problem(NamedTuple):
    """A problem on one rank. Of several problems ``resolve_error`` names the one that explains the others."""

    kind: str
    """The name of its error class."""
    fields: dict[str, Any]
    """Those of the error, except step and rank."""


# Hyperparameters #

Hyperparameters = tuple[tuple[str, Any], ...]
"""Names and values. A value is a float, a tuple of values, or the text of an integer that a float cannot represent."""

# These change only how an update is computed, or belong to schedulers.
_NOT_COMPARED: Final = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "initial_lr"})


def read_hyperparameters(groups: Iterable[Mapping[str, Any]], *, waits: bool = False) -> Hyperparameters:
    """Return all numbers of an optimizer's groups: learning rates, betas and so on.

    Args:
        waits: whether to read numbers on a device, which waits for it. Otherwise they are left out.

    >>> read_hyperparameters([{"params": [], "lr": 1, "betas": (0.5, 1), "foreach": True}, {"lr": 0.25}])
    (('betas of group 0', (0.5, 1.0)), ('lr of group 0', 1.0), ('lr of group 1', 0.25))
    """
    numbers = []
    for index, group in enumerate(groups):
        for key in sorted(group):  # a group from a checkpoint may have its keys in another order
            if key not in _NOT_COMPARED:
                value = number_of(group[key], waits=waits)
                if value is not None:
                    numbers.append((f"{key} of group {index}", value))
    return tuple(numbers)


def number_of(value: Any, *, waits: bool = False) -> Any:
    """Return a number as a float, several as a tuple, and ``None`` for everything else."""
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return float(value) if abs(value) <= 1 << 53 else str(value)
    if isinstance(value, tuple | list):
        return tuple(map(partial(number_of, waits=waits), value))
    if isinstance(value, torch.Tensor):
        can_read = value.numel() == 1 and not value.is_complex() and (waits or value.device.type == "cpu")
        return float(value) if can_read else None
    return float(value) if isinstance(value, Real) else None


def texts_of(updates: Sequence[Hyperparameters]) -> tuple[str, ...]:
    """Return the numbers of one or several updates as ``name=value``, for reports.

    >>> texts_of([(("lr of group 0", 0.5),)])
    ('lr of group 0=0.5',)
    >>> texts_of([(("lr of group 0", 0.5),), (("lr of group 0", 1.0),)])
    ('lr of group 0 in update 0=0.5', 'lr of group 0 in update 1=1.0')
    """
    return tuple(
        f"{name}{f' in update {index}' if len(updates) > 1 else ''}={value}"
        for index, update in enumerate(updates)
        for name, value in update
    )


# Reports #


@dataclass(frozen=True, slots=True)
class RankReport:
    """The report of one rank about a step or a collective call. Sent as JSON."""

    rank: int
    doing: str = END_OF_STEP
    sent_buckets: bool = False
    """Whether this message ends a step whose buckets were sent, so that every rank must take part in them."""
    problems: tuple[Problem, ...] = ()
    fingerprint: int = 0
    step_number: int = -1
    """The user's number of the step; -1: none."""
    num_microbatches: int = 0
    num_skipped_forwards: int = 0
    num_dropped_steps: int = 0
    num_updates: int = 0
    """Optimizer steps since the last agreement."""
    missed_update: str = ""
    """Why this rank skipped one of them; no problem if all ranks skipped it."""
    num_loads: int = 0
    """Loads of weights since the last agreement, unless a broadcast followed."""
    kept: tuple[str, ...] = ()
    """Parameters for which the step began with an uncleared gradient of the last step."""
    hyperparameters: tuple[Any, ...] = ()
    """Of the update after this fence if ``is_committing``, else of updates since the last fence. Sent as texts."""
    is_committing: bool = False
    """Whether the optimizer updates right after this fence."""
    grad_change: str = ""
    """The collective change of the reduced gradients that comes right after this fence, with its arguments."""
    force_all_reduce: bool = False

    @property
    def ends_step(self) -> bool:
        """Whether the rank is at the end of a step, not in a call."""
        return self.doing == END_OF_STEP

    def to_bytes(self, capacity_bytes: int = RECORD_BYTES) -> bytes:
        """Return the report as JSON of at most ``capacity_bytes``; names and texts are cut as far as needed."""
        data = dataclasses.asdict(self)
        data["hyperparameters"] = texts_of(self.hyperparameters)
        for num_names in _NAMES_SENT:
            # Convert unknown types to text: a rank that failed to send its report would leave the others waiting.
            payload = json.dumps(_cut(data, num_names), separators=(",", ":"), default=str).encode()
            if len(payload) <= capacity_bytes:
                break
        return payload

    @staticmethod
    def from_bytes(payload: bytes) -> RankReport:
        """Return the report that ``to_bytes`` has written."""
        read = json.loads(payload).items()
        data: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in read}
        data["problems"] = tuple(Problem(kind, fields) for kind, fields in data["problems"])
        return RankReport(**data)


def _cut(value: Any, num_names: int) -> Any:
    """Return plain data with at most ``num_names`` names in each list; names and texts are shortened in proportion."""
    if isinstance(value, dict):
        return {key: _cut(part, num_names) for key, part in value.items()}
    if isinstance(value, Problem):
        return [value.kind, _cut(dict(value.fields), num_names)]
    if isinstance(value, list | tuple):
        if value and not isinstance(value[0], str):
            return [_cut(part, num_names) for part in value]
        num_chars = min(_NAME_CHARS, 8 * num_names)
        shown = [name if len(name) <= num_chars else f"{name[:num_chars]}..." for name in value[:num_names]]
        return shown if len(value) <= len(shown) else [*shown, f"... {len(value)} in all"]
    return value[: min(_TEXT_CHARS, 16 * num_names)] if isinstance(value, str) else value


class StepCounters:
    """Counts and problems of this rank since the last fence, for its next report."""

    def __init__(self, rank: int, *, counts_skipped_forwards: bool) -> None:
        self._rank = rank
        self._counts_skipped_forwards = counts_skipped_forwards
        self.num_open_forwards = 0
        """Training forwards that no backward has reached."""
        self._generation = 0  # increases with each dropped step, whose forwards no longer count
        self._updates: list[Hyperparameters] = []
        self._grad_scale = 1.0  # product of the factors of scale_gradients()
        self._num_loads = self._num_dropped_steps = 0
        self.has_cleared_forwards = False
        """Whether ``zero_grad()`` was called in a step after its forwards, and no backward has reached them since."""
        self._num_settled_forwards = 0
        """Number of open ones of steps that all ranks have agreed on."""
        self._missed_update = ""
        self.step_number = -1
        """The user's number of the step; -1: none."""
        self.num_microbatches = self.num_updates = 0
        self.kept: tuple[str, ...] = ()
        """Parameters whose reduced gradient was not cleared when the step began."""
        self.hyperparameters: Hyperparameters = ()
        """Of the coming update; read when the optimizer commits."""
        self.grad_change = ""
        """See ``RankReport``."""
        self.wants_stop = False
        """Whether this rank was asked to stop. Sent with every fence."""
        self.stop_is_wanted = False
        """Whether any rank was asked to stop, as of the last fence."""
        self.problems: dict[str, Problem] = {}
        """One for each cause: failure, change, unused, nonfinite, late, delayed."""

    def continue_from(self, other: StepCounters) -> None:
        """Take over the state that survives a rebuild: the user's settings, and updates for the next report."""
        self.step_number, self.wants_stop, self.stop_is_wanted = other.step_number, other.wants_stop, other.stop_is_wanted
        self.num_updates, self._missed_update = other.num_updates, other._missed_update
        self._updates = list(other._updates)

    def reached_forward(self) -> Callable[[], None]:
        """Return a callback for when a backward reaches the forward that has just ended; later calls do nothing."""
        generation, is_reached = self._generation, False

        def note_reached() -> None:
            nonlocal is_reached
            if not is_reached and generation == self._generation:
                self.num_open_forwards -= 1
                self._num_settled_forwards = min(self._num_settled_forwards, self.num_open_forwards)
                self.has_cleared_forwards = False
            is_reached = True

        return note_reached

    def note_failure(self, phase: str, cause: str, *, is_certain: bool = False) -> None:
        """Note why this rank cannot finish the step. The first cause is kept, unless a later one is certain."""
        problem = Problem(errors.PeerFailedError.__name__, {"phase": phase, "cause": cause})
        if is_certain or "failure" not in self.problems:
            self.problems["failure"] = problem

    def note_late(self, param: str, *, bucket: int, num_buckets: int, phase: str) -> None:
        """Note a gradient that came after its bucket was sent. The error names the bucket of the first one."""
        fields = {"params": [], "bucket": bucket, "num_buckets": num_buckets, "phase": phase}
        late = self.problems.setdefault("late", Problem(errors.LateGradientError.__name__, fields))
        if param not in late.fields["params"]:
            late.fields["params"].append(param)

    def note_delayed(self, param: str, finding: str) -> None:
        """Note a problem of a gradient that is computed outside backward. The error describes the first problem."""
        problem = Problem(errors.DelayedGradientError.__name__, {"params": [], "finding": finding})
        params = self.problems.setdefault("delayed", problem).fields["params"]
        if param not in params:
            params.append(param)

    def note_unused(self, params: Sequence[str], *, bucket: int) -> None:
        """Note parameters without a gradient in this step. The error names the bucket of the first ones."""
        problem = Problem(errors.UnusedParameterError.__name__, {"params": [], "bucket": bucket})
        self.problems.setdefault("unused", problem).fields["params"] += params

    @property
    def late_phase(self) -> str:
        """Phase of the bucket of the first late gradient; empty without one."""
        return str(self.problems["late"].fields["phase"]) if "late" in self.problems else ""

    def note_load(self) -> None:
        """Count a load of weights."""
        self._num_loads += 1

    def note_broadcast(self) -> None:
        """Note that all ranks have the values of the first rank, so earlier loads no longer count."""
        self._num_loads = 0

    def note_dropped_step(self) -> None:
        """Count a step whose gradients were cleared instead of used."""
        self._num_dropped_steps += 1

    def note_grad_scale(self, factor: float) -> None:
        """Note that the reduced gradients were multiplied."""
        self._grad_scale *= factor

    @contextmanager
    def comparing(self, grad_change: str) -> Iterator[None]:
        """Compare, in the fences of the block, which change of the reduced gradients each rank makes after them."""
        self.grad_change = grad_change
        try:
            yield
        finally:
            self.grad_change = ""

    def announce_update(self, hyperparameters: Hyperparameters) -> None:
        """Note the hyperparameters of the coming update, which the fence compares if the optimizer commits to it there."""
        self.hyperparameters = hyperparameters

    def note_update(self, hyperparameters: Hyperparameters) -> None:
        """Count an optimizer step on gradients of an agreed step.

        Args:
            hyperparameters: to be compared at the next fence; empty if the last fence has compared them.
        """
        self.num_updates += 1
        if hyperparameters and len(self._updates) < _UPDATES_COMPARED:  # later ones are assumed to be alike
            self._updates.append((*hyperparameters, (_SCALE, self._grad_scale)))

    def note_missed_update(self, cause: str) -> None:
        """Note why this rank skipped an update; an error names it if other ranks have made the update."""
        self._missed_update = cause

    def report(self, *, is_committing: bool, force_all_reduce: bool, sent_buckets: bool) -> RankReport:
        """Return this rank's report about the step."""
        # Two optimizers may step in any order.
        updates = sorted(self._updates, key=str) if len(self._updates) > 1 else list(self._updates)
        if is_committing:
            updates.append((*self.hyperparameters, (_SCALE, self._grad_scale)))
        compared: dict[str, Any] = {
            "step_number": self.step_number,
            "num_microbatches": self.num_microbatches,
            "num_skipped_forwards": self.num_open_forwards if self._counts_skipped_forwards else 0,
            "num_dropped_steps": self._num_dropped_steps,
            "num_updates": self.num_updates,
            "num_loads": self._num_loads,
            "kept": self.kept,
            "hyperparameters": tuple(updates),
            "is_committing": is_committing,
            "grad_change": self.grad_change,
            "force_all_reduce": force_all_reduce,
            "sent_buckets": sent_buckets,
        }
        return RankReport(
            self._rank,
            problems=tuple(self.problems.values()),
            missed_update=self._missed_update,
            fingerprint=fingerprint_of(compared),
            **compared,
        )

    def call_report(self, label: str, problems: tuple[Problem, ...], fingerprint: int) -> RankReport:
        """Return this rank's report about a collective call."""
        return RankReport(
            self._rank,
            label,
            problems=problems,
            fingerprint=fingerprint,
            num_updates=self.num_updates,
            missed_update=self._missed_update,
        )

    def forget_grads(self) -> None:
        """Forget counts and problems of gradients that are cleared."""
        has_forwards = self.num_open_forwards > self._num_settled_forwards
        self.has_cleared_forwards = has_forwards and self._counts_skipped_forwards
        self.num_microbatches, self.kept, self._grad_scale = 0, (), 1.0
        self.problems.pop("late", None)

    def forget_forwards(self) -> None:
        """Forget the open forwards: their step was dropped."""
        self._generation += 1
        self.num_open_forwards, self.has_cleared_forwards = 0, False
        self._num_settled_forwards = 0

    def start_step(self, *, is_over: bool = False, has_begun: bool = False) -> None:
        """Reset the counts after a fence.

        Args:
            is_over: whether the step was dropped; then its open forwards no longer count.
            has_begun: whether all open forwards are of the next step.
        """
        self.num_microbatches = self.num_updates = self._num_dropped_steps = self._num_loads = 0
        self.kept, self._grad_scale, self._missed_update = (), 1.0, ""
        self._updates.clear()
        self.problems.clear()
        if has_begun:
            return
        if is_over:
            self.forget_forwards()
        self._num_settled_forwards = self.num_open_forwards


def fingerprint_of(*facts: Any) -> int:
    """Return a hash below 2**62 of plain values."""
    # Version 2 of the format depends on values only, not on object identity.
    return int.from_bytes(hashlib.blake2b(marshal.dumps(facts, 2), digest_size=8).digest(), "big") >> 2


# Builds the error that all ranks raise from the reports of all. Pure: equal reports give equal errors. #

_COMPARED: Final[tuple[tuple[str, type[MegabucketError], str], ...]] = (
    ("step_number", errors.StepMismatchError, "the caller's step numbers"),
    ("num_dropped_steps", errors.StepMismatchError, "dropped steps (zero_grad() without an optimizer step)"),
    ("num_skipped_forwards", errors.StepMismatchError, "training forwards that no backward has reached"),
    ("num_microbatches", errors.MicrobatchMismatchError, ""),
    ("kept", errors.StepMismatchError, "steps begun without clearing the last gradients (zero_grad()) of {names}"),
    ("grad_change", errors.ScheduleMismatchError, "the change of reduced gradients by hand"),
    ("is_committing", errors.ScheduleMismatchError, "finish_grad_sync() before the optimizer step (0: called)"),
    ("force_all_reduce", errors.ScheduleMismatchError, "force_all_reduce"),
)
_FIRST_KINDS: Final = (
    errors.PeerFailedError,
    errors.StorageMovedError,
    errors.TrainabilityChangedError,
    errors.ParametersChangedError,
    errors.DetachedGradError,
)


def resolve_error(step: int, num_buckets: int, reports: Sequence[RankReport]) -> MegabucketError | None:
    """Return the error for these reports, or ``None``.

    Of several problems it names the one that explains the others: a failed rank also has too few microbatches, a frozen
    parameter is also unused.

    Args:
        step: number of agreed steps before this one.
        reports: of all ranks in rank order, or of this rank alone without an exchange.
    """
    return next(_errors(step, num_buckets, reports), None)


def _errors(step: int, num_buckets: int, reports: Sequence[RankReport]) -> Iterator[MegabucketError]:
    if any(report.sent_buckets for report in reports):
        # A rank in a call forgets its gradients when it drops the step of the others, so a missed update is final.
        yield from _updates_that_differ(step, reports)
    if len({report.doing for report in reports}) > 1:
        yield errors.CallMismatchError(step=step, by_rank=[report.doing for report in reports])
    # First: whatever else happened in this step, the weights are wrong already.
    yield from _divergences(step, reports)
    yield from _problems(step, reports, _FIRST_KINDS)
    yield from _disagreements(step, reports)
    yield from _problems(step, reports, (errors.LateGradientError, errors.DelayedGradientError))
    yield from _unused(step, num_buckets, reports)
    yield from _problems(step, reports, (errors.NonFiniteGradientError,))
    if all(report.ends_step for report in reports) and (by_rank := _differing(reports, lambda one: one.fingerprint)):
        # The reports do not show the difference, because their lists are cut.
        yield errors.StepMismatchError(step=step, what="kept gradients or hyperparameters (checksums)", by_rank=by_rank)


def all_have_left(reports: Sequence[RankReport]) -> bool:
    """Return whether all ranks have left the step after its forwards."""
    failures = [dict(problem.fields).get("cause") for report in reports for problem in report.problems]
    return failures == [CLEARED] * len(reports)


def _updates_that_differ(step: int, reports: Sequence[RankReport]) -> Iterator[MegabucketError]:
    if by_rank := _differing(reports, lambda report: report.num_updates):
        failures = _problems_of(reports, errors.PeerFailedError)
        causes = [f"rank {rank} failed in {fields['phase']}: {fields['cause']}" for rank, fields in failures]
        causes += [f"rank {one.rank} made none because of {one.missed_update}" for one in reports if one.missed_update]
        cause = f" ({causes[0]})" if causes else ""
        yield errors.ReplicasDivergedError(
            step=step, what=f"optimizer updates since the last agreement{cause}", by_rank=by_rank
        )


def _divergences(step: int, reports: Sequence[RankReport]) -> Iterator[MegabucketError]:
    yield from _updates_that_differ(step, reports)
    if by_rank := _differing(reports, lambda report: report.num_loads):
        what = "loads of weights (load_state_dict(), by submodule) since the last agreement"
        yield errors.ReplicasDivergedError(step=step, what=what, by_rank=by_rank, usual_cause="load")
    if not any(report.is_committing for report in reports):
        for name, values in _differing_hyperparameters(reports):
            what = f"hyperparameters of the last update ({name})"
            yield errors.ReplicasDivergedError(step=step, what=what, by_rank=values, usual_cause="hyperparameters")


def _problems_of(reports: Sequence[RankReport], kind: type[MegabucketError]) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the rank and the fields of each problem of one kind."""
    return [(one.rank, problem.fields) for one in reports for problem in one.problems if problem.kind == kind.__name__]


def _problems(step: int, reports: Sequence[RankReport], kinds: Sequence[type[MegabucketError]]) -> Iterator[MegabucketError]:
    for kind in kinds:
        for rank, fields in _problems_of(reports, kind):
            yield kind(step=step, rank=rank, **fields)  # type: ignore[call-arg]


def _disagreements(step: int, reports: Sequence[RankReport]) -> Iterator[MegabucketError]:
    for name, kind, what in _COMPARED:
        values = [getattr(report, name) for report in reports]
        if name == "kept":
            num_ranks = Counter(chain.from_iterable(map(frozenset, values)))
            odd = [kept for kept in dict.fromkeys(chain.from_iterable(values)) if num_ranks[kept] < len(values)]
            values = [int(bool(odd) and odd[0] in value) for value in values]
            what = what.format(names=name_list(odd))  # noqa: PLW2901 - the same text with names
        by_rank = tuple(value or "none" if isinstance(value, str) else int(value) for value in values)
        if len(set(by_rank)) > 1:
            yield kind(step=step, by_rank=by_rank, **({"what": what} if what else {}))  # type: ignore[call-arg]
    for name, texts in _differing_hyperparameters(reports):
        yield errors.HyperparameterMismatchError(step=step, what=name, by_rank=texts)


def _differing(reports: Sequence[RankReport], value: Callable[[RankReport], int]) -> tuple[int, ...]:
    """Return the values by rank if they differ, else nothing."""
    values = tuple(int(value(report)) for report in reports)
    return values if len(set(values)) > 1 else ()


def _differing_hyperparameters(reports: Sequence[RankReport]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return the name of each number that differs, with its values by rank."""
    by_rank = [{text.rpartition("=")[0]: text.rpartition("=")[2] for text in report.hyperparameters} for report in reports]
    for name in dict.fromkeys(name for numbers in by_rank for name in numbers):
        values = tuple(numbers.get(name, "nothing") for numbers in by_rank)
        if len(set(values)) > 1:
            yield name, values


def _unused(step: int, num_buckets: int, reports: Sequence[RankReport]) -> Iterator[MegabucketError]:
    found = _problems_of(reports, errors.UnusedParameterError)
    names = [(rank, frozenset(fields["params"])) for rank, fields in found]
    for _, fields in found[:1]:
        ranks_of = {name: [rank for rank, others in names if name in others] for name in fields["params"]}
        ranks = ranks_of[fields["params"][0]]
        yield errors.UnusedParameterError(
            step=step,
            ranks=ranks,
            params=[name for name in ranks_of if ranks_of[name] == ranks],
            bucket=fields["bucket"],
            num_buckets=num_buckets,
            num_ranks=len(reports),
        )


def describe(error: BaseException | str | None) -> str:
    """Return the text of an exception for reports; ``None`` is one that autograd does not reveal."""
    if error is None:
        return (
            "an exception that autograd keeps to itself; it stands in the log of that rank, and would stand here inside "
            "`with ddp.step():`"
        )
    if isinstance(error, str):
        return error
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as cause:  # ``__str__`` is user code
        return f"{type(error).__name__} (its text cannot be made: {type(cause).__name__})"


def step_number_of(number: int | None) -> int:
    """Return the user's step number as the fence compares it; -1 for ``None``.

    Raises:
        ConfigError: it is not an integer from 0 to 2**62.
    """
    if number is None:
        return -1
    try:
        value = operator.index(number)
    except TypeError:
        value = -1
    if isinstance(number, bool) or not 0 <= value < 2**62:
        raise errors.ConfigError(f"step_number must be None or an integer from 0 to 2**62, got {number!r}")
    return value
