"""What one rank knows about its step: the numbers all ranks must agree on, and what went wrong on it.

A report travels as JSON in a record of fixed size, because a rank that failed sends its own without waiting for anybody.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

RECORD_BYTES: Final = 16_384
"""Room for one report in a small world; lists of names are cut to fit."""

_LEAST_RECORD_BYTES: Final = 4_096  # room for every fault at once with one short name of each list, at 12 bytes a character
_ALL_RECORDS_BYTES: Final = 1 << 21  # every rank receives the records of all
_NAME_CHARS: Final = 200
_TEXT_CHARS: Final = 2_000


def record_bytes(num_ranks: int) -> int:
    """Return the room for one report: less in a large world, so that what a rank receives does not grow with it at once.

    >>> [record_bytes(num_ranks) for num_ranks in (2, 128, 256, 16_384)]
    [16384, 16384, 8192, 4096]
    """
    return max(min(RECORD_BYTES, _ALL_RECORDS_BYTES // num_ranks), _LEAST_RECORD_BYTES)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank cannot finish the step."""

    phase: str
    error: str


@dataclass(frozen=True, slots=True)
class ModelChange:
    """How the module differs from the one that was wrapped."""

    kind: str
    """``moved``, ``trainability``, ``parameters`` or ``main_grad``."""
    params: tuple[str, ...] = ()
    found: str = ""
    expected: str = ""
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LateGrads:
    """Gradients that came after their bucket was sent."""

    params: tuple[str, ...]
    bucket: int
    phase: str


@dataclass(frozen=True, slots=True)
class UnusedParams:
    """Parameters without a gradient in the whole step."""

    params: tuple[str, ...]
    bucket: int
    """Of the first one."""


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Gradients with nan or inf before their reduction."""

    param: str
    bucket: int
    finding: str
    num_others: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """One rank's side of a step."""

    rank: int
    step_number: int = -1
    """The caller's own number of the step; -1 when it gives none."""
    num_microbatches: int = 0
    num_skipped_forwards: int = 0
    num_dropped_steps: int = 0
    num_updates: int = 0
    """Optimizer steps since the last agreement."""
    missed_update: str = ""
    """What kept this rank from one of them; no fault where no other rank has made it."""
    checksum: int = 0
    """Of the facts from ``num_loads`` to ``hyperparameters``, which must be equal, too, and are too long for the fence."""
    num_loads: int = 0
    """Loads of weights since the last agreement that no broadcast has followed."""
    kept: tuple[str, ...] = ()
    """Parameters for which the step began on a gradient of the step before that was not cleared."""
    interrupted: tuple[str, ...] = ()
    """Parameters whose gradient was cleared or replaced between two backwards of the step; what counts is whether there are."""
    hyperparameters: tuple[str, ...] = ()
    """By which numbers the optimizer updates: after this fence if ``is_committing``, else since the last one."""
    is_committing: bool = False
    """Whether the optimizer updates right after this fence (reduce-scatter)."""
    force_all_reduce: bool = False
    wants_stop: bool = False
    """Whether this rank was asked to stop; no fault."""
    failure: Failure | None = None
    change: ModelChange | None = None
    late: LateGrads | None = None
    unused: UnusedParams | None = None
    nonfinite: NonFinite | None = None

    def to_bytes(self, capacity_bytes: int = RECORD_BYTES) -> bytes:
        """Return the report as JSON of at most so many bytes; names and texts are cut as far as needed.

        Args:
            capacity_bytes: what ``record_bytes`` gives.
        """
        num_names = 1 << 10
        while True:
            data = _cut(dataclasses.asdict(self), num_names)
            # As text what JSON does not know: a rank that could not send its report would leave the others waiting for it.
            payload = json.dumps(data, separators=(",", ":"), default=str).encode()
            if len(payload) <= capacity_bytes:
                return payload
            num_names = num_names // 2 if num_names else _AS_SHORT_AS_CAN_BE

    @staticmethod
    def from_bytes(payload: bytes) -> StepReport:
        """Return the report that ``to_bytes`` has written."""
        data = _with_tuples(json.loads(payload))
        for name, kind in _PARTS.items():
            if data[name] is not None:
                data[name] = kind(**_with_tuples(data[name]))
        return StepReport(**data)


_AS_SHORT_AS_CAN_BE: Final = -1

_PARTS: Final[dict[str, Any]] = {
    "failure": Failure,
    "change": ModelChange,
    "late": LateGrads,
    "unused": UnusedParams,
    "nonfinite": NonFinite,
}


def _with_tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}


def _cut(value: Any, num_names: int) -> Any:
    if isinstance(value, dict):
        return {key: _cut(part, num_names) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return _cut_names(value, num_names)
    # Texts shrink with the lists: JSON may need twelve bytes for a character.
    num_chars = 16 if num_names == _AS_SHORT_AS_CAN_BE else min(_TEXT_CHARS, 4 * num_names + 40)
    return value[:num_chars] if isinstance(value, str) else value


def _cut_names(names: Sequence[str], num_names: int) -> list[str]:
    num_shown, num_chars = max(num_names, 5), min(_NAME_CHARS, 4 * num_names + 20)
    if num_names == _AS_SHORT_AS_CAN_BE:
        num_shown, num_chars = 1, 8
    shown = [name if len(name) <= num_chars else f"{name[:num_chars]}..." for name in names[:num_shown]]
    return shown if len(names) <= len(shown) else [*shown, f"... {len(names)} in all"]
