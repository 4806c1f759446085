"""``DemoConfig``: what the demo may be told, beside what every config may say, under ``program``. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import annotated_types as at
from pydantic import BeforeValidator, Field, model_validator

from megabucket.config import Section
from megabucket.config.ddp import NonNegative, Positive, PositiveCount, read_tuple
from megabucket.planning import RunConfig
from megabucket.planning.load import load_section
from megabucket.planning.run_config import Decay
from megabucket.planning.run_config import OptimizerConfig as Optimizer

Fraction = Annotated[NonNegative, at.Le(1)]
Seed = Annotated[int, at.Ge(0), at.Lt(2**31)]
Steps = Annotated[int, at.Ge(0), at.Le(10**9)]


class OptimizerConfig(Optimizer):
    """Which torch optimizer steps, and its schedule: linear warm-up, then a cosine to a fraction of ``lr``."""

    lr: Positive = 3e-4
    """Learning rate at the end of the warm-up, the highest of the run."""

    betas: Annotated[tuple[Decay, Decay], BeforeValidator(read_tuple)] = (0.9, 0.95)
    """Decay of the first and the second moment (Adam and AdamW)."""

    eps: Positive = 1e-8
    """Added to the root of the second moment (Adam and AdamW)."""

    weight_decay: NonNegative = 0.0
    """Weight decay of parameters with two or more dimensions. Biases and norms are never decayed."""

    clip_grad: NonNegative = 1.0
    """Scale gradients down to this global 2-norm. ``0`` switches clipping off."""

    warmup_steps: Steps = 0
    """Steps over which the learning rate rises linearly; the first step already has ``lr / warmup_steps``."""

    final_lr_fraction: Fraction = 1.0
    """Where the cosine ends after the last step, as a fraction of ``lr``. ``1`` keeps the rate constant."""

    fused: bool = False
    """Use torch's fused kernel, which reads and writes each element once."""


class DataConfig(Section):
    """Which bytes are trained on and which are held out."""

    corpus: Annotated[str, at.MinLen(1)] = "stdlib"
    """``stdlib``: the source of the running Python's standard library. Anything else: a directory; its ``.py`` files
    are read."""

    held_out_every: Annotated[int, at.Ge(2), at.Le(10**6)] = 20
    """Hold out every this many-th file, in sorted order, for evaluation; training never sees it."""


class TrainConfig(Section):
    """How long, how much at once, and where the figures go."""

    steps: PositiveCount = 100
    """Optimizer steps. Fixed, so that a run can be repeated."""

    microbatch_size: PositiveCount = 8
    """Sequences in one forward and backward on one rank."""

    num_microbatches: PositiveCount = 2
    """Forward and backward passes per step and rank; the last one launches the gradient sync."""

    seed: Seed = 0
    """Seed of the weights and of the order of the training windows. One seed, one run."""

    eval_batches: PositiveCount = 8
    """Batches of ``microbatch_size`` held-out windows per rank in each evaluation."""

    log_path: Annotated[str, at.MinLen(1)] | None = "runs/train.jsonl"
    """JSON lines with one object for the run, each step, each evaluation, each checkpoint and the summary; replaced by the next
    run, continued by one that is resumed. ``None`` writes none."""

    trace_path: Annotated[str, at.MinLen(1)] | None = None
    """Chrome trace (JSON, opens in Perfetto) of the last step of all ranks. ``None`` writes none."""


def _read_resume(value: Any) -> Any:
    """Accept the number of a step, which YAML reads as a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class CheckpointConfig(Section):
    """Which checkpoints the demo saves and where, and from which of them it goes on."""

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


class Program(Section):
    """The ``program`` section of the demo's config."""

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The optimizer and its schedule."""

    data: DataConfig = Field(default_factory=DataConfig)
    """What is trained on."""

    train: TrainConfig = Field(default_factory=TrainConfig)
    """How long, how much at once, and where the figures go."""

    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """What is saved, and where the run begins."""


class DemoConfig(RunConfig):
    """One run of the demo: the model, how its gradients travel, and in ``program`` how it is trained."""

    program: Program = Field(default_factory=Program)
    """The optimizer, the data, the schedule and the checkpoints."""


def load_demo_config(path: Path, overrides: list[str]) -> DemoConfig:
    """Read a config; ``train.steps=100`` is short for ``program.train.steps=100``.

    Raises:
        ConfigError: anything wrong with the file, an override or a value.
    """
    sections = tuple(f"{name}." for name in Program.model_fields)
    rooted = [f"program.{text}" if text.startswith(sections) else text for text in overrides]
    return load_section(path, rooted, DemoConfig)
