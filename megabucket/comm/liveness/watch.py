"""Waits for collectives in slices, and finds out why one does not end.

C++ does not return to Python while it waits, so a signal handler would run only when the collective ends. Works of gloo can be
waited for in slices, because a wait that times out does them no harm, and so can an event on a device (``comm/device.py``). A
work of NCCL cannot: a wait that times out ends its group.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Final, Protocol

from megabucket.comm.communicator import Finding
from megabucket.comm.liveness.heartbeat import Heartbeat
from megabucket.comm.liveness.observations import Observations, is_gone, look_every_s
from megabucket.errors import ConfigError, ForkedProcessError, MegabucketError, PeerLostError, log_once

_SLICE: Final = timedelta(milliseconds=100)
_RANKS_SHOWN: Final = 5
_BLOCKED_S: Final = 1.0  # a wait is written to the board after this time
_ANSWER_S: Final = 0.5  # time limit for an answer of the store once a rank is lost
_DIAGNOSIS_S: Final = 1.0  # a process that closed its connections dies within this time, or goes on without the group
_DIAGNOSIS_BEATS: Final = 3.5  # on another host its beats stop

_SLICE_ENDED: Final = "Operation timed out!"
_TIME_LIMIT: Final = ("Timed out waiting", "Application timeout caused pair closure")
_LOST: Final = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection timed out",
    "Connection refused",
    "No route to host",
    "Network is unreachable",
)


@dataclass(frozen=True, slots=True)
class Liveness:
    """When a rank counts as lost and when as slow.

    Attributes:
        heartbeat_s: how often each rank writes a sign of life into the store of its group; ``None``: only once, so that only
            dead processes of the same host are noticed.
        dead_after_s: a rank without a sign of life for this long is lost.
        straggler_warning_s: how long a rank waits for living ones before it logs a warning; ``None``: never.
        is_default: the user did not set ``dead_after_s``, so it is reduced to fit a group with a short time limit.
    """

    heartbeat_s: float | None = 1.0
    dead_after_s: float = 30.0
    straggler_warning_s: float | None = 30.0
    is_default: bool = False

    def fitted_to(self, group_timeout_s: float) -> Liveness:
        """Return settings that fit the time limit of the group.

        Raises:
            ConfigError: a rank would be declared dead only after the group has given up.

        >>> Liveness(is_default=True).fitted_to(10.0).dead_after_s
        5.0
        """
        fitted = self
        if self.is_default and self.dead_after_s > group_timeout_s / 2:
            dead_after_s = group_timeout_s / 2
            heartbeat_s = None if self.heartbeat_s is None else min(self.heartbeat_s, dead_after_s / 4)
            fitted = replace(self, dead_after_s=dead_after_s, heartbeat_s=heartbeat_s)
        if fitted.dead_after_s >= group_timeout_s:
            raise ConfigError(
                f"dead_after_s={fitted.dead_after_s:g} must be less than the time limit of the process group, which is "
                f"{group_timeout_s:g} s: otherwise the group gives up first, and nothing can say which rank froze. Lower "
                "dead_after_s, or pass a longer timeout= to init_process_group() or new_group()"
            )
        return fitted


# Waits in slices #


class Work(Protocol):
    """Something that can be waited for in slices: a work of gloo, or one that behaves alike."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Return when it is done. Raises ``RuntimeError`` if it has failed, or on a time-out; it then goes on."""

    def is_completed(self) -> bool:
        """Return whether it is done or has failed."""


def wait_slice(work: Work) -> bool:
    """Wait for a work for up to 0.1 s; return whether it is done.

    Raises:
        RuntimeError: the work has failed.
    """
    try:
        work.wait(_SLICE)
    except RuntimeError as error:
        # Call nothing here: the exception of a signal handler that ran now would be chained to our time-out.
        failure = error
    else:
        return True
    try:
        if not str(failure).startswith(_SLICE_ENDED):
            raise failure
    finally:
        del failure  # it refers to this frame, which would keep the work and its tensors until the garbage collector runs
    if not work.is_completed():
        return False
    work.wait()  # it completed at the same moment, perhaps with an error
    return True


def is_lost_connection(failure: str) -> bool:
    """Return whether the text of a failed work says that another rank cannot be reached or did not come."""
    return any(text in failure for text in (*_LOST, *_TIME_LIMIT))


def is_time_limit(failure: str) -> bool:
    """Return whether the text of a failed work says that the group timed out."""
    return any(text in failure for text in _TIME_LIMIT)


class PeerWatch:
    """Waits for the works of one communicator, and finds out why one does not end.

    Args:
        group_timeout_s: time limit of the process group.
        on_loss: called when nothing more can be launched.
    """

    def __init__(
        self, heartbeat: Heartbeat, liveness: Liveness, *, group_timeout_s: float, on_loss: Callable[[], None]
    ) -> None:
        self.finding: Finding | None = None
        """Set when ranks were lost or interrupted; nothing can be launched from then on."""
        self.heartbeat, self._progress = heartbeat, heartbeat.state.progress
        self._liveness = liveness
        self._group_timeout_s = group_timeout_s
        self._on_loss = on_loss

    def wait(self, works: Iterable[Work], *, label: str, number: int) -> None:
        """Return when the works of one launch are done.

        Args:
            number: of the launch, counted from 1 and alike on all ranks.

        Raises:
            PeerLostError: a rank died, froze, or left without launching its part.
            WrapperBrokenError: a rank was interrupted, or ranks wait for each other in different wrappers.
            ForkedProcessError: this is a forked child of the process that launched them.
        """
        observations: Observations | None = None
        try:
            for work in works:
                while not wait_slice(work):
                    observations = observations or self._begin(label, number)
                    self._look(observations)
        except RuntimeError as error:
            if isinstance(error, MegabucketError) or not is_lost_connection(str(error)):
                raise
            observations = observations or self._begin(label, number)
            raise self._conclude(self._diagnose(observations, str(error))) from error
        finally:
            if observations is not None:
                self._end(observations)

    def wait_for_all_ranks(self, label: str) -> None:
        """Return when every rank has written its first beat, as it does when it wraps.

        Raises:
            MegabucketError: as ``wait``.
        """
        observations, deadline_s = self._begin(label, 0), time.monotonic() + self._group_timeout_s
        try:
            while self.heartbeat.view.num_present < len(self.heartbeat.members):
                if time.monotonic() > deadline_s:
                    raise self._conclude(self._diagnose(observations, _TIME_LIMIT[0]))
                self._look(observations)
                time.sleep(0.005)
        finally:
            self._end(observations)

    def report_unreachable(self, states: Mapping[int, str], *, label: str, number: int) -> Finding:
        """Return the error to raise because ranks cannot be reached by other means than gloo. The same on all ranks."""
        return self._conclude(self._settle(self._begin(label, number), states))

    def break_off(self, finding: Finding) -> None:
        """Publish why this rank launches nothing more. Does not wait."""
        if self.finding is None:
            self.heartbeat.post(finding)
            self._conclude(finding)

    def _begin(self, label: str, number: int) -> Observations:
        rank, size = self.heartbeat.rank, len(self.heartbeat.members)
        here = self.heartbeat.process
        is_dead = partial(is_gone, from_space=here.pid_space)
        return Observations(label, number=number, rank=rank, size=size, host=here.host, is_gone=is_dead)

    def _look(self, observations: Observations) -> None:
        """Check the other ranks once.

        Raises:
            MegabucketError: the wait cannot end.
        """
        heartbeat, now_s = self.heartbeat, time.monotonic()
        if os.getpid() != heartbeat.process.pid:
            raise ForkedProcessError(rank=heartbeat.rank, operation=f"{observations.label} was waited for")
        if heartbeat.is_stopped:
            return  # the communicator was closed: the wait goes on without a view of the others
        heartbeat.request()
        observations.note(heartbeat.view, now_s)
        finding = self.finding or heartbeat.view.finding or self._find_cause(observations)
        if finding is not None:
            raise self._conclude(finding)
        if not observations.is_on_board and now_s - observations.started_s >= _BLOCKED_S:
            observations.is_on_board = True
            heartbeat.block(observations.label)
        self._warn_of_stragglers(observations, now_s - observations.started_s)

    def _find_cause(self, observations: Observations) -> Finding | None:
        dead_after_s = self._liveness.dead_after_s
        if observations.gone():
            self._refresh(observations)  # with the last beats of the dead ranks
        if states := observations.gone() or observations.silent(dead_after_s):
            return self._settle(observations, states)
        if observations.store_silent_s >= dead_after_s:
            reason = self.heartbeat.failure or f"its host{self.heartbeat.store_host} may be gone or frozen"
            return self._settle(
                observations, {}, f"the store of the process group has not answered for {dead_after_s:g} s: {reason}"
            )
        return None

    def _warn_of_stragglers(self, observations: Observations, waited_s: float) -> None:
        limit_s = self._liveness.straggler_warning_s
        is_watcher = self.heartbeat.view.watcher_since_s is not None  # the others do not know who is late
        if observations.has_warned or limit_s is None or waited_s < limit_s or not is_watcher:
            return
        observations.has_warned = True
        findings = [f"rank {self._number_of(rank)} {state}" for rank, state in observations.late().items()]
        late = "; ".join(findings[:_RANKS_SHOWN]) or "no rank is known to be late: heartbeats are off, or the transfer is slow"
        rank = self._number_of(self.heartbeat.rank)
        log_once(f"[rank {rank}] has waited {waited_s:.3g} s for {self._waiting_for(observations)}: {late}. The wait goes on.")

    def _end(self, observations: Observations) -> None:
        self.heartbeat.leave_watch()
        if observations.is_on_board:
            self.heartbeat.block(None)

    # When a wait cannot end #

    def report_store_failure(self, failure: str, *, label: str) -> Finding:
        """Return the error to raise because the store of the process group has failed a call of this rank."""
        return self._conclude(self._settle(self._begin(label, 0), {}, f"the store of the process group has failed: {failure}"))

    def _diagnose(self, observations: Observations, failure: str) -> Finding:
        """Find out why gloo gave up.

        Gloo does not say which rank was lost. A process that dies closes its connections before it appears dead.
        """
        limit_s = max(_DIAGNOSIS_S, _DIAGNOSIS_BEATS * (self.heartbeat.every_s or 0.0))
        started_s = time.monotonic()
        while (finding := self.finding or self._refresh(observations, takes_watch=True)) is None:
            if states := observations.gone():
                return self._settle(observations, states)
            # The other ranks wait for the finding of the one that reads all beats.
            since_s = self.heartbeat.view.watcher_since_s
            if since_s is not None and is_time_limit(failure):
                return self._too_late(observations)
            waited_s = time.monotonic() - max(started_s, since_s or 0.0)
            if since_s is not None and waited_s > limit_s:
                silent_s = limit_s - (self.heartbeat.every_s or 0.0)
                states = observations.silent(silent_s, "went away") or observations.left() or observations.absent()
                return self._settle(observations, states, _first_sentence(failure))
            if observations.store_silent_s and waited_s > limit_s:
                return self._settle(observations, {}, _first_sentence(failure))
            time.sleep(look_every_s(len(self.heartbeat.members)))
        return finding

    def _too_late(self, observations: Observations) -> Finding:
        states = {rank: f"did not come in time: it {state}" for rank, state in observations.late().items()}
        return self._settle(observations, states, f"the time limit of the process group ({self._group_timeout_s:g} s) was over")

    def _refresh(self, observations: Observations, *, takes_watch: bool = False) -> Finding | None:
        """Check again with a new view of the store; return the finding of any rank. A silent store is not asked again."""
        heartbeat = self.heartbeat
        if not observations.is_store_silent and heartbeat.ask(_ANSWER_S, takes_watch=takes_watch) is None:
            observations.store_silent_s += _ANSWER_S
        observations.note(heartbeat.view, time.monotonic())
        return heartbeat.view.finding

    def _settle(self, observations: Observations, states: Mapping[int, str], reason: str = "") -> Finding:
        """Return the finding that ranks are lost, or an earlier finding of another rank."""
        during = f"noticed while waiting for {self._waiting_for(observations)}" + (f": {reason}" if reason else "")
        finding = PeerLostError(ranks=tuple(map(self._number_of, states)), states=tuple(states.values()), during=during)
        self.heartbeat.post(finding)
        return self._refresh(observations) or finding

    def _number_of(self, rank: int) -> int:
        return self.heartbeat.state.ranks.number_of(self.heartbeat.members[rank], rank)

    def _waiting_for(self, observations: Observations) -> str:
        phase = "" if self._progress.phase == observations.label else f" ({self._progress.phase})"
        return f"{observations.label} of step {self._progress.step}{phase}"

    def _conclude(self, finding: Finding) -> Finding:
        if self.finding is None:
            self.finding = finding
            self._on_loss()
        return self.finding.copy()


def _first_sentence(failure: str) -> str:
    """Strip the source location and the closing hint from an error message of gloo."""
    return failure.rpartition(".cc:")[2].partition("] ")[2].partition(". ")[0] or failure
