"""Makes the benchmark's package importable: it is no part of megabucket."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
