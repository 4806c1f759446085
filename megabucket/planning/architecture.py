"""From a description of a model to its parameters, in registration order and without their tensors.

Owns the names and shapes of the built-in decoders and the running of factories. ``kind: gpt``
has names of our own, those of ``examples/bytegpt``; all others have the names of Hugging Face's checkpoints, experts one by
one. Imports torch for ``kind: factory`` only, and then builds the module on the meta device, where weights take no memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from megabucket.errors import ConfigError, printable, quoted
from megabucket.layout import ParamSpec
from megabucket.planning.hf_config import read_hf_config
from megabucket.planning.model_config import (
    ArchitectureConfig,
    FactoryConfig,
    GptConfig,
    HfConfig,
    LlamaConfig,
    MlaConfig,
    MoeConfig,
    ParamListConfig,
)

if TYPE_CHECKING:
    from torch import nn


def param_specs(architecture: ArchitectureConfig) -> list[ParamSpec]:
    """Return the trainable parameters of a model in registration order; tied ones once, under their first name.

    Raises:
        ConfigError: a file or a factory cannot be used.
        LayoutError: a factory's parameter has a dtype that no buffer can hold.

    >>> bytes_only = GptConfig(kind="gpt", vocab_size=256, sequence_length=8, num_layers=1, hidden_size=4, num_heads=2)
    >>> [spec.name for spec in param_specs(bytes_only)][:3]
    ['token_embedding.weight', 'position_embedding.weight', 'blocks.0.attention_norm.weight']
    """
    if isinstance(architecture, ParamListConfig):
        return [
            ParamSpec(entry.name, entry.shape, entry.dtype or architecture.dtype, entry.group, entry.shared_embedding)
            for entry in architecture.params
        ]
    decoder = decoder_of(architecture)
    if decoder is None:
        return _module_specs(architecture)  # type: ignore[arg-type]
    is_hf = isinstance(architecture, HfConfig)
    layers = _gpt(decoder, is_hf=is_hf) if isinstance(decoder, GptConfig) else _rotary_decoder(decoder)
    specs = []
    for name, shape, bias, group in layers:
        specs.append(ParamSpec(f"{name}.weight", shape, decoder.dtype, group))
        if bias:
            specs.append(ParamSpec(f"{name}.bias", (bias,), decoder.dtype, group))
    return specs


def decoder_of(architecture: ArchitectureConfig) -> GptConfig | LlamaConfig | MoeConfig | None:
    """Return the numbers of a decoder, reading its ``config.json`` if need be; ``None`` for a list or a factory.

    Raises:
        ConfigError: the file cannot be used.
    """
    if isinstance(architecture, HfConfig):
        return read_hf_config(architecture)
    return None if isinstance(architecture, ParamListConfig | FactoryConfig) else architecture


# Decoders #


class _Layer(NamedTuple):
    """The weight of a layer, and its bias of so many elements if it has one."""

    name: str
    shape: tuple[int, ...]
    bias: int = 0
    group: str = "dense"


# Token and position embedding, block, its layers, final norm, head.
_GPT_LAYERS: Final = ("attention_norm", "attention.qkv", "attention.projection", "mlp_norm", "mlp.up", "mlp.down")
_GPT_NAMES: Final = ("token_embedding", "position_embedding", "blocks", _GPT_LAYERS, "final_norm", "head")
_HF_LAYERS: Final = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
_HF_NAMES: Final = ("transformer.wte", "transformer.wpe", "transformer.h", _HF_LAYERS, "transformer.ln_f", "lm_head")


def _gpt(config: GptConfig, *, is_hf: bool) -> Iterator[_Layer]:
    """Yield a GPT-2 style decoder; the linear weights of Hugging Face's are (inputs, outputs)."""
    tokens, positions, blocks, layers, final_norm, head = _HF_NAMES if is_hf else _GPT_NAMES
    hidden, ffn = config.hidden_size, config.resolved_ffn_size
    shapes = ((hidden,), (3 * hidden, hidden), (hidden, hidden), (hidden,), (ffn, hidden), (hidden, ffn))
    yield _Layer(tokens, (config.vocab_size, hidden))
    yield _Layer(positions, (config.sequence_length, hidden))
    for block in range(config.num_layers):
        for name, shape in zip(layers, shapes, strict=True):
            yield _Layer(f"{blocks}.{block}.{name}", shape[::-1] if is_hf else shape, shape[0] * config.bias)
    yield _Layer(final_norm, (hidden,), hidden * config.bias)
    if not config.tied_embeddings:
        yield _Layer(head, (config.vocab_size, hidden))


def _rotary_decoder(config: LlamaConfig | MoeConfig) -> Iterator[_Layer]:
    """Yield a Llama style decoder, or one with experts, whose routed ones are of the group ``expert``."""
    hidden = config.hidden_size
    norms = [_Layer("input_layernorm", (hidden,)), _Layer("post_attention_layernorm", (hidden,))]
    if isinstance(config, LlamaConfig):
        attention, num_dense_layers, experts = _attention(config), config.num_layers, []
        dense = _gated_mlp("mlp", hidden, config.ffn_size, has_bias=config.mlp_bias)
    else:
        attention = _attention(config) if config.mla is None else _latent_attention(config, config.mla)
        num_dense_layers, experts = config.num_dense_layers, list(_experts(config))
        dense = _gated_mlp("mlp", hidden, config.dense_ffn_size or 0)
    yield _Layer("model.embed_tokens", (config.vocab_size, hidden))
    for index in range(config.num_layers):
        for layer in (*attention, *(dense if index < num_dense_layers else experts), *norms):
            yield layer._replace(name=f"model.layers.{index}.{layer.name}")
    yield _Layer("model.norm", (hidden,))
    if not config.tied_embeddings:
        yield _Layer("lm_head", (config.vocab_size, hidden))


def _attention(config: LlamaConfig | MoeConfig) -> list[_Layer]:
    hidden, rows = config.hidden_size, config.num_heads * config.resolved_head_size
    kv_rows = (config.num_kv_heads or config.num_heads) * config.resolved_head_size
    qkv_bias, output_bias = (config.qkv_bias, config.output_bias) if isinstance(config, LlamaConfig) else (False, False)
    return [
        _Layer("self_attn.q_proj", (rows, hidden), rows * qkv_bias),
        _Layer("self_attn.k_proj", (kv_rows, hidden), kv_rows * qkv_bias),
        _Layer("self_attn.v_proj", (kv_rows, hidden), kv_rows * qkv_bias),
        _Layer("self_attn.o_proj", (hidden, rows), hidden * output_bias),
        *(_Layer(f"self_attn.{name}", (config.resolved_head_size,)) for name in ("q_norm", "k_norm") if config.qk_norm),
    ]


def _latent_attention(config: MoeConfig, mla: MlaConfig) -> list[_Layer]:
    hidden, heads = config.hidden_size, config.num_heads
    query_rows = heads * (mla.nope_head_size + mla.rope_head_size)
    query = [_Layer("self_attn.q_proj", (query_rows, hidden))]
    if mla.query_rank is not None:
        query = [
            _Layer("self_attn.q_a_proj", (mla.query_rank, hidden)),
            _Layer("self_attn.q_a_layernorm", (mla.query_rank,)),
            _Layer("self_attn.q_b_proj", (query_rows, mla.query_rank)),
        ]
    return [
        *query,
        _Layer("self_attn.kv_a_proj_with_mqa", (mla.kv_rank + mla.rope_head_size, hidden)),
        _Layer("self_attn.kv_a_layernorm", (mla.kv_rank,)),
        _Layer("self_attn.kv_b_proj", (heads * (mla.nope_head_size + mla.value_head_size), mla.kv_rank)),
        _Layer("self_attn.o_proj", (hidden, heads * mla.value_head_size)),
    ]


def _gated_mlp(name: str, hidden: int, ffn: int, *, has_bias: bool = False, group: str = "dense") -> list[_Layer]:
    return [
        _Layer(f"{name}.gate_proj", (ffn, hidden), ffn * has_bias, group),
        _Layer(f"{name}.up_proj", (ffn, hidden), ffn * has_bias, group),
        _Layer(f"{name}.down_proj", (hidden, ffn), hidden * has_bias, group),
    ]


def _experts(config: MoeConfig) -> Iterator[_Layer]:
    hidden, ffn = config.hidden_size, config.expert_ffn_size
    if config.names == "mixtral":
        yield _Layer("block_sparse_moe.gate", (config.num_experts, hidden))
        for expert in range(config.num_experts):
            for part, shape in (("w1", (ffn, hidden)), ("w2", (hidden, ffn)), ("w3", (ffn, hidden))):
                yield _Layer(f"block_sparse_moe.experts.{expert}.{part}", shape, group="expert")
        return
    for expert in range(config.num_experts):
        yield from _gated_mlp(f"mlp.experts.{expert}", hidden, ffn, group="expert")
    yield _Layer("mlp.gate", (config.num_experts, hidden))
    if config.num_shared_experts:
        yield from _gated_mlp("mlp.shared_experts", hidden, config.num_shared_experts * ffn)


# Factories #


def _build_on_meta(config: FactoryConfig) -> nn.Module:
    import torch
    from torch import nn

    module_name, _, attribute = config.factory.partition(":")
    try:
        factory = importlib.import_module(module_name)
        for part in attribute.split("."):
            factory = getattr(factory, part)
        with torch.device("meta"):
            module = factory(**config.arguments)  # type: ignore[operator]
    except Exception as error:
        # The user's own code runs here, so anything can happen; its traceback stays attached as the cause.
        raise ConfigError(
            f"model.factory={config.factory} cannot be used: {type(error).__name__}: {printable(str(error))}. It is imported "
            "and called with model.arguments on the meta device; check that Python finds it (PYTHONPATH) and that it builds."
        ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model.factory={config.factory} returned {type(module).__name__}; it must return a torch.nn.Module")
    return module


def _module_specs(config: FactoryConfig) -> list[ParamSpec]:
    module = _build_on_meta(config)
    specs = [
        ParamSpec(
            name,
            tuple(parameter.shape),
            config.dtype or str(parameter.dtype).removeprefix("torch."),
            # The attributes by which Megatron's layers mark their parameters.
            group="dense" if getattr(parameter, "allreduce", True) else "expert",
            shared_embedding=bool(getattr(parameter, "shared_embedding", False)),
        )
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    if not specs:
        raise ConfigError(
            f"model.factory={config.factory} returned {quoted(type(module).__name__)} without trainable parameters"
        )
    return specs
