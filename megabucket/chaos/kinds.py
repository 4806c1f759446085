"""All kinds of fault, and the cells of the full and the quick matrix."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

from megabucket.chaos.cell import Cell, Combo, Mode
from megabucket.chaos.kind import Kind
from megabucket.chaos.kinds_checkpoint import CHECKPOINT_KINDS
from megabucket.chaos.kinds_model import MODEL_KINDS
from megabucket.chaos.kinds_process import PROCESS_KINDS
from megabucket.chaos.kinds_step import STEP_KINDS
from megabucket.chaos.kinds_usage import USAGE_KINDS
from megabucket.chaos.kinds_wrap import WRAP_KINDS

KINDS: Final = (*STEP_KINDS, *USAGE_KINDS, *WRAP_KINDS, *MODEL_KINDS, *PROCESS_KINDS, *CHECKPOINT_KINDS)

_REDUCED = Combo(Mode.ALL_REDUCE, True, 2)
_SCATTERED = Combo(Mode.REDUCE_SCATTER, True, 2)
_THREE = Combo(Mode.ALL_REDUCE, False, 3)

_QUICK: Final = (
    # One cell for each error class and each way in which a step can be right; ranks and modes alternate.
    ("none", "step", _REDUCED),
    ("none", "step", Combo(Mode.REDUCE_SCATTER, True, 3)),
    ("hook-order", "step", _REDUCED),
    ("unused", "one-error", _REDUCED),
    ("unused", "one-zero", _SCATTERED),
    ("skipped-step", "forward-only", _REDUCED),
    ("dropped-step", "step", _REDUCED),
    ("microbatches", "one-more", _THREE),
    ("two-backwards", "all-retain-graph", _SCATTERED),
    ("exception", "forward", _THREE),
    ("exception", "backward-1", _SCATTERED),
    ("abort-step", "first", _REDUCED),
    ("nan", "bucket-3-error", _REDUCED),
    ("nan", "bucket-1-skip_step", _SCATTERED),
    ("huge", "bucket-1-error", _REDUCED),
    ("other-model", "order", _REDUCED),
    ("unwrappable", "one-expanded", _REDUCED),
    ("unwrappable", "all-wrapped", _REDUCED),
    ("unwrappable", "all-frozen", _REDUCED),
    ("unwrappable", "all-expanded", _REDUCED),
    ("model-change", "one-freeze", _REDUCED),
    ("model-change", "all-replace", _REDUCED),
    ("model-change", "all-bfloat16", _SCATTERED),
    ("model-change", "one-main-grad", _REDUCED),
    ("bit-flip", "step", _REDUCED),
    ("wrong-call", "all-in-no-sync", _REDUCED),
    ("wrong-call", "load-assign", _REDUCED),
    ("plain-optimizer", "plain-optimizer", _SCATTERED),
    ("other-schedule", "step", _SCATTERED),
    ("other-rate", "step", _SCATTERED),
    ("SIGKILL", "backward-2", _THREE),
    ("SIGSTOP", "backward-1", _REDUCED),
    ("interrupt", "SIGTERM-flag", _REDUCED),
    ("fork", "step", _REDUCED),
    ("group-destroyed", "all", _REDUCED),
    ("save-refused", "ENOSPC-data", _SCATTERED),
    ("load-damaged", "flipped", _SCATTERED),
)


def kind_named(name: str) -> Kind:
    """Return a kind.

    Raises:
        KeyError: there is none of that name.
    """
    return {kind.name: kind for kind in KINDS}[name]


def full_matrix() -> list[Cell]:
    """Return every cell."""
    return [cell for kind in KINDS for cell in kind.cells()]


def quick_matrix() -> list[Cell]:
    """Return a cell for each error class."""
    return [Cell(*cell) for cell in _QUICK]


def select(cells: list[Cell], *, kinds: str = "*", ranks: frozenset[int] = frozenset()) -> list[Cell]:
    """Return the cells whose ``kind`` or ``kind/place`` matches a glob and whose number of ranks is asked for."""
    return [
        cell
        for cell in cells
        if (fnmatchcase(cell.kind, kinds) or fnmatchcase(f"{cell.kind}/{cell.place}", kinds) or fnmatchcase(cell.name, kinds))
        and (not ranks or cell.combo.num_ranks in ranks)
    ]
