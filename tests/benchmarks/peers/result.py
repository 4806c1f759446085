"""The file of a result: JSON that any reader takes, also where a figure is missing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write the result; a half-written file never takes the place of a whole one."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(plain(result), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    beside.replace(path)


def plain(value: Any) -> Any:
    """Return the value with None for what JSON cannot say: infinite and nan."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
