"""The matrix: enough cells, systematic combinations, and expectations that the library could meet."""

import inspect
from pathlib import Path

import pytest

from megabucket import errors
from megabucket.chaos.cell import Cell, Combo, Mode
from megabucket.chaos.expectation import Outcome
from megabucket.chaos.fault import Fault
from megabucket.chaos.kind import EVERY, PAIRS
from megabucket.chaos.kinds import KINDS, full_matrix, kind_named, quick_matrix, select

FULL = full_matrix()


def fault_of(cell) -> Fault:
    return kind_named(cell.kind).fault(cell)


def test_the_full_matrix_has_more_than_400_cells_and_each_only_once():
    assert len(FULL) >= 400
    assert len({cell.name for cell in FULL}) == len(FULL)


def test_every_combination_is_in_the_matrix():
    assert {cell.combo for cell in FULL} == set(EVERY)
    assert len(EVERY) == 12


def test_pairs_bring_each_mode_together_with_each_number_of_ranks_and_with_each_overlap():
    assert {(combo.mode, combo.num_ranks) for combo in PAIRS} == {(mode, ranks) for mode in Mode for ranks in (2, 3, 4)}
    assert {(combo.mode, combo.overlaps) for combo in PAIRS} == {(mode, overlap) for mode in Mode for overlap in (True, False)}


def test_the_quick_matrix_is_part_of_kinds_and_small():
    known = {(kind.name, place) for kind in KINDS for place in kind.places}

    assert all((cell.kind, cell.place) in known for cell in quick_matrix())
    assert len(quick_matrix()) <= 40


def test_the_quick_matrix_meets_every_error_class_of_the_full_one():
    def classes(cells):
        # Where one of several classes may come, one of them is enough.
        return {error for cell in cells for error in fault_of(cell).expect().errors[:1]}

    assert classes(FULL) <= classes(quick_matrix())


def test_the_classes_that_can_be_made_on_real_ranks_are_all_expected_somewhere():
    expected = {error for cell in FULL for error in fault_of(cell).expect().errors}
    of_a_step = (
        errors.RanksDisagreeError,
        errors.PhaseError,
        errors.UnusedParameterError,
        errors.NonFiniteGradientError,
        errors.ModelChangedError,
        errors.PeerFailedError,
    )
    of_steps = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, of_a_step)}
    # Bases that are never raised themselves.
    of_steps -= {"RanksDisagreeError", "ModelChangedError"}
    expected |= {fault_of(cell).expect().child_error for cell in FULL}

    assert of_steps - expected == set()
    assert {"PeerLostError", "GroupDestroyedError", "AlreadyWrappedError", "UnsupportedParameterError"} <= expected


@pytest.mark.parametrize(
    "cell", {(cell.kind, cell.place, cell.combo.mode): cell for cell in FULL}.values(), ids=lambda cell: cell.name
)
def test_what_is_expected_exists_in_the_library(cell):
    expected = fault_of(cell).expect()

    assert (expected.outcome is Outcome.NAMED) == bool(expected.errors)
    for name in expected.errors:
        fields = set(inspect.signature(getattr(errors, name).__init__).parameters)
        if name == expected.errors[0]:
            assert set(expected.fields) <= fields


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_says_what_must_happen(kind):
    assert kind.says.endswith(".")
    assert kind.places
    assert set(kind.soak_places) <= set(kind.places)


@pytest.mark.parametrize("cell", FULL[::7], ids=lambda cell: cell.name)
def test_recipes_of_all_ranks_are_the_same_wherever_they_are_asked_for(cell):
    first, second = fault_of(cell), fault_of(cell)

    for rank in range(cell.combo.num_ranks):
        assert first.healthy(rank, 4) == second.healthy(rank, 4)
        assert first.faulty(rank, 4) == second.faulty(rank, 4)
    assert first.expect() == second.expect()


def test_a_cell_survives_the_way_to_a_supervisor():
    cell = Cell("nan", "bucket-0-error", Combo(Mode.REDUCE_SCATTER, False, 3), seed=7, at_rank=2)

    assert Cell.from_dict(cell.to_dict()) == cell


@pytest.mark.parametrize(
    ("kinds", "ranks", "expected"),
    [
        ("nan", (), 36),  # 3 places, 12 combinations
        ("nan/bucket-0-*", (), 12),
        ("nan/bucket-0-*", (3,), 4),
        ("nan/*/all-reduce/overlap/2", (), 3),
        ("nothing", (), 0),
    ],
)
def test_cells_are_chosen_by_a_glob_and_by_ranks(kinds, ranks, expected):
    assert len(select(FULL, kinds=kinds, ranks=frozenset(ranks))) == expected


def test_the_documentation_lists_every_kind_with_its_places_cells_and_promise():
    rows = [
        f"| `{kind.name}` | {', '.join(f'`{place}`' for place in kind.places)} | {len(kind.cells())} | {kind.says} |"
        for kind in KINDS
    ]
    page = (Path(__file__).parents[2] / "docs" / "chaos.md").read_text()

    assert [row for row in rows if row not in page] == []
