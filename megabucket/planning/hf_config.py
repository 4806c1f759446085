"""Read the ``config.json`` of a Hugging Face model as one of our decoders. No torch, no transformers.

Knows per ``model_type`` which keys say what, and which of them the file may leave out because the library has a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from megabucket.errors import ConfigError, printable
from megabucket.planning.documents import read_json
from megabucket.planning.model_config import GptConfig, HfConfig, LlamaConfig, MoeConfig

MAX_CONFIG_BYTES: Final = 1024 * 1024
"""Bytes of a config.json; the largest are some kilobytes."""

# Our field -> the key in the file. The file must have the key ...
_LLAMA_KEYS: Final = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "ffn_size": "intermediate_size",
        "num_heads": "num_attention_heads",
    }
)
_GPT2_KEYS: Final = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "sequence_length": "n_positions",
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_heads": "n_head",
    }
)
_MIXTRAL_KEYS: Final = MappingProxyType(
    {
        **{name: key for name, key in _LLAMA_KEYS.items() if name != "ffn_size"},
        "expert_ffn_size": "intermediate_size",
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
    }
)
_DEEPSEEK_KEYS: Final = MappingProxyType(
    {
        **{name: key for name, key in _LLAMA_KEYS.items() if name != "ffn_size"},
        "expert_ffn_size": "moe_intermediate_size",
        "num_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
    }
)
_MLA_KEYS: Final = MappingProxyType(
    {
        "kv_rank": "kv_lora_rank",
        "nope_head_size": "qk_nope_head_dim",
        "rope_head_size": "qk_rope_head_dim",
        "value_head_size": "v_head_dim",
    }
)
# ... and these, which null or absence means the default of.
_TIED: Final = MappingProxyType({"tied_embeddings": "tie_word_embeddings"})
_HEADS: Final = MappingProxyType({"num_kv_heads": "num_key_value_heads", "head_size": "head_dim", **_TIED})
_BIASES: Final = MappingProxyType({"qkv_bias": "attention_bias", "output_bias": "attention_bias", "mlp_bias": "mlp_bias"})
_DEEPSEEK_MORE: Final = MappingProxyType(
    {"num_shared_experts": "n_shared_experts", "num_dense_layers": "first_k_dense_replace", **_TIED}
)
_DENSE_KEYS: Final = MappingProxyType({"dense_ffn_size": "intermediate_size"})
_QUERY_RANK: Final = MappingProxyType({"query_rank": "q_lora_rank"})


class _Reader(NamedTuple):
    """How the files of one ``model_type`` say what a decoder is."""

    section: type[GptConfig | LlamaConfig | MoeConfig]
    needed: Mapping[str, str]
    optional: Mapping[str, str]
    given: Mapping[str, Any]
    """What the library's model has, unless the file says otherwise."""
    only: Mapping[str, Any] = MappingProxyType({})
    """Keys of the file with the one value, also its default, for which we know the parameters."""


_DEEPSEEK: Final = _Reader(
    MoeConfig, _DEEPSEEK_KEYS, _DEEPSEEK_MORE, {"kind": "moe"}, only={"moe_layer_freq": 1, "attention_bias": False}
)
_READERS: Final[Mapping[str, _Reader]] = MappingProxyType(
    {
        "gpt2": _Reader(
            GptConfig, _GPT2_KEYS, {"ffn_size": "n_inner", **_TIED}, {"kind": "gpt"}, only={"add_cross_attention": False}
        ),
        "llama": _Reader(LlamaConfig, _LLAMA_KEYS, {**_HEADS, **_BIASES}, {"kind": "llama"}),
        "mistral": _Reader(LlamaConfig, _LLAMA_KEYS, _HEADS, {"kind": "llama", "num_kv_heads": 8}),
        "mixtral": _Reader(MoeConfig, _MIXTRAL_KEYS, _HEADS, {"kind": "moe", "names": "mixtral", "num_kv_heads": 8}),
        "qwen2": _Reader(LlamaConfig, _LLAMA_KEYS, _HEADS, {"kind": "llama", "qkv_bias": True}),
        "deepseek_v2": _DEEPSEEK,
        "deepseek_v3": _DEEPSEEK,
    }
)
_FILE_KEYS: Final = MappingProxyType(
    {**_LLAMA_KEYS, **_GPT2_KEYS, **_MIXTRAL_KEYS, **_DEEPSEEK_KEYS, **_MLA_KEYS, **_HEADS, **_QUERY_RANK}
)


def read_hf_config(config: HfConfig) -> GptConfig | LlamaConfig | MoeConfig:
    """Return the decoder that a ``config.json`` describes.

    What the file says about anything but parameters (positions, quantization, generation) is not looked at. DeepSeek's
    multi-token prediction layers and its router's bias, which no gradient trains, are not part of the decoder.

    Raises:
        ConfigError: the file cannot be read, is of a ``model_type`` that is not known, or lacks a key or has a bad value.
    """
    document = read_json(Path(config.path), max_bytes=MAX_CONFIG_BYTES, what="a config.json")
    data, source = document.data, document.source
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: a config.json holds an object with keys such as model_type, not {type(data).__name__}")
    model_type = data.get("model_type")
    reader = _READERS.get(model_type) if isinstance(model_type, str) else None
    if reader is None:
        said = "says no model_type" if model_type is None else f"model_type {printable(repr(model_type), 60)} is not known"
        raise ConfigError(
            f"{source}: {said}; known are {', '.join(_READERS)}. Describe another model by kind: llama, moe, params or factory"
        )
    values = {key: value for key, value in data.items() if value is not None}
    for key, only in reader.only.items():
        if (value := values.get(key, only)) != only:
            raise ConfigError(
                f"{source}: {key}={printable(repr(value), 60)} is not known for model_type {model_type}, only {only}. "
                "Describe the model by kind: params or factory"
            )
    is_deepseek = reader is _DEEPSEEK
    needed = {**reader.needed, **(_DENSE_KEYS if is_deepseek and values.get("first_k_dense_replace") else {})}
    if missing := [key for key in (*needed.values(), *(_MLA_KEYS.values() if is_deepseek else ())) if key not in values]:
        raise ConfigError(
            f"{source}: {', '.join(missing)} missing, which model_type {model_type} needs; is this the whole config.json of "
            "the model?"
        )
    fields = {**reader.given, **_fields(values, needed), **_fields(values, reader.optional)}
    if is_deepseek:
        fields["mla"] = _fields(values, {**_MLA_KEYS, **_QUERY_RANK})
    dtype = config.dtype or values.get("dtype") or values.get("torch_dtype") or "float32"
    fields["dtype"] = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    try:
        return reader.section.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"{source}: {'; '.join(_describe(detail) for detail in error.errors(include_url=False))}") from None


def _fields(values: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Return our fields by the keys that the file has."""
    return {name: values[key] for name, key in keys.items() if key in values}


def _describe(detail: Any) -> str:
    """Return what is wrong under the key that the file has."""
    name = str(detail["loc"][-1]) if detail["loc"] else ""
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if not name:
        return printable(message, 300)
    return f"{_FILE_KEYS.get(name, name)} {message} (got {printable(repr(detail['input']), 60)})"
