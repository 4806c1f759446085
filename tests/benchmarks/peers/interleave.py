"""Steps of several systems in turn, each step in parts. Runs on every rank; nothing here knows what a system is."""

from __future__ import annotations

import gc
import random
import resource
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from peers.host import loopback_bytes
from peers.models import ModelCase, loss_of
from peers.system import System

PARTS = ("forward", "backward", "sync", "optimizer")


@dataclass
class Samples:
    """What one system did on this rank. Lists by step, but those of turns, which hold means over the steps of a turn."""

    parts_s: list[tuple[float, ...]] = field(default_factory=list)
    turn_cpu_s: list[float] = field(default_factory=list)
    turn_faults: list[float] = field(default_factory=list)
    turn_wire_bytes: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Course:
    """How often and in which batches.

    Attributes:
        warmups: steps of each system before anything counts.
        turns: how often each system has its turn.
        steps: timed ones in a turn; one more before them fills caches and pipelines.
    """

    warmups: int
    turns: int
    steps: int


class Interleaving:
    """Gives each system its turn. All see the batches of the same step numbers."""

    def __init__(self, systems: dict[str, System], case: ModelCase, course: Course) -> None:
        self.systems, self.case, self.course = systems, case, course
        self.samples = {name: Samples() for name in systems}
        self.next_step = 0

    def warm_up(self) -> None:
        for name in self.systems:
            self.take(name, self.batches(self.course.warmups))
        self.next_step += self.course.warmups
        gc.collect()
        gc.freeze()  # otherwise every collection walks the objects of all systems, and charges whoever is timed

    def run(self) -> None:
        order = list(self.systems)
        for turn in range(self.course.turns):
            random.Random(turn).shuffle(order)  # the same on all ranks
            batches = self.batches(1 + self.course.steps)
            for name in order:
                self.turn(name, batches)
            self.next_step += 1 + self.course.steps

    def batches(self, steps: int) -> list[torch.Tensor]:
        return [self.case.batch(self.next_step + step, dist.get_rank()) for step in range(steps)]

    def turn(self, name: str, batches: list[torch.Tensor]) -> None:
        samples, timed = self.samples[name], len(batches) - 1
        gc.collect()
        dist.barrier()
        self.take(name, batches[:1], settles=False)
        cpu_s, faults, wire = time.process_time(), page_faults(), loopback_bytes()
        samples.parts_s += self.take(name, batches[1:], settles=False)
        samples.turn_cpu_s.append((time.process_time() - cpu_s) / timed)
        samples.turn_faults.append((page_faults() - faults) / timed)
        if wire is not None:
            samples.turn_wire_bytes.append((loopback_bytes() - wire) / timed)
        self.systems[name].settle()
        dist.barrier()

    def take(self, name: str, batches: list[torch.Tensor], *, settles: bool = True) -> list[tuple[float, ...]]:
        """Take a step on each batch and return the seconds of its parts. What is under way ends up in the next step."""
        system, parts_s, losses = self.systems[name], [], []
        for batch in batches:
            start_s = time.perf_counter()
            loss = loss_of(system.module(batch), batch)
            forward_s = time.perf_counter()
            system.backward(loss)
            backward_s = time.perf_counter()
            system.sync()
            sync_s = time.perf_counter()
            system.step()
            end_s = time.perf_counter()
            parts_s.append((forward_s - start_s, backward_s - forward_s, sync_s - backward_s, end_s - sync_s))
            losses.append(loss.detach())
        if settles:
            system.settle()
        self.samples[name].losses += [float(loss) for loss in losses]
        return parts_s


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
