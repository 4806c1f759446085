"""Gradients that say which ranks are in them, through real wrappers and real optimizer steps.

The gradient of rank ``r`` is ``2^r`` (``rank_code``), so the reduced one is known exactly: ``2^n - 1``, times the microbatches,
over ``n`` for a mean. It is compared bit by bit in the buffers, then the parameters after an update are, and what differs is
decoded into the ranks that are missing or counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, NamedTuple

import torch

from megabucket.comm import Communicator
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.doctor.probe import Bench, Fact, Judgement, Probe, right_or
from megabucket.doctor.rank_code import WIDTHS, RankCode, Reading
from megabucket.doctor.report import Verdict
from megabucket.errors import name_list
from megabucket.layout.shards import shard_slices
from megabucket.optim import DistributedOptimizer

SECTION: Final = "gradients"
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT16_WIDTH: Final = 12
"""Of the code of float16 parameters with float32 gradients: their values, sums over two steps included, stay below 65504."""
_MICROBATCHES: Final = (1, 2)
"""Of each step. The second step must not see the first one's gradients."""
_BUCKET_SIZE: Final = 40
"""Elements: several buckets of each buffer, of one or two parameters."""
_MOST_BUCKETS: Final = 4
"""That a small model can be cut into."""


@dataclass(frozen=True, slots=True)
class Path:
    """One way for gradients to travel."""

    name: str
    config: DistributedDataParallelConfig
    is_configured: bool
    """Whether it is the one the user asked for."""


def paths(config: DistributedDataParallelConfig) -> Iterator[Path]:
    """Return the configured path, then all others: mode x overlap x grouping x reduction, with several buckets.

    What none of the four says stays as configured.
    """
    own: dict[str, Any] = {}
    if config.num_buckets is not None:  # a large model's number may be more than the small one has elements
        own = {"num_buckets": min(config.num_buckets, _MOST_BUCKETS)}
    yield Path("as configured", _changed(config, own), is_configured=True)
    base = {
        "bucket_size": _BUCKET_SIZE,
        "bucket_cap_mb": None,
        "num_buckets": None,
        "overlap_param_gather": False,
    }
    reductions: dict[str, dict[str, Any]] = {
        "mean": {"grad_reduction": "mean", "average_in_collective": False, "grad_reduce_in_fp32": True},
        "mean by AVG": {"grad_reduction": "mean", "average_in_collective": True, "grad_reduce_in_fp32": True},
        "mean in 16 bits": {"grad_reduction": "mean", "average_in_collective": False, "grad_reduce_in_fp32": False},
        "sum": {"grad_reduction": "sum", "average_in_collective": False, "grad_reduce_in_fp32": True},
    }
    grouping = {"each bucket": "per_bucket", "one batch": "single"}
    for scatters, overlaps, batch, reduction in product((False, True), (True, False), grouping, reductions):
        names = ("reduce-scatter" if scatters else "all-reduce", "overlap" if overlaps else "no overlap", batch, reduction)
        changes = {
            **base,
            **reductions[reduction],
            "use_distributed_optimizer": scatters,
            "overlap_grad_reduce": overlaps,
            "bucket_groups": grouping[batch],
        }
        yield Path(", ".join(names), _changed(config, changes), is_configured=False)


def gradient_probe(path: Path) -> Probe:
    """Return the question whether gradients and updates of one path are right."""
    is_rounded = path.config.average_in_collective

    def observe(bench: Bench) -> Fact:
        return _train(path, bench)

    meaning = "gradients, updates and gathered parameters are right"
    exact = right_or(
        f"with this config {meaning}" if path.is_configured else f"{meaning}, every rank is in them exactly once",
        wrong="training would go wrong without a word",
        answer="exact",
    )

    def judge(facts: Sequence[Fact]) -> Judgement:
        causes = _causes(facts)
        found = exact([causes.get(rank, {"is_right": True}) for rank in range(len(facts))])
        rounding = max(fact["rounding"] for fact in facts)
        if causes:
            return replace(found, answer=f"{found.answer} (in {next(iter(causes.values()))['where']})")
        if rounding == 0:
            return found
        answer = f"every rank once, but rounded: up to {rounding:.1g}"
        return Judgement(Verdict.NOTE, answer, "AVG rounds on this back-end; ddp.average_in_collective=false does not")

    needs_avg = "; it needs AVG" if is_rounded else ""
    return Probe(
        SECTION,
        path.name,
        observe,
        judge,
        refusal=f"a wrapper with these settings does not work here{needs_avg}",
        is_required=path.is_configured or not is_rounded,
    )


def _causes(facts: Sequence[Fact]) -> dict[int, Fact]:
    """Return what went wrong first, by the ranks that see it.

    Wrong gradients make wrong parameters, also at ranks that own none of the gradients: those only follow. A rank that owns
    nothing but padding agrees with the others if they are of one mind.
    """
    wrong = {rank: fact for rank, fact in enumerate(facts) if not fact["is_right"]}
    causes = {rank: fact for rank, fact in wrong.items() if fact["is_in_gradients"]}
    if len({fact["problem"] for fact in causes.values()}) == 1:
        first = next(iter(causes.values()))
        return {**{rank: first for rank, fact in enumerate(facts) if not fact["owns_gradients"]}, **causes}
    return causes or wrong


def _changed(config: DistributedDataParallelConfig, changes: dict[str, Any]) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(**{**config.model_dump(), **changes})


class _Model(torch.nn.Module):
    """Parameters of several dtypes and shapes, all zero, whose gradients are whatever coefficients say."""

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        super().__init__()
        unit = max(16, *(RankCode(num_ranks, WIDTHS[_name(dtype)]).period for dtype in _DTYPES))
        shapes = ((3 * unit + 1,), (5, unit), (unit + 7,), ())
        for dtype, (index, shape) in product(_DTYPES, enumerate(shapes)):
            values = torch.zeros(shape, dtype=dtype, device=device)
            self.register_parameter(f"{_name(dtype)}_{index}", torch.nn.Parameter(values))

    def forward(self, coefficients: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a number whose derivative by each parameter is its coefficient."""
        terms = [(param.float() * coefficients[name]).sum() for name, param in self.named_parameters()]
        return torch.stack(terms).sum()


def _train(path: Path, bench: Bench) -> Fact:
    """Return the first thing that is wrong in two steps on this rank, and the largest relative rounding of a right one."""
    communicator = bench.communicator
    model = _Model(communicator.size, bench.device)
    ranks: dict[str, Any] = {"communicator": communicator}
    if path.is_configured and bench.group is not None:
        # As in training: the wrapper makes a communicator of its own, with heartbeats. One for each path would be 33 threads
        # with a connection to the store each.
        ranks = {"process_group": bench.group.group}
    ddp = DistributedDataParallel(model, path.config, **ranks)
    try:
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), ddp)
        check = _Check(ddp, model, communicator)
        for step, num_microbatches in enumerate(_MICROBATCHES, start=1):
            _run_backwards(ddp, check.coefficients, num_microbatches)
            ddp.finish_grad_sync()
            check.compare_gradients(f"step {step}", times=num_microbatches)
            optimizer.step()
            ddp.finish_param_sync()
            check.compare_parameters(f"step {step}", times=num_microbatches)
            optimizer.zero_grad()
    finally:
        ddp.detach()
    return check.to_fact()


def _run_backwards(ddp: DistributedDataParallel, coefficients: dict[str, torch.Tensor], num_microbatches: int) -> None:
    with ddp.no_sync():
        for _ in range(num_microbatches - 1):
            ddp(coefficients).backward()
    ddp(coefficients).backward()


class _Piece(NamedTuple):
    """What this rank can check of one gradient: all of it, or what it owns of one bucket."""

    name: str
    start: int  # in the flattened parameter
    grad: torch.Tensor  # 1D view of the buffer, gradient dtype


class _Check:
    """Compares one wrapper's buffers with what they must hold; keeps the first difference in words."""

    def __init__(self, ddp: DistributedDataParallel, model: _Model, communicator: Communicator) -> None:
        self.problem = ""
        self.where = ""  # which parameters
        self.culprits: tuple[int, ...] = ()
        self.is_in_gradients = False
        self.rounding = 0.0
        self._size = communicator.size
        self._config = ddp.ddp_config
        self._params = dict(model.named_parameters())
        self._pieces = list(_pieces(ddp, communicator.rank))
        self._grad_dtypes = {name: buffer.grad_data.dtype for buffer in ddp.param_and_grad_buffers for name in buffer.params}
        self._codes = {name: _code(self._size, param.dtype, self._grad_dtypes[name]) for name, param in self._params.items()}
        self._main = {name: torch.zeros(param.numel()) for name, param in self._params.items()}  # float32, as the optimizer's
        self.coefficients = {
            name: torch.tensor(self._codes[name].values(communicator.rank, stop=param.numel()), dtype=torch.float32)
            .view(param.shape)
            .to(param.device)
            for name, param in self._params.items()
        }

    def compare_gradients(self, when: str, *, times: int) -> None:
        """Compare what this rank holds of the reduced gradients.

        Args:
            times: microbatches of the step.
        """
        wrong = [piece for piece in self._pieces if not self._is_same(piece.grad.cpu(), self._right_for(piece, times))]
        if not wrong or self.problem:
            return
        piece = max(wrong, key=lambda one: one.grad.numel())  # the more elements, the more surely they are read
        sums = (piece.grad.double() * self._divisor).tolist()
        reading = self._codes[piece.name].read(sums, start=piece.start, times=times) or Reading("values are rounded")
        self.problem, self.culprits, self.is_in_gradients = f"{when}: {reading.text}", reading.ranks, True
        self.where = _names([piece.name for piece in wrong])

    def compare_parameters(self, when: str, *, times: int) -> None:
        """Compare all parameters with an update done by hand. Call it once a step.

        Args:
            times: microbatches of the step.
        """
        wrong = []
        for name, param in self._params.items():
            self._main[name] -= self._reduced(name, 0, param.numel(), times=times).float()
            got, right = param.detach().reshape(-1).cpu(), self._main[name].to(param.dtype)
            if not self._is_same(got, right):
                wrong.append(name)
        if wrong and not self.problem:
            self.problem, self.where = f"{when}: parameters are wrong after the update", _names(wrong)

    def _right_for(self, piece: _Piece, times: int) -> torch.Tensor:
        return self._reduced(piece.name, piece.start, piece.start + piece.grad.numel(), times=times)

    def _reduced(self, name: str, start: int, stop: int, *, times: int) -> torch.Tensor:
        """Return the gradient as it must be: whole numbers, divided and rounded once."""
        sums = self._codes[name].sums(start=start, stop=stop, times=times)
        return (torch.tensor(sums, dtype=torch.float64) / self._divisor).to(self._grad_dtypes[name])

    @property
    def _divisor(self) -> int:
        return 1 if self._config.grad_reduction == "sum" else self._size

    def _is_same(self, got: torch.Tensor, right: torch.Tensor) -> bool:
        """Return whether values are bitwise right, or rounded as AVG may round them."""
        if torch.equal(got, right):
            return True
        if not self._config.average_in_collective:
            return False
        exact = right.double()
        error = torch.where(exact == 0, got.double().abs(), (got.double() / exact - 1).abs()).max().item()
        if not error <= (self._size + 2) * torch.finfo(got.dtype).eps:
            return False
        self.rounding = max(self.rounding, error)
        return True

    def to_fact(self) -> Fact:
        """Return the first thing that was wrong, ready for the other ranks."""
        return {
            "is_right": not self.problem,
            "problem": self.problem,
            "where": self.where,
            "culprits": self.culprits,
            "is_in_gradients": self.is_in_gradients,
            "owns_gradients": bool(self._pieces),
            "is_partial": self._config.use_distributed_optimizer and self.is_in_gradients,
            "rounding": self.rounding,
        }


def _names(names: Sequence[str]) -> str:
    return name_list(list(dict.fromkeys(names)))


def _code(num_ranks: int, param_dtype: torch.dtype, grad_dtype: torch.dtype) -> RankCode:
    width = WIDTHS[_name(grad_dtype)]
    return RankCode(num_ranks, min(width, _FLOAT16_WIDTH) if param_dtype is torch.float16 else width)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pieces(ddp: DistributedDataParallel, rank: int) -> Iterator[_Piece]:
    """Return where this rank holds reduced gradients, parameter by parameter."""
    for buffer in ddp.param_and_grad_buffers:
        if not ddp.ddp_config.use_distributed_optimizer:
            for name, slot in buffer.layout.params.items():
                yield _Piece(name, 0, buffer.grad_data[slot.start : slot.stop])
            continue
        for bucket in range(len(buffer.layout.buckets)):
            for piece in shard_slices(buffer.layout, bucket=bucket, rank=rank):
                values = buffer.grad_data[piece.in_buffer.start : piece.in_buffer.stop]
                yield _Piece(piece.param, piece.in_param.start, values)
