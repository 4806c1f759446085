"""Cells: five training steps under one combination of settings, the record they leave, and the single process to compare with.

Bound of the gradients. ``x_i`` are the gradients of the ``n`` microbatches of all ranks, computed by plain torch alone at the
weights of the record; they are the same bits on the ranks, which run the same operations on the same values. ``u`` is 2^-24,
float32's unit roundoff. Summing over microbatches and ranks and dividing by the ranks rounds at most ``n`` times on the way of
any ``x_i`` (n - 1 additions, one division), in whatever order, so the result is off by at most ``gamma(n) * sum|x_i| / ranks``
with ``gamma(k) = k u / (1 - k u)`` (Higham, "Accuracy and Stability of Numerical Algorithms", lemma 3.1). Clipping adds four
roundings: the sum and the quotient of the factor, its rounding to float32, and the product. No slack is added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from odd_model import OddModel, Precision, flat, local_grads, loss_of, set_weights, tokens_of, trainable, unflatten
from pool import Rank, WorkerPool

import megabucket as mb

STEPS = 5
LEARNING_RATE, WEIGHT_DECAY = 1e-2, 0.1
TINY, ONE_PARAMETER, HUGE = 1, 64, 1_000_000
CLIP_AT_STEP = (1e6, 0.5, 1e6, 0.5, 0.5)  # the norms of these runs lie between 0.5 and 1e6: bites at steps 1, 3 and 4
UNIT_ROUNDOFF = 2.0**-24
BF16_UNIT_ROUNDOFF = 2.0**-8

Driver = Literal["reduce-scatter", "all-reduce", "all-reduce and plain AdamW"]


@dataclass(frozen=True)
class Cell:
    """One combination."""

    ranks: int
    driver: Driver
    overlap: bool
    bucket_size: int
    microbatches: int
    precision: Precision
    options: tuple[tuple[str, Any], ...] = ()  # further fields of the config

    @property
    def config(self) -> mb.DistributedDataParallelConfig:
        return mb.DistributedDataParallelConfig(
            use_distributed_optimizer=self.driver == "reduce-scatter",
            overlap_grad_reduce=self.overlap,
            bucket_size=self.bucket_size,
            **dict(self.options),
        )

    @property
    def is_plain(self) -> bool:
        return self.driver == "all-reduce and plain AdamW"

    @property
    def num_terms(self) -> int:
        return self.ranks * self.microbatches

    @property
    def divisor(self) -> int:
        return 1 if self.config.grad_reduction == "sum" else self.ranks

    @property
    def has_bf16_grads(self) -> bool:
        return self.precision == "bfloat16" and not self.config.grad_reduce_in_fp32


@dataclass
class Record:
    """What one rank saw. Gradients are NaN where another rank owns the element."""

    weights: list[torch.Tensor] = field(default_factory=list)  # STEPS + 1
    grads: list[torch.Tensor] = field(default_factory=list)  # STEPS
    norms: list[float] = field(default_factory=list)  # STEPS


# On the ranks #


def train_cells(rank: Rank, cells: list[Cell]) -> list[Record]:
    return [train_cell_or_name_it(rank, cell) for cell in cells]


def train_cell_or_name_it(rank: Rank, cell: Cell) -> Record:
    try:
        return train_cell(rank, cell)
    except Exception as error:
        raise RuntimeError(f"in {cell}") from error


def train_cell(rank: Rank, cell: Cell) -> Record:
    record = Record()
    model = OddModel(cell.precision, seed=rank.index)  # ranks differ until the wrapper makes them equal
    ddp = mb.DistributedDataParallel(model, cell.config, process_group=rank.group)
    inner = torch.optim.AdamW(ddp.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    optimizer = inner if cell.is_plain else mb.DistributedOptimizer(inner, ddp)
    see_grads = (lambda: flat(p.grad for p in trainable(model))) if cell.is_plain else (lambda: grads_on_this_rank(ddp))
    inner.register_step_pre_hook(lambda *_: record.grads.append(see_grads()))
    for step in range(STEPS):
        record.weights.append(flat(trainable(model)))
        for microbatch in range(cell.microbatches - 1):
            with ddp.no_sync():
                loss_of(ddp, tokens_of(step, rank.index, microbatch)).backward()
        loss_of(ddp, tokens_of(step, rank.index, cell.microbatches - 1)).backward()
        if cell.is_plain:
            record.norms.append(torch.nn.utils.clip_grad_norm_(ddp.parameters(), CLIP_AT_STEP[step]).item())
            optimizer.step()
        else:
            optimizer.clip_grad = CLIP_AT_STEP[step]
            record.norms.append(optimizer.step().grad_norm)
        optimizer.zero_grad()
    record.weights.append(flat(trainable(model)))
    return record


def grads_on_this_rank(ddp: mb.DistributedDataParallel) -> torch.Tensor:
    pieces = {}
    for buffer in ddp.param_and_grad_buffers:
        known = torch.full_like(buffer.grad_data, float("nan"))
        for bucket in buffer.layout.buckets:
            span = (bucket.start, bucket.stop)
            if ddp.ddp_config.use_distributed_optimizer:
                span = buffer.layout.shard_span(bucket=bucket.index, rank=ddp.communicator.rank)
            known[slice(*span)] = buffer.grad_data[slice(*span)]
        pieces |= {name: known[slot.start : slot.stop] for name, slot in buffer.layout.params.items()}
    return flat(pieces[name] for name in ddp.param_names.values())


# In this process #


def run_cells(pool: WorkerPool, cells: Iterable[Cell]) -> dict[Cell, tuple[Record, ...]]:
    """Train all cells and return their records, one per rank. Cells of one group size travel together."""
    records: dict[Cell, tuple[Record, ...]] = {}
    for (ranks, _), batch in groupby_fields(cells, "ranks", "precision").items():
        by_rank = pool.run(train_cells, batch, ranks=ranks, timeout_s=100)
        records |= dict(zip(batch, zip(*by_rank, strict=True), strict=True))
    return records


def groupby_fields(cells: Iterable[Cell], *names: str) -> dict[tuple[Any, ...], list[Cell]]:
    """Return the cells by the values of some of their fields."""
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(tuple(getattr(cell, name) for name in names), []).append(cell)
    return groups


class SingleProcess:
    """Plain torch on the data of all ranks. Remembers its answers: cells with equal bits ask the same questions."""

    def __init__(self) -> None:
        self._models = {precision: OddModel(precision, seed=0) for precision in ("float32", "bfloat16", "mixed")}
        self._terms: dict[tuple[Any, ...], torch.Tensor] = {}

    def terms(self, cell: Cell, step: int, weights: torch.Tensor) -> torch.Tensor:
        """Return the gradients of every microbatch of every rank at ``weights``: shape (n, elements), float64."""
        key = (cell.precision, cell.ranks, cell.microbatches, step, weights.numpy().tobytes())
        if key not in self._terms:
            model = self._models[cell.precision]
            set_weights(model, weights)
            self._terms[key] = local_grads(model, step=step, ranks=cell.ranks, microbatches=cell.microbatches).double()
        return self._terms[key]

    def replay(self, cell: Cell, record: Sequence[Record]) -> list[torch.Tensor]:
        """Return the weights of a plain AdamW on whole float32 tensors that is given the recorded gradients."""
        model = OddModel(cell.precision, seed=0)
        run = PlainRun(model)
        weights = [flat(trainable(model))]
        for step in range(STEPS):
            run.step(whole_grad(record, step))
            weights.append(flat(trainable(model)))
        return weights

    def train(self, cell: Cell, *, push: float = 0.0, signs: int = 0) -> torch.Tensor:
        """Return the weights after all steps.

        Args:
            push: move every gradient element by this many times ``sum|x_i| / ranks``, with random signs.
            signs: seed of the signs.
        """
        model = OddModel(cell.precision, seed=0)
        run = PlainRun(model)
        generator = torch.Generator().manual_seed(signs)
        for step in range(STEPS):
            terms = self.terms(cell, step, flat(trainable(model))) / cell.divisor
            sign = torch.randint(2, terms[0].shape, generator=generator) * 2 - 1
            grad = terms.sum(0) + push * sign * terms.abs().sum(0)
            run.step((grad * clip_factor(grad.norm().item(), step)).float())
        return flat(trainable(model))


class PlainRun:
    """AdamW on float32 copies of the parameters, rounded back into the model after each step."""

    def __init__(self, model: OddModel) -> None:
        self._params = trainable(model)
        self._main = [param.detach().float().clone().requires_grad_() for param in self._params]
        self._optimizer = torch.optim.AdamW(self._main, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def step(self, grad: torch.Tensor) -> None:
        for main, piece in zip(self._main, unflatten(grad, self._main), strict=True):
            main.grad = piece
        self._optimizer.step()
        with torch.no_grad():
            for param, main in zip(self._params, self._main, strict=True):
                param.copy_(main)


def whole_grad(record: Sequence[Record], step: int) -> torch.Tensor:
    """Return the gradient of all elements, each from the rank that owns it."""
    if not record[0].grads[step].isnan().any():
        return record[0].grads[step]
    return torch.stack([one.grads[step] for one in record]).nansum(0)


def gamma(roundings: int, unit_roundoff: float = UNIT_ROUNDOFF) -> float:
    return roundings * unit_roundoff / (1 - roundings * unit_roundoff)


def clip_factor(norm: float, step: int) -> float:
    return min(1.0, CLIP_AT_STEP[step] / (norm + 1e-6))


def grad_error_over_bound(cell: Cell, record: Sequence[Record], step: int, alone: SingleProcess) -> float:
    """Return the largest error of any gradient element, as a fraction of its bound; ``inf`` where the bound is 0."""
    terms = alone.terms(cell, step, record[0].weights[step])
    if cell.has_bf16_grads:
        # What is recorded is the buffer, which is not clipped: the optimizer steps with a widened copy.
        factor, bound = 1.0, gamma(cell.num_terms, BF16_UNIT_ROUNDOFF)
    else:
        factor = clip_factor(record[0].norms[step], step)
        bound = gamma(cell.num_terms + (4 if factor < 1 else 0))
    error = (whole_grad(record, step).double() - factor * terms.sum(0) / cell.divisor).abs()
    return float((error / (factor * bound * terms.abs().sum(0) / cell.divisor)).nan_to_num(0).max())


def difference(a: Sequence[Record], b: Sequence[Record]) -> str:
    """Say in what two records differ, bit by bit; empty when in nothing."""
    found = []
    for step in range(STEPS):
        if not torch.equal(whole_grad(a, step), whole_grad(b, step)):
            found.append(f"gradients of step {step}")
        if a[0].norms[step] != b[0].norms[step]:
            found.append(f"norm of step {step}: {a[0].norms[step]!r} and {b[0].norms[step]!r}")
        if not torch.equal(a[0].weights[step + 1], b[0].weights[step + 1]):
            found.append(f"weights after step {step}")
    return ", ".join(found)


def assert_none(failures: list[str]) -> None:
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:10])
