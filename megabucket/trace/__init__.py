"""What steps did, as data: intervals, collectives, and overlap. No torch."""

from megabucket.trace.clock import Clock, DeviceClock, HostClock
from megabucket.trace.recorder import CollectiveKind, CollectiveRecord, Interval, Lane, Launch, Recorder
from megabucket.trace.step_recorder import StepRecorder
from megabucket.trace.step_trace import LaunchTimes, StepTrace

__all__ = [
    "Clock",
    "CollectiveKind",
    "CollectiveRecord",
    "DeviceClock",
    "HostClock",
    "Interval",
    "Lane",
    "Launch",
    "LaunchTimes",
    "Recorder",
    "StepRecorder",
    "StepTrace",
]
