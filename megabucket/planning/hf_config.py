"""Read the ``config.json`` of a Hugging Face model as one of our decoders. No torch, no transformers.

Knows per ``model_type`` which keys of the file are which of our fields; a key that is null or absent leaves our default, and
a notice says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from pydantic import ValidationError

from megabucket.config.ddp import Section
from megabucket.errors import ConfigError, log_once, printable
from megabucket.planning.documents import MAX_BYTES, read_json
from megabucket.planning.model_config import GptConfig, HfConfig, LlamaConfig, MoeConfig

_Keys: TypeAlias = Mapping[str, "str | _Keys"]

# Our field -> the key in the file; fields that a section does not have are left out.
_LLAMA: Final[_Keys] = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_size": "head_dim",
        "ffn_size": "intermediate_size",
        "num_experts_per_token": "num_experts_per_tok",
        "tied_embeddings": "tie_word_embeddings",
    }
)
_GPT2: Final[_Keys] = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "sequence_length": "n_positions",
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_heads": "n_head",
        "ffn_size": "n_inner",
        "tied_embeddings": "tie_word_embeddings",
    }
)
_ATTENTION_BIASES: Final[_Keys] = MappingProxyType({"qkv_bias": "attention_bias", "output_bias": "attention_bias"})
_MIXTRAL: Final[_Keys] = MappingProxyType({"expert_ffn_size": "intermediate_size", "num_experts": "num_local_experts"})
_QWEN3_MOE: Final[_Keys] = MappingProxyType({"expert_ffn_size": "moe_intermediate_size", "num_experts": "num_experts"})
_DEEPSEEK: Final[_Keys] = MappingProxyType(
    {
        "expert_ffn_size": "moe_intermediate_size",
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "num_dense_layers": "first_k_dense_replace",
        "dense_ffn_size": "intermediate_size",
        "mla": {
            "query_rank": "q_lora_rank",
            "kv_rank": "kv_lora_rank",
            "nope_head_size": "qk_nope_head_dim",
            "rope_head_size": "qk_rope_head_dim",
            "value_head_size": "v_head_dim",
        },
    }
)


class _Reader(NamedTuple):
    """How to read the files of one ``model_type``."""

    section: type[GptConfig | LlamaConfig | MoeConfig]
    keys: _Keys
    given: Mapping[str, Any]
    """The library's defaults that differ from ours."""
    only: Mapping[str, Any] = MappingProxyType({})
    """Keys of the file with the one value, also its default, for which we know the parameters."""
    renamed: Mapping[str, str] = MappingProxyType({})
    """Keys of some files -> the same in others."""


# DeepSeek's files have the keys of plain attention as well, without a meaning.
_PLAIN_ATTENTION: Final = ("num_kv_heads", "head_size")
_DEEPSEEK_READER: Final = _Reader(
    MoeConfig,
    {**{name: key for name, key in _LLAMA.items() if name not in _PLAIN_ATTENTION}, **_DEEPSEEK},
    {"kind": "moe"},
    {"moe_layer_freq": 1, "attention_bias": False},
)
_READERS: Final[Mapping[str, _Reader]] = MappingProxyType(
    {
        "gpt2": _Reader(GptConfig, _GPT2, {"kind": "gpt"}, {"add_cross_attention": False}),
        "llama": _Reader(LlamaConfig, {**_LLAMA, **_ATTENTION_BIASES, "mlp_bias": "mlp_bias"}, {"kind": "llama"}),
        "mistral": _Reader(LlamaConfig, _LLAMA, {"kind": "llama", "num_kv_heads": 8}),
        "mixtral": _Reader(MoeConfig, {**_LLAMA, **_MIXTRAL}, {"kind": "moe", "names": "mixtral", "num_kv_heads": 8}),
        "qwen2": _Reader(LlamaConfig, _LLAMA, {"kind": "llama", "qkv_bias": True}),
        "qwen3": _Reader(
            LlamaConfig,
            {**_LLAMA, **_ATTENTION_BIASES},
            {"kind": "llama", "qk_norm": True, "num_kv_heads": 32, "head_size": 128},
        ),
        "qwen3_moe": _Reader(
            MoeConfig,
            {**_LLAMA, **_QWEN3_MOE},
            {"kind": "moe", "qk_norm": True, "num_kv_heads": 4},
            {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
            {"num_local_experts": "num_experts"},  # as transformers 5 saves it
        ),
        "deepseek_v2": _DEEPSEEK_READER,
        "deepseek_v3": _DEEPSEEK_READER,
    }
)


def read_hf_config(config: HfConfig) -> GptConfig | LlamaConfig | MoeConfig:
    """Return the decoder that a ``config.json`` describes.

    Keys about anything but parameters (positions, quantization, generation) are not read. DeepSeek's
    multi-token prediction layers and its router's bias, which no gradient trains, are not part of the decoder.

    Raises:
        ConfigError: the file cannot be read, is of a ``model_type`` that is not known, or lacks a key or has a bad value.
    """
    source = config.path
    data = read_json(Path(source), max_bytes=MAX_BYTES, what="a config.json")
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: a config.json holds an object with keys such as model_type, not {type(data).__name__}")
    model_type = data.get("model_type")
    reader = _READERS.get(model_type) if isinstance(model_type, str) else None
    if reader is None:
        raise ConfigError(
            f"{source}: model_type {printable(repr(model_type), 60)} is not known; known are {', '.join(_READERS)}. Describe "
            "another model by kind: llama, moe, params or factory"
        )
    values = {reader.renamed.get(key, key): value for key, value in data.items() if value is not None}
    for key, only in reader.only.items():
        if (value := values.get(key, only)) != only:
            raise ConfigError(
                f"{source}: {key}={printable(repr(value), 60)} is not known for model_type {model_type}, only {only}. "
                "Describe the model by kind: params or factory"
            )
    fields = {**reader.given, **_fields(values, reader.keys)}
    fields = {name: value for name, value in fields.items() if name in reader.section.model_fields}
    if not fields.get("num_dense_layers"):
        fields.pop("dense_ffn_size", None)
    dtype_key = "torch_dtype" if "torch_dtype" in values and "dtype" not in values else "dtype"
    dtype = config.dtype or values.get(dtype_key) or "float32"
    fields["dtype"] = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    try:
        decoder = reader.section.model_validate(fields)
    except ValidationError as error:
        problems = (_problem(detail, reader.keys) for detail in error.errors(include_url=False))
        raise ConfigError(f"{source}: {'; '.join(problems)}") from None
    found = {**dict(_values_by_key(decoder, reader.keys)), **reader.only}
    _note_defaults(source, values, found if config.dtype else {**found, dtype_key: decoder.dtype})
    return decoder


def _values_by_key(decoder: Section, keys: _Keys) -> Iterator[tuple[str, Any]]:
    """Yield the values that a decoder was made of, by the keys of the file."""
    for name, key in keys.items():
        if name in type(decoder).model_fields:
            value = getattr(decoder, name)
            yield from [(key, value)] if isinstance(key, str) else _values_by_key(value, key)


def _note_defaults(source: str, values: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Log which keys were read and which were not there: a misspelt one is among them."""
    read = ", ".join(key for key in found if key in values)
    assumed = ", ".join(f"{key}={json.dumps(value)}" for key, value in found.items() if key not in values)
    if assumed:
        log_once(f"{printable(source)}: read {read}; not given, so the default counts: {assumed}")


def _fields(values: Mapping[str, Any], keys: _Keys) -> dict[str, Any]:
    """Return our fields by the keys that the file has."""
    nested = {name: _fields(values, key) for name, key in keys.items() if not isinstance(key, str)}
    return nested | {name: values[key] for name, key in keys.items() if isinstance(key, str) and key in values}


def _problem(detail: Any, keys: _Keys) -> str:
    """Return a problem with the name of the file's key."""
    key: Any = keys
    for name in detail["loc"]:
        key = key.get(name, name) if isinstance(key, Mapping) else name
    if detail["type"] == "missing":
        return f"{key} is missing"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{key} {message} (got {printable(repr(detail['input']), 60)})" if detail["loc"] else printable(message, 300)
