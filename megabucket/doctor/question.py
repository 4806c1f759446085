"""A question is one function of a bench that returns this rank's answer, or compares what all ranks saw.

The answers of all ranks become one: the worst verdict counts, and an exception is an answer. A question about differences
between ranks yields what it saw, receives that of all ranks and returns the one answer. Every rank does so with the same facts,
so all reports are equal::

    def hosts(bench: Bench) -> Asking:
        facts = yield {"host": socket.gethostname()}
        return Answer(Verdict.HOLDS, by_rank([fact["host"] for fact in facts]), "where the ranks are")
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch

from megabucket.comm import Call, Communicator, Exchange
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.doctor.report import Line, Verdict
from megabucket.errors import CollectiveError, InvariantError, rank_list

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ERROR_CHARS: Final = 300
_DIGITS: Final = re.compile(r"\d+")  # ranks, ports and the like, which differ where the refusal is the same
_LENGTH_BYTES: Final = 8
_MOST_BYTES: Final = 1 << 20
"""Of one rank's fact: a longer one was garbled on the way."""
_BAD_TO_WORSE: Final = (Verdict.NOT_TRIED, Verdict.HOLDS, Verdict.NOTE, Verdict.FINDING)

Fact: TypeAlias = "dict[str, Any]"
"""What one rank saw, ready for JSON."""


class Answer(NamedTuple):
    """What one rank says, or all ranks together."""

    verdict: Verdict
    text: str
    meaning: str
    ranks: tuple[int, ...] = ()
    """Those at fault, where that can be told."""


Asking: TypeAlias = Generator[Fact, list[Fact], Answer]

NO_GROUP: Final = Answer(Verdict.NOT_TRIED, "not tried", "there is no process group")
NO_PEERS: Final = Answer(Verdict.NOT_TRIED, "not tried", "there is only one rank")


@dataclass(frozen=True, slots=True)
class Bench:
    """What a question is asked on."""

    communicator: Communicator
    """To try things on; facts travel over another one, where there can be two."""
    device: torch.device
    config: DistributedDataParallelConfig
    group: ProcessGroup | None = None
    """The process group behind the communicator, if there is one."""

    @property
    def rank(self) -> int:
        """Its place among the ranks that are asked."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.communicator.size

    def launch(self, *calls: Call) -> None:
        """Launch a batch and return when its results may be read."""
        self.communicator.launch(self.communicator.prepare(calls), label="doctor").wait()


@dataclass(frozen=True, slots=True)
class Question:
    """One line of the report."""

    section: str
    name: str
    ask: Callable[[Bench], Answer | Asking]
    refusal: str
    """What it means that the back-end refuses."""
    is_required: bool = True
    """Whether a refusal is a finding."""


def examine(question: Question, bench: Bench, real: Communicator) -> tuple[Line, bool]:
    """Ask one question; return its line, and whether it failed on some rank, which may have spoiled the bench.

    Args:
        real: facts travel over it.

    Raises:
        CollectiveError: the ranks cannot exchange facts.
    """
    try:
        asked = question.ask(bench)
        asking = _compare(asked) if isinstance(asked, Answer) else asked
        fact = next(asking)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0][:_ERROR_CHARS]
        fact = {"raised": f"{type(error).__name__}: {first_line}"}
    facts = gather_facts(real, fact, bench.device)
    has_failed = any("raised" in fact for fact in facts)
    answer = judge_refusal(question, facts) if has_failed else conclude(asking, facts)
    return Line(question.section, question.name, *answer), has_failed


def conclude(asking: Asking, facts: list[Fact]) -> Answer:
    """Return the answer of a question that has seen its own rank and waits for the facts of all."""
    try:
        asking.send(facts)
    except StopIteration as end:
        return Answer(*end.value)
    raise InvariantError("a question of the doctor yielded twice")


def judge_refusal(question: Question, facts: Sequence[Fact]) -> Answer:
    """Return the answer when the question raised on some rank."""
    if len({_DIGITS.sub("", fact.get("raised", "")) for fact in facts}) == 1:
        verdict = Verdict.FINDING if question.is_required else Verdict.NOTE
        return Answer(verdict, f"refused: {by_rank([fact['raised'] for fact in facts])}", question.refusal)
    failed = tuple(rank for rank, fact in enumerate(facts) if "raised" in fact)
    meaning = "the ranks do not have the same back-end, or lost each other: this operation would hang or fail in training"
    return Answer(Verdict.FINDING, by_rank([fact.get("raised", "works") for fact in facts]), meaning, failed)


def gather_facts(communicator: Communicator, fact: Fact, device: torch.device) -> list[Fact]:
    """Return the ``fact`` of every rank, in rank order. Needs nothing but all-gathers, since other collectives may be missing.

    Raises:
        CollectiveError: other facts arrive than were sent, so nothing about other ranks can be said at all.
    """

    def tell_all(payload: bytes, capacity_bytes: int) -> list[bytes]:
        return Exchange(communicator, payload, capacity_bytes=capacity_bytes, device=device, label="doctor facts").wait()

    text = json.dumps(fact).encode()
    lengths = tell_all(len(text).to_bytes(_LENGTH_BYTES, "little"), _LENGTH_BYTES)
    capacity_bytes = max(int.from_bytes(length, "little") for length in lengths)
    is_plausible = len(text) <= capacity_bytes <= _MOST_BYTES
    try:
        return [dict(json.loads(text)) for text in (tell_all(text, capacity_bytes) if is_plausible else lengths)]
    except (ValueError, TypeError):
        raise CollectiveError(
            "an all-gather of bytes gave others than were sent, so the ranks cannot even compare notes. Nothing else about "
            "this back-end can be trusted. Check that all ranks run the same version of it and the same network settings."
        ) from None


def merge(answers: Sequence[Sequence[Any]]) -> Answer:
    """Return one answer for those of all ranks: what the ranks with the worst verdict say.

    It names the ranks at fault where that can be told, else those that say so, unless all do.
    """
    said = [Answer(Verdict(verdict), text, meaning, tuple(ranks)) for verdict, text, meaning, ranks in answers]
    worst = max((answer.verdict for answer in said), key=_BAD_TO_WORSE.index)
    said_by = tuple(rank for rank, answer in enumerate(said) if answer.verdict is worst)
    at_fault = tuple(sorted({rank for speaker in said_by for rank in said[speaker].ranks}))
    text = by_rank([answer.text if answer.verdict is worst else None for answer in said])
    return Answer(worst, text, said[said_by[0]].meaning, at_fault or (said_by if len(said_by) < len(said) else ()))


def check(meaning: str, *, is_right: bool, wrong: str, verdict: Verdict = Verdict.FINDING, answer: str = "yes") -> Answer:
    """Return the answer to a question that has a right result.

    Args:
        meaning: of the right result.
        wrong: what another result means.
        verdict: of another result.
        answer: when the result is right.
    """
    return Answer(Verdict.HOLDS, answer, meaning) if is_right else Answer(verdict, "wrong result", wrong)


def _compare(answer: Answer) -> Asking:
    facts = yield {"answer": answer}
    return merge([fact["answer"] for fact in facts])


def by_rank(texts: Sequence[str | None]) -> str:
    """Return equal texts once, with the ranks that have them; ``None`` is left out.

    >>> by_rank(["yes", "yes"]), by_rank(["yes", "no"]), by_rank([None, "no"])
    ('yes', 'yes on rank 0; no on rank 1', 'no on rank 1')
    """
    ranks_of = {text: [rank for rank, other in enumerate(texts) if other == text] for text in texts if text is not None}
    return "; ".join(text if len(ranks) == len(texts) else f"{text} on {rank_list(ranks)}" for text, ranks in ranks_of.items())


def odd_ones_out(values: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the ranks whose value is not the most frequent one; of equally frequent ones the first rank's counts.

    >>> odd_ones_out(["a", "b", "a"])
    (1,)
    """
    usual = max(dict.fromkeys(values), key=list(values).count)
    return tuple(rank for rank, value in enumerate(values) if value != usual)
