"""The settings of liveness against the time limit of the group, and the words of the warning."""

import pickle

import pytest

from megabucket.comm import Liveness, StragglerWarning
from megabucket.errors import ConfigError


class TestOrder:
    def test_settings_that_are_in_order_stay_as_they_are(self):
        settings = Liveness(heartbeat_s=1.0, dead_after_s=30.0)

        assert settings.fitted_to(60.0) == settings
        assert settings.fitted_to(None) == settings

    def test_a_rank_must_not_count_as_dead_between_two_beats(self):
        with pytest.raises(ConfigError) as caught:
            Liveness(heartbeat_s=5.0, dead_after_s=10.0).fitted_to(60.0)

        assert str(caught.value) == (
            "dead_after_s=10 must be more than twice heartbeat_s=5: a rank whose last sign of life is one beat old is not dead"
        )

    @pytest.mark.parametrize("timeout_s", [20.0, 30.0])
    def test_a_group_that_gives_up_first_is_refused_with_both_numbers(self, timeout_s):
        with pytest.raises(ConfigError) as caught:
            Liveness(dead_after_s=30.0).fitted_to(timeout_s)

        assert str(caught.value) == (
            f"dead_after_s=30 must be less than the time limit of the process group, which is {timeout_s:g} s: otherwise the "
            "group gives up first, and nothing can say which rank froze. Lower dead_after_s, or pass a longer timeout= to "
            "init_process_group() or new_group()"
        )

    def test_defaults_give_way_to_a_group_with_a_short_time_limit(self):
        fitted = Liveness(is_default=True).fitted_to(4.0)

        assert (fitted.heartbeat_s, fitted.dead_after_s) == (0.5, 2.0)

    def test_defaults_without_heartbeats_give_way_too(self):
        fitted = Liveness(heartbeat_s=None, is_default=True).fitted_to(20.0)

        assert (fitted.heartbeat_s, fitted.dead_after_s) == (None, 10.0)

    def test_defaults_stay_where_there_is_room(self):
        assert Liveness(is_default=True).fitted_to(60.0) == Liveness(is_default=True)


class TestStragglerWarning:
    def test_it_names_at_most_five_ranks_and_what_they_do(self):
        warning = StragglerWarning(
            rank=0, waited_s=31.04, waiting_for="bucket 2 of step 12 (backward)", ranks=range(1, 8), states=["is late"] * 7
        )

        assert str(warning) == (
            "[rank 0] has waited 31 s for bucket 2 of step 12 (backward). rank 1 is late; rank 2 is late; rank 3 is late; rank "
            "4 is late; rank 5 is late. All ranks wait for ranks 1, 2, 3, 4, 5 and 2 more, slow or stuck. Look at its log or "
            "at its stack (py-spy dump). The wait goes on."
        )

    def test_it_says_when_nobody_is_known_to_be_late(self):
        warning = StragglerWarning(rank=1, waited_s=0.5, waiting_for="fence of step 3 (fence)", ranks=(), states=())

        assert "No rank is known to be late: the transfer itself may be slow, or heartbeats are off" in str(warning)

    def test_it_crosses_process_boundaries(self):
        warning = StragglerWarning(rank=1, waited_s=0.5, waiting_for="a fence", ranks=(0,), states=("is late",))

        restored = pickle.loads(pickle.dumps(warning))  # noqa: S301 - what was dumped in the same line

        assert (str(restored), restored.ranks, restored.states) == (str(warning), (0,), ("is late",))
