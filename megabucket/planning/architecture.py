"""From a description of a model to its parameters, in registration order and without their tensors.

Owns the names and shapes of the built-in decoders and the running of factories. ``kind: gpt``
has names of our own, those of ``examples/bytegpt``; all others have the names of Hugging Face's checkpoints, experts one by
one. Imports torch for ``kind: factory`` only, and then builds the module on the meta device, where weights take no memory.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final, overload

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
    if isinstance(architecture, FactoryConfig):
        return _module_specs(_build_on_meta(architecture), architecture)
    decoder = decoder_of(architecture)
    params = _Params(decoder.dtype)
    if not isinstance(decoder, GptConfig):
        _add_rotary_decoder(params, decoder)
    elif isinstance(architecture, HfConfig):
        _add_gpt(params, decoder, _HF_GPT2_NAMES, is_transposed=True)
    else:
        _add_gpt(params, decoder, _GPT_NAMES)
    return params.specs


@overload
def decoder_of(architecture: GptConfig | LlamaConfig | MoeConfig | HfConfig) -> GptConfig | LlamaConfig | MoeConfig: ...


@overload
def decoder_of(architecture: ArchitectureConfig) -> GptConfig | LlamaConfig | MoeConfig | None: ...


def decoder_of(architecture: ArchitectureConfig) -> GptConfig | LlamaConfig | MoeConfig | None:
    """Return the numbers of a decoder, reading its ``config.json`` if need be; ``None`` for what is only a list of parameters.

    Raises:
        ConfigError: the file cannot be used.
    """
    if isinstance(architecture, HfConfig):
        return read_hf_config(architecture)
    return architecture if isinstance(architecture, GptConfig | LlamaConfig | MoeConfig) else None


# Decoders #


class _Params:
    """The parameters of a decoder so far."""

    def __init__(self, dtype: str) -> None:
        self.specs: list[ParamSpec] = []
        self._dtype = dtype

    def add(self, name: str, *shape: int, bias: int = 0, group: str = "dense") -> None:
        """Add the weight of a layer, and its bias of so many elements if it has one."""
        self.specs.append(ParamSpec(f"{name}.weight", shape, self._dtype, group))
        if bias:
            self.specs.append(ParamSpec(f"{name}.bias", (bias,), self._dtype, group))


# Token and position embedding, block, its layers, final norm, head.
_GPT_LAYERS: Final = ("attention_norm", "attention.qkv", "attention.projection", "mlp_norm", "mlp.up", "mlp.down")
_GPT_NAMES: Final = ("token_embedding", "position_embedding", "blocks", _GPT_LAYERS, "final_norm", "head")
_HF_GPT2_LAYERS: Final = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
_HF_GPT2_NAMES: Final = (
    "transformer.wte",
    "transformer.wpe",
    "transformer.h",
    _HF_GPT2_LAYERS,
    "transformer.ln_f",
    "lm_head",
)


def _add_gpt(
    params: _Params,
    config: GptConfig,
    names: tuple[str, str, str, tuple[str, ...], str, str],
    *,
    is_transposed: bool = False,
) -> None:
    """Add a GPT-2 style decoder; the linear weights of Hugging Face's are (inputs, outputs)."""
    tokens, positions, blocks, layers, final_norm, head = names
    hidden, ffn = config.hidden_size, config.resolved_ffn_size
    shapes = ((hidden,), (3 * hidden, hidden), (hidden, hidden), (hidden,), (ffn, hidden), (hidden, ffn))
    params.add(tokens, config.vocab_size, hidden)
    params.add(positions, config.sequence_length, hidden)
    for block in range(config.num_layers):
        for name, shape in zip(layers, shapes, strict=True):
            ordered = reversed(shape) if is_transposed else shape
            params.add(f"{blocks}.{block}.{name}", *ordered, bias=shape[0] * config.bias)
    params.add(final_norm, hidden, bias=hidden * config.bias)
    if not config.tied_embeddings:
        params.add(head, config.vocab_size, hidden)


def _add_rotary_decoder(params: _Params, config: LlamaConfig | MoeConfig) -> None:
    """Add a Llama style decoder, or one with experts, whose routed ones are of the group ``expert``."""
    hidden = config.hidden_size
    params.add("model.embed_tokens", config.vocab_size, hidden)
    for layer in range(config.num_layers):
        block = f"model.layers.{layer}"
        if isinstance(config, MoeConfig) and config.mla is not None:
            _add_latent_attention(params, f"{block}.self_attn", config, config.mla)
        else:
            _add_attention(params, f"{block}.self_attn", config)
        if isinstance(config, LlamaConfig):
            _add_gated_mlp(params, f"{block}.mlp", hidden, config.ffn_size, has_bias=config.mlp_bias)
        elif layer < config.num_dense_layers:
            _add_gated_mlp(params, f"{block}.mlp", hidden, config.dense_ffn_size or 0)
        else:
            _add_experts(params, block, config)
        params.add(f"{block}.input_layernorm", hidden)
        params.add(f"{block}.post_attention_layernorm", hidden)
    params.add("model.norm", hidden)
    if not config.tied_embeddings:
        params.add("lm_head", config.vocab_size, hidden)


def _add_attention(params: _Params, name: str, config: LlamaConfig | MoeConfig) -> None:
    hidden, rows = config.hidden_size, config.num_heads * config.resolved_head_size
    kv_rows = (config.num_kv_heads or config.num_heads) * config.resolved_head_size
    has_qkv_bias, has_output_bias = (config.qkv_bias, config.output_bias) if isinstance(config, LlamaConfig) else (False, False)
    params.add(f"{name}.q_proj", rows, hidden, bias=rows * has_qkv_bias)
    params.add(f"{name}.k_proj", kv_rows, hidden, bias=kv_rows * has_qkv_bias)
    params.add(f"{name}.v_proj", kv_rows, hidden, bias=kv_rows * has_qkv_bias)
    params.add(f"{name}.o_proj", hidden, rows, bias=hidden * has_output_bias)


def _add_latent_attention(params: _Params, name: str, config: MoeConfig, mla: MlaConfig) -> None:
    hidden, heads = config.hidden_size, config.num_heads
    query_rows = heads * (mla.nope_head_size + mla.rope_head_size)
    if mla.query_rank is None:
        params.add(f"{name}.q_proj", query_rows, hidden)
    else:
        params.add(f"{name}.q_a_proj", mla.query_rank, hidden)
        params.add(f"{name}.q_a_layernorm", mla.query_rank)
        params.add(f"{name}.q_b_proj", query_rows, mla.query_rank)
    params.add(f"{name}.kv_a_proj_with_mqa", mla.kv_rank + mla.rope_head_size, hidden)
    params.add(f"{name}.kv_a_layernorm", mla.kv_rank)
    params.add(f"{name}.kv_b_proj", heads * (mla.nope_head_size + mla.value_head_size), mla.kv_rank)
    params.add(f"{name}.o_proj", hidden, heads * mla.value_head_size)


def _add_gated_mlp(
    params: _Params,
    name: str,
    hidden: int,
    ffn: int,
    *,
    has_bias: bool = False,
    group: str = "dense",
) -> None:
    params.add(f"{name}.gate_proj", ffn, hidden, bias=ffn * has_bias, group=group)
    params.add(f"{name}.up_proj", ffn, hidden, bias=ffn * has_bias, group=group)
    params.add(f"{name}.down_proj", hidden, ffn, bias=hidden * has_bias, group=group)


def _add_experts(params: _Params, block: str, config: MoeConfig) -> None:
    hidden, ffn = config.hidden_size, config.expert_ffn_size
    if config.names == "mixtral":
        moe = f"{block}.block_sparse_moe"
        params.add(f"{moe}.gate", config.num_experts, hidden)
        for expert in range(config.num_experts):
            for part, shape in (("w1", (ffn, hidden)), ("w2", (hidden, ffn)), ("w3", (ffn, hidden))):
                params.add(f"{moe}.experts.{expert}.{part}", *shape, group="expert")
        return
    for expert in range(config.num_experts):
        _add_gated_mlp(params, f"{block}.mlp.experts.{expert}", hidden, ffn, group="expert")
    params.add(f"{block}.mlp.gate", config.num_experts, hidden)
    if config.num_shared_experts:
        _add_gated_mlp(params, f"{block}.mlp.shared_experts", hidden, config.num_shared_experts * ffn)


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


def _module_specs(module: nn.Module, config: FactoryConfig) -> list[ParamSpec]:
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
