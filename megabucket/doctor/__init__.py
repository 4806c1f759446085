"""The self-check: questions to the ranks of this run, one of them about gradients through the configured path.

Ten questions, and three more where the ranks are on several hosts.
``run_doctor`` asks and answers; ``megabucket doctor`` prints the report. Training needs nothing from here.
"""

from megabucket.doctor.report import DoctorReport, Line, Status
from megabucket.doctor.run import run_doctor

__all__ = ["DoctorReport", "Line", "Status", "run_doctor"]
