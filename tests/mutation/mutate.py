"""``make mutation``: change the library in small ways, one at a time, and count the changes that the tests notice.

Each area is a few modules and the fast tests that answer for them. mutmut works in a copy under ``build/mutation``, so neither
the working tree nor an installed package is mixed up with what is mutated. Needs ``os.fork``. mutmut leaves out what is no
function (tables, classes' own lines) and functions with a decorator other than ``staticmethod`` and ``classmethod``: properties
and context managers.

    python tests/mutation/mutate.py                    all areas, about half an hour, and more than another for "step"
    python tests/mutation/mutate.py layout config      some of them
    python tests/mutation/mutate.py --survivors        also print the difference each survivor makes
    python tests/mutation/mutate.py --again            print the results of the last run
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "mutation"
TARGET = 0.95
"""Least share of mutants that tests must notice, in each area."""

KILLED = (1, 3)  # pytest's exit codes: a test failed, or pytest itself did
SURVIVED = 0
NO_TEST = (5, 33)
TIMEOUT = (-24, 24, 36, 152, 255)

_STEP_TESTS = (
    "agreed_stop",
    "backward_without_params",
    "call_in_a_step",
    "calls",
    "calls_in_backward",
    "delayed_gradients",
    "form_changed",
    "giving_up",
    "gradient_sync",
    "gradient_sync_machine",
    "graphs_of_gradients",
    "guarded_collectives",
    "leaving_a_step",
    "other_owners",
    "overflow",
    "parts_without_forward",
    "plain_optimizer_guard",
    "ranks_differ",
    "read_too_early",
    "refusals_of_a_step",
    "same_batch_again",
    "staged_grads",
    "step_block",
    "step_protocol",
    "table_of_states",
    "unfrozen_gradient",
    "withheld_grads",
    "withheld_shard_grads",
)
"""Loopback tests of whole steps."""
_STEP_TESTS_OF_CHAINS = (
    "a_common_norm_above_the_threshold_updates_no_part",
    "a_nan_that_is_no_error_skips_the_step_of_both_parts",
    "a_part_that_fails_on_one_rank_ends_the_step_of_both_parts_on_all",
    "parts_without_a_backward_on_any_rank_are_refused_and_the_next_step_is_right",
)


@dataclass(frozen=True, slots=True)
class Area:
    """Modules that are mutated together, and the tests that must notice."""

    modules: tuple[str, ...]
    """Patterns of paths below the root of the project."""
    tests: tuple[str, ...]
    """What pytest is given."""


AREAS = {
    "layout": Area(
        ("megabucket/layout/*.py", "megabucket/testing/invariants.py"),
        (
            "tests/layout",
            # Theorems on large layouts and whole processes are too slow to run once per mutant.
            "--ignore=tests/layout/test_layout_theorems.py",
            "--ignore=tests/layout/test_layout_everywhere.py",
            "--ignore=tests/layout/test_layout_oracle.py",
            "tests/planning/test_describe.py",
            "tests/testing/test_testing_invariants.py",
        ),
    ),
    "bucket groups and phases": Area(
        ("megabucket/buffer/bucket_group.py", "megabucket/buffer/phases.py"),
        ("tests/buffer",),
    ),
    "config": Area(
        ("megabucket/config/*.py", "megabucket/cli/explain_text.py"),
        ("tests/config", "tests/ddp/test_bad_input.py::TestArgumentsOfTorch"),
    ),
    "fence": Area(
        tuple(f"megabucket/ddp/{name}.py" for name in ("fence", "report", "calls")),
        tuple(f"tests/ddp/test_{name}.py" for name in ("fence", "verdict", "step_report", "step_counters", "hyperparameters")),
    ),
    "step": Area(
        tuple(f"megabucket/ddp/{name}.py" for name in ("step", "schedule", "backward")),
        (
            *(f"tests/ddp/test_{name}.py" for name in _STEP_TESTS),
            # As long as all others of its file, and another seven seconds per mutant.
            "--deselect=tests/ddp/test_same_batch_again.py::test_batches_of_different_steps_are_never_averaged",
            "tests/optim/test_no_step_without_a_sync.py",
            # Parts that update together, a scaler that skips, and values that only a device knows.
            *(f"tests/optim/test_chained.py::test_{name}" for name in _STEP_TESTS_OF_CHAINS),
            "tests/optim/test_grad_scaler.py::test_a_skipped_step_is_over_and_its_result_names_the_parameters",
            "tests/device_fake/test_findings.py",
        ),
    ),
}


def main() -> int:
    """Run the areas named on the command line; return 1 where one of them misses the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", metavar="area", help=f"any of: {', '.join(AREAS)}")
    parser.add_argument("--survivors", action="store_true", help="print the difference each survivor makes")
    parser.add_argument("--again", action="store_true", help="print the results of the last run, and run nothing")
    parser.add_argument("--children", type=int, default=2, help="mutants at a time")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.areas if name not in AREAS]:
        parser.error(f"there is no area {', '.join(unknown)}; areas are {', '.join(AREAS)}")

    reached = []
    for name in arguments.areas or AREAS:
        if not arguments.again:
            run(name, children=arguments.children)
        reached.append(report(name, shows_survivors=arguments.survivors))
    return 0 if all(reached) else 1


def run(name: str, *, children: int) -> None:
    """Copy the project, write mutmut's settings for one area beside it, and let mutmut run."""
    place = place_of(name)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for folder in ("megabucket", "tests", "docs", "configs", "examples"):
        shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns("__pycache__"))
    settings = {
        "source_paths": ["megabucket"],
        "only_mutate": list(AREAS[name].modules),
        "also_copy": ["docs", "configs", "examples"],
        "pytest_add_cli_args": ["--hypothesis-profile=mutation"],
        "pytest_add_cli_args_test_selection": list(AREAS[name].tests),
        "timeout_multiplier": 10.0,
        "track_dependencies": False,
        "use_git_change_detection": False,
    }
    # JSON's strings, lists, numbers and booleans are TOML's.
    lines = ["[tool.mutmut]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    project = (ROOT / "pyproject.toml").read_text()
    (place / "pyproject.toml").write_text("\n".join([project, *lines, ""]))

    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [mutmut(), "run", "--max-children", str(children)]
    subprocess.run(command, cwd=place, env=environment, check=True)


def report(name: str, *, shows_survivors: bool) -> bool:
    """Print what became of the mutants of one area, by module; return whether the target was reached."""
    place = place_of(name)
    total: Counter[str] = Counter()
    survivors = []
    print(f"\n## {name}\n\n| module | mutants | killed | timeout | survived | no test | other |\n|---|---|---|---|---|---|---|")
    for path in sorted((place / "mutants").rglob("*.meta")):
        by_mutant = json.loads(path.read_text())["exit_code_by_key"]
        if not by_mutant:
            continue
        counts = Counter(map(outcome, by_mutant.values()))
        total += counts
        survivors += [mutant for mutant, code in by_mutant.items() if outcome(code) not in ("killed", "timeout")]
        print(row(str(path.relative_to(place / "mutants")).removesuffix(".meta"), counts))
    noticed = (total["killed"] + total["timeout"]) / max(total.total(), 1)
    print(row(f"all: {noticed:.1%} killed", total))
    for mutant in survivors:
        print(f"\n{mutant}")
        if shows_survivors:
            shown = subprocess.run([mutmut(), "show", mutant], cwd=place, capture_output=True, text=True, check=True).stdout
            changed = [line for line in shown.splitlines()[4:] if line.startswith(("+", "-"))]
            print("\n".join(changed))
    return noticed >= TARGET


def outcome(exit_code: int | None) -> str:
    """Return what pytest's exit code under a mutant means."""
    if exit_code in KILLED:
        return "killed"
    if exit_code in TIMEOUT:
        return "timeout"
    if exit_code == SURVIVED:
        return "survived"
    return "no test" if exit_code in NO_TEST else "other"


def row(title: str, counts: Counter[str]) -> str:
    """Return one line of the table."""
    figures = [counts.total(), *(counts[kind] for kind in ("killed", "timeout", "survived", "no test", "other"))]
    return f"| {title} | {' | '.join(map(str, figures))} |"


def place_of(name: str) -> Path:
    """Return where an area is mutated."""
    return WORK / name.replace(" ", "-")


def mutmut() -> str:
    """Return the command beside this interpreter."""
    return str(Path(sys.executable).with_name("mutmut"))


if __name__ == "__main__":
    sys.exit(main())
