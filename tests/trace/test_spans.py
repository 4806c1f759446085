import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from megabucket.trace.step_trace import length_s, union

TICKS = 24


def spans(*, max_spans=8):
    """Lists of spans on whole ticks, empty and reversed ones included; shrinks towards no spans at 0."""
    tick = st.integers(0, TICKS)
    return st.lists(st.tuples(tick, tick), max_size=max_spans)


def ticks(some_spans):
    """The brute force: the set of ticks that at least one span covers."""
    return {tick for start, stop in some_spans for tick in range(start, stop)}


def assert_is_union(some_spans):
    assert all(start < stop for start, stop in some_spans)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(some_spans))


@given(spans())
def test_a_union_covers_exactly_the_ticks_of_its_spans(some):
    result = union(some)

    assert ticks(result) == ticks(some)
    assert_is_union(result)


@given(spans())
def test_the_length_is_the_number_of_covered_ticks(some):
    assert length_s(some) == len(ticks(some))


@given(spans(), spans())
def test_the_length_outside_is_the_number_of_ticks_in_the_left_alone(left, right):
    assert length_s(left, outside=right) == len(ticks(left) - ticks(right))


@settings(max_examples=30)
@given(spans(), st.randoms())
def test_the_order_of_spans_does_not_matter(some, random):
    shuffled = list(some)
    random.shuffle(shuffled)

    assert union(shuffled) == union(some)
