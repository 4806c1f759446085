"""``megabucket chaos`` on real processes: the quick matrix, the exit codes, and that the harness does find faults."""

import json

import pytest
from typer.testing import CliRunner

from megabucket.chaos.cell import Cell, Combo, Mode, SystemName
from megabucket.chaos.kinds import quick_matrix
from megabucket.chaos.outcome import read_outcomes
from megabucket.chaos.run import num_failing, prepared, run_matrix
from megabucket.chaos.verdict import VerdictName
from megabucket.cli.main import app
from megabucket.errors import ConfigError

TWO_RANKS = Combo(Mode.ALL_REDUCE, True, 2)


def chaos(*arguments):
    return CliRunner().invoke(app, ["chaos", *map(str, arguments)])


@pytest.mark.dist
@pytest.mark.slow
def test_every_cell_of_the_quick_matrix_is_right_or_named():
    cells = prepared(quick_matrix(), system=SystemName.MEGABUCKET, seed=1)

    outcomes = list(run_matrix(cells, num_jobs=2))

    bad = [f"{one.verdict.name.value} {one.cell.name}: {one.verdict.reason}" for one in outcomes if num_failing([one])]
    assert bad == []
    assert len(outcomes) == len(cells)


@pytest.mark.dist
def test_the_harness_finds_what_is_known_to_be_silent_in_torch_ddp():
    known = {
        ("none", "step"): VerdictName.RIGHT,
        ("hook-order", "step"): VerdictName.RIGHT,
        ("other-model", "order"): VerdictName.SILENT,
        ("unused", "one-error"): VerdictName.SILENT,
        ("skipped-step", "forward-only"): VerdictName.SILENT,
        ("nan", "bucket-0-error"): VerdictName.SPREAD,
        ("abort-step", "first"): VerdictName.SKIPPED,
    }
    cells = [Cell(kind, place, TWO_RANKS, 1, SystemName.TORCH_DDP) for kind, place in known]

    outcomes = {(one.cell.kind, one.cell.place): one.verdict.name for one in run_matrix(cells, num_jobs=2)}

    assert outcomes == known


@pytest.mark.dist
def test_a_run_writes_a_line_per_cell_a_table_and_a_page_and_the_page_shows_another_run_beside(tmp_path):
    lines, page = tmp_path / "lines.jsonl", tmp_path / "page.html"

    first = chaos("--full", "--kinds", "none", "--ranks", 2, "--seed", 4, "--out", lines)
    second = chaos("--full", "--kinds", "none", "--ranks", 2, "--system", "torch-ddp", "--beside", lines, "--page", page)

    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    outcomes = read_outcomes(lines)
    assert {one.verdict.name for one in outcomes} == {VerdictName.RIGHT}
    assert len(outcomes) == 4  # two modes, with and without overlap
    assert "seed 4" in first.stderr
    answers = [json.loads(line) for line in second.stdout.splitlines()]
    assert sorted(answer["verdict"] for answer in answers) == ["RIGHT", "RIGHT", "SKIPPED", "SKIPPED"]
    assert all(system in page.read_text() for system in ("megabucket", "torch-ddp"))


def test_a_glob_that_matches_nothing_is_wrong_usage():
    result = chaos("--kinds", "nothing")

    assert result.exit_code == 2
    assert "no cell matches" in result.stderr


def test_results_that_are_none_are_refused(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"cell": 1}\n')

    with pytest.raises(ConfigError, match="does not hold results of megabucket chaos: KeyError"):
        read_outcomes(file)


def test_only_what_megabucket_must_not_do_counts_as_failing():
    from megabucket.chaos.outcome import CellOutcome
    from megabucket.chaos.verdict import Verdict

    ours = [CellOutcome(Cell("none", "step", TWO_RANKS), Verdict(name)) for name in VerdictName]
    theirs = [CellOutcome(Cell("none", "step", TWO_RANKS, 0, SystemName.TORCH_DDP), Verdict(name)) for name in VerdictName]

    assert num_failing(ours) == 5  # WRONG, SILENT, HUNG, CRASHED, BROKEN
    assert num_failing(theirs) == 0
