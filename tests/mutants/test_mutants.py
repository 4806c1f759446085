"""The soak finds what it is there to find: every mistake in the protocol shows, with its verdict, its class and its text."""

import re

import pytest
from protocol_mutants import MUTANTS

SCENARIOS = {repr(mutant.scenario): mutant.scenario for mutant in MUTANTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_of_the_protocol_is_killed_by_verdict_class_and_text(mutant, monkeypatch):
    mutant.apply(monkeypatch)

    found = mutant.scenario.run()

    assert found is not None, "survived"
    _, judgement = found
    assert (judgement.verdict, judgement.error) == (mutant.verdict, mutant.error), judgement
    assert re.search(mutant.text, f"{judgement.reason} {judgement.text}"), judgement


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=lambda scenario: scenario.kind)
def test_the_library_as_it_is_passes_the_same_scenarios(scenario):
    assert scenario.run() is None
