"""What steps did, as data: intervals, collectives, overlap, and a file that Perfetto opens. No torch."""

from megabucket.trace.chrome import chrome_trace, write_chrome_trace
from megabucket.trace.recorder import (
    CollectiveKind,
    CollectiveRecord,
    Interval,
    Lane,
    ListRecorder,
    NullRecorder,
    Recorder,
)
from megabucket.trace.step_recorder import StepRecorder
from megabucket.trace.step_trace import StepTrace

__all__ = [
    "CollectiveKind",
    "CollectiveRecord",
    "Interval",
    "Lane",
    "ListRecorder",
    "NullRecorder",
    "Recorder",
    "StepRecorder",
    "StepTrace",
    "chrome_trace",
    "write_chrome_trace",
]
