"""Read the ``config.json`` of a Hugging Face model as one of our decoders. No torch, no transformers.

Knows per ``model_type`` which keys say what, and which of them the file may leave out because the library has a default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pydantic import ValidationError

from megabucket.errors import ConfigError, printable
from megabucket.planning.json_file import read_json
from megabucket.planning.model_config import GptConfig, HfConfig, LlamaConfig, MlaConfig, MoeConfig

MAX_CONFIG_BYTES: Final = 1024 * 1024
"""Bytes of a config.json; the largest are some kilobytes."""

_Fields = dict[str, Any]

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
_OPTIONAL_KEYS: Final = MappingProxyType(
    {"num_kv_heads": "num_key_value_heads", "head_size": "head_dim", "tied_embeddings": "tie_word_embeddings"}
)
_FILE_KEYS: Final = MappingProxyType(
    {**_LLAMA_KEYS, **_GPT2_KEYS, **_MIXTRAL_KEYS, **_DEEPSEEK_KEYS, **_MLA_KEYS, **_OPTIONAL_KEYS, "query_rank": "q_lora_rank"}
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
    try:
        dtype = config.dtype or data.get("dtype") or data.get("torch_dtype") or "float32"
        return reader(_File(data, source, str(model_type)), dtype)
    except ValidationError as error:
        raise ConfigError(f"{source}: {'; '.join(_describe(detail) for detail in error.errors(include_url=False))}") from None


class _File:
    """The keys of one file."""

    def __init__(self, data: Mapping[str, Any], source: str, model_type: str) -> None:
        self._data, self._source, self._model_type = data, source, model_type

    def fields(self, keys: Mapping[str, str], **optional: str) -> _Fields:
        """Return our fields by the keys that must be there and by those that may be; what is null is left out."""
        missing = [key for key in keys.values() if self._data.get(key) is None]
        if missing:
            raise ConfigError(
                f"{self._source}: {', '.join(missing)} missing, which model_type {self._model_type} needs; is this the whole "
                "config.json of the model?"
            )
        found = {name: self._data[key] for name, key in keys.items()}
        return found | {name: self._data[key] for name, key in optional.items() if self._data.get(key) is not None}

    def get(self, key: str, default: Any) -> Any:
        """Return the value of a key; ``default`` where it is null or not there."""
        value = self._data.get(key)
        return default if value is None else value

    def refuse(self, key: str, *, unless: Any, default: Any) -> None:
        """Refuse a value that adds parameters we do not know."""
        value = self.get(key, default)
        if value != unless:
            raise ConfigError(
                f"{self._source}: {key}={printable(repr(value), 60)} is not known for model_type {self._model_type}, only "
                f"{unless}. Describe the model by kind: params or factory"
            )


def _gpt2(file: _File, dtype: Any) -> GptConfig:
    fields = file.fields(_GPT2_KEYS, ffn_size="n_inner")
    file.refuse("add_cross_attention", unless=False, default=False)
    return GptConfig(kind="gpt", tied_embeddings=file.get("tie_word_embeddings", True), dtype=_as(dtype), **fields)


def _llama(file: _File, dtype: Any) -> LlamaConfig:
    bias = file.get("attention_bias", False)
    fields = file.fields(_LLAMA_KEYS, **_OPTIONAL_KEYS)
    return LlamaConfig(
        kind="llama", qkv_bias=bias, output_bias=bias, mlp_bias=file.get("mlp_bias", False), dtype=_as(dtype), **fields
    )


def _mistral(file: _File, dtype: Any) -> LlamaConfig:
    fields = {"num_kv_heads": 8, **file.fields(_LLAMA_KEYS, **_OPTIONAL_KEYS)}
    return LlamaConfig(kind="llama", dtype=_as(dtype), **fields)


def _qwen2(file: _File, dtype: Any) -> LlamaConfig:
    fields = file.fields(_LLAMA_KEYS, **_OPTIONAL_KEYS)
    return LlamaConfig(kind="llama", qkv_bias=True, dtype=_as(dtype), **fields)


def _mixtral(file: _File, dtype: Any) -> MoeConfig:
    fields = {"num_kv_heads": 8, **file.fields(_MIXTRAL_KEYS, **_OPTIONAL_KEYS)}
    return MoeConfig(kind="moe", names="mixtral", dtype=_as(dtype), **fields)


def _deepseek(file: _File, dtype: Any) -> MoeConfig:
    file.refuse("moe_layer_freq", unless=1, default=1)
    file.refuse("attention_bias", unless=False, default=False)
    fields = file.fields(_DEEPSEEK_KEYS, tied_embeddings="tie_word_embeddings")
    num_dense = file.get("first_k_dense_replace", 0)
    if num_dense:
        fields |= {"num_dense_layers": num_dense, **file.fields({"dense_ffn_size": "intermediate_size"})}
    shared = file.get("n_shared_experts", 0)
    mla = file.fields(_MLA_KEYS, query_rank="q_lora_rank")
    return MoeConfig(kind="moe", mla=MlaConfig(**mla), num_shared_experts=shared, dtype=_as(dtype), **fields)


def _as(dtype: Any) -> Any:
    """Return a dtype from a file, whatever it is: the section checks it."""
    return dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype


_READERS: Final[Mapping[str, Callable[[_File, Any], GptConfig | LlamaConfig | MoeConfig]]] = MappingProxyType(
    {
        "gpt2": _gpt2,
        "llama": _llama,
        "mistral": _mistral,
        "mixtral": _mixtral,
        "qwen2": _qwen2,
        "deepseek_v2": _deepseek,
        "deepseek_v3": _deepseek,
    }
)


def _describe(detail: Any) -> str:
    """Return what is wrong under the key that the file has."""
    name = str(detail["loc"][-1]) if detail["loc"] else ""
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if not name:
        return printable(message, 300)
    return f"{_FILE_KEYS.get(name, name)} {message} (got {printable(repr(detail['input']), 60)})"
