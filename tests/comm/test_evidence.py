"""What a blocked rank makes of signs of life and process states, moment by moment."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_signs import BEAT

from megabucket.comm.evidence import Evidence, Silence
from megabucket.comm.liveness import ProcessState
from megabucket.comm.liveness import View

RUNNING, STOPPED, DEAD, UNKNOWN = ProcessState.RUNNING, ProcessState.STOPPED, ProcessState.DEAD, ProcessState.UNKNOWN


class Scene:
    """Rank 0 of three waits for launch 41; the test says what it sees."""

    def __init__(self):
        self.now_s = 0.0
        self.states = {1: UNKNOWN, 2: UNKNOWN}
        self.beats = {rank: replace(BEAT, process=replace(BEAT.process, pid=rank)) for rank in (1, 2)}
        self.evidence = Evidence(number=41, rank=0, size=3, look_at=lambda who: self.states[who.pid], read_every_s=0.2)

    def beat(self, rank, **changes):
        self.beats[rank] = replace(self.beats[rank], count=self.beats[rank].count + 1, **changes)

    def look(self, times=1, after_s=0.1):
        for _ in range(times):
            self.now_s += after_s
            self.evidence.note(View(self.now_s, self.beats, None), self.now_s)
        return self.evidence


@pytest.fixture
def scene():
    return Scene()


class TestSilence:
    @given(st.lists(st.floats(0.01, 0.9), min_size=1, max_size=20))
    def test_it_is_the_time_since_the_sign_was_first_seen(self, gaps):
        silence, now_s = Silence(), 100.0
        silence.hear("a", now_s)
        for gap in gaps:
            now_s += gap
            silence.hear("a", now_s)

        assert silence.silent_s == pytest.approx(sum(gaps))

    def test_another_sign_ends_it(self):
        silence = Silence()
        for at_s, sign in enumerate(["a", "a", "b"]):
            silence.hear(sign, float(at_s))

        assert silence.silent_s == 0.0

    def test_a_gap_between_two_looks_counts_as_a_second_at_most(self):
        silence = Silence()
        silence.hear("a", 0.0)
        silence.hear("a", 3600.0)  # whoever looks was frozen itself

        assert silence.silent_s == 1.0


class TestGone:
    def test_nobody_is_gone_at_first(self, scene):
        assert not scene.look().is_somebody_gone
        assert scene.evidence.gone() == {}

    def test_a_dead_process_is_gone_at_the_second_look(self, scene):
        scene.states[2] = DEAD

        assert not scene.look().is_somebody_gone
        assert scene.look().is_somebody_gone
        assert scene.evidence.gone(in_detail=False) == {2: "died: process 2 on node (1) is gone"}
        assert scene.evidence.gone()[2].startswith(
            "died: process 2 on node (1) is gone; last seen in backward, step 12, bucket 2, "
        )

    def test_who_died_without_a_word_is_named_before_those_who_ended_in_good_order(self, scene):
        scene.states = {1: DEAD, 2: DEAD}
        scene.beat(1, has_left=True)

        assert list(scene.look().gone()) == [2]

    def test_a_rank_that_left_without_launching_is_gone_at_once(self, scene):
        scene.beat(1, has_left=True)

        assert scene.look().is_somebody_gone
        assert scene.evidence.gone() == {
            1: "left: its program ended, or its wrapper was detached, after 40 launches; this was launch 41"
        }

    def test_a_rank_that_left_after_launching_may_have_its_data_on_the_way(self, scene):
        scene.beat(1, has_left=True, num_launched=41)
        scene.states[1] = DEAD

        assert not scene.look(times=9).is_somebody_gone
        assert scene.look().is_somebody_gone
        assert list(scene.evidence.gone()) == [1]


class TestFrozen:
    def test_a_rank_without_beats_is_frozen_after_the_time_and_not_before(self, scene):
        for _ in range(15):
            scene.beat(1)
            scene.look()

        assert list(scene.evidence.frozen(1.3)) == [2]  # seen first at 0.1 s, and now it is 1.5 s
        assert scene.evidence.frozen(1.5) == {}
        assert scene.evidence.frozen(1.3, in_detail=False) == {2: "froze: no sign of life for 1.3 s"}

    def test_a_stopped_process_is_frozen_after_the_time_also_without_beats(self, scene):
        scene.beats = {rank: replace(beat, every_s=None) for rank, beat in scene.beats.items()}
        scene.look(times=10)
        scene.states[1] = STOPPED
        scene.look(times=6)

        assert scene.evidence.frozen(0.45) == {1: "froze: no sign of life for 0.45 s, its process is stopped"}
        assert scene.evidence.frozen(0.6) == {}

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

        assert 1 not in scene.evidence.frozen(1.0)


class TestVanished:
    def test_ranks_whose_beats_stopped_are_named(self, scene):
        for _ in range(12):
            scene.beat(1)
            scene.look()

        assert scene.evidence.vanished(1.0, in_detail=False) == {2: "went away: no sign of life for 1.0 s"}

    def test_otherwise_ranks_that_never_came(self, scene):
        del scene.beats[2]

        assert scene.look().vanished(1.0) == {2: "went away or never came: it has given no sign of life"}


class TestLate:
    def test_ranks_that_have_not_launched_are_late_and_tell_what_they_do(self, scene):
        scene.beats[1] = replace(scene.beats[1], num_launched=41)

        assert scene.look().late() == {2: "is alive but has not launched its part; it is in backward, step 12, bucket 2"}

    def test_a_rank_that_stays_in_one_place_is_said_to(self, scene):
        for _ in range(25):
            scene.beat(1)
            scene.beat(2, num_launched=41)
            scene.look()

        assert scene.evidence.late() == {
            1: "is alive but has not launched its part; it is in backward, step 12, bucket 2 (for 2.4 s)"
        }

    def test_a_stopped_process_is_late(self, scene):
        scene.states[2] = STOPPED
        scene.beats = {rank: replace(beat, num_launched=41) for rank, beat in scene.beats.items()}

        assert scene.look().late() == {2: "has not launched its part; its process is stopped"}

    def test_a_rank_that_never_wrote_has_not_come(self, scene):
        del scene.beats[1]
        scene.beats[2] = replace(scene.beats[2], num_launched=41)

        assert scene.look().late() == {1: "has given no sign of life: it has not wrapped its module yet"}

    def test_nothing_is_known_about_ranks_without_heartbeats(self, scene):
        scene.beats = {rank: replace(beat, every_s=None) for rank, beat in scene.beats.items()}

        assert scene.look().late() == {}


class TestAbsent:
    @pytest.mark.parametrize(
        ("state", "is_sure"), [(RUNNING, True), (STOPPED, False), (DEAD, False), (UNKNOWN, False)], ids=str
    )
    def test_who_never_came_must_be_the_lost_one_if_all_others_are_seen_to_run(self, scene, state, is_sure):
        del scene.beats[2]
        scene.states[1] = state

        assert scene.look().suspects_only_absent is is_sure
        assert scene.evidence.absent() == {2: "went away or never came: it has given no sign of life"}

    def test_nobody_is_suspected_when_all_came(self, scene):
        scene.states = {1: RUNNING, 2: RUNNING}

        assert not scene.look().suspects_only_absent
        assert scene.evidence.absent() == {}
