"""Random steps: the plan is a function of the seed, and the judge takes reports as they come."""

import itertools

import pytest
from runs import error, step, weights

from megabucket.chaos.cell import Combo, Mode
from megabucket.chaos.soak import SoakJudge, run_random_steps
from megabucket.chaos.soak_plan import SoakPlan
from megabucket.chaos.verdict import VerdictName

COMBO = Combo(Mode.ALL_REDUCE, True, 2)


def test_the_same_seed_gives_the_same_faults_and_another_seed_others():
    plans = [list(SoakPlan(200, seed, COMBO).cells()) for seed in (1, 1, 2)]

    assert plans[0] == plans[1]
    assert plans[0] != plans[2]


def test_about_half_of_the_steps_have_a_fault_and_every_rank_is_at_fault_at_times():
    cells = list(SoakPlan(2_000, 1, COMBO).cells())
    faulty = [cell for cell in cells if cell.kind != "none"]

    assert 900 < len(faulty) < 1_100  # 1,000 and five standard deviations (22 each)
    assert {cell.culprit for cell in faulty} == {0, 1}
    assert len({(cell.kind, cell.place) for cell in faulty}) > 15


def test_a_plan_survives_the_way_to_a_supervisor():
    plan = SoakPlan(5, 6, COMBO)

    assert SoakPlan.from_dict(plan.to_dict()) == plan


def judge_of(*events, num_steps=1):
    plan = SoakPlan(num_steps, next(seed for seed in itertools.count() if starts_healthy(seed)), COMBO)
    judge = SoakJudge(plan)
    for event in events:
        judge.receive(event)
    return judge.result


def starts_healthy(seed):
    return next(SoakPlan(1, seed, COMBO).cells()).kind == "none"


def test_a_step_is_judged_when_all_ranks_have_reported_it():
    partly = judge_of(step(0, 0), weights(0, 0), step(1, 0))
    wholly = judge_of(step(0, 0), weights(0, 0), step(1, 0), weights(1, 0))

    assert (partly.num_judged, partly.has_failed) == (0, True)  # a step is missing
    assert (wholly.num_judged, wholly.has_failed) == (1, False)
    assert wholly.total(VerdictName.RIGHT) == 1


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        (step(1, 0, wrong_grads="w[0] is 1, should be 2"), VerdictName.SILENT),
        (step(1, 0, raised=error()), VerdictName.WRONG),
    ],
)
def test_a_step_that_is_not_as_it_must_be_is_counted_and_described(bad, name):
    result = judge_of(step(0, 0), weights(0, 0), bad, weights(1, 0))

    assert result.total(name) == 1
    assert result.has_failed
    assert result.problems[0].startswith("step 0, none/step")


@pytest.mark.dist
def test_two_hundred_random_steps_on_real_ranks_are_all_right_or_named():
    seed = 20_251  # any would do; a failure must be the same again
    plans = [SoakPlan(100, seed, COMBO), SoakPlan(100, seed, Combo(Mode.REDUCE_SCATTER, True, 3))]

    results = list(run_random_steps(plans))

    assert [result.problems for result in results] == [[], []]
    assert [result.num_judged for result in results] == [100, 100]
