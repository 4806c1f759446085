"""One question: ask it on every rank, exchange what each rank saw, and judge all of it in one pure function.

An exception while asking is what that rank saw. Judging happens on every rank with the same facts, so all reports are equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from megabucket.comm import Communicator
from megabucket.doctor.group_answers import GroupProbes
from megabucket.doctor.report import Line, Verdict
from megabucket.errors import rank_list

Fact: TypeAlias = "dict[str, Any]"
"""What one rank saw, ready for JSON."""

_ERROR_CHARS: Final = 300
_DIGITS: Final = re.compile(r"\d+")  # ranks, ports and the like, which differ where the refusal is the same


@dataclass(frozen=True, slots=True)
class Bench:
    """What a question is asked on."""

    communicator: Communicator
    """To try things on; not the one that facts travel over, where there can be two."""
    device: torch.device
    group: GroupProbes | None
    """The process group behind the communicator, if there is one."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the facts of all ranks come to."""

    verdict: Verdict
    answer: str
    meaning: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Probe:
    """One question."""

    section: str
    name: str
    observe: Callable[[Bench], Fact]
    """Ask on this rank. All ranks launch the same collectives; it may raise."""
    judge: Callable[[Sequence[Fact]], Judgement]
    refusal: str
    """What it means that the back-end refuses."""
    is_required: bool = True
    """Whether a refusal is a finding."""
    needs_group: bool = False
    needs_peers: bool = False


def ask(probe: Probe, bench: Bench) -> Fact:
    """Return what this rank sees; an exception becomes the key ``raised``."""
    try:
        return probe.observe(bench)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0][:_ERROR_CHARS]
        return {"raised": f"{type(error).__name__}: {first_line}"}


def has_failed(facts: Sequence[Fact]) -> bool:
    """Whether the question raised on some rank, which may have left its group unusable."""
    return any("raised" in fact for fact in facts)


def conclude(probe: Probe, facts: Sequence[Fact]) -> Line:
    """Return the line of the report for the facts of all ranks."""
    failed = tuple(rank for rank, fact in enumerate(facts) if "raised" in fact)
    if not failed:
        found = probe.judge(facts)
    elif len({_DIGITS.sub("", fact.get("raised", "")) for fact in facts}) == 1:
        verdict = Verdict.FINDING if probe.is_required else Verdict.NOTE
        found = Judgement(verdict, f"refused: {by_rank([fact['raised'] for fact in facts])}", probe.refusal)
    else:
        texts = by_rank([fact.get("raised", "works") for fact in facts])
        meaning = "the ranks do not have the same back-end, or lost each other: this operation would hang or fail in training"
        found = Judgement(Verdict.FINDING, texts, meaning, failed)
    return Line(probe.section, probe.name, found.verdict, found.answer, found.meaning, found.ranks)


def not_tried(probe: Probe, reason: str) -> Line:
    """Return the line of a question that was not asked."""
    return Line(probe.section, probe.name, Verdict.NOT_TRIED, "not tried", reason)


def by_rank(texts: Sequence[str | None]) -> str:
    """Return equal texts once, with the ranks that have them; ``None`` is left out.

    >>> by_rank(["yes", "yes"]), by_rank(["yes", "no"]), by_rank([None, "no"])
    ('yes', 'yes on rank 0; no on rank 1', 'no on rank 1')
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            ranks_of.setdefault(text, []).append(rank)
    return "; ".join(text if len(ranks) == len(texts) else f"{text} on {rank_list(ranks)}" for text, ranks in ranks_of.items())


def odd_ones_out(values: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the ranks whose value is not the most frequent one; of equally frequent ones the first rank's counts.

    >>> odd_ones_out(["a", "b", "a"])
    (1,)
    """
    usual = max(dict.fromkeys(values), key=list(values).count)
    return tuple(rank for rank, value in enumerate(values) if value != usual)


def wrong_ranks(facts: Sequence[Fact], key: str = "is_right") -> tuple[int, ...]:
    """Return the ranks whose fact says no."""
    return tuple(rank for rank, fact in enumerate(facts) if not fact[key])


def right_or(
    meaning: str, *, wrong: str, otherwise: Verdict = Verdict.FINDING, answer: str = "yes"
) -> Callable[[Sequence[Fact]], Judgement]:
    """Return a judge of facts that hold ``is_right``.

    Where they know more they hold ``problem`` in words, ``culprits``, the ranks it is about, and ``is_partial`` when each rank
    sees a part of its own, so that seeing nothing wrong means little.

    Args:
        meaning: of the answer yes.
        wrong: what it means when a rank says no.
        otherwise: the verdict then.
        answer: when all ranks say yes.
    """

    def judge(facts: Sequence[Fact]) -> Judgement:
        seen_by = wrong_ranks(facts)
        if not seen_by:
            return Judgement(Verdict.HOLDS, answer, meaning)
        text = by_rank([None if fact["is_right"] else fact.get("problem") or "wrong result" for fact in facts])
        culprits = tuple(sorted({rank for fact in facts for rank in fact.get("culprits", ())}))
        # What only some ranks see went wrong at them; what all see is the fault of those it is about.
        is_everywhere = len(seen_by) == len(facts) or any(fact.get("is_partial") for fact in facts)
        return Judgement(otherwise, text, wrong, culprits if is_everywhere else seen_by)

    return judge
