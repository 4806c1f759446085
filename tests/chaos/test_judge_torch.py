"""The judge of torch DDP's cells: honest categories where no named error is promised."""

import pytest
from runs import error, healthy_events, replaced, run_of, step, weights, with_error

from megabucket.chaos.cell import Cell, Combo, Mode, SystemName
from megabucket.chaos.expectation import RIGHT, Expectation, Outcome, named
from megabucket.chaos.judge_torch import judge_torch
from megabucket.chaos.verdict import VerdictName

CELL = Cell("none", "step", Combo(Mode.ALL_REDUCE, True, 2), system=SystemName.TORCH_DDP)
SOME_ERROR = named("UnusedParameterError")


def verdict_on(events, expected=SOME_ERROR, **details):
    return judge_torch(run_of(events, cell=CELL, **details), expected)


def test_no_error_and_right_values_are_right_whatever_was_expected():
    assert verdict_on(healthy_events()).name is VerdictName.RIGHT


def test_an_error_of_any_class_on_all_ranks_in_the_step_is_an_error_and_training_may_go_on():
    verdict = verdict_on(with_error(error(kind="RuntimeError")))

    assert (verdict.name, verdict.error, verdict.goes_on) == (VerdictName.ERROR, "RuntimeError", True)


def test_training_that_never_goes_on_is_said_so():
    raised = error(kind="RuntimeError")
    events = [event for event in with_error(raised) if event.get("attempt", 0) < 3]
    events += [step(rank, 3, raised=raised) for rank in range(2)]

    verdict = verdict_on(events)

    assert (verdict.name, verdict.goes_on) == (VerdictName.ERROR, False)


@pytest.mark.parametrize("events", [with_error(on=(1,)), with_error(attempt=3)])
def test_an_error_on_some_ranks_or_in_a_later_step_is_partial(events):
    assert verdict_on(events).name is VerdictName.PARTIAL


def test_a_wrong_value_is_silent_also_if_an_error_follows():
    events = replaced(with_error(attempt=3), 1, 2, step(1, 2, wrong_grads="w[0] is 1, should be 2"))

    assert verdict_on(events).name is VerdictName.SILENT


def test_replicas_that_differ_are_silent():
    assert verdict_on(replaced(healthy_events(), 1, 4, weights(1, 4, digest="other"))).name is VerdictName.SILENT


def test_nan_that_reaches_the_weights_of_all_ranks_is_not_called_right():
    events = replaced(healthy_events(), 0, 6, weights(0, 6, is_finite=False))

    assert verdict_on(events).name is VerdictName.SPREAD


def test_a_handler_that_runs_late_is_late():
    signals = [{"kind": "signal", "rank": 1, "at_s": 5.0}, {"kind": "handled", "rank": 1, "at_s": 6.1}]
    expected = Expectation(Outcome.RIGHT, signal_within_s=0.3)

    assert verdict_on(healthy_events() + signals, expected).name is VerdictName.LATE


def test_a_rank_that_gave_up_before_the_end_makes_it_partial():
    events = [event for event in healthy_events() if event["rank"] == 0 or event.get("attempt", 0) < 5]

    assert verdict_on(events, RIGHT).name is VerdictName.PARTIAL


def test_crashes_and_hangs_come_before_everything_else():
    silent = replaced(healthy_events(), 1, 2, step(1, 2, wrong_grads="w"))

    assert verdict_on(silent, exits={"0": 0, "1": -11}).name is VerdictName.CRASHED
    assert verdict_on(silent, exits={"0": 0, "1": -9}, killed=(1,), timed_out=True).name is VerdictName.HUNG


@pytest.mark.parametrize(("refusing", "name"), [((0, 1), VerdictName.ERROR), ((1,), VerdictName.PARTIAL)])
def test_a_refusal_when_wrapping_counts_by_how_many_ranks_refuse(refusing, name):
    refusal = error("verify params", "RuntimeError")
    events = [
        {**event, "error": refusal} if event["kind"] == "wrap" and event["rank"] in refusing else event
        for event in healthy_events()
        if event["kind"] != "weights" and (event["kind"] != "step" or event["rank"] not in refusing)
    ]

    assert verdict_on(events).name is name
