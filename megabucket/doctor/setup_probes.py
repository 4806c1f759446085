"""Questions about the ranks themselves: what they are, and whether they are alike."""

from __future__ import annotations

import hashlib
import platform
import socket
import time
from collections.abc import Sequence
from typing import Final

import torch

from megabucket import __version__
from megabucket.comm import AllReduce
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.doctor.port_probes import launch
from megabucket.doctor.probe import Bench, Fact, Judgement, Probe, by_rank, odd_ones_out
from megabucket.doctor.report import Verdict
from megabucket.units import format_seconds

SECTION: Final = "ranks"
_CLOCKS_AGREE_S: Final = 1.0


def setup_probes(config: DistributedDataParallelConfig) -> list[Probe]:
    """Return the questions in the order in which they are asked."""
    settings = hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:12]

    def observe_config(_: Bench) -> Fact:
        return {"digest": settings}

    refusal = "this rank cannot say what it is"
    return [
        Probe(SECTION, "hosts", _observe_host, _judge_hosts, refusal),
        Probe(SECTION, "versions", _observe_versions, _judge_versions, refusal),
        Probe(SECTION, "config", observe_config, _judge_config, refusal),
        Probe(SECTION, "clocks", _observe_clock, _judge_clocks, refusal, is_required=False),
    ]


def _observe_host(bench: Bench) -> Fact:
    device = bench.device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"host": socket.gethostname(), "device": kind}


def _judge_hosts(facts: Sequence[Fact]) -> Judgement:
    hosts, devices = {fact["host"] for fact in facts}, [fact["device"] for fact in facts]
    hosts_text = "1 host" if len(hosts) == 1 else f"{len(hosts)} hosts"
    ranks_text = "1 rank" if len(facts) == 1 else f"{len(facts)} ranks"
    answer = f"{ranks_text} on {hosts_text}: {by_rank(devices)}"
    if len(set(devices)) == 1:
        alone = "nobody to talk to: gradients are not reduced"
        meaning = alone if len(facts) == 1 else "every rank computes on the same kind of device"
        return Judgement(Verdict.HOLDS, answer, meaning)
    meaning = "the slowest rank sets the pace, and results may depend on the rank"
    return Judgement(Verdict.NOTE, answer, meaning, odd_ones_out(devices))


def _observe_versions(_: Bench) -> Fact:
    return {"megabucket": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _judge_versions(facts: Sequence[Fact]) -> Judgement:
    libraries = [f"megabucket {fact['megabucket']}, torch {fact['torch']}" for fact in facts]
    compared = [
        f"{text}, Python {'.'.join(fact['python'].split('.')[:2])}" for text, fact in zip(libraries, facts, strict=True)
    ]
    if len(set(compared)) > 1:
        meaning = "wrapping would raise LayoutMismatchError: ranks may launch different collectives"
        return Judgement(Verdict.FINDING, by_rank(compared), meaning, odd_ones_out(compared))
    pythons = [f"{libraries[0]}, Python {fact['python']}" for fact in facts]
    if len(set(pythons)) > 1:
        return Judgement(Verdict.NOTE, by_rank(pythons), "harmless: Python differs in its last number", odd_ones_out(pythons))
    return Judgement(Verdict.HOLDS, pythons[0], "the same on every rank")


def _judge_config(facts: Sequence[Fact]) -> Judgement:
    digests = [fact["digest"] for fact in facts]
    if len(set(digests)) > 1:
        meaning = "wrapping would raise LayoutMismatchError; give every rank the same file and overrides"
        return Judgement(Verdict.FINDING, by_rank(digests), meaning, odd_ones_out(digests))
    return Judgement(Verdict.HOLDS, digests[0], "the same on every rank")


def _observe_clock(bench: Bench) -> Fact:
    launch(bench, [AllReduce(torch.zeros(1, device=bench.device))])  # the first one makes the connections
    tensor = torch.zeros(1, device=bench.device)
    launch(bench, [AllReduce(tensor)])
    tensor.item()  # on CUDA the wait alone does not wait for the data
    return {"now_s": time.time()}


def _judge_clocks(facts: Sequence[Fact]) -> Judgement:
    times_s = [fact["now_s"] for fact in facts]
    spread_s = max(times_s) - min(times_s)
    answer = f"within {format_seconds(spread_s)}"
    if spread_s <= _CLOCKS_AGREE_S:
        return Judgement(Verdict.HOLDS, answer, "logs and traces of the ranks can be laid side by side")
    middle_s = sorted(times_s)[len(times_s) // 2]
    odd = tuple(rank for rank, now_s in enumerate(times_s) if abs(now_s - middle_s) > _CLOCKS_AGREE_S)
    meaning = "times in logs and traces of different ranks cannot be compared; nothing else uses them"
    return Judgement(Verdict.NOTE, answer, meaning, odd)
