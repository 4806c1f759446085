"""Faults on real ranks: by day a cell of each kind over the loopback world, and of each kind of processes over gloo."""

import pytest

from faults.cells import EVERY, FORMS, OWNERS, OWNERS_IN_FORMS, OWNERS_IN_GROUPS, STEPS_AFTER, Cell, Recovery
from faults.judge import Name, judge
from faults.kinds import KINDS, fault_of, select
from faults.loopback import run_in_threads
from faults.player import Play
from faults.processes import run_many

IN_THREADS = [cell for cell in select(is_quick=True) if not KINDS[cell.kind].needs_processes]  # one of each place
BY_DAY = {cell.kind: cell for cell in reversed(IN_THREADS)}.values()  # the first of each kind
IN_PROCESSES = (
    # A cell for each way in which ranks are lost or wait. The other kinds mean the same in both runners.
    "none/step/reduce-scatter/overlap/3",
    "exception/backward-1/reduce-scatter/overlap/2",
    "SIGKILL/optimizer/reduce-scatter/overlap/2",
    "SIGSTOP/backward-1/all-reduce/overlap/2",
    "interrupt-in-wait/SIGINT-default/reduce-scatter/overlap/3",
    "save-killed/data/all-reduce/overlap/2",
    "one-wraps/wrap/all-reduce/overlap/2",
    "two-wrappers/step/reduce-scatter/overlap/2",
    "stray-collective/between/all-reduce/overlap/2",
    "exception/between/all-reduce/overlap/4/copies",
    "one-call/check_replicas/reduce-scatter/no-overlap/4/replicas",
    "foreign-wrapper/inside-ddp/all-reduce/overlap/2",
    "program-ends/forward-block/reduce-scatter/overlap/2",
    "no-descriptors/0/all-reduce/overlap/2",
    "none/step/reduce-scatter/no-overlap/4/replicas/owners",
    "owner-killed/owner/reduce-scatter/overlap/4/groups/owners",
    "owner-stopped/to-owners/reduce-scatter/overlap/3/owners",
)
IN_EACH_FORM = ("none/step", "exception/between", "loss-fails/loss")
WITH_OWNERS = ("none/step", "dropped-step/step", "owner-fails/owner")


def _cells():
    for cell in IN_THREADS:
        yield pytest.param(cell, marks=() if cell in BY_DAY else pytest.mark.nightly, id=cell.name)


@pytest.mark.parametrize("cell", list(_cells()))
def test_a_fault_of_living_ranks_ends_as_the_table_says(cell):
    verdicts = judge(run_in_threads(Play([cell])), fault_of)

    assert [(cell.name, verdict) for cell, verdict in verdicts if not verdict.name.is_good] == []


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_a_fault_of_living_ranks_ends_as_the_table_says_with_sums_in_rank_order(kind):
    cells = [cell for cell in select() if cell.kind == kind.name and not KINDS[cell.kind].needs_processes]

    plays = [Play([cell], {"reduction_order": "rank"}) for cell in cells]
    verdicts = [verdict for play in plays for verdict in judge(run_in_threads(play), fault_of)]

    assert [(cell.name, verdict) for cell, verdict in verdicts if not verdict.name.is_good] == []


@pytest.mark.parametrize("combo", FORMS, ids=str)
@pytest.mark.parametrize("place", IN_EACH_FORM)
def test_a_fault_in_each_form_of_a_program_ends_as_the_table_says(combo, place):
    cell = Cell(*place.split("/"), combo)
    assert cell in select()

    verdicts = judge(run_in_threads(Play([cell])), fault_of)

    assert [(cell.name, verdict) for cell, verdict in verdicts if not verdict.name.is_good] == []


@pytest.mark.parametrize("combo", [*OWNERS, *OWNERS_IN_GROUPS, *OWNERS_IN_FORMS], ids=str)
@pytest.mark.parametrize("place", WITH_OWNERS)
def test_a_fault_where_weights_have_owners_ends_as_the_table_says(combo, place):
    cell = Cell(*place.split("/"), combo)
    assert cell in select()

    verdicts = judge(run_in_threads(Play([cell])), fault_of)

    assert [(cell.name, verdict) for cell, verdict in verdicts if not verdict.name.is_good] == []


@pytest.mark.slow
@pytest.mark.timeout(900)  # each cell starts processes, which takes long beside other tests
def test_a_fault_of_processes_ends_as_the_table_says():
    cells = [cell for name in IN_PROCESSES for cell in select(name)]
    assert len(cells) == len(IN_PROCESSES)

    runs = run_many([Play([cell]) for cell in cells], time_limit_s=40.0)
    verdicts = [verdict for run in runs for verdict in judge(run, fault_of)]

    assert [(cell.name, verdict) for cell, verdict in verdicts if not verdict.name.is_good] == []
    assert {verdict.name for _, verdict in verdicts} == {Name.RIGHT, Name.NAMED, Name.BROKEN}


def test_five_more_steps_are_compared_after_the_last_error_of_a_cell():
    expected = [one for cell in select() for one in fault_of(cell).expect.alternatives()]
    goes_on = [one for one in expected if one.recovery not in (Recovery.OVER, Recovery.STOP) and not one.at_wrap]
    latest = max(one.steps_late(is_culprit=is_culprit) for one in goes_on for is_culprit in (True, False))

    assert STEPS_AFTER - latest >= 5


def test_names_of_kinds_and_cells_are_theirs_alone():
    cells = select()

    assert all(name == kind.name for name, kind in KINDS.items())
    assert len({cell.name for cell in cells}) == len(cells)
    assert {cell.combo for cell in cells if cell.kind == "none"} >= set(EVERY)
