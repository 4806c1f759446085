"""Layouts with named reduction groups: what each group has of its own, and what groups do not know of each other."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from layout_oracles import assert_shards_partition

from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import BufferLayout, ModelLayout, ParamSpec, build_layout, launch_order
from megabucket.testing import (
    assert_places,
    assert_sound,
    dp_sizes,
    layout_inputs,
    param_specs,
)

MODELS = param_specs(min_params=1, max_params=16, groups=["dense", "expert", "vision", "ü/ 1"])
BY_SIZE = layout_inputs(specs=MODELS, dp_size=dp_sizes(max_size=48), sizings=["bucket_size"], recorded_orders=False)


def test_each_group_is_cut_for_its_own_ranks_and_a_group_that_is_not_named_for_all():
    specs = [ParamSpec(name, (1000,), group=name) for name in ("dense", "expert", "vision")]

    layout = build_layout(specs, DistributedDataParallelConfig(), dp_size=8, group_sizes={"expert": 3, "audio": 5})

    assert [(buffer.key.group, buffer.num_shards, buffer.numel) for buffer in layout.buffers] == [
        ("dense", 8, 1024),
        ("expert", 3, 1152),  # lcm(3, 128) * 3
        ("vision", 8, 1024),
    ]


def test_dtypes_of_one_group_are_buffers_of_one_size():
    specs = [ParamSpec("a", (10,), "bfloat16", "vision"), ParamSpec("b", (10,), "float32", "vision"), ParamSpec("c", (10,))]

    layout = build_layout(specs, DistributedDataParallelConfig(), dp_size=4, group_sizes={"vision": 2})

    assert [(str(buffer.key), buffer.num_shards) for buffer in layout.buffers] == [
        ("vision/bfloat16->float32", 2),
        ("vision/float32->float32", 2),
        ("dense/float32->float32", 4),
    ]


def test_buckets_of_all_groups_are_launched_in_one_order():
    specs = [ParamSpec(f"{group}{i}", (100,), group=group) for i in range(2) for group in ("dense", "expert", "vision")]

    layout = build_layout(specs, DistributedDataParallelConfig(bucket_size=1), dp_size=2, group_sizes={"expert": 1})

    launched = [layout.buffers[id_.buffer].buckets[id_.bucket].params for id_ in launch_order(layout)]
    assert launched == [("vision1",), ("expert1",), ("dense1",), ("vision0",), ("expert0",), ("dense0",)]


@given(case=layout_inputs(specs=MODELS))
def test_layouts_of_several_groups_are_sound(case):
    layout = case.build()

    assert_sound(layout)
    assert_places(layout, case.specs)
    assert_shards_partition(layout)
    assert ModelLayout.from_json(layout.to_json()) == layout


@given(case=BY_SIZE)
def test_a_group_lies_as_if_it_were_alone_on_its_ranks(case):
    layout = case.build()

    for group in {spec.group for spec in case.specs}:
        indices = [index for index, spec in enumerate(case.specs) if spec.group == group]
        size = case.group_sizes.get(group, case.dp_size)
        alone = build_layout([case.specs[index] for index in indices], case.config, dp_size=size)
        together = [buffer for buffer in layout.buffers if buffer.key.group == group]
        assert together == [with_indices(buffer, indices) for buffer in alone.buffers]


def with_indices(buffer: BufferLayout, indices: list[int]) -> BufferLayout:
    """Count parameters over the whole model instead of over its own group."""
    slots = {name: slot._replace(registration_index=indices[slot.registration_index]) for name, slot in buffer.params.items()}
    return replace(buffer, params=slots)


@given(case=layout_inputs(specs=MODELS), data=st.data())
def test_a_group_is_known_by_nothing_but_its_name(case, data):
    old = data.draw(st.sampled_from(sorted({spec.group for spec in case.specs})))
    specs = [replace(spec, group="another") if spec.group == old else spec for spec in case.specs]
    sizes = {**case.group_sizes, "another": case.group_sizes.get(old, case.dp_size)}

    renamed = build_layout(specs, case.config, dp_size=case.dp_size, group_sizes=sizes)

    back = [replace(b, key=replace(b.key, group=old)) if b.key.group == "another" else b for b in renamed.buffers]
    assert ModelLayout(tuple(back)) == case.build()
    assert renamed != case.build()


@given(case=layout_inputs(specs=MODELS), size=dp_sizes())
def test_a_size_of_a_group_without_a_parameter_changes_nothing(case, size):
    sizes = {**case.group_sizes, "nobody's": size}

    assert case._replace(group_sizes=sizes).build().fingerprint == case.build().fingerprint
