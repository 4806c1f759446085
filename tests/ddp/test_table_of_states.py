"""The table of a step's states stands in three places: the docstring of ``step.py``, the code, and docs/concepts."""

import re
from pathlib import Path

import pytest

from megabucket.ddp import step
from megabucket.ddp.step import _TRANSITIONS, StepState

DOCS = Path(__file__).parents[2] / "docs" / "concepts" / "step-protocol.md"
NAMES = "|".join(StepState.__members__)
ROW = re.compile(rf"^ *((?:{NAMES}|any)(?:, (?:{NAMES}))*) *-> ((?:{NAMES})(?:, (?:{NAMES}))*)(?= |$)", re.MULTILINE)


def transitions_in(text):
    """Return the transitions of a table, as pairs of names; ``any -> BROKEN`` is that of every state."""
    found = set()
    for befores, afters in ROW.findall(text):
        sources = list(StepState.__members__) if befores == "any" else befores.split(", ")
        found |= {(before, after) for before in sources for after in afters.split(", ")}
    return found - {("BROKEN", "BROKEN")}


def transitions_of_the_code():
    """Return those of ``enter``, and those to BROKEN, which ``_break`` makes from every state."""
    allowed = {(before.name, after.name) for before, afters in _TRANSITIONS.items() for after in afters}
    return allowed | {(name, "BROKEN") for name in StepState.__members__ if name != "BROKEN"}


def test_the_docstring_has_the_transitions_of_the_code():
    assert transitions_in(step.__doc__) == transitions_of_the_code()


def test_the_docs_have_the_transitions_of_the_code():
    (table,) = re.findall(r"## The states of a step\n\n```text\n(.*?)```", DOCS.read_text(), re.DOTALL)

    assert transitions_in(table) == transitions_of_the_code()


@pytest.mark.parametrize(
    ("changed", "lost"),
    [("OPEN -> LAUNCHING", ("OPEN", "LAUNCHING")), ("IDLE, OPEN -> CALL", ("OPEN", "CALL"))],
)
def test_a_row_is_read_for_all_of_its_states(changed, lost):
    assert lost in transitions_in(changed)
    assert transitions_in(changed.replace("OPEN", "IDLE")).isdisjoint({lost})
