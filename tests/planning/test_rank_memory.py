import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import ParamSpec, build_layout
from megabucket.planning.memory import RankMemory, memory_by_mode, rank_memory

SCRATCH = 48 + 8 + 4  # the fence, the norm, and one step count of Adam; a NaN for each parameter comes on top


def layout_of(specs, dp_size, **config):
    return build_layout(specs, DistributedDataParallelConfig(**config), dp_size=dp_size)


def specs(*, max_params=8):
    """Parameters of both widths with distinct names; shrinks towards one float32 element."""
    shapes = st.tuples(st.integers(0, 700), st.sampled_from(["float32", "bfloat16"]))
    return st.lists(shapes, min_size=1, max_size=max_params).map(
        lambda drawn: [ParamSpec(f"p{i}", (numel,), dtype) for i, (numel, dtype) in enumerate(drawn)]
    )


def test_a_float32_model_with_adam_costs_16_bytes_an_element_unsharded():
    layout = layout_of([ParamSpec("w", (256,))], dp_size=2)

    memory = rank_memory(layout, rank=0, is_sharded=False)

    assert memory == RankMemory(parameter_bytes=1024, gradient_bytes=1024, moment_bytes=2 * 1024, scratch_bytes=SCRATCH + 4)
    assert memory.total_bytes == 16 * 256 + SCRATCH + 4


def test_a_shard_of_two_halves_the_moments_and_nothing_else():
    layout = layout_of([ParamSpec("w", (256,))], dp_size=2)

    memory = rank_memory(layout, rank=0, is_sharded=True)

    assert memory == RankMemory(parameter_bytes=1024, gradient_bytes=1024, moment_bytes=2 * 512, scratch_bytes=SCRATCH + 4)


def test_16_bit_parameters_have_float32_gradients_main_parameters_and_moments():
    layout = layout_of([ParamSpec("w", (256,), "bfloat16")], dp_size=2)

    memory = rank_memory(layout, rank=1, is_sharded=True)

    assert memory == RankMemory(
        parameter_bytes=512,
        gradient_bytes=1024,
        main_parameter_bytes=512,
        moment_bytes=2 * 512,
        scratch_bytes=SCRATCH + 2,
    )


def test_16_bit_gradients_are_widened_for_the_owned_shard():
    layout = layout_of([ParamSpec("w", (256,), "bfloat16")], dp_size=2, grad_reduce_in_fp32=False)

    memory = rank_memory(layout, rank=0, is_sharded=True)

    assert (memory.gradient_bytes, memory.main_gradient_bytes) == (512, 512)


def test_a_plain_optimizer_keeps_its_moments_in_the_dtype_of_the_gradients():
    layout = layout_of([ParamSpec("w", (256,), "bfloat16")], dp_size=2, grad_reduce_in_fp32=False)

    memory = rank_memory(layout, rank=0, is_sharded=False, has_main_params=False)

    assert (memory.main_parameter_bytes, memory.moment_bytes) == (0, 2 * 512)


def test_alignment_gaps_and_padded_ends_are_padding():
    # w1 lies at 0..100, then a gap to 128, then w0 at 128..138, padded to 256: 256 - 110 = 146 elements of 4 + 4 bytes.
    layout = layout_of([ParamSpec("w0", (10,)), ParamSpec("w1", (100,))], dp_size=2)

    memory = rank_memory(layout, rank=0, is_sharded=False)

    assert memory.padding_bytes == 146 * 8


def test_gaps_inside_a_flat_tensor_of_the_optimizer_are_counted_once_for_each_copy():
    # w1 lies at 0..100, w0 at 128..138: one flat tensor of 138 elements, 28 of them a gap, in main parameters and two moments.
    layout = layout_of([ParamSpec("w0", (10,), "bfloat16"), ParamSpec("w1", (100,), "bfloat16")], dp_size=1)

    memory = rank_memory(layout, rank=0, is_sharded=True)

    assert memory.optimizer_padding_bytes == 28 * (4 + 8)
    assert memory.scratch_bytes == SCRATCH + 2 * 2
    two_groups = rank_memory(layout, rank=0, is_sharded=True, group_of={"w0": 0, "w1": 1})
    assert two_groups.optimizer_padding_bytes == 0  # a flat tensor each, and a step count each
    assert two_groups.scratch_bytes == SCRATCH + 2 * 2 + 4


def test_parameters_that_may_be_skipped_have_a_flat_tensor_each_and_a_byte_each():
    specs = [ParamSpec("w0", (10,), "bfloat16"), ParamSpec("w1", (100,), "bfloat16")]
    config = DistributedDataParallelConfig(unused_parameters="skip")

    memories = memory_by_mode(specs, config, dp_size=1)

    for memory in memories.values():
        assert memory.optimizer_padding_bytes == 0
        assert memory.scratch_bytes == 8 + 2 * 2 + 2 * 4 + 2  # the norm, and of each parameter a NaN, a step count, a byte


def test_what_is_given_for_activations_is_taken_as_it_is_and_one_rank_has_no_fence():
    config = DistributedDataParallelConfig()

    memory = memory_by_mode([ParamSpec("w", (256,))], config, dp_size=1, activation_bytes=12_345)["reduce_scatter"]

    assert (memory.activation_bytes, memory.scratch_bytes) == (12_345, 8 + 4 + 4)
    assert memory.total_bytes == 16 * 256 + 12_345 + 16


@pytest.mark.parametrize("moments", [0, 1, 2])
def test_moments_scale_with_their_number(moments):
    layout = layout_of([ParamSpec("w", (256,))], dp_size=1)

    assert rank_memory(layout, rank=0, is_sharded=False, moments_per_element=moments).moment_bytes == moments * 1024


@given(specs(), st.integers(1, 5))
def test_the_shards_of_all_ranks_hold_what_one_unsharded_rank_holds(some, dp_size):
    layout = layout_of(some, dp_size=dp_size, bucket_size=500)

    whole = rank_memory(layout, rank=0, is_sharded=False)
    ranks = [rank_memory(layout, rank=rank, is_sharded=True) for rank in range(dp_size)]

    for category in ("main_parameter_bytes", "main_gradient_bytes", "moment_bytes"):
        assert sum(getattr(memory, category) for memory in ranks) == getattr(whole, category)
    for memory in ranks:
        assert memory.parameter_bytes + memory.gradient_bytes == whole.parameter_bytes + whole.gradient_bytes
        assert memory.padding_bytes == whole.padding_bytes


@given(specs())
def test_parameters_gradients_and_padding_fill_the_buffers_exactly(some):
    layout = layout_of(some, dp_size=3)

    memory = rank_memory(layout, rank=0, is_sharded=True)

    width = {"float32": 4, "bfloat16": 2}
    buffers = sum(b.numel * (width[b.key.param_dtype] + width[b.key.grad_dtype]) for b in layout.buffers)
    assert memory.parameter_bytes + memory.gradient_bytes + memory.padding_bytes == buffers
