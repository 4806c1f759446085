"""What ``megabucket tune`` tries and how it decides: candidate plans by predicted time, and a rule for paired measurements.

Pure arithmetic, no torch; ``megabucket.measure.tune`` measures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.errors import ConfigError
from megabucket.layout import ParamSpec
from megabucket.planning.advice import TOLERANCE, Choice, fewest_within
from megabucket.planning.cuts import plan_of_layout
from megabucket.planning.links import Link
from megabucket.planning.setting import SIZE_FIELDS, Setting
from megabucket.planning.simulate import HostCosts, Mode
from megabucket.planning.workload import Workload

DEFAULT: Final = "default"
"""The name of the config as it was given."""

_SMALLEST_NUMEL: Final = 2**14
_SIZES_PER_OCTAVE: Final = 2
_NUM_BUCKETS: Final = (2, 3, 4, 6, 8, 12, 16, 24, 32)
_SWITCHES: Final = ("overlap_grad_reduce", "overlap_param_gather")
_CONFIDENCE: Final = 0.95


@dataclass(frozen=True)
class Measured:
    """What was measured before the search, for one mode.

    Attributes:
        workload: as profiled; ``optimizer_s`` is the time of one rank in this mode.
        host: the costs of the host in a step.
    """

    workload: Workload
    host: HostCosts


@dataclass(frozen=True)
class Candidate:
    """A ``ddp`` section that could be run, and what its step is predicted to take."""

    name: str
    ddp: DistributedDataParallelConfig
    num_buckets: int
    predicted_s: float

    @property
    def mode(self) -> Mode:
        """How gradients travel."""
        return Mode.of(self.ddp)

    @property
    def size(self) -> dict[str, Any]:
        """The fields of ``ddp`` that say where buckets end."""
        return self.ddp.model_dump(mode="json", include=set(SIZE_FIELDS), exclude_none=True)


def in_mode(ddp: DistributedDataParallelConfig, mode: Mode) -> DistributedDataParallelConfig:
    """Return the config in a mode, with everything overlapped that can be."""
    is_sharded = mode is Mode.REDUCE_SCATTER
    return ddp.model_copy(
        update={
            "use_distributed_optimizer": is_sharded,
            "overlap_grad_reduce": True,
            "overlap_param_gather": is_sharded,
            "bucket_groups": "per_bucket",
        }
    )


def find_candidates(
    specs: Sequence[ParamSpec],
    default: DistributedDataParallelConfig,
    measured: Mapping[Mode, Measured],
    link: Link,
    *,
    num_ranks: int,
) -> tuple[Candidate, ...]:
    """Return the default and all other plans to consider, the shortest predicted step first.

    Uniform sizes on a logarithmic grid, numbers of buckets, the library's own default, the optimal cuts and the fewest within
    1 % of them, each in the layout's order and, where another one was measured, in the order in which gradients became ready.
    Plans that cut alike come once.

    Args:
        specs: trainable parameters in registration order.
        default: the config as given; its mode is among those measured.
        measured: by mode that may be used.

    Raises:
        ConfigError: the workload is of another model, or the link does not know the cost of a collective.
    """

    def setting(ddp: DistributedDataParallelConfig) -> Setting:
        known = measured[Mode.of(ddp)]
        return Setting(known.workload, link, ddp, num_ranks, tuple(specs), host=known.host)

    found: dict[tuple[object, ...], Candidate] = {}

    def add(name: str, there: Setting) -> None:
        layout = there.layout
        rest = there.ddp.model_dump(exclude={*SIZE_FIELDS, "bucket_order"})
        if (identity := (layout.fingerprint, *rest.values())) not in found:
            plan = plan_of_layout(there.workload, layout)
            found[identity] = Candidate(name, there.ddp, len(plan.buckets), there.step_s(plan))

    add(DEFAULT, setting(default))
    for mode in measured:
        base = setting(in_mode(default, mode).model_copy(update=dict.fromkeys((*SIZE_FIELDS, "bucket_order"))))
        before = f"{mode.value}, " if len(measured) > 1 else ""
        switched = (name for name in _SWITCHES if getattr(base.ddp, name) and not getattr(default, name))
        after = "".join(f", {name}=True" for name in switched)
        for name, update in _updates(base):
            add(f"{before}{name}{after}", setting(base.ddp.model_copy(update=update)))
    return tuple(sorted(found.values(), key=lambda candidate: (candidate.predicted_s, candidate.name)))


def pick(candidates: Sequence[Candidate], how_many: int) -> tuple[Candidate, ...]:
    """Return those to run: the default, and of the others the best predicted ones.

    One of these is the one with the fewest buckets of those that are predicted to be within 1 % of the best.

    Raises:
        ConfigError: fewer than one besides the default is asked for.
    """
    if how_many < 1:
        raise ConfigError(f"--candidates={how_many} leaves nothing to compare with the default; give 1 or more")
    default = [candidate for candidate in candidates if candidate.name == DEFAULT]
    others = {candidate.name: candidate for candidate in candidates if candidate.name != DEFAULT}
    if not others:
        return tuple(default)
    choices = [Choice(name, each.num_buckets, each.predicted_s, each.size) for name, each in others.items()]
    few = others.pop(fewest_within(choices).name)
    return (*default, few, *sorted(others.values(), key=lambda candidate: candidate.predicted_s)[: how_many - 1])


def _updates(base: Setting) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the fields of ``ddp`` that make each candidate, by name."""
    tensors, order = base.workload.tensors, base.workload.order
    yield "library default", {}
    orders: list[tuple[str, dict[str, Any]]] = [("", {})]
    if order != tuple(reversed(range(len(tensors)))) and base.ddp.layout == "stable":
        orders.append((" in ready order", {"bucket_order": tuple(tensors[index].name for index in order)}))
    for suffix, ordering in orders:
        ordered = replace(base, ddp=base.ddp.model_copy(update=ordering))
        yield f"optimal cuts{suffix}", {"bucket_cuts": ordered.optimal_cuts, **ordering}
        yield f"fewest cuts{suffix}", {"bucket_cuts": ordered.fewest_cuts, **ordering}
        for numel in size_grid(base.workload.numel):
            yield f"bucket_size {numel}{suffix}", {"bucket_size": numel, **ordering}
        for count in _NUM_BUCKETS:
            if count <= len(tensors):
                yield f"num_buckets {count}{suffix}", {"num_buckets": count, **ordering}


def size_grid(total_numel: int) -> tuple[int, ...]:
    """Return bucket sizes on a logarithmic grid, in elements, all of them less than the whole.

    >>> size_grid(60_000)
    (16384, 23170, 32768, 46341)
    """
    if total_numel <= _SMALLEST_NUMEL:
        return ()
    count = math.ceil(_SIZES_PER_OCTAVE * math.log2(total_numel / _SMALLEST_NUMEL))
    sizes = (round(_SMALLEST_NUMEL * 2 ** (step / _SIZES_PER_OCTAVE)) for step in range(count))
    return tuple(size for size in sizes if size < total_numel)  # the last one may be rounded up to the whole


# The decision #


@dataclass(frozen=True, slots=True)
class Comparison:
    """One candidate against the default, over rounds in which both were run.

    Attributes:
        gain: median over the rounds of ``default / candidate - 1``: 0.1 is ten percent more steps in the same time.
        low, high: an interval that holds the true median with the asked-for confidence, over all candidates together.
        noise: distance from the median to the lower end of the interval, or of all rounds where these are too few for one.
        num_faster: rounds in which the candidate was faster.
        num_rounds: rounds.
        p_value: how likely so many faster rounds, or more, are when there is no difference (sign test, one-sided).
    """

    name: str
    gain: float
    low: float
    high: float
    noise: float
    num_faster: int
    num_rounds: int
    p_value: float

    @property
    def saved_fraction(self) -> float:
        """The gain as a fraction of the default's step that is saved."""
        return saved_fraction(self.gain)

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.low > 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What to recommend: ``choice`` is the default where nothing is better beyond noise."""

    choice: str
    comparisons: tuple[Comparison, ...]
    min_gain: float
    num_rounds: int
    num_rounds_needed: int
    """Fewest rounds that can be significant."""

    @property
    def is_default(self) -> bool:
        """Whether everything stays as it is."""
        return self.choice == DEFAULT

    @property
    def is_undecided(self) -> bool:
        """Whether there were candidates, and too few rounds to prefer one of them."""
        return bool(self.comparisons) and self.num_rounds < self.num_rounds_needed

    @property
    def visible_gain(self) -> float | None:
        """Smallest detectable gain; with too few rounds a lower bound."""
        if self.num_rounds < 2 or not self.comparisons:
            return None
        return max(self.min_gain, *(each.noise for each in self.comparisons))

    @property
    def chosen(self) -> Comparison | None:
        """The comparison of the choice; ``None`` for the default."""
        return next((each for each in self.comparisons if each.name == self.choice), None)


def decide(
    seconds: Mapping[str, Sequence[float]],
    num_buckets: Mapping[str, int] | None = None,
    *,
    min_gain: float = 0.01,
    confidence: float = _CONFIDENCE,
) -> Decision:
    """Return the default, or the candidate with the fewest buckets of those that are faster beyond noise and among the best.

    Among the best: its median gain over the default is that of a step within 1 % of the one with the largest gain.

    Beyond noise: the distribution-free interval for the median of the paired ratios (order statistics, the inverse of the sign
    test) lies above 0, with the error shared out among the candidates (Bonferroni), and the gain is ``min_gain`` or more.

    Args:
        seconds: by candidate, one number for each round; rounds are paired by position. One of them is the default.
        num_buckets: by candidate; ``None`` takes the largest gain.

    Raises:
        ConfigError: no rounds.
        ValueError: different numbers of them.
    """
    default_s = seconds[DEFAULT]
    if not default_s:
        raise ConfigError("no round was measured, so there is nothing to compare; allow more time")
    others = [name for name in seconds if name != DEFAULT]
    error = (1 - confidence) / max(len(others), 1)
    comparisons = tuple(_compare(name, default_s, seconds[name], error=error) for name in others)
    better = [each for each in comparisons if each.is_beyond_noise and each.gain >= min_gain]
    least = (1 + max((each.gain for each in better), default=0.0)) / (1 + TOLERANCE)  # of default / candidate
    near = [each for each in better if 1 + each.gain >= least] if num_buckets is not None else better
    best = min(near, key=lambda each: ((num_buckets or {}).get(each.name, 0), -each.gain), default=None)
    needed = math.ceil(math.log2(2 / error))  # where faster in all of n rounds is beyond noise: 2**-n <= error / 2
    return Decision(DEFAULT if best is None else best.name, comparisons, min_gain, len(default_s), needed)


def saved_fraction(gain: float) -> float:
    """Return which fraction of the default's step a gain saves; infinite gain saves all of it.

    >>> saved_fraction(1.0), saved_fraction(3.0), saved_fraction(math.inf)
    (0.5, 0.75, 1.0)
    """
    return 1 - 1 / (1 + gain) if gain > -1 else -math.inf


def sign_test(num_faster: int, num_rounds: int) -> float:
    """Return the probability of ``num_faster`` or more heads in ``num_rounds`` throws of a coin.

    >>> sign_test(5, 5), sign_test(0, 5)
    (0.03125, 1.0)
    """
    return float(sum(math.comb(num_rounds, count) for count in range(num_faster, num_rounds + 1)) / 2**num_rounds)


def _compare(name: str, default_s: Sequence[float], own_s: Sequence[float], *, error: float) -> Comparison:
    ratios = sorted(before / after for before, after in zip(default_s, own_s, strict=True))
    count = len(ratios)
    # The k-th smallest of n is above the true median with the probability of at most k - 1 heads in n throws: each side may
    # err half. With too few rounds for any such k the interval is everything.
    skipped = 0
    while skipped < count // 2 and sign_test(count - skipped, count) <= error / 2:
        skipped += 1
    low, high = (ratios[skipped - 1] - 1, ratios[count - skipped] - 1) if skipped else (-1.0, math.inf)
    num_faster, median = sum(ratio > 1 for ratio in ratios), statistics.median(ratios)
    noise = median - ratios[max(skipped - 1, 0)]
    return Comparison(name, median - 1, low, high, noise, num_faster, count, sign_test(num_faster, count))
