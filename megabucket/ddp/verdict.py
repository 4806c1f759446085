"""From the reports of all ranks to the one error that all of them raise. Pure: the same reports give the same error.

When several things went wrong, the one that explains the others is named: a failed rank also has too few microbatches, a
frozen parameter is also unused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from megabucket.ddp.step_report import Failure, ModelChange, StepReport
from megabucket.errors import (
    DetachedGradError,
    HyperparameterMismatchError,
    LateGradientError,
    MegabucketError,
    MicrobatchMismatchError,
    NonFiniteGradientError,
    ParametersChangedError,
    PeerFailedError,
    ReplicasDivergedError,
    ScheduleMismatchError,
    StepMismatchError,
    StorageMovedError,
    TrainabilityChangedError,
    UnusedParameterError,
    name_list,
)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the texts say besides the reports."""

    step: int
    """Agreed steps before this one; the caller's own number is in the reports."""
    num_buckets: int


def error_of(facts: StepFacts, reports: Sequence[StepReport]) -> MegabucketError | None:
    """Return the error that the reports add up to, or ``None``.

    Args:
        reports: of all ranks in rank order, or of this rank alone where nothing is exchanged.
    """
    for find in _IN_ORDER:
        for error in find(facts, reports):
            return error
    return None


def _divergence(facts: StepFacts, reports: Sequence[StepReport]) -> Iterator[MegabucketError]:
    """Before everything else: whatever else happened in this step, the weights are not what they should be."""
    for report in reports:
        if report.failure is not None and report.failure.phase == "optimizer":
            yield _failure_error(facts, report.rank, report.failure)
    if differ := _differing(reports, lambda report: report.num_updates):
        causes = [f"rank {one.rank} failed in {one.failure.phase}: {one.failure.error}" for one in reports if one.failure]
        causes += [f"rank {one.rank} made none because of {one.missed_update}" for one in reports if one.missed_update]
        cause = f" ({causes[0]})" if causes else ""
        yield ReplicasDivergedError(step=facts.step, what=f"optimizer updates since the last agreement{cause}", by_rank=differ)
    if differ := _differing(reports, lambda report: report.num_loads):
        what = "loads of weights (load_state_dict(), by submodule) since the last agreement"
        yield ReplicasDivergedError(step=facts.step, what=what, by_rank=differ, usual_cause="load")
    if not any(report.is_committing for report in reports):
        for name, values in _differing_hyperparameters(reports):
            what = f"hyperparameters of the last update ({name})"
            yield ReplicasDivergedError(step=facts.step, what=what, by_rank=values, usual_cause="hyperparameters")


def _failures(facts: StepFacts, reports: Sequence[StepReport]) -> Iterator[MegabucketError]:
    for report in reports:
        if report.failure is not None:
            yield _failure_error(facts, report.rank, report.failure)


def _failure_error(facts: StepFacts, rank: int, failure: Failure) -> MegabucketError:
    return PeerFailedError(step=facts.step, rank=rank, phase=failure.phase, cause=failure.error)


def _model_changes(facts: StepFacts, reports: Sequence[StepReport]) -> Iterator[MegabucketError]:
    for report in reports:
        if report.change is not None:
            yield _change_error(facts.step, report.rank, report.change)


def _change_error(step: int, rank: int, change: ModelChange) -> MegabucketError:
    if change.kind == "moved":
        return StorageMovedError(step=step, rank=rank, params=change.params, found=change.found, expected=change.expected)
    if change.kind == "trainability":
        return TrainabilityChangedError(step=step, rank=rank, frozen=change.removed, unfrozen=change.added)
    if change.kind == "parameters":
        return ParametersChangedError(step=step, rank=rank, added=change.added, removed=change.removed, replaced=change.params)
    return DetachedGradError(step=step, rank=rank, params=change.params)


def _disagreements(facts: StepFacts, reports: Sequence[StepReport]) -> Iterator[MegabucketError]:
    step = facts.step
    if differ := _differing(reports, lambda report: report.step_number):
        yield StepMismatchError(step=step, what="the caller's step numbers", by_rank=differ)
    if differ := _differing(reports, lambda report: report.num_dropped_steps):
        yield StepMismatchError(step=step, what="dropped steps (zero_grad() without an optimizer step)", by_rank=differ)
    if differ := _differing(reports, lambda report: report.num_skipped_forwards):
        yield StepMismatchError(step=step, what="training forwards that no backward has reached", by_rank=differ)
    if differ := _differing(reports, lambda report: report.num_microbatches):
        yield MicrobatchMismatchError(step=step, by_rank=differ)
    in_order = dict.fromkeys(name for report in reports for name in report.kept)
    if odd := [name for name in in_order if any(name not in report.kept for report in reports)]:
        what = f"steps begun without clearing the last gradients (zero_grad()) of {name_list(odd)}"
        yield StepMismatchError(step=step, what=what, by_rank=[int(odd[0] in report.kept) for report in reports])
    if differ := _differing(reports, lambda report: report.is_committing):
        yield ScheduleMismatchError(step=step, what="finish_grad_sync() before the optimizer step (0: called)", by_rank=differ)
    if differ := _differing(reports, lambda report: report.force_all_reduce):
        yield ScheduleMismatchError(step=step, what="force_all_reduce", by_rank=differ)
    for name, values in _differing_hyperparameters(reports):
        yield HyperparameterMismatchError(step=step, what=name, by_rank=values)


def _differing_hyperparameters(reports: Sequence[StepReport]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return the name of each number that differs, with its values by rank."""
    by_rank = [dict(_name_and_value(text) for text in report.hyperparameters) for report in reports]
    for name in dict.fromkeys(name for numbers in by_rank for name in numbers):
        values = tuple(numbers.get(name, "nothing") for numbers in by_rank)
        if len(set(values)) > 1:
            yield name, values


def _name_and_value(text: str) -> tuple[str, str]:
    name, _, value = text.rpartition("=")
    return name, value


def _differing(reports: Sequence[StepReport], value: Callable[[StepReport], int]) -> tuple[int, ...]:
    """Return the values by rank if they differ, else nothing."""
    values = tuple(int(value(report)) for report in reports)
    return values if len(set(values)) > 1 else ()


def _late_grads(facts: StepFacts, reports: Sequence[StepReport]) -> Iterator[MegabucketError]:
    for report in reports:
        if report.late is not None:
            late = report.late
            yield LateGradientError(
                step=facts.step,
                rank=report.rank,
                params=late.params,
                bucket=late.bucket,
                num_buckets=facts.num_buckets,
                phase=late.phase,
            )


def _interruptions(facts: StepFacts, reports: Sequence[StepReport]) -> Iterator[MegabucketError]:
    if differ := _differing(reports, lambda report: bool(report.interrupted)):
        names = sorted({name for report in reports for name in report.interrupted})
        what = f"steps whose gradients were cleared or replaced between two backwards ({name_list(names)})"
        yield StepMismatchError(step=facts.step, what=what, by_rank=differ)


def _unused_params(facts: StepFacts, reports: Sequence[StepReport]) -> Iterator[MegabucketError]:
    first = next((report.unused for report in reports if report.unused is not None), None)
    if first is None:
        return
    ranks_of: dict[str, list[int]] = {}
    for report in reports:
        for name in report.unused.params if report.unused is not None else ():
            ranks_of.setdefault(name, []).append(report.rank)
    params_of: dict[tuple[int, ...], list[str]] = {}
    for name, of_name in ranks_of.items():
        params_of.setdefault(tuple(of_name), []).append(name)
    ranks = tuple(ranks_of[first.params[0]])
    yield UnusedParameterError(
        step=facts.step,
        ranks=ranks,
        params=params_of.pop(ranks),
        bucket=first.bucket,
        num_buckets=facts.num_buckets,
        num_ranks=len(reports),
        elsewhere=[(names, others) for others, names in params_of.items()],
    )


def _nonfinite_grads(facts: StepFacts, reports: Sequence[StepReport]) -> Iterator[MegabucketError]:
    for report in reports:
        if report.nonfinite is not None:
            found = report.nonfinite
            yield NonFiniteGradientError(
                step=facts.step,
                rank=report.rank,
                param=found.param,
                bucket=found.bucket,
                num_buckets=facts.num_buckets,
                finding=found.finding,
                num_others=found.num_others,
            )


def _unexplained(facts: StepFacts, reports: Sequence[StepReport]) -> Iterator[MegabucketError]:
    """Facts that differ although the reports, which hold so many names and no more, say nothing about them."""
    if differ := _differing(reports, lambda report: report.checksum):
        yield StepMismatchError(step=facts.step, what="kept gradients or hyperparameters (checksums)", by_rank=differ)


_IN_ORDER: Final = (
    _divergence,
    _failures,
    _model_changes,
    _disagreements,
    _late_grads,
    _interruptions,
    _unused_params,
    _nonfinite_grads,
    _unexplained,
)
