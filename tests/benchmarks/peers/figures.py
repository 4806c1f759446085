"""From samples of ranks to figures: medians, quartiles, paired ratios, and whether all systems computed the same. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

PARTS = ("forward", "backward", "sync", "optimizer")
TIMES_TOLERANCE = 10
"""How many times the tolerance the system without synchronization must be off; else equal losses would say nothing."""


class LossesDifferError(RuntimeError):
    """Systems that should compute the same do not, or the run cannot tell."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the quartiles and the 10th percentile, as an undisturbed machine would have it.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'low': 1.5, 'high': 2.5, 'quiet': 1.2}
    """
    return {
        "median": statistics.median(values),
        "low": quantile(values, 0.25),
        "high": quantile(values, 0.75),
        "quiet": quantile(values, 0.1),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which that share lies, between neighbours on a line; of a single value that value."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return round(ordered[low] + (place - low) * (ordered[high] - ordered[low]), 12)


def paired(theirs: Sequence[float], own: Sequence[float]) -> dict[str, float]:
    """Return the spread of their times over ours, step by step: above 1 we are faster."""
    return spread([their / mine for their, mine in zip(theirs, own, strict=True)])


def over_bound(steps_s: Sequence[float], bounds_s: Sequence[float]) -> dict[str, float]:
    """Return the spread of steps over a lower bound: that of the bare step of the same turn. ``quiet``: both quiet.

    >>> over_bound([4.0, 6.0, 5.5], [2.0, 4.0, 5.0])
    {'median': 1.5, 'low': 1.3, 'high': 1.75, 'quiet': 1.791666666667}

    Args:
        bounds_s: as many as steps, or one for all of them.
    """
    of_steps = bounds_s if len(bounds_s) > 1 else list(bounds_s) * len(steps_s)
    quiet = quantile(steps_s, 0.1) / quantile(bounds_s, 0.1)
    return {**paired(steps_s, of_steps), "quiet": round(quiet, 12)}


def slowest_steps(of_ranks: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return seconds of each step on the rank that took longest."""
    return [max(map(sum, parts)) for parts in zip(*(samples["parts_s"] for samples in of_ranks), strict=True)]


def system_figures(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of one system in one cell: CPU time, faults and parts are means over the ranks."""
    steps = slowest_steps(of_ranks)
    wire = [samples["turn_wire_bytes"] for samples in of_ranks]
    return {
        "steps_s": steps,
        "step_s": spread(steps),
        "parts_s": {
            part: statistics.fmean(statistics.median(step[index] for step in samples["parts_s"]) for samples in of_ranks)
            for index, part in enumerate(PARTS)
        },
        "cpu_s": spread(_means(of_ranks, "turn_cpu_s")),
        "faults": spread(_means(of_ranks, "turn_faults")),
        "wire_bytes": spread([max(turn) for turn in zip(*wire, strict=True)]) if all(wire) else None,
        "first_loss": of_ranks[0]["losses"][0],
        "last_loss": of_ranks[0]["losses"][-1],
    }


def _means(of_ranks: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [statistics.fmean(turn) for turn in zip(*(samples[name] for samples in of_ranks), strict=True)]


def with_ratios(systems: Mapping[str, dict[str, Any]], peers: Sequence[str]) -> dict[str, Any]:
    """Return the best peer, and each system's figures with ratios to torch DDP and to that peer."""
    running = [name for name in peers if name in systems]
    best = min(running, key=lambda name: systems[name]["step_s"]["median"], default=None)
    for figures in systems.values():
        for field, other in (("to_ddp", "ddp"), ("to_best", best)):
            found = systems.get(other) if other else None
            figures[field] = None if found is None else paired(found["steps_s"], figures["steps_s"])
    return {"best_peer": best, "systems": dict(systems)}


def extra_us(own: Sequence[Sequence[float]], bare: Sequence[Sequence[float]], num_params: int) -> dict[str, float]:
    """Return microseconds per parameter of backward beyond the bare one, as medians and quartiles of paired differences.

    ``cpu`` is the median for CPU time, which other programs disturb less than the clock.

    Args:
        own: seconds of each turn, by the clock and of CPU time.
        bare: the same of the bare model.
    """
    by_clock, of_cpu = (
        [(with_hooks[which] - without[which]) / num_params * 1e6 for with_hooks, without in zip(own, bare, strict=True)]
        for which in range(2)
    )
    return {**spread(by_clock), "cpu": statistics.median(of_cpu)}


def loss_differences(samples: Mapping[str, Sequence[Mapping[str, Any]]], reference: str) -> dict[str, float]:
    """Return the largest relative difference of a rank's loss from the reference's, by system; infinite for a nan."""
    differences = {}
    for name, of_ranks in samples.items():
        pairs = [
            pair
            for own, theirs in zip(of_ranks, samples[reference], strict=True)
            for pair in zip(own["losses"], theirs["losses"], strict=True)
        ]
        apart = [abs(own - theirs) / abs(theirs) for own, theirs in pairs]
        differences[name] = max((value if math.isfinite(value) else math.inf for value in apart), default=math.inf)
    return differences


def check_losses(differences: Mapping[str, float], *, limit: str, tolerance: float, ranks: int) -> None:
    """Fail when a system is off, or when the one without synchronization is not: then the check could not see a fault.

    Raises:
        LossesDifferError: one of both.
    """
    off = {name: value for name, value in differences.items() if name != limit and not value <= tolerance}
    if off:
        listed = ", ".join(f"{name} by {value:.2g}" for name, value in off.items())
        raise LossesDifferError(f"losses differ from torch DDP's by more than {tolerance:g} (relative): {listed}")
    if ranks > 1 and differences.get(limit, math.inf) <= TIMES_TOLERANCE * tolerance:
        raise LossesDifferError(
            f"without synchronization losses differ by {differences[limit]:.2g} only, so a difference of {tolerance:g} between "
            "systems that synchronize would say nothing; take more steps or lower --tolerance"
        )
