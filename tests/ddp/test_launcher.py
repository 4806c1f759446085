"""Launches come in index order, whatever order groups become complete in."""

from hypothesis import given
from hypothesis import strategies as st

from megabucket.ddp.launcher import InOrderLauncher


def launcher(num_groups):
    launched = []
    return InOrderLauncher(range(num_groups), launched.append), launched  # a group is whatever it hands to ``launch``


def test_a_complete_group_waits_for_those_before_it():
    launches, launched = launcher(3)

    launches.mark_complete(2)
    launches.mark_complete(1)
    before = list(launched)
    launches.mark_complete(0)

    assert before == []
    assert launched == [0, 1, 2]


def test_flush_launches_the_rest_in_order_and_nothing_twice():
    launches, launched = launcher(4)
    launches.mark_complete(0)

    launches.flush()
    launches.flush()
    launches.mark_complete(2)

    assert launched == [0, 1, 2, 3]


def test_the_next_step_begins_with_the_first_group_and_remembers_nothing():
    launches, launched = launcher(2)
    launches.mark_complete(1)  # complete, but not launched
    launches.start_step()

    launches.mark_complete(0)

    assert launched == [0]


@given(num_groups=st.integers(1, 8), data=st.data())
def test_what_is_launched_is_always_the_longest_complete_prefix(num_groups, data):
    launches, launched = launcher(num_groups)
    complete = set()

    for index in data.draw(st.permutations(range(num_groups))):
        launches.mark_complete(index)
        complete.add(index)
        prefix = next((i for i in range(num_groups) if i not in complete), num_groups)
        assert launched == list(range(prefix))
        assert launches.num_launched == prefix
