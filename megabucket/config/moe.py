"""``MoeConfig``: a decoder with experts, said in a few numbers. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from megabucket.config.ddp import Count, PositiveCount, Section
from megabucket.config.decoders import Dtype, NumLayers, head_problems, kv_head_problems, raise_all


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


class MoeConfig(Section):
    """A decoder whose feed-forward layers are experts: Mixtral style, or DeepSeek style with shared and fine-grained experts.

    Parameters of routed experts are of the group ``expert``; routers and shared experts are dense.
    """

    kind: Literal["moe"]
    """Chooses this form of the section."""

    vocab_size: PositiveCount
    """Rows of the token embedding and of the output projection."""

    num_layers: NumLayers
    """Transformer blocks."""

    hidden_size: PositiveCount
    """Width of the residual stream."""

    num_heads: PositiveCount
    """Query heads per block."""

    num_kv_heads: PositiveCount | None = None
    """Key and value heads per block, a divisor of ``num_heads``. ``None``: as many as query heads. Not with ``mla``."""

    head_size: PositiveCount | None = None
    """Width of a head. ``None``: ``hidden_size / num_heads``. Not with ``mla``."""

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

    tied_embeddings: bool = False
    """Whether the output projection is the token embedding; it is then counted once."""

    names: Literal["deepseek", "mixtral"] = "deepseek"
    """Whose parameter names: ``mlp.experts.0.gate_proj`` or ``block_sparse_moe.experts.0.w1``."""

    dtype: Dtype = "float32"
    """Dtype of the parameters."""

    @property
    def resolved_head_size(self) -> int:
        """Width of a head of plain attention."""
        return self.head_size if self.head_size is not None else self.hidden_size // self.num_heads

    @model_validator(mode="after")
    def _numbers_fit(self) -> MoeConfig:
        problems = []
        if self.mla is None:
            problems += [] if self.head_size is not None else head_problems(self.hidden_size, self.num_heads)
            problems += kv_head_problems(self.num_heads, self.num_kv_heads)
        else:
            given = [name for name in ("num_kv_heads", "head_size") if getattr(self, name) is not None]
            problems += [f"{name} belongs to plain attention and says nothing beside mla; drop one of them" for name in given]
        if self.num_experts_per_token > self.num_experts:
            problems.append(f"num_experts_per_token={self.num_experts_per_token} is more than num_experts={self.num_experts}")
        if self.num_dense_layers > self.num_layers:
            problems.append(f"num_dense_layers={self.num_dense_layers} is more than num_layers={self.num_layers}")
        if (self.num_dense_layers > 0) != (self.dense_ffn_size is not None):
            problems.append(
                f"num_dense_layers={self.num_dense_layers} and dense_ffn_size={self.dense_ffn_size} belong together; "
                "give both, or neither"
            )
        if self.names == "mixtral" and (self.mla is not None or self.num_shared_experts or self.num_dense_layers):
            problems.append("names=mixtral knows neither mla, nor shared experts, nor dense layers; use names=deepseek")
        raise_all(problems)
        return self
