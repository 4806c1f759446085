"""What to do about the buckets of a config, in one sentence: keep them, or set other ones. Pure arithmetic, no torch.

A plan is good enough within ``TOLERANCE`` of the best: a simulated step is no more accurate than that. A config that is good
enough stays. Otherwise the plan with the fewest buckets of those that are good enough is offered, not the single fastest one,
which is often a matter of luck.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from megabucket.units import format_seconds

TOLERANCE: Final = 0.01
"""Fraction of the best step; plans whose steps differ by less count as equally good."""

SIMULATED: Final = (
    "Simulated from the given link and times, not measured (megabucket tune measures). Where both were measured first, "
    "predictions were off by 1.2% in the median on an emulated link, by 7.1% on plain gloo."
)
"""How far a prediction can be trusted; the figures of docs/performance.md."""

DEFAULT_BUCKETS: Final = "the default buckets"
THIS_CONFIG: Final = "this config's buckets"
"""What a sentence calls the buckets of a config that does not size them, and of one that does."""

ONE_RANK: Final = "one rank sends nothing, so buckets make no difference; give --dp-size"
NO_LINK: Final = (
    "no link says what others would take; give link=h100-cluster-400g, or one from megabucket calibrate, and a workload"
)
NO_TIMES: Final = "the workload does not say when gradients become ready, so others cannot be compared"
"""Why nothing can be said about other plans."""

_TIE: Final = 1e-9
_MOST_LINES: Final = 24
_MOST_CHARS: Final = 5_000


@dataclass(frozen=True, slots=True)
class Choice:
    """A bucket plan that a config can ask for.

    Attributes:
        name: for a sentence.
        num_buckets: buckets that send anything.
        step_s: seconds of a step.
        ddp: fields of the ``ddp`` section that ask for it, ``None`` for one that has to go; nothing for the config as it is.
    """

    name: str
    num_buckets: int
    step_s: float
    ddp: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {"name": self.name, "num_buckets": self.num_buckets, "step_s": self.step_s, "ddp": dict(self.ddp)}


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do about the buckets of a config.

    Attributes:
        current: the config as it is.
        best: the plan with the shortest step.
        offered: the plan to take instead; ``None`` to keep the current one.
        num_plans: different plans that were compared.
        unknown: why plans cannot be compared; empty where they can.
    """

    current: Choice
    best: Choice
    offered: Choice | None
    num_plans: int
    unknown: str = ""

    @property
    def chosen(self) -> Choice:
        """The plan to train with."""
        return self.offered or self.current

    @property
    def saved_s(self) -> float:
        """Seconds of a step that the offered plan saves; 0 when the current one stays."""
        return self.current.step_s - self.chosen.step_s

    @property
    def above_best(self) -> float:
        """How much longer than the best the step with the chosen plan is, as a fraction of the best."""
        return self.chosen.step_s / self.best.step_s - 1 if self.best.step_s > 0 else 0.0

    @property
    def sentence(self) -> str:
        """What to do, and why."""
        name, step = self.current.name, format_seconds(self.current.step_s)
        if self.unknown:
            return f"Keep {name}: {self.unknown}."
        if self.offered is not None:
            return advise_change(self.current, self.offered, self.saved_s, "simulated")
        if self.num_plans == 1:
            return f"Keep {name}: every size gives the same buckets."
        if self.above_best <= _TIE:
            return f"Keep {name}: none of {self.num_plans} simulated plans takes less than its {step} a step."
        return (
            f"Keep {name}: its {step} a step are within {_up(self.above_best)} of the best of {self.num_plans} simulated plans."
        )

    @property
    def config_lines(self) -> tuple[str, ...]:
        """The offered plan as YAML to paste; nothing when the current one stays."""
        return config_lines(self.offered.ddp) if self.offered is not None else ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the best plan would save beyond the offered one, and how far to trust all of it."""
        if self.unknown:
            return ()
        if self.offered is None or self.above_best <= _TIE:
            return (SIMULATED,)
        best = (
            f"{self.num_plans} plans, with {counted_buckets(self.best.num_buckets)}, takes {format_seconds(self.best.step_s)}"
        )
        return (
            f"The best of {best}; the one offered is within {_up(self.above_best)} of it and has the fewest buckets.",
            SIMULATED,
        )

    @property
    def lines(self) -> tuple[str, ...]:
        """The sentence, the config values to paste, and the remarks."""
        return (self.sentence, *self.config_lines, *self.remarks)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON; without figures where plans cannot be compared."""
        what = {"sentence": self.sentence, "is_kept": self.offered is None, "unknown": self.unknown or None}
        if self.unknown:
            return what
        return {
            **what,
            "current": self.current.to_dict(),
            "best": self.best.to_dict(),
            "offered": self.offered and self.offered.to_dict(),
            "saved_s": self.saved_s,
            "above_best": self.above_best,
            "num_plans": self.num_plans,
        }


def unknown_advice(name: str, why: str) -> Advice:
    """Return the advice where plans cannot be compared: keep those of ``name``, because of ``why``."""
    current = Choice(name, 0, 0.0)
    return Advice(current, current, None, 0, why)


def advise(current: Choice, others: Sequence[Choice], *, num_plans: int) -> Advice:
    """Return what to do: keep the current plan if it is within ``TOLERANCE`` of the best, else take ``fewest_within``.

    Args:
        num_plans: different plans among all of them.
    """
    best = min((current, *others), key=lambda choice: (choice.step_s, choice.num_buckets))
    is_good = current.step_s <= best.step_s * (1 + TOLERANCE)
    return Advice(current, best, None if is_good else fewest_within(others), num_plans)


def fewest_within(choices: Sequence[Choice]) -> Choice:
    """Return the choice with the fewest buckets within ``TOLERANCE`` of the best.

    Of several a number rather than a list of names, then the shortest step, then the largest number.

    >>> steps = {"a": (9, 1.0), "b": (3, 1.009), "c": (2, 1.011)}
    >>> fewest_within([Choice(name, *numbers) for name, numbers in steps.items()]).name
    'b'
    """
    limit_s = min(choice.step_s for choice in choices) * (1 + TOLERANCE)
    near = [choice for choice in choices if choice.step_s <= limit_s]

    def effort(choice: Choice) -> tuple[float, ...]:
        return choice.num_buckets, "bucket_cuts" in choice.ddp, choice.step_s, -(choice.ddp.get("bucket_size") or 0)

    return min(near, key=effort)


def advise_change(current: Choice, offered: Choice, saved_s: float, how_known: str) -> str:
    """Return the sentence that offers a plan.

    Args:
        saved_s: seconds of a step that it saves.
        how_known: where this comes from, for example ``simulated``.
    """
    change = f"{offered.name} ({counted_buckets(offered.num_buckets)}) instead of {current.name} ({current.num_buckets:,})"
    saved = f"{format_seconds(saved_s)} of {format_seconds(current.step_s)} a step ({saved_s / current.step_s:.2%})"
    return f"Use {change}: saves {saved}, {how_known}."


def config_lines(ddp: Mapping[str, Any]) -> tuple[str, ...]:
    """Return fields of the ``ddp`` section as YAML that can be pasted into a config; where they are many, where they are.

    >>> config_lines({"bucket_cap_mb": None, "bucket_size": 64_000_000})
    ('ddp:', '  bucket_cap_mb: null', '  bucket_size: 64000000')
    """
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in ddp.items()}
    # What is not ASCII is escaped, so that no name changes what a terminal shows.
    lines = yaml.safe_dump({"ddp": values}, sort_keys=False, width=math.inf).splitlines()
    if len(lines) > _MOST_LINES or sum(map(len, lines)) > _MOST_CHARS:
        return (f"  (ddp has {len(lines) - 1} lines: --json prints them, under advice.offered.ddp)",)
    return tuple(lines)


def counted_buckets(count: int) -> str:
    """Return a number of buckets in words.

    >>> counted_buckets(1), counted_buckets(2)
    ('1 bucket', '2 buckets')
    """
    return f"{count:,} bucket{'' if count == 1 else 's'}"


def _up(fraction: float) -> str:
    """Return a fraction in percent, rounded up, so that what is said to be within it is.

    >>> _up(0.00312), _up(0.0)
    ('0.32%', '0.00%')
    """
    return f"{math.ceil(fraction * 1e4 - _TIE) / 1e4:.2%}"
