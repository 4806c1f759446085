"""What a blocked rank makes of signs of life and process states, moment by moment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_signs import BEAT

from megabucket.comm.liveness.observations import Observations, View


class Scene:
    """Rank 0 of three waits for launch 41; the test says what it sees."""

    def __init__(self):
        self.now_s = 0.0
        self.watcher_since_s = 0.0
        self.dead = set()
        self.beats = {rank: BEAT._replace(process=BEAT.process._replace(pid=rank)) for rank in (1, 2)}
        self.watch_from("another node")

    def watch_from(self, host):
        self.seen = Observations("fence", number=41, rank=0, size=3, host=host, is_gone=lambda who: who.pid in self.dead)

    def beat(self, rank, **changes):
        self.beats[rank] = self.beats[rank]._replace(number=self.beats[rank].number + 1, **changes)

    def look(self, times=1, after_s=0.1, **view):
        for _ in range(times):
            self.now_s += after_s
            self.seen.note(View(self.now_s, self.beats, watcher_since_s=self.watcher_since_s, **view), self.now_s)
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

        assert set(scene.seen.silent(0.999 * sum(gaps))) == {1, 2}
        assert scene.seen.silent(1.001 * sum(gaps)) == {}

    def test_a_rank_that_is_seen_for_the_first_time_ends_that_of_no_other(self, scene):
        scene.beats = {2: scene.beats[2]}
        scene.look()
        scene.beats = {1: scene.beats[2], **scene.beats}

        assert set(scene.look(after_s=0.5).silent(0.4)) == {2}

    def test_only_the_watcher_counts_it(self, scene):
        scene.watcher_since_s = None
        scene.look(times=20)
        assert scene.seen.silent(0.1) == {}

        scene.watcher_since_s = scene.now_s
        scene.look()
        assert scene.seen.silent(0.01) == {}

        assert set(scene.look(times=10).silent(0.99)) == {1, 2}

    def test_a_new_watcher_takes_over_the_silence_of_the_lost_one_and_of_its_host(self, scene):
        scene.look(silent_before_s={2: 1.2})
        seen = scene.look(times=10)

        assert set(seen.silent(2.1)) == {2}
        scene.beat(2)
        assert scene.look().silent(1.2) == {}

    def test_ranks_of_another_host_that_were_lost_together_are_named_together(self, scene):
        """Their last beats are up to a period apart, here 0.5 s."""
        scene.look()
        scene.look(times=4)
        scene.beat(1)
        scene.look(times=26)

        assert set(scene.seen.silent(2.9)) == {1, 2}  # silent for 2.5 and 3.0 s
        assert scene.seen.silent(3.1) == {}

    def test_a_rank_of_this_host_is_not_named_for_the_silence_of_another_one(self, scene):
        scene.watch_from(BEAT.process.host)
        scene.look(times=5)
        scene.beat(1)
        scene.look(times=26)

        assert set(scene.seen.silent(2.9)) == {2}

    def test_another_beat_ends_it(self, scene):
        scene.look(times=10)
        scene.beat(1)

        assert set(scene.look().silent(0.5)) == {2}

    def test_a_gap_between_two_looks_counts_as_a_second_at_most(self, scene):
        scene.look()

        seen = scene.look(after_s=3600.0)  # whoever looks was frozen itself

        assert set(seen.silent(0.99)) == {1, 2}
        assert seen.silent(1.01) == {}


class TestGone:
    def test_of_a_rank_that_writes_a_single_beat_nobody_knows_where_it_was(self, scene):
        scene.beats = {rank: beat._replace(every_s=None) for rank, beat in scene.beats.items()}
        scene.dead = {2}

        assert scene.look(times=2).gone() == {2: "died: process 2 on node (1) is gone"}

    def test_nobody_is_gone_at_first(self, scene):
        assert scene.look().gone() == {}

    def test_a_dead_process_is_gone_at_the_second_look(self, scene):
        scene.dead = {2}

        assert scene.look().gone() == {}
        assert scene.look().gone() == {
            2: "died: process 2 on node (1) is gone; last seen in backward, step 12, bucket 2 (it says so every 0.5 s)"
        }

    def test_who_died_without_a_word_is_named_before_those_who_ended_in_good_order(self, scene):
        scene.dead = {1, 2}
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
        scene.dead = {1}

        assert scene.look(times=9).gone() == {}
        assert list(scene.look().gone()) == [1]


class TestLeft:
    def test_ranks_that_left_are_named_whatever_they_launched(self, scene):
        scene.beat(1, has_left=True, num_launched=41)

        assert scene.look().gone() == {}
        assert scene.seen.left() == {
            1: "left: its program ended, its process group was destroyed, or its wrapper was detached, after 41 launches; this "
            "was launch 41"
        }


class TestFrozen:
    def test_a_rank_without_beats_is_frozen_after_the_time_and_not_before(self, scene):
        for _ in range(15):
            scene.beat(1)
            scene.look()

        assert list(scene.seen.silent(1.3)) == [2]  # seen first at 0.1 s, and now it is 1.5 s
        assert scene.seen.silent(1.5) == {}
        assert scene.seen.silent(1.3) == {
            2: "froze: no sign of life for 1.3 s; last seen in backward, step 12, bucket 2 (it says so every 0.5 s), "
            "on node (1)"
        }

    def test_a_rank_that_left_owes_no_beats(self, scene):
        scene.beat(1, has_left=True)
        scene.look(times=30)

        assert 1 not in scene.seen.silent(1.0)


class TestAbsent:
    def test_ranks_that_never_came_are_named(self, scene):
        del scene.beats[2]

        assert scene.look().absent() == {2: "went away or never came: it has given no sign of life"}


class TestLate:
    def test_ranks_that_have_not_launched_are_late_and_tell_what_they_do(self, scene):
        scene.beats[1] = scene.beats[1]._replace(num_launched=41)

        assert scene.look().late() == {2: "is alive but has not launched its part; it is in backward, step 12, bucket 2"}

    def test_a_rank_that_has_missed_two_beats_does_not_count_as_alive(self, scene):
        scene.look(times=10)  # seen first at 0.1 s; its beats come every 0.5 s
        assert scene.seen.late()[2].startswith("is alive")

        assert scene.look(times=2).late()[2] == (
            "has given no sign of life for 1.1 s and has not launched its part; last seen in backward, step 12, bucket 2 (it "
            "says so every 0.5 s)"
        )

    def test_a_rank_that_never_wrote_has_not_come(self, scene):
        del scene.beats[1]
        scene.beats[2] = scene.beats[2]._replace(num_launched=41)

        assert scene.look().late() == {1: "has given no sign of life: it has not wrapped its module yet"}

    def test_nothing_is_known_about_ranks_without_heartbeats(self, scene):
        scene.beats = {rank: beat._replace(every_s=None) for rank, beat in scene.beats.items()}

        assert scene.look().late() == {}
