"""Test tools for users of this library: strategies, assertions about layouts, ranks in one process, an emulated network.

Names are resolved on first use, so the hypothesis entry point and tests without hypothesis pay for nothing they do not use.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from megabucket.testing.fabric import EmulatedFabric, Lateness, fabric_lateness
    from megabucket.testing.invariants import (
        BUFFER_INVARIANTS,
        assert_json_round_trip,
        assert_layouts_equal,
        assert_places,
        assert_shards_partition,
        assert_sound,
        assert_views_are_a_bijection,
        check_layout,
    )
    from megabucket.testing.loopback import ListRecorder, LoopbackWorld
    from megabucket.testing.readers import read_megatron_layout, read_torch_ddp_layout
    from megabucket.testing.strategies import (
        LayoutInput,
        ddp_configs,
        dp_sizes,
        layout_inputs,
        model_layouts,
        param_shapes,
        param_specs,
    )

__all__ = [
    "BUFFER_INVARIANTS",
    "EmulatedFabric",
    "Lateness",
    "LayoutInput",
    "ListRecorder",
    "LoopbackWorld",
    "assert_json_round_trip",
    "assert_layouts_equal",
    "assert_places",
    "assert_shards_partition",
    "assert_sound",
    "assert_views_are_a_bijection",
    "check_layout",
    "ddp_configs",
    "dp_sizes",
    "fabric_lateness",
    "layout_inputs",
    "model_layouts",
    "param_shapes",
    "param_specs",
    "read_megatron_layout",
    "read_torch_ddp_layout",
]

_MODULES: Final = MappingProxyType(
    {name: f"{__name__}.invariants" if name.startswith("assert_") else f"{__name__}.strategies" for name in __all__}
    | dict.fromkeys(("ListRecorder", "LoopbackWorld"), f"{__name__}.loopback")
    | dict.fromkeys(("BUFFER_INVARIANTS", "check_layout"), f"{__name__}.invariants")
    | dict.fromkeys(("read_megatron_layout", "read_torch_ddp_layout"), f"{__name__}.readers")
    | dict.fromkeys(("EmulatedFabric", "Lateness", "fabric_lateness"), "megabucket.testing.fabric")
)


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
    return sorted(__all__)
