"""``megabucket doctor``: one process, then two under torchrun, as users start it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launched import run_launched, run_script, torchrun
from typer.testing import CliRunner

from megabucket.cli.main import app

RANKS = 2
STATUSES = {"holds", "note", "finding"}
LINE_TYPES = {"question": str, "status": str, "answer": str, "meaning": str, "ranks": list, "hosts": str, "advice": str}
REPORT_TYPES = {
    "schema": int,
    "is_healthy": bool,
    "backend": str,
    "device": str,
    "num_ranks": int,
    "wall_s": float,
    "hosts": list,
    "lines": list,
}


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def invoke(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments])


def check_schema(report):
    assert {key: type(value) for key, value in report.items()} == REPORT_TYPES
    assert report["schema"] == 1
    for line in report["lines"]:
        assert {key: type(value) for key, value in line.items()} == LINE_TYPES
        assert line["status"] in STATUSES
        assert line["answer"]
        assert line["meaning"]
        assert set(line["ranks"]) <= set(range(report["num_ranks"]))
    assert len(report["lines"]) == 10


class TestAlone:
    def test_the_table_and_one_sentence_are_printed(self, alone):
        result = invoke()

        assert result.exit_code == 0, result.stderr
        lines = result.stdout.splitlines()
        assert lines[0] == "one process without a process group, on cpu"
        assert lines[1].startswith("everything that megabucket relies on holds (10 questions in ")
        assert [line[:5] for line in lines].count("holds") == 10

    def test_the_table_fits_into_the_columns_there_are(self, alone, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")

        assert max(map(len, invoke().stdout.splitlines()[3:])) <= 80

    def test_json_holds_the_same_lines(self, alone):
        result = invoke("--json")

        report = json.loads(result.stdout)
        check_schema(report)
        assert report["is_healthy"]
        assert report["num_ranks"] == 1

    def test_overrides_reach_the_configured_path(self, alone):
        result = invoke("-c", "configs/bytegpt.yaml", "ddp.num_buckets=300", "ddp.bucket_size=null", "--json")

        assert result.exit_code == 0, result.stderr
        (line,) = [line for line in json.loads(result.stdout)["lines"] if line["question"] == "gradients as configured"]
        assert line["answer"] == "exact"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["mode=none"], "error: command line, 'mode=none'"),
            (["-c", "missing.yaml"], "error: missing.yaml: cannot be read: "),
        ],
    )
    def test_wrong_usage_is_one_message_and_exit_code_2(self, alone, arguments, message):
        result = invoke(*arguments)

        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith(message)

    def test_help_loads_without_torch(self):
        code = "import sys, megabucket.cli.doctor; assert 'torch' not in sys.modules"

        subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.dist
class TestOnRanks:
    def test_two_ranks_over_gloo_are_healthy_and_only_the_first_one_prints(self):
        result = torchrun("-m", "megabucket", "doctor", "-c", "configs/bytegpt.yaml", "--json")

        assert result.returncode == 0, result.stderr
        report = json.loads(result.stdout)
        check_schema(report)
        assert report["backend"] == "gloo"
        assert report["num_ranks"] == RANKS
        answers = {line["question"]: line["answer"] for line in report["lines"]}
        assert answers["gradients as configured"] == "exact"
        assert report["is_healthy"]
        assert answers["all-reduce SUM"].startswith("exact")

    def test_a_finding_is_exit_code_1_and_names_the_rank(self, tmp_path):
        script = tmp_path / "other_config.py"
        script.write_text(
            "import os, sys\n"
            "from megabucket.cli.main import app\n"
            "size = 1000 + int(os.environ['RANK'])\n"
            "app(['doctor', '-c', 'configs/bytegpt.yaml', f'ddp.bucket_size={size}', '--json'])\n"
        )

        result = run_launched(run_script, (script, Path.cwd()), tmp_path / "said", warnings_are_errors=True)

        assert result.returncode == 1
        report = json.loads(result.stdout)
        check_schema(report)
        findings = {line["question"]: line for line in report["lines"] if line["status"] == "finding"}
        assert set(findings) == {"config", "gradients as configured"}
        assert findings["config"]["ranks"] == [1]
        assert "LayoutMismatchError" in findings["gradients as configured"]["answer"]


ON_DEMAND = """
import sys, torch
import torch.distributed as dist
import torch.distributed.nn.functional  # holds the default group for ever if it is imported while there is one
from inspect import signature
from pathlib import Path

from megabucket.doctor import run_doctor

dist.init_process_group("gloo")
rank = dist.get_rank()
as_given = {"sort_ranks": False} if "sort_ranks" in signature(dist.new_group).parameters else {}  # torch 2.13 has it
group = dist.new_group([1, 0], **as_given) if sys.argv[1] == "part" else dist.new_group([0, 1])
for _ in range(1 if sys.argv[1] == "part" else 2):
    report = run_doctor(process_group=group)
    assert report.is_healthy, report.findings
value = torch.ones(3)
dist.all_reduce(value)
dist.all_reduce(value, group=group)
assert value.tolist() == [4.0] * 3
del group
dist.destroy_process_group()
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
sys.stdout.write(f"left behind: {[name for name in names if 'gloo' in name]}\\n")
"""


@pytest.mark.dist
@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed in /proc, which only Linux has")
@pytest.mark.parametrize("kind", ["whole", "part"])
def test_on_demand_the_given_group_stays_usable_and_nothing_is_left_behind(tmp_path, kind):
    script = tmp_path / "on_demand.py"
    script.write_text(ON_DEMAND)

    result = torchrun(str(script), kind)

    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["left behind: []"] * RANKS
