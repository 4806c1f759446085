"""The settings of liveness against the time limit of the group."""

import pytest

from megabucket.comm import Liveness
from megabucket.errors import ConfigError


class TestOrder:
    def test_settings_that_are_in_order_stay_as_they_are(self):
        settings = Liveness(heartbeat_s=1.0, dead_after_s=30.0)

        assert settings.fitted_to(60.0) == settings

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
