"""What steps did, as data: intervals, collectives, and overlap. No torch."""

from importlib import import_module
from typing import Any

from megabucket.trace.clock import Clock, DeviceClock, HostClock
from megabucket.trace.recorder import CollectiveKind, CollectiveRecord, Interval, Lane, Launch, Recorder
from megabucket.trace.step_recorder import StepRecorder
from megabucket.trace.step_trace import LaunchTimes, StepTrace

_FILES = {
    "StepTraceLog": "step_log",
    "TensorBoardLog": "step_log",
    "chrome_trace": "chrome",
    "step_figures": "step_log",
    "write_chrome_trace": "chrome",
}
"""What writes traces to files and dashboards: public here, a part of the report, and loaded when it is asked for."""

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
    if name in _FILES:
        return getattr(import_module(f"megabucket.report.{_FILES[name]}"), name)
    raise AttributeError(f"module 'megabucket.trace' has no attribute {name!r}")
