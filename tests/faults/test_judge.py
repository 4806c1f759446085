"""The judge: what it lets pass, and everything it must not let pass. A judge that cannot fail is worth nothing."""

import pytest
import torch

from faults.cells import RIGHT, SKIPPED, AnyOf, Cell, Recovery, named
from faults.judge import Name
from faults.made_up import CELL, TEXT, error, healthy_events, replaced, step, verdict_on, weights, with_error
from faults.oracle import first_difference

UNUSED = named("UnusedParameterError")


def name_and_reason(events, expected, **details):
    verdict = verdict_on(events, expected, **details)
    return verdict.name, verdict.reason


@pytest.mark.parametrize("expected", [RIGHT, SKIPPED])
def test_a_healthy_run_is_right(expected):
    assert name_and_reason(healthy_events(), expected) == (Name.RIGHT, "")


def test_the_expected_error_on_all_ranks_is_named_with_its_text_and_time():
    verdict = verdict_on(with_error(), UNUSED)

    assert verdict.name is Name.NAMED
    assert verdict.error == f"UnusedParameterError: {TEXT}"
    assert verdict.detected_s == pytest.approx(0.1)  # raised at 12.0, the fault was at 11.9


def test_an_error_where_none_is_due_is_wrong():
    name, reason = name_and_reason(with_error(), RIGHT)

    assert name is Name.WRONG
    assert reason.startswith("step 2, rank 0: UnusedParameterError")


@pytest.mark.parametrize("attempt", [0, 2, 5])
def test_a_wrong_gradient_without_an_error_is_silent(attempt):
    events = replaced(healthy_events(), 1, attempt, step(1, attempt, wrong_grads="w[0] is 1, should be 2"))

    assert name_and_reason(events, RIGHT) == (
        Name.SILENT,
        f"step {attempt}, rank 1: gradient w[0] is 1, should be 2",
    )


def test_a_wrong_weight_without_an_error_is_silent_also_where_an_error_was_due_on_other_ranks():
    events = replaced(with_error(on=(0,)), 1, 2, weights(1, 2, wrong="w[0] is 1, should be 2"))

    assert name_and_reason(events, UNUSED)[0] is Name.SILENT


def test_replicas_that_differ_are_silent_though_each_looks_right_to_itself():
    events = replaced(healthy_events(), 1, 5, weights(1, 5, digest="other"))

    assert name_and_reason(events, RIGHT) == (Name.SILENT, "after step 5 the ranks hold different weights")


@pytest.mark.parametrize(
    ("raised", "expected", "reason"),
    [
        (
            error(kind="PhaseError"),
            UNUSED,
            "rank 0 raised PhaseError: step 2: 'w' got no gradient, expected UnusedParameterError",
        ),
        (
            error(rank=0),
            named("UnusedParameterError", fields={"rank": 1}),
            "rank 0: UnusedParameterError.rank is 0, expected 1",
        ),
        (error(), named("UnusedParameterError", fields={"rank": 1}), "rank 0: UnusedParameterError has no field 'rank'"),
        (error(step=1), UNUSED, "rank 0: UnusedParameterError.step is 1, expected 2"),
        (
            error(ranks=[0, 1]),
            named("UnusedParameterError", fields={"ranks": AnyOf(((0,), (1,)))}),
            "rank 0: UnusedParameterError.ranks is [0, 1], expected [0] or [1]",
        ),
        (
            error(),
            named("UnusedParameterError", texts=("bias",)),
            f"rank 0: 'bias' is not in the text: UnusedParameterError: {TEXT}",
        ),
    ],
)
def test_another_class_field_step_or_text_is_wrong(raised, expected, reason):
    assert name_and_reason(with_error(raised), expected) == (Name.WRONG, reason)


def test_an_error_on_one_rank_only_is_wrong():
    assert name_and_reason(with_error(on=(1,)), UNUSED) == (Name.WRONG, "rank 0 raised nothing about the fault")


def test_an_error_that_comes_too_late_is_wrong():
    events = with_error(at_s=16.0)

    assert name_and_reason(events, UNUSED) == (Name.WRONG, f"reported after {16.0 - 11.9} s, later than 3 s")


def test_steps_that_are_missing_after_the_error_are_wrong():
    events = [event for event in with_error() if event.get("attempt", 0) < 5]

    assert name_and_reason(events, UNUSED) == (Name.WRONG, "rank 0 did not report step 5")


def test_a_dropped_step_that_has_changed_weights_is_wrong():
    events = replaced(with_error(), 0, 2, weights(0, 2, wrong="w[0] is 1, should be 2"))

    assert name_and_reason(events, UNUSED)[1] == "rank 0: the step was dropped, but weight w[0] is 1, should be 2"


def test_a_live_rank_that_was_ended_by_a_signal_has_crashed():
    name, reason = name_and_reason(with_error(), UNUSED, exits={0: 0, 1: -6}, logs={1: "terminate called"})

    assert (name, reason) == (Name.ABORTED, "rank 1 ended with -6: terminate called")


def test_a_rank_that_is_not_done_at_the_time_limit_hangs():
    name, reason = name_and_reason(
        with_error(on=(0,)), UNUSED, exits={0: 0, 1: -9}, killed=(1,), timed_out=True, logs={1: "in wait()"}
    )

    assert (name, reason) == (Name.HUNG, "ranks [1] after 1.0 s: rank 1: in wait()")


LOST = named("PeerLostError", fields={"ranks": (1,)}, lost=(1,), later_by=1, within_s=1.0, recovery=Recovery.OVER)


def lost_run(attempt=2, *, ranks=(1,), at_s=12.5):
    raised = {"class": "PeerLostError", "text": "rank 1 died", "fields": {"ranks": list(ranks)}}
    events = [event for event in healthy_events() if event["rank"] == 0 or event.get("attempt", 0) < 2]
    events = [event for event in events if event.get("attempt", 0) < attempt]
    refused = {"kind": "probe", "rank": 0, "attempt": attempt, "error": raised}
    return [*events, {"kind": "fault", "rank": 1, "at_s": 12.0}, step(0, attempt, raised=raised, at_s=at_s), refused]


def test_a_lost_rank_is_named_by_the_others_in_the_same_step_or_in_the_next():
    exits = {0: 0, 1: -9}

    assert name_and_reason(lost_run(2), LOST, exits=exits) == (Name.BROKEN, "")
    assert name_and_reason(lost_run(3), LOST, exits=exits) == (Name.BROKEN, "")
    assert name_and_reason(lost_run(4), LOST, exits=exits)[0] is Name.WRONG
    assert name_and_reason(lost_run(ranks=(0, 1)), LOST, exits=exits)[0] is Name.WRONG
    assert name_and_reason(lost_run(at_s=13.5), LOST, exits=exits)[0] is Name.WRONG


def test_a_cell_that_is_right_because_its_fault_never_happened_is_a_failure_of_the_harness():
    cell = Cell("slow", "forward", CELL.combo)
    happened = [*healthy_events(), {"kind": "fault", "rank": 1, "at_s": 12.0}]

    assert verdict_on(healthy_events(), RIGHT, cell=cell).name is Name.HARNESS
    assert verdict_on(happened, RIGHT, cell=cell).name is Name.RIGHT
    assert verdict_on(healthy_events(), RIGHT).name is Name.RIGHT  # the control has no fault


def test_a_wrapper_that_takes_one_more_step_after_it_should_be_broken_is_wrong():
    exits = {0: 0, 1: -9}
    *events, probe = lost_run(2)
    reasons = [name_and_reason([*events, *more], LOST, exits=exits) for more in ((), ({**probe, "error": None},))]

    assert reasons == [(Name.WRONG, "rank 0 is not broken: one more step gave None")] * 2


def test_one_element_that_is_off_by_one_bit_is_found_and_named():
    right = {"w": torch.tensor([1.0, 2.0, 3.0])}
    wrong = {"w": torch.tensor([1.0, 2.0, torch.nextafter(torch.tensor(3.0), torch.tensor(4.0))])}

    assert first_difference(right, right) == ""
    assert first_difference(wrong, right) == "w[2] is 3, should be 3 (1 of 3 differ)"
