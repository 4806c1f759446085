"""Save and load a training run: the calls that users make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from megabucket.checkpoint.capture import RunState, Stateful, TrainingParts, capture, to_host
from megabucket.checkpoint.format import Snapshot
from megabucket.checkpoint.ranks import GroupRanks, gather_results, together
from megabucket.checkpoint.restore import LoadedCheckpoint, mismatches, restore
from megabucket.checkpoint.save import BackgroundWriter, SaveSettings, WhenBusy, save_snapshot
from megabucket.checkpoint.stored import StoredCheckpoint, open_checkpoint
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import CheckpointInvalidError

Step = Literal["latest"] | int


def save_checkpoint(  # noqa: PLR0913 - one argument per part of a run and per choice, most of them rarely used
    root: Path | str,
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    scaler: Stateful | None = None,
    schedulers: Any = None,
    data_position: Any = None,
    extras: Mapping[str, Any] | None = None,
    keep_last: int | None = 2,
    overwrite: bool = False,
) -> Path:
    """Save everything that the run needs to continue, and return the directory. A collective call, between two steps.

    The checkpoint appears as a whole or not at all, whatever happens meanwhile, and loads on any number of ranks, in any mode,
    with any buckets.

    Args:
        root: a directory that all ranks see.
        optimizer: a ``DistributedOptimizer``, or a plain one in all-reduce mode; without one, only weights are saved.
        step: names the checkpoint.
        schedulers: one, several, or several by name.
        data_position: plain values that say which data comes next; the same on every rank.
        extras: plain values and tensors by name; the same on every rank.
        keep_last: how many checkpoints stay, this one included; None keeps all.
        overwrite: allow to save a step again.

    Raises:
        CheckpointNotSavedError: nothing was saved, on any rank; earlier checkpoints are untouched.
        PhaseError: a step is open.
        OptimizerParametersError: some optimizer state cannot be told apart by parameter.
        ConfigError: a value cannot be saved.
    """
    saver = Checkpointer(root, ddp, optimizer, scaler=scaler, schedulers=schedulers, keep_last=keep_last)
    return saver.save_now(step, data_position=data_position, extras=extras, overwrite=overwrite)


def load_checkpoint(  # noqa: PLR0913 - one argument per part of a run and per choice, most of them rarely used
    root: Path | str,
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: Step = "latest",
    scaler: Stateful | None = None,
    schedulers: Any = None,
    cast: bool = False,
    with_rng: bool = True,
    allow_fallback: bool = False,
) -> LoadedCheckpoint:
    """Load a checkpoint into a run, and return its other contents. A collective call, between two steps.

    Each rank reads the files that it needs, and verifies a file before it uses a byte of it. The run changes only after all
    ranks have read everything.

    Args:
        optimizer: None loads only weights.
        cast: convert floating-point tensors to the dtypes of this run.
        with_rng: restore the random numbers of each rank, if the number of ranks is the same.
        allow_fallback: if this checkpoint is damaged, load the newest older one that is whole, with a warning.

    Raises:
        CheckpointMissingError: there is no such checkpoint; the text lists the steps that are there.
        CheckpointInvalidError: a file is damaged.
        CheckpointMismatchError: it does not fit; the text names every difference.
        PhaseError: a step is open.
    """
    loader = Checkpointer(root, ddp, optimizer, scaler=scaler, schedulers=schedulers)
    return loader.load(step, cast=cast, with_rng=with_rng, allow_fallback=allow_fallback)


def can_load(
    root: Path | str,
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: Step = "latest",
    scaler: Stateful | None = None,
    schedulers: Any = None,
    cast: bool = False,
) -> list[str]:
    """Return every difference that keeps a checkpoint from being loaded into a run; nothing if none is found.

    Reads the manifest, checks its seal and that its files exist, and compares it with the run; on this rank alone, and changes
    nothing. It reads no data file, so it does not find damaged ones (``megabucket checkpoint verify`` does), nor values that a
    cast could not hold. Nor does it try whether schedulers and modules take their state, or what other ranks hold.

    Raises:
        CheckpointMissingError: there is no such checkpoint.
        CheckpointInvalidError: its manifest is damaged, or a file is missing.
    """
    return mismatches(open_checkpoint(root, step), TrainingParts(ddp, optimizer, scaler, schedulers), cast=cast)


def _open(root: Path, ranks: GroupRanks, step: Step, *, allow_fallback: bool) -> StoredCheckpoint:
    """Open the checkpoint that the first rank finds, on all ranks."""
    opened: list[StoredCheckpoint] = []

    def open_first() -> tuple[int, str]:
        if ranks.rank == 0:
            opened.append(open_checkpoint(root, step, allow_fallback=allow_fallback))
        return (opened[0].step, opened[0].seal) if opened else (0, "")

    chosen, seal = gather_results(ranks, "choice", open_first)[0]

    def open_same() -> StoredCheckpoint:
        stored = opened[0] if opened else open_checkpoint(root, chosen)
        if stored.seal != seal:
            problem = f"rank {ranks.rank} sees another checkpoint of step {chosen} than the first rank"
            raise CheckpointInvalidError(path=str(stored.path), file="manifest.json", problem=problem)
        return stored

    return together(ranks, "manifest", open_same)


class Checkpointer:
    """Saves one run again and again, in the background if wanted, and loads it.

    All methods are collective calls, between two steps. A save in the background costs the training thread a copy of the state
    to host memory. In the next ``save``, ``poll`` or ``close`` the ranks agree that all have written and that the checkpoint
    is committed; so call ``poll`` now and then, in every step if you like, on every rank. An error in the background is
    raised there, on every rank.

    Args:
        keep_last: how many checkpoints stay.
        asynchronous: write files in the background.
        when_busy: a save waits for one that is still being written, or is skipped.

    The other arguments are those of ``save_checkpoint``.

    Raises:
        ValueError: ``keep_last`` is less than 1, or ``when_busy`` unknown.
    """

    def __init__(
        self,
        root: Path | str,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scaler: Stateful | None = None,
        schedulers: Any = None,
        keep_last: int | None = 2,
        asynchronous: bool = False,
        when_busy: WhenBusy = "wait",
    ) -> None:
        self.root = Path(root)
        self.parts = TrainingParts(ddp, optimizer, scaler, schedulers)
        self._is_asynchronous = asynchronous
        self._settings, self._ranks = SaveSettings(keep_last=keep_last), GroupRanks(ddp, "saving a checkpoint")
        self._writer = BackgroundWriter(self.root, self._ranks, self._settings, when_busy=when_busy)
        self._on_host: Snapshot | None = None
        self._loaded_step: int | None = None

    def save(
        self, step: int, *, data_position: Any = None, extras: Mapping[str, Any] | None = None, overwrite: bool = False
    ) -> bool:
        """Save, or start to. Return False if ``when_busy="skip"`` skips it.

        After ``load``, later steps than the loaded one are saved again where an abandoned run, or damage, has left them.

        Args:
            overwrite: allow to save any other step again.

        Raises:
            CheckpointNotSavedError: this save, or the one before in the background, has failed; earlier checkpoints are
                untouched.
            MegabucketError: as ``save_checkpoint``.
        """
        if not self._is_asynchronous:
            self.save_now(step, data_position=data_position, extras=extras, overwrite=overwrite)
            return True
        state = RunState(self.parts)

        def on_host() -> Snapshot:
            # The writer calls this when the copy before is written, so its memory is free.
            snapshot = state.snapshot(data_position=data_position, extras=extras)
            self._on_host = to_host(snapshot, [piece.values for piece in self._on_host.pieces] if self._on_host else ())
            return self._on_host

        return self._writer.save(step, on_host, overwrite=overwrite or self._is_abandoned(step))

    def save_now(
        self, step: int, *, data_position: Any = None, extras: Mapping[str, Any] | None = None, overwrite: bool = False
    ) -> Path:
        """Save, not in the background, and return the directory; see ``save``."""
        snapshot = capture(self.parts, data_position=data_position, extras=extras)
        settings = replace(self._settings, overwrite=overwrite or self._is_abandoned(step))
        return save_snapshot(self.root, step, snapshot, self._ranks, settings)

    def _is_abandoned(self, step: int) -> bool:
        return self._loaded_step is not None and step > self._loaded_step

    def poll(self) -> Path | None:
        """Continue the save in the background as far as possible without waiting; return its directory once it is committed.

        Raises:
            CheckpointNotSavedError: it has failed on some rank.
        """
        return self._writer.poll()

    def close(self) -> Path | None:
        """Wait for the save in the background, commit it, and return its directory.

        Raises:
            CheckpointNotSavedError: it has failed on some rank.
        """
        return self._writer.close()

    def load(
        self, step: Step = "latest", *, cast: bool = False, with_rng: bool = True, allow_fallback: bool = False
    ) -> LoadedCheckpoint:
        """Load a checkpoint into the run; see ``load_checkpoint``. Commits a save in the background first."""
        self.close()
        ranks = GroupRanks(self.parts.ddp, "loading a checkpoint")
        stored = _open(self.root, ranks, step, allow_fallback=allow_fallback)
        loaded = restore(stored, self.parts, cast=cast, with_rng=with_rng)
        self._loaded_step = loaded.step
        return loaded

    def __enter__(self) -> Checkpointer:  # noqa: PYI034 - Python 3.10 has no Self
        """Return this object; leaving the block closes it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Commit the save in the background. After an error of this rank others may not be here, so do not wait for them."""
        if error is None:
            self.close()
