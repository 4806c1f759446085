"""``run_doctor``: ask every question on every rank, and put the answers into one report that is the same on all ranks.

What one rank sees travels to all others as JSON, also when it is an exception; every rank draws its conclusion from the same
facts. So a rank that fails keeps no other waiting.
"""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from megabucket.comm import Communicator, Exchange, ProcessGroupCommunicator, discover_communicator, with_same_host_copies
from megabucket.comm.torch import backend_of
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.doctor.questions import QUESTIONS, Answer, Bench, Question, by_rank
from megabucket.doctor.report import Line, Report, Verdict
from megabucket.errors import CollectiveError, ConfigError

_TIMEOUT_S: Final = 30.0
"""After which a collective that was only a question gives up."""
_FACT_BYTES: Final = 8192
"""Of what one rank says. Fixed, so that a fact needs one all-gather and nothing else of the back-end."""
_ERROR_CHARS: Final = 300
_DIGITS: Final = re.compile(r"\d+")  # ranks, ports and the like, which differ where the refusal is the same


def run_doctor(
    config: DistributedDataParallelConfig | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    communicator: Communicator | None = None,
    device: torch.device | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Report:
    """Return how this back-end behaves and whether gradients through the configured path are right. Every rank calls it.

    Takes a few seconds. Questions are asked on process groups of their own, made and destroyed here, so the given one stays as
    it was; only a group that is not the whole world in its order is asked itself.

    Args:
        config: the path that gradients take; the defaults when not given.
        process_group: the ranks; the default group when not given, or this process alone.
        communicator: an implementation of the port to ask instead of a process group.
        device: of the tensors; the CPU when not given.
        note: called with what is asked next.

    Raises:
        ConfigError: both a process group and a communicator are given.
        CollectiveError: the ranks cannot exchange what they saw.
    """
    if communicator is not None and process_group is not None:
        raise ConfigError("communicator= brings its own ranks; drop process_group=")
    start_s = time.perf_counter()
    config = config if config is not None else DistributedDataParallelConfig()
    device = device if device is not None else torch.device("cpu")
    real = communicator if communicator is not None else discover_communicator(process_group)
    try:
        with closing(_Benches(real, process_group, config, device)) as benches:
            lines = []
            for question in QUESTIONS:
                note(f"asking: {question.text}")
                lines.append(benches.ask(question))
            backend = benches.backend
    finally:
        if real is not communicator:
            real.close()
    return Report(backend, str(device), real.size, tuple(lines), wall_s=time.perf_counter() - start_s)


class _Benches:
    """The bench that questions are asked on, and another one after a question that may have spoiled it.

    Args:
        real: facts travel over it, and no question touches it where benches have process groups of their own.
    """

    def __init__(
        self,
        real: Communicator,
        process_group: dist.ProcessGroup | None,
        config: DistributedDataParallelConfig,
        device: torch.device,
    ) -> None:
        self._real, self._config, self._device = real, config, device
        self._group: dist.ProcessGroup | None = None
        self._made: list[dist.ProcessGroup] = []
        if isinstance(real, ProcessGroupCommunicator):
            self._group = process_group if process_group is not None else dist.group.WORLD
        self._bench = self._make()

    @property
    def backend(self) -> str:
        """The name of what is asked."""
        if self._group is not None:
            return backend_of(self._group, self._device)
        return "none" if self._real.size == 1 else type(self._real).__name__.strip("_")

    def ask(self, question: Question) -> Line:
        """Ask a question on every rank."""
        try:
            fact = question.ask(self._bench)
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0][:_ERROR_CHARS]
            fact = {"raised": f"{type(error).__name__}: {first_line}"}
        facts = gather_facts(self._real, fact, self._device)
        answer = judge_refusal(question, facts)
        if answer is None:
            return Line(question.text, *question.judge(facts))
        self._end_bench()
        self._bench = self._make()
        return Line(question.text, *answer)

    def close(self) -> None:
        """End the bench, and all groups that were made."""
        self._end_bench()
        # Wrappers are full of reference cycles, and a group that one of them still holds would live on in its threads.
        gc.collect()
        while self._made:
            dist.destroy_process_group(self._made.pop())

    def _make(self) -> Bench:
        group = self._group
        if group is None:
            return Bench(self._real, self._device, self._config)
        ranks = dist.get_process_group_ranks(group)
        if ranks == list(range(dist.get_world_size())):  # any other group could only be made with the help of other ranks
            # Longer than what the config calls dead: wrappers refuse a group that gives up before their heartbeats do.
            timeout = timedelta(seconds=max(_TIMEOUT_S, 2 * self._config.dead_after_s))
            group = dist.new_group(ranks, timeout=timeout, backend=dist.get_backend_config(group))
            self._made.append(group)
        communicator = discover_communicator(group)
        if self._config.read_peer_memory:
            communicator = with_same_host_copies(communicator, self._device)
        return Bench(communicator, self._device, self._config, group)

    def _end_bench(self) -> None:
        if self._bench.communicator is not self._real:
            self._bench.communicator.close()


def gather_facts(communicator: Communicator, fact: Any, device: torch.device) -> list[Any]:
    """Return the ``fact`` of every rank, in rank order.

    Raises:
        CollectiveError: other facts arrive than were sent, so nothing about other ranks can be said at all.
    """
    payload = json.dumps(fact).encode()
    said = Exchange(communicator, payload, capacity_bytes=_FACT_BYTES, device=device, label="doctor facts").wait()
    try:
        return [json.loads(text) for text in said]
    except ValueError:
        raise CollectiveError(
            "an all-gather of bytes gave others than were sent, so the ranks cannot even compare notes. Nothing else about "
            "this back-end can be trusted. Check that all ranks run the same version of it and the same network settings."
        ) from None


def judge_refusal(question: Question, facts: Sequence[Any]) -> Answer | None:
    """Return the answer when the question raised on some rank; ``None`` when it did on none."""
    raised = [fact["raised"] if isinstance(fact, dict) and "raised" in fact else None for fact in facts]
    failed = tuple(rank for rank, text in enumerate(raised) if text is not None)
    if not failed:
        return None
    if len({_DIGITS.sub("", text or "") for text in raised}) == 1:
        verdict = Verdict.FINDING if question.is_required else Verdict.NOTE
        return Answer(verdict, f"refused: {by_rank(raised)}", question.refusal)
    meaning = "the ranks do not have the same back-end, or lost each other: this operation would hang or fail in training"
    return Answer(Verdict.FINDING, by_rank([text or "works" for text in raised]), meaning, failed)
