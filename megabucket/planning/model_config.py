"""``ArchitectureConfig``: which parameters a model has, by the ``kind`` of its description. No torch.

A decoder in a few numbers, or where the parameters come from: a list, a function, a config.json. ``planning.architecture``
turns them into descriptions of parameters.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

import annotated_types as at
from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from megabucket.config.ddp import Count, PositiveCount, Section, read_tuple
from megabucket.planning.documents import find_file, read_yaml

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16", "float64"]
"""Dtypes that a buffer can hold."""

NumLayers = Annotated[PositiveCount, at.Le(100_000)]


def _read_scalar(value: Any) -> Any:
    """Refuse lists and mappings with one text instead of one per possible type."""
    if isinstance(value, bool | int | float | str | None):
        return value
    raise ValueError("should be text, a number, true, false or null")


Name = Annotated[str, at.Len(1, 1_000)]
Path = Annotated[str, at.Len(1, 4_096)]
Dimension = Annotated[int, at.Ge(0), at.Le(2**40)]
Argument = Annotated[bool | int | float | str | None, BeforeValidator(_read_scalar)]


class _DecoderConfig(Section):
    """What all built-in decoders have."""

    vocab_size: PositiveCount
    """Rows of the token embedding, and of the output projection; 256 for bytes."""

    num_layers: NumLayers
    """Transformer blocks."""

    hidden_size: PositiveCount
    """Width of the residual stream; a multiple of ``num_heads`` unless the width of a head is given."""

    num_heads: PositiveCount
    """Attention heads (query heads) per block."""

    tied_embeddings: bool = False
    """Whether the output projection is the token embedding; it is then counted once."""

    dtype: Dtype = "float32"
    """Dtype of the parameters."""

    def _problems(self) -> Iterator[str]:
        """Yield contradictions between the numbers."""
        if self.hidden_size % self.num_heads:
            yield f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}"

    @model_validator(mode="after")
    def _numbers_fit(self) -> Self:
        if problems := list(self._problems()):
            raise ValueError("; ".join(problems))
        return self


class GptConfig(_DecoderConfig):
    """A GPT-2 style decoder: learned positions, pre-norm blocks, one fused attention projection."""

    kind: Literal["gpt"]
    """Chooses this form of the section."""

    sequence_length: PositiveCount
    """Rows of the position embedding, the longest sequence in tokens."""

    ffn_size: PositiveCount | None = None
    """Width of the feed-forward layer. ``None``: ``4 * hidden_size``."""

    bias: bool = True
    """Whether linear layers and norms have biases."""

    tied_embeddings: bool = True
    """Whether the output projection is the token embedding; it is then counted once."""

    @property
    def resolved_ffn_size(self) -> int:
        """Width of the feed-forward layer."""
        return self.ffn_size if self.ffn_size is not None else 4 * self.hidden_size


class _RotaryConfig(_DecoderConfig):
    """Attention of the decoders with rotary positions."""

    num_kv_heads: PositiveCount | None = None
    """Key and value heads per block, a divisor of ``num_heads``. ``None``: as many as query heads. Not with ``mla``."""

    head_size: PositiveCount | None = None
    """Width of a head. ``None``: ``hidden_size / num_heads``. Not with ``mla``."""

    qk_norm: bool = False
    """Whether the queries and the keys of a head pass a norm of its width, as in Qwen3. Not with ``mla``."""

    @property
    def resolved_head_size(self) -> int:
        """Width of a head of plain attention."""
        return self.head_size if self.head_size is not None else self.hidden_size // self.num_heads

    def _problems(self) -> Iterator[str]:
        if self.head_size is None:
            yield from super()._problems()
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            yield f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"


class LlamaConfig(_RotaryConfig):
    """A Llama style decoder (Llama, Mistral, Qwen2, Qwen3): rotary positions, grouped-query attention, gated feed-forward."""

    kind: Literal["llama"]
    """Chooses this form of the section."""

    ffn_size: PositiveCount
    """Width of the gated feed-forward layer."""

    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases, as in Qwen2."""

    output_bias: bool = False
    """Whether the projection after attention has a bias."""

    mlp_bias: bool = False
    """Whether the feed-forward layer has biases."""


class MlaConfig(Section):
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values are made from one small vector per token."""

    kv_rank: PositiveCount
    """Width of the vector that keys and values are made from (``kv_lora_rank``)."""

    query_rank: PositiveCount | None = None
    """Width of the vector that queries are made from (``q_lora_rank``). ``None``: queries are projected directly."""

    nope_head_size: PositiveCount
    """Width of a head's query and key without positions (``qk_nope_head_dim``)."""

    rope_head_size: PositiveCount
    """Width of a head's query and key with rotary positions, the keys' shared by all heads (``qk_rope_head_dim``)."""

    value_head_size: PositiveCount
    """Width of a head's value (``v_head_dim``)."""


class MoeConfig(_RotaryConfig):
    """A decoder whose feed-forward layers are experts: Mixtral style, or DeepSeek style with shared and fine-grained experts.

    Parameters of routed experts are of the group ``expert``; routers and shared experts are dense.
    """

    kind: Literal["moe"]
    """Chooses this form of the section."""

    mla: MlaConfig | None = None
    """Multi-head latent attention instead of plain attention."""

    num_experts: PositiveCount
    """Routed experts per block."""

    num_experts_per_token: PositiveCount
    """Routed experts that each token passes. Changes no parameter, but the time a token takes."""

    expert_ffn_size: PositiveCount
    """Width of the gated feed-forward layer of one expert."""

    num_shared_experts: Count = 0
    """Experts that every token passes; they are one feed-forward layer as wide as all of them."""

    num_dense_layers: Count = 0
    """Blocks at the beginning with one feed-forward layer instead of experts."""

    dense_ffn_size: PositiveCount | None = None
    """Width of the feed-forward layer of those blocks."""

    names: Literal["deepseek", "mixtral"] = "deepseek"
    """Whose parameter names: ``mlp.experts.0.gate_proj`` or ``block_sparse_moe.experts.0.w1``."""

    def _problems(self) -> Iterator[str]:
        if self.mla is None:
            yield from super()._problems()
        for name in ("num_kv_heads", "head_size", "qk_norm") if self.mla is not None else ():
            if getattr(self, name):
                yield f"{name} belongs to plain attention and is not read with mla; drop one of them"
        if self.num_experts_per_token > self.num_experts:
            yield f"num_experts_per_token={self.num_experts_per_token} is more than num_experts={self.num_experts}"
        if self.num_dense_layers > self.num_layers:
            yield f"num_dense_layers={self.num_dense_layers} is more than num_layers={self.num_layers}"
        if (self.num_dense_layers > 0) != (self.dense_ffn_size is not None):
            yield (
                f"num_dense_layers={self.num_dense_layers} and dense_ffn_size={self.dense_ffn_size} belong together; "
                "give both, or neither"
            )
        if self.names == "mixtral" and (self.mla is not None or self.num_shared_experts or self.num_dense_layers):
            yield "names=mixtral knows neither mla, nor shared experts, nor dense layers; use names=deepseek"


class ParamEntry(Section):
    """One parameter of an explicit list."""

    name: Name
    """Unique in the list."""

    shape: Annotated[tuple[Dimension, ...], BeforeValidator(read_tuple), at.MaxLen(16)]
    """Sizes of the dimensions; ``[]`` is a scalar."""

    dtype: Dtype | None = None
    """Dtype of this parameter; ``None``: the list's."""

    group: Name = "dense"
    """The reduction group: ``dense`` for all data-parallel ranks, or any other name, whose ranks ``group_sizes`` counts."""

    shared_embedding: bool = False
    """Whether another pipeline stage holds a copy, which gives it a bucket of its own."""


class ParamListConfig(Section):
    """An explicit list of parameters in registration order."""

    kind: Literal["params"]
    """Chooses this form of the section."""

    params: Annotated[tuple[ParamEntry, ...], BeforeValidator(read_tuple), at.MinLen(1)]
    """The list itself."""

    dtype: Dtype = "float32"
    """Dtype of the parameters that do not say their own."""


class FactoryConfig(Section):
    """Any torch module, built on the meta device by a function of yours; no memory is allocated for its weights."""

    kind: Literal["factory"]
    """Chooses this form of the section."""

    factory: Annotated[str, at.Len(3, 1_000)]
    """``module:callable``; the callable returns the ``torch.nn.Module``."""

    arguments: Annotated[dict[Name, Argument], at.MaxLen(100)] = Field(default_factory=dict)
    """Keyword arguments of the callable."""

    dtype: Dtype | None = None
    """Dtype of the parameters; ``None``: the module's own."""

    @model_validator(mode="after")
    def _names_a_callable(self) -> FactoryConfig:
        module, colon, name = self.factory.partition(":")
        if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
            raise ValueError(f"factory={self.factory[:100]!r} is not module:callable, for example mymodels.gpt:build")
        return self


class HfConfig(Section):
    """The ``config.json`` of a Hugging Face model. Only the file is read: neither its weights nor its library are needed."""

    kind: Literal["hf_config"]
    """Chooses this form of the section."""

    path: Path
    """The file, relative to the working directory."""

    dtype: Dtype | None = None
    """Dtype of the parameters; ``None``: the file's ``dtype`` or ``torch_dtype``, else float32."""


def model_section(text: str) -> dict[str, Any] | None:
    """Return the section of a model that is named by a ``config.json`` or by ``module:function``, or ``None``."""
    if text.endswith(".json"):
        return {"kind": "hf_config", "path": text}
    if ":" in text and not text.endswith((".yaml", ".yml")) and not os.path.exists(text):  # noqa: PTH110 - takes any text
        return {"kind": "factory", "factory": text}
    return None


def _read_short(value: Any) -> Any:
    """Accept text for the section that it names; a preset or another YAML file stands for its ``model`` section."""
    if not isinstance(value, str):
        return value
    if section := model_section(value):
        return section
    data = read_yaml(find_file(value, kind="models")).data
    return data.get("model") if isinstance(data, dict) else data


ArchitectureConfig: TypeAlias = Annotated[
    Annotated[GptConfig | LlamaConfig | MoeConfig | HfConfig | ParamListConfig | FactoryConfig, Field(discriminator="kind")],
    BeforeValidator(_read_short),
]
