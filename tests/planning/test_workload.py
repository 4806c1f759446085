"""Workloads as data: what they say about a step, their JSON, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timing_cases import single_plan, workloads

from megabucket.config import DistributedDataParallelConfig
from megabucket.errors import ConfigError
from megabucket.layout import ParamSpec, build_layout
from megabucket.measure.profile_steps import WorkloadProfile
from megabucket.planning.cuts import per_tensor_plan, plan_of_layout, uniform_plan
from megabucket.planning.workload import TensorWork, Workload, read_workload, workload_from_dict

THREE = Workload((TensorWork("a", 5, 1.0, 0.5), TensorWork("b", 0, 2.0, 0.25), TensorWork("c", 7, 4.0, 1.0)))


def test_gradients_become_ready_last_tensor_first():
    assert THREE.order == (2, 1, 0)
    assert THREE.ready_s == (7.0, 6.0, 4.0)
    assert THREE.needed_s == (0.0, 0.5, 0.75, 1.75)
    assert (THREE.forward_s, THREE.backward_s, THREE.compute_s) == (1.75, 7.0, 8.75)


def test_a_recorded_order_counts_from_its_own_beginning():
    workload = Workload(THREE.tensors, ready_order=(0, 2, 1))

    assert workload.ready_s == (1.0, 7.0, 5.0)
    assert workload.backward_s == 7.0


@settings(max_examples=60)
@given(workloads(), st.randoms())
def test_in_another_order_a_gradient_counts_as_ready_when_all_before_it_are(workload, rng):
    order = list(workload.order)
    rng.shuffle(order)

    seen = workload.in_order(order)

    expected = [max(workload.ready_s[each] for each in order[: position + 1]) for position in range(len(order))]
    assert [seen.ready_s[index] for index in order] == pytest.approx(expected, abs=1e-12)
    assert (seen.order, seen.forward_s) == (tuple(order), workload.forward_s)
    assert seen.in_order(order) is seen


def test_an_order_of_something_else_is_refused():
    with pytest.raises(ConfigError, match="each of the 3 tensors once"):
        THREE.in_order([0, 1])


@settings(max_examples=50)
@given(workloads())
def test_json_gives_the_workload_back_unchanged(workload):
    assert workload_from_dict(json.loads(json.dumps(workload.to_dict()))) == workload


def test_a_file_gives_the_workload_back_unchanged(tmp_path):
    WorkloadProfile(THREE, {"device": "cpu"}).write(tmp_path / "deep" / "workload.json")

    assert read_workload(tmp_path / "deep" / "workload.json") == THREE
    assert json.loads((tmp_path / "deep" / "workload.json").read_text())["facts"] == {"device": "cpu"}


TENSOR = {"name": "a", "numel": 3}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([], "a workload is a mapping with a list of tensors"),
        ({}, "a list of tensors under the key 'tensors'"),
        ({"tensors": "abc"}, "a list of tensors"),
        ({"tensors": []}, "at least 1 item"),
        ({"tensors": [TENSOR], "schema": "other"}, "not megabucket.workload version 1"),
        ({"tensors": [TENSOR], "version": 2}, "not megabucket.workload version 1"),
        ({"tensors": [7]}, r"tensors.0: should be a section"),
        ({"tensors": [{"name": "a"}]}, r"tensors.0.numel: is required"),
        ({"tensors": [{**TENSOR, "backwards_s": 1.0}]}, r"tensors.0.backwards_s: is not a known key"),
        ({"tensors": [{**TENSOR, "name": ""}]}, r"tensors.0.name"),
        ({"tensors": [{**TENSOR, "name": 3}]}, r"tensors.0.name"),
        ({"tensors": [{**TENSOR, "numel": -1}]}, r"tensors.0.numel: should be greater than or equal to 0 \(got -1\)"),
        ({"tensors": [{**TENSOR, "numel": 1.5}]}, "numel"),
        ({"tensors": [{**TENSOR, "numel": True}]}, "numel"),
        ({"tensors": [{**TENSOR, "backward_s": -0.1}]}, r"tensors.0.backward_s: should be greater than or equal to 0"),
        ({"tensors": [{**TENSOR, "forward_s": math.nan}]}, "forward_s: should be a finite number .got nan"),
        ({"tensors": [{**TENSOR, "forward_s": math.inf}]}, "forward_s: should be a finite number .got inf"),
        ({"tensors": [{**TENSOR, "backward_s": "a"}]}, "backward_s"),
        ({"tensors": [TENSOR, TENSOR]}, "given twice: 'a'"),
        ({"tensors": [TENSOR], "bytes_per_element": 0}, "bytes_per_element: should be greater than 0"),
        ({"tensors": [TENSOR], "param_bytes_per_element": 2.5}, "param_bytes_per_element"),
        ({"tensors": [TENSOR], "num_microbatches": 0}, "num_microbatches"),
        ({"tensors": [TENSOR], "optimizer_s": -1}, "optimizer_s"),
        ({"tensors": [TENSOR], "ready_order": [1]}, "ready_order must name each of the 1 tensors once"),
        ({"tensors": [TENSOR], "ready_order": ["a"]}, "ready_order"),
        ({"tensors": [TENSOR], "ready_order": 0}, "ready_order: should be a list"),
    ],
)
def test_a_workload_that_cannot_be_is_refused_by_its_field(data, text):
    with pytest.raises(ConfigError, match=text):
        workload_from_dict(data)


def test_whole_numbers_are_seconds_too():
    assert workload_from_dict({"tensors": [{**TENSOR, "backward_s": 2}]}).backward_s == 2


@pytest.mark.parametrize("content", ["", "{", "[" * 2000, '{"tensors": []}'])
def test_a_file_that_holds_no_workload_is_refused_by_its_name(tmp_path, content):
    path = tmp_path / "w.json"
    path.write_text(content)

    with pytest.raises(ConfigError, match=r"w\.json: "):
        read_workload(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_workload(tmp_path / "missing.json")


# Plans #


def test_a_uniform_plan_closes_a_bucket_at_its_size_walking_backwards():
    tensors = tuple(TensorWork(name, numel) for name, numel in zip("abcdef", (3, 1, 0, 4, 2, 2), strict=True))
    workload = Workload(tensors)

    # f 2, e 4: closed; d 4: closed; c 0, b 1, a 4: closed.
    assert uniform_plan(workload, 4).buckets == ((5, 4), (3,), (2, 1, 0))
    assert uniform_plan(workload, 4).cut_names(workload) == ("e", "d", "a")
    assert uniform_plan(workload, 1).buckets == ((5,), (4,), (3,), (2, 1), (0,))
    assert uniform_plan(workload, 10**9) == single_plan(workload)
    assert uniform_plan(workload, 5).grad_sizes_bytes(workload) == (4 * 8, 4 * 4)  # the last one is not full


def test_tensors_without_elements_at_the_end_are_a_bucket_that_sends_nothing():
    workload = Workload((TensorWork("a", 0), TensorWork("b", 5)))

    plan = uniform_plan(workload, 5)

    assert plan.buckets == ((1,), (0,))
    assert plan.num_collectives(workload) == 1


@pytest.mark.parametrize("size", [0, -4, True, 2.5])
def test_a_bucket_size_that_is_none_is_refused(size):
    with pytest.raises(ConfigError, match="bucket_numel"):
        uniform_plan(THREE, size)


@settings(max_examples=50)
@given(workloads())
def test_a_layout_cut_at_the_names_of_a_plan_has_its_buckets(workload):
    specs = [ParamSpec(tensor.name, (tensor.numel,)) for tensor in workload.tensors]
    order = tuple(workload.tensors[index].name for index in workload.order)
    for plan in (per_tensor_plan(workload), single_plan(workload), uniform_plan(workload, 20)):
        config = DistributedDataParallelConfig(bucket_cuts=plan.cut_names(workload), bucket_order=order)
        assert plan_of_layout(workload, build_layout(specs, config, dp_size=2)).buckets == plan.buckets


def test_a_layout_gives_its_buckets_with_padding_in_launch_order():
    specs = [
        ParamSpec("a", (100,)),
        ParamSpec("b", (100,), "bfloat16"),
        ParamSpec("c", (300,)),
        ParamSpec("e", (10,), group="expert"),
    ]
    layout = build_layout(specs, DistributedDataParallelConfig(bucket_size=200), dp_size=4, group_sizes={"expert": 2})
    workload = Workload(tuple(TensorWork(spec.name, spec.numel) for spec in specs))

    plan = plan_of_layout(workload, layout)

    # Each ends at a multiple of lcm(4, 128) elements; gradients are float32, parameters what they are.
    assert [[workload.tensors[i].name for i in bucket] for bucket in plan.buckets] == [["e"], ["c"], ["b"], ["a"]]
    assert plan.grad_bytes == (4 * 128, 4 * 384, 4 * 128, 4 * 128)
    assert plan.param_bytes == (4 * 128, 4 * 384, 2 * 128, 4 * 128)
    assert plan.num_ranks == (2, 4, 4, 4)


def test_a_layout_of_another_model_is_refused():
    layout = build_layout([ParamSpec("a", (5,)), ParamSpec("x", (7,))], DistributedDataParallelConfig(), dp_size=1)

    with pytest.raises(ConfigError, match="from another model"):
        plan_of_layout(THREE, layout)
