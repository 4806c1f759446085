"""Test tools for users of this library: strategies, assertions about layouts, ranks in one process, an emulated network.

Names are resolved on first use, so the hypothesis entry point and tests without hypothesis import only what they use.
"""

# ruff: noqa: F403 - only type checkers read the stars

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megabucket.testing.fabric import *
    from megabucket.testing.invariants import *
    from megabucket.testing.loopback import *
    from megabucket.testing.readers import *
    from megabucket.testing.strategies import *

_NAMES = {
    "fabric": ("EmulatedFabric", "Lateness", "fabric_lateness"),
    "invariants": (
        "BUFFER_INVARIANTS",
        "assert_layouts_equal",
        "assert_owners_sound",
        "assert_places",
        "assert_sound",
        "check_layout",
        "check_owners",
    ),
    "loopback": ("ListRecorder", "LoopbackWorld"),
    "readers": ("read_megatron_layout", "read_torch_ddp_layout"),
    "strategies": (
        "LayoutInput",
        "OwnerInput",
        "ddp_configs",
        "dp_sizes",
        "layout_inputs",
        "model_layouts",
        "owner_inputs",
        "param_shapes",
        "param_specs",
    ),
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULES)  # noqa: PLE0605 - one list is enough


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        hint = f"{__name__}.{name} draws examples with hypothesis, which is not installed: pip install 'megabucket[testing]'"
        raise ModuleNotFoundError(hint, name="hypothesis") from None


def __dir__() -> list[str]:
    return __all__
