"""``Task``: what is learned, from which bytes, on which schedule. The same for our wrapper and for what it is compared with."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from typing import Final

import torch

from megabucket.errors import ConfigError, CorpusError
from megabucket.planning.model_config import GptConfig
from megabucket.planning.run_config import RunConfig
from megabucket.training.bytegpt import ByteGPT, next_byte_loss
from megabucket.training.corpus import Corpus, Split, read_corpus
from megabucket.training.launch import Ranks
from megabucket.training.optimizer import learning_rate
from megabucket.training.windows import Batch, Windows, held_out_starts, training_starts

NATS_PER_BIT: Final = math.log(2)

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Model, data and schedule of one run, as one rank sees them."""

    config: RunConfig
    model: GptConfig
    ranks: Ranks
    corpus: Corpus
    train_windows: Windows
    held_out_windows: Windows

    @property
    def num_tokens_per_step(self) -> int:
        """Tokens of one step over all ranks."""
        return self.num_windows_per_step * self.model.sequence_length

    @property
    def num_windows_per_step(self) -> int:
        """Training windows of one step over all ranks: the global batch."""
        return self.config.train.microbatch_size * self.config.train.num_microbatches * self.ranks.num_ranks

    def build_model(self) -> ByteGPT:
        """Return the model with its initial weights: the same on every rank and at every call."""
        return initial_model(self.config, self.model, self.ranks.device)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return learning_rate(self.config.optimizer, step=step, num_steps=self.config.train.steps)

    def microbatches(self, step: int) -> list[Batch]:
        """Return this rank's microbatches of a step: its share of the windows that all ranks see in it.

        Which windows these are depends on their number alone, so other ranks with microbatches of other sizes see the same.
        """
        train, rank = self.config.train, self.ranks.rank
        starts = training_starts(self.train_windows, self.num_windows_per_step, key=(train.seed, step))
        own = starts.reshape(self.ranks.num_ranks, train.num_microbatches, train.microbatch_size)[rank]
        return [self.train_windows.batch(part) for part in own]

    @torch.no_grad()
    def held_out_bits(self, model: torch.nn.Module) -> float:
        """Return bits per byte on held-out windows, shared out among the ranks. All ranks must call it."""
        train = self.config.train
        num_windows = train.eval_batches * train.microbatch_size * self.ranks.num_ranks
        own = held_out_starts(self.held_out_windows, num_windows)[self.ranks.rank :: self.ranks.num_ranks]
        nats = 0.0
        for starts in own.reshape(train.eval_batches, train.microbatch_size):
            nats += next_byte_loss(model, *self.held_out_windows.batch(starts)).item()
        return sum(self.ranks.gather(nats)) / train.eval_batches / self.ranks.num_ranks / NATS_PER_BIT


def initial_model(config: RunConfig, model: GptConfig, device: torch.device) -> ByteGPT:
    """Return the model with its initial weights, in its dtype."""
    return ByteGPT(model, seed=config.train.seed).to(device=device, dtype=_DTYPES[model.dtype])


def trainable_model(config: RunConfig) -> GptConfig:
    """Return the model section of a config, when it can be trained.

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
    if config.ddp.finish == "explicit":
        raise ConfigError(
            "ddp.finish='explicit' is for loops that call finish_grad_sync(), and this program's does not; use 'auto'"
        )
    if model.dtype not in _DTYPES:
        raise ConfigError(f"model.dtype={model.dtype} cannot be trained here; use one of {', '.join(_DTYPES)}")
    return model


def make_task(config: RunConfig, model: GptConfig, ranks: Ranks) -> Task:
    """Read the corpus on every rank and make sure that all of them read the same. All ranks must call it.

    Raises:
        CorpusError: on every rank, when one of them cannot read the corpus or reads other bytes than the first, or when
            a part of it is too short.
    """
    corpus: Corpus | None = None
    try:
        corpus = read_corpus(config.data.corpus, held_out_every=config.data.held_out_every)
        fact: str | CorpusError = corpus.fingerprint
    except CorpusError as error:
        fact = error
    facts = ranks.gather(fact)
    for rank, found in enumerate(facts):
        if isinstance(found, CorpusError):
            raise found
        if found != facts[0]:
            raise CorpusError(
                f"rank {rank} and rank 0 read different bytes for the corpus {config.data.corpus!r}, so the ranks would be "
                "trained on different data. Use the same version of Python, or the same directory, on every machine."
            )
    if corpus is None:
        raise CorpusError(f"the corpus {config.data.corpus!r} was not read")
    length = model.sequence_length
    return Task(
        config=config,
        model=model,
        ranks=ranks,
        corpus=corpus,
        train_windows=Windows(corpus.train, length, device=ranks.device),
        held_out_windows=Windows(corpus.held_out, length, device=ranks.device),
    )


def describe_corpus(corpus: Corpus) -> str:
    """Return the sizes and hashes of a corpus in three lines."""

    def part(name: str, split: Split) -> str:
        return f"  {name:<8} {split.num_files:>5} files  {split.num_bytes:>12,} bytes  SHA-256 {split.sha256}"

    title = f"corpus {corpus.name} (Python {platform.python_version()})"
    return "\n".join((title, part("train", corpus.train), part("held out", corpus.held_out)))
