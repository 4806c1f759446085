"""``run_doctor``: ask every question on every rank, and put the answers into one report that is the same on all ranks.

Every rank sends its facts to all others as JSON, also if its question raised. All ranks judge the same facts, so a rank that
fails keeps no other waiting.
"""

from __future__ import annotations

import gc
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from megabucket.comm import (
    Communicator,
    Exchange,
    HostMap,
    Place,
    ProcessGroupCommunicator,
    discover_communicator,
    with_same_host_copies,
)
from megabucket.comm.hosts import LOOPBACK_ADVICE, find_place
from megabucket.comm.torch import backend_of
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.doctor import hosts, questions
from megabucket.doctor.gradients import gradients
from megabucket.doctor.questions import Bench
from megabucket.doctor.report import DoctorReport, Fact, Question, Status, line_of
from megabucket.errors import CollectiveError, ConfigError

_TIMEOUT_S: Final = 30.0
"""Seconds after which a collective of a question gives up."""
_FACT_BYTES: Final = 8192
"""Most bytes of one rank's fact. Fixed, so that facts need one all-gather and nothing else of the back-end."""
_ERROR_CHARS: Final = 300
_REFUSED: Final = "refused: "
_DIGITS: Final = re.compile(r"\d+")
"""Ranks and ports differ where the refusal is the same."""

QUESTIONS: Final = (
    Question(
        "ranks and versions",
        questions.versions,
        "wrapping refuses ranks with different versions",
        advice="install the same versions of megabucket, torch and Python for all ranks: one image or one lock file",
    ),
    Question(
        "config",
        questions.config,
        "wrapping refuses ranks with different configs",
        advice="give all ranks the same config file and overrides; copy the file to every host, or share it",
    ),
    Question("all-gather", questions.all_gather, "updated parameters and error reports reach every rank this way"),
    Question("all-reduce MAX of integers", questions.maximum, "the fence: ranks agree on every step this way"),
    Question("broadcast of bytes", questions.broadcast, "replicas are made equal this way"),
    Question("all-reduce SUM", questions.all_reduce, "gradients are summed this way with mode=all_reduce"),
    Question(
        "reduce-scatter in place", questions.reduce_scatter, "mode=reduce_scatter sums gradients this way", is_required=False
    ),
    Question("all ranks hold the same bits", questions.same_bits, "otherwise replicas drift apart without an error"),
    Question("float32 sums are precise", questions.precision, "otherwise gradients lose digits on the way"),
    Question("gradients as configured", gradients, "two steps with this config, through wrapper and optimizer"),
)

ADDRESSES: Final = Question(
    "hosts and addresses", hosts.addresses, "ranks of several hosts reach each other at these", advice=LOOPBACK_ADVICE
)
HOST_QUESTIONS: Final = (
    ADDRESSES,
    Question(
        "clocks",
        hosts.clocks,
        f"torchrun takes a host for dead whose clock is over {hosts.CLOCK_FINDING_S:g} s off; logs are compared by time",
        advice="let NTP set the clocks of all hosts (timedatectl and chronyc tracking show it)",
    ),
    Question("inside hosts and across", hosts.levels, "what shards inside a host and replicas across would use"),
)
"""Asked besides where the ranks are on several hosts."""


def run_doctor(
    config: DistributedDataParallelConfig | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    communicator: Communicator | None = None,
    device: torch.device | None = None,
    place: Place | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> DoctorReport:
    """Return how this back-end behaves and whether gradients through the configured path are right. Every rank calls it.

    Takes a few seconds. The questions use process groups that are made and destroyed here, so the given one stays as it was;
    only a group that is not the whole world in its order is used itself.

    Args:
        config: the path that gradients take; the defaults when not given.
        process_group: the ranks; the default group when not given, or this process alone.
        communicator: an implementation of the port to ask instead of a process group.
        device: of the tensors; the CPU when not given.
        place: of this rank; found when not given.
        note: called with each question before it is asked.

    Raises:
        ConfigError: both a process group and a communicator are given.
        CollectiveError: the ranks cannot exchange their facts.
    """
    if communicator is not None and process_group is not None:
        raise ConfigError("communicator= brings its own ranks; drop process_group=")
    start_s = time.perf_counter()
    config = config if config is not None else DistributedDataParallelConfig()
    device = device if device is not None else torch.device("cpu")
    real = communicator if communicator is not None else discover_communicator(process_group)
    group = (process_group or dist.group.WORLD) if isinstance(real, ProcessGroupCommunicator) else None
    backend = "none" if real.size == 1 else type(real).__name__.strip("_")
    if group is not None:
        backend = backend_of(group, device).name
    if place is None:
        place = find_place(os.environ, uses_gloo=backend == "gloo")
    lines = []
    with ExitStack() as stack:
        if real is not communicator:
            stack.callback(real.close)
        places = tuple(Place(*each) for each in _exchange(real, place, device))
        of_hosts = HostMap.of(places)
        given = Bench(real, device, config, group, places)
        bench = stack.enter_context(_bench(given))
        for question in (*QUESTIONS, *(HOST_QUESTIONS if of_hosts.is_several else ())):
            note(f"asking: {question.text}")
            facts = [Fact(**fact) for fact in _exchange(real, asdict(_ask(question, bench)), device)]
            lines.append(line_of(question, facts, of_hosts))
            if any(fact.answer.startswith(_REFUSED) for fact in facts):  # the bench may be spoiled
                bench = stack.enter_context(_bench(given))
    names = of_hosts.names if of_hosts.is_several else ()
    return DoctorReport(backend, str(device), real.size, tuple(lines), time.perf_counter() - start_s, names)


def unreachable_report(places: Sequence[Place], device: torch.device) -> DoctorReport | None:
    """Return the report of ranks that gloo could never connect, because it would use loopback addresses across hosts.

    ``None``: it would not.
    """
    of_hosts = HostMap.of(places)
    line = line_of(ADDRESSES, [hosts.address_fact(places)] * len(places), of_hosts)
    if not of_hosts.is_several or line.status is not Status.FINDING:
        return None
    return DoctorReport("gloo", str(device), len(places), (line,), wall_s=0.0, hosts=of_hosts.names)


@contextmanager
def _bench(given: Bench) -> Iterator[Bench]:
    """Yield a bench on a process group made for it, if there is a group at all and no other ranks must help to make one."""
    if given.group is None:
        yield given
        return
    group, ranks = given.group, dist.get_process_group_ranks(given.group)
    is_world = ranks == list(range(dist.get_world_size()))
    if is_world:
        # Longer than the config's dead_after_s: wrappers refuse a group that gives up before their heartbeats do.
        timeout = timedelta(seconds=max(_TIMEOUT_S, 2 * given.config.dead_after_s))
        group = dist.new_group(ranks, timeout=timeout, backend=dist.get_backend_config(given.group))
    communicator = discover_communicator(group)
    if given.config.read_peer_memory:
        communicator = with_same_host_copies(communicator, given.device)
    try:
        yield replace(given, communicator=communicator, group=group)
    finally:
        communicator.close()
        # Wrappers are full of reference cycles, and a group that one of them still holds would live on in its threads.
        gc.collect()
        if is_world:
            dist.destroy_process_group(group)


def _ask(question: Question, bench: Bench) -> Fact:
    try:
        return question.ask(bench)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0][:_ERROR_CHARS]
        text = f"{_REFUSED}{type(error).__name__}: {first_line}"
        return Fact(text, Status.FINDING if question.is_required else Status.NOTE, same=_DIGITS.sub("", text))


def _exchange(communicator: Communicator, fact: Any, device: torch.device) -> list[Any]:
    """Return the facts of all ranks, in rank order; they travel as JSON.

    Raises:
        CollectiveError: other bytes arrive than were sent.
    """
    payload = json.dumps(fact).encode()
    received = Exchange(communicator, payload, capacity_bytes=_FACT_BYTES, device=device, label="doctor facts").wait()
    try:
        return [json.loads(text) for text in received]
    except ValueError:
        raise CollectiveError(
            "an all-gather of bytes returned other bytes than were sent, so the ranks cannot compare their facts. Do not trust "
            "this back-end. Check that all ranks run the same version of it and the same network settings."
        ) from None
