"""The judge: what it lets pass, and everything it must not let pass. A judge that cannot fail is worth nothing."""

import pytest

from faults.cells import RIGHT, SKIPPED, AnyOf, Cell, Combo, Expectation, Mode, Outcome, Recovery, named
from faults.judge import Name
from faults.made_up import CELL, TEXT, error, healthy_events, replaced, step, verdict_on, weights, with_error

UNUSED = named("UnusedParameterError")


def name_and_reason(events, expected, **details):
    verdict = verdict_on(events, expected, **details)
    return verdict.name, verdict.reason


@pytest.mark.parametrize("expected", [RIGHT, SKIPPED])
def test_a_healthy_run_is_right(expected):
    assert name_and_reason(healthy_events(), expected) == (Name.RIGHT, "")


def test_a_healthy_run_is_wrong_where_an_error_is_due():
    assert name_and_reason(healthy_events(), UNUSED) == (Name.WRONG, "rank 0 raised nothing about the fault")


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


def test_replicas_may_differ_in_a_step_whose_error_is_due_in_the_next_one_and_not_afterwards():
    expected = named("ReplicasDivergedError", later_by=1, recovery=Recovery.RELOAD)
    raised = error("step 3: diverged", "ReplicasDivergedError", step=3)
    events = replaced(with_error(raised, attempt=3), 1, 2, weights(1, 2, digest="other", wrong="w"))

    assert name_and_reason(events, expected)[0] is Name.NAMED
    assert name_and_reason(replaced(events, 1, 4, weights(1, 4, digest="other")), expected)[0] is Name.SILENT


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


def test_tuples_and_the_lists_that_json_makes_of_them_are_equal():
    expected = named("UnusedParameterError", fields={"ranks": (0, 1)})

    assert name_and_reason(with_error(error(ranks=[0, 1])), expected)[0] is Name.NAMED


def test_an_error_on_one_rank_only_is_wrong():
    assert name_and_reason(with_error(on=(1,)), UNUSED) == (Name.WRONG, "rank 0 raised nothing about the fault")


def test_texts_that_differ_are_wrong_unless_the_error_is_about_the_rank_itself():
    other = error("[rank 1] another text")
    events = replaced(with_error(), 1, 2, step(1, 2, raised=other, last=other))

    assert name_and_reason(events, UNUSED)[1].startswith("texts differ")
    assert name_and_reason(events, named("UnusedParameterError", same_text=False))[0] is Name.NAMED


def test_a_last_error_that_is_not_the_error_is_wrong():
    events = replaced(with_error(), 0, 2, step(0, 2, raised=error(), last=error("an older one")))

    assert "last_error is UnusedParameterError: an older one" in name_and_reason(events, UNUSED)[1]


def test_an_error_that_comes_too_late_is_wrong():
    events = with_error(at_s=16.0)

    assert name_and_reason(events, UNUSED) == (Name.WRONG, f"reported after {16.0 - 11.9} s, later than 3 s")


def test_a_second_error_after_the_expected_one_is_wrong():
    again = error("step 3: again", step=3)
    events = replaced(with_error(), 1, 3, step(1, 3, raised=again, last=again))

    assert name_and_reason(events, UNUSED)[1].startswith("step 3, rank 1: UnusedParameterError")


def test_steps_that_are_missing_after_the_error_are_wrong():
    events = [event for event in with_error() if event.get("attempt", 0) < 5]

    assert name_and_reason(events, UNUSED) == (Name.WRONG, "rank 0 did not report step 5")


def test_a_dropped_step_that_has_changed_weights_is_wrong():
    events = replaced(with_error(), 0, 2, weights(0, 2, wrong="w[0] is 1, should be 2"))

    assert name_and_reason(events, UNUSED)[1] == "rank 0: the step was dropped, but weight w[0] is 1, should be 2"


def own_exception(**known):
    events = with_error(on=(0,))
    return replaced(events, 1, 2, step(1, 2, raised=error("boom", "ChaosError"), **known))


def test_the_rank_at_fault_may_show_its_own_exception_if_it_knows_the_agreed_error():
    expected = named("UnusedParameterError", own_error=("ChaosError",))

    assert name_and_reason(own_exception(last=error()), expected)[0] is Name.NAMED
    assert name_and_reason(own_exception(last=error("another")), expected)[1].startswith("texts differ")
    assert name_and_reason(own_exception(), expected) == (Name.WRONG, "rank 1 raised nothing about the fault")
    assert name_and_reason(own_exception(last=error()), UNUSED)[0] is Name.WRONG


def test_a_live_rank_that_was_ended_by_a_signal_has_crashed():
    name, reason = name_and_reason(with_error(), UNUSED, exits={0: 0, 1: -6}, logs={1: "terminate called"})

    assert (name, reason) == (Name.ABORTED, "rank 1 ended with -6: terminate called")


def test_a_rank_that_is_not_done_at_the_time_limit_hangs():
    name, reason = name_and_reason(
        with_error(on=(0,)), UNUSED, exits={0: 0, 1: -9}, killed=(1,), timed_out=True, logs={1: "in wait()"}
    )

    assert (name, reason) == (Name.HUNG, "ranks [1] after 1.0 s: rank 1: in wait()")


def test_a_failure_of_the_harness_is_neither_right_nor_wrong():
    events = [*healthy_events(), {"kind": "broken", "rank": 0, "text": "Traceback"}]

    assert name_and_reason(events, RIGHT) == (Name.HARNESS, "rank 0: Traceback")


def test_ranks_that_never_joined_say_nothing_about_the_library():
    events = [event for event in healthy_events() if event["kind"] != "joined"]

    assert name_and_reason(events, RIGHT) == (Name.HARNESS, "no group: a rank did not join")


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


def test_a_refusal_when_wrapping_is_named_only_if_every_rank_refuses():
    cell = Cell("other-model", "shape", Combo(Mode.ALL_REDUCE, True, 2))
    expected = named("LayoutMismatchError", at_wrap=True, texts=("w",))
    refusal = {"class": "LayoutMismatchError", "text": "entry 4: w", "fields": {}}
    both = [
        {**event, "error": refusal} if event["kind"] == "wrap" else event
        for event in healthy_events()
        if event["kind"] in ("wrap", "joined", "fault")
    ]

    assert name_and_reason(both, expected, cell=cell) == (Name.NAMED, "")
    assert name_and_reason(healthy_events(), expected, cell=cell)[0] is Name.WRONG


def test_a_forked_child_that_hangs_or_says_another_class_is_found():
    expected = Expectation(Outcome.RIGHT, child_error="ForkedProcessError")

    def with_child(said):
        return [*healthy_events(), {"kind": "child", "rank": 1, "said": said}]

    assert name_and_reason(with_child("ForkedProcessError"), expected)[0] is Name.RIGHT
    assert name_and_reason(with_child("hung"), expected)[0] is Name.HUNG
    assert name_and_reason(with_child("no error"), expected)[0] is Name.WRONG
    assert name_and_reason(healthy_events(), expected)[0] is Name.WRONG


def test_a_signal_whose_handler_runs_late_is_found():
    expected = Expectation(Outcome.RIGHT, signal_within_s=0.3)

    def with_signal(delay_s):
        signals = [{"kind": "signal", "rank": 1, "at_s": 5.0}, {"kind": "handled", "rank": 1, "at_s": 5.0 + delay_s}]
        return healthy_events() + signals

    assert name_and_reason(with_signal(0.25), expected)[0] is Name.RIGHT
    assert name_and_reason(with_signal(0.5), expected) == (Name.WRONG, "the handler ran after 0.50 s")
    assert name_and_reason(healthy_events(), expected) == (Name.WRONG, "the signal was never handled")


def test_a_warning_that_is_due_must_be_there():
    expected = Expectation(Outcome.RIGHT, warning="rank 1")
    warned = [*healthy_events(), {"kind": "warning", "rank": 0, "text": "megabucket: rank 1 is slow"}]

    assert name_and_reason(warned, expected)[0] is Name.RIGHT
    assert name_and_reason(healthy_events(), expected)[0] is Name.WRONG


def test_the_rank_at_fault_is_the_last_with_overlap_and_the_first_without():
    assert [CELL.culprit, Cell("none", "step", Combo(Mode.ALL_REDUCE, False, 3)).culprit] == [1, 0]
    assert Cell("none", "step", CELL.combo, at_rank=0).culprit == 0


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


def test_a_step_may_end_in_one_of_several_ways_and_in_no_other():
    expected = named("LateGradientError", otherwise=(RIGHT, UNUSED))

    assert name_and_reason(healthy_events(), expected)[0] is Name.RIGHT
    assert name_and_reason(with_error(), expected)[0] is Name.NAMED
    assert name_and_reason(with_error(error(kind="PhaseError")), expected)[0] is Name.WRONG
    wrong = replaced(healthy_events(), 1, 2, step(1, 2, wrong_grads="w[0] is 1, should be 2"))
    assert name_and_reason(wrong, expected)[0] is Name.SILENT


def test_ranks_that_count_steps_differently_are_wrong():
    events = [{**event, "counter": 7} if event["kind"] == "step" and event["rank"] == 1 else event for event in with_error()]

    assert name_and_reason(events, UNUSED) == (Name.WRONG, "the ranks count steps differently: [2, 7]")


def test_a_deadlock_of_the_loopback_world_is_a_hang():
    events = with_error(error("waits for collective 3", "CollectiveDeadlockError"))

    assert name_and_reason(events, UNUSED)[0] is Name.HUNG


# torch DDP: honest categories where no named error is promised #

TORCH = Cell("none", "step", CELL.combo, is_torch=True)


def on_torch(events, expected=UNUSED, **details):
    return verdict_on(events, expected, cell=TORCH, **details).name


def test_of_torch_any_error_on_all_ranks_counts_if_it_comes_in_time():
    raised = error(kind="RuntimeError")
    gives_up = [event for event in with_error(raised) if event.get("attempt", 0) < 3]

    assert on_torch(healthy_events()) is Name.RIGHT
    assert on_torch(with_error(raised)) is Name.NAMED
    assert on_torch([*gives_up, *(step(rank, 3, raised=raised) for rank in range(2))]) is Name.BROKEN
    assert on_torch(with_error(on=(1,))) is Name.WRONG
    assert on_torch(with_error(attempt=3)) is Name.WRONG


def test_of_torch_wrong_values_are_silent_also_if_an_error_follows():
    assert on_torch(replaced(with_error(attempt=3), 1, 2, step(1, 2, wrong_grads="w[0] is 1"))) is Name.SILENT
    assert on_torch(replaced(healthy_events(), 1, 4, weights(1, 4, digest="other"))) is Name.SILENT
    assert on_torch(replaced(healthy_events(), 0, 5, weights(0, 5, is_finite=False))) is Name.SILENT


def test_of_torch_crashes_and_hangs_come_before_everything_else():
    silent = replaced(healthy_events(), 1, 2, step(1, 2, wrong_grads="w"))

    assert on_torch(silent, exits={0: 0, 1: -11}) is Name.ABORTED
    assert on_torch(silent, exits={0: 0, 1: -9}, killed=(1,), timed_out=True) is Name.HUNG


@pytest.mark.parametrize(("refusing", "name"), [((0, 1), Name.NAMED), ((1,), Name.WRONG)])
def test_of_torch_a_refusal_when_wrapping_counts_by_how_many_ranks_refuse(refusing, name):
    refusal = error("verify params", "RuntimeError")
    events = [
        {**event, "error": refusal} if event["kind"] == "wrap" and event["rank"] in refusing else event
        for event in healthy_events()
        if event["kind"] != "weights" and (event["kind"] != "step" or event["rank"] not in refusing)
    ]

    assert on_torch(events) is name
