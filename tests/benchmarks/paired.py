"""Paired, interleaved timing: the machine is shared, so only ratios within one run mean something."""

import statistics
import time
from collections.abc import Callable, Mapping


def interleave(candidates: Mapping[str, Callable[[], float]], *, repetitions: int) -> dict[str, list[float]]:
    """Return seconds per candidate, measured in turn: A B C, A B C, ... Each callable returns the seconds it took."""
    seconds = {name: [] for name in candidates}
    for _ in range(repetitions):
        for name, candidate in candidates.items():
            seconds[name].append(candidate())
    return seconds


def timed(function: Callable[[], object]) -> Callable[[], float]:
    """Return a callable that runs ``function`` and returns the seconds it took."""

    def run() -> float:
        start_s = time.perf_counter()
        function()
        return time.perf_counter() - start_s

    return run


def ratio(seconds: Mapping[str, list[float]], numerator: str, denominator: str) -> tuple[float, float, float]:
    """Return the median of the pairwise ratios and their quartiles."""
    ratios = [a / b for a, b in zip(seconds[numerator], seconds[denominator], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return median, low, high
