"""``CheckpointConfig``: what ``megabucket train`` saves, and where it begins. No torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import annotated_types as at
from pydantic import BeforeValidator, model_validator

from megabucket.config.ddp import PositiveCount, Section


def _read_resume(value: Any) -> Any:
    """Accept the number of a step, which YAML reads as a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class CheckpointConfig(Section):
    """Which checkpoints ``megabucket train`` saves and where, and from which of them it goes on."""

    folder: Annotated[str, at.MinLen(1)] | None = None
    """Directory of this run's checkpoints, which all ranks see. ``None`` saves none, and signals end the run at once."""

    every_steps: PositiveCount | None = 100
    """Save whenever so many steps are done in all. The end of the run is saved in any case, and so is the step after which a
    signal ends it; ``None`` saves nothing else."""

    keep_last: PositiveCount | None = 2
    """How many checkpoints stay, the newest one included. ``None`` keeps all."""

    asynchronous: bool = False
    """Write in the background, from a copy of the state in host memory. The last save of a run is waited for."""

    when_busy: Literal["wait", "skip"] = "wait"
    """What a save does while the one before is still being written: wait for it, or leave itself out."""

    failed_saves: Literal["end", "warn"] = "end"
    """What a save that fails means (the disk is full): the end of the run, or a line that says so, until the next one. The last
    save of a run must succeed in any case."""

    resume: Annotated[str, BeforeValidator(_read_resume), at.MinLen(1)] = "never"
    """Where to begin. ``never``: with new weights, in a folder that holds no checkpoints. ``auto``: at the newest checkpoint in
    the folder, with new weights if there is none. The number of a step: at that one in the folder. Anything else is the path of
    another run's folder or of one checkpoint."""

    allow_fallback: bool = False
    """Go on from the newest older checkpoint that is whole where the one that is meant is damaged, instead of ending."""

    changes: Literal["refuse", "allow"] = "refuse"
    """What it means that the config says another data order, batch or optimizer than the run that was saved: an error that
    lists the differences, or a line that says so; the config counts then."""

    key_file: Annotated[str, at.MinLen(1)] | None = None
    """File with a secret of 16 bytes or more, which every rank reads. Checkpoints are signed with it, and only those that are
    signed with it are gone on from. ``None`` signs nothing."""

    ask_every_steps: PositiveCount = 10
    """With ``ddp.fence=false``: how often ranks ask each other whether one of them got a signal. The fence carries that for
    nothing in every step."""

    @property
    def resume_step(self) -> int | None:
        """The step to resume at, if ``resume`` is a number."""
        return int(self.resume) if self.resume.isascii() and self.resume.isdecimal() else None

    @model_validator(mode="after")
    def _resumes_from_somewhere(self) -> CheckpointConfig:
        if self.folder is None and (self.resume == "auto" or self.resume_step is not None):
            raise ValueError(f"resume={self.resume} looks into the folder of this run; set folder, or give resume a path")
        return self
