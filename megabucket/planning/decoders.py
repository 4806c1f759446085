"""Names and shapes of the parameters of the built-in decoders, in registration order. No torch.

``kind: gpt`` has names of our own, those of ``examples/bytegpt``. All others have the names of Hugging Face's
checkpoints, experts one by one.
"""

from __future__ import annotations

from collections.abc import Iterator

from megabucket.layout import ParamSpec
from megabucket.planning.model_config import GptConfig, LlamaConfig, MlaConfig, MoeConfig


def gpt_specs(config: GptConfig) -> Iterator[ParamSpec]:
    """Yield the parameters of a GPT-2 style decoder, under our names."""
    hidden, ffn, dtype, bias = config.hidden_size, config.resolved_ffn_size, config.dtype, config.bias
    yield ParamSpec("token_embedding.weight", (config.vocab_size, hidden), dtype)
    yield ParamSpec("position_embedding.weight", (config.sequence_length, hidden), dtype)
    for layer in range(config.num_layers):
        block = f"blocks.{layer}"
        yield from _linear(f"{block}.attention_norm", (hidden,), dtype, bias=bias)
        yield from _linear(f"{block}.attention.qkv", (3 * hidden, hidden), dtype, bias=bias)
        yield from _linear(f"{block}.attention.projection", (hidden, hidden), dtype, bias=bias)
        yield from _linear(f"{block}.mlp_norm", (hidden,), dtype, bias=bias)
        yield from _linear(f"{block}.mlp.up", (ffn, hidden), dtype, bias=bias)
        yield from _linear(f"{block}.mlp.down", (hidden, ffn), dtype, bias=bias)
    yield from _linear("final_norm", (hidden,), dtype, bias=bias)
    if not config.tied_embeddings:
        yield ParamSpec("head.weight", (config.vocab_size, hidden), dtype)


def hf_gpt2_specs(config: GptConfig) -> Iterator[ParamSpec]:
    """Yield the parameters of Hugging Face's ``GPT2LMHeadModel``, whose linear weights are (inputs, outputs)."""
    hidden, ffn, dtype = config.hidden_size, config.resolved_ffn_size, config.dtype
    yield ParamSpec("transformer.wte.weight", (config.vocab_size, hidden), dtype)
    yield ParamSpec("transformer.wpe.weight", (config.sequence_length, hidden), dtype)
    for layer in range(config.num_layers):
        block = f"transformer.h.{layer}"
        parts = (
            ("ln_1", (hidden,)),
            ("attn.c_attn", (hidden, 3 * hidden)),
            ("attn.c_proj", (hidden, hidden)),
            ("ln_2", (hidden,)),
            ("mlp.c_fc", (hidden, ffn)),
            ("mlp.c_proj", (ffn, hidden)),
        )
        for name, shape in parts:
            yield ParamSpec(f"{block}.{name}.weight", shape, dtype)
            yield ParamSpec(f"{block}.{name}.bias", shape[-1:], dtype)
    yield from _linear("transformer.ln_f", (hidden,), dtype, bias=True)
    if not config.tied_embeddings:
        yield ParamSpec("lm_head.weight", (config.vocab_size, hidden), dtype)


def llama_specs(config: LlamaConfig) -> Iterator[ParamSpec]:
    """Yield the parameters of a Llama style decoder."""
    hidden, ffn, dtype, mlp_bias = config.hidden_size, config.ffn_size, config.dtype, config.mlp_bias
    yield ParamSpec("model.embed_tokens.weight", (config.vocab_size, hidden), dtype)
    for layer in range(config.num_layers):
        block = f"model.layers.{layer}"
        yield from _attention(f"{block}.self_attn", config, qkv_bias=config.qkv_bias, output_bias=config.output_bias)
        yield from _gated_mlp(f"{block}.mlp", hidden, ffn, dtype, bias=mlp_bias)
        yield from _norms(block, hidden, dtype)
    yield ParamSpec("model.norm.weight", (hidden,), dtype)
    if not config.tied_embeddings:
        yield ParamSpec("lm_head.weight", (config.vocab_size, hidden), dtype)


def moe_specs(config: MoeConfig) -> Iterator[ParamSpec]:
    """Yield the parameters of a decoder with experts; those of routed experts are of the group ``expert``."""
    hidden, dtype = config.hidden_size, config.dtype
    yield ParamSpec("model.embed_tokens.weight", (config.vocab_size, hidden), dtype)
    for layer in range(config.num_layers):
        block = f"model.layers.{layer}"
        if config.mla is not None:
            yield from _latent_attention(f"{block}.self_attn", config, config.mla)
        else:
            yield from _attention(f"{block}.self_attn", config)
        if layer < config.num_dense_layers:
            yield from _gated_mlp(f"{block}.mlp", hidden, config.dense_ffn_size or 0, dtype)
        elif config.names == "mixtral":
            yield from _mixtral_experts(f"{block}.block_sparse_moe", config)
        else:
            yield from _deepseek_experts(f"{block}.mlp", config)
        yield from _norms(block, hidden, dtype)
    yield ParamSpec("model.norm.weight", (hidden,), dtype)
    if not config.tied_embeddings:
        yield ParamSpec("lm_head.weight", (config.vocab_size, hidden), dtype)


def _linear(name: str, shape: tuple[int, ...], dtype: str, *, bias: bool = False) -> Iterator[ParamSpec]:
    yield ParamSpec(f"{name}.weight", shape, dtype)
    if bias:
        yield ParamSpec(f"{name}.bias", shape[:1], dtype)


def _norms(block: str, hidden: int, dtype: str) -> Iterator[ParamSpec]:
    yield ParamSpec(f"{block}.input_layernorm.weight", (hidden,), dtype)
    yield ParamSpec(f"{block}.post_attention_layernorm.weight", (hidden,), dtype)


def _attention(
    name: str, config: LlamaConfig | MoeConfig, *, qkv_bias: bool = False, output_bias: bool = False
) -> Iterator[ParamSpec]:
    hidden, dtype, head = config.hidden_size, config.dtype, config.resolved_head_size
    num_kv_heads = config.num_kv_heads if config.num_kv_heads is not None else config.num_heads
    yield from _linear(f"{name}.q_proj", (config.num_heads * head, hidden), dtype, bias=qkv_bias)
    yield from _linear(f"{name}.k_proj", (num_kv_heads * head, hidden), dtype, bias=qkv_bias)
    yield from _linear(f"{name}.v_proj", (num_kv_heads * head, hidden), dtype, bias=qkv_bias)
    yield from _linear(f"{name}.o_proj", (hidden, config.num_heads * head), dtype, bias=output_bias)


def _latent_attention(name: str, config: MoeConfig, mla: MlaConfig) -> Iterator[ParamSpec]:
    hidden, dtype, heads = config.hidden_size, config.dtype, config.num_heads
    query_rows = heads * (mla.nope_head_size + mla.rope_head_size)
    if mla.query_rank is None:
        yield ParamSpec(f"{name}.q_proj.weight", (query_rows, hidden), dtype)
    else:
        yield ParamSpec(f"{name}.q_a_proj.weight", (mla.query_rank, hidden), dtype)
        yield ParamSpec(f"{name}.q_a_layernorm.weight", (mla.query_rank,), dtype)
        yield ParamSpec(f"{name}.q_b_proj.weight", (query_rows, mla.query_rank), dtype)
    yield ParamSpec(f"{name}.kv_a_proj_with_mqa.weight", (mla.kv_rank + mla.rope_head_size, hidden), dtype)
    yield ParamSpec(f"{name}.kv_a_layernorm.weight", (mla.kv_rank,), dtype)
    yield ParamSpec(f"{name}.kv_b_proj.weight", (heads * (mla.nope_head_size + mla.value_head_size), mla.kv_rank), dtype)
    yield ParamSpec(f"{name}.o_proj.weight", (hidden, heads * mla.value_head_size), dtype)


def _gated_mlp(
    name: str, hidden: int, ffn: int, dtype: str, *, bias: bool = False, group: str = "dense"
) -> Iterator[ParamSpec]:
    for part, shape in (("gate_proj", (ffn, hidden)), ("up_proj", (ffn, hidden)), ("down_proj", (hidden, ffn))):
        yield ParamSpec(f"{name}.{part}.weight", shape, dtype, group)
        if bias:
            yield ParamSpec(f"{name}.{part}.bias", shape[:1], dtype, group)


def _mixtral_experts(name: str, config: MoeConfig) -> Iterator[ParamSpec]:
    hidden, ffn, dtype = config.hidden_size, config.expert_ffn_size, config.dtype
    yield ParamSpec(f"{name}.gate.weight", (config.num_experts, hidden), dtype)
    for expert in range(config.num_experts):
        for part, shape in (("w1", (ffn, hidden)), ("w2", (hidden, ffn)), ("w3", (ffn, hidden))):
            yield ParamSpec(f"{name}.experts.{expert}.{part}.weight", shape, dtype, "expert")


def _deepseek_experts(name: str, config: MoeConfig) -> Iterator[ParamSpec]:
    hidden, ffn, dtype = config.hidden_size, config.expert_ffn_size, config.dtype
    for expert in range(config.num_experts):
        yield from _gated_mlp(f"{name}.experts.{expert}", hidden, ffn, dtype, group="expert")
    yield ParamSpec(f"{name}.gate.weight", (config.num_experts, hidden), dtype)
    if config.num_shared_experts:
        yield from _gated_mlp(f"{name}.shared_experts", hidden, config.num_shared_experts * ffn, dtype)
