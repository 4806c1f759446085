import os
import signal
import threading

import pytest

from examples.bytegpt.signals import SAME_REQUEST_S, StopSignals


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def heard():
    """Handlers of the caller for both signals, which note what they get."""
    got = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda number, _: got.append(signal.Signals(number).name)) for number in numbers]
    yield got
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def signals_with(clock):
    asked = []
    return StopSignals(lambda: asked.append(clock.now_s), now_s=clock), asked


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_the_first_signal_is_a_wish_and_nothing_else(heard, name):
    signals, asked = signals_with(Clock())

    with signals.caught():
        os.kill(os.getpid(), signal.Signals[name])

    assert (signals.first.name, asked, heard) == (name, [100.0], [])


def test_the_same_request_sent_twice_is_one(heard):
    clock = Clock()
    signals, asked = signals_with(clock)

    with signals.caught():
        os.kill(os.getpid(), signal.SIGTERM)
        clock.now_s += SAME_REQUEST_S / 2
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    assert (signals.first, asked, heard) == (signal.SIGTERM, [100.0], [])


@pytest.mark.parametrize("second", ["SIGTERM", "SIGINT"])
def test_a_second_signal_does_what_it_did_before(heard, second):
    clock = Clock()
    signals, asked = signals_with(clock)

    with signals.caught():
        os.kill(os.getpid(), signal.SIGTERM)
        clock.now_s += SAME_REQUEST_S
        os.kill(os.getpid(), signal.Signals[second])

    assert (len(asked), heard) == (1, [second])


def test_afterwards_all_handlers_are_as_before(heard):
    signals, asked = signals_with(Clock())

    with signals.caught():
        pass
    os.kill(os.getpid(), signal.SIGTERM)

    assert (signals.first, asked, heard) == (None, [], ["SIGTERM"])


def test_a_signal_that_is_ignored_stays_ignored(heard):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals, asked = signals_with(Clock())

    with signals.caught():
        os.kill(os.getpid(), signal.SIGINT)

    assert (signals.first, asked) == (None, [])


def test_in_another_thread_nothing_is_caught(heard):
    signals, _ = signals_with(Clock())
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def play():
        with signals.caught():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=play)
    thread.start()
    thread.join()

    assert found == [before]
