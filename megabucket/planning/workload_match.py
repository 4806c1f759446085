"""Is a workload one of this model? Asked before it decides anything about the model. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Final

from megabucket.errors import ConfigError, name_list, printable
from megabucket.layout import ParamSpec
from megabucket.planning.workload import Workload

_DIFFERENCES_SHOWN: Final = 3
_REMEDY: Final = "Profile this model, or describe the one that was profiled."


def model_fingerprint(specs: Sequence[ParamSpec]) -> str:
    """Return the SHA-256 of names and shapes, in registration order, as hexadecimal digits."""
    return hashlib.sha256(json.dumps([[spec.name, list(spec.shape)] for spec in specs]).encode()).hexdigest()


def check_workload_matches(workload: Workload, specs: Sequence[ParamSpec], *, fingerprint: str | None = None) -> None:
    """Return if the workload has the trainable parameters of a model: names, order and elements.

    Args:
        specs: the trainable parameters, in registration order.
        fingerprint: what ``model_fingerprint`` gave for the model that was profiled, to compare shapes, too.

    Raises:
        ConfigError: it is a workload of another model; the text names what differs.
    """
    found = {tensor.name: tensor.numel for tensor in workload.tensors}
    wanted = {spec.name: spec.numel for spec in specs}
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    sizes = [
        f"{printable(name)} ({found[name]} instead of {numel})"
        for name, numel in wanted.items()
        if name in found and found[name] != numel
    ]
    differences = []
    if missing:
        differences.append(f"it lacks {name_list(missing)}")
    if extra:
        differences.append(f"the model has no {name_list(extra)}")
    if not missing and not extra and sizes:
        more = "" if len(sizes) <= _DIFFERENCES_SHOWN else f" and {len(sizes) - _DIFFERENCES_SHOWN} more"
        differences.append(f"other numbers of elements: {', '.join(sizes[:_DIFFERENCES_SHOWN])}{more}")
    if not differences and list(found) != list(wanted):
        first = next(position for position, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
        differences.append(
            f"the order differs from parameter {first} on: {printable(list(found)[first])!r} instead of "
            f"{printable(list(wanted)[first])!r}"
        )
    if not differences and fingerprint is not None and fingerprint != model_fingerprint(specs):
        differences.append("some parameters have other shapes (the fingerprints of names and shapes differ)")
    if differences:
        raise ConfigError(
            f"this workload ({len(found)} tensors) is from another model ({len(wanted)} trainable parameters): "
            f"{'; '.join(differences)}. {_REMEDY}"
        )
