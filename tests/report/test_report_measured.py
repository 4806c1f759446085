"""Files of measurements: what is read from each kind, and what is said about the others."""

from __future__ import annotations

import json

import pytest
from report_cases import book, report

from megabucket.errors import ConfigError
from megabucket.report import StepTraceLog, chrome_trace, read_measured
from megabucket.trace import CollectiveKind, Interval, Lane, StepTrace
from megabucket.trace.step_trace import LaunchTimes


@pytest.fixture
def path(tmp_path):
    return tmp_path / "steps.jsonl"


def step_line(duration_s, **more):
    return json.dumps(
        {"schema": 1, "kind": "step_trace", "step": 0, "rank": 0, "start_s": 5.0, "duration_s": duration_s, **more}
    )


def test_step_traces_come_back_with_median_quartiles_and_intervals(path):
    launch = LaunchTimes("bucket 0", CollectiveKind.ALL_REDUCE, 4000, 5.1, 5.2, 5.6, 5.4, 5.6)
    unknown = LaunchTimes("bucket 1", CollectiveKind.ALL_REDUCE, 4000, None, 5.3, None, None, None)
    waiting = (Interval(Lane.WAIT, "bucket 0", 5.4, 5.6),)
    with StepTraceLog(path) as log:
        for step, seconds in enumerate([1.0, 3.0, 2.0, 4.0, 10.0]):
            log.write(StepTrace(step, 0, 5.0, 5.0 + seconds, waiting, launches=(launch, unknown)))

    measured = read_measured(path)

    (plan,) = measured.plans
    assert (plan.low_s, plan.measured_s, plan.high_s) == (2.0, 3.0, 4.0)
    assert plan.exposed_s == pytest.approx(0.2)
    assert plan.num_steps == 5
    assert len(measured.traces) == 5
    assert measured.traces[0].intervals == (
        Interval(Lane.COMM, "bucket 0", pytest.approx(5.2), pytest.approx(5.6)),
        Interval(Lane.WAIT, "bucket 0", pytest.approx(5.4), pytest.approx(5.6)),
    )
    assert len(chrome_trace(measured.traces)["traceEvents"]) > 15


def test_lines_of_training_are_read_and_other_lines_passed_over(path):
    lines = [
        {"kind": "run"},
        {"kind": "step", "step_s": 0.2, "exposed_s": 0.1},
        {"kind": "eval"},
        {"kind": "step", "step_s": 0.4},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")

    (plan,) = read_measured(path).plans

    assert plan.measured_s == pytest.approx(0.3)
    assert plan.exposed_s == 0.1
    assert read_measured(path).traces == ()


def test_candidates_that_were_run_are_read(path):
    candidates = [
        {"name": "default", "bucket_numel": 40_000_000, "measured_s": 0.14, "low_s": 0.13, "high_s": 0.15, "other": 1},
        {"name": "planned only", "predicted_s": 1.0},
        {"name": "cuts", "measured_s": 0.12, "predicted_s": 0.11},
        {"name": "as configured", "measured_s": 0.13},
    ]
    path.write_text(json.dumps({"candidates": candidates}, indent=2))

    figures = report(book(), measured=read_measured(path))

    default, cuts, configured = figures.to_dict()["measured"]["plans"]
    # 40 M elements: 46.4 M in 49 tensors become ready at 55.68 ms, then the 30 M of the first tensor
    assert default["predicted_s"] == pytest.approx(55.68e-3 + 2 * 1.4e-3 + 76.4e6 * 0.95e-9, rel=1e-9)
    assert cuts["predicted_s"] == 0.11
    assert configured["predicted_s"] == figures.configured.step_s


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (" \n\n", "holds no steps"),
        ('{"kind": "eval"}', "holds no steps"),
        ("[]", "holds no steps"),
        ('{"steps": []}', "holds no steps"),
        ('{"candidates": []}', "none of the candidates has a measured_s"),
        ('{"candidates": "abc"}', "candidates: .*list"),
        ('{"candidates": [3]}', r"candidates\.0: "),
        ('{"candidates": [{"name": "a"}]}', "none of the candidates has a measured_s"),
        ('{"candidates": [{"measured_s": -1}]}', r"candidates\.0\.measured_s: .*-1"),
        ('{"candidates": [{"measured_s": NaN}]}', r"measured_s: .*nan"),
        ('{"candidates": [{"measured_s": true}]}', r"measured_s: .*True"),
        ('{"candidates": [{"measured_s": 1, "bucket_numel": 0}]}', "bucket_numel: .*0"),
        (step_line("soon"), r":1: (duration_s|step_s): "),
        (step_line(1.0) + "\n" + step_line(1.0)[:30], ":2: not valid JSON"),
        ("a,b\n1,2", ":1: not valid JSON"),
        (step_line(1.0, launches=[{"label": "x"}]), r"launches\.0\.kind"),
        (step_line(1.0, launches=[{"label": "x", "kind": "gossip", "payload_bytes": 1}]), r"launches\.0\.kind"),
    ],
)
def test_other_files_are_refused_with_their_name_and_what_to_give(path, text, said):
    path.write_text(text)

    with pytest.raises(ConfigError, match=said) as error:
        read_measured(path)

    assert "steps.jsonl" in str(error.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read: No such file"):
        read_measured(tmp_path / "none.json")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_measured(tmp_path / "bytes")
