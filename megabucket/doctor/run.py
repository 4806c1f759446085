"""``run_doctor``: ask every question on every rank and put the answers into one report, the same on all ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Final, cast

import torch
import torch.distributed as dist

from megabucket.comm import Communicator, ProcessGroupCommunicator, discover_communicator
from megabucket.comm.torch import backend_of
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.doctor.collectives import collective_questions, numeric_questions
from megabucket.doctor.gradients import gradient_questions
from megabucket.doctor.question import Bench, Question, examine
from megabucket.doctor.ranks import group_questions, rank_questions
from megabucket.doctor.report import Line, Report
from megabucket.errors import ConfigError

_TIMEOUT_S: Final = 30.0
"""After which a collective that was only a question gives up."""


def run_doctor(
    config: DistributedDataParallelConfig | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    communicator: Communicator | None = None,
    device: torch.device | None = None,
) -> Report:
    """Return how this back-end behaves and whether gradients through the configured path are right. Every rank calls it.

    Takes a few seconds. Questions are asked on process groups of their own, made and destroyed here, so the given one stays as
    it was; only where it is not the whole world (of several groups in a larger world) they are asked on it.

    Args:
        config: the path that gradients take; the defaults when not given.
        process_group: the ranks; the default group when not given, or this process alone.
        communicator: an implementation of the port to ask instead of a process group.
        device: of the tensors; the CPU when not given.

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
            lines = tuple(benches.line(question) for question in _questions(config))
            backend = benches.backend
    finally:
        if real is not communicator:
            real.close()
    wall_s = time.perf_counter() - start_s
    return Report(backend=backend, device=str(device), num_ranks=real.size, lines=lines, wall_s=wall_s)


def _questions(config: DistributedDataParallelConfig) -> Iterator[Question]:
    yield from rank_questions()
    yield from collective_questions(config)
    yield from numeric_questions()
    yield from gradient_questions(config)
    yield from group_questions(config)  # the one that may harm its group is the last of them


class _Benches:
    """The bench that questions are asked on, and another one after a question that may have spoiled it.

    A bench has a process group of its own with the ranks and the back-end of the real one. Where the real one is not the whole
    world in its order, none can be made without the other ranks, and the real one is used.

    Args:
        real: facts travel over it, and no question touches it where benches have groups of their own.
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
        self._has_fresh_groups = False
        if isinstance(real, ProcessGroupCommunicator):
            self._group = cast("dist.ProcessGroup", process_group if process_group is not None else dist.group.WORLD)
            self._has_fresh_groups = dist.get_process_group_ranks(self._group) == list(range(dist.get_world_size()))
        self._bench = self._make()

    @property
    def backend(self) -> str:
        """The name of what is asked."""
        if self._group is not None:
            return backend_of(self._group, self._device)
        return "none" if self._real.size == 1 else type(self._real).__name__.strip("_")

    def line(self, question: Question) -> Line:
        """Ask a question on every rank."""
        line, has_failed = examine(question, self._bench, self._real)
        if has_failed:
            self._end_bench()
            self._bench = self._make()
        return line

    def close(self) -> None:
        """End the bench, and all groups that were made."""
        self._end_bench()
        # Wrappers are full of reference cycles, and a group that one of them still holds would live on in its threads.
        gc.collect()
        while self._made:
            dist.destroy_process_group(self._made.pop())

    def _make(self) -> Bench:
        if self._group is None:
            return Bench(self._real, self._device, self._config)
        group = self._group
        if self._has_fresh_groups:
            # Longer than what the config calls dead: wrappers refuse a group that gives up before their heartbeats do.
            timeout = timedelta(seconds=max(_TIMEOUT_S, 2 * self._config.dead_after_s))
            backend = dist.get_backend_config(group)
            group = dist.new_group(dist.get_process_group_ranks(group), timeout=timeout, backend=backend)
            self._made.append(group)
        return Bench(discover_communicator(group), self._device, self._config, group)

    def _end_bench(self) -> None:
        if self._bench.communicator is not self._real:
            self._bench.communicator.close()
