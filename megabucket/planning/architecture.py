"""From a description of a model to its parameters, in registration order and without their tensors.

Owns the reading of parameter lists and the running of factories; the built-in architectures are in ``decoders``. Imports torch
for ``kind: factory`` only, and then builds the module on the meta device, where weights take no memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, overload

from pydantic import TypeAdapter, ValidationError

from megabucket.errors import ConfigError, printable, quoted
from megabucket.layout import ParamSpec
from megabucket.planning.decoders import gpt_specs, hf_gpt2_specs, llama_specs, moe_specs
from megabucket.planning.hf_config import read_hf_config
from megabucket.planning.json_file import read_json
from megabucket.planning.load import explain_validation_error
from megabucket.planning.model_config import (
    ArchitectureConfig,
    FactoryConfig,
    GptConfig,
    HfConfig,
    LlamaConfig,
    MoeConfig,
    ParamEntry,
    ParamListConfig,
)
from megabucket.planning.yaml_loader import read_yaml

if TYPE_CHECKING:
    from torch import nn

MAX_JSON_BYTES: Final = 64 * 1024 * 1024
"""Bytes of a parameter list in JSON; YAML has the limits of a config."""


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
        entries = architecture.params if architecture.params is not None else _read_entries(Path(architecture.path or ""))
        return [
            ParamSpec(entry.name, entry.shape, entry.dtype or architecture.dtype, entry.group, entry.shared_embedding)
            for entry in entries
        ]
    if isinstance(architecture, FactoryConfig):
        return _module_specs(_build_on_meta(architecture), architecture)
    decoder = decoder_of(architecture)
    if isinstance(decoder, GptConfig):
        return list(hf_gpt2_specs(decoder) if isinstance(architecture, HfConfig) else gpt_specs(decoder))
    if isinstance(decoder, LlamaConfig):
        return list(llama_specs(decoder))
    return list(moe_specs(decoder))


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


def _read_entries(path: Path) -> Sequence[ParamEntry]:
    document = read_json(path, max_bytes=MAX_JSON_BYTES, what="a parameter list") if path.suffix == ".json" else read_yaml(path)
    if not isinstance(document.data, list) or not document.data:
        raise ConfigError(f"{document.source}: should be a list of parameters such as {{name: head.weight, shape: [4, 2]}}")
    try:
        return TypeAdapter(tuple[ParamEntry, ...]).validate_python(tuple(document.data))
    except ValidationError as error:
        raise explain_validation_error(error, data=document.data, document=document) from None


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
