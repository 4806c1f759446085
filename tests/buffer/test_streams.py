"""Gradients of one bucket that were stored on several streams: the launching stream waits for the others, and for no more."""

import pytest
import torch
from fake_device import Device

from megabucket.comm import Accelerator


def noted(*handles, launches_on):
    device = Device()
    streams = device.grad_streams()
    for device.current_stream_id in handles:
        streams.note()
    device.current_stream_id = launches_on
    streams.join()
    return device, streams


@pytest.mark.parametrize(
    ("handles", "launches_on", "waits_for"),
    [
        ((0, 0, 0), 0, []),
        ((), 0, []),
        ((1, 1), 0, [1]),
        ((0, 1, 0), 0, [1]),
        ((0, 1, 2, 1, 0), 2, [0, 1]),
        ((1, 2), 3, [1, 2]),
    ],
    ids=["one", "none", "all on another", "two in turn", "three", "launched on a fourth"],
)
def test_the_launching_stream_waits_once_for_each_other(handles, launches_on, waits_for):
    device, _ = noted(*handles, launches_on=launches_on)

    assert device.streams[launches_on].waited_for == waits_for
    assert all(not stream.waited_for for handle, stream in device.streams.items() if handle != launches_on)


def test_a_launch_forgets_what_it_has_waited_for():
    device, streams = noted(1, launches_on=0)

    streams.join()
    device.current_stream_id = 2
    streams.note()
    device.current_stream_id = 0
    streams.join()

    assert device.streams[0].waited_for == [1, 2]


def test_with_one_stream_no_stream_object_is_made_for_each_gradient():
    device, _ = noted(*[0] * 100, launches_on=0)

    assert device.num_streams_made == 1


def test_a_cpu_has_none():
    assert Accelerator.of(torch.device("cpu")) is None


def test_the_stream_of_the_last_gradient_can_be_gone_back_to():
    device = Device()
    streams = device.grad_streams()
    device.current_stream_id = 2
    streams.note()
    assert streams.is_here()

    device.current_stream_id = 1
    assert not streams.is_here()
    with streams.last():
        assert device.current_stream_id == 2
    assert device.current_stream_id == 1


def test_without_a_gradient_there_is_no_stream_to_go_back_to():
    device, streams = noted(launches_on=1)

    assert not streams.is_here()
    with streams.last():
        assert device.current_stream_id == 1


@pytest.mark.parametrize(("here", "waits_for"), [(1, [0, 2]), (2, [0])])
def test_the_current_stream_can_follow_the_others(here, waits_for):
    device = Device()
    streams = device.grad_streams()
    for device.current_stream_id in (0, 2):
        streams.note()
    device.current_stream_id = here

    streams.follow()
    assert device.streams[here].waited_for == waits_for

    device.current_stream_id = 3
    streams.join()
    assert device.streams[3].waited_for == [0, 2]
