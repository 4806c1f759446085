"""The self-check: ten questions to the ranks of this run, and whether gradients through the configured path are right.

``run_doctor`` asks and answers; ``megabucket doctor`` prints the report. Nothing here is needed to train.
"""

from megabucket.doctor.report import Line, Report, Verdict
from megabucket.doctor.run import run_doctor

__all__ = ["Line", "Report", "Verdict", "run_doctor"]
