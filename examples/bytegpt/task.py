"""``Task``: model, data and schedule of a run, the same for our wrapper and for the reference of ``--compare``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

from examples.bytegpt.config import DemoConfig, OptimizerConfig
from examples.bytegpt.data import Batch, Corpus, CorpusError, Windows, read_corpus
from examples.bytegpt.model import ByteGPT, next_byte_loss
from megabucket.errors import ConfigError, MegabucketError
from megabucket.measure.ranks import Ranks
from megabucket.planning.model_config import GptConfig

T = TypeVar("T")

NATS_PER_BIT: Final = math.log(2)

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Model, data and schedule of one run on one rank."""

    config: DemoConfig
    model: GptConfig
    ranks: Ranks
    corpus: Corpus
    train_windows: Windows
    held_out_windows: Windows

    @property
    def num_windows_per_step(self) -> int:
        """Training windows of one step over all ranks: the global batch."""
        train = self.config.program.train
        return train.microbatch_size * train.num_microbatches * self.ranks.num_ranks

    @property
    def num_tokens_per_step(self) -> int:
        """Tokens of one step over all ranks."""
        return self.num_windows_per_step * self.model.sequence_length

    def build_model(self) -> ByteGPT:
        """Return the model with its initial weights: the same on every rank and at every call."""
        return initial_model(self.config, self.model, self.ranks.device)

    def learning_rate(self, step: int, *, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> float:
        """Return the learning rate of a step, counted from 0, for an optimizer of this class."""
        config = self.config.program.optimizer
        peak = config.muon_lr if kind is torch.optim.Muon else config.lr
        return learning_rate(config.model_copy(update={"lr": peak}), step=step, num_steps=self.config.program.train.steps)

    def microbatches(self, step: int) -> list[Batch]:
        """Return this rank's microbatches of a step: its share of the windows of all ranks.

        The windows depend on their number alone, so another number of ranks or size of microbatches sees the same.
        """
        train = self.config.program.train
        starts = self.train_windows.random_starts(self.num_windows_per_step, key=(train.seed, step))
        own = starts.reshape(self.ranks.num_ranks, train.num_microbatches, train.microbatch_size)[self.ranks.rank]
        return [self.train_windows.batch(part) for part in own]

    @torch.no_grad()
    def held_out_bits(self, model: torch.nn.Module) -> float:
        """Return bits per byte on held-out windows, shared out among the ranks. All ranks must call it."""
        train, ranks = self.config.program.train, self.ranks
        num_windows = train.eval_batches * train.microbatch_size * ranks.num_ranks
        own = self.held_out_windows.even_starts(num_windows)[ranks.rank :: ranks.num_ranks]
        nats = 0.0
        for starts in own.reshape(train.eval_batches, train.microbatch_size):
            nats += next_byte_loss(model, *self.held_out_windows.batch(starts)).item()
        return sum(ranks.gather(nats)) / train.eval_batches / ranks.num_ranks / NATS_PER_BIT


def make_task(config: DemoConfig, model: GptConfig, ranks: Ranks) -> Task:
    """Read the corpus on every rank and check that all read the same. All ranks must call it.

    Raises:
        CorpusError: on every rank, when one of them cannot read the corpus or reads other bytes than the first, or when
            a part of it is too short.
    """
    data = config.program.data
    corpus = on_all(ranks, lambda: read_corpus(data.corpus, held_out_every=data.held_out_every))
    fingerprints = ranks.gather(corpus.fingerprint)
    for rank, found in enumerate(fingerprints):
        if found != fingerprints[0]:
            raise CorpusError(
                f"rank {rank} and rank 0 read different bytes for the corpus {data.corpus!r}, so the ranks would be "
                "trained on different data. Use the same version of Python, or the same directory, on every machine."
            )
    train, held_out = (Windows(part, model.sequence_length, device=ranks.device) for part in (corpus.train, corpus.held_out))
    return Task(config, model, ranks, corpus, train, held_out)


def on_all(ranks: Ranks, act: Callable[[], T]) -> T:
    """Return the result of ``act`` on this rank; an error on any rank is raised on all. ``act`` is not collective."""
    error = result = None
    try:
        result = act()
    except (MegabucketError, OSError) as found:
        error = found
    for each in ranks.gather(error):
        if each is not None:
            raise each
    return result  # type: ignore[return-value]


def initial_model(config: DemoConfig, model: GptConfig, device: torch.device) -> ByteGPT:
    """Return the model with its initial weights, in its dtype."""
    return ByteGPT(model, seed=config.program.train.seed).to(device=device, dtype=_DTYPES[model.dtype])


def trainable_model(config: DemoConfig) -> GptConfig:
    """Return the model section of a config if it can be trained.

    Raises:
        ConfigError: there is none, it is not a ``gpt``, its vocabulary has no room for bytes, or its dtype needs more than
            this program does.
    """
    model = config.model
    if not isinstance(model, GptConfig):
        given = "there is no model section" if model is None else f"model.kind is {model.kind!r}"
        raise ConfigError(f"training needs a model of kind 'gpt', but {given}; see configs/bytegpt.yaml for one")
    if model.vocab_size < 256:
        raise ConfigError(f"model.vocab_size={model.vocab_size} has no room for all bytes; use 256 or more")
    if model.dtype not in _DTYPES:
        raise ConfigError(f"model.dtype={model.dtype} cannot be trained here; use one of {', '.join(_DTYPES)}")
    return model


def make_optimizers(config: OptimizerConfig, params: Mapping[str, torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers over all parameters: one, or with ``muon`` Muon and AdamW.

    Args:
        params: by name.
    """
    if config.name != "muon":
        return [_make_elementwise(config, params.values())]
    matrices = [param for name, param in params.items() if name.startswith("blocks.") and param.ndim == 2]
    rest = [param for name, param in params.items() if not (name.startswith("blocks.") and param.ndim == 2)]
    muon = torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
    return [muon, _make_elementwise(config, rest)]


def _make_elementwise(config: OptimizerConfig, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer over two groups: parameters with two or more dimensions, which decay, and the others.

    Without weight decay there is one group.
    """
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": config.weight_decay}, {"params": [], "weight_decay": 0.0}]
    for param in params:
        is_undecayed = config.weight_decay > 0 and param.ndim <= 1
        groups[is_undecayed]["params"].append(param)
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=config.fused or None)
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=config.fused or None)


def learning_rate(config: OptimizerConfig, *, step: int, num_steps: int) -> float:
    """Return the learning rate of step ``step``, counted from 0, of ``num_steps``.

    Rises linearly over ``warmup_steps``, then falls along a half cosine to ``final_lr_fraction`` of its peak in the last step.

    >>> config = OptimizerConfig(lr=1.0, warmup_steps=2, final_lr_fraction=0.1)
    >>> [round(learning_rate(config, step=step, num_steps=5), 3) for step in range(5)]
    [0.5, 1.0, 0.775, 0.325, 0.1]
    """
    if step < config.warmup_steps:
        return config.lr * ((step + 1) / config.warmup_steps)
    progress = min(1.0, (step + 1 - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * (1 + math.cos(math.pi * progress)) / 2)
