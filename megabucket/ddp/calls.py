"""Collective calls outside a step (wrapping, saving, loading, rebuilding...): opened by all ranks together, or by none.

A call opens with the message of the fence, so ranks in different calls, or in a call and a step, see alike that they differ.
Then the entries that must be equal are compared: over all ranks, or inside each reduction group. What happens to an open step
meanwhile is the step's to decide (``CallingStep``); before there is one, ``calling`` opens a call.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from typing import Any, Final, Protocol

import torch

from megabucket.comm import Communicator, exchange
from megabucket.ddp.backward import refuse_in_backward
from megabucket.ddp.fence import Fence
from megabucket.ddp.groups import DENSE, RankGroups, copies_key
from megabucket.ddp.report import Entry, Problem, RankReport, fingerprint_of, resolve_error
from megabucket.errors import LayoutMismatchError, MegabucketError, PeerFailedError, ReplicasDivergedError

_DIFFERENCES_SHOWN: Final = 5
_MOST_SPEAKERS: Final = 8  # every rank receives the texts of all speakers, each perhaps megabytes long
_FOUND_TOGETHER: Final = (LayoutMismatchError, ReplicasDivergedError)
"""Differences between the ranks of one group, which the ranks of other groups raise as well."""


class CollectiveCall:
    """One collective call on this rank: prepared first, then opened by all ranks together.

    Args:
        agree: enters the call, or raises the error of all ranks. Takes the call, and why this rank cannot make it.
    """

    def __init__(self, agree: Callable[[CollectiveCall, Exception | None], None]) -> None:
        self._agree = agree
        self.entries: list[Entry] = []
        """Must be equal on all ranks."""
        self.by_group: Mapping[str, Sequence[Entry]] = {}
        """Must be equal on the ranks of each reduction group, and of each of ``copies``, by ``copies_key``."""
        self.is_open = False

    def open(self, failure: Exception | None = None) -> None:
        """Return when all ranks have made the same call with equal entries.

        Args:
            failure: why this rank cannot; reported, so that the others do not wait for it.

        Raises:
            MegabucketError: the same error on all ranks.
            Exception: ``failure`` itself, where all ranks failed alike.
        """
        self.is_open = True
        self._agree(self, failure)


@contextmanager
def opening(agree: Callable[[CollectiveCall, Exception | None], None]) -> Iterator[CollectiveCall]:
    """Return a call for the block to prepare and open. It is opened at the end otherwise, with the exception of the block.

    Args:
        agree: as for ``CollectiveCall``.
    """
    call = CollectiveCall(agree)
    try:
        yield call
    except Exception as error:
        if not call.is_open:
            call.open(error)
        raise
    if not call.is_open:
        call.open()


class CallingStep(Protocol):
    """The step of a wrapper, as its calls see it."""

    num_calls: int
    """Number of collective calls that were entered."""

    def settle(self) -> None:
        """Conclude a step that this rank has given up, if there is one."""

    def enter_call(self, label: str, call: CollectiveCall, failure: Exception | None) -> Any:
        """Enter a call together with all ranks, or raise the same error on all. Returns the state to go back to."""

    def leave_call(self, before: Any) -> None:
        """Go back to the state before the call."""

    def fail_in_call(self, label: str, error: BaseException, *, has_begun: bool = False) -> None:
        """Break the wrapper, if the exception leaves this rank at another place than the others."""


@contextmanager
def making(step: CallingStep, label: str) -> Iterator[CollectiveCall]:
    """Make a collective call: the block prepares this rank's side, opens the call, and exchanges.

    An exception before ``open`` fails the call on all ranks, which go on. One after it, even an interrupt, breaks the wrapper
    on all ranks, because the others are in the exchange. Errors that all ranks find alike in the exchange are raised after the
    block.

    Args:
        label: of the call; the part before a colon is its name.

    Raises:
        CallMismatchError: some rank is in another call, or in a step.
        LayoutMismatchError: entries differ.
        PeerFailedError: some ranks failed, or all but with different errors.
        Exception: that of the block, where all ranks failed alike.
    """
    refuse_in_backward(_phase_of(label))
    step.settle()
    before = None

    def agree(call: CollectiveCall, failure: Exception | None) -> None:
        nonlocal before
        before = step.enter_call(label, call, failure)

    try:
        with opening(agree) as call:
            yield call
        if before is not None:  # otherwise the block has caught the error of its call
            step.leave_call(before)
    except BaseException as error:
        step.fail_in_call(label, error)
        raise


@contextmanager
def making_several(step: CallingStep, label: str) -> Iterator[None]:
    """Make several collective calls, each of which goes on from what the ones before have changed on all ranks.

    Errors that all ranks find alike leave the block. Any other exception after the first call has begun, even an interrupt,
    breaks the wrapper on all ranks: at the next try this rank would be at another place than they.

    Args:
        label: as for ``making``.
    """
    num_calls = step.num_calls
    try:
        yield
    except BaseException as error:
        has_begun = step.num_calls > num_calls and not isinstance(error, MegabucketError)
        step.fail_in_call(label, error, has_begun=has_begun)
        raise


def calling(label: str, ranks: RankGroups, device: torch.device) -> AbstractContextManager[CollectiveCall]:
    """Return a context like that of ``GradSync.call``, for when there is no step yet."""

    def agree(call: CollectiveCall, failure: Exception | None) -> None:
        fence = Fence(ranks.step, num_buckets=0, policy=ranks.by_name[DENSE].policy, device=device)
        error, _ = agree_on_call(label, call, failure, ranks=ranks, fence=fence)
        if error is not None:
            raise error from failure

    return opening(agree)


def agree_on_call(
    label: str, call: CollectiveCall, failure: Exception | None, *, ranks: RankGroups, fence: Fence, step: int = 0
) -> tuple[MegabucketError | None, Sequence[RankReport]]:
    """Open a call on all ranks of a wrapper, and compare its entries inside each group. Result and errors: see ``open_call``.

    Args:
        call: prepared by this rank.
        failure: why this rank cannot make it.
        step: for error texts.
    """
    by_group = call.by_group
    if ranks.has_same_params:
        return open_call(fence, label, [*call.entries, *by_group.get(DENSE, ())], failure, step=step)
    error, reports = open_call(fence, label, call.entries, failure, step=step)
    if error is not None or not by_group:
        return error, reports
    found: Exception | None = None
    inner: list[tuple[str, Communicator, Sequence[Entry]]] = [
        (f"{prefix}the group {name!r}", communicator, [*by_group.get(name, ()), *place])
        for name, group in ranks.by_name.items()
        for prefix, communicator, place in zip(("", "replicate= of "), group.communicators, group.places, strict=False)
    ]
    keys = {copies_key(along): communicator for along, communicator in ranks.all_copies.items()}
    inner += [(key, communicator, by_group[key]) for key, communicator in keys.items() if key in by_group]
    for name, communicator, equal in inner:  # all of them, because other ranks may find no difference
        inside = Fence(communicator, num_buckets=0, policy=ranks.by_name[DENSE].policy, device=fence.device)
        error, _ = open_call(inside, label, equal, None, step=step)
        if isinstance(error, LayoutMismatchError):
            error = error.inside(name, list(map(communicator.number_of, range(communicator.size))))
        found = found or error
    error, _ = open_call(fence, label, [], found, step=step)  # that of the first rank with one, on all ranks
    return error, ()


def open_call(
    fence: Fence, label: str, entries: Sequence[Entry], failure: Exception | None, *, step: int = 0
) -> tuple[MegabucketError | None, Sequence[RankReport]]:
    """Open a collective call together with all ranks of a fence.

    Returns the error that all ranks raise, and the reports of all ranks, if they have exchanged them.

    Args:
        label: of the call; the part before a colon names it in errors.
        entries: must be equal on all ranks.
        failure: why this rank cannot continue.
        step: for error texts.

    Raises:
        MegabucketError: a rank was lost or interrupted.
    """
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    fingerprint = fingerprint_of(text, list(entries))
    is_alike, has_problem = fence.compare(_kind(label), fingerprint, has_problem=failure is not None, label=label)
    if is_alike and not has_problem:
        return None, ()
    if is_alike and isinstance(failure, MegabucketError):
        return failure, ()  # all ranks have failed alike
    failed = Problem(PeerFailedError.__name__, {"phase": _phase_of(label), "cause": text})
    if isinstance(failure, _FOUND_TOGETHER):
        failed = Problem(type(failure).__name__, {})
    problems = (failed,) if failure is not None else ()
    reports = fence.exchange_reports(fence.counters.call_report(label, problems, fingerprint))
    if (told := _told_in(fence, label, reports, failure)) is not None:
        return told, reports
    error = resolve_error(step, fence.num_buckets, reports)
    if error is None:
        lines = [" ".join(map(str, entry)) for entry in entries]
        error = _agree_on_difference(fence, reports, lines, label=label)
    return error, reports


def _told_in(fence: Fence, label: str, reports: Sequence[RankReport], failure: Exception | None) -> MegabucketError | None:
    """Return what the ranks of one group have found; the first rank with a finding tells it. Alike on all ranks."""
    kinds = {kind.__name__: kind for kind in _FOUND_TOGETHER}
    found = [(one.rank, kinds[problem.kind]) for one in reports for problem in one.problems if problem.kind in kinds]
    if not found or any(report.doing != label for report in reports):
        return None
    rank, kind = found[0]
    payload = json.dumps(failure.__dict__ if isinstance(failure, _FOUND_TOGETHER) else {}).encode()
    texts = exchange(fence.communicator, payload, speakers=[rank], device=fence.device, label=f"{label} texts")
    return kind(**json.loads(texts[0]))


def _agree_on_difference(
    fence: Fence, reports: Sequence[RankReport], lines: Sequence[str], *, label: str
) -> LayoutMismatchError:
    """Return the error about entries of a call that differ. One rank of each fingerprint sends its entries.

    Args:
        lines: this rank's entries as text.
    """
    first_ranks: dict[int, int] = {}
    for report in reports:
        first_ranks.setdefault(report.fingerprint, report.rank)
    speakers = list(first_ranks.values())[:_MOST_SPEAKERS]
    payload = json.dumps(list(lines)).encode()
    texts = exchange(fence.communicator, payload, speakers=speakers, device=fence.device, label=f"{label} texts")
    rows = list(zip_longest(*map(json.loads, texts), fillvalue="nothing"))
    differences: list[str] = []
    first, *_ = names = [f"rank {fence.communicator.number_of(rank)}" for rank in speakers]
    for index, row in enumerate(rows):
        others = [(name, line) for name, line in zip(names, row, strict=True) if line != row[0]]
        differences += [f"entry {index}: {first} has {row[0]}, {name} has {line}" for name, line in others[:1]]
    return LayoutMismatchError(
        differences=differences[:_DIFFERENCES_SHOWN],
        num_different=len(differences),
        num_entries=len(rows),
        phase=_phase_of(label),
    )


def _kind(label: str) -> int:
    return 2 + int.from_bytes(hashlib.blake2b(label.encode(), digest_size=4).digest(), "big")


def _phase_of(label: str) -> str:
    return label.partition(":")[0]
