"""``run_doctor``: ask every question on every rank and put the answers into one report, the same on all ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final

import torch

from megabucket.comm import Communicator, ProcessGroupCommunicator, discover_communicator
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.doctor.exchange import gather_facts
from megabucket.doctor.gradients import gradient_probe, paths
from megabucket.doctor.group_answers import GroupProbes, ProbeGroups
from megabucket.doctor.group_probes import group_probes
from megabucket.doctor.numeric_probes import numeric_probes
from megabucket.doctor.port_probes import port_probes
from megabucket.doctor.probe import Bench, Probe, ask, conclude, has_failed, not_tried
from megabucket.doctor.report import Line, Report
from megabucket.doctor.setup_probes import setup_probes
from megabucket.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_TIMEOUT_S: Final = 30.0
"""After which a collective that was only a question gives up."""


def run_doctor(
    config: DistributedDataParallelConfig | None = None,
    *,
    process_group: ProcessGroup | None = None,
    communicator: Communicator | None = None,
    device: torch.device | None = None,
) -> Report:
    """Return what this back-end does and whether gradients through the configured path are right. Every rank calls it.

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
    # Longer than what the config calls dead: wrappers refuse a group that gives up before their heartbeats do.
    timeout_s = max(_TIMEOUT_S, 2 * config.dead_after_s)
    try:
        with _benches(real, device=device, process_group=process_group, timeout_s=timeout_s) as benches:
            lines = [_line(probe, benches) for probe in _probes(config)]
            backend = benches.backend
    finally:
        if real is not communicator:
            real.close()
    return Report(
        backend=backend,
        device=str(device),
        num_ranks=real.size,
        lines=tuple(lines),
        wall_s=time.perf_counter() - start_s,
    )


def _probes(config: DistributedDataParallelConfig) -> Iterator[Probe]:
    yield from setup_probes(config)
    yield from port_probes(config)
    yield from numeric_probes(config)
    yield from (gradient_probe(path) for path in paths(config))
    yield from group_probes(config)


class _Benches:
    """The bench that questions are asked on now; another one after a question that may have spoiled it."""

    def __init__(self, real: Communicator, device: torch.device, groups: ProbeGroups | None) -> None:
        self.real = real
        self._device, self._groups = device, groups
        self.current = self._make()

    @property
    def backend(self) -> str:
        """The name of what is asked."""
        if self.current.group is not None:
            return self.current.group.backend
        return "none" if self.real.size == 1 else type(self.real).__name__.strip("_")

    def renew(self) -> None:
        """Make another bench; every rank does so at the same time."""
        self.close()
        self.current = self._make()

    def close(self) -> None:
        """End the communicator of the current bench, unless it is the real one."""
        if self.current.communicator is not self.real:
            self.current.communicator.close()

    def _make(self) -> Bench:
        if self._groups is None:
            return Bench(self.real, self._device, None)
        group = self._groups.make()
        return Bench(discover_communicator(group), self._device, GroupProbes(group, self._device))


@contextmanager
def _benches(
    real: Communicator, *, device: torch.device, process_group: ProcessGroup | None, timeout_s: float
) -> Iterator[_Benches]:
    """Return benches on groups of their own, which are destroyed at the end, also after an error."""
    has_group = isinstance(real, ProcessGroupCommunicator)
    groups = ProbeGroups(process_group, timeout_s=timeout_s) if has_group else None
    try:
        with closing(_Benches(real, device, groups)) as benches:
            yield benches
    finally:
        if groups is not None:
            # Wrappers are full of reference cycles, and a group that one of them still holds would live on in its threads.
            gc.collect()
            groups.close()


def _line(probe: Probe, benches: _Benches) -> Line:
    if probe.needs_group and benches.current.group is None:
        return not_tried(probe, "there is no process group")
    if probe.needs_peers and benches.real.size == 1:
        return not_tried(probe, "there is only one rank")
    # Facts travel over the real ranks, which no question touches.
    facts = gather_facts(benches.real, ask(probe, benches.current), benches.current.device)
    if has_failed(facts):
        benches.renew()
    return conclude(probe, facts)
