"""No two streams ever touch the same memory without an event between them, whatever streams a program uses."""

import logging

import pytest
from fake_accelerator import RaceError, fake_device
from fake_nccl import FakeNccl, fake_nccl, other_ranks
from hypothesis import Phase, given, settings
from schedules import EXAMPLES, run, schedules
from stream_mutants import MUTANTS


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    logging.getLogger("megabucket").setLevel(logging.ERROR)
    yield
    logging.getLogger("megabucket").setLevel(logging.NOTSET)


def trained(schedule):
    # A group for each: the wrapper of a program that has failed is another number of beats on it.
    with fake_nccl(size=2), other_ranks(), pytest.MonkeyPatch.context() as patch, fake_device(patch) as device:
        FakeNccl.device = device
        try:
            return run(device, schedule)
        finally:
            if device.races:
                raise RaceError(device.races[0])


# All 2,000 of a nightly run take minutes.
IS_NIGHTLY = settings.default.max_examples >= 2_000


@pytest.mark.parametrize("schedule", EXAMPLES.values(), ids=EXAMPLES)
def test_no_example_has_a_race(schedule):
    trained(schedule)


@pytest.mark.timeout(3_600)
@settings(max_examples=settings.default.max_examples if IS_NIGHTLY else 30)
@given(schedule=schedules())
def test_no_program_has_a_race(schedule):
    trained(schedule)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_an_order_that_is_left_out_is_a_race_of_some_program(mutant, monkeypatch):
    MUTANTS[mutant](monkeypatch)

    @settings(max_examples=400, phases=[Phase.generate], derandomize=True, database=None)
    @given(schedule=schedules())
    def search(schedule):
        trained(schedule)

    def search_everywhere():
        for example in EXAMPLES.values():
            trained(example)
        search()

    with pytest.raises(RaceError):
        search_everywhere()
