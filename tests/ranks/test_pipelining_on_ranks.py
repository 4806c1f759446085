"""torch's pipeline schedules over wrapped stages on four ranks (pp 2 x dp 2), against the whole model in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_ranks import groups_of
from pool import Rank
from torch.distributed import pipelining
from torch.nn.functional import cross_entropy

import megabucket as mb
from megabucket.errors import MegabucketError, PhaseError
from megabucket.integrations.pipelining import PipelineStage
from megabucket.layout import megatron_identity

pytestmark = pytest.mark.dist

STEPS, VOCABULARY, WIDTH, ROWS, MICROBATCHES = 12, 24, 16, 4, 4
BATCH = 2 * MICROBATCHES * ROWS  # of all replicas, in one call of a schedule
Weights = dict[str, torch.Tensor]

SINGLE = {"GPipe": pipelining.ScheduleGPipe, "1F1B": pipelining.Schedule1F1B}
MULTI = {
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zero-bubble-V": pipelining.ScheduleZBVZeroBubble,
}
OTHERS = {"looped-BFS": pipelining.ScheduleLoopedBFS, "dual-pipe-V": pipelining.schedules.ScheduleDualPipeV}


@dataclass(frozen=True)
class Cell:
    """One way to train. With ``plain`` torch's optimizer steps, on gradients that the user clips."""

    schedule: str
    sharded: bool = False
    plain: bool = False
    scales: bool = True
    infers: bool = True
    overlaps: bool = True
    calls: int = 1
    tied: bool = False
    wide: bool = True
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        fields = dataclasses.fields(self)[1:]
        others = (f"{field.name}={getattr(self, field.name)}" for field in fields if getattr(self, field.name) != field.default)
        return ",".join([self.schedule, *others])


class Part(torch.nn.Module):
    """A piece of the model: an embedding in the first one, a head in the last."""

    trap: Callable[[torch.Tensor], None] | None = None
    """Called with the first hidden values of each forward."""

    def __init__(self, index: int, num_parts: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        if index == 0:
            self.ends = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4 // num_parts))
        if index == num_parts - 1:
            self.ends = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) / WIDTH**0.5)
        self.is_first, self.is_last = index == 0, index == num_parts - 1

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.ends(hidden) if self.is_first else hidden
        if self.trap is not None:
            self.trap(hidden)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden)) + hidden
        return self.ends(hidden) if self.is_last else hidden


def make_parts(num_parts: int, *, tied: bool) -> list[Part]:
    parts = [Part(index, num_parts) for index in range(num_parts)]
    if tied:
        parts[-1].ends.weight = parts[0].ends.weight
    return parts


def batch_of(step: int, call: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (BATCH, 3), generator=torch.Generator().manual_seed(10 * step + call))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, -2).float(), (tokens * 7 + 1).flatten() % VOCABULARY)


def values_of(parts: list[torch.nn.Module]) -> Weights:
    named = [(f"{index}.{name}", value) for index, part in enumerate(parts) for name, value in part.named_parameters()]
    return {name: value.detach().clone() for name, value in named}


SGD = partial(torch.optim.SGD, lr=0.2, momentum=0.9)


@dataclass
class Expected:
    initial: Weights
    weights: Weights
    thresholds: list[float]


def in_one_process(num_parts: int, cell: Cell, without: int = -1) -> Expected:
    parts = make_parts(num_parts, tied=cell.tied)
    model = torch.nn.Sequential(*parts)
    optimizer, thresholds, initial = SGD(model.parameters()), [], values_of(parts)
    for step in range(STEPS):
        for call in range(cell.calls):
            loss_of(model(tokens := batch_of(step, call)), tokens).backward()
        norm = float(torch.nn.utils.get_total_norm([param.grad for param in model.parameters()]))
        thresholds.append(0.4 * norm if step % 2 else 0.8 * norm)  # in every other step gradients shrink to half
        torch.nn.utils.clip_grad_norm_(model.parameters(), thresholds[-1])
        if step != without:
            optimizer.step()
        optimizer.zero_grad()
    return Expected(initial, values_of(parts), thresholds)


# The same on four ranks #


@dataclass
class Pipeline:
    """The stages of one rank under one schedule."""

    ddps: list[mb.DistributedDataParallel]
    indices: list[int]
    schedule: Any
    pp: dist.ProcessGroup
    dp: dist.ProcessGroup
    num_stages: int

    def step(self, tokens: torch.Tensor) -> list[float]:
        """Run one call of the schedule on this replica's part of a batch; return the losses of the last stage."""
        tokens = tokens.chunk(2)[self.dp.rank()]
        losses: list[torch.Tensor] = []
        is_last = self.num_stages - 1 in self.indices
        target = {"target": tokens, "losses": losses} if is_last else {}
        self.schedule.step(*((tokens,) if 0 in self.indices else ()), **target)
        return [loss.item() for loss in losses]

    def values(self) -> Weights:
        found = {}
        for index, ddp in zip(self.indices, self.ddps, strict=True):
            found |= {f"{index}.{name}": value.detach().clone() for name, value in ddp.module.named_parameters()}
        return found

    def close(self) -> None:
        for ddp in self.ddps:
            ddp.detach()


def config_of(cell: Cell) -> mb.DistributedDataParallelConfig:
    return mb.DistributedDataParallelConfig(
        use_distributed_optimizer=cell.sharded,
        finish="explicit" if cell.wide and not cell.sharded else "auto",
        overlap_grad_reduce=cell.overlaps,
        overlap_param_gather=cell.sharded and cell.overlaps,
        bucket_size=300,
    )


def groups_for(index: int, part: Part, cell: Cell, pp: dist.ProcessGroup, dp: dist.ProcessGroup, world: Any) -> dict[str, Any]:
    if not cell.wide:
        return {"process_group": dp}
    if not cell.tied:
        return {"groups": mb.ParallelGroups({"dense": dp}, norm_group=world, step_group=world)}
    if hasattr(part, "ends"):
        part.ends.weight.shared = part.ends.weight.shared_embedding = True

    def name_of(name: str) -> str:
        return "0.ends.weight" if name == "ends.weight" else f"{index}.{name}"

    identity = megatron_identity(tp_rank=0, tp_size=1, name_of=name_of)
    copies = {"embd": pp, "pp": pp}
    return {"groups": mb.ParallelGroups({"dense": dp}, copies=copies, norm_group=world, step_group=world, identity=identity)}


def make_pipeline(
    rank: Rank, cell: Cell, change: Callable[[int, Part], None] = lambda *_: None, loss: Any = loss_of
) -> Pipeline:
    pp, dp = groups_of(rank.index, 2)
    place, num_parts = pp.rank(), 2 if cell.schedule in SINGLE else 4
    indices = [place, 3 - place] if cell.schedule.endswith("-V") else list(range(place, num_parts, 2))
    ddps, stages = [], []
    for index in indices:
        part = Part(index, num_parts).to(cell.dtype)
        groups = groups_for(index, part, cell, pp, dp, rank.group)
        change(index, part)
        ddps.append(mb.DistributedDataParallel(part, config_of(cell), **groups))
        shapes: dict[str, Any] = {}
        if not cell.infers:
            tokens, hidden = torch.zeros(ROWS, 3, dtype=torch.int64), torch.zeros(ROWS, 3, WIDTH, requires_grad=True)
            shapes["input_args"] = tokens if index == 0 else hidden
            shapes["output_args"] = torch.zeros(ROWS, 3, VOCABULARY, requires_grad=True) if index == num_parts - 1 else hidden
        stages.append(PipelineStage(ddps[-1], index, num_parts, torch.device("cpu"), group=pp, **shapes))
    loss_fn = loss if cell.scales else lambda *given: loss(*given) / MICROBATCHES
    arguments = {"loss_fn": stages[-1].reporting(loss_fn), "scale_grads": cell.scales}
    if cell.schedule in SINGLE:
        schedule = SINGLE[cell.schedule](stages[0], MICROBATCHES, **arguments)
    else:
        schedule = (MULTI | OTHERS)[cell.schedule](stages, MICROBATCHES, **arguments)
    return Pipeline(ddps, indices, schedule, pp, dp, num_parts)


def make_optimizer(pipeline: Pipeline, cell: Cell) -> Any:
    if cell.plain:
        return SGD([param for ddp in pipeline.ddps for param in ddp.parameters()])
    optimizers = [mb.DistributedOptimizer(SGD(ddp.parameters()), ddp) for ddp in pipeline.ddps]
    return mb.ChainedOptimizer(optimizers) if len(optimizers) > 1 else optimizers[0]


def update(pipeline: Pipeline, cell: Cell, optimizer: Any, threshold: float) -> None:
    if cell.wide and (not cell.sharded or cell.tied):
        mb.finalize_grads(pipeline.ddps)
    if cell.plain:
        params = [param for ddp in pipeline.ddps for param in ddp.parameters()]
        norm = torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
        dist.all_reduce(total := norm**2, group=pipeline.pp)
        torch.nn.utils.clip_grads_with_norm_(params, threshold, total**0.5)
    else:
        optimizer.clip_grad = threshold
    optimizer.step()
    optimizer.zero_grad()


def train(rank: Rank, cell: Cell, thresholds: list[float]) -> Weights:
    pipeline = make_pipeline(rank, cell)
    optimizer = make_optimizer(pipeline, cell)
    for step, threshold in enumerate(thresholds):
        for call in range(cell.calls):
            with ExitStack() as stack:
                if call + 1 < cell.calls:
                    for ddp in pipeline.ddps:
                        stack.enter_context(ddp.no_sync())
                pipeline.step(batch_of(step, call))
        update(pipeline, cell, optimizer, threshold)
    for ddp in pipeline.ddps:
        ddp.check_replicas()
    pipeline.close()
    return pipeline.values()


def check(pool: Any, cell: Cell) -> None:
    expected = in_one_process(2 if cell.schedule in SINGLE else 4, cell)

    results = pool.run(train, cell, expected.thresholds, ranks=4)

    assert_as_expected(results, expected)


def assert_as_expected(results: list[Weights], expected: Expected) -> None:
    for first in (0, 2):
        weights = results[first] | results[first + 1]
        assert weights.keys() >= expected.weights.keys()
        for name, value in expected.weights.items():
            moved = (value - expected.initial[name]).abs().max()
            assert (weights[name] - value).abs().max() <= 1e-4 * moved, name


CELLS = [
    Cell("GPipe", plain=True, wide=False),
    Cell("1F1B", sharded=True),
    Cell("interleaved-zero-bubble", sharded=True),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_schedule_trains_as_one_process(pool, cell):
    check(pool, cell)


def grid() -> Iterator[Cell]:
    for place, (schedule, overlaps, calls, mode) in enumerate(product([*SINGLE, *MULTI], [True, False], [1, 3], range(4))):
        how = [{"sharded": True}, {"plain": True}, {"plain": True, "wide": False}, {}][mode]
        yield Cell(schedule, overlaps=overlaps, calls=calls, scales=place % 3 > 0, infers=place % 5 > 1, **how)


@pytest.mark.nightly
@pytest.mark.parametrize("cell", list(grid()), ids=str)
def test_a_schedule_trains_as_one_process_in_every_mode(pool, cell):
    check(pool, cell)


@pytest.mark.nightly
@pytest.mark.parametrize("how", [{"sharded": True}, {"plain": True, "wide": False}], ids=str)
@pytest.mark.parametrize("schedule", OTHERS)
def test_the_other_schedules_of_torch_train_as_one_process(pool, schedule, how):
    check(pool, Cell(schedule, **how))


TIED = [Cell("1F1B", sharded=True, tied=True), Cell("GPipe", tied=True, calls=3)]


@pytest.mark.parametrize("cell", [TIED[0], pytest.param(TIED[1], marks=pytest.mark.nightly)], ids=str)
def test_tied_first_and_last_stages_train_as_one_process(pool, cell):
    check(pool, cell)


# A stage fails #


class OnFireError(Exception):
    pass


@dataclass
class Fault:
    """An exception in one microbatch of one step, in one stage of the second replica."""

    kind: str
    step: int
    stage: int
    microbatch: int
    now: int = -1
    num_calls: int = 0

    def burn(self, *_: Any) -> None:
        """Raise if it is time."""
        self.num_calls += self.now == self.step
        # The first forward of the first step is the one from which torch infers shapes.
        if self.now == self.step and self.num_calls == self.microbatch + 1 + (self.step == 0 and self.kind == "forward"):
            raise OnFireError("the second replica is on fire")

    def set_up(self, index: int, part: Part) -> None:
        """Let a part of the second replica fail."""
        if index != self.stage:
            return
        if self.kind == "forward":
            part.trap = self.burn
        elif self.kind == "backward":
            part.trap = lambda hidden: hidden.register_hook(self.burn) if hidden.requires_grad else None
        elif self.kind == "weight":
            part.layers[0].weight.register_hook(self.burn)

    def loss(self, *args: torch.Tensor) -> torch.Tensor:
        """Compute the loss, or fail."""
        if self.kind == "loss":
            self.burn()
        return loss_of(*args)


def train_through_a_fault(rank: Rank, cell: Cell, fault: Fault, thresholds: list[float]) -> tuple[str, Weights]:
    """Return the error of this rank, and the weights."""
    faulty = {"change": fault.set_up, "loss": fault.loss} if rank.index >= 2 else {}
    pipeline = make_pipeline(rank, cell, **faulty)
    optimizer, text = make_optimizer(pipeline, cell), ""
    for step, threshold in enumerate(thresholds):
        fault.now = step
        pipeline.step(batch_of(step))
        try:
            update(pipeline, cell, optimizer, threshold)
        except MegabucketError as error:
            assert step == fault.step
            text = f"{type(error).__name__}: {error}" + (f" <- {error.__cause__}" if isinstance(error, PhaseError) else "")
            for ddp in pipeline.ddps:
                ddp.zero_grad()
            optimizer.zero_grad()
        else:
            assert step != fault.step
    pipeline.close()
    return text, pipeline.values()


def check_fault(pool: Any, cell: Cell, fault: Fault) -> list[str]:
    """Return the errors by rank."""
    expected = in_one_process(2 if cell.schedule in SINGLE else 4, cell, without=fault.step)

    results = pool.run(train_through_a_fault, cell, fault, expected.thresholds, ranks=4)

    assert_as_expected([weights for _, weights in results], expected)
    return [text for text, _ in results]


@pytest.mark.parametrize(
    ("cell", "fault"),
    [
        (Cell("1F1B", sharded=True), Fault("forward", step=0, stage=1, microbatch=0)),
        (Cell("interleaved-zero-bubble", sharded=True), Fault("weight", step=2, stage=2, microbatch=1)),
        pytest.param(
            Cell("zero-bubble-V", plain=True),
            Fault("backward", step=2, stage=1, microbatch=2),
            marks=pytest.mark.skipif(torch.__version__ < "2.13", reason="V schedules of torch 2.11 fail over gloo"),
        ),
        (Cell("GPipe", sharded=True), Fault("loss", step=1, stage=1, microbatch=3)),
    ],
)
def test_an_exception_in_one_stage_is_named_on_all_ranks_and_the_next_step_is_right(pool, cell, fault):
    texts = check_fault(pool, cell, fault)

    assert len(set(texts)) == 1
    assert "the second replica is on fire" in texts[0]


@pytest.mark.nightly
@pytest.mark.parametrize("how", [{"sharded": True}, {"plain": True}, {}], ids=str)
@pytest.mark.parametrize("kind", ["forward", "backward", "weight", "loss"])
@pytest.mark.parametrize("schedule", [*SINGLE, *MULTI])
def test_an_exception_of_any_kind_is_named_on_all_ranks(pool, schedule, kind, how):
    last = 1 if schedule in SINGLE else 3
    fault = Fault(kind, step=3, stage=last if kind == "loss" else last - 1, microbatch=2)

    texts = check_fault(pool, Cell(schedule, **how), fault)

    assert len(set(texts)) == 1
    assert "the second replica is on fire" in texts[0]


@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("interleaved", marks=pytest.mark.nightly)])
def test_without_a_wide_step_group_other_stages_find_nan(pool, schedule):
    cell, fault = Cell(schedule, plain=True, wide=False), Fault("forward", step=2, stage=1, microbatch=1)

    texts = check_fault(pool, cell, fault)

    for rank, text in enumerate(texts):
        of_failed_stage = rank % 2 == 1
        assert ("the second replica is on fire" if of_failed_stage else "nan") in text
