"""Gradients that say which ranks are in them, through the real wrapper and real optimizer steps.

Each rank's gradients are its ``contribution`` to a known sum. The reduced ones are compared with it bit by bit in the buffers,
then the parameters after an update are, and differences are decoded into the ranks that are missing or counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, Final, NamedTuple

import torch

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import name_list, rank_list
from megabucket.layout.shards import shard_slices
from megabucket.optim import DistributedOptimizer

_OWN: Final = 5
"""What a rank adds to its own elements. Small and whole, and a mean of it is not exact for most numbers of ranks."""
_TOLERANCE: Final = 0.1
"""Of how often a rank is counted: more than a mean in 16 bits is rounded by."""
_MICROBATCHES: Final = (1, 2)
"""Of each step. The second step must not see the first one's gradients."""
_MOST_BUCKETS: Final = 4
"""That a small model can be cut into."""


class Problem(NamedTuple):
    """What a wrong sum says."""

    text: str
    ranks: tuple[int, ...] = ()
    """Those that are missing or counted too often, where that can be told."""


def contribution(rank: int, size: int, numel: int) -> torch.Tensor:
    """Return what ``rank`` adds to a sum of ``numel`` elements, in float64.

    >>> contribution(1, 3, 6).tolist()
    [0.0, 5.0, 0.0, 0.0, 5.0, 0.0]
    """
    return _OWN * (torch.arange(numel) % size == rank).double()


def read_sum(sums: torch.Tensor, size: int, *, start: int = 0, times: int = 1) -> Problem | None:
    """Return what is wrong with sums of contributions, or ``None`` when they are exact.

    Args:
        sums: 1D, of the elements ``[start, start + len(sums))``.
        times: how often every rank should be counted.

    >>> read_sum(contribution(1, 2, 6), size=2)
    Problem(text='rank 0 is missing', ranks=(0,))
    """
    counts = sums.double().cpu() / _OWN  # how often the rank is counted that an element belongs to
    if bool((counts == times).all()):
        return None
    if not counts.isfinite().all():
        return Problem("values are not finite")
    wrong = (counts - times).abs() > _TOLERANCE
    if not wrong.any():
        return Problem("sums of whole numbers are rounded")
    factors = counts / times
    if len(counts) >= size and bool((factors - factors[0]).abs().max() < 1e-3):
        return Problem(_describe_factor(round(factors[0].item(), 3)))
    for index in wrong.nonzero().flatten().tolist():
        count = counts[index].item()
        if abs(count - round(count)) > _TOLERANCE or not 0 <= round(count) <= 4 * times:
            return Problem(f"not a sum of ranks: element {start + index} is {_OWN * count:g} instead of {_OWN * times}")
    owners = (torch.arange(start, start + len(counts)) % size)[wrong].tolist()
    count_of = dict(sorted(zip(owners, counts[wrong].round().int().tolist(), strict=True)))
    texts = []
    for count in dict.fromkeys(count_of.values()):
        ranks = [rank for rank in count_of if count_of[rank] == count]
        instead = "" if times == 1 else f" instead of {_often(times)}"
        how = "missing" if count == 0 else f"counted {_often(count)}{instead}"
        texts.append(f"{rank_list(ranks)} {'is' if len(ranks) == 1 else 'are'} {how}")
    return Problem("; ".join(texts), tuple(count_of))


def _often(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _describe_factor(factor: float) -> str:
    if factor == 0:
        return "every rank is missing: all values are 0"
    if factor > 1 and factor.is_integer():
        return f"every value is {factor:g} times the right one: not divided, or every rank counted as often"
    if 0 < factor < 1 and abs(1 / factor - round(1 / factor)) < 0.01 / factor:
        return f"every value is 1/{round(1 / factor)} of the right one: divided once too often"
    return f"every value is {factor:g} times the right one"


class Difference(NamedTuple):
    """The first comparison that is off, ready for JSON; without a problem, how much was rounded."""

    problem: str = ""
    ranks: tuple[int, ...] = ()
    where: str = ""
    """The parameters."""
    is_in_gradients: bool = False
    rounding: float = 0.0
    """Relative; 0 for the exact bits."""


def first_difference(
    config: DistributedDataParallelConfig, *, rank: int, size: int, device: torch.device, **ranks: Any
) -> Difference:
    """Train a small model for two steps; return where this rank's tensors first differ from the right ones.

    Args:
        ranks: what the wrapper is given, a process group or a communicator.
    """
    if config.num_buckets is not None:  # a large model's number of buckets may be more than the small one has elements
        config = config.model_copy(update={"num_buckets": min(config.num_buckets, _MOST_BUCKETS)})
    model = _Model(rank, size, device)
    ddp = DistributedDataParallel(model, config, **ranks)
    try:
        # All of them: a rank that stopped at its first one would leave the others in the next step.
        found = list(_differences(ddp, model, rank, size))
    finally:
        ddp.detach()
    rounding = max(difference.rounding for difference in found)
    return next((difference for difference in found if difference.problem), Difference(rounding=rounding))


class _Model(torch.nn.Module):
    """Parameters of several dtypes and shapes, all zero, whose gradients are this rank's contributions."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        super().__init__()
        unit = max(16, 7 * size)  # so large that a rank's shard of a bucket speaks of every rank
        shapes = ((3 * unit + 1,), (5, unit), (unit + 7,), ())
        self._coefficients: dict[str, torch.Tensor] = {}
        for dtype, (index, shape) in product((torch.float32, torch.bfloat16, torch.float16), enumerate(shapes)):
            name, values = f"{dtype}_{index}".replace("torch.", ""), torch.zeros(shape, dtype=dtype, device=device)
            self.register_parameter(name, torch.nn.Parameter(values))
            self._coefficients[name] = contribution(rank, size, values.numel()).float().view(shape).to(device)

    def forward(self) -> torch.Tensor:
        """Return a number whose derivative by each parameter is its coefficient."""
        return torch.stack([(param.float() * self._coefficients[name]).sum() for name, param in self.named_parameters()]).sum()


def _differences(ddp: DistributedDataParallel, model: _Model, rank: int, size: int) -> Iterator[Difference]:
    """Train for two steps and compare, after each reduction and after each update."""
    config = ddp.ddp_config
    divisor = 1 if config.grad_reduction == "sum" else size
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), ddp)
    grad_dtypes = {name: buffer.grad_data.dtype for buffer in ddp.param_and_grad_buffers for name in buffer.params}
    updated = {name: torch.zeros(param.numel()) for name, param in model.named_parameters()}  # float32, as the optimizer's

    def error_of(got: torch.Tensor, right: torch.Tensor) -> float:
        """Return 0 for the same bits, the relative error where AVG may have rounded, and infinity for wrong values."""
        if torch.equal(got, right):
            return 0.0
        error: float = (got.double() / right.double() - 1).abs().max().item()
        may_round = config.average_in_collective and error <= (size + 2) * torch.finfo(got.dtype).eps
        return error if may_round else float("inf")

    for step, times in enumerate(_MICROBATCHES, start=1):
        with ddp.no_sync():
            for _ in range(times - 1):
                ddp().backward()
        ddp().backward()
        ddp.finish_grad_sync()

        # Whole numbers, divided and rounded once.
        right = torch.tensor(_OWN * times / divisor, dtype=torch.float64)
        reduced = {name: right.to(dtype) for name, dtype in grad_dtypes.items()}
        pieces = list(_pieces(ddp, rank))
        errors = [error_of(grad.cpu(), reduced[name].expand_as(grad)) for name, _, grad in pieces]
        wrong = [piece for piece, error in zip(pieces, errors, strict=True) if error == float("inf")]
        if wrong:
            _, start, grad = max(wrong, key=lambda piece: len(piece.grad))  # the more elements, the more surely they are read
            problem = read_sum(grad.double() * divisor, size, start=start, times=times) or Problem("values are rounded")
            names = name_list(list(dict.fromkeys(piece.name for piece in wrong)))
            yield Difference(f"step {step}: {problem.text}", problem.ranks, names, is_in_gradients=True)
        else:
            yield Difference(rounding=max(errors, default=0.0))

        optimizer.step()
        ddp.finish_param_sync()
        errors = []
        for name, param in model.named_parameters():
            updated[name] -= reduced[name].float()
            errors.append(error_of(param.detach().reshape(-1).cpu(), updated[name].to(param.dtype)))
        names_wrong = [name for name, error in zip(updated, errors, strict=True) if error == float("inf")]
        if names_wrong:
            yield Difference(f"step {step}: parameters are wrong after the update", where=name_list(names_wrong))
        else:
            yield Difference(rounding=max(errors))
        optimizer.zero_grad()


class _Piece(NamedTuple):
    """What this rank can check of one gradient: all of it, or what it owns of one bucket."""

    name: str
    start: int  # in the flattened parameter
    grad: torch.Tensor  # 1D view of the buffer, gradient dtype


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
