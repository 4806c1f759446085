"""When a bucket group is complete: learned counts."""

from hypothesis import given
from hypothesis import strategies as st

from megabucket.buffer.bucket_group import Readiness


def learned(counts):
    """Readiness that a first step has taught these counts."""
    readiness = Readiness(len(counts))
    for param, count in enumerate(counts):
        for _ in range(count):
            readiness.mark([param])
    readiness.end_step(learns=True)
    return readiness


def test_nothing_is_complete_in_the_first_step_because_nobody_knows_what_comes():
    readiness = Readiness(2)

    assert [readiness.mark([param]) for param in (0, 1, 0, 1)] == [False] * 4


def test_from_the_second_step_on_the_last_gradient_completes_the_group():
    readiness = learned([1, 1, 1])

    assert [readiness.mark([param]) for param in (2, 0, 1)] == [False, False, True]


def test_repeated_gradients_are_waited_for():
    readiness = learned([2, 1])

    assert [readiness.mark([param]) for param in (0, 1, 0)] == [False, False, True]


def test_a_gradient_too_many_does_not_complete_the_group_a_second_time():
    readiness = learned([1, 1])

    assert [readiness.mark([param]) for param in (0, 1, 1, 0)] == [False, True, False, False]


def test_a_gradient_too_many_does_not_stand_for_a_missing_one():
    readiness = learned([1, 1])

    assert [readiness.mark([param]) for param in (0, 0, 0)] == [False, False, False]


def test_a_parameter_without_a_gradient_in_the_first_step_holds_the_group_back_all_the_same():
    readiness = learned([1, 0])

    assert readiness.mark([0]) is False
    assert readiness.mark([1]) is True


def test_a_step_with_fewer_gradients_never_completes_and_teaches_nothing():
    readiness = learned([2, 1])

    assert [readiness.mark([param]) for param in (0, 1)] == [False, False]
    readiness.end_step(learns=True)

    assert [readiness.mark([param]) for param in (0, 1, 0)] == [False, False, True]


def test_a_first_step_without_any_gradient_teaches_nothing():
    readiness = Readiness(2)

    readiness.end_step(learns=True)

    assert [readiness.mark([param]) for param in (0, 1)] == [False, False]


def test_a_step_that_was_cut_short_teaches_nothing():
    readiness = Readiness(2)
    readiness.mark([0])  # the second gradient of parameter 0 would have come

    readiness.end_step()
    for param in (0, 1, 0):
        readiness.mark([param])
    readiness.end_step(learns=True)

    assert [readiness.mark([param]) for param in (0, 1, 0)] == [False, False, True]


def test_a_step_that_was_cut_short_leaves_no_counts_behind():
    readiness = learned([1, 1])
    readiness.mark([0])

    readiness.end_step()

    assert readiness.mark([1]) is False
    assert readiness.mark([0]) is True


def test_what_was_unlearned_is_learned_again_from_the_next_step():
    readiness = learned([1, 1])
    readiness.mark([1])
    readiness.mark([0])

    readiness.end_step(unlearns=True)  # the second gradient of parameter 0 came after the group was sent

    assert [readiness.mark([param]) for param in (0, 1, 0)] == [False, False, False]
    readiness.end_step(learns=True)
    assert [readiness.mark([param]) for param in (0, 1, 0)] == [False, False, True]


@given(counts=st.lists(st.integers(0, 3), min_size=1, max_size=6), data=st.data())
def test_a_group_is_complete_exactly_when_every_parameter_has_what_the_first_step_showed(counts, data):
    readiness = learned(counts) if any(counts) else learned([1] * len(counts))
    expected = [max(count, 1) for count in counts] if any(counts) else [1] * len(counts)

    for _ in range(2):  # a step leaves nothing behind for the next one
        order = data.draw(st.permutations([param for param, count in enumerate(expected) for _ in range(count)]))
        assert [readiness.mark([param]) for param in order] == [False] * (len(order) - 1) + [True]
        readiness.end_step(learns=True)


@given(counts=st.lists(st.integers(1, 3), min_size=1, max_size=6), data=st.data())
def test_gradients_that_are_counted_together_complete_a_group_as_those_counted_one_by_one(counts, data):
    together, one_by_one = learned(counts), learned(counts)
    order = data.draw(st.permutations([param for param, count in enumerate(counts) for _ in range(count)]))
    cut = data.draw(st.integers(0, len(order)))

    for part in (order[:cut], order[cut:]):
        completes = [one_by_one.mark([param]) for param in part]
        assert together.mark(part) == any(completes)
        assert together.num_incomplete == one_by_one.num_incomplete
