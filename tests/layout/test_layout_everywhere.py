"""The layout is the same on every rank and in every process, and its cost grows with the number of parameters only."""

import gc
import inspect
import json
import os
import subprocess
import sys
import time

import pytest

from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import ParamSpec, build_layout, launch_order, shard_slices
from megabucket.testing.invariants import check_layout

SCRIPT = """
import json, sys
from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import ParamSpec, build_layout, launch_order

answers = []
for specs, fields, dp_size in json.load(sys.stdin):
    specs = [ParamSpec(name, tuple(shape), *rest) for name, shape, *rest in specs]
    layout = build_layout(specs, DistributedDataParallelConfig(**fields), dp_size=dp_size)
    answers.append([layout.fingerprint, launch_order(layout), hash("a")])
print(json.dumps(answers))
"""

MIXED = [
    ["embedding", [50, 30], "bfloat16", "dense", True],
    ["z.weight", [30, 31], "bfloat16", "dense", False],
    ["a.bias", [31], "float32", "dense", False],
    ["expert.7", [64, 3], "bfloat16", "expert", False],
    ["expert.10", [64, 3], "float32", "expert", False],
    ["head", [50, 30], "float64", "dense", False],
    ["empty", [0], "float16", "dense", False],
]
CASES = [
    [MIXED, {"bucket_size": 1000}, 2],
    [MIXED, {"bucket_size": 100, "use_distributed_optimizer": True, "layout": "megatron"}, 3],
    [MIXED[::-1], {"num_buckets": 5, "layout": "megatron"}, 64],
    [[[f"layers.{i}.weight", [i % 7, 13]] for i in range(200)], {"bucket_cap_mb": 0.001}, 8],
]


def layouts_elsewhere(**environment: str) -> list:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(CASES),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return json.loads(done.stdout)


def test_new_processes_with_other_hash_seeds_and_ranks_find_the_same_layouts():
    here = []
    for specs, fields, dp_size in CASES:
        layout = build_layout(
            [ParamSpec(name, tuple(shape), *rest) for name, shape, *rest in specs],
            DistributedDataParallelConfig(**fields),
            dp_size=dp_size,
        )
        here.append([layout.fingerprint, [list(bucket_id) for bucket_id in launch_order(layout)]])

    first = layouts_elsewhere(PYTHONHASHSEED="1", RANK="0", LOCAL_RANK="0", WORLD_SIZE="4")
    second = layouts_elsewhere(PYTHONHASHSEED="2", RANK="3", LOCAL_RANK="1", WORLD_SIZE="4")

    assert [answer[:2] for answer in first] == here
    assert [answer[:2] for answer in second] == here
    assert first[0][2] != second[0][2]  # the seeds did differ


def test_the_rank_is_no_argument_of_a_layout():
    assert list(inspect.signature(build_layout).parameters) == ["specs", "config", "dp_size", "group_sizes"]


def many_specs(count: int) -> list[ParamSpec]:
    return [ParamSpec(f"layers.{i}.weight", (97 + i % 64,)) for i in range(count)]


def build(count: int):
    return build_layout(many_specs(count), DistributedDataParallelConfig(bucket_size=100_000), dp_size=8)


def shards_of_one_bucket(count: int) -> None:
    (buffer,) = build_layout(many_specs(count), DistributedDataParallelConfig(bucket_size=2**62), dp_size=8).buffers
    for rank in range(8):
        shard_slices(buffer, bucket=0, rank=rank)


USES = {
    "build_layout": build,
    "check_layout": lambda count: check_layout(build(count)),
    "fingerprint": lambda count: build(count).fingerprint,
    "launch_order": lambda count: launch_order(build(count)),
    "shard_slices": shards_of_one_bucket,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_ten_times_the_parameters_take_about_ten_times_as_long_and_not_a_hundred(use):
    def cpu_s(count: int) -> float:
        start = time.process_time()
        use(count)
        return time.process_time() - start

    # Collections visit every live object, those of other tests too: they would add what is not ours.
    gc.disable()
    try:
        few = min(cpu_s(5_000) for _ in range(3))
        # Other processes can only add to a time: one that is short enough is the answer of the shortest of three.
        is_about_ten_times = any(cpu_s(50_000) < 30 * few for _ in range(3))  # 10 times when linear, 100 when quadratic
    finally:
        gc.enable()

    assert is_about_ten_times
