"""Gradients that say which ranks are in them, through real wrappers and real optimizer steps.

The gradient of rank ``r`` is ``2^r`` (``rank_code``), so the reduced one is known exactly: ``2^n - 1``, times the microbatches,
over ``n`` for a mean. It is compared bit by bit in the buffers, then the parameters after an update are, and what differs is
decoded into the ranks that are missing or counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import torch

from megabucket.buffer import ParamAndGradBuffer
from megabucket.comm import Communicator
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.doctor.probe import Bench, Fact, Judgement, Probe, by_rank, right_or
from megabucket.doctor.rank_code import WIDTHS, RankCode
from megabucket.doctor.report import Verdict
from megabucket.layout.shards import shard_slices
from megabucket.optim import DistributedOptimizer

SECTION: Final = "gradients"
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT16_WIDTH: Final = 12
"""Of the code of float16 parameters with float32 gradients: their values, sums over two steps included, stay below 65504."""
_MICROBATCHES: Final = (1, 2)
"""Of each step. The second step must not see the first one's gradients."""
_SMALL_BUCKETS: Final = 4
"""Buckets of each buffer, about."""


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
        own = {"num_buckets": min(config.num_buckets, _SMALL_BUCKETS)}
    yield Path("as configured", _changed(config, own), is_configured=True)
    base = {
        "bucket_size": None,
        "bucket_cap_mb": None,
        "num_buckets": _SMALL_BUCKETS,
        "overlap_param_gather": False,
        "heartbeat_s": None,  # nothing lives long enough to need one
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
        return _train(path.config, bench)

    exact = right_or(
        "every gradient holds every rank exactly once; updates and gathered parameters are right",
        wrong="training would go wrong without a word",
        answer="exact",
    )

    def judge(facts: Sequence[Fact]) -> Judgement:
        rounding = max(fact["rounding"] for fact in facts)
        if rounding == 0 or not all(fact["is_right"] for fact in facts):
            return exact(facts)
        answer = by_rank([f"every rank once, but rounded: up to {fact['rounding']:.1g}" for fact in facts])
        return Judgement(Verdict.NOTE, answer, "AVG rounds on this back-end; ddp.average_in_collective=false does not")

    means_avg = "; this path needs AVG, which the back-end refuses" if is_rounded else ""
    return Probe(
        SECTION,
        path.name,
        observe,
        judge,
        refusal=f"a wrapper with these settings does not work here{means_avg}",
        is_required=path.is_configured or not is_rounded,
    )


def _changed(config: DistributedDataParallelConfig, changes: dict[str, Any]) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(**{**config.model_dump(), **changes})


class _Model(torch.nn.Module):
    """Parameters of several dtypes and shapes, all zero, whose gradients are whatever coefficients say."""

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        super().__init__()
        unit = max(16, *(RankCode(num_ranks, WIDTHS[_name(dtype)]).period for dtype in _DTYPES))
        shapes = ((3 * unit + 1,), (5, unit), (unit + 7,), ())
        tensors = {f"{_name(dtype)}_{i}": torch.zeros(shape, dtype=dtype) for dtype in _DTYPES for i, shape in enumerate(shapes)}
        self.values = torch.nn.ParameterDict({name: tensor.to(device) for name, tensor in tensors.items()})

    def forward(self, coefficients: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a number whose derivative by each parameter is its coefficient."""
        terms = [(param.float() * coefficients[name]).sum() for name, param in self.values.items()]
        return torch.stack(terms).sum()


@dataclass(frozen=True, slots=True)
class _Piece:
    """What this rank can check of one parameter: all of it, or what it owns of one bucket."""

    name: str
    start: int  # in the flattened parameter
    grad: torch.Tensor  # 1D view of the buffer, gradient dtype


def _train(config: DistributedDataParallelConfig, bench: Bench) -> Fact:
    """Return the first thing that is wrong in two steps on this rank, and the largest relative rounding of a right one."""
    communicator = bench.communicator
    model = _Model(communicator.size, bench.device)
    # The group is passed on as a group, so that the wrapper talks to it as it will in training.
    ranks: dict[str, Any] = {"communicator": communicator} if bench.group is None else {"process_group": bench.group.group}
    ddp = DistributedDataParallel(model, config, **ranks)
    try:
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), ddp)
        check = _Check(ddp, communicator)
        for step, num_microbatches in enumerate(_MICROBATCHES, start=1):
            _run_backwards(ddp, check, num_microbatches)
            ddp.finish_grad_sync()
            check.compare_gradients(f"step {step}", times=num_microbatches)
            optimizer.step()
            ddp.finish_param_sync()
            check.compare_parameters(f"step {step}", times=num_microbatches)
            optimizer.zero_grad()
    finally:
        ddp.detach()
    return {"is_right": not check.problem, "problem": check.problem, "rounding": check.rounding}


def _run_backwards(ddp: DistributedDataParallel, check: _Check, num_microbatches: int) -> None:
    for _ in range(num_microbatches - 1):
        with ddp.no_sync():
            ddp(check.coefficients).backward()
    ddp(check.coefficients).backward()


class _Check:
    """Compares one wrapper's buffers with what they must hold; keeps the first difference in words."""

    def __init__(self, ddp: DistributedDataParallel, communicator: Communicator) -> None:
        self.problem = ""
        self.rounding = 0.0
        self._size = communicator.size
        self._config = ddp.ddp_config
        self._pieces = list(_pieces(ddp, communicator.rank))
        self._params = {name: param.detach().view(-1) for param, name in ddp.param_names.items()}
        self._codes = {
            name: _code(self._size, param.dtype, buffer.grad_data.dtype)
            for buffer in ddp.param_and_grad_buffers
            for name, param in buffer.params.items()
        }
        self._main = {name: torch.zeros(param.numel(), device=param.device) for name, param in self._params.items()}  # fp32
        rank = communicator.rank
        self.coefficients = {
            param_name.removeprefix("values."): torch.tensor(
                self._codes[param_name].values(rank, stop=param.numel()), dtype=torch.float32, device=param.device
            ).view(param.shape)
            for param, param_name in ddp.param_names.items()
        }

    def compare_gradients(self, when: str, *, times: int) -> None:
        """Compare what this rank holds of the reduced gradients."""
        divisor = 1 if self._config.grad_reduction == "sum" else self._size
        for piece in self._pieces:
            code, stop = self._codes[piece.name], piece.start + piece.grad.numel()
            sums = torch.tensor(code.sums(start=piece.start, stop=stop, times=times), dtype=torch.float64)
            got, right = piece.grad.cpu(), (sums / divisor).to(piece.grad.dtype)
            if torch.equal(got, right) or self._is_rounded(got, right):
                continue
            text = code.explain((got.double() * divisor).tolist(), start=piece.start, times=times)
            num_wrong = int((got != right).sum())
            self._report(f"{when}: {text or 'rounded'} in {num_wrong} of {got.numel()} gradients of {piece.name!r}")

    def compare_parameters(self, when: str, *, times: int) -> None:
        """Compare all parameters with an update done by hand; call it once a step."""
        divisor = 1 if self._config.grad_reduction == "sum" else self._size
        for name, param in self._params.items():
            code, main = self._codes[name], self._main[name]
            grad_dtype = next(piece.grad.dtype for piece in self._pieces) if False else None
            del grad_dtype
            sums = torch.tensor(code.sums(stop=param.numel(), times=times), dtype=torch.float64)
            main.sub_((sums / divisor).to(self._grad_dtype(name)).float().to(main.device))
            got, right = param.cpu(), main.to(param.dtype).cpu()
            if not torch.equal(got, right) and not self._is_rounded(got, right):
                num_wrong = int((got != right).sum())
                self._report(f"{when}: {num_wrong} of {got.numel()} updated elements of {name!r} are wrong")
