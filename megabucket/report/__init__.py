"""The report: figures of one config on one group, and the page, the JSON and the Chrome traces that show them. No torch.

``collect`` computes, ``write_report`` writes. The page draws these figures and computes none itself.
"""

from megabucket.report.chrome import chrome_trace, write_chrome_trace
from megabucket.report.collect import Report, collect
from megabucket.report.measured import Measured, read_measured
from megabucket.report.page import render_page, write_report
from megabucket.report.step_log import StepTraceLog, TensorBoardLog, step_figures

__all__ = [
    "Measured",
    "Report",
    "StepTraceLog",
    "TensorBoardLog",
    "chrome_trace",
    "collect",
    "read_measured",
    "render_page",
    "step_figures",
    "write_chrome_trace",
    "write_report",
]
