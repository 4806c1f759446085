"""``GptConfig`` and ``LlamaConfig``: decoders said in a few numbers, and what all decoders have in common. No torch.

``megabucket.planning.decoders`` turns them into parameters.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import annotated_types as at
from pydantic import model_validator

from megabucket.config.ddp import PositiveCount, Section

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16", "float64"]
"""Dtypes that a buffer can hold."""

NumLayers = Annotated[PositiveCount, at.Le(100_000)]


class GptConfig(Section):
    """A GPT-2 style decoder: learned positions, pre-norm blocks, one fused attention projection."""

    kind: Literal["gpt"]
    """Chooses this form of the section."""

    vocab_size: PositiveCount
    """Rows of the token embedding; 256 for bytes."""

    sequence_length: PositiveCount
    """Rows of the position embedding, the longest sequence in tokens."""

    num_layers: NumLayers
    """Transformer blocks."""

    hidden_size: PositiveCount
    """Width of the residual stream; a multiple of ``num_heads``."""

    num_heads: PositiveCount
    """Attention heads per block."""

    ffn_multiplier: PositiveCount = 4
    """Width of the feed-forward layer as a multiple of ``hidden_size``."""

    ffn_size: PositiveCount | None = None
    """Width of the feed-forward layer, instead of ``ffn_multiplier``."""

    bias: bool = True
    """Whether linear layers and norms have biases."""

    tied_embeddings: bool = True
    """Whether the output projection is the token embedding; it is then counted once."""

    dtype: Dtype = "float32"
    """Dtype of the parameters."""

    @property
    def resolved_ffn_size(self) -> int:
        """Width of the feed-forward layer."""
        return self.ffn_size if self.ffn_size is not None else self.ffn_multiplier * self.hidden_size

    @model_validator(mode="after")
    def _numbers_fit(self) -> GptConfig:
        problems = head_problems(self.hidden_size, self.num_heads)
        if self.ffn_size is not None and "ffn_multiplier" in self.model_fields_set:
            problems.append(
                f"ffn_size={self.ffn_size} and ffn_multiplier={self.ffn_multiplier} both size the feed-forward layer; "
                "keep one of them"
            )
        raise_all(problems)
        return self


class LlamaConfig(Section):
    """A Llama style decoder (Llama, Mistral, Qwen2, SmolLM): rotary positions, grouped-query attention, gated feed-forward."""

    kind: Literal["llama"]
    """Chooses this form of the section."""

    vocab_size: PositiveCount
    """Rows of the token embedding and of the output projection."""

    num_layers: NumLayers
    """Transformer blocks."""

    hidden_size: PositiveCount
    """Width of the residual stream; a multiple of ``num_heads`` unless ``head_size`` is given."""

    ffn_size: PositiveCount
    """Width of the gated feed-forward layer."""

    num_heads: PositiveCount
    """Query heads per block."""

    num_kv_heads: PositiveCount | None = None
    """Key and value heads per block, a divisor of ``num_heads``. ``None``: as many as query heads."""

    head_size: PositiveCount | None = None
    """Width of a head. ``None``: ``hidden_size / num_heads``."""

    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases, as in Qwen2."""

    output_bias: bool = False
    """Whether the projection after attention has a bias."""

    mlp_bias: bool = False
    """Whether the feed-forward layer has biases."""

    tied_embeddings: bool = False
    """Whether the output projection is the token embedding; it is then counted once."""

    dtype: Dtype = "float32"
    """Dtype of the parameters."""

    @property
    def resolved_head_size(self) -> int:
        """Width of a head."""
        return self.head_size if self.head_size is not None else self.hidden_size // self.num_heads

    @model_validator(mode="after")
    def _numbers_fit(self) -> LlamaConfig:
        problems = [] if self.head_size is not None else head_problems(self.hidden_size, self.num_heads)
        raise_all(problems + kv_head_problems(self.num_heads, self.num_kv_heads))
        return self


def head_problems(hidden_size: int, num_heads: int) -> list[str]:
    """Return what is wrong with a width that the heads share, in words."""
    return [f"hidden_size={hidden_size} is not a multiple of num_heads={num_heads}"] if hidden_size % num_heads else []


def kv_head_problems(num_heads: int, num_kv_heads: int | None) -> list[str]:
    """Return what is wrong with the number of key and value heads, in words."""
    if num_kv_heads is None or num_heads % num_kv_heads == 0:
        return []
    return [f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}"]


def raise_all(problems: list[str]) -> None:
    """Raise one ``ValueError`` with all problems, if there are any."""
    if problems:
        raise ValueError("; ".join(problems))
