"""Exceptions out of nowhere: at every Python line of one step, and out of signal handlers at random times.

Every interrupt may end in one of three ways: right; a named error and the next step right; a named error and broken on all
ranks. The ranks train as a program does that catches its interrupt and tries the batch again: a step that was dropped is
repeated, ranks that are in different steps or have diverged load the last checkpoint, and broken ones wrap again.
"""

from __future__ import annotations

import inspect
import linecache
import math
import random
import signal
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from megabucket.checkpoint.checkpointer import load_checkpoint, save_checkpoint
from megabucket.ddp.distributed_data_parallel import AgreedStop
from megabucket.ddp.finalize import finalize_grads
from megabucket.errors import (
    CollectiveError,
    InvariantError,
    MegabucketError,
    PeerLostError,
    PhaseError,
    ReplicasDivergedError,
    StepMismatchError,
    UpdateFailedError,
    WrapperBrokenError,
)
from megabucket.optim.averaging import ShardedEMA, param_norms
from megabucket.optim.chained import ChainedOptimizer
from megabucket.testing import LoopbackWorld
from megabucket.testing.loopback import CollectiveDeadlockError

from .acts import ALL_LAYERS, make_step
from .cells import GRIDS, OWNERS, OWNERS_IN_GROUPS, RIGHT, TWO, Cell, Combo, Fault, Form, Here, Kind, Mode, in_forms
from .judge import Name
from .model import FaultModel, loss_of, make_batch
from .oracle import Oracle, first_difference
from .systems import Ours, Scaled, make_groups

BATCHES = (1, 2)
"""The interrupt comes in the first of them; batch 0 is trained before."""
_MOST_TRIES = 12
_PACKAGE = str(Path(__file__).parent)
_STANDS_FOR_C = ("megabucket/testing/loopback.py", "/threading.py")
"""Files that play the part of the back-end, where one call in C does what takes them several lines."""
COMBOS = (*TWO, Combo(Mode.ALL_REDUCE, False, 2), Combo(Mode.REDUCE_SCATTER, False, 2))
FORM_COMBOS = (*GRIDS, *in_forms(Form.SCALER))
"""Without chains: that ranks wait for one another in different parts is seen over the store, which threads have not."""
OWNER_COMBOS = (OWNERS[0], *OWNERS_IN_GROUPS)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class Alarm(Exception):  # noqa: N818 - what a handler raises is no error of its own
    """What the handler of a signal raises."""


@dataclass(frozen=True)
class Call:
    """Calls whose lines are interrupted, in place of those of the whole step.

    Attributes:
        before: the step; ``between``: backward and the update; ``update``: in place of it.
        is_alone: it is all that the ranks do, and who is interrupted does not repeat it.
        config: fields of the config.
    """

    before: Callable[[Trainer], object] | None = None
    between: Callable[[Trainer], object] | None = None
    update: Callable[[Trainer], object] | None = None
    is_alone: bool = False
    combo: Combo = COMBOS[1]
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Trainer:
    """One rank, and what it has seen."""

    rank: int
    combo: Combo
    ddp: Any
    make_optimizer: Callable[[Any], Any]
    call: Call = Call()
    wrap_again: Callable[[Any], Any] = lambda module: module
    """Wraps the module anew."""
    root: Path = Path()
    """Of checkpoints."""
    snapshot: dict[str, torch.Tensor] = field(default_factory=dict)
    state: Any = None
    """Of the optimizer, where it has some."""
    optimizer: Any = None
    seen: list[str] = field(default_factory=list)
    named: set[str] = field(default_factory=set)
    is_broken: bool = False
    wrong: str = ""

    def __post_init__(self) -> None:
        self.optimizer = self.make_optimizer(self.ddp)

    def step(self, batch: int, interrupting: Callable[[], Any] | None = None) -> None:
        """Train on one batch. What is interrupted is all of it, or the calls if there are any."""
        interrupting = interrupting or _nothing
        if (self.call.before or self.call.between or self.call.update) and not self.call.is_alone:
            self._step(batch, interrupting)
        else:
            with interrupting():
                self._step(batch, _nothing)

    def _step(self, batch: int, interrupting: Callable[[], Any]) -> None:
        torch.set_grad_enabled(True)  # torch's own contexts leave it off when an interrupt meets their first line
        call = self.call
        if call.before is not None and not call.is_alone:
            with suppress(PhaseError):  # a rebuild has failed, and the module is not wrapped until the next one
                self.optimizer.zero_grad()
            with interrupting():
                call.before(self)
        self.optimizer.zero_grad()
        self.ddp.step_number = batch
        self.backward(batch)
        if call.between is not None:
            with interrupting():
                call.between(self)
        if call.update is not None:
            with interrupting():
                call.update(self)
        else:
            self.optimizer.step()

    def wrap(self) -> None:
        """Wrap the module anew, once it is detached."""
        self.ddp = self.wrap_again(self.ddp.module)

    def backward(self, batch: int) -> None:
        """Run forward and backward."""
        inputs, targets = make_batch(seed=0, batch=batch, rank=self.combo.data_rank(self.rank), microbatch=0)
        loss = loss_of(self.ddp(inputs, ALL_LAYERS), targets)
        (self.optimizer.scaler.scale(loss) if isinstance(self.optimizer, Scaled) else loss).backward()

    def save(self) -> None:
        """Keep the weights, and the optimizer's state where it has some."""
        self.snapshot = {name: value.clone() for name, value in self.ddp.state_dict().items()}
        self.state = self.optimizer.state_dict() if self.combo.has_owners else None

    def restore(self) -> None:
        """Go back to the weights that were kept, when all ranks do."""
        for _ in range(_MOST_TRIES):
            if self._is_restored():
                return

    def _is_restored(self) -> bool:
        try:
            self.ddp.zero_grad()
            self._load()
        except (WrapperBrokenError, PeerLostError, CollectiveError, InvariantError):
            raise
        except MegabucketError as error:
            self.seen.append(_where(error))
            return False
        return True

    def _load(self) -> None:
        self.ddp.load_state_dict(self.snapshot)
        self.optimizer = self.make_optimizer(self.ddp)
        if self.state is not None:
            self.optimizer.load_state_dict(self.state)

    def start_again(self) -> None:
        """Wrap the detached module, load what was saved and train on all batches, as the text of a broken wrapper asks."""
        try:
            self.ddp.module.load_state_dict(self.snapshot)
            self.wrap()
            self._load()
            for batch in BATCHES:
                self.step(batch)
            self.ddp.finish_param_sync()
        except Exception as error:
            self.wrong = _where(error)
            return
        self.wrong = first_difference(dict(self.ddp.module.named_parameters()), expected_weights(self.combo, self.rank))
        self.ddp.detach()

    def train(self, interrupting: Callable[[], Any]) -> None:  # noqa: C901 - a branch for each thing that a step may raise
        """Train on all batches, the first tries of which are interrupted; note everything that is raised."""
        if self.call.is_alone:
            self._call_alone(interrupting)
            return
        batch, tries = BATCHES[0], 0
        while batch <= BATCHES[-1] and tries < _MOST_TRIES:
            tries += 1
            try:
                self.step(batch, interrupting)
                batch += 1
            except (Alarm, KeyboardInterrupt, UpdateFailedError):  # the last has an Alarm as its cause
                self.seen.append("interrupted")
            except (WrapperBrokenError, PeerLostError) as error:
                self.named.add(type(error).__name__)
                self.refuses()
                return
            except (CollectiveError, InvariantError) as error:
                self.wrong = _where(error)
                return
            except MegabucketError as error:
                self.seen.append(_where(error))
                self.named.add(str(error))
                # An error of what comes after an update does not say whether the weights have changed.
                if isinstance(error, StepMismatchError | ReplicasDivergedError) or self.call.update:
                    try:
                        self.restore()
                    except (WrapperBrokenError, PeerLostError):  # the other was interrupted again
                        self.refuses()
                        return
                    batch = BATCHES[0]
            except BaseException as error:
                self.wrong = _where(error)
                return
        try:
            self.ddp.finish_param_sync()
        except (WrapperBrokenError, PeerLostError):  # the updated shard of another rank will never come
            self.refuses()
            return
        except MegabucketError as error:
            self.wrong = self.wrong or f"{type(error).__name__}: {error}"
        if batch <= BATCHES[-1]:
            self.wrong = f"still in batch {batch} after {tries} tries"
        self.wrong = self.wrong or first_difference(
            dict(self.ddp.module.named_parameters()), expected_weights(self.combo, self.rank)
        )

    def _call_alone(self, interrupting: Callable[[], Any]) -> None:
        """Make the call once. Where it is interrupted the program ends, and leaves a plain module behind."""
        assert self.call.before is not None
        model = self.ddp.module
        try:
            with interrupting():
                self.call.before(self)
        except (Alarm, KeyboardInterrupt):
            self.seen.append("interrupted")
        except CollectiveDeadlockError as error:  # which stands for the end of the other's process
            self.named.add(str(error))
        except MegabucketError as error:
            self.named.add(str(error))
        except BaseException as error:
            self.wrong = _where(error)
            return
        if not (self.seen or self.named):
            return
        torch.set_grad_enabled(True)  # as in `_step`
        self.ddp.detach()  # again, or as the wrapper's constructor has done
        inputs, targets = make_batch(seed=0, batch=0, rank=0, microbatch=0)
        params = dict(model.named_parameters())
        right = dict(zip(params, torch.autograd.grad(loss_of(model(inputs), targets), list(params.values())), strict=True))
        try:
            loss_of(model(inputs), targets).backward()
            self.wrong = first_difference({name: param.grad for name, param in params.items()}, right)
        except PhaseError as error:  # says that the module is neither plain nor wrapped
            self.named.add(str(error))

    def refuses(self) -> None:
        """Try to go on, which a broken wrapper refuses, at the latest where nothing that was sent before is left to meet."""
        self.is_broken = True
        try:
            for _ in range(2):
                self.step(BATCHES[-1])
        except MegabucketError:
            return
        self.wrong = "a broken wrapper took one more step"


def _make_optimizer(trainer: Trainer) -> None:
    trainer.optimizer = trainer.make_optimizer(trainer.ddp)


def _make_chain(trainer: Trainer) -> None:
    trainer.optimizer = ChainedOptimizer(trainer.optimizer.optimizers)


def _save_and_load(trainer: Trainer) -> None:
    save_checkpoint(trainer.root, trainer.ddp, trainer.optimizer, step=1, overwrite=True)
    load_checkpoint(trainer.root, trainer.ddp, trainer.optimizer)


def _export_and_import(trainer: Trainer) -> None:
    trainer.ddp.import_weights(trainer.ddp.export_weights(whole=True))


def _average(trainer: Trainer) -> None:
    average = ShardedEMA(trainer.optimizer, decay=0.5)
    average.update()
    average.values()


def _measure(trainer: Trainer) -> None:
    with param_norms(trainer.optimizer):
        trainer.optimizer.step()


def _start_over(trainer: Trainer) -> None:
    """Drop a whole step that is reduced."""
    trainer.ddp.step_number = _OTHER_BATCH
    trainer.backward(_OTHER_BATCH)
    trainer.ddp.finish_grad_sync()
    trainer.optimizer.zero_grad()


_OTHER_BATCH = 7
CALLS: dict[str, Call] = {
    "wrap": Call(lambda trainer: trainer.wrap(), is_alone=True),
    "detach": Call(lambda trainer: trainer.ddp.detach(), is_alone=True),
    "DistributedOptimizer()": Call(_make_optimizer),
    "ChainedOptimizer()": Call(_make_chain, combo=in_forms(Form.CHAINED)[1]),
    "broadcast_params": Call(lambda trainer: trainer.ddp.broadcast_params()),
    "check_replicas": Call(lambda trainer: trainer.ddp.check_replicas()),
    "check_replicas of replicas": Call(lambda trainer: trainer.ddp.check_replicas(), combo=in_forms(Form.REPLICAS)[0]),
    "export_weights, import_weights": Call(_export_and_import, combo=in_forms(Form.GROUPS)[1]),
    "rebuild": Call(lambda trainer: trainer.ddp.rebuild()),
    "state_dict": Call(lambda trainer: trainer.optimizer.state_dict()),
    "load_state_dict": Call(lambda trainer: trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())),
    "save_checkpoint, load_checkpoint": Call(_save_and_load),
    "ShardedEMA.values": Call(_average),
    "param_norms": Call(update=_measure),
    "AgreedStop.poll": Call(lambda trainer: AgreedStop(trainer.ddp).poll()),
    "train, eval": Call(lambda trainer: (trainer.ddp.eval(), trainer.ddp.train())),
    "zero_grad after finish_grad_sync": Call(_start_over),
    "finish_grad_sync": Call(between=lambda trainer: trainer.ddp.finish_grad_sync()),
    "finalize_grads": Call(between=lambda trainer: finalize_grads(trainer.ddp), combo=in_forms(Form.COPIES)[1]),
    "finalize_grads of all-reduce": Call(between=lambda trainer: finalize_grads(trainer.ddp), combo=in_forms(Form.COPIES)[0]),
    "clip_grad_norm_": Call(between=lambda trainer: trainer.optimizer.clip_grad_norm_(math.inf)),
    "unscale_grads": Call(
        between=lambda trainer: trainer.optimizer.unscale_grads(1.0), config={"nonfinite_gradients": "allow"}
    ),
}
CALLS |= {
    f"{name} of owners": replace(CALLS[name], combo=OWNERS[0])
    for name in ("state_dict", "load_state_dict", "rebuild", "save_checkpoint, load_checkpoint", "param_norms", "unscale_grads")
}
"""What is called by all ranks, and interrupted on one."""


_EXPECTED: dict[tuple[Combo, int], dict[str, torch.Tensor]] = {}


def expected_weights(combo: Combo, rank: int) -> dict[str, torch.Tensor]:
    """Return the weights after all batches."""
    if (combo, rank) not in _EXPECTED:
        oracle = Oracle(FaultModel(), combo, rank, seed=0)
        for batch in (0, *BATCHES):
            oracle.compute([make_step(batch)] * combo.num_ranks)
            oracle.update()
        _EXPECTED[combo, rank] = oracle.snapshot()
    return _EXPECTED[combo, rank]


def _where(error: BaseException) -> str:
    """Return an error and the lines that it came from."""
    lines = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-4:]]
    return f"{type(error).__name__}: {error} [{' '.join(lines)}]"


def verdict_of(trainers: list[Trainer]) -> tuple[Name, str]:
    """Return what became of the ranks."""
    for trainer in sorted(trainers, key=lambda one: "Deadlock" in one.wrong):  # which may be about a rank that has ended
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

    def __init__(self, position: int, inside: Sequence[Callable[..., Any]] = ()) -> None:
        self._left, self._is_odd = position, bool(position // 2 % 2)
        self._inside = [inspect.unwrap(one).__code__ for one in inside]
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
        """Whether there were that many lines."""
        return bool(self.where)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE):
            return self._skip
        if event == "call" and _is_inside_c(frame):
            return None
        if event == "line" and (not self._inside or frame.f_code in self._inside):
            self._left -= 1
            # A `with` is also the line on which its block ends, between two instructions at which no signal is handled: an
            # exception there would leave a lock locked.
            if self._left <= 0 and not linecache.getline(name, frame.f_lineno).lstrip().startswith("with "):
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
    combo: Combo, *, every: int = 1, first: int = 1, call: Call | None = None, inside: Sequence[Callable[..., Any]] = ()
) -> InterruptResult:
    """Interrupt one step, or a call, at every line, or every nth, each in a loopback world of its own.

    Args:
        inside: only at lines of these functions, without those of the functions that they call.
    """
    result = InterruptResult()
    call = Call(combo=combo) if call is None else call
    position, ends = first, False
    # An interrupt in a destructor is lost, and that is right.
    unraisable, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        while not ends:
            at_line = _AtLine(position, inside)
            culprit = position % call.combo.num_ranks
            trainers = _train_in_threads(call, culprit=culprit, at_line=at_line)
            ends = not at_line.has_come
            if not ends:
                name, text = verdict_of(trainers)
                result.add(name, f"{call.combo}, line {position} ({at_line.where}): {text}")
            position += every
    finally:
        sys.unraisablehook = unraisable
    return result


def _train_in_threads(call: Call, *, culprit: int, at_line: _AtLine) -> list[Trainer]:
    combo, config = call.combo, call.config
    world = LoopbackWorld(combo.num_ranks, timeout_s=20.0)
    groups = make_groups(combo, world.subgroup)
    are_ready = threading.Barrier(combo.num_ranks)

    def run(rank: int) -> Trainer:
        ours = Ours(combo, groups=groups[rank])
        ddp = ours.wrap(FaultModel(), config, world.communicator(rank))
        trainer = Trainer(
            rank,
            combo,
            ddp,
            lambda ddp: ours.make_optimizer(ddp.module, ddp, 0.0),
            call,
            wrap_again=lambda module: ours.wrap(module, config, world.communicator(rank)),
            root=Path(root),
        )
        if call is CALLS["wrap"]:
            trainer.ddp.detach()
        elif not call.is_alone:
            trainer.step(0)
            trainer.save()
        are_ready.wait(20.0)  # an interrupt does not reach into the step before
        trainer.train(at_line if rank == culprit else _nothing)
        try:
            trainer.ddp.detach()  # all that is left to do with a broken one
        except MegabucketError as error:
            trainer.wrong = trainer.wrong or f"detach(): {type(error).__name__}: {error}"
        if call is not CALLS["detach"] and any(hasattr(param, "main_grad") for param in ddp.module.parameters()):
            trainer.wrong = trainer.wrong or "detach() has left parameters in buffers, so the module cannot be wrapped again"
        return trainer

    with tempfile.TemporaryDirectory(prefix="megabucket-faults-") as root:
        trainers: list[Trainer] = world.run(run)
    if combo.has_owners and all(trainer.is_broken and not trainer.wrong for trainer in trainers):
        _start_again(call, trainers)
    return trainers


def _start_again(call: Call, trainers: Sequence[Trainer]) -> None:
    """Let broken ranks recover in a world of their own: processes have a group that is as good as before."""
    world = LoopbackWorld(call.combo.num_ranks, timeout_s=20.0)
    groups = make_groups(call.combo, world.subgroup)

    def run(rank: int) -> None:
        trainer, ours = trainers[rank], Ours(call.combo, groups=groups[rank])
        trainer.wrap_again = lambda module: ours.wrap(module, call.config, world.communicator(rank))
        trainer.start_again()

    world.run(run)


# Signals, in processes #

_EPISODES = {"alarms": 60, "alarms-repeated": 30}
_LONGEST_S = 0.03
"""A step takes less."""
_SHORTEST_GAP_S = 0.003


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
    trainer = Trainer(here.rank, here.cell.combo, ddp, lambda ddp: ours.make_optimizer(ddp.module, ddp, 0.0))
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
        # Not while the one before is handled: Python's own Condition.wait() cannot take a second exception then.
        every_s = max(self._after_s / 3, _SHORTEST_GAP_S) if self._left else 0.0
        try:
            signal.setitimer(signal.ITIMER_REAL, self._after_s, every_s)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


def _raise_alarm(_: int, frame: FrameType | None) -> None:
    """Raise inside a step only: an alarm in the lines that end the timer would leave it running."""
    while frame is not None and frame.f_code is not Trainer._step.__code__:
        frame = frame.f_back
    if frame is not None:
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
