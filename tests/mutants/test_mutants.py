"""Each rule of the step protocol is needed: without it some step goes wrong, and shows."""

import logging
import re
from pathlib import Path

import pytest
from protocol_mutants import MUTANTS
from scenarios import SCENARIOS

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def _no_warnings_about_small_worlds(caplog):
    caplog.set_level(logging.ERROR, logger="megabucket")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_of_the_protocol_is_killed_by_verdict_class_and_text(mutant, monkeypatch):
    mutant.apply(monkeypatch)

    found = mutant.scenario.run()

    assert found is not None, "survived"
    assert found.verdict is mutant.verdict, found
    assert re.fullmatch(mutant.error, found.error), found
    assert re.search(mutant.text, found.text), found


def test_the_docs_count_the_mutants():
    page = " ".join((Path(__file__).parents[2] / "docs" / "faults.md").read_text().split())
    silent, hung = (sum(mutant.verdict.name == verdict for mutant in MUTANTS) for verdict in ("SILENT", "HUNG"))

    assert (
        f"the {len(MUTANTS)} mutants with scenario and verdict: of them {silent} would have been silent, {hung} would hang"
        in page
    )


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=lambda scenario: scenario.name)
def test_the_core_as_it_is_passes_the_same_scenarios(scenario):
    assert scenario.run() is None


def test_every_scenario_kills_a_mutant():
    idle = set(SCENARIOS) - {mutant.scenario.name for mutant in MUTANTS}

    assert idle == set()
