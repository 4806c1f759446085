"""Steps as data: intervals, collectives, and overlap. No torch."""

from megabucket.trace.ranges import ProfilerRanges
from megabucket.trace.recorder import CollectiveKind, CollectiveRecord, Interval, Lane, Recorder
from megabucket.trace.step_recorder import StepRecorder
from megabucket.trace.step_trace import StepTrace

__all__ = [
    "CollectiveKind",
    "CollectiveRecord",
    "Interval",
    "Lane",
    "ProfilerRanges",
    "Recorder",
    "StepRecorder",
    "StepTrace",
]
