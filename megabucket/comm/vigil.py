"""Waiting for the other ranks, and what is done when they do not come.

The first rank that finds others lost writes that into the store, and all raise what stands there, so the text is the same
everywhere, and a rank that gave up because of another is not named in its place.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import torch.distributed as dist

from megabucket.comm.evidence import Evidence, Silence
from megabucket.comm.heartbeat import Heartbeat
from megabucket.comm.liveness import Liveness, StragglerWarning
from megabucket.comm.peers import look_at
from megabucket.comm.port import Progress
from megabucket.comm.signs import Finding, View
from megabucket.comm.waiting import is_lost_connection, is_time_limit, wait_slice
from megabucket.errors import ForkedProcessError, PeerLostError

_ANSWER_S: Final = 0.5  # how long an answer of the store is worth waiting for when a rank is lost already
_STORE_IS_SILENT_S: Final = 1.0
_INQUEST_S: Final = 1.0  # a process that closed its connections is gone within this time, or goes on without the group
_ABSENCE_S: Final = 0.4  # a first sign of life that was on its way is there by then
_INQUEST_BEATS: Final = 3.5  # and on another host, its beats stop
_INQUEST_STEP_S: Final = 0.02


class _States(Protocol):
    """Lost ranks and what happened to them, with or without what only this rank may know."""

    def __call__(self, *, in_detail: bool) -> Mapping[int, str]: ...


@dataclass(slots=True)
class _Vigil:
    """One wait that takes long."""

    label: str
    number: int
    evidence: Evidence
    started_s: float = field(default_factory=time.monotonic)
    has_warned: bool = False
    store: Silence = field(default_factory=Silence)


class PeerWatch:
    """Waits for the works of one communicator and says who is lost when they do not end.

    Args:
        group_timeout_s: time limit of the process group, for texts; ``None``: unknown.
        flight_record: returns torch's account of the last collectives.
        on_loss: called when the group turns out to be of no use any more.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        liveness: Liveness,
        *,
        progress: Progress,
        group_timeout_s: float | None,
        flight_record: Callable[[], str],
        on_loss: Callable[[], None],
    ) -> None:
        self.finding: Finding | None = None
        """Set when ranks were lost; nothing can be launched from then on."""
        self._heartbeat = heartbeat
        self._liveness = liveness
        self._progress = progress
        self._group_timeout_s = group_timeout_s
        self._flight_record = flight_record
        self._on_loss = on_loss

    def wait(self, works: Iterable[dist.Work], *, label: str, number: int) -> None:
        """Return when the works of one launch are done.

        Args:
            number: of the launch, counted from 1 and alike on all ranks.

        Raises:
            PeerLostError: a rank died, froze, or left without launching its part.
            ForkedProcessError: this is a child of the process that launched them.
        """
        vigil = None
        for work in works:
            while True:
                try:
                    if wait_slice(work):
                        break
                except RuntimeError as error:
                    if not is_lost_connection(str(error)):
                        raise
                    failure = error
                else:
                    vigil = vigil or self._begin_vigil(label, number)
                    self._look(vigil)
                    continue
                raise self._hold_inquest(vigil or self._begin_vigil(label, number), str(failure)) from failure

    def give_up(self, states: Mapping[int, str], *, label: str) -> PeerLostError:
        """Return the error to raise because ranks cannot be reached in another way than over gloo. All ranks know the same.

        Args:
            states: by rank, what is the matter with it.
        """
        during = f"noticed while waiting for {label} of step {self._progress.step} ({self._progress.phase})"
        return self._conclude(Finding(tuple(states), tuple(states.values()), during, ""))

    def _begin_vigil(self, label: str, number: int) -> _Vigil:
        heartbeat = self._heartbeat
        evidence = Evidence(
            number=number,
            rank=heartbeat.rank,
            size=heartbeat.size,
            look_at=lambda process: look_at(process, from_space=heartbeat.process.pid_space),
            read_every_s=heartbeat.read_every_s,
        )
        return _Vigil(label, number, evidence)

    # While nothing happens #

    def _look(self, vigil: _Vigil) -> None:
        """Look at the other ranks once.

        Raises:
            PeerLostError: some are lost.
            ForkedProcessError: this is a forked child.
        """
        heartbeat = self._heartbeat
        if os.getpid() != heartbeat.process.pid:
            raise ForkedProcessError(rank=heartbeat.rank, operation=f"{vigil.label} was waited for")
        if heartbeat.is_stopped:
            return  # the communicator was closed: who still waits does so without a view of the others
        heartbeat.request()
        now_s = time.monotonic()
        vigil.evidence.note(heartbeat.view, now_s)
        vigil.store.hear(heartbeat.num_answers if heartbeat.is_busy else now_s, now_s)
        finding = self.finding or heartbeat.view.finding or self._find_lost(vigil)
        if finding is not None:
            raise self._conclude(finding)
        self._warn_of_stragglers(vigil)

    def _find_lost(self, vigil: _Vigil) -> Finding | None:
        evidence, dead_after_s = vigil.evidence, self._liveness.dead_after_s
        if evidence.is_somebody_gone:
            self._refresh(vigil)  # with the last words of the dead
            if evidence.gone():
                return self._settle(vigil, evidence.gone)
        if evidence.frozen(dead_after_s):
            return self._settle(vigil, partial(evidence.frozen, dead_after_s), recorder=self._flight_record())
        if vigil.store.silent_s >= dead_after_s:
            reason = self._heartbeat.failure or "its host may be gone or frozen"
            silence = f"the store of the process group has not answered for {dead_after_s:g} s: {reason}"
            return self._finding(vigil, {}, silence, recorder=self._flight_record(), in_detail=False)
        return None

    def _warn_of_stragglers(self, vigil: _Vigil) -> None:
        waited_s, limit_s = time.monotonic() - vigil.started_s, self._liveness.straggler_warning_s
        if vigil.has_warned or limit_s is None or waited_s < limit_s:
            return
        vigil.has_warned = True
        late = vigil.evidence.late()
        warnings.warn(
            StragglerWarning(
                rank=self._heartbeat.rank,
                waited_s=waited_s,
                waiting_for=self._waiting_for(vigil),
                ranks=tuple(late),
                states=tuple(late.values()),
            ),
            stacklevel=2,
        )

    # When ranks are lost #

    def _hold_inquest(self, vigil: _Vigil, failure: str) -> PeerLostError:
        """Find out why gloo gave up, and return the error to raise.

        Which rank it was, gloo does not say. A process that dies closes its connections before it is seen to be dead.
        """
        evidence, every_s = vigil.evidence, self._heartbeat.every_s or 0.0
        started_s = time.monotonic()
        deadline_s = started_s + max(_INQUEST_S, _INQUEST_BEATS * every_s)
        finding = self.finding or self._refresh(vigil)
        while finding is None:
            if evidence.gone():
                finding = self._settle(vigil, evidence.gone)
            elif is_time_limit(failure):
                limit = f"the time limit of the process group{self._time_limit} was over"
                finding = self._settle(vigil, partial(_too_late, evidence), limit, recorder=self._flight_record())
            elif evidence.suspects_only_absent and time.monotonic() > started_s + _ABSENCE_S:
                finding = self._settle(vigil, evidence.absent, _first_sentence(failure))
            elif time.monotonic() > deadline_s:
                silent_s = max(_INQUEST_S, _INQUEST_BEATS * every_s) - every_s
                finding = self._settle(vigil, partial(evidence.vanished, silent_s), _first_sentence(failure))
            else:
                time.sleep(_INQUEST_STEP_S)
                finding = self._refresh(vigil)
        return self._conclude(finding)

    @property
    def _time_limit(self) -> str:
        return "" if self._group_timeout_s is None else f" ({self._group_timeout_s:g} s)"

    def _refresh(self, vigil: _Vigil) -> Finding | None:
        """Look again, with what the store says now, and return what another rank has found."""
        view = self._ask(vigil) or self._heartbeat.view
        vigil.evidence.note(view, time.monotonic())
        return view.finding

    def _ask(self, vigil: _Vigil, finding: Finding | None = None) -> View | None:
        """Return what the store says, or ``None`` when it does not answer, or has not for a while."""
        if vigil.store.silent_s >= _STORE_IS_SILENT_S:
            return None
        view = self._heartbeat.ask(_ANSWER_S, finding=finding)
        if view is None:
            vigil.store.silent_s += _ANSWER_S
        return view

    def _settle(self, vigil: _Vigil, states: _States, reason: str = "", *, recorder: str = "") -> Finding:
        """Return what all ranks shall raise: what another rank has found before, or else this."""
        finding = self._finding(vigil, states(in_detail=True), reason, recorder=recorder)
        view = self._ask(vigil, finding)
        if view is not None and view.finding is not None:
            return view.finding
        # The others cannot be told, so what only this rank knows is left out: then most of them will find the same.
        return self._finding(vigil, states(in_detail=False), reason, in_detail=False)

    def _finding(
        self, vigil: _Vigil, states: Mapping[int, str], reason: str, *, recorder: str = "", in_detail: bool = True
    ) -> Finding:
        who = f" by rank {self._heartbeat.rank}" if in_detail else ""
        during = f"noticed{who} while waiting for {self._waiting_for(vigil)}" + (f": {reason}" if reason else "")
        return Finding(tuple(states), tuple(states.values()), during, recorder)

    def _conclude(self, finding: Finding) -> PeerLostError:
        if self.finding is None:
            self.finding = finding
            self._on_loss()
        return self.finding.error()

    def _waiting_for(self, vigil: _Vigil) -> str:
        return f"{vigil.label} of step {self._progress.step} ({self._progress.phase})"


def _too_late(evidence: Evidence, *, in_detail: bool) -> Mapping[int, str]:
    return {rank: f"did not come in time: it {state}" for rank, state in evidence.late(in_detail=in_detail).items()}


def _first_sentence(failure: str) -> str:
    """Return what gloo says without the line of its source and its good wishes."""
    return failure.rpartition(".cc:")[2].partition("] ")[2].partition(". ")[0] or failure
