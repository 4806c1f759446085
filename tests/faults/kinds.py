"""The table of all kinds of fault."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache

from .cells import Cell, Fault, Form, Kind
from .interrupts import INTERRUPT_KINDS
from .kinds_borders import BORDER_KINDS
from .kinds_calls import CALL_KINDS
from .kinds_checkpoint import CHECKPOINT_KINDS
from .kinds_model import MODEL_KINDS
from .kinds_owners import OWNER_KINDS
from .kinds_process import PROCESS_KINDS
from .kinds_step import STEP_KINDS

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        *(*STEP_KINDS, *MODEL_KINDS, *PROCESS_KINDS, *CHECKPOINT_KINDS, *CALL_KINDS, *BORDER_KINDS, *OWNER_KINDS),
        *INTERRUPT_KINDS,
    )
}


@lru_cache(maxsize=4096)
def fault_of(cell: Cell) -> Fault:
    """Return what goes wrong in a cell."""
    fault = KINDS[cell.kind].fault(cell)
    return replace(fault, expect=fault.expect.on_chain()) if cell.combo.form is Form.CHAINED else fault


def select(glob: str = "*", *, is_quick: bool = False) -> list[Cell]:
    """Return the cells whose kind, ``kind/place`` or name matches; or the first combination of each place only."""
    cells = [cell for kind in KINDS.values() for cell in kind.cells()]
    if is_quick:
        seen: set[tuple[str, str]] = set()
        cells = [cell for cell in cells if (cell.kind, cell.place) not in seen and not seen.add((cell.kind, cell.place))]
    return [
        cell for cell in cells if any(fnmatchcase(text, glob) for text in (cell.kind, f"{cell.kind}/{cell.place}", cell.name))
    ]
