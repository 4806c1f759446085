"""From config sections and files to links and workloads, and what is wrong with bad ones, by field and line."""

from __future__ import annotations

import pytest
from timing_cases import flat, ring

from megabucket.errors import ConfigError
from megabucket.layout import ParamSpec
from megabucket.measure.profile_steps import WorkloadProfile
from megabucket.planning import load_config, param_specs
from megabucket.planning.links import LinkTable, MeasuredLink, TwoLevelLink, read_link, write_link
from megabucket.planning.setting import workload_of
from megabucket.planning.workload import TensorWork, Workload, is_lookup, model_fingerprint
from megabucket.trace import CollectiveKind

AR = (CollectiveKind.ALL_REDUCE, "float32")
INSIDE, BETWEEN = "{latency_s: 0, bytes_per_s: 9}", "{latency_s: 1, bytes_per_s: 2}"
MEASURED = MeasuredLink(
    num_ranks=2,
    tables=(LinkTable(operation="all_reduce", points=((1.0, 1e-5), (1e9, 0.1 + 1 / 3))),),
    facts={"backend": "gloo"},
)


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load(text, *overrides):
        (tmp_path / "run.yaml").write_text(text)
        return load_config("run.yaml", overrides)

    return load


# Links #


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("link: {latency_s: 1e-3, seconds_per_byte: 2e-9}", flat(1e-3, 2e-9)),
        ("link: {kind: flat, latency_s: 0, seconds_per_byte: 0}", flat(0.0, 0.0)),
        ("link: {kind: ring, latency_s: 1e-5, bytes_per_s: 25e9}", ring(1e-5, 25e9)),
        (
            f"link: {{kind: two_level, ranks_per_node: 8, inside: {INSIDE}, between: {BETWEEN}}}",
            TwoLevelLink(
                inside=ring(0.0, 9.0),
                between=ring(1.0, 2.0),
                ranks_per_node=8,
            ),
        ),
        (
            "link: {kind: table, num_ranks: 4, tables: [{operation: all_reduce, points: [[8, 1e-3], [16, 2]]}]}",
            MeasuredLink.of({AR: ((8.0, 1e-3), (16.0, 2.0))}, 4),
        ),
    ],
)
def test_a_section_is_a_link(load, text, link):
    assert load(text).link == link


def test_a_link_that_calibrate_writes_is_read_back_unchanged_by_path_and_as_a_section(load, tmp_path):
    write_link(tmp_path / "out" / "link.yaml", MEASURED)

    assert read_link(tmp_path / "out" / "link.yaml") == MEASURED
    for text in ("link: {path: out/link.yaml}", "link: {kind: file, path: out/link.yaml}", "link: out/link.yaml"):
        assert read_link(load(text).link.path) == MEASURED
    assert load((tmp_path / "out" / "link.yaml").read_text().replace("\n", "\n  ").join(["link:\n  ", ""])).link == MEASURED


def test_a_link_file_may_hold_the_section_or_a_whole_config(load, tmp_path):
    (tmp_path / "bare.yaml").write_text("latency_s: 1\nseconds_per_byte: 2")
    (tmp_path / "whole.yaml").write_text("link: {latency_s: 1, seconds_per_byte: 2}")

    for name in ("bare", "whole"):
        assert read_link(tmp_path / f"{name}.yaml") == flat(1.0, 2.0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("link: {latency_s: -1, seconds_per_byte: 0}", "run.yaml:1: link.latency_s: should be greater than or equal to 0"),
        ("link: {latency_s: .nan, seconds_per_byte: 0}", "finite number"),
        ("link: {seconds_per_byte: 0}", "run.yaml:1: link.latency_s: is required"),
        ("link:\n  latency_s: 1\n  seconds_per_byte: 0\n  latency: 1", "run.yaml:4: link.latency: unknown key 'latency'"),
        ("link: {kind: ring, latency_s: 1}", "link.bytes_per_s: is required"),
        ("link: {kind: ring, latency_s: 1, bytes_per_s: 0}", "link.bytes_per_s: should be greater than 0"),
        (
            "link: {kind: star, latency_s: 1}",
            "tag 'star' found using 'kind' does not match any of the expected tags",
        ),
        ("link: {kind: table, num_ranks: 2}", "link.tables: is required"),
        ("link: {kind: table, tables: [{operation: all_reduce, points: []}]}", "link.num_ranks: is required"),
        (
            "link: {kind: table, num_ranks: 2, tables: [{operation: all_for_one, points: [[1, 1]]}]}",
            "should be 'all_reduce', 'reduce_scatter', 'all_gather', 'broadcast' or 'all_to_all' (got 'all_for_one')",
        ),
        (
            "link: {kind: table, num_ranks: 2, tables: [{operation: all_reduce, points: [[1, -1]]}]}",
            "should be greater than or equal to 0",
        ),
    ],
)
def test_a_link_section_that_cannot_be_is_refused_by_field_and_line(load, text, problem):
    with pytest.raises(ConfigError, match=problem.replace("(", r"\(").replace(")", r"\)")):
        load(text)


@pytest.mark.parametrize(
    ("points", "problem"),
    [
        ("[[1, 1]]", "link.tables.0.points: .* at least 2 items"),
        ("[[2, 1], [1, 1]]", "1.0 bytes after 2.0; sort them by bytes"),
        ("[[1, 1], [1, 2]]", "1.0 bytes after 1.0; sort them by bytes, each size once"),
    ],
)
def test_a_table_no_time_can_be_read_from_is_refused(load, points, problem):
    with pytest.raises(ConfigError, match=problem):
        load(f"link: {{kind: table, num_ranks: 2, tables: [{{operation: all_reduce, points: {points}}}]}}")


def test_two_tables_of_one_operation_and_dtype_are_refused(load):
    table = "{operation: all_reduce, points: [[1, 1], [2, 2]]}"

    with pytest.raises(ConfigError, match="all_reduce, float32 twice"):
        load(f"link: {{kind: table, num_ranks: 2, tables: [{table}, {table}]}}")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "a link is a mapping"),
        ("[1]", "a link is a mapping"),
        ("latency_s: 1\nseconds_per_byte: -2", "link.yaml:2: link.seconds_per_byte"),
        ("link:\n  latency_s: 1\n  seconds_per_byte: -2", "link.yaml:3: link.seconds_per_byte"),
        ("path: other.yaml", "names another file .other.yaml."),
        ("kind: file\npath: other.yaml", "names another file"),
        (
            "kind: table\nnum_ranks: 2\ntables: [{operation: all_reduce, points: [[1, 1]]}]",
            "link.yaml:3: link.tables.0.points: ",
        ),
    ],
)
def test_a_file_that_holds_no_link_is_refused_by_its_name(tmp_path, content, problem):
    (tmp_path / "link.yaml").write_text(content)

    with pytest.raises(ConfigError, match=problem):
        read_link(tmp_path / "link.yaml")


# Workloads #


def test_the_tensors_of_a_section_are_the_workload(load):
    run = load(
        "workload: {bytes_per_element: 2, optimizer_s: 0.5, num_microbatches: 3, ready_order: [0, 1], "
        "tensors: [{name: a, numel: 3K, backward_s: 1e-3}, {name: b, numel: 0, forward_s: 2}]}"
    )

    assert workload_of(run) == Workload(
        (TensorWork("a", 3000, 1e-3), TensorWork("b", 0, 0.0, 2.0)),
        bytes_per_element=2,
        optimizer_s=0.5,
        num_microbatches=3,
        ready_order=(0, 1),
    )


def test_a_profile_may_be_named_and_corrected(load, tmp_path):
    profile = Workload((TensorWork("a", 3, 1.0),), optimizer_s=0.25, param_bytes_per_element=2)
    WorkloadProfile(profile, {}).write(tmp_path / "workload.json")

    assert workload_of(load("workload: {path: workload.json}")) == profile
    corrected = workload_of(load("workload: {path: workload.json, num_microbatches: 4}"))
    assert corrected == Workload(profile.tensors, optimizer_s=0.25, param_bytes_per_element=2, num_microbatches=4)


def test_a_profile_of_another_model_is_refused_also_when_only_shapes_differ(load, tmp_path):
    specs = [ParamSpec("a", (2, 3)), ParamSpec("b", (4,))]
    profile = Workload((TensorWork("a", 6, 1.0), TensorWork("b", 4, 1.0)))
    WorkloadProfile(profile, {"model_fingerprint": model_fingerprint(specs)}).write(tmp_path / "workload.json")
    run = load("workload: {path: workload.json}")

    assert workload_of(run, specs) == profile
    for other, what in ((ParamSpec("a", (3, 2)), "other shapes"), (ParamSpec("a", (7,)), "6 elements instead of 'a' with 7")):
        with pytest.raises(ConfigError, match=what):
            workload_of(run, [other, specs[1]])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("workload: {tensors: []}", "workload.tensors: .* at least 1 item"),
        (
            "workload:\n  tensors:\n    - {name: a, numel: 1, backward_s: -1}",
            "run.yaml:3: workload.tensors.0.backward_s: should be",
        ),
        ("workload: {tensors: [{name: a, numel: 1, backward_s: .nan}]}", "finite number"),
        ("workload: {tensors: [{name: a, numel: -1}]}", "numel: should be greater than or equal to 0"),
        ("workload: {tensors: [{name: a}]}", "numel: is required"),
        ("workload: {tensors: [{name: a, numel: 1}], path: x}", "tensors and path all say what is computed"),
        ("workload: {tokens_per_microbatch: 5}", "belong together"),
        ("workload: {path: x, ready_order: [0]}", "give ddp.bucket_order instead"),
        ("sweep: {bucket_numel: []}", "sweep.bucket_numel: .* at least 1 item"),
        ("sweep: {bucket_numel: [0]}", "sweep.bucket_numel.0: should be greater than 0"),
    ],
)
def test_a_workload_section_that_cannot_be_is_refused_by_field_and_line(load, text, problem):
    with pytest.raises(ConfigError, match=problem):
        load(text)


def test_names_given_twice_and_a_missing_workload_are_refused(load):
    with pytest.raises(ConfigError, match="given twice: 'a'"):
        workload_of(load("workload: {tensors: [{name: a, numel: 1}, {name: a, numel: 1}]}"))
    for text in ("", "workload: {optimizer_s: 1}", "workload: {tokens_per_microbatch: 1, flops_per_s: 1}"):
        with pytest.raises(ConfigError, match="there is nothing to simulate"):
            workload_of(load(text))


# A model at a rate #

GPT = "model: {kind: gpt, vocab_size: 50, sequence_length: 7, num_layers: 2, hidden_size: 8, num_heads: 2, tied_embeddings: %s}"
RATE = "\nworkload: {tokens_per_microbatch: 100, flops_per_s: 1000}"


def test_a_parameter_takes_two_operations_per_token_forward_and_four_backward(load):
    run = load(GPT % "false" + RATE)
    specs = param_specs(run.model)

    workload = workload_of(run, specs)

    for spec, tensor in zip(specs, workload.tensors, strict=True):
        numel = 0 if spec.name in ("token_embedding.weight", "position_embedding.weight") else spec.numel
        assert (tensor.name, tensor.numel) == (spec.name, spec.numel)
        assert (tensor.forward_s, tensor.backward_s) == pytest.approx((2 * numel * 0.1, 4 * numel * 0.1))


def test_a_tied_embedding_takes_its_time_as_the_output_projection(load):
    tied, untied = (load(GPT % flag + RATE) for flag in ("true", "false"))

    tied_work, untied_work = (workload_of(run, param_specs(run.model)) for run in (tied, untied))

    assert tied_work.backward_s == pytest.approx(untied_work.backward_s)
    assert tied_work.forward_s == pytest.approx(untied_work.forward_s)
    assert tied_work.tensors[0].backward_s == 0.0  # the look-up
    # 50 * 8 elements before the gradient of the last parameter, the final norm's bias of 8, becomes ready.
    assert tied_work.tensors[-1].backward_s == pytest.approx(4 * (50 * 8 + 8) * 0.1)


def test_an_expert_takes_its_share_of_the_tokens(load):
    run = load(
        "model: {kind: moe, vocab_size: 10, num_layers: 1, hidden_size: 4, num_heads: 1, num_experts: 8, "
        "num_experts_per_token: 2, expert_ffn_size: 6}" + RATE
    )
    specs = param_specs(run.model)

    workload = workload_of(run, specs)

    for spec, tensor in zip(specs, workload.tensors, strict=True):
        share = 0 if is_lookup(spec.name) else 2 / 8 if spec.group == "expert" else 1
        assert tensor.forward_s == pytest.approx(2 * share * spec.numel * 0.1)


def test_bytes_on_the_wire_are_those_of_the_dtype_most_elements_have(load):
    params = "model: {kind: params, params: [{name: a, shape: [9], dtype: bfloat16}, {name: b, shape: [1]}]}"

    workload = workload_of(load(params + RATE), [ParamSpec("a", (9,), "bfloat16"), ParamSpec("b", (1,))])
    assert (workload.param_bytes_per_element, workload.bytes_per_element) == (2, 4)

    narrow = load(params + RATE + "\nddp: {grad_reduce_in_fp32: false}")
    workload = workload_of(narrow, [ParamSpec("a", (9,), "bfloat16"), ParamSpec("b", (1,))])
    assert (workload.param_bytes_per_element, workload.bytes_per_element) == (2, 2)


def test_a_recorded_bucket_order_is_the_ready_order(load):
    params = "model: {kind: params, params: [{name: a, shape: [9]}, {name: b, shape: [1]}]}"
    run = load(params + RATE + "\nddp: {bucket_order: [a, b]}")

    assert workload_of(run, param_specs(run.model)).ready_order == (0, 1)
    stale = load(params + RATE + "\nddp: {bucket_order: [a, c]}")
    with pytest.raises(ConfigError, match="record it anew"):
        workload_of(stale, param_specs(stale.model))
