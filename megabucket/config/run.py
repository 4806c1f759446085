"""``RunConfig``: everything one config file may say. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field, model_validator

from megabucket.config.architecture import ArchitectureConfig, GptConfig, LlamaConfig
from megabucket.config.ddp import DistributedDataParallelConfig, Section
from megabucket.config.training import DataConfig, OptimizerConfig, TrainConfig

_MODES: Final = ("all_reduce", "reduce_scatter")
_SECTIONS: Final = frozenset({"model", "ddp", "optimizer", "data", "train"})
_TRAINABLE_KINDS: Final = ("gpt", "llama")
_TRAINABLE_DTYPES: Final = ("float32", "bfloat16")


class RunConfig(Section):
    """One run: the model, how its gradients travel, and what ``megabucket train`` does with it."""

    mode: Literal["all_reduce", "reduce_scatter"] | None = None
    """Short for ``ddp.use_distributed_optimizer``: ``reduce_scatter`` sets it, ``all_reduce`` clears it."""

    model: ArchitectureConfig | None = None
    """The model, by the ``kind`` of its description. Its ``dtype`` and ``train.param_dtype`` are one fact; give either."""

    ddp: DistributedDataParallelConfig = Field(default_factory=DistributedDataParallelConfig)
    """How gradients are stored, cut into buckets and reduced."""

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The optimizer and its schedule."""

    data: DataConfig = Field(default_factory=DataConfig)
    """What is trained on."""

    train: TrainConfig = Field(default_factory=TrainConfig)
    """How long, how much at once, and where the figures go."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Complete what one field says about another; contradictions are left for ``_fields_agree``."""
        if not isinstance(data, Mapping):
            return data
        # A section whose lines are all commented out is null in YAML and means the defaults.
        filled = {key: value for key, value in data.items() if not (value is None and key in _SECTIONS)}
        filled.update(_spread_mode(filled))
        filled.update(_spread_dtype(filled))
        return filled

    @model_validator(mode="after")
    def _fields_agree(self) -> RunConfig:
        problems = []
        given = self.ddp.use_distributed_optimizer
        if self.mode is not None and given != (self.mode == "reduce_scatter"):
            problems.append(f"mode={self.mode} contradicts ddp.use_distributed_optimizer={given}; keep one of them")
        model_dtype = _given_dtype(self.model)
        train_dtype = self.train.param_dtype if "param_dtype" in self.train.model_fields_set else None
        if model_dtype is not None and train_dtype is not None and model_dtype != train_dtype:
            problems.append(f"model.dtype={model_dtype} contradicts train.param_dtype={train_dtype}; keep one of them")
        if problems:
            raise ValueError("; ".join(problems))
        return self


def _spread_mode(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``ddp`` section with the field that ``mode`` stands for, unless it is given there."""
    ddp = _as_mapping(data.get("ddp", {}))
    if data.get("mode") not in _MODES or ddp is None or "use_distributed_optimizer" in ddp:
        return {}
    return {"ddp": {**ddp, "use_distributed_optimizer": data["mode"] == "reduce_scatter"}}


def _spread_dtype(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section that lacks the parameters' dtype with what the other says."""
    model, train = _as_mapping(data.get("model")), _as_mapping(data.get("train", {}))
    if model is None or train is None or model.get("kind") not in _TRAINABLE_KINDS:
        return {}
    model_dtype, train_dtype = model.get("dtype"), train.get("param_dtype")
    if model_dtype is None and train_dtype in _TRAINABLE_DTYPES:
        return {"model": {**model, "dtype": train_dtype}}
    if train_dtype is None and model_dtype in _TRAINABLE_DTYPES:
        return {"train": {**train, "param_dtype": model_dtype}}
    return {}


def _as_mapping(value: Any) -> Mapping[str, Any] | None:
    """Return what a section says as a mapping; ``None`` for what cannot be a section."""
    if isinstance(value, Section):
        return value.model_dump(exclude_unset=True)
    return value if isinstance(value, Mapping) else None


def _given_dtype(model: Section | None) -> str | None:
    if isinstance(model, GptConfig | LlamaConfig) and "dtype" in model.model_fields_set:
        return model.dtype
    return None
