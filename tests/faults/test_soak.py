"""A short soak, and the parts of the soak itself. The long one is ``python -m faults soak --steps 50000``."""

import pytest

from faults.judge import Name
from faults.kinds import KINDS
from faults.loopback import run_in_threads
from faults.processes import run_many
from faults.soak import SoakResult, candidates, count, draw_world, run_soak
from megabucket.ddp.step import GradSync

NUM_STEPS = 300


@pytest.mark.slow
def test_in_every_step_the_numbers_are_right_or_all_ranks_raise_the_expected_error():
    result = run_soak(NUM_STEPS, 0, max_failures=3, report=print)  # pytest shows it when the test fails

    assert result.failures == []
    assert result.num_steps >= NUM_STEPS
    assert result.total(Name.RIGHT) > 50
    assert result.total(Name.NAMED) > 50


@pytest.mark.nightly
def test_ranks_that_are_processes_come_to_the_same():
    (run,) = run_many([draw_world(3, num_episodes=25)], time_limit_s=120.0)
    in_processes, in_threads = SoakResult(3), SoakResult(3)

    count(run, in_processes, describe="processes")
    count(run_in_threads(draw_world(3, num_episodes=25)), in_threads, describe="threads")

    assert in_processes.failures == []
    assert in_processes.counts == in_threads.counts


def test_every_kind_that_soaks_is_drawn_sooner_or_later():
    drawn = {cell.kind for seed in range(60) for cell in draw_world(seed).cells}
    wanted = {cell.kind for seed in range(60) for cell in candidates(draw_world(seed).combo)}

    assert drawn == wanted
    assert wanted < set(KINDS)


def test_a_soak_finds_a_gradient_that_is_lost(monkeypatch):
    def forgets_the_sum(self, group, position):
        group.slots[position].param.grad = None  # a late gradient that nobody hears of

    monkeypatch.setattr(GradSync, "_note_late", forgets_the_sum)

    result = run_soak(20_000, 3, max_failures=2)

    assert len(result.failures) == 2
    assert any("silent" in failure for failure in result.failures)
    assert result.total(Name.SILENT) >= 1
