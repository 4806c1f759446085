"""What a blocked rank makes of signs of life and process states, moment by moment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_signs import BEAT

from megabucket.comm.liveness import Observations, ProcessState, View

RUNNING, STOPPED, DEAD, UNKNOWN = ProcessState.RUNNING, ProcessState.STOPPED, ProcessState.DEAD, ProcessState.UNKNOWN


class Scene:
    """Rank 0 of three waits for launch 41; the test says what it sees."""

    def __init__(self):
        self.now_s = 0.0
        self.states = {1: UNKNOWN, 2: UNKNOWN}
        self.beats = {rank: BEAT._replace(process=BEAT.process._replace(pid=rank)) for rank in (1, 2)}
        self.seen = Observations("fence", number=41, rank=0, size=3, look_at=lambda who: self.states[who.pid])

    def beat(self, rank, **changes):
        self.beats[rank] = self.beats[rank]._replace(number=self.beats[rank].number + 1, **changes)

    def look(self, times=1, after_s=0.1):
        for _ in range(times):
            self.now_s += after_s
            self.seen.note(View(self.now_s, self.beats), self.now_s)
        return self.seen


@pytest.fixture
def scene():
    return Scene()


class TestSilence:
    @given(st.lists(st.floats(0.01, 0.9), min_size=1, max_size=20))
    def test_it_is_the_time_since_the_beat_was_first_seen(self, gaps):
        scene = Scene()
        scene.look()
        for gap in gaps:
            scene.look(after_s=gap)

        assert set(scene.seen.frozen(0.999 * sum(gaps))) == {1, 2}
        assert scene.seen.frozen(1.001 * sum(gaps)) == {}

    def test_another_beat_ends_it(self, scene):
        scene.look(times=10)
        scene.beat(1)

        assert set(scene.look().frozen(0.5)) == {2}

    def test_a_gap_between_two_looks_counts_as_a_second_at_most(self, scene):
        scene.look()

        seen = scene.look(after_s=3600.0)  # whoever looks was frozen itself

        assert set(seen.frozen(0.99)) == {1, 2}
        assert seen.frozen(1.01) == {}


class TestGone:
    def test_nobody_is_gone_at_first(self, scene):
        assert scene.look().gone() == {}

    def test_a_dead_process_is_gone_at_the_second_look(self, scene):
        scene.states[2] = DEAD

        assert scene.look().gone() == {}
        assert scene.look().gone() == {2: "died: process 2 on node (1) is gone; last seen in backward, step 12, bucket 2"}

    def test_who_died_without_a_word_is_named_before_those_who_ended_in_good_order(self, scene):
        scene.states = {1: DEAD, 2: DEAD}
        scene.beat(1, has_left=True)

        assert list(scene.look().gone()) == [2]

    def test_a_rank_that_left_without_launching_is_gone_at_once(self, scene):
        scene.beat(1, has_left=True)

        assert scene.look().gone() == {
            1: "left: its program ended, its process group was destroyed, or its wrapper was detached, after 40 launches; this "
            "was launch 41"
        }

    def test_a_rank_that_left_after_launching_may_have_its_data_on_the_way(self, scene):
        scene.beat(1, has_left=True, num_launched=41)
        scene.states[1] = DEAD

        assert scene.look(times=9).gone() == {}
        assert list(scene.look().gone()) == [1]


class TestFrozen:
    def test_a_rank_without_beats_is_frozen_after_the_time_and_not_before(self, scene):
        for _ in range(15):
            scene.beat(1)
            scene.look()

        assert list(scene.seen.frozen(1.3)) == [2]  # seen first at 0.1 s, and now it is 1.5 s
        assert scene.seen.frozen(1.5) == {}
        assert scene.seen.frozen(1.3) == {2: "froze: no sign of life for 1.3 s; last seen in backward, step 12, bucket 2"}

    def test_a_stopped_process_is_frozen_after_the_time_also_without_beats(self, scene):
        scene.beats = {rank: beat._replace(every_s=None) for rank, beat in scene.beats.items()}
        scene.look(times=10)
        scene.states[1] = STOPPED
        scene.look(times=6)

        assert scene.seen.frozen(0.45) == {1: "froze: no sign of life for 0.45 s, its process is stopped"}
        assert scene.seen.frozen(0.6) == {}

    def test_a_process_that_goes_on_is_not_frozen(self, scene):
        scene.states[1] = STOPPED
        scene.look(times=20)
        scene.states[1] = RUNNING
        scene.beat(1)
        scene.beat(2)

        assert scene.look().frozen(0.1) == {}

    def test_a_rank_that_left_owes_no_beats(self, scene):
        scene.beat(1, has_left=True)
        scene.look(times=30)

        assert 1 not in scene.seen.frozen(1.0)


class TestVanished:
    def test_ranks_whose_beats_stopped_are_named(self, scene):
        for _ in range(12):
            scene.beat(1)
            scene.look()

        assert scene.seen.vanished(1.0) == {2: "went away: no sign of life for 1.0 s; last seen in backward, step 12, bucket 2"}

    def test_otherwise_ranks_that_never_came(self, scene):
        del scene.beats[2]

        assert scene.look().vanished(1.0) == {2: "went away or never came: it has given no sign of life"}


class TestLate:
    def test_ranks_that_have_not_launched_are_late_and_tell_what_they_do(self, scene):
        scene.beats[1] = scene.beats[1]._replace(num_launched=41)

        assert scene.look().late() == {2: "is alive but has not launched its part; it is in backward, step 12, bucket 2"}

    def test_a_stopped_process_is_late(self, scene):
        scene.states[2] = STOPPED
        scene.beats = {rank: beat._replace(num_launched=41) for rank, beat in scene.beats.items()}

        assert scene.look().late() == {2: "has not launched its part; its process is stopped"}

    def test_a_rank_that_never_wrote_has_not_come(self, scene):
        del scene.beats[1]
        scene.beats[2] = scene.beats[2]._replace(num_launched=41)

        assert scene.look().late() == {1: "has given no sign of life: it has not wrapped its module yet"}

    def test_nothing_is_known_about_ranks_without_heartbeats(self, scene):
        scene.beats = {rank: beat._replace(every_s=None) for rank, beat in scene.beats.items()}

        assert scene.look().late() == {}
