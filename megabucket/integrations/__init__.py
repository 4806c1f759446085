"""Adapters for training frameworks, one file each. They use the package as any user would, and nothing imports them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch

from megabucket.config.ddp import DistributedDataParallelConfig, is_what_happens
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import ConfigError
from megabucket.optim import DistributedOptimizer, OptimizerPart

SHARDED = DistributedDataParallelConfig(use_distributed_optimizer=True)
WITHOUT_SHARDS = (
    "give the adapter DistributedDataParallelConfig(use_distributed_optimizer=False), under which it leaves torch's optimizers "
    "and their gradients to the framework"
)
NO_CLIP_BY_VALUE = (
    "with a sharded optimizer gradients are clipped by norm only: no rank holds all values. Clip by norm, or "
    f"{WITHOUT_SHARDS}: they are clipped as under its own DDP."
)


def config_for(given: DistributedDataParallelConfig | None, scaler: object | None) -> DistributedDataParallelConfig:
    """Return the given config, or by default one with a sharded optimizer.

    Args:
        scaler: the loss scaler, if there is one: it tests for gradients that are not finite, unless the config says otherwise.
    """
    config = given or SHARDED
    if scaler is None or "nonfinite_gradients" in config.model_fields_set:
        return config
    return config.model_copy(update={"nonfinite_gradients": "allow"})


def with_torch_arguments(
    config: DistributedDataParallelConfig | None, given: Mapping[str, object], *, prefix: str = ""
) -> DistributedDataParallelConfig | None:
    """Return the config of an adapter with ``find_unused_parameters`` of torch DDP, as ``unused_parameters="skip"``.

    Arguments that describe what the wrapper does anyway, such as ``static_graph=True``, change nothing.

    Args:
        given: arguments of torch DDP by name, without those that were left at their defaults.
        prefix: of these names in the framework.

    Raises:
        ConfigError: there are other arguments, or the config says something else about unused parameters.
    """
    if others := sorted(name for name, value in given.items() if not is_what_happens(name, value)):
        raise ConfigError(
            f"{', '.join(prefix + name for name in others)}: these are arguments of torch DDP. Give the adapter a "
            "DistributedDataParallelConfig, with bucket_cap_mb=25, for instance."
        )
    if not given.get("find_unused_parameters"):
        return config
    config = config or SHARDED
    if config.unused_parameters not in ("error", "skip"):
        raise ConfigError(
            f"{prefix}find_unused_parameters=True means unused_parameters='skip', and the config has "
            f"unused_parameters={config.unused_parameters!r}: keep one of them."
        )
    return config.model_copy(update={"unused_parameters": "skip"})


class Framework(NamedTuple):
    """A framework and the tested versions: from ``first`` up to, but not including, ``beyond``."""

    name: str
    first: tuple[int, int]
    beyond: tuple[int, int]


def require(*frameworks: Framework, adapter: str, extra: str) -> None:
    """Check that the frameworks of an adapter are installed; warn about versions that were not tested.

    Raises:
        ImportError: one is missing; the text says how to install it.
    """
    for framework in frameworks:
        try:
            found = version(framework.name)
        except PackageNotFoundError:
            raise ImportError(
                f"{adapter} needs {framework.name}, which is not installed: pip install 'megabucket[{extra}]'",
                name=framework.name,
            ) from None
        major, minor = (int(part) for part in found.split(".")[:2])
        if not framework.first <= (major, minor) < framework.beyond:
            first, beyond = (".".join(map(str, bound)) for bound in framework[1:])
            warnings.warn(
                f"{adapter} was tested with {framework.name} >={first},<{beyond}, and this is {found}: it relies on methods "
                "that releases may change. Compare a short run with the framework's own DDP.",
                stacklevel=3,
            )


def wrapper_of(
    optimizer: torch.optim.Optimizer, wrappers: Iterable[torch.nn.Module], *, remedy: str
) -> DistributedDataParallel:
    """Return the wrapper that holds the parameters of an optimizer.

    Args:
        remedy: of the error.

    Raises:
        ConfigError: no wrapper does.
    """
    params = {param for group in optimizer.param_groups for param in group["params"]}
    for wrapper in wrappers:
        if isinstance(wrapper, DistributedDataParallel) and not params.isdisjoint(wrapper.param_names):
            return wrapper
    raise ConfigError(
        f"the parameters of {type(optimizer).__name__} are in no module that was wrapped: {remedy} If that was done, the "
        "module's parameters have been replaced since: make the optimizer from those of the module as it is wrapped."
    )


class FrameworkOptimizer(DistributedOptimizer):
    """A ``DistributedOptimizer`` that clips in one step what it was told to before: frameworks clip anew for each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._next_clips: dict[int | None, float] = {}

    def clip_next_step(self, max_norm: float, *, part: int | None = None) -> None:
        """Clip in the next step.

        Args:
            part: index of the part whose step it is; ``None``: a step of the whole.
        """
        self._next_clips[part] = float(max_norm)

    def _step(self, part: int | None = None) -> None:
        """Step as ``DistributedOptimizer`` does."""
        self.clip_grad = self._next_clips.pop(part, 0.0)
        try:
            super()._step(part)
        finally:
            self.clip_grad = 0.0


def whole_of(optimizer: object) -> tuple[FrameworkOptimizer, int | None] | None:
    """Return the sharded optimizer that steps for one of a framework, and which of its parts that is; ``None``: all."""
    if isinstance(optimizer, OptimizerPart):
        return (optimizer.whole, optimizer.index) if isinstance(optimizer.whole, FrameworkOptimizer) else None
    return (optimizer, None) if isinstance(optimizer, FrameworkOptimizer) else None


def sharded(
    optimizers: Sequence[torch.optim.Optimizer], wrapper: DistributedDataParallel, **settings: Any
) -> list[torch.optim.Optimizer]:
    """Shard the optimizers of one wrapper: one as a whole, several as parts."""
    whole = FrameworkOptimizer(list(optimizers), wrapper, **settings)
    return [whole] if len(optimizers) == 1 else list(whole.parts)


def sharded_by_wrapper(
    optimizers: Sequence[torch.optim.Optimizer], wrappers: Sequence[torch.nn.Module], *, remedy: str, **settings: Any
) -> list[torch.optim.Optimizer]:
    """Shard the optimizers of several wrappers, and return those to step with in the same order. Arguments: ``wrapper_of``."""
    of_wrapper: dict[DistributedDataParallel, list[int]] = {}
    for index, optimizer in enumerate(optimizers):
        of_wrapper.setdefault(wrapper_of(optimizer, wrappers, remedy=remedy), []).append(index)
    found = list(optimizers)
    for wrapper, indices in of_wrapper.items():
        made = sharded([optimizers[index] for index in indices], wrapper, **settings)
        for index, one in zip(indices, made, strict=True):
            found[index] = one
    return found
