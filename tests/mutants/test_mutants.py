"""The soak finds what it is there to find: every mistake in the protocol shows, with its verdict, its class and its text."""

import re
from pathlib import Path

import pytest
from protocol_mutants import MUTANTS

pytestmark = pytest.mark.nightly

SCENARIOS = {repr(mutant.scenario): mutant.scenario for mutant in MUTANTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_of_the_protocol_is_killed_by_verdict_class_and_text(mutant, monkeypatch):
    mutant.apply(monkeypatch)

    found = mutant.scenario.run()

    assert found is not None, "survived"
    _, judgement = found
    assert (judgement.verdict, judgement.error) == (mutant.verdict, mutant.error), judgement
    assert re.search(mutant.text, f"{judgement.reason} {judgement.text}"), judgement


def test_every_mutant_is_in_the_table_of_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "soak-and-mutants.md").read_text()

    rows = [f"| {mutant.name} | {mutant.scenario.kind}" for mutant in MUTANTS]

    assert [row for row in rows if row not in page] == []


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=lambda scenario: scenario.kind)
def test_the_library_as_it_is_passes_the_same_scenarios(scenario):
    assert scenario.run() is None
