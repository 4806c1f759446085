"""``make gpu`` on a machine that has none: it says so, and every part of it runs small on a CPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ready

SMALL = ["--device", "cpu", "--tiny", "--repetitions", "2"]


def run_tool(*arguments):
    command = [sys.executable, ready.__file__, *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=100)


def candidate(code, *, section="passes", name="one", limit_s=60.0):
    switches = [] if section == "tests" else ["-I", "-S"]  # without site-packages a process begins at once
    return ready.Candidate(section, name, [sys.executable, *switches, "-c", code, ready.RESULT], limit_s)


def row_of(tried, tmp_path, *, seconds_left=100.0):
    return ready.run(tried, folder=tmp_path, deadline_s=time.monotonic() + seconds_left)


def found_by(text):
    return f"import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('{text}')"


class TestWhatIsMissing:
    def test_without_a_gpu_it_says_so_and_ends_well(self, monkeypatch, tmp_path, capsys):
        monkeypatch.setattr(ready, "has_gpu", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

        code = ready.main(["--out", str(tmp_path / "made")])

        assert code == 0
        assert "finds no CUDA device here, so nothing was measured and no figure is made up" in capsys.readouterr().out
        assert not (tmp_path / "made").exists()

    @pytest.mark.parametrize(("has_gpu", "code"), [(False, 0), (True, 1)])
    def test_a_missing_module_is_named(self, has_gpu, code, monkeypatch, tmp_path, capsys):
        monkeypatch.setattr(ready, "has_gpu", lambda: has_gpu)
        monkeypatch.setattr(ready, "OF_THE_PACKAGE", ("json", "no_such_module"))

        assert ready.main(["--out", str(tmp_path / "made")]) == code
        assert "lacks no_such_module, so nothing was measured" in capsys.readouterr().out

    def test_it_needs_nothing_but_python_to_say_so(self):
        command = [sys.executable, "-I", "-S", ready.__file__]  # without site-packages

        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

        assert "lacks torch, numpy, pydantic" in result.stdout, result.stderr

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [(["--device", "cpu"], "on a CPU the models are too large; add --tiny"), ([*SMALL, "gtp"], "unknown sections: gtp")],
        ids=["not tiny", "unknown section"],
    )
    def test_what_it_cannot_do_is_named(self, arguments, text):
        result = run_tool(*arguments)

        assert result.returncode == 2
        assert text in result.stderr

    def test_a_test_tool_that_is_not_installed_leaves_the_tests_out_and_nothing_else(self, monkeypatch):
        monkeypatch.setattr(ready, "OF_THE_TESTS", ("no_such_module",))
        facts = {"gpus": ["one"], "sections": {"gpt": ["bare torch"]}}

        every = list(ready.candidates(facts, ready.read_options(["tests", "gpt"])))

        assert [(one.name, one.ranks, one.left_out) for one in every] == [
            ("test_on_device.py", 1, "not installed: no_such_module"),
            ("test_nccl.py", 1, "not installed: no_such_module"),
            ("bare torch", 1, ""),
            ("bare torch", 2, "fewer than two GPUs"),
        ]


@pytest.mark.parametrize(("arguments", "num_gpus", "minutes"), [([], 1, 9.5), ([], 2, 16.0), (["--minutes", "3"], 2, 3.0)])
def test_the_whole_run_takes_longer_with_several_gpus_unless_told(arguments, num_gpus, minutes):
    assert ready.minutes_of(ready.read_options(arguments), num_gpus=num_gpus) == minutes


def test_all_gpus_of_the_machine_are_ranks():
    facts = {"gpus": ["one"] * 8, "sections": {"gpt": ["bare torch"], "passes": ["clipping"]}}

    every = list(ready.candidates(facts, ready.read_options(["gpt", "passes"])))

    assert [(one.name, one.ranks) for one in every] == [("bare torch", 1), ("bare torch", 8), ("clipping", 1)]
    assert every[1].command[every[1].command.index("--ranks") + 1] == "8"


def test_the_sanitizer_is_the_same_tests_with_a_switch():
    facts = {"gpus": ["one", "another"], "sections": {}}

    every = list(ready.candidates(facts, ready.read_options(["tests", "sanitizer"])))

    assert every[0].command == every[2].command
    assert [dict(one.environment) for one in every] == [{}, {}, *[{"TORCH_CUDA_SANITIZER": "1"}] * 2]
    assert [one.left_out for one in every] == [""] * 4


class TestOneCandidate:
    def test_that_raises_is_a_row_with_its_error(self, tmp_path):
        row = row_of(candidate("raise ValueError('no such kernel')"), tmp_path)

        assert (row["status"], row["text"], row["found"]) == ("raised", "ValueError: no such kernel", None)
        assert "Traceback" in row["output"]

    def test_that_hangs_is_killed_with_all_that_it_has_started(self, tmp_path):
        sleeper = tmp_path / "pid"
        code = (
            "import pathlib, subprocess, sys, time\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(90)'])\n"
            f"pathlib.Path({str(sleeper)!r}).write_text(str(child.pid))\n"
            "print('begun', flush=True)\n"
            "time.sleep(90)"
        )

        row = row_of(candidate(code, limit_s=4.0), tmp_path)

        assert (row["status"], row["text"], row["output"]) == ("hung", "no end after 4 s", "begun\n")
        assert has_ended(int(sleeper.read_text()))

    def test_that_has_no_time_left_is_not_started(self, tmp_path):
        row = row_of(candidate("raise SystemExit"), tmp_path, seconds_left=-1.0)

        assert (row["status"], row["text"]) == ("not started", "the time of the whole run was over")

    def test_that_is_cut_off_by_the_end_of_the_whole_run_is_told_from_one_that_hangs(self, tmp_path):
        row = row_of(candidate("import time; time.sleep(60)"), tmp_path, seconds_left=1.0)

        assert (row["status"], row["text"]) == ("hung", "no end after 1 s, the end of the whole run")

    def test_that_gives_other_losses_has_failed(self, tmp_path):
        row = row_of(candidate(found_by('{"are_alike": false}'), section="gpt"), tmp_path)

        assert (row["status"], row["text"]) == ("failed", "the losses are not those of bare torch")

    def test_that_lacks_a_peer_is_left_out(self, tmp_path):
        row = row_of(candidate(found_by('{"left_out": "No module named amp_C"}')), tmp_path)

        assert (row["status"], row["text"], row["found"]) == ("left out", "No module named amp_C", None)

    @pytest.mark.parametrize(
        ("body", "status", "text"),
        [
            ("assert True", "ok", "1 passed in "),
            ("assert False", "failed", "; FAILED test_one.py::test_it"),
            ("import pytest; pytest.skip('none')", "left out", "1 skipped in "),
        ],
    )
    def test_of_device_tests_is_judged_by_their_summary(self, body, status, text, tmp_path):
        (tmp_path / "test_one.py").write_text(f"def test_it():\n    {body}\n")
        code = f"import os, sys, pytest; os.chdir({str(tmp_path)!r}); sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider']))"

        row = row_of(candidate(code, section="tests"), tmp_path)

        assert row["status"] == status
        assert text in row["text"]


def has_ended(pid):
    """Whether a process is gone, or dead and not buried, within ten seconds."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_one_that_raises_and_one_that_hangs_are_lines_between_the_others(monkeypatch, tmp_path):
    def chosen(facts, options):
        yield candidate("raise ValueError('a | b')", name="first")
        yield candidate("import time; time.sleep(60)", name="second", limit_s=1.0)
        command = [sys.executable, str(ready.BENCH), "passes", "clipping", *SMALL, "--json", ready.RESULT]
        yield ready.Candidate("passes", "clipping", command, 60.0)

    monkeypatch.setattr(ready, "candidates", chosen)

    code = ready.main([*SMALL, "--out", str(tmp_path)])

    assert code == 1
    page, document = (tmp_path / "gpu.md").read_text(), json.loads((tmp_path / "gpu.json").read_text())
    assert [row["status"] for row in document["rows"]] == ["raised", "hung", "ok"]
    empty = "|  " * 4 + "|"
    assert (
        f"| first | raised: ValueError: a / b {empty}\n| second | hung: no end after 1 s {empty}\n| clipping | ok | 8 |" in page
    )
    assert "3 candidates in " in page
    assert " s, 2 failed." in page
    assert "device: CPU: these times mean nothing; torch: " in page
    assert len(document["rows"][2]["found"]["seconds"]["work"]) == 2


def check_page(folder, sections):
    """Check that all that was tried has worked, and return its rows."""
    document = json.loads((folder / "gpu.json").read_text())
    bad = [row for row in document["rows"] if row["status"] not in ("ok", "left out")]
    assert bad == []
    assert {row["section"] for row in document["rows"]} == set(sections)
    for row in document["rows"]:
        assert f"| {row['name']} | {row['status']}" in (folder / "gpu.md").read_text()
    return document["rows"]


@pytest.mark.nightly
@pytest.mark.slow
def test_some_of_each_kind_runs_small_on_a_cpu(tmp_path):
    assert ready.main([*SMALL, "tensors", "profile", "--only", "DistributedOptimizer", "--out", str(tmp_path)]) == 0

    one, two, profile = check_page(tmp_path, ["tensors", "profile"])
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert all(len(row["found"]["seconds"]["system"]) == 2 for row in (one, two))
    ranges = profile["found"]["ranges"]
    assert {"bucket 0: launch", "bucket 1: launch", "bucket 0: finish"} <= set(ranges)
    assert ranges["bucket 1: launch"]["count"] == profile["found"]["num_steps"]
    (trace,) = tmp_path.glob("*.trace.json.gz")
    assert trace.stat().st_size > 1_000


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1_500)
def test_all_of_it_runs_small_on_a_cpu(tmp_path):
    assert ready.main([*SMALL, "--minutes", "22", "--out", str(tmp_path)]) == 0

    rows = check_page(tmp_path, ready.LIMITS_S)
    assert {row["name"] for row in rows if row["section"] in ("tests", "sanitizer")} == set(ready.DEVICE_TESTS)
    assert all(row["status"] == "ok" for row in rows if row["name"].startswith("megabucket"))
