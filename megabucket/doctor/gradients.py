"""Gradients whose values tell which ranks are in them, through the real wrapper and real optimizer steps.

Each rank's gradients are its ``contribution`` to a known sum. The parameters after an update are compared with it bit by bit,
and wrong sums are decoded into the ranks that are missing or counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.doctor.report import Fact, Status
from megabucket.errors import rank_list
from megabucket.optim import DistributedOptimizer

_OWN: Final = 5
"""A rank's addend to its own elements. Small and whole, and a mean of it is not exact for most numbers of ranks."""
_TOLERANCE: Final = 0.1
"""In counts of a rank: more than a mean in 16 bits is rounded by."""
_MICROBATCHES: Final = (1, 2)
"""Of each step. The second step must not see the first one's gradients."""
_MOST_BUCKETS: Final = 4
"""A small model can be cut into."""


def contribution(rank: int, size: int, numel: int) -> torch.Tensor:
    """Return the addend of ``rank`` to a sum of ``numel`` elements, in float64.

    >>> contribution(1, 3, 6).tolist()
    [0.0, 5.0, 0.0, 0.0, 5.0, 0.0]
    """
    return _OWN * (torch.arange(numel) % size == rank).double()


def read_sum(sums: torch.Tensor, size: int, *, times: int = 1) -> tuple[str, tuple[int, ...]]:
    """Return what is wrong with sums of contributions, empty if they are exact, and the ranks at fault if that can be told.

    Args:
        sums: 1D.
        times: how often every rank should be counted.

    >>> read_sum(contribution(1, 2, 6), size=2)
    ('rank 0 is missing', (0,))
    """
    counts = sums.double().cpu() / _OWN  # how often the rank is counted that an element belongs to
    if bool((counts == times).all()):
        return "", ()
    if not counts.isfinite().all():
        return "values are not finite", ()
    wrong = (counts - times).abs() > _TOLERANCE
    if not wrong.any():
        return "sums of whole numbers are rounded", ()
    if len(counts) >= size > 1 and bool((counts - counts[0]).abs().max() < 1e-3):
        return f"every value is {counts[0].item() / times:.3g} times the right one", ()
    is_whole = ((counts - counts.round()).abs() <= _TOLERANCE) & (counts.round() >= 0) & (counts <= 4 * times)
    for index in (wrong & ~is_whole).nonzero().flatten().tolist():
        text = f"element {index} is {_OWN * counts[index].item():g} instead of {_OWN * times}"
        return f"not a sum of ranks: {text}", ()
    owners = (torch.arange(len(counts)) % size)[wrong].tolist()
    count_of = dict(sorted(zip(owners, counts[wrong].round().int().tolist(), strict=True)))
    texts = []
    for count in dict.fromkeys(count_of.values()):
        ranks = [rank for rank in count_of if count_of[rank] == count]
        how = "missing" if count == 0 else f"counted {count}x instead of {times}x"
        texts.append(f"{rank_list(ranks)} {'is' if len(ranks) == 1 else 'are'} {how}")
    return "; ".join(texts), tuple(count_of)


def train_and_compare(
    config: DistributedDataParallelConfig, *, rank: int, size: int, device: torch.device, **ranks: Any
) -> Fact:
    """Train a small model for two steps; return the first difference of this rank's parameters from the right ones.

    Args:
        ranks: the wrapper's ``process_group`` or ``communicator``.
    """
    if config.num_buckets is not None:  # a large model's number of buckets may be more than the small one has elements
        config = config.model_copy(update={"num_buckets": min(config.num_buckets, _MOST_BUCKETS)})
    model = _Model(rank, size, device)
    ddp = DistributedDataParallel(model, config, **ranks)
    try:
        # Both steps: a rank that stopped at its first difference would leave the others in the next step.
        facts = list(_train(ddp, model, size))
    finally:
        ddp.detach()
    return next(fact for status in reversed(Status) for fact in facts if fact.status is status)


class _Model(torch.nn.Module):
    """Parameters of several dtypes and shapes, all zero, whose gradients are this rank's contributions."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        super().__init__()
        unit = 16 + size  # so that every rank has elements of its own
        shapes = ((3 * unit + 1,), (5, unit), (unit + 7,), ())
        self._coefficients: dict[str, torch.Tensor] = {}
        for dtype in ("float32", "bfloat16", "float16"):
            for index, shape in enumerate(shapes):
                param = torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype), device=device))
                self.register_parameter(f"{dtype}_{index}", param)
                coefficients = contribution(rank, size, param.numel()).float().view(shape)
                self._coefficients[f"{dtype}_{index}"] = coefficients.to(device)

    def forward(self) -> torch.Tensor:
        """Return a number whose derivative by each parameter is its coefficient."""
        return torch.stack([(param.float() * self._coefficients[name]).sum() for name, param in self.named_parameters()]).sum()


def _train(ddp: DistributedDataParallel, model: _Model, size: int) -> Iterator[Fact]:
    """Yield what the parameters say after each step. SGD's learning rate is 1, so their changes are the gradients."""
    divisor = 1 if ddp.ddp_config.grad_reduction == "sum" else size
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), ddp)
    right = {name: torch.zeros(param.numel()) for name, param in model.named_parameters()}  # float32, as the optimizer's
    tolerance = {}  # relative: of values that AVG may have rounded
    for step, times in enumerate(_MICROBATCHES, start=1):
        before = {name: param.detach().double().flatten() for name, param in model.named_parameters()}
        with ddp.no_sync():
            for _ in range(times - 1):
                ddp().backward()
        ddp().backward()
        ddp.finish_grad_sync()
        optimizer.step()
        ddp.finish_param_sync()
        optimizer.zero_grad()

        # Whole numbers, divided and rounded once.
        value = torch.tensor(_OWN * times / divisor, dtype=torch.float64)
        for buffer in ddp.param_and_grad_buffers:
            for name in buffer.params:
                right[name] -= value.to(buffer.grad_data.dtype).float()
                eps = torch.finfo(buffer.grad_data.dtype).eps
                tolerance[name] = (size + 2) * eps if ddp.ddp_config.average_in_collective else 0.0
        wrong, rounding = [], 0.0
        for name, param in model.named_parameters():
            got, wanted = param.detach().flatten().cpu(), right[name].to(param.dtype)
            error = 0.0 if torch.equal(got, wanted) else (got.double() / wanted.double() - 1).abs().max().item()
            if error <= tolerance[name]:
                rounding = max(rounding, error)
            else:
                wrong.append(name)
        if wrong:
            largest = max(wrong, key=lambda name: len(before[name]))  # the more elements, the more surely they are read
            change = before[largest] - model.get_parameter(largest).detach().double().flatten()
            problem, at_fault = read_sum(change * divisor, size, times=times)
            dtypes = sorted({name.partition("_")[0] for name in wrong})
            yield Fact(f"step {step}: {problem} (in {', '.join(dtypes)})", Status.FINDING, at_fault)
        elif rounding:
            advice = "as AVG rounds here; ddp.average_in_collective=false does not round"
            yield Fact(f"rounded by up to {rounding:.0e}, {advice}", Status.NOTE)
        else:
            yield Fact("exact")
