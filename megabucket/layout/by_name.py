"""What a config says about single parameters, by name: cuts and a recorded order. Checked against one model; no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.config.resolve import resolve_cuts
from megabucket.errors import ConfigError, name_list
from megabucket.layout.spec import ParamSpec


def cuts_of(config: DistributedDataParallelConfig, specs: Sequence[ParamSpec]) -> frozenset[str] | None:
    """Return the parameters that close a bucket; ``None`` when a size does.

    Raises:
        ConfigError: a name is no parameter of the model, also where the config does not use its cuts.
    """
    if config.bucket_cuts is not None:
        _check_known("bucket_cuts", config.bucket_cuts, {spec.name for spec in specs}, remedy="plan the cuts for this model")
    cuts = resolve_cuts(config)
    return None if cuts is None else frozenset(cuts)


def ready_indices(config: DistributedDataParallelConfig, specs: Sequence[ParamSpec]) -> Mapping[str, int] | None:
    """Return the position of each parameter in the recorded order; ``None`` without one.

    Raises:
        ConfigError: a name is no parameter of the model, or a parameter is left out.
    """
    if config.bucket_order is None:
        return None
    remedy = "record the order of this model"
    _check_known("bucket_order", config.bucket_order, {spec.name for spec in specs}, remedy=remedy)
    indices = {name: index for index, name in enumerate(config.bucket_order)}
    missing = [spec.name for spec in specs if spec.name not in indices]
    if missing:
        raise ConfigError(
            f"bucket_order leaves out {name_list(missing)} ({len(missing)} of {len(specs)} trainable parameters), so these "
            f"would have no place in a buffer. {_way_out('bucket_order', remedy)}"
        )
    return indices


def _check_known(field: str, names: Sequence[str], known: Collection[str], *, remedy: str) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            f"{field} names {name_list(unknown)}, not among the {len(known)} trainable parameters of the model. "
            f"{_way_out(field, remedy)}"
        )


def _way_out(field: str, remedy: str) -> str:
    return (
        f"It fits one model only: {remedy}, or drop {field}. For a module that has changed since it was wrapped, give the "
        "config that fits now to ddp.rebuild(config)."
    )
