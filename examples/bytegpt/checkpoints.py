"""Resuming a run, saving it between steps, and ending it on a signal. All ranks make the same calls.

A checkpoint holds the facts of its run (``run_facts``); only a run with the same facts resumes from it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import megabucket as mb
from examples.bytegpt.config import CheckpointConfig, DemoConfig
from examples.bytegpt.report import MetricsLog, jsonable
from examples.bytegpt.task import Task, on_all
from megabucket.checkpoint.catalog import LATEST, StepDirectory
from megabucket.errors import ConfigError
from megabucket.planning.model_config import GptConfig

CORPUS_FACT: Final = "the corpus (SHA-256)"
BATCH_FACT: Final = "train.microbatch_size * train.num_microbatches * ranks"


def run_facts(task: Task) -> dict[str, Any]:
    """Return, by the name a user knows, the settings that a resumed run must not change."""
    facts = config_facts(task.config, task.model)
    return {**facts, CORPUS_FACT: task.corpus.fingerprint, BATCH_FACT: task.num_windows_per_step}


def config_facts(config: DemoConfig, model: GptConfig) -> dict[str, Any]:
    """Return the part of ``run_facts`` that needs neither corpus nor ranks."""
    program = config.program
    optimizer = program.optimizer.model_dump(mode="json", exclude=set() if program.optimizer.name == "muon" else {"muon_lr"})
    facts: dict[str, Any] = {
        "model.sequence_length": model.sequence_length,
        "train.seed": program.train.seed,
        "ddp.grad_reduction": config.ddp.grad_reduction,
        **{f"optimizer.{name}": value for name, value in optimizer.items()},
    }
    if program.optimizer.final_lr_fraction != 1:  # else the learning rate does not depend on where the run ends
        facts["train.steps"] = program.train.steps
    plain: dict[str, Any] = jsonable(facts)
    return plain


def saved_facts(position: Any) -> dict[str, Any]:
    """Return the facts of the saved run from its ``data_position``; none if another program saved it."""
    found = position.get("run") if isinstance(position, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def fact_changes(saved: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Return a description of each fact that differs."""
    if not saved:
        return ["it was not saved by the demo, so it does not say which data comes next"]
    return [
        f"{name}: {saved.get(name, 'without effect')} in the checkpoint, {facts.get(name, 'without effect')} now"
        for name in sorted(saved.keys() | facts.keys())
        if saved.get(name) != facts.get(name)
    ]


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a run; by default with new weights."""

    step: int = 0
    """Steps done before."""
    checkpoint: str | None = None
    """The directory of the loaded checkpoint."""
    saved_by_ranks: int = 0
    later_steps: tuple[int, ...] = ()
    """Steps after ``step`` that the run's folder holds checkpoints of, whole or not."""


def resume(task: Task, model: mb.DistributedDataParallel, optimizer: mb.DistributedOptimizer) -> Start:
    """Load the checkpoint that the config names, if any.

    Raises:
        ConfigError: the checkpoint is of another run, or beyond the last step; or a new run would begin in a folder that holds
            checkpoints.
        CheckpointError: it cannot be read, does not fit, or is not there.
    """
    config, num_steps = task.config.program.checkpoint, task.config.program.train.steps
    # Ranks may see a shared folder at different moments, so rank 0 looks and all use its answer.
    found = on_all(task.ranks, lambda: _find_step(config) if task.ranks.rank == 0 else None)
    step, held = task.ranks.gather(found)[0] or (None, ())
    if step is None:
        return Start()
    loaded = mb.load_checkpoint(str(config.folder), model, optimizer, step=step)
    if changes := fact_changes(saved_facts(loaded.data_position), run_facts(task)):
        listed = "\n".join(f"  - {change}" for change in changes)
        raise ConfigError(
            f"{loaded.path} cannot be gone on from as if nothing had happened:\n{listed}\n"
            "Set these back, or begin another run in another checkpoint.folder.",
            problems=changes,
        )
    if loaded.step > num_steps:
        raise ConfigError(
            f"{loaded.path} is of step {loaded.step}, and train.steps={num_steps} ends before; raise "
            "train.steps, or name an earlier step with checkpoint.resume (--resume)"
        )
    return Start(loaded.step, loaded.path, loaded.world_size, tuple(step for step in held if step > loaded.step))


def _find_step(config: CheckpointConfig) -> tuple[Literal["latest"] | int | None, tuple[int, ...]]:
    """Return the step to load, if any, and the steps in the folder."""
    folder = Path(config.folder or "")
    names = {path.name for path in folder.iterdir()} if config.folder is not None and folder.exists() else set()
    held = tuple(sorted({found.step for name in names if (found := StepDirectory.parse(name)) is not None}))
    if config.resume == "never" and (held or LATEST in names):
        raise ConfigError(
            f"checkpoint.folder={config.folder!r} holds checkpoints (of steps {held}), and a run that begins anew must not be "
            "mixed with. Go on from them with --resume auto, or name another folder."
        )
    if config.resume != "auto":
        return (None if config.resume == "never" else config.resume), held
    if LATEST in names:
        return "latest", held
    # A first save that was interrupted between its rename and ``latest`` has left a whole checkpoint.
    return (held[-1] if held else None), held


class RunSaver:
    """Saves one run: when a checkpoint is due, after its last step, and when a signal ends it."""

    def __init__(
        self, task: Task, model: mb.DistributedDataParallel, optimizer: mb.DistributedOptimizer, start: Start, log: MetricsLog
    ) -> None:
        self._task, self._config, self._log = task, task.config.program.checkpoint, log
        self._stop = mb.AgreedStop(model)
        self._checkpointer = mb.Checkpointer(
            self._config.folder or "",
            model,
            optimizer,
            keep_last=self._config.keep_last,
            asynchronous=self._config.asynchronous,
        )
        # After a resume at an earlier step the later steps may exist and are saved again.
        self._goes_back, self._start_step = bool(start.later_steps), start.step
        self.signals: list[str] = []
        """Names of the signals that this rank received."""

    @contextmanager
    def noting_signals(self) -> Iterator[None]:
        """Turn SIGTERM and SIGINT into a request to stop after the current step.

        Python handles signals in the main thread only. Where training runs in another one (Ray Train), they keep their meaning.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, _: object) -> None:
            self.signals.append(signal.Signals(number).name)
            self._stop.request()

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def ends_after(self, num_steps: int) -> bool:
        """Save after a step if it is due; return whether a signal ends the run here, alike on all ranks.

        Raises:
            CheckpointNotSavedError: a save has failed, this one or the one before in the background.
        """
        is_stopped, every = self._stop.poll(), self._config.every_steps
        is_end = is_stopped or num_steps == self._task.config.program.train.steps
        if (is_end or (every is not None and num_steps % every == 0)) and num_steps != self._start_step:
            windows = num_steps * self._task.num_windows_per_step
            position = {"step": num_steps, "windows": windows, "run": run_facts(self._task)}
            self._checkpointer.save(num_steps, data_position=position, overwrite=self._goes_back)
            self._log.write("checkpoint", {"step": num_steps, "folder": self._config.folder})
        if is_end:
            self._checkpointer.close()
        else:
            self._checkpointer.poll()
        return is_stopped
