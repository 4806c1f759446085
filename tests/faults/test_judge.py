"""The judge: what it lets pass, and everything it must not let pass. A judge that cannot fail is worth nothing."""

import pytest
import torch

from faults.cells import RIGHT, SKIPPED, AnyOf, Cell, Recovery, named
from faults.judge import Name
from faults.made_up import (
    CELL,
    NUM_STEPS,
    TEXT,
    apart_from,
    error,
    healthy_events,
    replaced,
    step,
    verdict_on,
    weights,
    with_error,
)
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


@pytest.mark.parametrize("attempt", [3, 5, NUM_STEPS - 1])
def test_ranks_that_stay_a_batch_apart_are_called_so_though_each_is_right_by_its_own_count(attempt):
    events = apart_from(healthy_events(), attempt)

    name, reason = name_and_reason(events, RIGHT)

    assert name is Name.APART
    assert reason == f"in agreed step {attempt} the ranks trained on batches {{0: [{attempt}], 1: [{attempt + 1}]}}"


def test_ranks_that_stay_a_batch_apart_are_called_so_though_all_have_raised_the_expected_error():
    events = apart_from(with_error(), 3)

    name, reason = name_and_reason(events, UNUSED)

    assert name is Name.APART
    assert reason.endswith(f"{{0: [3], 1: [4]}}, after rank 0 had UnusedParameterError: {TEXT}")


def test_ranks_that_are_a_batch_apart_before_a_later_error_tells_them_are_called_so():
    expected = named("UnusedParameterError", later_by=2)
    events = apart_from(with_error(attempt=4), 2)

    assert name_and_reason(events, expected)[0] is Name.APART


def test_a_rank_that_waits_at_the_end_because_the_other_is_a_batch_ahead_is_not_just_hung():
    events = [event for event in apart_from(healthy_events(), 3) if (event["rank"], event.get("attempt")) != (0, NUM_STEPS - 1)]

    assert name_and_reason(events, RIGHT, exits={0: -9, 1: 0}, killed=(0,), timed_out=True)[0] is Name.APART


def test_a_rank_that_left_one_step_and_meets_the_others_in_the_next_is_not_apart():
    expected = named("StepMismatchError", own_error=("",), is_agreed=False)
    raised = error(kind="StepMismatchError")
    left = step(1, 2, trained=[], last=raised)

    events = replaced(with_error(raised), 1, 2, left)

    assert name_and_reason(events, expected) == (Name.NAMED, "")


@pytest.mark.parametrize(("base", "is_met"), [("MegabucketError", True), ("PhaseError", False)])
def test_an_expected_class_stands_for_those_that_are_derived_from_it(base, is_met):
    raised = {**error(), "bases": ["UnusedParameterError", "MegabucketError", "Exception"]}

    assert (name_and_reason(with_error(raised), named(base))[0] is Name.NAMED) is is_met


def test_a_wrong_value_is_tolerated_on_the_rank_whose_error_comes_later_and_on_no_other():
    expected = named("UnusedParameterError", culprit_later_by=1, recovery=Recovery.RELOAD)
    raised, late = error(), error(step=2)
    events = replaced(with_error(raised, on=(0,)), 1, 2, step(1, 2, wrong_grads="w is not divided", counter=2))
    events = replaced(events, 1, 3, step(1, 3, raised=late, last=late))
    elsewhere = replaced(events, 0, 3, step(0, 3, wrong_grads="w is not divided"))

    assert name_and_reason(events, expected) == (Name.NAMED, "")
    assert name_and_reason(elsewhere, expected)[0] is Name.SILENT


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


def test_an_aborted_rank_is_not_a_failure_of_the_harness_though_another_broke_off_with_it():
    events = [*with_error(), {"kind": "broken", "rank": 0, "text": "RuntimeError: connection closed by peer"}]

    assert name_and_reason(events, UNUSED)[0] is Name.HARNESS
    assert name_and_reason(events, UNUSED, exits={0: 0, 1: -6}, logs={1: "terminate called"})[0] is Name.ABORTED


def test_an_error_while_doing_what_the_first_one_asks_for_is_wrong():
    again = {"kind": "no recovery", "rank": 1, "attempt": 2, "error": error(kind="PhaseError")}

    name, reason = name_and_reason([*with_error(), again], UNUSED)

    assert name is Name.WRONG
    assert reason.startswith("rank 1 could not do what the error asks for: PhaseError")


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
