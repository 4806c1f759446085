"""Hypothesis strategies for layouts and their inputs. Public API.

Every argument is a keyword, every bound is checked when the strategy is made (``InvalidArgument``), and every docstring
says what its values shrink towards. The defaults keep parameters small enough to allocate; shapes are only numbers here,
so a test that allocates nothing may raise ``max_numel`` as far as it likes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any, Final, NamedTuple, get_args

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import ModelLayout, OwnerPlan, ParamSpec, build_layout, plan_owners
from megabucket.units import MIB

DTYPES: Final = ("float32", "bfloat16", "float16", "float64")
GROUPS: Final = ("dense", "expert", "vision")
LAYOUTS: Final = ("stable", "megatron")
SIZINGS: Final = ("default", "bucket_size", "bucket_cap_mb", "num_buckets", "bucket_cuts")

# Around the alignments (64, 128, 65536) and at primes is where arithmetic on positions goes wrong; 32-bit numbers end at 2**31
# and 2**32, also when both factors of a product fit into them.
_LANDMARK_SHAPES: Final = (
    *((size,) for size in (1, 2, 63, 64, 65, 97, 103, 127, 128, 129, 191, 193, 1021, 4093, 9025)),
    *((size,) for size in (65_535, 65_536, 65_537, 104_729, 2**31 - 1, 2**31, 2**31 + 11, 2**40 - 87)),
    *((46_341, 46_341), (65_536, 65_537), (3, 2**33)),
)

_MAX_BUCKET_SIZE: Final = 2**62  # the limit of the config

_EMPTY_SHAPES: Final = ((0,), (0, 7), (3, 0), (2, 0, 5))

_NAME_FORMS: Final = ("p{}", "layers.{}.weight", "block{}.attn.ü", 'odd "{}" \\ \n\u2028 name', "{}")


class LayoutInput(NamedTuple):
    """The arguments of ``build_layout`` as one value."""

    specs: tuple[ParamSpec, ...]
    config: DistributedDataParallelConfig
    dp_size: int
    group_sizes: Mapping[str, int] = MappingProxyType({})

    def build(self) -> ModelLayout:
        """Return this library's layout for it."""
        return build_layout(self.specs, self.config, dp_size=self.dp_size, group_sizes=self.group_sizes)


class OwnerInput(NamedTuple):
    """A model, and which of its parameters are updated whole."""

    case: LayoutInput
    params: frozenset[str]

    def build(self) -> tuple[ModelLayout, OwnerPlan]:
        """Return this library's layout and its plan of owners."""
        layout = self.case.build()
        return layout, plan_owners(layout, self.params)


def param_shapes(*, max_numel: int = 5_000, max_dims: int = 4, allow_empty: bool = True) -> SearchStrategy[tuple[int, ...]]:
    """Shapes of at most ``max_numel`` elements.

    Among them scalars (no dimension), shapes with a zero when ``allow_empty``, sizes next to the alignments, primes and, as
    far as ``max_numel`` lets them, shapes of more than 2**31 elements.

    Shrinks towards ``(1,)``.
    """
    _check_at_least(1, max_numel=max_numel, max_dims=max_dims)
    fitting = [shape for shape in _LANDMARK_SHAPES if math.prod(shape) <= max_numel and len(shape) <= max_dims]
    degenerate = [(), *(shape for shape in _EMPTY_SHAPES if allow_empty and len(shape) <= max_dims)]
    boxes = [_boxes(max_numel=max_numel, num_dims=num_dims) for num_dims in range(1, max_dims + 1)]
    return st.one_of([*boxes, st.sampled_from(fitting), st.sampled_from(degenerate)])


def param_specs(
    *,
    min_params: int = 1,
    max_params: int = 12,
    max_numel: int = 5_000,
    dtypes: Sequence[str] = DTYPES,
    groups: Sequence[str] = GROUPS,
    shared_embeddings: bool = True,
) -> SearchStrategy[tuple[ParamSpec, ...]]:
    """The parameters of a model, with distinct names, in registration order.

    About half of the models have one dtype and one group; the others mix all that are allowed.

    Shrinks towards ``min_params`` parameters of one element, called ``p0, p1, ...``, of ``dtypes[0]`` and ``groups[0]``.

    Args:
        max_numel: most elements of a single parameter.
        dtypes: names of the storage dtypes to draw from.
        groups: names of the reduction groups to draw from.
        shared_embeddings: whether some of the parameters have a copy on another pipeline stage.
    """
    _check_range(0, min_params=min_params, max_params=max_params)
    _check_members(known=DTYPES, dtypes=dtypes)
    if isinstance(groups, str) or not groups or not all(isinstance(group, str) and group for group in groups):
        raise InvalidArgument(f"groups={groups!r} must be a non-empty sequence of names")
    # One draw gives a parameter everything but its shape; embeddings are rare.
    weights = (False, False, False, False, True) if shared_embeddings else (False,)
    mixed = [(dtype, group, shared) for shared, dtype, group in product(weights, dtypes, groups)]
    uniform = [(dtypes[0], groups[0], shared) for shared in weights]
    shapes = param_shapes(max_numel=max_numel)

    def models(kinds: list[tuple[str, str, bool]]) -> SearchStrategy[list[tuple[tuple[int, ...], tuple[str, str, bool]]]]:
        return st.lists(st.tuples(shapes, st.sampled_from(kinds)), min_size=min_params, max_size=max_params)

    return _named_specs(models(uniform) | models(mixed), st.sampled_from(_NAME_FORMS))


def ddp_configs(
    *,
    layouts: Sequence[str] = LAYOUTS,
    sizings: Sequence[str] = SIZINGS,
    param_names: Sequence[str] = (),
) -> SearchStrategy[DistributedDataParallelConfig]:
    """Valid configs: every field takes every kind of value, and contradictory combinations are never built.

    ``bucket_cuts`` and ``bucket_order`` are drawn from ``param_names``; without names the configs fit every model.

    Shrinks towards the default config, as far as ``layouts`` and ``sizings`` allow: they are tried in the order given.

    Args:
        layouts: values of ``layout`` to draw from.
        sizings: the ways to size buckets to draw from; ``"default"`` gives none of the four fields.
        param_names: of the parameters of the model; distinct.
    """
    _check_members(known=LAYOUTS, layouts=layouts)
    _check_members(known=SIZINGS, sizings=sizings)
    return _configs(st.sampled_from(sizings), _switches(layouts), tuple(param_names))


def dp_sizes(*, min_size: int = 1, max_size: int = 1_024) -> SearchStrategy[int]:
    """Sizes of a data-parallel group: small ones, powers of two, and awkward ones in equal parts.

    Shrinks towards ``min_size``.
    """
    _check_range(1, min_size=min_size, max_size=max_size)
    powers = [2**i for i in range(max_size.bit_length()) if min_size <= 2**i <= max_size]
    kinds = [st.integers(min_size, min(max_size, min_size + 7)), st.integers(min_size, max_size)]
    return st.one_of([*kinds, st.sampled_from(powers)] if powers else kinds)


def layout_inputs(
    *,
    specs: SearchStrategy[tuple[ParamSpec, ...]] | None = None,
    dp_size: SearchStrategy[int] | None = None,
    layouts: Sequence[str] = LAYOUTS,
    sizings: Sequence[str] = SIZINGS,
    recorded_orders: bool = True,
) -> SearchStrategy[LayoutInput]:
    """Arguments of ``build_layout`` that it accepts, with bucket sizes that fit the model.

    Shrinks towards the smallest model, the default config, and a group of one rank.

    Args:
        specs: models; ``param_specs()`` when not given. Each must hold at least one parameter.
        dp_size: group sizes; ``dp_sizes()`` when not given. Sizes of groups other than ``dense`` are drawn
            from it as well.
        layouts: as in ``ddp_configs``.
        sizings: as in ``ddp_configs``.
        recorded_orders: whether some of the configs give a ``bucket_order``; without, the order is always that of registration,
            reversed.
    """
    _check_members(known=LAYOUTS, layouts=layouts)
    _check_members(known=SIZINGS, sizings=sizings)
    sizes = dp_sizes() if dp_size is None else dp_size
    models = param_specs() if specs is None else specs
    has_order = _BOTH if recorded_orders else (False,)
    return _layout_inputs(models, sizes, _switches(layouts), st.sampled_from(sizings), has_order)


def model_layouts(**arguments: Any) -> SearchStrategy[ModelLayout]:
    """Layouts as this library builds them; the arguments and the shrinking are those of ``layout_inputs``."""
    return layout_inputs(**arguments).map(LayoutInput.build)


def owner_inputs(*, inputs: SearchStrategy[LayoutInput] | None = None) -> SearchStrategy[OwnerInput]:
    """Models with any set of parameters that need an owner, empty ones and vectors among them.

    Shrinks towards the models of ``inputs`` without such a parameter.

    Args:
        inputs: the models; ``None``: ``layout_inputs()``.
    """
    return (layout_inputs() if inputs is None else inputs).flatmap(_with_owners)


def _with_owners(case: LayoutInput) -> SearchStrategy[OwnerInput]:
    names = [spec.name for spec in case.specs]
    chosen = st.frozensets(st.sampled_from(names)) if names else st.just(frozenset())
    return st.builds(OwnerInput, st.just(case), chosen)


_BOTH: Final = (False, True)

# All combinations that the config's validator accepts, the default first: hypothesis shrinks towards the first.
_VALID_SYNC: Final[tuple[dict[str, Any], ...]] = tuple(
    {"overlap_grad_reduce": overlap, "use_distributed_optimizer": sharded, "overlap_param_gather": gather, **way}
    for gather, sharded, overlap in product((False, True), (False, True), (True, False))
    if not gather or (sharded and overlap)
    for way in ({}, {"read_peer_memory": False}, {"reduce_scatter_with_fp32_accumulation": sharded})
)

_VALID_REDUCTION: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"grad_reduction": "mean", "average_in_collective": True},
    {"grad_reduction": "sum"},
)

_VALID_PRECISION: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"grad_reduce_in_fp32": False},
    {"grad_reduce_in_fp32": False, "param_name_patterns_for_fp32_local_accumulation": ("all",)},
)

_DEPENDENT: Final = {
    "layout",
    "reduction_order",
    *(name for way in (*_VALID_SYNC, *_VALID_REDUCTION, *_VALID_PRECISION) for name in way),
}


def _independent_switches() -> dict[str, SearchStrategy[Any]]:
    """Every flag and every choice of the config that fits with all others, its default first."""
    switches: dict[str, SearchStrategy[Any]] = {}
    for name, field in DistributedDataParallelConfig.model_fields.items():
        values = (False, True) if field.annotation is bool else get_args(field.annotation)
        if name not in _DEPENDENT and field.default in values:
            switches[name] = st.sampled_from([field.default, *(value for value in values if value != field.default)])
    return switches


_VALID_TIMES: Final[tuple[dict[str, Any], ...]] = tuple(
    {"heartbeat_s": heartbeat_s, "dead_after_s": dead_after_s, "straggler_warning_s": straggler_warning_s}
    for heartbeat_s, dead_after_s, straggler_warning_s in product((1.0, None, 0.25), (30.0, 2.5, 0.75), (30.0, None, 0.5))
    if heartbeat_s is None or dead_after_s > 2 * heartbeat_s
)


# Composite where ``map`` would do: a failing test then prints the value, which can be pasted, not a call of a private helper.
@st.composite
def _named_specs(
    draw: st.DrawFn,
    models: SearchStrategy[list[tuple[tuple[int, ...], tuple[str, str, bool]]]],
    name_forms: SearchStrategy[str],
) -> tuple[ParamSpec, ...]:
    """Distinct names by construction: the number of the parameter is part of every form."""
    params, name_form = draw(models), draw(name_forms)
    return tuple(
        ParamSpec(name_form.format(i), shape, dtype, group, shared) for i, (shape, (dtype, group, shared)) in enumerate(params)
    )


@st.composite
def _configs(
    draw: st.DrawFn, sizing: SearchStrategy[str], switches: SearchStrategy[dict[str, Any]], names: tuple[str, ...]
) -> DistributedDataParallelConfig:
    size = _draw_sizing(draw, draw(sizing), names, max_bucket_size=20_000, max_num_buckets=8)
    order = draw(_orders(names, _BOTH if names else (False,)))
    return DistributedDataParallelConfig(**size, **order, **draw(switches))


def _orders(names: tuple[str, ...], has_order: Sequence[bool]) -> SearchStrategy[dict[str, Any]]:
    """No recorded order, or any order of the parameters, shrinking towards that of registration."""
    order = st.permutations(names).map(lambda drawn: {"bucket_order": tuple(drawn)})
    return st.sampled_from(has_order).flatmap(lambda is_recorded: order if is_recorded else st.just({}))


def _boxes(*, max_numel: int, num_dims: int) -> SearchStrategy[tuple[int, ...]]:
    """Shapes of ``num_dims`` dimensions, each at most the root, so that the product needs no filter."""
    side = max_numel if num_dims == 1 else round(max_numel ** (1 / num_dims))
    while side**num_dims > max_numel:  # the root was rounded up
        side -= 1
    return st.tuples(*[st.integers(1, side)] * num_dims)


def _switches(layouts: Sequence[str]) -> SearchStrategy[dict[str, Any]]:
    """Every field of the config but those that size or order the buckets."""
    shaping = [{"layout": layout} for layout in layouts]
    shaping += [{"layout": "stable", "reduction_order": "rank"}] * ("stable" in layouts)
    parts = [st.sampled_from(part) for part in (_VALID_SYNC, _VALID_REDUCTION, _VALID_PRECISION, _VALID_TIMES, shaping)]
    return st.tuples(*parts, st.fixed_dictionaries(_independent_switches())).map(_merge)


def _draw_sizing(
    draw: st.DrawFn, way: str, names: Sequence[str], *, max_bucket_size: int, max_num_buckets: int
) -> dict[str, Any]:
    """One way to size buckets, as a field and its value."""
    if way == "bucket_size":
        return {way: draw(st.integers(1, max_bucket_size))}
    if way == "bucket_cap_mb":
        return {way: draw(st.integers(1, max_bucket_size)) * 8 / MIB}
    if way == "num_buckets":
        return {way: draw(st.integers(1, max_num_buckets))}
    if way == "bucket_cuts":
        flags = draw(st.tuples(*[st.booleans()] * len(names)))
        return {way: tuple(name for name, is_cut in zip(names, flags, strict=True) if is_cut)}
    return {}


@st.composite
def _layout_inputs(
    draw: st.DrawFn,
    specs: SearchStrategy[tuple[ParamSpec, ...]],
    dp_size: SearchStrategy[int],
    switches: SearchStrategy[dict[str, Any]],
    sizing: SearchStrategy[str],
    has_order: Sequence[bool],
) -> LayoutInput:
    """Composite, because sensible bucket sizes, cuts and orders depend on the model."""
    params = draw(specs)
    total_numel = max(1, sum(spec.numel for spec in params))
    # Half of the sizes cut small pieces out of whatever the model is, half range up to one bucket for all of it.
    max_bucket_size = min(total_numel + 1, _MAX_BUCKET_SIZE) if draw(st.booleans()) else min(total_numel, 2_000)
    max_num_buckets = max(1, min(total_numel, 2 * len(params)))
    names = tuple(spec.name for spec in params)
    size = _draw_sizing(draw, draw(sizing), names, max_bucket_size=max_bucket_size, max_num_buckets=max_num_buckets)
    config = DistributedDataParallelConfig(**size, **draw(_orders(names, has_order)), **draw(switches))
    others = sorted({*GROUPS, *(spec.group for spec in params)} - {"dense"})  # some sizes are of groups without a parameter
    return LayoutInput(params, config, draw(dp_size), draw(st.dictionaries(st.sampled_from(others), dp_size)))


def _merge(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def _check_at_least(minimum: int, **bounds: int) -> None:
    for name, value in bounds.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise InvalidArgument(f"{name}={value!r} must be an integer >= {minimum}")


def _check_range(minimum: int, **bounds: int) -> None:
    _check_at_least(minimum, **bounds)
    (low_name, low), (high_name, high) = bounds.items()
    if low > high:
        raise InvalidArgument(f"{low_name}={low} must not exceed {high_name}={high}")


def _check_members(*, known: Sequence[str], **given: Sequence[str]) -> None:
    for name, values in given.items():
        if isinstance(values, str) or not values or any(value not in known for value in values):
            raise InvalidArgument(f"{name}={values!r} must be a non-empty sequence out of {', '.join(known)}")
