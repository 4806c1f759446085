"""Theorems about every layout, each checked on at least 2,000 random inputs; on 500 where it follows from others.

The facts are computed here from the layout's numbers alone; the library's own ``check_layout`` is one theorem among them, and
``test_layout_oracle.py`` compares with a second implementation.
"""

import json
from dataclasses import replace
from itertools import pairwise
from math import lcm

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from layout_oracles import assert_shards_partition, assert_views_are_a_bijection

from megabucket.config import DistributedDataParallelConfig
from megabucket.errors import LayoutError
from megabucket.layout import ModelLayout, ParamSpec, build_layout, launch_order
from megabucket.testing import (
    LayoutInput,
    assert_places,
    assert_sound,
    ddp_configs,
    dp_sizes,
    layout_inputs,
    model_layouts,
    param_specs,
)
from megabucket.testing.invariants import check_layout, layout_diff

# Shapes are numbers only, so parameters may be larger than any memory; what allocates or visits each rank draws small.
HUGE_MODELS = param_specs(max_params=8, max_numel=2**41)
SMALL_MODELS = param_specs(max_params=8, max_numel=400)
TWO_OR_MORE = param_specs(min_params=2, max_params=8, max_numel=2**41)


@given(case=layout_inputs(specs=HUGE_MODELS))
def test_every_parameter_is_in_one_bucket_of_the_one_buffer_of_its_dtypes_and_group(case):
    layout = case.build()

    assert_places(layout, case.specs)
    keys = [buffer.key for buffer in layout.buffers]
    assert len(set(keys)) == len(keys)
    for buffer in layout.buffers:
        listed = [name for bucket in buffer.buckets for name in bucket.params]
        assert sorted(listed) == sorted(buffer.params)
        widened = case.config.grad_reduce_in_fp32 and buffer.key.param_dtype in ("bfloat16", "float16")
        assert buffer.key.grad_dtype == ("float32" if widened else buffer.key.param_dtype)


def expected_order(case: LayoutInput) -> list[str]:
    """The names in the order in which backward is expected to make gradients."""
    if case.config.bucket_order is not None:
        return list(case.config.bucket_order)
    return [spec.name for spec in reversed(case.specs)]


@given(case=layout_inputs(specs=HUGE_MODELS))
def test_parameters_have_their_numel_and_follow_each_other_as_gradients_do_inside_their_buckets(case):
    numels = {spec.name: spec.numel for spec in case.specs}
    place = {name: i for i, name in enumerate(expected_order(case))}

    for buffer in case.build().buffers:
        end_of_last = 0
        place_of_last = -1
        for bucket in buffer.buckets:
            for name in bucket.params:
                slot = buffer.params[name]
                assert slot.stop - slot.start == numels[name]
                assert slot.start >= end_of_last  # disjoint, and in buffer order
                assert place[name] > place_of_last
                assert bucket.start <= slot.start <= slot.stop <= bucket.start + bucket.numel_unpadded <= bucket.stop
                assert slot.bucket == bucket.index
                end_of_last, place_of_last = slot.stop, place[name]


@given(case=layout_inputs(specs=HUGE_MODELS))
def test_buckets_tile_the_buffer_and_padded_ones_are_aligned_and_cut_into_equal_shards(case):
    padded = case.config.layout == "stable" or case.config.use_distributed_optimizer

    for buffer in case.build().buffers:
        ends = [0, *(end for bucket in buffer.buckets for end in (bucket.start, bucket.stop)), buffer.numel]
        assert all(stop == start for stop, start in list(pairwise(ends))[::2])
        assert [bucket.index for bucket in buffer.buckets] == list(range(len(buffer.buckets)))
        num_ranks = case.group_sizes.get(buffer.key.group, case.dp_size)
        assert buffer.num_shards == (num_ranks if padded else 1)
        if padded:
            divisor = lcm(num_ranks, 128, 65_536 if case.config.pad_buckets_for_high_nccl_busbw else 1)
            assert all(bucket.stop % divisor == 0 for bucket in buffer.buckets)
            assert all(bucket.numel % num_ranks == 0 for bucket in buffer.buckets)
            assert all(slot.start % 64 == 0 for slot in buffer.params.values())


@given(case=layout_inputs(specs=HUGE_MODELS))
def test_padding_is_less_than_one_divisor_per_bucket_and_64_per_parameter(case):
    for buffer in case.build().buffers:
        padding = buffer.numel - sum(spec.numel for spec in case.specs if spec.name in buffer.params)
        limit = sum((buffer.end_multiple - 1) + len(bucket.params) * (buffer.start_alignment - 1) for bucket in buffer.buckets)
        assert 0 <= padding <= limit
        assert buffer.padding_fraction <= limit / max(buffer.numel, 1)


@given(case=layout_inputs(specs=HUGE_MODELS))
def test_buckets_reach_the_bucket_size_but_the_last_and_overshoot_by_less_than_one_parameter_and_its_gap(case):
    for buffer in case.build().buffers:
        largest = max(slot.numel for slot in buffer.params.values())
        for bucket, following in zip(buffer.buckets, [*buffer.buckets[1:], None], strict=True):
            assert bucket.params
            if buffer.bucket_size is None:
                continue
            assert bucket.numel_unpadded < buffer.bucket_size + (buffer.start_alignment - 1) + largest
            shared = [
                buffer.params[name].shared_embedding for name in (*bucket.params, *(following.params if following else ()))
            ]
            if following is not None and not any(shared):
                assert bucket.numel_unpadded >= buffer.bucket_size


@given(case=layout_inputs(specs=HUGE_MODELS, sizings=["bucket_cuts"]))
def test_buckets_end_at_each_cut_and_nowhere_else_but_around_shared_embeddings(case):
    padded = case.config.layout == "stable" or case.config.use_distributed_optimizer
    cuts = set(case.config.bucket_cuts)
    if case.config.layout == "megatron" and not case.config.overlap_grad_reduce:
        cuts = set()  # one bucket, whatever sizes the buckets
    alone = {spec.name for spec in case.specs if spec.shared_embedding and padded}

    for buffer in case.build().buffers:
        in_order = [name for name in expected_order(case) if name in buffer.params]
        runs, run = [], []
        for name, following in zip(in_order, [*in_order[1:], None], strict=True):
            run.append(name)
            if name in cuts or name in alone or following in alone or following is None:
                runs.append(tuple(run))
                run = []
        assert [bucket.params for bucket in buffer.buckets] == runs
        assert (buffer.bucket_size, set(buffer.cuts or ())) == (None, cuts & set(buffer.params))
    backwards = {**case.config.model_dump(), "bucket_cuts": case.config.bucket_cuts[::-1]}
    assert case._replace(config=DistributedDataParallelConfig(**backwards)).build() == case.build()


@given(case=layout_inputs(specs=HUGE_MODELS, recorded_orders=False))
def test_the_cuts_of_a_size_and_the_order_of_registration_written_down_give_the_same_buffers(case):
    by_size = case.build()
    cuts = [bucket.params[-1] for buffer in by_size.buffers for bucket in buffer.buckets]
    order = [spec.name for spec in reversed(case.specs)]
    sizes = {"bucket_size": None, "bucket_cap_mb": None, "num_buckets": None}
    written = {**case.config.model_dump(), **sizes, "bucket_cuts": cuts, "bucket_order": order}

    by_name = case._replace(config=DistributedDataParallelConfig(**written)).build()

    assert [positions_of(buffer) for buffer in by_name.buffers] == [positions_of(buffer) for buffer in by_size.buffers]
    assert launch_order(by_name) == launch_order(by_size)


def positions_of(buffer):
    # A cut that stands where a shared embedding cuts anyway closes before the gap to the embedding, which then does not count.
    slots = {name: (slot.start, slot.stop, slot.bucket) for name, slot in buffer.params.items()}
    return slots, [(bucket.start, bucket.stop, bucket.params) for bucket in buffer.buckets]


@given(layout=model_layouts(specs=HUGE_MODELS))
def test_no_built_layout_violates_a_named_invariant(layout):
    assert_sound(layout)


@given(layout=model_layouts(specs=SMALL_MODELS, dp_size=dp_sizes(max_size=16)))
def test_distinct_numbers_written_through_the_views_are_a_permutation_in_the_flat_buffer(layout):
    # 65536-element padding of a dozen buckets is a few MB: not too much to allocate.
    assert_views_are_a_bijection(layout)


@given(layout=model_layouts(specs=HUGE_MODELS, dp_size=dp_sizes(max_size=12)))
@example(layout=build_layout([ParamSpec("a", (100,))], DistributedDataParallelConfig(), dp_size=1_024))
def test_shards_of_all_ranks_are_disjoint_and_cover_and_their_pieces_continue_one_another(layout):
    assert_shards_partition(layout)


@given(case=layout_inputs(specs=param_specs(max_params=8, max_numel=2**41, shared_embeddings=False), sizings=["bucket_size"]))
def test_an_endless_bucket_size_gives_one_bucket_and_size_1_one_filled_parameter_each_in_the_same_order(case):
    def build(bucket_size):
        # Overlap on: Megatron's layout ignores the size without it.
        fields = {**case.config.model_dump(), "bucket_size": bucket_size, "overlap_grad_reduce": True}
        return case._replace(config=DistributedDataParallelConfig(**fields)).build()

    endless, given_size, smallest = build(2**62), build(case.config.bucket_size), build(1)

    assert all(len(buffer.buckets) == 1 for buffer in endless.buffers)
    for buffer in smallest.buffers:
        for bucket in buffer.buckets:
            assert not any(buffer.params[name].numel for name in bucket.params[:-1])  # empty parameters fill no bucket
    assert order_of(endless) == order_of(given_size) == order_of(smallest)


def order_of(layout: ModelLayout) -> list[list[str]]:
    return [[name for bucket in buffer.buckets for name in bucket.params] for buffer in layout.buffers]


# All that a layout may depend on. A field that is added to the config must not shape the stable layout, or be named here.
SHAPING_FIELDS = (
    "layout",
    "bucket_size",
    "bucket_cap_mb",
    "num_buckets",
    "bucket_cuts",
    "bucket_order",
    "pad_buckets_for_high_nccl_busbw",
    "grad_reduce_in_fp32",
    "param_name_patterns_for_fp32_local_accumulation",  # shapes nothing, but must fit the field before
)


@given(case=layout_inputs(specs=HUGE_MODELS, layouts=["stable"]), other=ddp_configs(layouts=["stable"], sizings=["default"]))
def test_the_stable_layout_does_not_depend_on_overlap_sharding_or_any_other_switch(case, other):
    shaping = {name: getattr(case.config, name) for name in SHAPING_FIELDS}
    switched = DistributedDataParallelConfig(**{**other.model_dump(), **shaping})

    layout = case._replace(config=switched).build()

    assert layout == case.build()
    assert layout.fingerprint == case.build().fingerprint


@given(layout=model_layouts(specs=HUGE_MODELS))
def test_reading_what_was_written_gives_the_same_layout_text_and_fingerprint(layout):
    again = ModelLayout.from_json(layout.to_json())

    assert (again, again.to_json(), again.fingerprint) == (layout, layout.to_json(), layout.fingerprint)


# numpy has no bfloat16; any type of two bytes allocates the same.
NUMPY_TYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@given(layout=model_layouts(specs=SMALL_MODELS, dp_size=dp_sizes(max_size=16)))
def test_predicted_gradient_bytes_are_the_bytes_that_an_array_of_the_buffer_takes(layout):
    for buffer in layout.buffers:
        allocated = np.empty(buffer.numel, NUMPY_TYPES[buffer.key.grad_dtype])
        assert buffer.grad_bytes == allocated.nbytes
        shards = [buffer.shard_span(bucket=b.index, rank=rank) for b in buffer.buckets for rank in range(buffer.num_shards)]
        assert sum(allocated[shard.start : shard.stop].nbytes for shard in shards) == buffer.grad_bytes


def change_spec(**changes):
    """Return a change of one field of the parameter at ``position``."""

    def change(case: LayoutInput, position: int) -> LayoutInput:
        specs = list(case.specs)
        spec = specs[position % len(specs)]
        specs[position % len(specs)] = replace(spec, **{name: value(spec) for name, value in changes.items()})
        return case._replace(specs=tuple(specs))

    return change


def swap_neighbours(case: LayoutInput, position: int) -> LayoutInput:
    specs = list(case.specs)
    i = position % (len(specs) - 1)
    specs[i], specs[i + 1] = specs[i + 1], specs[i]
    return case._replace(specs=tuple(specs))


def drop_one(case: LayoutInput, position: int) -> LayoutInput:
    i = position % len(case.specs)
    return case._replace(specs=case.specs[:i] + case.specs[i + 1 :])


def change_config(name, value):
    def change(case: LayoutInput, _position: int) -> LayoutInput:
        fields = case.config.model_dump()
        return case._replace(config=DistributedDataParallelConfig(**{**fields, name: value(fields[name])}))

    return change


CHANGES = {
    "name": change_spec(name=lambda spec: spec.name + "'"),
    "a dimension of one": change_spec(shape=lambda spec: (*spec.shape, 1)),
    "a dimension of two": change_spec(shape=lambda spec: (*spec.shape, 2)),
    "dtype": change_spec(dtype=lambda spec: "float64" if spec.dtype != "float64" else "float32"),
    "group": change_spec(group=lambda spec: "expert" if spec.group == "dense" else "dense"),
    "shared embedding": change_spec(shared_embedding=lambda spec: not spec.shared_embedding),
    "order": swap_neighbours,
    "one parameter less": drop_one,
    "dp_size": lambda case, _position: case._replace(dp_size=case.dp_size + 1),
    "bucket_size": change_config("bucket_size", lambda size: size + 1),
    "high bus bandwidth": change_config("pad_buckets_for_high_nccl_busbw", lambda flag: not flag),
}


@given(
    case=layout_inputs(specs=TWO_OR_MORE, layouts=["stable"], sizings=["bucket_size"], recorded_orders=False),
    what=st.sampled_from(list(CHANGES)),
    position=st.integers(0, 7),
)
def test_any_single_change_of_the_input_changes_the_fingerprint_and_shows_in_the_diff(case, what, position):
    case = case._replace(group_sizes={})  # or a change of dp_size would be none for a model of experts
    changed = CHANGES[what](case, position)

    ours, theirs = case.build(), changed.build()

    assert ours.fingerprint != theirs.fingerprint
    assert ours != theirs
    assert layout_diff(ours, theirs) != ()
    assert (layout_diff(ours, case.build()), ours.fingerprint) == ((), case.build().fingerprint)


@given(case=layout_inputs(specs=TWO_OR_MORE, layouts=["stable"], sizings=["bucket_cuts"]), data=st.data())
def test_another_cut_and_any_other_order_change_the_fingerprint_and_show_in_the_diff(case, data):
    names = [spec.name for spec in case.specs]
    cuts = set(case.config.bucket_cuts) ^ {data.draw(st.sampled_from(names))}
    order = data.draw(st.permutations(names).filter(lambda order: tuple(order) != case.config.bucket_order))
    fields = case.config.model_dump()

    layout = case.build()

    for changed in ({"bucket_cuts": tuple(cuts)}, {"bucket_order": tuple(order)}):
        other = case._replace(config=DistributedDataParallelConfig(**{**fields, **changed})).build()
        assert other.fingerprint != layout.fingerprint
        assert other != layout
        assert layout_diff(layout, other) != ()


@given(case=layout_inputs(specs=HUGE_MODELS))
def test_the_launch_order_has_every_bucket_once_as_the_last_gradients_come_and_those_of_a_buffer_in_index_order(case):
    layout = case.build()
    place = {name: i for i, name in enumerate(expected_order(case))}

    order = launch_order(layout)

    last_gradients = [place[layout.buffers[where].buckets[bucket].params[-1]] for where, bucket in order]
    assert last_gradients == sorted(last_gradients)
    assert len(set(order)) == len(order) == layout.num_buckets
    for index, buffer in enumerate(layout.buffers):
        assert [bucket for where, bucket in order if where == index] == list(range(len(buffer.buckets)))


POSITIONS = {"params": ("start", "stop", "bucket"), "buckets": ("index", "start", "stop", "numel_unpadded")}


@given(
    layout=model_layouts(specs=HUGE_MODELS),
    choice=st.integers(0, 2**16),
    delta=st.sampled_from([1, -1, 63, 64, -64, 128, -128, 65_536, 2**31]) | st.integers(1, 2**42),
)
def test_one_wrong_position_anywhere_is_noticed(layout, choice, delta):
    data = json.loads(layout.to_json())
    places = [
        (entry, field)
        for buffer in data["buffers"]
        for kind, fields in POSITIONS.items()
        for entry in buffer[kind]
        for field in fields
        # A bucket before a shared embedding may end with or without the gap; see check_layout.
        if field != "numel_unpadded" or not has_shared_embeddings(buffer)
    ]
    entry, field = places[choice % len(places)]
    entry[field] += delta

    damaged = ModelLayout.from_json(json.dumps(data))

    assert check_layout(damaged) != []


def has_shared_embeddings(buffer: dict) -> bool:
    return any(param["shared_embedding"] for param in buffer["params"])


ANY_JSON = st.sampled_from([None, True, -1, 0, 1, 7, 2**70, 1.5, "", "p0", "float32", [], {}, [0], ["p0"], [-2, -3], [[]]])


@given(layout=model_layouts(specs=HUGE_MODELS), choice=st.integers(0, 2**16), value=ANY_JSON)
def test_a_damaged_text_is_refused_or_gives_a_layout_that_can_be_checked(layout, choice, value):
    data = json.loads(layout.to_json())
    places = list(every_place(data))
    node, key = places[choice % len(places)]
    node[key] = value

    try:
        damaged = ModelLayout.from_json(json.dumps(data))
    except LayoutError:
        return

    assert all(isinstance(text, str) for text in check_layout(damaged))
    assert hash(ModelLayout.from_json(damaged.to_json())) == hash(damaged)
    assert layout_diff(damaged, ModelLayout.from_json(damaged.to_json())) == ()


def every_place(node):
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield node, key
        yield from every_place(child)
