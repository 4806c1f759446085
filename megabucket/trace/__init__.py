"""What steps did, as data: intervals, collectives, overlap, and a file that Perfetto opens. No torch."""

from megabucket.trace.chrome import chrome_trace, write_chrome_trace
from megabucket.trace.clock import Clock, DeviceClock, HostClock
from megabucket.trace.recorder import CollectiveKind, CollectiveRecord, Interval, Lane, Launch, Recorder
from megabucket.trace.step_log import StepTraceLog, TensorBoardLog, step_figures
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
    "StepTraceLog",
    "TensorBoardLog",
    "chrome_trace",
    "step_figures",
    "write_chrome_trace",
]
