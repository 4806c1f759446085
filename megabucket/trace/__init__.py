"""What steps did, as data: intervals, collectives, overlap, and a file that Perfetto opens. No torch."""

from megabucket.trace.chrome import chrome_trace, write_chrome_trace
from megabucket.trace.clock import Clock, DeviceClock, HostClock
from megabucket.trace.launches import LaunchTimes
from megabucket.trace.online import OnlineRecorder
from megabucket.trace.recorder import (
    CollectiveKind,
    CollectiveRecord,
    Interval,
    Lane,
    ListRecorder,
    NullRecorder,
    Recorder,
    TeeRecorder,
)
from megabucket.trace.step_log import StepTraceLog, TensorBoardLog, step_figures
from megabucket.trace.step_recorder import StepRecorder
from megabucket.trace.step_trace import StepTrace

__all__ = [
    "Clock",
    "CollectiveKind",
    "CollectiveRecord",
    "DeviceClock",
    "HostClock",
    "Interval",
    "Lane",
    "LaunchTimes",
    "ListRecorder",
    "NullRecorder",
    "OnlineRecorder",
    "Recorder",
    "StepRecorder",
    "StepTrace",
    "StepTraceLog",
    "TeeRecorder",
    "TensorBoardLog",
    "chrome_trace",
    "step_figures",
    "write_chrome_trace",
]
