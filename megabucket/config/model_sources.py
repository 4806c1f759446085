"""Where the parameters of a model come from when they are not a built-in decoder: a list, a function, a config.json. No torch.

``megabucket.planning`` reads and runs what they name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import annotated_types as at
from pydantic import BeforeValidator, Field, model_validator

from megabucket.config.ddp import Section, read_tuple
from megabucket.config.decoders import Dtype


def _read_scalar(value: Any) -> Any:
    """Refuse what is not one value here, with one text instead of one per type it could have been."""
    if isinstance(value, bool | int | float | str | None):
        return value
    raise ValueError("should be text, a number, true, false or null")


Name = Annotated[str, at.Len(1, 1_000)]
Path = Annotated[str, at.Len(1, 4_096)]
Dimension = Annotated[int, at.Ge(0), at.Le(2**40)]
Argument = Annotated[bool | int | float | str | None, BeforeValidator(_read_scalar)]


class ParamEntry(Section):
    """One parameter of an explicit list."""

    name: Name
    """Unique in the list."""

    shape: Annotated[tuple[Dimension, ...], BeforeValidator(read_tuple), at.MaxLen(16)]
    """Sizes of the dimensions; ``[]`` is a scalar."""

    dtype: Dtype | None = None
    """Dtype of this parameter; ``None``: the list's."""

    group: Literal["dense", "expert"] = "dense"
    """Whether it is reduced over all data-parallel ranks or over the expert group."""

    shared_embedding: bool = False
    """Whether another pipeline stage holds a copy, which gives it a bucket of its own."""


class ParamListConfig(Section):
    """An explicit list of parameters in registration order, here or in a file."""

    kind: Literal["params"]
    """Chooses this form of the section."""

    params: Annotated[tuple[ParamEntry, ...], BeforeValidator(read_tuple), at.MinLen(1)] | None = None
    """The list itself."""

    path: Path | None = None
    """A JSON or YAML file with such a list, relative to the working directory."""

    dtype: Dtype = "float32"
    """Dtype of the parameters that do not say their own."""

    @model_validator(mode="after")
    def _one_source(self) -> ParamListConfig:
        if (self.params is None) == (self.path is None):
            given = "both are given" if self.params is not None else "neither is given"
            raise ValueError(f"the parameters come from params or from path, one of them, but {given}")
        return self


class FactoryConfig(Section):
    """Any torch module, built on the meta device by a function of yours; no memory is allocated for its weights."""

    kind: Literal["factory"]
    """Chooses this form of the section."""

    factory: Annotated[str, at.Len(3, 1_000)]
    """``module:callable``; the callable returns the ``torch.nn.Module``."""

    arguments: Annotated[dict[Name, Argument], at.MaxLen(100)] = Field(default_factory=dict)
    """Keyword arguments of the callable."""

    dtype: Dtype | None = None
    """Dtype of the parameters; ``None``: what the module says."""

    @model_validator(mode="after")
    def _names_a_callable(self) -> FactoryConfig:
        module, colon, name = self.factory.partition(":")
        if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
            raise ValueError(f"factory={self.factory[:100]!r} is not module:callable, for example mymodels.gpt:build")
        return self


class HfConfig(Section):
    """The ``config.json`` of a Hugging Face model. Only the file is read: neither its weights nor its library are needed."""

    kind: Literal["hf_config"]
    """Chooses this form of the section."""

    path: Path
    """The file, relative to the working directory."""

    dtype: Dtype | None = None
    """Dtype of the parameters; ``None``: what the file says (``torch_dtype`` or ``dtype``), else float32."""
