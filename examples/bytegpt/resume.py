"""Where a run begins: which checkpoint is meant, whether it is of the run that the config describes, and what it brings.

All ranks call ``resume``; the first one looks into folders, and what it finds, or fails to find, is told to all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import megabucket as mb
from examples.bytegpt.config import CheckpointConfig, DemoConfig
from examples.bytegpt.metrics import jsonable
from examples.bytegpt.task import Task, on_all
from megabucket.checkpoint.catalog import LATEST, StepDirectory, read_key, whole_steps
from megabucket.checkpoint.file_system import FileSystem
from megabucket.errors import CheckpointError, ConfigError
from megabucket.planning.model_config import GptConfig

NOT_OURS: Final = "it was not saved by the demo, so it does not say which data comes next; that of its step is taken"
CORPUS_FACT: Final = "the corpus (SHA-256)"
BATCH_FACT: Final = "train.microbatch_size * train.num_microbatches * ranks"


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins; by default with new weights."""

    step: int = 0
    """Steps that were done before."""
    checkpoint: str | None = None
    """The directory it goes on from."""
    saved_by_ranks: int = 0
    later_steps: tuple[int, ...] = ()
    """Steps beyond ``step`` of which the run's own folder holds checkpoints, whole or not."""
    changes: tuple[str, ...] = ()
    """In what the config differs from that of the run that was saved, where it is allowed to."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """What to load."""

    root: Path
    step: Literal["latest"] | int
    directory: str | None = None
    """The one directory that is meant."""


def run_facts(task: Task) -> dict[str, Any]:
    """Return, by the name a user knows, what a run must not change if it is to go on as if it had not been interrupted."""
    return {
        **config_facts(task.config, task.model),
        CORPUS_FACT: task.corpus.fingerprint,
        BATCH_FACT: task.num_windows_per_step,
    }


def config_facts(config: DemoConfig, model: GptConfig) -> dict[str, Any]:
    """Return those of ``run_facts`` that need neither corpus nor ranks."""
    facts: dict[str, Any] = {
        "model.sequence_length": model.sequence_length,
        "train.seed": config.program.train.seed,
        "ddp.grad_reduction": config.ddp.grad_reduction,
        **{f"optimizer.{name}": value for name, value in config.program.optimizer.model_dump(mode="json").items()},
    }
    if config.program.optimizer.final_lr_fraction != 1:  # else the learning rate does not depend on where the run ends
        facts["train.steps"] = config.program.train.steps
    plain: dict[str, Any] = jsonable(facts)
    return plain


def data_position(task: Task, step: int) -> dict[str, Any]:
    """Return what a checkpoint says about the data: how far the run is, and what its order follows from."""
    return {"step": step, "windows": step * task.num_windows_per_step, "run": run_facts(task)}


def signing_key(task: Task) -> bytes | None:
    """Return what checkpoints are signed with, if anything. All ranks must call it.

    Raises:
        ConfigError: some rank finds no key in ``checkpoint.key_file``.
    """
    path = task.config.program.checkpoint.key_file
    return None if path is None else on_all(task.ranks, lambda: read_key(Path(path)))


def resume(
    task: Task, model: mb.DistributedDataParallel, optimizer: mb.DistributedOptimizer, *, key: bytes | None = None
) -> Start:
    """Load the checkpoint that ``task.config`` means, if any. All ranks must call it.

    Args:
        key: the checkpoint must be signed with it.

    Raises:
        ConfigError: the checkpoint is of another run, or beyond the last step; or a new run would begin in a folder that holds
            checkpoints.
        CheckpointError: it cannot be read, does not fit, or is not there.
    """
    config, num_steps = task.config.program.checkpoint, task.config.program.train.steps
    found = on_all(task.ranks, lambda: _find_origin(config) if task.ranks.rank == 0 else None)
    origin, held = task.ranks.gather(found)[0] or (None, ())
    if origin is None:
        return Start()
    hyperparameters = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    loaded = mb.load_checkpoint(origin.root, model, optimizer, step=origin.step, allow_fallback=config.allow_fallback, key=key)
    _check_directory(origin, loaded, config)
    saved = saved_facts(loaded.data_position)
    changes = [NOT_OURS] if saved is None else fact_changes(saved, run_facts(task))
    if changes and config.changes == "refuse":
        raise ConfigError(_refusal(loaded, changes), problems=changes)
    if loaded.step > num_steps:
        raise ConfigError(
            f"{loaded.path} is of step {loaded.step}, and train.steps={num_steps} ends before; raise "
            "train.steps, or name an earlier step with checkpoint.resume (--resume)"
        )
    for group, values in zip(optimizer.param_groups, hyperparameters, strict=True):
        group.update(values)  # the config counts
    later = tuple(step for step in held if step > loaded.step)
    return Start(loaded.step, loaded.path, loaded.world_size, later, tuple(changes))


def describe_start(start: Start, task: Task) -> list[str]:
    """Return what there is to say about a run that goes on."""
    lines = [f"going on from step {start.step} of {task.config.program.train.steps}: {start.checkpoint}"]
    if start.saved_by_ranks != task.ranks.num_ranks:
        lines.append(
            f"  it was saved by {start.saved_by_ranks} rank(s) and goes on with {task.ranks.num_ranks}: the same windows in "
            "every step, summed in another order"
        )
    lines += [f"  changed: {change}" for change in start.changes]
    if start.later_steps:
        shown = ", ".join(str(step) for step in start.later_steps[:5])
        lines.append(f"  later checkpoints in the folder (step {shown}) stay until they are saved again")
    return lines


def _find_origin(config: CheckpointConfig) -> tuple[_Origin | None, tuple[int, ...]]:
    """Return what to load, and the steps of which the run's own folder holds something."""
    folder = None if config.folder is None else Path(config.folder)
    held = () if folder is None else _held_steps(folder)
    if config.resume_step is not None and folder is not None:
        return _Origin(folder, config.resume_step), held
    if config.resume == "auto" and folder is not None:
        if not held:
            return None, held
        # Without ``latest`` its first save was cut off behind the rename, or somebody has removed it: what is whole is whole.
        newest = whole_steps(FileSystem(), folder)[-1:] if not os.path.lexists(folder / LATEST) else ()
        return _Origin(folder, newest[0] if newest else "latest"), held
    origin = None if config.resume == "never" else _origin_at(Path(config.resume))
    is_own = origin is not None and folder is not None and origin.root.resolve() == folder.resolve()
    if held and not is_own:
        raise ConfigError(
            f"checkpoint.folder={config.folder!r} holds checkpoints (the newest of step {held[-1]}), which a run that begins "
            f"elsewhere (checkpoint.resume={config.resume}) must not be mixed with. Go on from them with --resume auto, or "
            "name another folder."
        )
    return origin, held


def _origin_at(path: Path) -> _Origin:
    path = path.absolute()
    directory = StepDirectory.parse(path.name)
    return _Origin(path, "latest") if directory is None else _Origin(path.parent, directory.step, directory.name)


def _held_steps(folder: Path) -> tuple[int, ...]:
    """Return the steps that a folder has directories of, whole or not, in order.

    Raises:
        CheckpointError: it cannot be looked into, which is not to say that it holds nothing.
    """
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.folder={str(folder)!r} cannot be looked into: {error.strerror}. Name a directory that every rank "
            "may read and write."
        ) from None
    if LATEST in names and not any(StepDirectory.parse(name) for name in names):
        return (0,)
    return tuple(sorted({directory.step for name in names if (directory := StepDirectory.parse(name)) is not None}))


def _check_directory(origin: _Origin, loaded: mb.LoadedCheckpoint, config: CheckpointConfig) -> None:
    found = Path(loaded.path).name
    if origin.directory is not None and found != origin.directory and not config.allow_fallback:
        raise ConfigError(
            f"checkpoint.resume={config.resume}: that step was saved again since, as {found}; name that one, or "
            "remove it if the older one is meant"
        )


def saved_facts(position: Any) -> Mapping[str, Any] | None:
    """Return what ``run_facts`` was when a checkpoint was saved, from its ``data_position``; None if that is of others."""
    found = position.get("run") if isinstance(position, Mapping) else None
    return found if isinstance(found, Mapping) else None


def fact_changes(saved: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Return in words in what facts differ."""
    return [
        f"{name}: {_shown(saved, name)} in the checkpoint, {_shown(facts, name)} now"
        for name in sorted(saved.keys() | facts.keys())
        if saved.get(name) != facts.get(name)
    ]


def _shown(facts: Mapping[str, Any], name: str) -> str:
    return str(facts[name]) if name in facts else "without effect"


def _refusal(loaded: mb.LoadedCheckpoint, changes: list[str]) -> str:
    listed = "\n".join(f"  - {change}" for change in changes)
    return (
        f"{loaded.path} cannot be gone on from as if nothing had happened:\n{listed}\nSet these back; or accept another run "
        "from here on with checkpoint.changes=allow."
    )
