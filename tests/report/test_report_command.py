"""``megabucket report``: its files, its output, its exit codes, and that it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from megabucket.cli.main import app

CONFIG = """
mode: reduce_scatter
link: {kind: ring, latency_s: 1e-5, bytes_per_s: 1e9}
workload:
  tensors:
    - {name: embedding, numel: 1000, backward_s: 1e-3}
    - {name: head, numel: 3000, backward_s: 2e-3}
"""
STEP = {"kind": "step_trace", "step": 3, "rank": 0, "start_s": 1.0, "duration_s": 0.25}
LAUNCH = {"label": "bucket 0", "kind": "all_reduce", "payload_bytes": 8, "launched_s": 0.1, "done_s": 0.2}
LAUNCH |= dict.fromkeys(("ready_s", "wait_start_s", "wait_stop_s"))


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def invoke(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_page_figures_and_trace_lie_beside_each_other(config, tmp_path):
    out = tmp_path / "new" / "report.html"

    result = invoke("-c", config, "--dp-size", 4, "--out", out, "ddp.bucket_size=100")

    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.parent.iterdir()) == ["report.html", "report.json", "report.trace.json"]
    assert "run.yaml" in out.read_text()
    figures = json.loads(out.with_suffix(".json").read_text())
    assert figures["dp_size"] == 4
    assert [plan["key"] for plan in figures["plans"]] == ["default", "config", "uniform", "optimal", "fewest"]
    lines = result.stdout.splitlines()
    assert lines[0] == "Keep this config's buckets: its 3.10 ms a step are within 0.69% of the best of 2 simulated plans."
    table = [line.split("  ")[0] for line in lines[lines.index("") + 1 :]]
    assert table == ["plan", "default", "this config", "best size", "optimal cuts", "fewest cuts within 1 %", "lower bound"]
    events = json.loads(out.with_suffix(".trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert {"step 0", "step 2", "backward", "bucket 0", "bucket 1", "param gather 0"} <= set(names)
    steps = [event["dur"] for event in events if event["ph"] == "X" and event["name"].startswith("step ")]
    config_s = figures["plans"][1]["step_s"]
    assert steps == pytest.approx([config_s * 1e6] * 3, abs=2e-3)  # microseconds, rounded to nanoseconds


def test_measured_steps_get_a_trace_of_their_own(config, tmp_path):
    measured = tmp_path / "steps.jsonl"
    measured.write_text(json.dumps({**STEP, "launches": [LAUNCH]}) + "\n")

    result = invoke("-c", config, "--dp-size", 4, "--out", tmp_path / "r.html", "--measured", measured, "--json")

    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["measured"]["plans"][0]["measured_s"] == 0.25
    assert figures["measured"]["plans"][0]["predicted_s"] == figures["plans"][0]["step_s"]
    events = json.loads((tmp_path / "r.measured.trace.json").read_text())["traceEvents"]
    assert ("bucket 0", 100_000.0) in [(event["name"], event.get("dur")) for event in events]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "report.json"], "the page is called something.html"),
        (["--measured", "empty"], "holds no steps"),
        (["link=null"], "link is required"),
        (["workload=null"], "there is nothing to simulate"),
        (["link.latency_s=-1"], "link.latency_s"),
        (["--out", "file/report.html"], "cannot be written"),
    ],
)
def test_bad_input_ends_with_code_2_and_its_reason(config, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("")
    (tmp_path / "file").write_text("")

    result = invoke("-c", config, "--dp-size", 2, *arguments)

    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_the_command_runs_without_torch(config, tmp_path):
    code = (
        "import sys; from megabucket.cli.main import app; app(sys.argv[1:], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    arguments = ["report", "-c", str(config), "--dp-size", "2", "--out", str(tmp_path / "x.html")]

    subprocess.run([sys.executable, "-W", "error", "-c", code, *arguments], check=True, capture_output=True)

    assert (tmp_path / "x.html").stat().st_size < 200_000
