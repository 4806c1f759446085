"""What steps did, as data: intervals, collectives, overlap, and a file that Perfetto opens. No torch."""

from importlib import import_module
from typing import Any

from megabucket.trace.chrome import chrome_trace, write_chrome_trace
from megabucket.trace.clock import Clock, DeviceClock, HostClock
from megabucket.trace.recorder import CollectiveKind, CollectiveRecord, Interval, Lane, Launch, Recorder
from megabucket.trace.step_recorder import StepRecorder
from megabucket.trace.step_trace import LaunchTimes, StepTrace

_LOGS = ("StepTraceLog", "TensorBoardLog", "step_figures")
"""What writes traces to files and dashboards: public here, part of the report, and loaded when asked for."""

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
    "StepTraceLog",
    "TensorBoardLog",
    "chrome_trace",
    "step_figures",
    "write_chrome_trace",
]


def __getattr__(name: str) -> Any:
    if name in _LOGS:
        return getattr(import_module("megabucket.report.step_log"), name)
    raise AttributeError(f"module 'megabucket.trace' has no attribute {name!r}")
