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

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [(["--device", "cpu"], "on a CPU the models are too large; add --tiny"), ([*SMALL, "gtp"], "unknown sections: gtp")],
        ids=["not tiny", "unknown section"],
    )
    def test_what_it_cannot_do_is_named(self, arguments, text):
        result = run_tool(*arguments)

        assert result.returncode == 2
        assert text in result.stderr


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

    def test_that_gives_other_losses_has_failed(self, tmp_path):
        row = row_of(candidate(found_by('{"are_alike": false}'), section="gpt"), tmp_path)

        assert (row["status"], row["text"]) == ("failed", "the losses are not those of bare torch")


def has_ended(pid):
    """Whether a process is gone, or dead and not buried, within ten seconds."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


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
@pytest.mark.timeout(2_700)
def test_all_of_it_runs_small_on_a_cpu(tmp_path):
    beside_other_tests = ["--minutes", "44", "--limit-s", "300"]
    assert ready.main([*SMALL, *beside_other_tests, "--out", str(tmp_path)]) == 0

    rows = check_page(tmp_path, ready.LIMITS_S)
    assert {row["name"] for row in rows if row["section"] in ("tests", "sanitizer")} == set(ready.DEVICE_TESTS)
    assert all(row["status"] == "ok" for row in rows if row["name"].startswith("megabucket"))
