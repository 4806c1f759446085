import struct
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megabucket.trace.clock import DeviceClock, HostClock


def rounded(value):
    """A float as float32 holds it, which is how a device tells elapsed milliseconds."""
    return struct.unpack("f", struct.pack("f", value))[0]


class Device:
    """A device that comes to its events ``lag_s`` after they were recorded, and whose own clock starts anywhere."""

    def __init__(self, lag_s=0.0):
        self.now_s, self.lag_s, self.num_waits = 0.0, lag_s, 0

    def event(self):
        return Event(self)


class Event:
    def __init__(self, device):
        self.device, self.reached_s = device, None

    def record(self):
        self.reached_s = self.device.now_s + self.device.lag_s

    def query(self):
        return self.reached_s <= self.device.now_s

    def synchronize(self):
        self.device.now_s = max(self.device.now_s, self.reached_s)
        self.device.num_waits += 1

    def elapsed_time(self, end_event):
        assert self.query()
        assert end_event.query()
        return rounded((end_event.reached_s - self.reached_s) * 1e3)


def test_the_host_knows_at_once_when_a_moment_was():
    clock = HostClock()

    first, second = clock.stamp(), clock.stamp()

    assert clock.seconds(first) == first <= clock.seconds(second)


def test_a_moment_of_a_device_is_known_when_the_device_has_come_there_and_nobody_waits_for_it():
    device = Device(lag_s=3.0)
    clock = DeviceClock(device.event)
    first = clock.stamp()
    device.now_s += 2.0
    second = clock.stamp()

    assert clock.seconds(first) is None
    device.now_s += 1.0
    at = clock.seconds(first)
    assert clock.seconds(second) is None
    device.now_s += 2.0
    assert abs(clock.seconds(second) - at - 2.0) < 1e-6
    assert device.num_waits == 1  # when the clock was made


def test_neighbours_are_told_apart_after_hours():
    device = Device()
    clock = DeviceClock(device.event)
    told_s = []

    for _ in range(5_000):
        device.now_s += 0.7123
        told_s.append(clock.seconds(clock.stamp()))

    # In float32 milliseconds counted from the start, an hour is known to a quarter of a millisecond.
    assert all(abs(later - earlier - 0.7123) < 1e-6 for earlier, later in pairwise(told_s))


@given(st.lists(st.floats(1e-4, 5.0), min_size=1, max_size=60))
def test_rounding_does_not_grow_with_the_age_of_the_clock(gaps_s):
    device = Device()
    clock = DeviceClock(device.event)
    origin_s, before_s = clock.seconds(clock.stamp()), device.now_s

    for gap_s in gaps_s * 20:
        device.now_s += gap_s
        told_s = clock.seconds(clock.stamp()) - origin_s
        # float32 milliseconds are exact to 3e-8 of the span, and spans over a second are not added to another one twice.
        assert abs(told_s - (device.now_s - before_s)) < 1e-7 * (device.now_s - before_s) + 1e-6
