"""The flat tensors an optimizer steps on: every element once, and no segment across a bucket, a shard or a group."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import ParamSpec, Span, build_layout
from megabucket.layout.segments import Segment, plan_segments
from megabucket.testing import dp_sizes, model_layouts, param_specs

LAYOUTS = model_layouts(specs=param_specs(min_params=1, max_params=8, max_numel=400), dp_size=dp_sizes(max_size=5))


def one_buffer(*numels, dp_size=1, **switches):
    specs = [ParamSpec(name, (numel,)) for name, numel in zip("abcdefgh", numels, strict=False)]
    (buffer,) = build_layout(specs, DistributedDataParallelConfig(**switches), dp_size=dp_size).buffers
    return buffer


class TestExamples:
    def test_neighbours_of_one_group_share_a_segment_with_the_gap_between_them(self):
        buffer = one_buffer(100, 100)  # b at [0, 100), a at [128, 228)

        segments = plan_segments(buffer, {"a": 0, "b": 0}, rank=0, is_sharded=False)

        assert segments == (Segment(0, Span(0, 228), ("b", "a")),)

    def test_a_segment_ends_where_the_group_changes(self):
        buffer = one_buffer(100, 100, 100)  # c at [0, 100), b at [128, 228), a at [256, 356)

        segments = plan_segments(buffer, {"a": 0, "b": 1, "c": 0}, rank=0, is_sharded=False)

        assert segments == (
            Segment(0, Span(0, 100), ("c",)),
            Segment(1, Span(128, 228), ("b",)),
            Segment(0, Span(256, 356), ("a",)),
        )

    def test_a_segment_ends_where_the_state_of_the_optimizer_is_another(self):
        buffer = one_buffer(100, 100, 100)
        steps = {"a": 2, "b": 1, "c": 1}

        segments = plan_segments(buffer, dict.fromkeys("abc", 0), rank=0, is_sharded=False, signature_of=steps)

        assert segments == (Segment(0, Span(0, 228), ("c", "b")), Segment(0, Span(256, 356), ("a",)))

    def test_a_segment_ends_with_its_bucket(self):
        buffer = one_buffer(100, 100, bucket_size=100)

        segments = plan_segments(buffer, {"a": 0, "b": 0}, rank=0, is_sharded=False)

        assert [segment.span for segment in segments] == [Span(0, 100), Span(128, 228)]

    def test_a_segment_ends_with_the_shard_and_the_next_rank_goes_on(self):
        buffer = one_buffer(100, 100, dp_size=2)  # 256 elements: rank 0 owns [0, 128), rank 1 [128, 256)

        segments = [plan_segments(buffer, {"a": 0, "b": 0}, rank=rank, is_sharded=True) for rank in range(2)]

        assert segments == [(Segment(0, Span(0, 100), ("b",)),), (Segment(0, Span(128, 228), ("a",)),)]

    def test_a_rank_with_nothing_but_padding_has_no_segment(self):
        buffer = one_buffer(100, dp_size=8)  # 128 elements, shards of 16: rank 6 owns [96, 112), rank 7 nothing

        assert plan_segments(buffer, {"a": 0}, rank=6, is_sharded=True) == (Segment(0, Span(96, 100), ("a",)),)
        assert plan_segments(buffer, {"a": 0}, rank=7, is_sharded=True) == ()

    @pytest.mark.parametrize("is_sharded", [True, False])
    def test_a_parameter_outside_the_groups_is_left_out_and_ends_a_segment(self, is_sharded):
        buffer = one_buffer(100, 100, 100)

        segments = plan_segments(buffer, {"a": 0, "c": 0}, rank=0, is_sharded=is_sharded)

        assert [(segment.span, segment.params) for segment in segments] == [(Span(0, 100), ("c",)), (Span(256, 356), ("a",))]

    def test_an_empty_parameter_is_in_no_segment(self):
        buffer = one_buffer(0, 100, 0)

        segments = plan_segments(buffer, {"a": 0, "b": 0, "c": 0}, rank=0, is_sharded=False)

        assert segments == (Segment(0, Span(0, 100), ("b",)),)


@given(layout=LAYOUTS, is_sharded=st.booleans(), data=st.data())
def test_the_segments_of_all_ranks_hold_every_element_of_a_group_once_and_no_element_of_another(layout, is_sharded, data):
    for buffer in layout.buffers:
        groups = data.draw(st.lists(st.sampled_from([None, 0, 1]), min_size=len(buffer.params), max_size=len(buffer.params)))
        group_of = {name: group for name, group in zip(buffer.params, groups, strict=True) if group is not None}
        ranks = range(buffer.num_shards) if is_sharded else [0]
        segments = [
            (rank, segment) for rank in ranks for segment in plan_segments(buffer, group_of, rank=rank, is_sharded=is_sharded)
        ]

        held = sorted((segment.span, segment.group) for _, segment in segments)
        assert all(before.stop <= after.start for (before, _), (after, _) in pairwise(held))
        for name, slot in buffer.params.items():
            pieces = [
                (max(slot.start, span.start), min(slot.stop, span.stop), group)
                for span, group in held
                if max(slot.start, span.start) < min(slot.stop, span.stop)
            ]
            assert sum(stop - start for start, stop, _ in pieces) == (slot.numel if name in group_of else 0)
            assert {group for _, _, group in pieces} <= {group_of.get(name)}


@given(layout=LAYOUTS, is_sharded=st.booleans(), data=st.data())
def test_a_segment_lies_in_one_bucket_and_one_shard_and_names_exactly_the_parameters_in_it(layout, is_sharded, data):
    for buffer in layout.buffers:
        groups = data.draw(st.lists(st.integers(0, 2), min_size=len(buffer.params), max_size=len(buffer.params)))
        group_of = dict(zip(buffer.params, groups, strict=True))
        rank = data.draw(st.integers(0, buffer.num_shards - 1))
        for segment in plan_segments(buffer, group_of, rank=rank, is_sharded=is_sharded):
            (bucket,) = {buffer.params[name].bucket for name in segment.params}
            inside = buffer.shard_span(bucket=bucket, rank=rank) if is_sharded else buffer.buckets[bucket]
            assert inside.start <= segment.span.start < segment.span.stop <= inside.stop
            touched = [
                name
                for name in buffer.buckets[bucket].params
                if max(segment.span.start, buffer.params[name].start) < min(segment.span.stop, buffer.params[name].stop)
            ]
            assert list(segment.params) == touched
            assert {group_of[name] for name in touched} == {segment.group}


@given(layout=LAYOUTS)
def test_with_one_group_there_is_at_most_one_segment_per_bucket(layout):
    for buffer in layout.buffers:
        segments = plan_segments(buffer, dict.fromkeys(buffer.params, 0), rank=0, is_sharded=True)

        assert len(segments) <= len(buffer.buckets)
