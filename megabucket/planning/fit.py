"""A straight line through measured collectives: latency and seconds per byte. Pure arithmetic, no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megabucket.planning.links import Point, check_points


@dataclass(frozen=True, slots=True)
class AffineFit:
    """``seconds = latency_s + seconds_per_byte * payload_bytes``, and how far the points are from it."""

    latency_s: float
    seconds_per_byte: float
    residual: float
    """Median of ``|fitted - measured| / measured`` over the points."""

    def seconds(self, payload_bytes: float) -> float:
        """Return the fitted seconds."""
        return self.latency_s + self.seconds_per_byte * payload_bytes


def fit_affine(points: Sequence[Point]) -> AffineFit:
    """Return the line with the least squared relative error, its latency and its slope not negative.

    Relative, because the points span orders of magnitude: with absolute errors the largest size alone would decide, and the
    latency would be noise.

    Raises:
        ConfigError: no table of at least two points with increasing sizes.

    >>> fit_affine([(0, 1e-3), (1000, 2e-3), (3000, 4e-3)])
    AffineFit(latency_s=0.001, seconds_per_byte=1e-06, residual=0.0)
    """
    points = tuple((float(size), float(seconds)) for size, seconds in points)
    check_points(points, what="a table to fit")
    timed = [(size, seconds) for size, seconds in points if seconds > 0]
    if not timed:
        return AffineFit(0.0, 0.0, 0.0)
    candidates = [(0.0, _ratio(timed)), (_constant(timed), 0.0)]
    line = _line(timed)
    if line is not None and min(line) >= 0:
        candidates.append(line)
    # The sum of squares is convex, so with a bound that binds the optimum lies on that bound.
    latency_s, slope = min(candidates, key=lambda pair: _squared_error(timed, *pair))
    errors = [abs(latency_s + slope * size - seconds) / seconds for size, seconds in timed]
    return AffineFit(latency_s, slope, statistics.median(errors))


def _squared_error(timed: Sequence[Point], latency_s: float, slope: float) -> float:
    return sum(((latency_s + slope * size) / seconds - 1) ** 2 for size, seconds in timed)


def _line(timed: Sequence[Point]) -> Point | None:
    """Return the unconstrained optimum: the normal equations of ``a / t + b * s / t = 1``."""
    aa = sum(1 / t**2 for _, t in timed)
    ab = sum(s / t**2 for s, t in timed)
    bb = sum((s / t) ** 2 for s, t in timed)
    a1, b1 = sum(1 / t for _, t in timed), sum(s / t for s, t in timed)
    determinant = aa * bb - ab * ab
    if determinant <= 0:
        return None
    return (a1 * bb - b1 * ab) / determinant, (aa * b1 - ab * a1) / determinant


def _ratio(timed: Sequence[Point]) -> float:
    """Return the best slope without latency."""
    squares = sum((s / t) ** 2 for s, t in timed)
    return sum(s / t for s, t in timed) / squares if squares else 0.0


def _constant(timed: Sequence[Point]) -> float:
    """Return the best latency without slope."""
    return sum(1 / t for _, t in timed) / sum(1 / t**2 for _, t in timed)
