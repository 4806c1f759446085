"""``OptimizerConfig``, ``DataConfig`` and ``TrainConfig``: what ``megabucket train`` may be told. No torch.

The sections say what to do, never how; ``megabucket.training`` reads them and changes none of them.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import annotated_types as at
from pydantic import BeforeValidator, model_validator

from megabucket.config.ddp import PositiveCount, Section

_FLOAT_TEXT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def _read_float(value: Any) -> Any:
    """Accept ``3e-4``, which YAML 1.1 reads as text, and whole numbers; leave the rest to strict validation."""
    if isinstance(value, str) and _FLOAT_TEXT.fullmatch(value):
        return float(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _read_pair(value: Any) -> Any:
    """Accept a YAML list where a tuple is meant."""
    return tuple(value) if isinstance(value, list) else value


Positive = Annotated[float, BeforeValidator(_read_float), at.Gt(0)]
NonNegative = Annotated[float, BeforeValidator(_read_float), at.Ge(0)]
Decay = Annotated[float, BeforeValidator(_read_float), at.Ge(0), at.Lt(1)]
Fraction = Annotated[float, BeforeValidator(_read_float), at.Ge(0), at.Le(1)]
Seed = Annotated[int, at.Ge(0), at.Lt(2**31)]
Steps = Annotated[int, at.Ge(0), at.Le(10**9)]


class OptimizerConfig(Section):
    """Which torch optimizer steps, and its schedule: linear warm-up, then a cosine to a fraction of ``lr``."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    """The class in ``torch.optim``: ``AdamW``, ``Adam`` or ``SGD``."""

    lr: Positive = 3e-4
    """Learning rate at the end of the warm-up, the highest of the run."""

    betas: Annotated[tuple[Decay, Decay], BeforeValidator(_read_pair)] = (0.9, 0.95)
    """Decay of the first and the second moment (Adam and AdamW)."""

    eps: Positive = 1e-8
    """Added to the root of the second moment (Adam and AdamW)."""

    weight_decay: NonNegative = 0.0
    """Weight decay of parameters with two or more dimensions. Biases and norms are never decayed."""

    momentum: Decay = 0.0
    """Momentum of SGD; nothing else reads it."""

    clip_grad: NonNegative = 1.0
    """Scale gradients down to this global 2-norm. ``0`` switches clipping off."""

    warmup_steps: Steps = 0
    """Steps over which the learning rate rises linearly; the first step already has ``lr / warmup_steps``."""

    final_lr_fraction: Fraction = 1.0
    """Where the cosine ends after the last step, as a fraction of ``lr``. ``1`` keeps the rate constant."""

    @property
    def moments_per_element(self) -> int:
        """How many tensors of state the optimizer keeps per element."""
        return int(self.momentum > 0) if self.name == "sgd" else 2

    fused: bool = False
    """Use torch's fused kernel, which reads and writes each element once."""

    @model_validator(mode="after")
    def _momentum_belongs_to_sgd(self) -> OptimizerConfig:
        if self.momentum and self.name != "sgd":
            raise ValueError(f"momentum={self.momentum} is read by name='sgd' only, but name={self.name!r}; drop one of them")
        return self


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
