"""The advice about buckets: what it says, and against every plan there is, stepped through by a simulator without formulas."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import yaml
from docs.tools import advice as table
from hypothesis import given, settings
from hypothesis import strategies as st
from timing_cases import AFFINE_LINKS, LINKS, flat, plan_of, ring, run_step_by_step, workloads
from typer.testing import CliRunner

from megabucket.cli.main import app
from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import ParamSpec
from megabucket.planning import load_config
from megabucket.planning.advice import SIMULATED, TOLERANCE, Choice, advise, config_lines
from megabucket.planning.cuts import BucketPlan
from megabucket.planning.setting import Setting, outlook_of, setting_of
from megabucket.planning.simulate import Mode
from megabucket.planning.workload import TensorWork, Workload

ROOT = Path(__file__).parents[2]
SIZES = (1, 10, 20, 40, 80, 400)
OVERLAPPING = st.sampled_from(  # the layout of the test has one bucket without overlap, as in Megatron
    [
        {"mode": Mode.ALL_REDUCE, "overlap_grad_reduce": True},
        {"mode": Mode.REDUCE_SCATTER, "overlap_grad_reduce": True, "overlap_param_gather": True},
        {"mode": Mode.REDUCE_SCATTER, "overlap_grad_reduce": True, "overlap_param_gather": False},
    ]
)


def buckets_of(workload, ddp):
    """Cut backwards through the tensors as a config says, without the package: at a size, or after names."""
    size, names = ddp.get("bucket_size"), ddp.get("bucket_cuts")
    size = 40_000_000 if size is None else size
    buckets, bucket, filled = [], [], 0
    for index in reversed(range(len(workload.tensors))):
        bucket.append(index)
        filled += workload.tensors[index].numel
        if filled >= size if names is None else workload.tensors[index].name in names:
            buckets.append(tuple(bucket))
            bucket, filled = [], 0
    return BucketPlan((*buckets, tuple(bucket)) if bucket else tuple(buckets))


def step_and_count(workload, plan, link, choices):
    """Return the seconds of a step in the steady state, and how many buckets send anything."""
    counts = sum(any(workload.tensors[index].numel for index in bucket) for bucket in plan.buckets)
    return run_step_by_step(workload, plan, link, num_ranks=4, **choices)[-1], counts


@settings(max_examples=100)
@given(workloads(max_tensors=7), AFFINE_LINKS, OVERLAPPING, st.none() | st.integers(1, 100))
def test_the_advised_plan_is_within_one_percent_of_all_there_are_and_none_of_these_has_fewer_buckets(
    workload, link, choices, bucket_size
):
    workload = workload.in_order(reversed(range(len(workload.tensors))))
    # Gaps between tensors would decide where buckets of these sizes end. This layout has none, but for shards.
    given = {} if bucket_size is None or choices["mode"] is Mode.REDUCE_SCATTER else {"bucket_size": bucket_size}
    ddp = DistributedDataParallelConfig(
        layout="megatron",
        use_distributed_optimizer=choices["mode"] is Mode.REDUCE_SCATTER,
        overlap_param_gather=choices.get("overlap_param_gather", False),
        **given,
    )
    advice = outlook_of(Setting(workload, link, ddp, dp_size=4), SIZES).advice
    if advice.unknown:
        assert workload.backward_s == 0
        return

    pasted = yaml.safe_load("\n".join(advice.config_lines)) if advice.offered else {"ddp": {}}
    advised_s, advised_count = step_and_count(workload, buckets_of(workload, {**given, **pasted["ddp"]}), link, choices)
    cuts = itertools.product([False, True], repeat=len(workload.tensors) - 1)
    all_plans = [step_and_count(workload, plan_of(workload, is_cut), link, choices) for is_cut in cuts]
    shortest_s = min(step_s for step_s, _ in all_plans)
    assert advised_s <= shortest_s * (1 + TOLERANCE) * (1 + 1e-9) + 1e-9
    current_s, current_count = step_and_count(workload, buckets_of(workload, given), link, choices)
    if advice.offered is None:
        assert (advised_s, advised_count) == (current_s, current_count)
        return
    assert advised_count == advice.offered.num_buckets
    assert current_s > shortest_s * (1 + TOLERANCE) - 1e-9
    assert advice.saved_s == pytest.approx(current_s - advised_s, rel=1e-6, abs=1e-9)
    # None that it could have offered is as good with fewer buckets, and of all there are none that leaves room for padding.
    sizes = [step_and_count(workload, buckets_of(workload, {"bucket_size": size}), link, choices) for size in SIZES]
    assert [step for step, count in sizes if count < advised_count and step <= shortest_s * (1 + TOLERANCE) - 1e-9] == []
    assert [step for step, count in all_plans if count < advised_count and step <= shortest_s * 1.0093 - 1e-9] == []


@settings(max_examples=30)
@given(workloads(max_tensors=6), LINKS, st.sampled_from(Mode), st.none() | st.integers(1, 100))
def test_what_is_pasted_gives_a_model_the_plan_that_was_promised(workload, link, mode, bucket_size):
    specs = tuple(ParamSpec(tensor.name, (tensor.numel,)) for tensor in workload.tensors)
    is_sharded = mode is Mode.REDUCE_SCATTER
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=is_sharded, overlap_param_gather=is_sharded, bucket_size=bucket_size
    )
    setting = Setting(workload, link, ddp, dp_size=4, specs=specs)
    advice = outlook_of(setting).advice
    if advice.offered is None:
        return

    fields = yaml.safe_load("\n".join(advice.config_lines))["ddp"]

    there = Setting(workload, link, ddp.model_validate({**ddp.model_dump(), **fields}), dp_size=4, specs=specs)
    step_s = there.traces(there.current_plan)[-1].duration_s
    assert step_s == pytest.approx(advice.offered.step_s, rel=1e-9)
    assert there.current_plan.num_collectives(workload) == advice.offered.num_buckets


# Presets #

BY_DAY = {"gpt2-124m", "llama3-70b", "mixtral-8x7b"}


def models():
    return [model if model in BY_DAY else pytest.param(model, marks=pytest.mark.nightly) for model in table.MODELS]


def test_the_table_has_every_preset():
    assert sorted(table.MODELS) == sorted(path.stem for path in (ROOT / "megabucket/planning/presets/models").glob("*.yaml"))


@pytest.mark.parametrize("model", models())
def test_the_advice_on_a_preset_is_within_one_percent_of_the_best_and_is_the_one_of_the_page(model):
    page = (ROOT / "docs/advice.md").read_text(encoding="utf-8")
    for link, num_ranks in table.LINKS:
        outlook = table.outlook(model, link, num_ranks)
        advice = outlook.advice

        # The config with the offered fields as --json prints them, from the file on, by the walk that makes traces.
        offered = json.loads(json.dumps(advice.to_dict()))["offered"]
        fields = offered["ddp"] if offered else {}
        run = load_config(model, [f"link={link}"])
        ddp = run.ddp.model_validate({**run.ddp.model_dump(), **fields})
        there = setting_of(run.model_copy(update={"ddp": ddp}), dp_size=num_ranks)
        step_s = there.traces(there.current_plan)[-1].duration_s
        rows = (*outlook.rows, outlook.default, outlook.optimal, outlook.fewest)
        steps = [(outlook.setting.traces(row.plan)[-1].duration_s, row.buckets) for row in rows]
        limit_s = min(other_s for other_s, _ in steps) * (1 + TOLERANCE)
        assert step_s <= limit_s * (1 + 1e-9)
        if advice.offered is not None:
            assert min(count for other_s, count in steps if other_s <= limit_s * (1 - 1e-9)) >= advice.offered.num_buckets
        assert table.row(model, link, num_ranks) in page.splitlines(), "run: python -m docs.tools.advice"


# What it says #


def said(setting):
    return outlook_of(setting, SIZES).advice.lines


def a_setting(numels=(100, 100, 100), link=None, backward_s=1.0, dp_size=4, **fields):
    tensors = tuple(TensorWork(f"t{index}", numel, backward_s) for index, numel in enumerate(numels))
    ddp = DistributedDataParallelConfig(**fields)
    return Setting(Workload(tensors), link or flat(0.5, 1e-3), ddp, dp_size=dp_size)


def test_a_plan_that_saves_more_than_one_percent_is_offered_with_what_to_paste():
    # A float32 takes 4 ms. One bucket: 3 s of backward and 1.7 s; one for each tensor: the last ends 0.9 s after backward.
    sentence, *rest = said(a_setting())

    change = "Use ddp.bucket_size=80 (3 buckets) instead of the default buckets (1)"
    assert sentence == f"{change}: saves 800.00 ms of 4.70 s a step (17.02%), simulated."
    assert rest == ["ddp:", "  bucket_size: 80", SIMULATED]


def test_the_fields_of_the_config_that_have_to_go_are_in_what_to_paste():
    (_, *pasted, _) = said(a_setting(num_buckets=1))

    assert pasted == ["ddp:", "  num_buckets: null", "  bucket_size: 80"]


def test_a_config_within_one_percent_stays_also_with_more_buckets_than_needed():
    # Three buckets where two would do: the last tensor of the first is ready when the link is free again.
    numels = (1000, 10, 10, 10)
    assert said(a_setting(numels, flat(0.1, 1e-3), bucket_size=1)) == (
        "Keep this config's buckets: none of 4 simulated plans takes less than its 8.10 s a step.",
        SIMULATED,
    )
    assert outlook_of(a_setting(numels, flat(0.1, 1e-3)), SIZES).fewest.buckets == 2


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (a_setting(numels=(100,)), "Keep the default buckets: every size gives the same buckets."),
        (
            a_setting(link=flat(0.0, 0.0)),
            "Keep the default buckets: none of 2 simulated plans takes less than its 3.00 s a step.",
        ),
        (
            a_setting(link=ring(1.0, 1.0), dp_size=1),
            "Keep the default buckets: one rank sends nothing, so buckets make no difference; give --dp-size.",
        ),
        (
            a_setting(backward_s=0.0),
            "Keep the default buckets: the workload does not say when gradients become ready, so others cannot be compared.",
        ),
    ],
    ids=["one tensor", "all plans equal", "one rank", "no times"],
)
def test_without_a_difference_or_enough_information_the_default_stays(setting, sentence):
    assert said(setting)[0] == sentence


def plan(*arguments):
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "1000"})
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()[0]


def test_plan_says_what_is_missing_and_with_a_link_what_simulate_says():
    assert plan("-c", "gpt2-124m") == (
        "Keep this config's buckets: one rank sends nothing, so buckets make no difference; give --dp-size."
    )
    assert plan("-c", "gpt2-124m", "--dp-size", "8") == (
        "Keep this config's buckets: no link says what others would take; give link=h100-cluster-400g, or one from "
        "megabucket calibrate, and a workload."
    )
    linked = ("-c", "gpt2-124m", "--dp-size", "8", "link=infiniband-400g")
    assert plan(*linked).startswith("Use ddp.bucket_size=9958681 (8 buckets) instead of this config's buckets (13): saves ")
    assert plan(*linked) == CliRunner().invoke(app, ["simulate", *linked], env={"COLUMNS": "1000"}).stdout.splitlines()[0]
    assert plan(*linked[:2], "--dp-size", "12", "link=h100-cluster-400g").startswith(
        "Keep this config's buckets: others cannot be compared: "
    )


def test_many_names_are_left_to_json():
    assert config_lines({"bucket_cuts": tuple(f"t{index}" for index in range(30))}) == (
        "  (ddp has 31 lines: --json prints them, under advice.offered.ddp)",
    )


def test_a_number_is_offered_before_names_with_as_many_buckets():
    cuts, size = Choice("cuts", 2, 1.0, {"bucket_cuts": ("a", "b")}), Choice("size", 2, 1.009, {"bucket_size": 5})

    assert advise(Choice("now", 1, 2.0), [cuts, size], num_plans=3).offered is size


def test_the_figures_of_the_simulator_s_error_are_those_of_the_page():
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")

    assert "| timing only | 280 | 1.2 % |" in page
    assert "| plain gloo (`--fabric gloo`) | 70 | 7.1 % |" in page
    assert "1.2%" in SIMULATED
    assert "7.1%" in SIMULATED
