"""Eight strategies of gradient synchronization measured on one model: five by hand, torch DDP, and ours in both modes.

torchrun --standalone --nproc-per-node 2 examples/ladder.py
torchrun --standalone --nproc-per-node 2 examples/ladder.py --fabric 200e-6,1e8 --rounds 20

All of them use one recorded process group (recording/group.py), which notes when a collective is launched, complete and waited
for, also in torch DDP's C++ code. docs/exercises.md defines the columns and says what each strategy teaches.
"""

import argparse
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from ladder_counts import ladder
from recording.group import Meter, record
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import megabucket as mb
from megabucket.layout import ParamSpec
from megabucket.planning.links import FlatLink
from megabucket.planning.setting import Setting
from megabucket.planning.workload import TensorWork, Workload
from megabucket.testing import EmulatedFabric
from megabucket.trace import CollectiveKind, Lane, StepTrace
from megabucket.trace.step_trace import length_s
from megabucket.units import MIB

LARGEST_DIFFERENCE = 1e-5


@dataclass(frozen=True)
class Course:
    """What every rung trains, and how often."""

    num_layers: int = 14
    width: int = 256
    batch: int = 64
    num_microbatches: int = 2
    bucket_cap_bytes: int = MIB
    num_rounds: int = 1
    steps_per_round: int = 3

    def make_module(self) -> torch.nn.Module:
        torch.manual_seed(0)  # the same weights on every rank, so they need no broadcast
        return torch.nn.Sequential(*(Block(self.width) for _ in range(self.num_layers)))


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.nn.functional.gelu(self.linear(inputs))


# The rungs #


class Simple:
    """Average every gradient after every backward: one that was averaged before is its own mean."""

    knows_last_backward = False

    def __init__(self, module: torch.nn.Module, group: dist.ProcessGroup, meter: Meter) -> None:
        self.group, self.meter = group, meter
        self.module: Any = module  # of a rung with its own calls, such as no_sync()
        # Not Adam, which makes steps of full length out of rounding errors where gradients are tiny: weights are compared.
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)

    def run_step(self, microbatches: torch.Tensor) -> None:  # microbatches, inputs and targets, batch, width
        for inputs, targets in microbatches[:-1]:
            with self.module.no_sync() if self.knows_last_backward else nullcontext():
                self.run_microbatch(inputs, targets, share=1 / len(microbatches), is_last=False)
        self.run_microbatch(*microbatches[-1], share=1 / len(microbatches), is_last=True)
        with self.meter.computing("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def run_microbatch(self, inputs: torch.Tensor, targets: torch.Tensor, *, share: float, is_last: bool) -> None:
        with self.meter.computing("forward"):
            loss = share * torch.nn.functional.mse_loss(self.module(inputs), targets)
        with self.meter.computing("backward"):
            self.run_backward(loss, is_last=is_last)

    def run_backward(self, loss: torch.Tensor, *, is_last: bool) -> None:  # noqa: ARG002
        loss.backward()
        self.average_all()

    def average_all(self) -> None:
        for param in self.module.parameters():
            self.average(self.launch(param.grad), param.grad)

    def launch(self, tensor: torch.Tensor) -> dist.Work:
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def average(self, work: dist.Work, tensor: torch.Tensor) -> None:
        work.wait()
        tensor /= self.group.size()

    def finish_round(self) -> None:
        """Wait for what is under way between two steps."""


class Accumulation(Simple):
    """Average once a step."""

    def run_backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        loss.backward()
        if is_last:
            self.average_all()


class Hooks(Simple):
    """Average a gradient the moment it is there, and stand still meanwhile."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_last = False
        for param in self.module.parameters():
            param.register_post_accumulate_grad_hook(lambda param: self.take(param.grad) if self.is_last else None)

    def run_backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        self.is_last = is_last
        loss.backward()
        if is_last:
            self.finish()

    def take(self, grad: torch.Tensor) -> None:
        self.average(self.launch(grad), grad)

    def finish(self) -> None:
        """Do what is left after backward."""


class AsyncHooks(Hooks):
    """Launch in the hook, wait after backward."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.launched: list[tuple[dist.Work, torch.Tensor]] = []

    def take(self, grad: torch.Tensor) -> None:
        self.launched.append((self.launch(grad), grad))

    def finish(self) -> None:
        for work, tensor in self.launched:
            self.average(work, tensor)
        self.launched.clear()


class Buckets(AsyncHooks):
    """Join gradients and send them together. Right only where hooks fire in the same order on every rank."""

    def __init__(self, *args: Any, cap_bytes: int) -> None:
        super().__init__(*args)
        self.cap_bytes = cap_bytes
        self.filling: list[torch.Tensor] = []
        self.joined: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def take(self, grad: torch.Tensor) -> None:
        self.filling.append(grad)
        if sum(grad.nbytes for grad in self.filling) >= self.cap_bytes:
            self.send()

    def send(self) -> None:
        flat = torch.cat([grad.view(-1) for grad in self.filling])
        self.joined.append((flat, self.filling))
        self.filling = []
        super().take(flat)

    def finish(self) -> None:
        if self.filling:
            self.send()
        super().finish()
        for flat, grads in self.joined:
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))
        self.joined.clear()


class Torch(Simple):
    """torch DDP, which averages in every backward."""

    graph_done_s = 0.0

    def run_backward(self, loss: torch.Tensor, *, is_last: bool) -> None:  # noqa: ARG002
        # Its reducer waits for futures, in C++, in a callback at the end of backward. One that was queued before runs just
        # before it: from there on backward only waits.
        loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(self.note_graph_done))
        loss.backward()
        self.meter.note(Lane.WAIT, "reducer", self.graph_done_s)

    def note_graph_done(self) -> None:
        self.graph_done_s = time.perf_counter()


class TorchNoSync(Torch):
    """The same, told which backward is the last."""

    knows_last_backward = True


class Ours(Simple):
    """megabucket in either mode."""

    knows_last_backward = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.module.ddp_config.use_distributed_optimizer:
            self.optimizer = mb.DistributedOptimizer(self.optimizer, self.module)

    def run_backward(self, loss: torch.Tensor, *, is_last: bool) -> None:  # noqa: ARG002
        loss.backward()

    def finish_round(self) -> None:
        self.module.finish_param_sync()


def our_configs(course: Course) -> list[mb.DistributedDataParallelConfig]:
    # Everything is sent, as on the other rungs: what ranks read of each other's memory goes through no group.
    size: dict[str, Any] = {"bucket_cap_mb": course.bucket_cap_bytes / MIB, "read_peer_memory": False}
    sharded: dict[str, Any] = {"use_distributed_optimizer": True, "overlap_param_gather": True}
    return [mb.DistributedDataParallelConfig(**size), mb.DistributedDataParallelConfig(**size, **sharded)]


def make_rungs(course: Course, group: dist.ProcessGroup, meter: Meter) -> dict[str, Simple]:
    def torch_ddp() -> torch.nn.Module:
        settings: dict[str, Any] = {"bucket_cap_mb": course.bucket_cap_bytes / MIB, "gradient_as_bucket_view": True}
        return TorchDDP(course.make_module(), process_group=group, **settings)

    shared = (group, meter)
    ours = [mb.DistributedDataParallel(course.make_module(), config, process_group=group) for config in our_configs(course)]
    return {
        "simple, each backward": Simple(course.make_module(), *shared),
        "accumulation": Accumulation(course.make_module(), *shared),
        "hooks, blocking": Hooks(course.make_module(), *shared),
        "hooks, asynchronous": AsyncHooks(course.make_module(), *shared),
        "buckets": Buckets(course.make_module(), *shared, cap_bytes=course.bucket_cap_bytes),
        "torch DDP, each backward": Torch(torch_ddp(), *shared),
        "torch DDP, no_sync()": TorchNoSync(torch_ddp(), *shared),
        "megabucket, all-reduce": Ours(ours[0], *shared),
        "megabucket, reduce-scatter": Ours(ours[1], *shared),
    }


def planned_collectives(course: Course, below: dist.ProcessGroup) -> list[int]:
    """Return what each rung launches in a step: by ``ladder_counts.py``, and for ours by the simulated step.

    Over gloo itself, from three ranks on, ours send a large gather as a broadcast of each rank's part
    (docs/decisions/gloo.md).
    """
    num_ranks = below.size()
    has_parts = num_ranks > 2 and below._get_backend(torch.device("cpu")).name() == "gloo"
    specs = tuple(ParamSpec(name, tuple(param.shape)) for name, param in course.make_module().named_parameters())
    sizes = {"num_microbatches": course.num_microbatches, "bucket_cap_bytes": course.bucket_cap_bytes}
    six = ladder([spec.numel for spec in specs], **sizes)
    workload = Workload(tuple(TensorWork(spec.name, spec.numel) for spec in specs))
    free = FlatLink(latency_s=0.0, seconds_per_byte=0.0)
    ours = [Setting(workload, free, config, num_ranks, specs) for config in our_configs(course)]
    simulated = []
    for setting in ours:
        assert setting.configured_plan is not None  # our_configs() says a bucket size
        trace = setting.traces(setting.configured_plan)[-1]
        num_gathers = sum(record.kind is CollectiveKind.ALL_GATHER for record in trace.collectives)
        simulated.append(trace.num_collectives + (num_ranks - 1) * num_gathers * has_parts)
    return [*(rung.collectives_per_step for rung in six), six[-1].collectives_per_sync, *simulated]


# The table #


@dataclass(frozen=True)
class Row:
    """One rung: its measured steps on this rank, what was planned, and how far its weights are from the first rung's."""

    name: str
    traces: tuple[StepTrace, ...]
    planned: int
    difference: float

    @property
    def counted(self) -> set[int]:
        """How many collectives steps launched."""
        return {trace.num_collectives for trace in self.traces}

    def figures(self) -> dict[str, str]:
        # The fastest quarter: on a shared machine the others say more about other programs.
        traces = sorted(self.traces, key=lambda trace: trace.duration_s)[: (len(self.traces) + 3) // 4]
        step_s, compute_s = sum(trace.duration_s for trace in traces), sum(trace.compute_s for trace in traces)
        comm_s, busy_s = sum(trace.comm_s for trace in traces), sum(busy_s_of(trace) for trace in traces)
        return {
            "step ms": f"{1e3 * step_s / len(traces):.1f}",
            "compute": f"{compute_s / step_s:.1%}",
            "non-compute": f"{(busy_s - compute_s) / step_s:.1%}",
            "idle": f"{1 - busy_s / step_s:.1%}",
            "overlap": f"{(compute_s + comm_s - busy_s) / comm_s:.1%}",
            "overhead": f"{comm_s / busy_s:.1%}",
            "collectives": "/".join(map(str, sorted(self.counted))),
            "planned": str(self.planned),
            "comm ms": f"{1e3 * comm_s / len(traces):.1f}",
            "MB": f"{traces[0].payload_bytes / 1e6:.1f}",
            "differs": f"{self.difference:.0e}",
        }


def busy_s_of(trace: StepTrace) -> float:
    """Return the seconds in which the thread computed or a collective was under way."""
    comm = trace.lane(Lane.COMM)
    return length_s(comm) + length_s(trace.lane(Lane.COMPUTE), outside=(*trace.lane(Lane.WAIT), *comm))


def climb(below: dist.ProcessGroup, course: Course) -> tuple[list[Row], float]:
    """Train with every rung in turn over ``below``, which holds all ranks; return also how far training moved a weight."""
    meter = Meter(rank=below.rank())
    group = record(below, meter)
    rungs = make_rungs(course, group, meter)
    traces: dict[str, list[StepTrace]] = {name: [] for name in rungs}
    for round_index in range(course.num_rounds + 1):
        for name, rung in rungs.items():
            dist.barrier(below)
            measured = run_round(rung, course, seed=1000 * round_index + below.rank())
            if round_index > 0:  # in the first one torch DDP rebuilds its buckets, and ours learn what completes theirs
                traces[name] += measured
    *differences, moved = weight_differences([*(rung.module for rung in rungs.values()), course.make_module()], below)
    planned = planned_collectives(course, below)
    rows = [Row(name, tuple(traces[name]), plan, apart) for name, plan, apart in zip(rungs, planned, differences, strict=True)]
    dist.barrier(below)
    dist.destroy_process_group(group)
    return rows, moved


def run_round(rung: Simple, course: Course, *, seed: int) -> list[StepTrace]:
    """Return all steps but the first, in which no gather of the step before is under way."""
    generator = torch.Generator().manual_seed(seed)
    shape = (course.steps_per_round, course.num_microbatches, 2, course.batch, course.width)
    steps = torch.randn(shape, generator=generator)
    rung.meter.begin(time.perf_counter())
    for microbatches in steps:
        rung.run_step(microbatches)
        rung.meter.end_step(time.perf_counter())
    rung.finish_round()
    return rung.meter.traces()[1:]


def weight_differences(modules: list[torch.nn.Module], below: dist.ProcessGroup) -> list[float]:
    """Return how far any weight of each module on any rank is from the first module's on the first rank."""
    weights = torch.stack([torch.nn.utils.parameters_to_vector(module.parameters()).detach() for module in modules])
    reference = weights[0].clone()
    dist.broadcast(reference, group_src=0, group=below)
    differences = (weights - reference).abs().amax(dim=1)
    dist.all_reduce(differences, op=dist.ReduceOp.MAX, group=below)
    return differences.tolist()


def show(rows: list[Row]) -> None:
    figures = {row.name: row.figures() for row in rows}
    table = [["", *figures[rows[0].name]], *([name, *cells.values()] for name, cells in figures.items())]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for name, *cells in table:
        print("  ".join([name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fabric", metavar="LATENCY_S,BYTES_PER_S", help="measure on an emulated link instead of raw gloo")
    parser.add_argument("--rounds", type=int, default=Course.num_rounds, help="turns of every rung (default %(default)s)")
    parser.add_argument(
        "--batch", type=int, default=Course.batch, help="samples of a microbatch: compute (default %(default)s)"
    )
    options = parser.parse_args()
    if options.fabric:
        latency_s, bytes_per_s = map(float, options.fabric.split(","))
        EmulatedFabric(latency_s, bytes_per_s).init_process_group()
    else:
        dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    rows, moved = climb(dist.group.WORLD, Course(num_rounds=options.rounds, batch=options.batch))
    if dist.get_rank() == 0:
        show(rows)
        most = max(row.difference for row in rows)
        print(f"training moved weights by up to {moved:.2g}; those of two rungs differ by up to {most:.0e}")
    dist.barrier()
    dist.destroy_process_group()
    apart = [row.name for row in rows if not row.difference <= LARGEST_DIFFERENCE]  # nan is none of the two
    if apart:
        raise SystemExit(f"weights are more than {LARGEST_DIFFERENCE:g} from those of {rows[0].name!r}: {', '.join(apart)}")


if __name__ == "__main__":
    assert "RANK" in os.environ, __doc__
    main()
