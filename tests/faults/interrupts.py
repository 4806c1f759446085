"""Exceptions out of nowhere: at every Python line of one step, and out of signal handlers at random times.

Every interrupt may end in one of three ways: right; a named error and the next step right; a named error and broken on all
ranks. The ranks train as a program does that catches its interrupt and tries the batch again: a step that was dropped is
repeated, ranks that are in different steps or have diverged load the last checkpoint, and broken ones wrap again.
"""

from __future__ import annotations

import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from megabucket.errors import (
    CollectiveError,
    InvariantError,
    MegabucketError,
    PeerLostError,
    ReplicasDivergedError,
    StepMismatchError,
    WrapperBrokenError,
)
from megabucket.testing import LoopbackWorld

from .acts import ALL_LAYERS, make_step
from .cells import RIGHT, TWO, Cell, Combo, Fault, Here, Kind, Mode
from .judge import Name
from .model import FaultModel, loss_of, make_batch
from .oracle import Oracle, first_difference
from .systems import Ours

BATCHES = (1, 2)
"""The interrupt comes in the first of them; batch 0 is trained before."""
_MOST_TRIES = 12
_PACKAGE = str(Path(__file__).parent)
_STANDS_FOR_C = ("megabucket/testing/loopback.py", "/threading.py")
"""Files that play the part of the back-end, where one call in C does what takes them several lines."""
COMBOS = (*TWO, Combo(Mode.ALL_REDUCE, False, 2), Combo(Mode.REDUCE_SCATTER, False, 2))


class Alarm(Exception):  # noqa: N818 - what a handler raises is no error of its own
    """What the handler of a signal raises."""


@dataclass
class Trainer:
    """One rank, and what it has seen."""

    rank: int
    size: int
    ddp: Any
    make_optimizer: Callable[[Any], Any]
    call: Callable[[Trainer], object] | None = None
    """A collective call before each step."""
    snapshot: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: Any = None
    seen: list[str] = field(default_factory=list)
    named: set[str] = field(default_factory=set)
    is_broken: bool = False
    wrong: str = ""

    def __post_init__(self) -> None:
        self.optimizer = self.make_optimizer(self.ddp)

    def step(self, batch: int) -> None:
        """Train on one batch."""
        torch.set_grad_enabled(True)  # torch's own contexts leave it off when an interrupt meets their first line
        inputs, targets = make_batch(seed=0, batch=batch, rank=self.rank, microbatch=0)
        self.optimizer.zero_grad()
        if self.call is not None:
            self.call(self)
        self.ddp.step_number = batch
        loss_of(self.ddp(inputs, ALL_LAYERS), targets).backward()
        self.optimizer.step()

    def save(self) -> None:
        """Keep the weights."""
        self.snapshot = {name: value.clone() for name, value in self.ddp.state_dict().items()}

    def restore(self) -> None:
        """Go back to the weights that were kept."""
        self.ddp.zero_grad()
        self.ddp.load_state_dict(self.snapshot)
        self.optimizer = self.make_optimizer(self.ddp)

    def train(self, interrupting: Callable[[], Any]) -> None:
        """Train on all batches, the first tries of which are interrupted; note everything that is raised."""
        batch, tries = BATCHES[0], 0
        while batch <= BATCHES[-1] and tries < _MOST_TRIES:
            tries += 1
            try:
                with interrupting():
                    self.step(batch)
                batch += 1
            except (Alarm, KeyboardInterrupt):
                self.seen.append("interrupted")
            except (WrapperBrokenError, PeerLostError) as error:
                self.named.add(type(error).__name__)
                self.refuses()
                return
            except (CollectiveError, InvariantError) as error:
                self.wrong = f"{type(error).__name__}: {error}"
                return
            except MegabucketError as error:
                self.seen.append(f"{type(error).__name__}: {error}")
                self.named.add(str(error))
                if isinstance(error, StepMismatchError | ReplicasDivergedError):
                    self.restore()
                    batch = BATCHES[0]
            except BaseException as error:
                self.wrong = f"{type(error).__name__}: {error}"
                return
        try:
            self.ddp.finish_param_sync()
        except (WrapperBrokenError, PeerLostError):  # the updated shard of another rank will never come
            self.refuses()
            return
        if batch <= BATCHES[-1]:
            self.wrong = f"still in batch {batch} after {tries} tries"
        self.wrong = self.wrong or first_difference(dict(self.ddp.module.named_parameters()), expected_weights(self.size))

    def refuses(self) -> None:
        """Try to go on, which a broken wrapper refuses, at the latest where nothing that was sent before is left to meet."""
        self.is_broken = True
        try:
            for _ in range(2):
                self.step(BATCHES[-1])
        except MegabucketError:
            return
        self.wrong = "a broken wrapper took one more step"


CALLS: dict[str, Callable[[Trainer], object]] = {
    "broadcast_params": lambda trainer: trainer.ddp.broadcast_params(),
    "check_replicas": lambda trainer: trainer.ddp.check_replicas(),
    "state_dict": lambda trainer: trainer.optimizer.state_dict(),
}
"""Collective calls between two steps, for the second of ``COMBOS``, whose optimizer has shards."""


_EXPECTED: dict[int, dict[str, torch.Tensor]] = {}


def expected_weights(size: int) -> dict[str, torch.Tensor]:
    """Return the weights after all batches."""
    if size not in _EXPECTED:
        oracle = Oracle(FaultModel(), Combo(Mode.ALL_REDUCE, True, size), 0, seed=0)
        for batch in (0, *BATCHES):
            oracle.compute([make_step(batch)] * size)
            oracle.update()
        _EXPECTED[size] = oracle.snapshot()
    return _EXPECTED[size]


def verdict_of(trainers: list[Trainer]) -> tuple[Name, str]:
    """Return what became of the ranks."""
    for trainer in trainers:
        if trainer.wrong:
            is_hang = "Deadlock" in trainer.wrong or "Mismatched" in trainer.wrong
            name = Name.HUNG if is_hang else Name.SILENT if "should be" in trainer.wrong else Name.WRONG
            return name, f"rank {trainer.rank}: {trainer.wrong} (seen: {trainer.seen})"
    if any(trainer.is_broken for trainer in trainers):
        whole = [trainer.rank for trainer in trainers if not trainer.is_broken]
        return (Name.WRONG, f"broken, but not on ranks {whole}") if whole else (Name.BROKEN, "")
    return (Name.NAMED, "") if any(trainer.named for trainer in trainers) else (Name.RIGHT, "")


# At a line #


class _AtLine:
    """Raises once, at the nth line that this thread executes inside the context: a trace function that raises is removed."""

    def __init__(self, position: int) -> None:
        self._left, self._is_odd = position, bool(position // 2 % 2)
        self._is_over = False
        self.where = ""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._is_over:
            yield
            return
        self._is_over = True
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)

    @property
    def has_come(self) -> bool:
        """Whether the step had that many lines."""
        return self._left <= 0

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE):
            return self._skip
        if event == "call" and _is_inside_c(frame):
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                self.where = f"{name}:{frame.f_lineno}"
                raise (KeyboardInterrupt if self._is_odd else Alarm)(self.where)
        return self._trace

    def _skip(self, *_: Any) -> Any:
        """Trace nothing of a frame of ours, but what it calls."""
        return self._skip


def _is_inside_c(frame: FrameType | None) -> bool:
    """Whether a frame, or one that called it in this step, stands for C."""
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        if frame.f_code.co_filename.endswith(_STANDS_FOR_C):
            return True
        frame = frame.f_back
    return False


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@dataclass
class InterruptResult:
    """What became of many interrupts."""

    counts: Counter[Name] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, name: Name, text: str) -> None:
        """Count one."""
        self.counts[name] += 1
        if not name.is_good:
            self.failures.append(f"{name.value}: {text}")

    def describe(self) -> str:
        """Return one line for the terminal."""
        return f"{sum(self.counts.values())} interrupts: " + ", ".join(f"{n} {name.value}" for name, n in self.counts.items())


def interrupt_at_lines(
    combo: Combo,
    *,
    every: int = 1,
    first: int = 1,
    config: dict[str, Any] | None = None,
    call: Callable[[Trainer], object] | None = None,
) -> InterruptResult:
    """Interrupt one step, or the call before it, at every line, or every nth, each in a loopback world of its own."""
    result = InterruptResult()
    position, ends = first, False
    unraisable, sys.unraisablehook = (
        sys.unraisablehook,
        lambda _: None,
    )  # an interrupt in a destructor is lost, and that is right
    try:
        while not ends:
            at_line = _AtLine(position)
            culprit = position % combo.num_ranks
            trainers = _train_in_threads(combo, config or {}, call, culprit=culprit, at_line=at_line)
            ends = not at_line.has_come
            if not ends:
                name, text = verdict_of(trainers)
                result.add(name, f"{combo}, line {position} ({at_line.where}): {text}")
            position += every
    finally:
        sys.unraisablehook = unraisable
    return result


def _train_in_threads(
    combo: Combo, config: dict[str, Any], call: Callable[[Trainer], object] | None, *, culprit: int, at_line: _AtLine
) -> list[Trainer]:
    world = LoopbackWorld(combo.num_ranks, timeout_s=20.0)
    ours = Ours(combo)

    def run(rank: int) -> Trainer:
        ddp = ours.wrap(FaultModel(), config, world.communicator(rank))
        trainer = Trainer(rank, combo.num_ranks, ddp, lambda ddp: ours.make_optimizer(ddp.module, ddp, 0.0), call)
        trainer.step(0)
        trainer.save()
        trainer.train(at_line if rank == culprit else _nothing)
        try:
            trainer.ddp.detach()  # all that is left to do with a broken one
        except MegabucketError as error:
            trainer.wrong = trainer.wrong or f"detach(): {type(error).__name__}: {error}"
        return trainer

    return world.run(run)


# Signals, in processes #

_EPISODES = {"alarms": 60, "alarms-repeated": 30}
_LONGEST_S = 0.03
"""A step takes less."""


def _alarms(cell: Cell) -> Fault:
    """Send signals at random times to the rank at fault, whose handler raises; again and again over one process group."""

    def run(here: Here) -> None:
        here.announce()
        store = dist.distributed_c10d._get_default_store()
        draw = random.Random(here.cell.seed)
        previous = signal.signal(signal.SIGALRM, _raise_alarm)
        result, trainer = InterruptResult(), None
        for episode in range(_EPISODES[cell.place]):
            if trainer is None:
                trainer = _wrap_on_process(here)
            trainer.seen, trainer.named = [], set()
            every_s = draw.uniform(0.0002, _LONGEST_S)
            _meet(store, f"{episode} begins", here)
            with torch.no_grad():
                trainer.restore()
            trainer.train(_Alarms(every_s, repeats=cell.place != "alarms") if here.is_culprit else _nothing)
            name, text = verdict_of([trainer])
            result.add(name, text)
            names = _meet(store, f"{episode} ends", here, says=name.value)
            if Name.BROKEN.value in names and name is not Name.BROKEN:  # it was through with its batches, and hears of it now
                trainer.refuses()
            if not name.is_good or trainer.wrong:
                raise AssertionError(f"episode {episode}: ranks are {names}: {text or trainer.wrong} (seen: {trainer.seen})")
            if trainer.is_broken:
                trainer.ddp.detach()
                trainer = None
        here.send("count", text=result.describe())
        signal.signal(signal.SIGALRM, previous)

    return Fault(RIGHT, arm=lambda here: here.points.update(start=lambda: run(here)), on_all=True)


def _wrap_on_process(here: Here) -> Trainer:
    ours = Ours(here.cell.combo)
    ddp = ours.wrap(FaultModel(), {})
    trainer = Trainer(here.rank, here.num_ranks, ddp, lambda ddp: ours.make_optimizer(ddp.module, ddp, 0.0))
    trainer.step(0)
    trainer.save()
    return trainer


class _Alarms:
    """Raises out of a signal handler after a time: in the first step, or again and again in the first few."""

    def __init__(self, after_s: float, *, repeats: bool) -> None:
        self._after_s, self._left = after_s, 4 if repeats else 1

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._left == 0:
            yield
            return
        self._left -= 1
        every_s = self._after_s / 3 if self._left else 0.0
        try:
            signal.setitimer(signal.ITIMER_REAL, self._after_s, every_s)
            yield
        finally:
            _stop_alarms()


def _stop_alarms() -> None:
    """End the timer, although it may ring meanwhile."""
    is_over = False
    while not is_over:
        with suppress(Alarm):
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            is_over = True


def _raise_alarm(*_: object) -> None:
    raise Alarm


def _meet(store: Any, name: str, here: Here, *, says: str = "") -> list[str]:
    """Wait until all ranks have come here, over the store and not over anything of ours; return what each says."""
    store.set(f"faults/{name}/{here.rank}", says)
    return [store.get(f"faults/{name}/{rank}").decode() for rank in range(here.num_ranks)]


INTERRUPT_KINDS = (
    Kind(
        "interrupts",
        "Out of a signal handler at random times: right, or named and the next step right, or named and broken on all.",
        _alarms,
        places=tuple(_EPISODES),
        combos=COMBOS,
        needs_processes=True,
        not_in_torch="the campaign wraps our way",
        soaks=False,
    ),
)
