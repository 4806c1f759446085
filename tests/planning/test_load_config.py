"""``load_config``: file, overrides and sections together, and the one error that lists what is wrong and where."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.errors import ConfigError
from megabucket.planning import RunConfig, load_config

KINDS = "'gpt', 'llama', 'moe', 'hf_config', 'params', 'factory'"
GPT = "{kind: gpt, vocab_size: 256, sequence_length: 64, num_layers: 2, hidden_size: 32, num_heads: 4}"


@pytest.fixture
def write(tmp_path):
    def write_file(text):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def refusal(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value


def lines_of(error, path):
    """The text without the directory, line by line."""
    return [line.strip() for line in str(error).replace(str(path), "run.yaml").splitlines()]


# What is read


def test_an_empty_file_is_a_run_of_defaults(write):
    run = load_config(write(""))

    assert run.model is None
    assert run.ddp.bucket_size is None
    assert run.optimizer.name == "adamw"


@pytest.mark.parametrize("name", ["12:30.yaml", "at:noon"])
def test_a_file_with_a_colon_in_its_name_is_a_file(name, tmp_path):
    (tmp_path / name).write_text("ddp: {num_buckets: 3}")

    assert load_config(tmp_path / name).ddp.num_buckets == 3


def test_a_missing_yaml_file_with_a_colon_in_its_name_is_no_function(tmp_path):
    assert str(refusal(tmp_path / "12:30.yaml")).endswith("12:30.yaml: cannot be read: No such file or directory")


def test_json_with_our_sections_is_a_config_of_ours_with_lines(tmp_path):
    path = tmp_path / "run.json"
    path.write_text('{"ddp":\n {"num_buckets": 3}}')

    assert load_config(path).ddp.num_buckets == 3
    path.write_text('{"ddp":\n {"num_buckets": "x"}}')
    assert str(refusal(path)).startswith(f"{path}:2: ddp.num_buckets: ")


def test_a_model_s_json_stays_one_whatever_else_it_says(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "gpt2", "optimizer": {"name": "sgd"}}')

    run = load_config(path)

    assert run.model is not None
    assert run.model.kind == "hf_config"
    assert run.optimizer.name == "adamw"


def test_without_a_file_the_overrides_say_everything():
    run = load_config(None, ["fabric.latency_s=1e-4", "fabric.bytes_per_s=2e9"])

    assert run.fabric is not None
    assert (run.fabric.latency_s, run.fabric.bytes_per_s, run.fabric.moves_data) == (1e-4, 2e9, True)
    assert load_config(None).fabric is None


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["fabric.latency_s=1e-4"], "fabric.bytes_per_s: is required"),
        (["fabric.latency_s=-1", "fabric.bytes_per_s=1"], "fabric.latency_s: should be greater than or equal to 0"),
        (["fabric.latency_s=0", "fabric.bytes_per_s=0"], "fabric.bytes_per_s: should be greater than 0"),
        (["fabric.latency_s=.nan", "fabric.bytes_per_s=1"], "fabric.latency_s: "),
    ],
)
def test_a_fabric_that_is_no_link_is_refused_without_a_file_to_point_at(overrides, problem):
    error = refusal(None, *overrides)

    assert len(error.problems) == 1
    assert error.problems[0].startswith("command line")
    assert problem in error.problems[0]


def test_overrides_win_over_the_file(write):
    path = write("ddp:\n  bucket_size: 10\n  heartbeat_s: 0.5\n")

    run = load_config(path, ["ddp.bucket_size=40M", "ddp.bucket_order=[b,a]"])

    assert run.ddp.bucket_size == 40_000_000
    assert run.ddp.bucket_order == ("b", "a")
    assert run.ddp.heartbeat_s == 0.5


def test_a_section_with_all_lines_commented_out_has_its_defaults(write):
    run = load_config(write("ddp:\n  # bucket_size: 10\noptimizer:\nmodel:\n"))

    assert run.ddp.bucket_size is None
    assert run.model is None


@pytest.mark.parametrize(("mode", "uses_it"), [("reduce_scatter", True), ("all_reduce", False)])
def test_mode_sets_the_distributed_optimizer(write, mode, uses_it):
    assert load_config(write(f"mode: {mode}")).ddp.use_distributed_optimizer is uses_it


def test_mode_and_the_field_it_stands_for_may_agree(write):
    assert load_config(write("mode: reduce_scatter\nddp: {use_distributed_optimizer: true}")).ddp.use_distributed_optimizer


def test_mode_makes_what_needs_the_distributed_optimizer_valid(write):
    assert load_config(write("mode: reduce_scatter\nddp: {overlap_param_gather: true}")).ddp.overlap_param_gather


def test_all_reduce_switches_off_what_needs_the_distributed_optimizer(write):
    path = write("mode: reduce_scatter\nddp: {overlap_param_gather: true}")

    config = load_config(path, ["mode=all_reduce"])

    assert not config.ddp.use_distributed_optimizer
    assert not config.ddp.overlap_param_gather


# What is refused, with the text


def test_a_contradicting_mode_is_refused_with_both_names(write):
    error = refusal(write("mode: all_reduce\nddp:\n  use_distributed_optimizer: true\n"))

    assert str(error).endswith("run.yaml:1: mode=all_reduce contradicts ddp.use_distributed_optimizer=True; keep one of them")


def test_every_problem_has_its_path_and_its_place(write):
    text = (
        "model:\n  kind: gpt\n  vocab_size: true\n  sequence_length: .nan\n  num_layers: 1.5\n  hidden_size: 32\n  bias: yes\n"
        "ddp:\n  bucket_size: 0\n  bucket_cap_mb: .inf\n  num_buckets: 5x\nbucket_size: 3\noptimizer:\n  momentum: true\n"
    )
    path = write(text)

    error = refusal(path, "ddp.bucket_size=-1", "optimizer.name=3")

    assert lines_of(error, path) == [
        "run.yaml: 11 problems",
        "run.yaml:12: bucket_size: unknown key 'bucket_size'; did you mean 'ddp.bucket_size'?",
        "run.yaml:3: model.vocab_size: should be a valid integer (got True)",
        "run.yaml:5: model.num_layers: should be a valid integer (got 1.5)",
        "run.yaml:1: model.num_heads: is required",
        "run.yaml:4: model.sequence_length: should be a valid integer (got nan)",
        "run.yaml:7: model.bias: should be a valid boolean (got 'yes')",
        "command line, 'ddp.bucket_size=-1': ddp.bucket_size: should be greater than 0 (got -1)",
        "run.yaml:10: ddp.bucket_cap_mb: should be a finite number (got inf)",
        "run.yaml:11: ddp.num_buckets: '5x' is not a count; write 40000000, 4e7 or 40M",
        "command line, 'optimizer.name=3': optimizer.name: should be 'adamw', 'adam', 'sgd' or 'muon' (got 3)",
        "run.yaml:14: optimizer.momentum: should be a valid number (got True)",
    ]
    assert len(error.problems) == 11


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "run.yaml:1: a config is a mapping with keys such as 'ddp:'"),
        ("ddp: 3", "run.yaml:1: ddp: should be a section with keys (got 3)"),
        ("model: {}", "run.yaml:1: model: kind is required; it says which sort this is"),
        ("model: 3", "run.yaml:1: model: should be a section with keys (got 3)"),
        (
            "model: {kind: gpd}",
            f"run.yaml:1: model: tag 'gpd' found using 'kind' does not match any of the expected tags: {KINDS}",
        ),
        (
            "model: {kind: params}",
            "run.yaml:1: model.params: is required",
        ),
        (
            "model: {kind: factory, factory: os.system}",
            "run.yaml:1: model: factory='os.system' is not module:callable, for example mymodels.gpt:build",
        ),
        (
            "model:\n  kind: factory\n  factory: a:b\n  arguments: {x: [1]}",
            "run.yaml:4: model.arguments.x: should be text, a number, true, false or null",
        ),
        (
            f"model: {GPT.replace('hidden_size: 32', 'hidden_size: 30')}",
            "run.yaml:1: model: hidden_size=30 is not a multiple of num_heads=4",
        ),
    ],
)
def test_a_wrong_config_is_answered_in_one_line(write, text, message):
    path = write(text)

    lines = lines_of(refusal(path), path)

    assert lines == [message]


def test_all_misfits_of_a_model_are_reported_together(write):
    path = write(
        "model: {kind: llama, vocab_size: 9, num_layers: 1, hidden_size: 9, ffn_size: 4, num_heads: 4, num_kv_heads: 3}"
    )

    (line,) = lines_of(refusal(path), path)

    assert line.removeprefix("run.yaml:1: model: ").split("; ") == [
        "hidden_size=9 is not a multiple of num_heads=4",
        "num_heads=4 is not a multiple of num_kv_heads=3",
    ]


def test_a_problem_in_a_list_of_parameters_is_found_by_position_and_line(write):
    path = write("model:\n  kind: params\n  params:\n    - {name: a, shape: [1]}\n    - {name: b, shape: [2, -1]}\n")

    assert lines_of(refusal(path), path) == [
        "run.yaml:5: model.params.1.shape.1: should be greater than or equal to 0 (got -1)"
    ]


def test_thousands_of_unknown_keys_give_a_short_message(write):
    path = write("ddp:\n" + "\n".join(f"  k{i}: 1" for i in range(4_900)))

    error = refusal(path)

    assert lines_of(error, path)[-1] == "run.yaml:1: ddp: and 4895 more unknown keys"
    assert len(str(error)) < 2_000


def test_at_most_twenty_problems_are_shown(write):
    entries = "\n".join(f"    - {{name: p{i}, shape: [-1]}}" for i in range(1_000))
    path = write(f"model:\n  kind: params\n  params:\n{entries}\n")

    error = refusal(path)

    assert lines_of(error, path)[0] == "run.yaml: 1000 problems"
    assert lines_of(error, path)[-1] == "and 980 more problems"
    assert len(error.problems) == 21


def test_a_huge_value_is_cut(write):
    path = write(f"ddp:\n  layout: {'x' * 500_000}\n")

    (line,) = lines_of(refusal(path), path)

    assert line == f"run.yaml:2: ddp.layout: should be 'stable' or 'megatron' (got '{'x' * 56}...)"


def test_control_characters_of_a_key_do_not_reach_the_text(write):
    path = write('"a\\x1b[31m\\nb": 1\n')

    (line,) = lines_of(refusal(path), path)

    assert line.startswith("run.yaml:1: a\\x1b[31m\\nb: unknown key 'a\\x1b[31m\\nb'; known keys are mode, model, ddp, ")


def test_the_error_survives_pickling(write):
    error = refusal(write("ddp: {bucket_size: 0}"))

    copy = pickle.loads(pickle.dumps(error))  # noqa: S301

    assert (str(copy), copy.problems) == (str(error), error.problems)


SECTIONS = {name: field.annotation for name, field in RunConfig.model_fields.items() if name in {"ddp", "optimizer"}}
FIELDS = sorted(
    {field for section in SECTIONS.values() for field in section.model_fields} | {"kind", "params", "name", "shape"}
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["40M", "gpt", "params", "sum"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=6,
)
sections = values | st.dictionaries(st.sampled_from(FIELDS), values, max_size=5)


@given(data=st.dictionaries(st.sampled_from([*RunConfig.model_fields, "dpd"]), sections, max_size=5))
def test_any_values_are_a_run_or_a_short_config_error(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fuzz_run.yaml"
    path.write_text(json.dumps(data))

    try:
        message = "" if load_config(path) else "falsy"
    except ConfigError as error:
        message = str(error)

    assert not message or message.startswith(str(path))
    assert len(message) < 5_000


@pytest.mark.parametrize("name", ["gpt2-124m", "llama3-8b", "llama3-70b"])
def test_the_shipped_configs_are_valid(name):
    assert load_config(name).model is not None


# Where a problem lies


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: {kind: params, params: [{name: a, shape: 4}]}",
            "run.yaml:1: model.params.0.shape: should be a list (got 4)",
        ),
        ("ddp:\n  bucket_order: 0.9", "run.yaml:2: ddp.bucket_order: should be a list (got 0.9)"),
        ("mode: reduce_scatter\nddp: 3", "run.yaml:2: ddp: should be a section with keys (got 3)"),
        ("ddp:\n  fence: 3", "run.yaml:2: ddp.fence: should be a valid boolean (got 3)"),
        # A key that is too short: the place ends with "[key]", which is not in the data.
        (
            "model:\n  kind: factory\n  factory: a:b\n  arguments: {'': 1}",
            "run.yaml:4: model.arguments..[key]: String should have at least 1 character (got '')",
        ),
        (
            f"model: {{kind: {'x' * 61}}}",
            f"run.yaml:1: model: tag '{'x' * 61}' found using 'kind' does not match any of the expected tags: {KINDS}",
        ),
    ],
)
def test_a_wrong_sort_of_value_is_told_in_the_words_of_the_file(write, text, message):
    path = write(text)

    assert lines_of(refusal(path), path) == [message]


@pytest.mark.parametrize(
    ("text", "override", "problem"),
    [
        ("", "dpd.bucket_size=1", "dpd: unknown key 'dpd'; did you mean 'ddp'?"),
        ("ddp: {fence: true}", "ddp.bucket_sise=1", "ddp.bucket_sise: unknown key 'bucket_sise'; did you mean 'bucket_size'?"),
        ("", "fabric.latency_s=1", "fabric.bytes_per_s: is required"),
        ("link: {latency_s: 1, seconds_per_byte: 0}", "link.kind=rign", "link: tag 'rign' found using 'kind' does not match"),
        (f"model: {GPT}", "model.kind=params", "model.params: is required"),
    ],
)
def test_what_only_an_override_can_have_caused_is_blamed_on_it(write, text, override, problem):
    error = refusal(write(text), override)

    assert any(each.startswith(f"command line, '{override}': {problem}") for each in error.problems)


def test_a_problem_of_the_file_is_not_blamed_on_an_override_beside_it(write):
    path = write("link: {kind: ring, latency_s: -1}\n")

    error = refusal(path, "link.kind=flat", "link.seconds_per_byte=0", "ddp.fence=false")

    assert lines_of(error, path) == ["run.yaml:1: link.latency_s: should be greater than or equal to 0 (got -1)"]


def test_what_is_missing_is_placed_at_the_section_that_lacks_it(write):
    path = write(
        "mode: all_reduce\n\nmodel:\n  kind: llama\n  vocab_size: 8\n  num_layers: 1\n  hidden_size: 8\n  num_heads: 1\n"
    )

    assert lines_of(refusal(path), path) == ["run.yaml:3: model.ffn_size: is required"]


def test_a_kind_where_none_belongs_does_not_change_the_place_of_a_problem(write):
    path = write("kind: ddp\nddp:\n  bucket_size: 0\n")

    assert lines_of(refusal(path), path)[1:] == [
        f"run.yaml:1: kind: unknown key 'kind'; known keys are {', '.join(RunConfig.model_fields)}",
        "run.yaml:3: ddp.bucket_size: should be greater than 0 (got 0)",
    ]


@pytest.mark.parametrize(("num_entries", "last"), [(20, "run.yaml:23: model.params.19"), (21, "and 1 more problems")])
def test_only_what_twenty_problems_leave_out_is_counted(write, num_entries, last):
    entries = "".join(f"    - {{name: p{i}, shape: [-1]}}\n" for i in range(num_entries))
    path = write(f"model:\n  kind: params\n  params:\n{entries}")

    error = refusal(path)

    assert lines_of(error, path)[-1].startswith(last)
    assert len(error.problems) == num_entries


def test_a_single_problem_is_the_text_and_the_list(write):
    error = refusal(write("ddp: {bucket_size: 0}"))

    assert error.problems == (str(error),)


def test_a_problem_is_cut_at_500_characters(write, monkeypatch):
    monkeypatch.chdir(write('ddp: {"' + "\\x1b" * 60 + '": 1}').parent)

    (problem,) = refusal("run.yaml").problems

    assert problem.startswith(r"run.yaml:1: ddp.\x1b\x1b")  # 60 times 4 characters, twice, and the list of known keys
    assert (len(problem), problem[-3:]) == (500, "...")
