"""The self-check: ten questions to the ranks of this run, the last one about gradients through the configured path.

``run_doctor`` asks and answers; ``megabucket doctor`` prints the report. Training needs nothing from here.
"""

from megabucket.doctor.report import DoctorReport, Line, Status
from megabucket.doctor.run import run_doctor

__all__ = ["DoctorReport", "Line", "Status", "run_doctor"]
