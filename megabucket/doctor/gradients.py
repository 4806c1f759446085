"""The last question: gradients whose values tell which ranks are in them, through the real wrapper and real optimizer steps.

The parameters after an update are compared with the right ones bit by bit; wrong changes are decoded into the ranks that are
missing or counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from megabucket.ddp import DistributedDataParallel
from megabucket.doctor.questions import OWN, Bench, read_sum
from megabucket.doctor.report import Fact, Status
from megabucket.optim import DistributedOptimizer

_MICROBATCHES: Final = (1, 2)
"""Of each step. The second step must not see the first one's gradients."""
_MOST_BUCKETS: Final = 4
"""A small model can be cut into."""


def gradients(bench: Bench) -> Fact:
    """Train a small model for two steps; return the first difference of this rank's parameters from the right ones."""
    config, model = bench.config, _Model(bench)
    if config.num_buckets is not None:  # a large model's number of buckets may be more than the small one has elements
        config = config.model_copy(update={"num_buckets": min(config.num_buckets, _MOST_BUCKETS)})
    # As in training: over a process group the wrapper makes a communicator of its own, with heartbeats.
    communicator = bench.communicator if bench.group is None else None
    ddp = DistributedDataParallel(model, config, process_group=bench.group, communicator=communicator)
    try:
        # Both steps: a rank that stopped at its first difference would leave the others in the next step.
        facts = list(_train(ddp, model, bench.size))
    finally:
        ddp.detach()
    return next(fact for status in reversed(Status) for fact in facts if fact.status is status)


class _Model(torch.nn.Module):
    """Parameters of several dtypes and shapes, all zero, whose gradients are this rank's contributions."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        unit = 16 + bench.size  # so that every rank has elements of its own
        shapes = ((3 * unit + 1,), (5, unit), (unit + 7,), ())
        self._coefficients: dict[str, torch.Tensor] = {}
        for dtype in ("float32", "bfloat16", "float16"):
            for index, shape in enumerate(shapes):
                param = torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype), device=bench.device))
                self.register_parameter(f"{dtype}_{index}", param)
                self._coefficients[f"{dtype}_{index}"] = bench.contribution(param.numel(), torch.float32).view(shape)

    def forward(self) -> torch.Tensor:
        """Return a number whose derivative by each parameter is its coefficient."""
        return torch.stack([(param.float() * self._coefficients[name]).sum() for name, param in self.named_parameters()]).sum()


def _train(ddp: DistributedDataParallel, model: _Model, size: int) -> Iterator[Fact]:
    """Yield the result of each step. SGD's learning rate is 1, so the changes of parameters are the gradients."""
    divisor = 1 if ddp.ddp_config.grad_reduction == "sum" else size
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), ddp)
    right = {name: torch.zeros(param.numel(), dtype=torch.float32, device="cpu") for name, param in model.named_parameters()}
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

        for buffer in ddp.param_and_grad_buffers:
            dtype = buffer.grad_data.dtype
            # A whole number of one rank, scaled; the other ranks add zeros.
            value = torch.tensor(OWN * times, dtype=dtype, device="cpu").mul_(1 / divisor).float()
            for name in buffer.params:
                right[name] -= value
                eps = torch.finfo(dtype).eps
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
