"""``make gpu``: everything that waits for a GPU, in ten minutes, on one page. Needs no network and installs nothing.

    python3 tests/gpu/ready.py                                # device tests, also with the sanitizer, benchmarks, profiles
    python3 tests/gpu/ready.py gpt passes --only "all-reduce" # some sections, and some candidates of them
    python3 tests/gpu/ready.py --device cpu --tiny            # the same code, small, to see that it runs

Each candidate is a process of its own with a time limit of its own, so one that raises or hangs is a line of its table. Page
and JSON are written after each. Where there is no GPU it says so and ends with 0; where something failed it ends with 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "tests" / "benchmarks" / "gpu.py"
DEVICE_TESTS = ("test_on_device.py", "test_nccl.py")
OF_THE_PACKAGE = ("torch", "numpy", "pydantic")
OF_THE_TESTS = ("pytest", "pytest_timeout", "hypothesis")
LIMITS_S = {"tests": 120, "sanitizer": 150, "gpt": 75, "tensors": 60, "profile": 75, "passes": 40, "weight_grads": 40}
"""Of each candidate, by section; the sections in the order in which they run."""
TITLES = {
    "tests": "Device tests",
    "sanitizer": "Device tests with TORCH_CUDA_SANITIZER=1",
    "gpt": "GPT",
    "tensors": "Many small tensors",
    "profile": "Profiles of the GPT, with a range for each bucket",
    "passes": "Passes over memory",
    "weight_grads": "Weight gradients",
}
RESULT = object()
"""Stands in a command for the path of the file that holds what was found."""
FAILED = ("failed", "raised", "hung", "not started")


@dataclass
class Candidate:
    """What is measured alone."""

    section: str
    name: str
    command: Sequence[Any]
    limit_s: float
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    left_out: str = ""
    """Why it cannot be tried here."""


# One candidate #


def run(candidate: Candidate, *, folder: Path, deadline_s: float) -> dict[str, Any]:
    """Return the row of a candidate: its status, what it has found, and how long it took.

    Args:
        deadline_s: when the whole run has to be over, on the clock of ``time.monotonic``.
    """
    row = {"section": candidate.section, "name": candidate.name, "ranks": candidate.ranks, "wall_s": 0.0, "found": None}
    if candidate.left_out:
        return {**row, "status": "left out", "text": candidate.left_out}
    start_s = time.monotonic()
    limit_s = min(candidate.limit_s, deadline_s - start_s)
    if limit_s <= 0:
        return {**row, "status": "not started", "text": "the time of the whole run was over"}
    result = folder / "candidate.json"
    result.unlink(missing_ok=True)
    environment = {**environment_of_children(), **candidate.environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [result if part is RESULT else part for part in candidate.command]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        text = f"no end after {limit_s:.0f} s" + ", the end of the whole run" * (limit_s < candidate.limit_s)
        return {**row, "status": "hung", "text": text, "wall_s": limit_s, "output": kill(process)}
    finally:
        kill(process)
    row["wall_s"] = time.monotonic() - start_s
    found = json.loads(result.read_text()) if result.is_file() else None
    return {**row, "found": found, **judged(process.returncode, output, found)}


def kill(process: subprocess.Popen[str]) -> str:
    """End a process and all that it has started; return the end of what it has said."""
    if process.poll() is not None:
        return ""
    os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=10)[0][-4_000:]
    except subprocess.TimeoutExpired:  # the driver does not let go of it
        return "it cannot be killed"


def judged(code: int, output: str, found: dict[str, Any] | None) -> dict[str, Any]:
    """Return status and text of a process that has ended."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output"]
    if code:
        tests = [line.partition(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
        error = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        text = "; ".join([lines[-1], *tests]) if tests else error
        return {"status": "failed" if tests else "raised", "text": text, "output": output[-4_000:]}
    if found is None:  # tests
        return {"status": "ok" if " passed" in lines[-1] else "left out", "text": lines[-1]}
    if "left_out" in found:
        return {"status": "left out", "text": found["left_out"], "found": None}
    if not found.get("are_alike", True):
        return {"status": "failed", "text": "the losses are not those of bare torch"}
    return {"status": "ok", "text": ""}


def environment_of_children() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


# What there is to try #


def candidates(facts: Mapping[str, Any], options: argparse.Namespace) -> Iterator[Candidate]:
    """Yield all candidates of the chosen sections, in order."""
    num_devices = len(facts["gpus"]) if options.device == "cuda" else 2
    missing = missing_modules(OF_THE_TESTS)
    no_pair = "" if num_devices > 1 else "fewer than two GPUs"
    for section in options.sections or LIMITS_S:
        limit_s = options.limit_s or LIMITS_S[section]
        if section in ("tests", "sanitizer"):
            switches = {"TORCH_CUDA_SANITIZER": "1"} if section == "sanitizer" else {}
            for name in DEVICE_TESTS:
                command = [sys.executable, "-m", "pytest", "-m", "device", "-p", "no:cacheprovider", f"tests/gpu/{name}"]
                left_out = f"not installed: {missing}" if missing else no_pair * (name == "test_nccl.py")
                yield Candidate(section, name, command, limit_s, environment=switches, left_out=left_out)
            continue
        for ranks in (1, max(num_devices, 2)) if section in ("gpt", "tensors") else (1,):
            for name in facts["sections"][section]:
                arguments = [section, name, "--device", options.device, "--ranks", str(ranks)]
                arguments += ["--repetitions", str(options.repetitions), *["--tiny"] * options.tiny]
                if section == "profile":
                    arguments += ["--trace", str(options.out / f"{''.join(filter(str.isalnum, name))}.trace.json.gz")]
                command = [sys.executable, str(BENCH), *arguments, "--json", RESULT]
                yield Candidate(section, name, command, limit_s, ranks, left_out=no_pair if ranks > 1 else "")


def missing_modules(names: Sequence[str]) -> str:
    return ", ".join(name for name in names if importlib.util.find_spec(name) is None)


def has_gpu() -> bool:
    """Whether the system has an NVIDIA GPU, whatever torch says."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def read_facts() -> dict[str, Any]:
    """Return what torch says about this machine, asked in another process: a driver may hang.

    Raises:
        RuntimeError: that process has failed.
    """
    command, environment = [sys.executable, str(BENCH), "--list"], environment_of_children()
    asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    if asked.returncode:
        raise RuntimeError(asked.stderr.strip() or f"exit code {asked.returncode}")
    return json.loads(asked.stdout.splitlines()[-1])


def commit() -> str:
    """Return the commit that is measured, or that there is none: a copy of the tree may come without its history."""
    try:
        git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return git.stdout.strip()


# The page #


def ms(seconds: Sequence[float]) -> str:
    return f"{median(seconds) * 1e3:.3f}"


def step_cells(found: Mapping[str, Any]) -> list[str]:
    seconds = found["seconds"]
    low, over, high = quantiles((a / b for a, b in zip(seconds["system"], seconds["bare"], strict=True)), n=4)
    beside = [a - b for a, b in zip(seconds["system"], seconds["compute"], strict=True)]
    columns = [ms(seconds["system"]), ms(seconds["bare"]), f"{over - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})", ms(beside)]
    return [*columns, "alike" if found["are_alike"] else "DIFFER"]


def pass_cells(found: Mapping[str, Any]) -> list[str]:
    seconds = found["seconds"]
    rate, copy = (found[name] / median(seconds[key]) for name, key in (("bytes", "work"), ("reference_bytes", "reference")))
    return [str(found["bytes_per_element"]), ms(seconds["work"]), f"{rate / 1e9:.0f}", f"{rate / copy:.0%}"]


def profile_cells(found: Mapping[str, Any]) -> list[str]:
    ranges, num_steps = found["ranges"], found["num_steps"]
    cells = [str(len({name.partition(":")[0] for name in ranges}))]
    for what in ("launch", "finish", "gather", "wait"):
        own = [one for name, one in ranges.items() if name.endswith(what)]
        cells.append(" / ".join(f"{sum(one[clock] for one in own) / num_steps:.2f}" for clock in ("host_ms", "device_ms")))
    return cells


STEPS = (["step ms", "bare torch ms", "over bare (quartiles)", "beside the arithmetic ms", "losses"], step_cells)
TABLES: dict[str, tuple[list[str], Callable[[Mapping[str, Any]], list[str]]]] = {
    "gpt": STEPS,
    "tensors": STEPS,
    "profile": (
        ["buckets", *(f"{what}, host / device ms a step" for what in ("launch", "finish", "gather", "wait"))],
        profile_cells,
    ),
    "passes": (["bytes an element", "ms", "GB/s", "of the copy"], pass_cells),
    "weight_grads": (
        ["ms", "product, then added, ms"],
        lambda found: [ms(found["seconds"][key]) for key in ("work", "reference")],
    ),
}


def page(document: Mapping[str, Any]) -> str:
    """Return all results as one page of markdown."""
    lines = [
        "# On a GPU",
        "",
        "; ".join(f"{key}: {document[key]}" for key in ("date", "device", "torch", "cuda", "nccl", "commit")),
    ]
    bad = [row for row in document["rows"] if row["status"] in FAILED]
    lines += ["", f"{len(document['rows'])} candidates in {document['wall_s']:.0f} s, {len(bad)} failed."]
    for section, title in TITLES.items():
        for ranks in sorted({row["ranks"] for row in document["rows"]}):
            rows = [row for row in document["rows"] if (row["section"], row["ranks"]) == (section, ranks)]
            models = {row["found"]["model"] for row in rows if row["found"] and "model" in row["found"]}
            head, cells = TABLES.get(section, ([], lambda _: []))
            if rows:
                lines += ["", f"## {title}{f', {ranks} ranks' if ranks > 1 else ''}", "", *models, *[""] * bool(models)]
                lines += [f"| {' | '.join(['candidate', 'result', *head])} |", "|---" * (len(head) + 2) + "|"]
            for row in rows:
                result = (row["status"] + f": {row['text']}" * bool(row["text"])).replace("|", "/")
                columns = cells(row["found"]) if row["found"] else [""] * len(head)
                lines.append(f"| {' | '.join([row['name'], result, *columns])} |")
    return "\n".join(lines) + "\n"


def write(document: dict[str, Any], out: Path) -> None:
    (out / "gpu.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    (out / "gpu.md").write_text(page(document), encoding="utf-8")


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sections", nargs="*", metavar="section", help=f"{', '.join(LIMITS_S)}; all of them when none is named")
    parser.add_argument("--only", default="", help="candidates with this in their name")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument(
        "--minutes", type=float, help="of the whole run (9.5, with several GPUs 16); nothing is started after them"
    )
    parser.add_argument("--limit-s", type=float, help="of each candidate, in place of its section's")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of gpu.md, gpu.json and the profiles")
    options = parser.parse_args(arguments)
    if unknown := set(options.sections) - set(LIMITS_S):
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    if options.device == "cpu" and not options.tiny:
        parser.error("on a CPU the models are too large; add --tiny, which measures nothing worth keeping")
    return options


def minutes_of(options: argparse.Namespace, *, num_gpus: int) -> float:
    """Return how long the whole run may take."""
    return options.minutes or (16.0 if num_gpus > 1 else 9.5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    options = read_options(arguments)
    start_s = time.monotonic()
    facts, problem = {"gpus": []}, f"{sys.executable} lacks {missing_modules(OF_THE_PACKAGE)}"
    if not missing_modules(OF_THE_PACKAGE):
        try:
            facts = read_facts()
            problem = "" if facts["gpus"] or options.device == "cpu" else f"torch {facts['torch']} finds no CUDA device here"
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            problem = f"torch and the package do not load: {error}"
    if problem:
        print(
            f"gpu: {problem}, so nothing was measured and no figure is made up. It takes an NVIDIA GPU, a CUDA build of torch "
            "and what the package needs (PYTHON or VENV names the interpreter); `--device cpu --tiny` runs the same code small."
        )
        return int(has_gpu() or options.device == "cpu")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": ", ".join(facts["gpus"]) if options.device == "cuda" else "CPU: these times mean nothing",
        **{key: facts[key] for key in ("torch", "cuda", "nccl")},
        "commit": commit(),
        "rows": [],
    }
    minutes = minutes_of(options, num_gpus=len(facts["gpus"]))
    for candidate in candidates(facts, options):
        if options.only in candidate.name:
            row = run(candidate, folder=options.out, deadline_s=start_s + minutes * 60)
            print(
                f"{row['section']} x{row['ranks']} {row['name']}: {row['status']} {row['text']} ({row['wall_s']:.0f} s)",
                flush=True,
            )
            document["rows"].append(row)
            document["wall_s"] = time.monotonic() - start_s
            write(document, options.out)
    (options.out / "candidate.json").unlink(missing_ok=True)
    print(f"wrote {options.out / 'gpu.md'} and gpu.json")
    return int(any(row["status"] in FAILED for row in document["rows"]))


if __name__ == "__main__":
    sys.exit(main())
