"""The tables of phases: what is not in them is an error that names both phases."""

import itertools

import pytest

from megabucket.buffer.phases import GRAD_TRANSITIONS, PARAM_TRANSITIONS, GradPhase, ParamPhase, PhaseMachine
from megabucket.errors import PhaseError

LEGAL_GRAD = {
    (GradPhase.ACCUMULATING, GradPhase.IN_FLIGHT),
    (GradPhase.IN_FLIGHT, GradPhase.REDUCED),
    (GradPhase.REDUCED, GradPhase.ACCUMULATING),
}
LEGAL_PARAM = {
    (ParamPhase.GATHERED, ParamPhase.STALE),
    (ParamPhase.GATHERED, ParamPhase.IN_FLIGHT),
    (ParamPhase.STALE, ParamPhase.IN_FLIGHT),
    (ParamPhase.IN_FLIGHT, ParamPhase.GATHERED),
}
CASES = [
    (transitions, legal, pair)
    for transitions, legal, phases in (
        (GRAD_TRANSITIONS, LEGAL_GRAD, GradPhase),
        (PARAM_TRANSITIONS, LEGAL_PARAM, ParamPhase),
    )
    for pair in itertools.product(phases, repeat=2)
]


@pytest.mark.parametrize(("transitions", "legal", "pair"), CASES, ids=[f"{a.name}-{b.name}" for _, _, (a, b) in CASES])
def test_exactly_the_legal_transitions_are_possible(transitions, legal, pair):
    before, after = pair
    machine = PhaseMachine("the owner", before, transitions)

    if pair in legal:
        machine.enter(after)
        assert machine.current is after
    else:
        with pytest.raises(PhaseError, match=f"the owner is '{before.value}' and cannot become '{after.value}'"):
            machine.enter(after)
        assert machine.current is before  # a refused call changes nothing


def test_the_text_names_the_owner_both_phases_what_is_allowed_and_the_right_order():
    machine = PhaseMachine("the gradients of bucket group 2", GradPhase.ACCUMULATING, GRAD_TRANSITIONS)

    with pytest.raises(PhaseError) as caught:
        machine.enter(GradPhase.REDUCED)

    assert str(caught.value) == (
        "the gradients of bucket group 2 is 'accumulating' and cannot become 'already reduced' (only 'in flight'). The calls "
        "of a step came in an order that would read or write memory somebody else owns; the order is backward, "
        "finish_grad_sync, step, zero_grad."
    )


@pytest.mark.parametrize("transitions", [GRAD_TRANSITIONS, PARAM_TRANSITIONS])
def test_the_tables_cannot_be_changed_at_run_time(transitions):
    with pytest.raises(TypeError):
        transitions[next(iter(transitions))] = frozenset()


def test_the_text_lists_every_phase_that_may_follow():
    machine = PhaseMachine("the parameters", ParamPhase.GATHERED, PARAM_TRANSITIONS)

    with pytest.raises(PhaseError) as caught:
        machine.enter(ParamPhase.GATHERED)

    assert "(only 'in flight', 'stale')" in str(caught.value)  # sorted, so that all ranks say the same
