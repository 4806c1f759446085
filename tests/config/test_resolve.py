"""The rules that derive values, each with its arithmetic, and the reasons given for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.cli.explain_text import resolve
from megabucket.config import DistributedDataParallelConfig
from megabucket.config.resolve import (
    StepPolicy,
    bucket_end_multiple,
    fp32_local_params,
    is_padded,
    resolve_bucket_size,
    resolve_cuts,
    resolve_grad_dtype,
    resolve_step,
)
from megabucket.errors import ConfigError, LayoutError

Config = DistributedDataParallelConfig


def bucket_size(config, *, dp_size=1, total_numel=1_000, grad_itemsize_bytes=4):
    size = resolve_bucket_size(config, dp_size=dp_size, total_numel=total_numel, grad_itemsize_bytes=grad_itemsize_bytes)
    return size.numel


@pytest.mark.parametrize(
    ("dp_size", "elements"),
    [(1, 40_000_000), (40, 40_000_000), (41, 41_000_000), (512, 512_000_000)],  # max(40 M, 1 M * dp)
)
def test_the_default_bucket_size_grows_with_the_group(dp_size, elements):
    assert bucket_size(Config(), dp_size=dp_size) == elements


@pytest.mark.parametrize(
    ("cap_mb", "itemsize", "elements"),
    [
        (25, 4, 6_553_600),  # 25 * 2**20 / 4
        (25, 2, 13_107_200),  # 25 * 2**20 / 2
        (1e-5, 4, 2),  # 10.48576 bytes hold two float32
        (1e-9, 8, 1),  # less than one element still closes after one
    ],
)
def test_a_cap_in_mebibytes_counts_gradient_bytes(cap_mb, itemsize, elements):
    assert bucket_size(Config(bucket_cap_mb=cap_mb), grad_itemsize_bytes=itemsize) == elements


@pytest.mark.parametrize(("num_buckets", "elements"), [(1, 1_000), (3, 333), (999, 1), (1_000, 1)])
def test_a_number_of_buckets_divides_the_elements(num_buckets, elements):
    assert bucket_size(Config(num_buckets=num_buckets)) == elements


def test_more_buckets_than_elements_are_refused():
    with pytest.raises(ConfigError) as caught:
        bucket_size(Config(num_buckets=1_001))

    assert str(caught.value) == (
        "num_buckets=1001 is more than the 1000 elements there are to put into buckets. "
        "Ask for at most 1000, or give bucket_size instead."
    )


def test_a_given_bucket_size_is_taken_as_it_is():
    assert bucket_size(Config(bucket_size=7), dp_size=512) == 7


@pytest.mark.parametrize("sizing", [{}, {"bucket_size": 7}, {"bucket_cap_mb": 1}, {"num_buckets": 3}])
def test_megatron_without_overlap_has_one_bucket_however_buckets_are_sized(sizing):
    assert bucket_size(Config(layout="megatron", overlap_grad_reduce=False, **sizing)) is None


def test_the_stable_layout_keeps_its_buckets_without_overlap():
    assert bucket_size(Config(overlap_grad_reduce=False)) == 40_000_000


@pytest.mark.parametrize(
    ("in_fp32", "param_dtype", "grad_dtype"),
    [
        (True, "bfloat16", "float32"),
        (True, "float16", "float32"),
        (True, "float32", "float32"),
        (True, "float64", "float64"),
        (False, "bfloat16", "bfloat16"),
        (False, "float16", "float16"),
        (False, "float32", "float32"),
        (False, "float64", "float64"),
    ],
)
def test_sixteen_bit_parameters_get_float32_gradients_unless_told_otherwise(in_fp32, param_dtype, grad_dtype):
    assert resolve_grad_dtype(Config(grad_reduce_in_fp32=in_fp32), param_dtype) == grad_dtype


def test_a_dtype_no_buffer_holds_has_no_gradient_dtype():
    with pytest.raises(LayoutError, match="dtype 'int8' cannot be held by a buffer"):
        resolve_grad_dtype(Config(), "int8")


@pytest.mark.parametrize(
    ("layout", "distributed", "padded"),
    [("stable", False, True), ("stable", True, True), ("megatron", False, False), ("megatron", True, True)],
)
def test_only_megatron_without_the_distributed_optimizer_is_unpadded(layout, distributed, padded):
    assert is_padded(Config(layout=layout, use_distributed_optimizer=distributed)) is padded


@pytest.mark.parametrize(
    ("dp_size", "high_busbw", "multiple"),
    [
        (1, False, 128),
        (2, False, 128),
        (3, False, 384),  # 3 * 128
        (512, False, 512),
        (3, True, 196_608),  # 3 * 65536
        (8, True, 65_536),
    ],
)
def test_a_padded_bucket_ends_at_a_multiple_of_the_group_and_the_alignment(dp_size, high_busbw, multiple):
    assert bucket_end_multiple(Config(pad_buckets_for_high_nccl_busbw=high_busbw), dp_size) == multiple


def test_an_unpadded_bucket_ends_anywhere():
    assert bucket_end_multiple(Config(layout="megatron"), 8) == 1


@pytest.mark.parametrize("dp_size", [0, -1, True, 2.0, None])
def test_what_is_no_group_size_is_refused(dp_size):
    with pytest.raises(LayoutError) as caught:
        resolve(Config(), dp_size=dp_size)

    assert str(caught.value) == (f"dp_size={dp_size!r} is not a group size; give the number of data-parallel ranks, at least 1")


@pytest.mark.parametrize(
    ("config", "name", "value", "reason"),
    [
        (Config(), "bucket_size", 40_000_000, "default: max(40_000_000, 1_000_000 * dp_size=4)"),
        (Config(bucket_size=9), "bucket_size", 9, "bucket_size, as given"),
        (Config(bucket_cap_mb=1), "bucket_size", 262_144, "bucket_cap_mb=1 MiB of gradients at 4 bytes per element"),
        (Config(num_buckets=4), "bucket_size", 250, "num_buckets=4: 1_000 elements // 4"),
        (
            Config(),
            "gradient_scale",
            0.25,
            "grad_reduction='mean': 1 / dp_size=4, each gradient is multiplied by it before the sum",
        ),
        (Config(average_in_collective=True), "reduce_op", "avg", "average_in_collective=True: the collective divides"),
        (Config(grad_reduction="sum"), "gradient_scale", 1.0, "grad_reduction='sum': the plain sum over the ranks"),
        (
            Config(use_distributed_optimizer=True),
            "collective",
            "reduce_scatter",
            "use_distributed_optimizer=True: a rank needs its shard only",
        ),
        (
            Config(finish="explicit"),
            "finished_by",
            "finish_grad_sync()",
            "finish='explicit': the caller ends the gradient sync",
        ),
        (
            Config(use_distributed_optimizer=True),
            "finished_by",
            "optimizer step",
            "finish='auto' with reduce-scatter: DistributedOptimizer.step() waits for the gradients",
        ),
        (
            Config(),
            "overlaps_backward",
            False,
            "everything fits into one bucket, complete only when backward ends; a smaller bucket_size would overlap",
        ),
        (
            Config(bucket_size=10),
            "overlaps_backward",
            True,
            "overlap_grad_reduce=True: a bucket is launched as soon as its gradients are complete",
        ),
        (
            Config(bucket_groups="single", bucket_size=10),
            "overlaps_backward",
            False,
            "bucket_groups='single': all buckets wait for the last gradient",
        ),
        (
            Config(layout="megatron", overlap_grad_reduce=False),
            "bucket_size",
            None,
            "layout='megatron' without overlap_grad_reduce: one bucket per buffer, whatever sizes the buckets",
        ),
        (
            Config(bucket_cuts=["b", "c"]),
            "bucket_size",
            None,
            "bucket_cuts: 2 named parameters close a bucket each",
        ),
        (Config(bucket_cuts=["b"]), "bucket_size", None, "bucket_cuts: 1 named parameter closes a bucket"),
        (Config(bucket_cuts=[]), "bucket_size", None, "bucket_cuts=[]: no parameter closes a bucket, so each buffer is one"),
        (
            Config(bucket_cuts=["b"]),
            "overlaps_backward",
            True,
            "overlap_grad_reduce=True: a bucket is launched as soon as its gradients are complete",
        ),
        (
            Config(bucket_cuts=[]),
            "overlaps_backward",
            False,
            "everything fits into one bucket, complete only when backward ends; a smaller bucket_size would overlap",
        ),
        (
            Config(layout="megatron", overlap_grad_reduce=False, bucket_cuts=["b"]),
            "bucket_size",
            None,
            "layout='megatron' without overlap_grad_reduce: one bucket per buffer, whatever sizes the buckets",
        ),
        (Config(bucket_order=["b", "a"]), "buffer_order", "recorded", "bucket_order: 2 parameters, the first gradient first"),
        (
            Config(layout="megatron"),
            "padded",
            False,
            "layout='megatron' without use_distributed_optimizer packs parameters back to back",
        ),
    ],
)
def test_each_value_comes_with_its_reason(config, name, value, reason):
    entry = resolve(config, dp_size=4, total_numel=1_000)[name]

    assert (entry.value, entry.reason) == (value, reason)


def test_a_float16_mean_is_said_to_be_divided_in_two_parts():
    entry = resolve(Config(grad_reduce_in_fp32=False), dp_size=4, param_dtype="float16")["gradient_scale"]

    assert entry.reason == (
        "grad_reduction='mean': 1 / dp_size=4, "
        "partly before and partly after the sum, so that float16 neither overflows nor underflows"
    )


def test_a_16_bit_gradient_is_said_to_be_added_up_in_float32_where_a_name_matches():
    local = Config(grad_reduce_in_fp32=False, param_name_patterns_for_fp32_local_accumulation=["*.bias", "norm.*"])

    assert resolve(local, dp_size=4, param_dtype="bfloat16")["grad_dtype"].reason == (
        "grad_reduce_in_fp32=False keeps the dtype of the bfloat16 parameters; "
        "microbatches are added up in float32 where a name matches '*.bias', 'norm.*'"
    )


@pytest.mark.parametrize(
    ("patterns", "names"),
    [((), ""), (("all",), "a.w a.b B.b"), (("*.b",), "a.b B.b"), (("a.*", "B.?"), "a.w a.b B.b"), (("b.*",), "")],
    ids=str,
)
def test_names_that_match_a_pattern_are_added_up_in_float32(patterns, names):
    config = Config(grad_reduce_in_fp32=False, param_name_patterns_for_fp32_local_accumulation=patterns)

    assert fp32_local_params(config, ["a.w", "a.b", "B.b"]) == set(names.split())


@pytest.mark.parametrize(
    ("switches", "cuts"),
    [
        ({}, None),
        ({"bucket_cuts": ["b"]}, ("b",)),
        ({"bucket_cuts": ["b"], "overlap_grad_reduce": False}, ("b",)),
        ({"bucket_cuts": ["b"], "layout": "megatron"}, ("b",)),
        ({"bucket_cuts": ["b"], "layout": "megatron", "overlap_grad_reduce": False}, None),
    ],
)
def test_cuts_by_name_count_unless_there_is_one_bucket(switches, cuts):
    assert resolve_cuts(Config(**switches)) == cuts


def test_what_needs_a_model_is_called_unknown_without_one():
    entry = resolve(Config(num_buckets=4), dp_size=2)["bucket_size"]

    assert (entry.value, entry.reason) == ("unknown", "num_buckets=4: total elements // 4, known once there is a model")


def test_one_rank_has_nothing_to_overlap():
    assert resolve(Config(bucket_size=1), dp_size=1, total_numel=1_000)["overlaps_backward"].reason == (
        "dp_size=1: there is nothing to send"
    )


def test_two_buffers_are_never_one_bucket():
    assert resolve(Config(), dp_size=2, total_numel=10, num_buffers=2)["overlaps_backward"].value is True


def test_the_resolved_values_are_the_ones_the_layout_is_built_from():
    config = Config(bucket_cap_mb=3)
    resolved = resolve(config, dp_size=6, total_numel=10**8, param_dtype="bfloat16")

    assert resolved["bucket_size"].value == bucket_size(config, dp_size=6, total_numel=10**8, grad_itemsize_bytes=4)
    assert resolved["bucket_end_multiple"].value == bucket_end_multiple(config, 6)
    assert resolved["grad_dtype"].value == resolve_grad_dtype(config, "bfloat16")


@given(
    config=st.builds(Config, layout=st.sampled_from(["stable", "megatron"]), overlap_grad_reduce=st.booleans()),
    dp_size=st.integers(1, 4_096),
)
def test_padded_buckets_can_always_be_cut_into_equal_shards(config, dp_size):
    multiple = bucket_end_multiple(config, dp_size)

    assert multiple % dp_size == 0 or not is_padded(config)


ALL_VALUES = [
    (
        Config(layout="megatron"),
        {"dp_size": 4, "total_numel": 1_000},
        {
            "grad_dtype": ("float32", "float32 parameters keep float32 gradients"),
            "bucket_size": (40_000_000, "default: max(40_000_000, 1_000_000 * dp_size=4)"),
            "buffer_order": ("reversed", "no bucket_order: registration reversed, roughly the order of backward"),
            "padded": (False, "layout='megatron' without use_distributed_optimizer packs parameters back to back"),
            "start_multiple": (1, "not padded: a parameter starts where the one before ends"),
            "bucket_end_multiple": (1, "not padded: a bucket ends where its last parameter ends"),
            "collective": ("all_reduce", "use_distributed_optimizer=False: every rank steps on all parameters"),
            "reduce_op": ("sum", "average_in_collective=False: the mean is a scaled sum"),
            "gradient_scale": (0.25, "grad_reduction='mean': 1 / dp_size=4, each gradient is multiplied by it before the sum"),
            "finished_by": (
                "end of backward",
                "finish='auto' with all-reduce: gradients are ready when the last backward returns",
            ),
            "overlaps_backward": (
                False,
                "everything fits into one bucket, complete only when backward ends; a smaller bucket_size would overlap",
            ),
        },
    ),
    (
        Config(layout="megatron", use_distributed_optimizer=True, overlap_grad_reduce=False, grad_reduce_in_fp32=False),
        {"dp_size": 4, "param_dtype": "bfloat16"},
        {
            "grad_dtype": ("bfloat16", "grad_reduce_in_fp32=False keeps the dtype of the bfloat16 parameters"),
            "bucket_size": (
                None,
                "layout='megatron' without overlap_grad_reduce: one bucket per buffer, whatever sizes the buckets",
            ),
            "buffer_order": ("reversed", "no bucket_order: registration reversed, roughly the order of backward"),
            "padded": (True, "use_distributed_optimizer=True: every rank owns an equal shard of each bucket"),
            "start_multiple": (64, "padded: a parameter starts at a multiple of 64"),
            "bucket_end_multiple": (128, "padded: lcm(dp_size=4, 128), so that shards are equal"),
            "collective": ("reduce_scatter", "use_distributed_optimizer=True: a rank needs its shard only"),
            "reduce_op": ("sum", "average_in_collective=False: the mean is a scaled sum"),
            "gradient_scale": (
                0.25,
                "grad_reduction='mean': 1 / dp_size=4, each gradient is multiplied by it before the sum",
            ),
            "finished_by": (
                "optimizer step",
                "finish='auto' with reduce-scatter: DistributedOptimizer.step() waits for the gradients",
            ),
            "overlaps_backward": (False, "overlap_grad_reduce=False: buckets go out after backward"),
        },
    ),
    (
        Config(average_in_collective=True, pad_buckets_for_high_nccl_busbw=True, finish="explicit"),
        {"dp_size": 3, "param_dtype": "float16"},
        {
            "grad_dtype": (
                "float32",
                "grad_reduce_in_fp32=True: float16 gradients are accumulated and reduced in float32",
            ),
            "bucket_size": (40_000_000, "default: max(40_000_000, 1_000_000 * dp_size=3)"),
            "buffer_order": ("reversed", "no bucket_order: registration reversed, roughly the order of backward"),
            "padded": (True, "layout='stable': the same padded layout whatever is switched on"),
            "start_multiple": (64, "padded: a parameter starts at a multiple of 64"),
            "bucket_end_multiple": (196_608, "padded: lcm(dp_size=3, 128, 65536), so that shards are equal"),
            "collective": ("all_reduce", "use_distributed_optimizer=False: every rank steps on all parameters"),
            "reduce_op": ("avg", "average_in_collective=True: the collective divides"),
            "gradient_scale": (1.0, "average_in_collective=True: no scaling beside the collective"),
            "finished_by": ("finish_grad_sync()", "finish='explicit': the caller ends the gradient sync"),
            # Without a model it is not known to be one bucket.
            "overlaps_backward": (
                True,
                "overlap_grad_reduce=True: a bucket is launched as soon as its gradients are complete",
            ),
        },
    ),
    (
        Config(grad_reduction="sum", bucket_size=5),
        {"dp_size": 1, "total_numel": 10, "param_dtype": "float64"},
        {
            "grad_dtype": ("float64", "float64 parameters keep float64 gradients"),
            "bucket_size": (5, "bucket_size, as given"),
            "buffer_order": ("reversed", "no bucket_order: registration reversed, roughly the order of backward"),
            "padded": (True, "layout='stable': the same padded layout whatever is switched on"),
            "start_multiple": (64, "padded: a parameter starts at a multiple of 64"),
            "bucket_end_multiple": (128, "padded: lcm(dp_size=1, 128), so that shards are equal"),
            "collective": ("all_reduce", "use_distributed_optimizer=False: every rank steps on all parameters"),
            "reduce_op": ("sum", "grad_reduction='sum'"),
            "gradient_scale": (1.0, "grad_reduction='sum': the plain sum over the ranks"),
            "finished_by": (
                "end of backward",
                "finish='auto' with all-reduce: gradients are ready when the last backward returns",
            ),
            "overlaps_backward": (False, "dp_size=1: there is nothing to send"),
        },
    ),
]


@pytest.mark.parametrize(("config", "group", "expected"), ALL_VALUES, ids=["unpadded", "sharded", "in the collective", "sum"])
def test_all_values_of_a_config_stand_in_order_with_their_reasons(config, group, expected):
    resolved = resolve(config, **group)

    assert (resolved.dp_size, resolved.param_dtype) == (group["dp_size"], group.get("param_dtype", "float32"))
    assert [(entry.name, (entry.value, entry.reason)) for entry in resolved.entries] == list(expected.items())
    assert resolved.to_dict() == {name: {"value": value, "reason": reason} for name, (value, reason) in expected.items()}


def test_a_value_that_is_not_resolved_is_a_key_error_with_its_name():
    with pytest.raises(KeyError, match="'bucket_sise'"):
        resolve(Config(), dp_size=2)["bucket_sise"]


@pytest.mark.parametrize(("total_numel", "overlaps"), [(1_000, False), (1_001, True)])
def test_a_model_of_exactly_the_bucket_size_is_one_bucket(total_numel, overlaps):
    config = Config(bucket_size=1_000)

    assert resolve(config, dp_size=2, total_numel=total_numel)["overlaps_backward"].value is overlaps


def test_buckets_of_an_unknown_size_are_not_taken_for_one():
    assert resolve(Config(num_buckets=4), dp_size=2)["overlaps_backward"].value is True


@pytest.mark.parametrize("total_numel", [0, 1])
def test_two_buckets_of_a_single_element_are_refused(total_numel):
    with pytest.raises(ConfigError) as caught:
        bucket_size(Config(num_buckets=2), total_numel=total_numel)

    assert str(caught.value) == (
        f"num_buckets=2 is more than the {total_numel} elements there are to put into buckets. "
        "Ask for at most 1, or give bucket_size instead."
    )


# The policy of a step

PLAIN = StepPolicy(
    is_sharded=False,
    overlaps_grads=True,
    overlaps_params=False,
    averages=True,
    averages_in_collective=False,
    accumulates_in_fp32=False,
    is_one_batch=False,
    finishes_with_backward=True,
    is_explicit=False,
    tests_finite=True,
    tests_large=False,
    skips_nonfinite=False,
    allows_unused=False,
    skips_unused=False,
    counts_skipped_forwards=True,
    has_fence=True,
    watches_model=True,
    copies_on_host=True,
    withheld_because="",
)
SHARDED = {"use_distributed_optimizer": True}
SHARDS_ARE_WITHHELD = (
    "is reduce-scattered (use_distributed_optimizer=True): from backward to the optimizer's step each rank has a "
    "gradient of its own there, or one shard of the reduced one, in memory that a collective may own. Its norm, and "
    "what is clipped by it, would differ between ranks. Clip with DistributedOptimizer(..., clip_grad=1.0), and read "
    "the norm over all ranks from what its step() returns, or call its clip_grad_norm_(1.0); scale with "
    "ddp.scale_gradients() after finish_grad_sync(). "
    "With ddp.force_all_reduce = True before backward, finish_grad_sync() leaves whole gradients in param.grad."
)
UNREDUCED_IS_WITHHELD = (
    "is not reduced yet (finish='explicit'), and a collective may own its memory. Call ddp.finish_grad_sync() first; "
    "then read, scale or clip it."
)
OF_SHARDS = {"is_sharded": True, "finishes_with_backward": False, "withheld_because": SHARDS_ARE_WITHHELD}
OF_THE_CALLER = {"is_explicit": True, "finishes_with_backward": False, "withheld_because": UNREDUCED_IS_WITHHELD}


@pytest.mark.parametrize(
    ("switches", "changes"),
    [
        ({}, {}),
        (SHARDED, OF_SHARDS),
        ({"finish": "explicit"}, OF_THE_CALLER),
        ({**SHARDED, "finish": "explicit"}, {**OF_SHARDS, "is_explicit": True}),
        ({**SHARDED, "overlap_param_gather": True}, {**OF_SHARDS, "overlaps_params": True}),
        ({**SHARDED, "reduce_scatter_with_fp32_accumulation": True}, {**OF_SHARDS, "accumulates_in_fp32": True}),
        ({"overlap_grad_reduce": False}, {"overlaps_grads": False}),
        ({"grad_reduction": "sum"}, {"averages": False}),
        ({"average_in_collective": True}, {"averages_in_collective": True}),
        ({"bucket_groups": "single"}, {"is_one_batch": True}),
        ({"nonfinite_gradients": "allow"}, {"tests_finite": False}),
        ({"nonfinite_gradients": "skip_step"}, {"skips_nonfinite": True}),
        ({"check_for_large_grads": True}, {"tests_large": True}),
        ({"unused_parameters": "zero"}, {"allows_unused": True}),
        ({"unused_parameters": "skip"}, {"allows_unused": True, "skips_unused": True}),
        ({"skipped_forwards": "allow"}, {"counts_skipped_forwards": False}),
        ({"fence": False}, {"has_fence": False, "copies_on_host": False}),  # only a fence sees ranks that read the wrong step
        ({"read_peer_memory": False}, {"copies_on_host": False}),
        ({"check_model_changes": False}, {"watches_model": False}),
    ],
    ids=lambda fields: "-".join(map(str, fields)) or "plain",
)
def test_a_switch_changes_its_part_of_a_step_and_no_other(switches, changes):
    assert resolve_step(Config(**switches)) == replace(PLAIN, **changes)
