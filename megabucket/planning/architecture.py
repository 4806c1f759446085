"""From a description of a model to its parameters, in registration order and without their tensors.

Owns the parameter names and shapes of the built-in architectures and the reading of parameter lists. Imports torch for
``kind: factory`` only, and then builds the module on the meta device, where weights take no memory. Called by
``megabucket plan`` and ``megabucket explain``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import TypeAdapter, ValidationError

from megabucket.config.architecture import FactoryConfig, GptConfig, LlamaConfig, ParamEntry, ParamListConfig
from megabucket.config.load import explain_validation_error
from megabucket.config.text import printable, quoted
from megabucket.config.yaml_loader import YamlDocument, read_yaml
from megabucket.errors import ConfigError
from megabucket.layout import ParamSpec

if TYPE_CHECKING:
    from torch import nn

MAX_JSON_BYTES: Final = 64 * 1024 * 1024
"""Bytes of a parameter list in JSON; YAML has the limits of a config."""


def param_specs(architecture: GptConfig | LlamaConfig | ParamListConfig | FactoryConfig) -> list[ParamSpec]:
    """Return the trainable parameters of a model in registration order; tied ones once, under their first name.

    Raises:
        ConfigError: a parameter file or a factory cannot be used.
        LayoutError: a factory's parameter has a dtype that no buffer can hold.

    >>> bytes_only = GptConfig(kind="gpt", vocab_size=256, sequence_length=8, num_layers=1, hidden_size=4, num_heads=2)
    >>> [spec.name for spec in param_specs(bytes_only)][:3]
    ['token_embedding.weight', 'position_embedding.weight', 'blocks.0.attention_norm.weight']
    """
    if isinstance(architecture, GptConfig):
        return [ParamSpec(name, shape, architecture.dtype) for name, shape in _gpt(architecture)]
    if isinstance(architecture, LlamaConfig):
        return [ParamSpec(name, shape, architecture.dtype) for name, shape in _llama(architecture)]
    if isinstance(architecture, ParamListConfig):
        entries = architecture.params if architecture.params is not None else _read_entries(Path(architecture.path or ""))
        return [
            ParamSpec(entry.name, entry.shape, entry.dtype or architecture.dtype, entry.group, entry.shared_embedding)
            for entry in entries
        ]
    return _module_specs(_build_on_meta(architecture), architecture)


def _gpt(config: GptConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn = config.hidden_size, config.resolved_ffn_size
    yield "token_embedding.weight", (config.vocab_size, hidden)
    yield "position_embedding.weight", (config.sequence_length, hidden)
    for layer in range(config.num_layers):
        block = f"blocks.{layer}"
        yield from _affine(f"{block}.attention_norm", (hidden,), bias=config.bias)
        yield from _affine(f"{block}.attention.qkv", (3 * hidden, hidden), bias=config.bias)
        yield from _affine(f"{block}.attention.projection", (hidden, hidden), bias=config.bias)
        yield from _affine(f"{block}.mlp_norm", (hidden,), bias=config.bias)
        yield from _affine(f"{block}.mlp.up", (ffn, hidden), bias=config.bias)
        yield from _affine(f"{block}.mlp.down", (hidden, ffn), bias=config.bias)
    yield from _affine("final_norm", (hidden,), bias=config.bias)
    if not config.tied_embeddings:
        yield "head.weight", (config.vocab_size, hidden)


def _affine(name: str, weight_shape: tuple[int, ...], *, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", weight_shape
    if bias:
        yield f"{name}.bias", weight_shape[:1]


def _llama(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn, kv = config.hidden_size, config.ffn_size, config.kv_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        block = f"model.layers.{layer}"
        yield f"{block}.self_attn.q_proj.weight", (hidden, hidden)
        yield f"{block}.self_attn.k_proj.weight", (kv, hidden)
        yield f"{block}.self_attn.v_proj.weight", (kv, hidden)
        yield f"{block}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{block}.mlp.gate_proj.weight", (ffn, hidden)
        yield f"{block}.mlp.up_proj.weight", (ffn, hidden)
        yield f"{block}.mlp.down_proj.weight", (hidden, ffn)
        yield f"{block}.input_layernorm.weight", (hidden,)
        yield f"{block}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config.tied_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _read_entries(path: Path) -> Sequence[ParamEntry]:
    document = _read_json(path) if path.suffix == ".json" else read_yaml(path)
    if not isinstance(document.data, list) or not document.data:
        raise ConfigError(f"{document.source}: should be a list of parameters such as {{name: head.weight, shape: [4, 2]}}")
    try:
        return TypeAdapter(tuple[ParamEntry, ...]).validate_python(tuple(document.data))
    except ValidationError as error:
        raise explain_validation_error(error, data=document.data, document=document) from None


def _read_json(path: Path) -> YamlDocument:
    source = str(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > MAX_JSON_BYTES:
        raise ConfigError(f"{source}: larger than {MAX_JSON_BYTES} bytes, the limit for a parameter list")
    try:
        return YamlDocument(json.loads(raw), {}, source)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid JSON: {printable(str(error))}") from None


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
