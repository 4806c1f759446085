"""``DemoConfig``: the demo's own options, under ``program`` beside the sections of every config. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import annotated_types as at
from pydantic import BeforeValidator, Field, model_validator

from megabucket.config import Section
from megabucket.config.ddp import NonNegative, Positive, PositiveCount, read_tuple
from megabucket.planning import RunConfig
from megabucket.planning.load import load_run
from megabucket.planning.run_config import Decay
from megabucket.planning.run_config import OptimizerConfig as Optimizer

Fraction = Annotated[NonNegative, at.Le(1)]
Seed = Annotated[int, at.Ge(0), at.Lt(2**31)]
Steps = Annotated[int, at.Ge(0), at.Le(10**9)]


class OptimizerConfig(Optimizer):
    """Which torch optimizer steps, and its schedule: linear warm-up, then a cosine to a fraction of ``lr``."""

    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    """The class in ``torch.optim``: ``AdamW``, ``Adam``, ``SGD`` or ``Muon``. Muon steps on the matrices of the blocks, AdamW
    on the rest: embeddings, head, norms and biases."""

    lr: Positive = 3e-4
    """Learning rate at the end of the warm-up, the highest of the run."""

    muon_lr: Positive = 0.015
    """The same of Muon (``name="muon"``), while ``lr`` is that of AdamW beside it. With torch's ``match_rms_adamw``: an update
    is as large as one of AdamW at the same rate."""

    betas: Annotated[tuple[Decay, Decay], BeforeValidator(read_tuple)] = (0.9, 0.95)
    """Decay of the first and the second moment (Adam and AdamW). Muon's momentum is torch's default, 0.95."""

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

    resume: Literal["never", "auto"] | Steps = "never"
    """Where to begin. ``never``: with new weights, in a folder that holds no checkpoints. ``auto``: at the newest checkpoint in
    the folder, with new weights if there is none. The number of a step: at that one in the folder."""

    @model_validator(mode="after")
    def _resumes_from_somewhere(self) -> CheckpointConfig:
        if self.folder is None and self.resume != "never":
            raise ValueError(f"resume={self.resume} looks into the folder of this run; set folder")
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
    return load_run(path, rooted, DemoConfig)
