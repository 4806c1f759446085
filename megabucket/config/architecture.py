"""``ArchitectureConfig``: which parameters a model has, said in a few numbers. No torch.

``megabucket.planning.architecture`` turns it into parameter descriptions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import annotated_types as at
from pydantic import BeforeValidator, Field, model_validator

from megabucket.config.ddp import PositiveCount, Section

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16", "float64"]
"""Dtypes that a buffer can hold."""


def _read_tuple(value: Any) -> Any:
    """Accept a YAML list where a tuple is meant."""
    return tuple(value) if isinstance(value, list) else value


def _read_scalar(value: Any) -> Any:
    """Refuse what is not one value here, with one text instead of one per type it could have been."""
    if isinstance(value, bool | int | float | str | None):
        return value
    raise ValueError("should be text, a number, true, false or null")


NumLayers = Annotated[PositiveCount, at.Le(100_000)]
Name = Annotated[str, at.Len(1, 1_000)]
Dimension = Annotated[int, at.Ge(0), at.Le(2**40)]
Argument = Annotated[bool | int | float | str | None, BeforeValidator(_read_scalar)]


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
        problems = _head_problems(self.hidden_size, self.num_heads)
        if self.ffn_size is not None and "ffn_multiplier" in self.model_fields_set:
            problems.append(
                f"ffn_size={self.ffn_size} and ffn_multiplier={self.ffn_multiplier} both size the feed-forward layer; "
                "keep one of them"
            )
        _raise_all(problems)
        return self


class LlamaConfig(Section):
    """A Llama style decoder: rotary positions, grouped-query attention, gated feed-forward, no biases."""

    kind: Literal["llama"]
    """Chooses this form of the section."""

    vocab_size: PositiveCount
    """Rows of the token embedding and of the output projection."""

    num_layers: NumLayers
    """Transformer blocks."""

    hidden_size: PositiveCount
    """Width of the residual stream; a multiple of ``num_heads``."""

    ffn_size: PositiveCount
    """Width of the gated feed-forward layer."""

    num_heads: PositiveCount
    """Query heads per block."""

    num_kv_heads: PositiveCount | None = None
    """Key and value heads per block, a divisor of ``num_heads``. ``None``: as many as query heads."""

    tied_embeddings: bool = False
    """Whether the output projection is the token embedding; it is then counted once."""

    dtype: Dtype = "float32"
    """Dtype of the parameters."""

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, which are those of the value projection."""
        heads = self.num_kv_heads if self.num_kv_heads is not None else self.num_heads
        return self.hidden_size // self.num_heads * heads

    @model_validator(mode="after")
    def _numbers_fit(self) -> LlamaConfig:
        problems = _head_problems(self.hidden_size, self.num_heads)
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            problems.append(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        _raise_all(problems)
        return self


class ParamEntry(Section):
    """One parameter of an explicit list."""

    name: Name
    """Unique in the list."""

    shape: Annotated[tuple[Dimension, ...], BeforeValidator(_read_tuple), at.MaxLen(16)]
    """Sizes of the dimensions; ``[]`` is a scalar."""

    dtype: Dtype | None = None
    """Dtype of this parameter; ``None``: the list's."""

    group: Literal["dense", "expert"] = "dense"
    """Whether it is reduced over all data-parallel ranks or over the expert group."""

    shared_embedding: bool = False
    """Whether another pipeline stage holds a copy, which gives it a bucket of its own."""


class ParamListConfig(Section):
    """An explicit list of parameters in registration order, here or in a file."""

    kind: Literal["params"]
    """Chooses this form of the section."""

    params: Annotated[tuple[ParamEntry, ...], BeforeValidator(_read_tuple), at.MinLen(1)] | None = None
    """The list itself."""

    path: Annotated[str, at.Len(1, 4_096)] | None = None
    """A JSON or YAML file with such a list, relative to the working directory."""

    dtype: Dtype = "float32"
    """Dtype of the parameters that do not say their own."""

    @model_validator(mode="after")
    def _one_source(self) -> ParamListConfig:
        if (self.params is None) == (self.path is None):
            given = "both are given" if self.params is not None else "neither is given"
            raise ValueError(f"the parameters come from params or from path, one of them, but {given}")
        return self


class FactoryConfig(Section):
    """Any torch module, built on the meta device by a function of yours; no memory is allocated for its weights."""

    kind: Literal["factory"]
    """Chooses this form of the section."""

    factory: Annotated[str, at.Len(3, 1_000)]
    """``module:callable``; the callable returns the ``torch.nn.Module``."""

    arguments: Annotated[dict[Name, Argument], at.MaxLen(100)] = Field(default_factory=dict)
    """Keyword arguments of the callable."""

    dtype: Dtype | None = None
    """Dtype of the parameters; ``None``: what the module says."""

    @model_validator(mode="after")
    def _names_a_callable(self) -> FactoryConfig:
        module, colon, name = self.factory.partition(":")
        if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
            raise ValueError(f"factory={self.factory[:100]!r} is not module:callable, for example mymodels.gpt:build")
        return self


ArchitectureConfig: TypeAlias = Annotated[
    GptConfig | LlamaConfig | ParamListConfig | FactoryConfig, Field(discriminator="kind")
]


def _head_problems(hidden_size: int, num_heads: int) -> list[str]:
    return [f"hidden_size={hidden_size} is not a multiple of num_heads={num_heads}"] if hidden_size % num_heads else []


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise ValueError("; ".join(problems))
