"""``megabucket tune`` over the demo: the closed loop under torchrun, what it writes, and what it refuses."""

import json

import pytest
import yaml
from launched import run_launched, torchrun
from typer.testing import CliRunner

from examples.bytegpt.config import load_demo_config
from examples.bytegpt.workload import workload as demo
from megabucket.cli.main import app
from megabucket.cli.output import print_lines
from megabucket.cli.tune import _lines
from megabucket.errors import ConfigError
from megabucket.measure.ranks import Ranks
from megabucket.measure.tune import TunePlan, Tuning, tune_program, tuned_text, write_tuning
from megabucket.planning.candidates import DEFAULT, Candidate, decide
from megabucket.report.measured import read_measured

DEMO = ("--workload", "examples.bytegpt.workload:workload")
FACTS = {"num_ranks": 2, "backend": "gloo"}


@pytest.fixture
def config_path(tiny_run, tmp_path):
    path = tmp_path / "run.yaml"
    data = tiny_run(train={"num_microbatches": 1}).model_dump(mode="json", exclude_unset=True)
    # A link whose latency is what a candidate can save.
    path.write_text(json.dumps({**data, "fabric": {"latency_s": 1e-4, "bytes_per_s": 3e7, "moves_data": False}}))
    return path


def tuning_of(config, seconds, *, name="other", **update):
    """A tuning of two candidates with given measurements."""
    ddp = config.ddp.model_copy(update={"bucket_size": None, **update})
    candidates = (Candidate(name, ddp, 3, 0.01), Candidate(DEFAULT, config.ddp, 1, 0.02))
    return Tuning(candidates, seconds, decide(seconds), FACTS)


FASTER = {DEFAULT: (0.02,) * 10, "other": (0.01,) * 10}
NOISE = {DEFAULT: (0.01, 0.02) * 5, "other": (0.02, 0.01) * 5}


def megabucket(*arguments):
    app(arguments, prog_name="megabucket")


@pytest.mark.dist
@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["forked", "torchrun"])
def test_two_ranks_predict_run_and_write_a_config_that_trains(is_forked, config_path, tmp_path):
    out = tmp_path / "new" / "tuned.yaml"
    evidence = out.with_name("tune.json") if is_forked else tmp_path / "evidence.json"  # without and with a name of its own
    options = ["--out", str(out), *([] if is_forked else ["--evidence", str(evidence)]), "--modes", "both"]

    arguments = ["tune", *DEMO, "-c", str(config_path), *options, "--rounds", "2", "--steps", "1", "--candidates", "2"]
    if is_forked:
        result = run_launched(megabucket, arguments, tmp_path / "said", warnings_are_errors=True)
    else:
        result = torchrun("-m", "megabucket", *arguments)

    assert result.returncode == 0, result.stderr
    # Two candidates share an error of 5 %, on either side of their intervals: 2**-7 <= 0.05 / 2 / 2.
    assert ", undecided: rounds done 2, needed 7. To decide, " in result.stdout
    assert load_demo_config(out, []).ddp == load_demo_config(config_path, []).ddp
    data = json.loads(evidence.read_text())
    run = [each for each in data["candidates"] if "measured_s" in each]
    assert len(run) == 3
    assert {each["mode"] for each in data["candidates"]} == {"all_reduce", "reduce_scatter"}
    assert all(len(each["seconds"]) == 2 and each["predicted_s"] > 0 for each in run)
    assert data["facts"]["modes"]["reduce_scatter"]["forward_s"] > 0
    assert len(read_measured(evidence).plans) == 3


@pytest.mark.parametrize("mode", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize(
    "update", [{"bucket_size": 3000}, {"num_buckets": 4}, {"bucket_cuts": ("a", "b")}, {"bucket_order": ("b", "a")}]
)
def test_the_tuned_config_is_the_old_one_with_the_chosen_plan(config_path, tmp_path, mode, update):
    config = load_demo_config(config_path, [])
    is_sharded = mode == "reduce_scatter"
    switches = {"use_distributed_optimizer": is_sharded, "overlap_param_gather": is_sharded}
    tuning = tuning_of(config, FASTER, **switches, **update)

    write_tuning(config, tuning, out=tmp_path / "tuned.yaml", evidence=tmp_path / "e.json")

    tuned = load_demo_config(tmp_path / "tuned.yaml", [])
    assert tuned.ddp == tuning.choice.ddp
    assert tuned.mode == mode
    assert tuned.model_copy(update={"ddp": None, "mode": None}) == config.model_copy(update={"ddp": None, "mode": None})


def test_the_decision_stands_in_the_comments_of_the_config(config_path):
    config = load_demo_config(config_path, [])

    text = tuned_text(config, tuning_of(config, FASTER, bucket_size=3000))

    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert "Use other (3 buckets) instead of " in comments[1]  # after what made it
    assert yaml.safe_load(text)["ddp"]["bucket_size"] == 3000


def test_every_plan_that_ran_is_a_row_with_prediction_and_gain(config_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    config = load_demo_config(config_path, [])

    lines = list(_lines(tuning_of(config, FASTER, bucket_size=3000)))

    change = "Use other (3 buckets) instead of this config's buckets (1): saves 10.00 ms of 20.00 ms a step (50.00%)"
    evidence = "95 % interval over all candidates: 50.0% to 50.0%, sign test p = 0.00098"
    assert lines[0] == f"{change}, measured in 10 rounds ({evidence})."
    assert lines[1:] == [
        "ddp:",
        "  bucket_size: 3000",
        "2 ranks, gloo; 2 plans predicted, 2 run; smallest visible saving at this noise: 1.0% of a step",
        "plan     buckets  predicted, ms  measured, ms  error, %  saves, %     interval, %  faster, rounds",
        "other          3          10.00         10.00      +0.0     +50.0  +50.0 to +50.0        10 of 10",
        "default        1          20.00         20.00      +0.0",
    ]


def test_names_of_plans_are_whole_in_80_columns(config_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    config = load_demo_config(config_path, [])
    seconds = {DEFAULT: (0.02,) * 10, "num_buckets 12": (0.01,) * 10}

    print_lines(_lines(tuning_of(config, seconds, name="num_buckets 12", num_buckets=12)))

    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[lines.index("plan") :] == [
        "plan",
        "  buckets  predicted,  measured,  error,  saves,     interval, %   faster,",
        "                   ms         ms       %       %                    rounds",
        "num_buckets 12",
        "        3       10.00      10.00    +0.0   +50.0  +50.0 to +50.0  10 of 10",
        "default",
        "        1       20.00      20.00    +0.0",
    ]


def test_too_few_rounds_are_no_decision_and_the_config_stays(config_path):
    config = load_demo_config(config_path, [])
    tuning = tuning_of(config, {name: times[:5] for name, times in FASTER.items()}, bucket_size=3000)

    assert tuning.summary[0] == (  # 2**-6 <= 0.05 / 2
        "Keep this config's buckets, undecided: rounds done 5, needed 6. To decide, give more --seconds and at least "
        "--rounds 6, or fewer --candidates."
    )
    assert yaml.safe_load(tuned_text(config, tuning)) == config.model_dump(mode="json", exclude_unset=True)
    assert tuning.to_dict()["is_undecided"]


def test_within_noise_nothing_is_recommended_and_the_config_stays(config_path):
    config = load_demo_config(config_path, [])
    tuning = tuning_of(config, NOISE, bucket_size=3000)

    assert tuning.decision.is_default
    assert tuning.summary[0] == "Keep this config's buckets: no plan that ran is faster beyond noise."
    assert yaml.safe_load(tuned_text(config, tuning)) == config.model_dump(mode="json", exclude_unset=True)
    assert tuning.to_dict()["is_default"]
    assert not tuning.to_dict()["is_undecided"]


def test_the_smallest_visible_gain_is_stated_with_every_verdict(config_path):
    config = load_demo_config(config_path, [])
    noise, few, one = (tuning_of(config, {name: times[:n] for name, times in NOISE.items()}) for n in (10, 4, 1))

    # Ratios of 0.5 and 2, half of them each: the median is 1.25, the lower end of the interval 0.5. 1 - 1 / 1.75 = 0.429
    assert noise.summary[1].endswith("; smallest visible saving at this noise: 42.9% of a step")
    assert few.summary[1].endswith("; smallest visible saving at this noise: at least 42.9% of a step")
    assert one.summary[1].endswith("2 run")
    assert noise.to_dict()["visible_gain"] == pytest.approx(0.75)


@pytest.mark.parametrize(("factor", "way"), [(0.5, "100% too long"), (2, "50% too short")])
def test_predictions_that_all_miss_are_said_plainly(config_path, factor, way):
    config = load_demo_config(config_path, [])

    tuning = tuning_of(config, {name: tuple(each * factor for each in times) for name, times in FASTER.items()})

    assert tuning.summary[2] == (
        f"every prediction is at least {way}: the measured link or compute is not that of these steps, and plans that were not "
        "run may be better. Keep the machine idle, compare with megabucket calibrate and profile, raise --candidates"
    )
    one_right = tuning_of(config, {DEFAULT: (0.02,) * 10, "other": (0.03,) * 10})
    assert len(one_right.summary) == 2


def test_a_file_that_cannot_be_written_is_named(config_path, tmp_path):
    config = load_demo_config(config_path, [])

    with pytest.raises(ConfigError, match=f"{tmp_path}: cannot be written"):
        write_tuning(config, tuning_of(config, NOISE), out=tmp_path, evidence=tmp_path / "e.json")


def test_one_rank_is_refused(config_path):
    result = CliRunner().invoke(app, ["tune", *DEMO, "-c", str(config_path)])

    assert result.exit_code == 2
    assert "one rank sends nothing" in result.stderr
    with pytest.raises(ConfigError, match="torchrun"):
        tune_program(demo, load_demo_config(config_path, []), TunePlan(), ranks=Ranks())


@pytest.mark.parametrize("option", ["--candidates", "--rounds", "--steps"])
def test_a_plan_that_measures_nothing_is_refused(option):
    result = CliRunner().invoke(app, ["tune", *DEMO, option, "0"])

    assert result.exit_code == 2
    assert option in result.stderr
