"""The shipped models and links: they load, they have the published sizes, and they say where their numbers come from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megabucket import planning
from megabucket.config import DistributedDataParallelConfig
from megabucket.errors import ConfigError
from megabucket.layout import build_layout
from megabucket.planning import load_config, param_specs
from megabucket.planning.documents import find_file
from megabucket.planning.links import read_link
from megabucket.planning.setting import workload_of
from megabucket.trace import CollectiveKind

# Counts that others have published: the safetensors totals of the released models, or the sum of the shapes in a paper.
PUBLISHED = {
    "gpt2-124m": (148, 124_439_808),
    "gpt2-355m": (292, 354_823_168),
    "gpt2-774m": (436, 774_030_080),
    "gpt2-1.5b": (580, 1_557_611_200),
    "smollm2-360m": (290, 361_821_120),
    "llama3.2-1b": (146, 1_235_814_400),
    "llama2-7b": (291, 6_738_415_616),
    "llama3-8b": (291, 8_030_261_248),
    "llama3-70b": (723, 70_553_706_496),
    "qwen2.5-7b": (339, 7_615_616_512),
    "mixtral-8x7b": (995, 46_702_792_704),
    "deepseek-v2-lite": (5_291, 15_706_484_224),
    # 45,395 tensors of 671,026,419,200 elements, among them the biases of 58 routers, which no gradient trains.
    "deepseek-v3": (45_395 - 58, 671_026_419_200 - 58 * 256),
}

# Only rounded counts are published: (vocabulary + positions) * d + layers * (12 d**2 + 13 d) + 2 d.
GPT3 = {
    "gpt3-6.7b": ((50_257 + 2_048) * 4_096 + 32 * (12 * 4_096**2 + 13 * 4_096) + 2 * 4_096, 6.7e9),
    "gpt3-175b": ((50_257 + 2_048) * 12_288 + 96 * (12 * 12_288**2 + 13 * 12_288) + 2 * 12_288, 175.0e9),
}

PRESETS = Path(planning.__file__).parent / "presets"
MODELS = sorted(path.stem for path in (PRESETS / "models").iterdir())
LINKS = sorted(path.stem for path in (PRESETS / "links").iterdir())
WANTED_LINKS = {
    "nvlink-h100",
    "nvlink-b200",
    "infiniband-400g",
    "infiniband-200g",
    "ethernet-100g",
    "ethernet-25g",
    "ethernet-1g",
    "gloo-loopback",
}


def specs_of(name):
    return param_specs(load_config(name).model)


def test_every_shipped_model_is_checked_here():
    assert set(MODELS) == set(PUBLISHED) | set(GPT3)
    assert len(MODELS) >= 12


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_model_has_the_published_number_of_parameters(name):
    specs = specs_of(name)

    assert (len(specs), sum(spec.numel for spec in specs)) == PUBLISHED[name]


@pytest.mark.parametrize("name", GPT3)
def test_gpt_3_has_what_its_sizes_add_up_to_which_is_the_published_count_rounded(name):
    numel, published = GPT3[name]

    assert sum(spec.numel for spec in specs_of(name)) == numel
    assert abs(numel - published) < 0.01 * published


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3"])
def test_the_parameters_a_token_passes_are_the_published_ones(name):
    published = {"mixtral-8x7b": 12.9e9, "deepseek-v2-lite": 2.66e9, "deepseek-v3": 37.5e9}[name]
    model = load_config(name).model
    share = model.num_experts_per_token / model.num_experts

    active = sum(spec.numel * (share if spec.group == "expert" else 1) for spec in param_specs(model))

    assert abs(active - published) < 0.01 * published


@pytest.mark.parametrize("name", MODELS)
def test_a_shipped_model_says_what_a_step_computes_and_where_its_numbers_come_from(name):
    run = load_config(name)
    specs = param_specs(run.model)

    workload = workload_of(run, specs)

    assert [tensor.name for tensor in workload.tensors] == [spec.name for spec in specs]
    assert workload.backward_s == pytest.approx(2 * workload.forward_s)
    assert 0.001 < workload.backward_s < 60
    text = find_file(name, kind="models").read_text()
    assert re.search(r"^# Source: ", text, re.MULTILINE)
    assert "# assumed, not measured" in text
    numel = sum(spec.numel for spec in specs)
    assert f"{numel:,} " in text.splitlines()[0]


def test_a_model_of_experts_has_a_buffer_for_them_that_is_cut_for_their_own_group():
    run = load_config("mixtral-8x7b")

    layout = build_layout(param_specs(run.model), run.ddp, dp_size=64, group_sizes={"expert": 8})

    assert {buffer.key.group: buffer.num_shards for buffer in layout.buffers} == {"dense": 64, "expert": 8}
    # 32 layers of 8 experts of 3 * 4096 * 14336
    experts = next(buffer for buffer in layout.buffers if buffer.key.group == "expert")
    assert experts.params_numel == 32 * 8 * 3 * 4_096 * 14_336


def test_every_link_that_is_promised_is_shipped():
    assert set(LINKS) >= WANTED_LINKS


@pytest.mark.parametrize("name", LINKS)
def test_a_shipped_link_loads_costs_more_for_more_bytes_and_says_whether_it_was_measured(name):
    link = read_link(name)

    for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER):
        seconds = [link.collective_s(kind, size, 2) for size in (2**16, 2**20, 2**26, 2**30)]
        assert seconds == sorted(seconds)
        assert 0 < seconds[0] < seconds[-1] < 60
    comments = [line for line in find_file(name, kind="links").read_text().splitlines() if line.startswith("#")]
    assert sum(line.startswith(("# Measured: ", "# Assumed, not measured here")) for line in comments) == 1


def test_the_faster_link_of_each_family_is_faster():
    def gigabyte_s(name):
        return read_link(name).collective_s(CollectiveKind.ALL_REDUCE, 2**30, 2)

    for slower, faster in [
        ("nvlink-h100", "nvlink-b200"),
        ("infiniband-200g", "infiniband-400g"),
        ("infiniband-400g", "nvlink-h100"),
        ("ethernet-1g", "ethernet-25g"),
        ("ethernet-25g", "ethernet-100g"),
        ("ethernet-100g", "infiniband-200g"),
    ]:
        assert gigabyte_s(faster) < gigabyte_s(slower)


def test_a_link_is_named_on_the_command_line():
    run = load_config("gpt3-175b", ["link=infiniband-400g"])

    assert run.link.path == "infiniband-400g"
    assert isinstance(run.ddp, DistributedDataParallelConfig)


def test_a_preset_is_a_whole_run_as_the_config_and_a_model_alone_as_the_model():
    run, model = load_config("gpt2-124m"), load_config(None, ["model=gpt2-124m"])

    assert run.model == model.model
    assert run.ddp.bucket_cap_mb == 25
    assert run.workload is not None
    assert (model.ddp, model.workload) == (load_config(None).ddp, None)


def test_a_config_json_and_a_function_are_runs_of_a_model_alone(tmp_path):
    path = str(tmp_path / "config.json")

    assert load_config(path) == load_config(None, [f"model={path}"])
    assert (
        load_config("torch.nn:Linear", ["model.arguments={in_features: 3, out_features: 2}"]).model.factory == "torch.nn:Linear"
    )


@pytest.mark.parametrize(
    ("load", "text"),
    [
        (lambda: load_config("gpt2"), "'gpt2' is neither a file nor a preset; presets of models: deepseek-v2-lite, "),
        (
            lambda: load_config(None, ["model=gpt2"]),
            "command line, 'model=gpt2': model: 'gpt2' is neither a file nor a preset; ",
        ),
        (
            lambda: read_link("ethernet"),
            "'ethernet' is neither a file nor a preset; presets of links: ethernet-100g, ",
        ),
        (lambda: load_config("gpt2.yaml"), "gpt2.yaml: cannot be read: No such file or directory"),
        (
            lambda: load_config("models/mine.py"),
            "'models/mine.py' is Python: write the module and the function that returns the model, as mine:build",
        ),
        (lambda: load_config("."), "'.' is a folder: name a file in it, as config.json"),
        (lambda: read_link("."), "'.' is a folder: name a file in it"),
    ],
)
def test_a_name_that_is_unknown_is_refused_with_those_that_are_known(load, text):
    with pytest.raises(ConfigError) as caught:
        load()

    assert str(caught.value).startswith(text)
