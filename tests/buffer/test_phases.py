"""The table of phases: what is not in it is an error that names both phases."""

import itertools

import pytest

from megabucket.buffer.phases import TRANSITIONS, GradPhase, ParamPhase, enter
from megabucket.errors import PhaseError

LEGAL = {
    (GradPhase.ACCUMULATING, GradPhase.IN_FLIGHT),
    (GradPhase.IN_FLIGHT, GradPhase.REDUCED),
    (GradPhase.REDUCED, GradPhase.ACCUMULATING),
    (ParamPhase.GATHERED, ParamPhase.STALE),
    (ParamPhase.GATHERED, ParamPhase.IN_FLIGHT),
    (ParamPhase.STALE, ParamPhase.IN_FLIGHT),
    (ParamPhase.IN_FLIGHT, ParamPhase.GATHERED),
}
PAIRS = [pair for phases in (GradPhase, ParamPhase) for pair in itertools.product(phases, repeat=2)]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{type(pair[0]).__name__}-{pair[0].name}-{pair[1].name}")
def test_exactly_the_legal_transitions_are_possible(pair):
    before, after = pair

    if pair in LEGAL:
        assert enter(before, after, group=2) is after
    else:
        with pytest.raises(PhaseError, match=f"of bucket group 2 is '{before.value}' and cannot become '{after.value}'"):
            enter(before, after, group=2)


def test_the_text_names_the_group_both_phases_what_is_allowed_and_the_right_order():
    with pytest.raises(PhaseError) as caught:
        enter(GradPhase.ACCUMULATING, GradPhase.REDUCED, group=2)

    assert str(caught.value) == (
        "the gradients of bucket group 2 is 'accumulating' and cannot become 'already reduced' (only 'in flight'). This order "
        "of calls would read or write memory that another owner uses; the order is backward, finish_grad_sync, step, zero_grad."
    )


def test_the_table_cannot_be_changed_at_run_time():
    with pytest.raises(TypeError):
        TRANSITIONS[GradPhase.ACCUMULATING] = frozenset()


def test_the_text_lists_every_phase_that_may_follow():
    with pytest.raises(PhaseError) as caught:
        enter(ParamPhase.GATHERED, ParamPhase.GATHERED, group=0)

    assert "the parameters of bucket group 0 is 'gathered'" in str(caught.value)
    assert "(only 'in flight', 'stale')" in str(caught.value)  # sorted, so that all ranks say the same
