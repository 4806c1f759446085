"""``--compare torch-ddp``: train the same task with torch's own wrapper and optimizer, and compare the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch

from examples.bytegpt.config import DemoConfig, OptimizerConfig
from examples.bytegpt.report import MetricsLog, Progress
from examples.bytegpt.steps import StepLoop, Trainee
from examples.bytegpt.task import Task, make_optimizers
from megabucket import StepResult
from megabucket.errors import ConfigError

_ROUNDING: Final = (
    "The reference reduces 16-bit gradients and updates 16-bit weights directly. Ours reduces gradients as configured and "
    "rounds float32 main parameters. The difference is that rounding, not an error."
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs of the same task, ours first."""

    reference: str
    """Description of the other run."""
    max_abs_difference: float
    """Largest difference of any weight on any rank."""
    max_abs_difference_at: str
    """The parameter with this difference."""
    max_abs_weight: float
    """Largest weight of the reference, for scale."""
    held_out_bits: tuple[float, float]
    steps_per_s: tuple[float, float]
    note: str
    """Explanation of the difference, if it is not an error."""


def check_comparable(config: DemoConfig) -> None:
    """Refuse configs that torch's DDP does not support, before training.

    Raises:
        ConfigError: gradients are summed; torch's DDP always takes the mean.
    """
    if config.ddp.grad_reduction == "sum":
        raise ConfigError(
            "ddp.grad_reduction='sum' cannot be compared with torch DDP, which always takes the mean over the ranks; "
            "set it to 'mean' or drop --compare"
        )


def compare_with_torch(
    task: Task, ours: Mapping[str, Any], weights: Mapping[str, torch.Tensor], progress: Progress
) -> Comparison:
    """Train ``task`` again without our wrapper and compare the results. All ranks must call it.

    The other wrapper is torch's ``DistributedDataParallel``, or none in a single process. The optimizers are torch's, and so is
    clipping, except for its norm (see ``_float64_norm``).

    Args:
        ours: the summary of our run.
        weights: ours after training.
    """
    program, ranks, module = task.config.program, task.ranks, task.build_model()
    optimizers = make_optimizers(program.optimizer, dict(module.named_parameters()))
    step = _stepper(program.optimizer, module, optimizers)
    if ranks.backend == "none":
        name, trainee = "plain torch", Trainee("plain torch", module, optimizers, module.zero_grad, nullcontext, step)
    else:
        devices = [ranks.device] if ranks.device.type == "cuda" else None
        wrapped = torch.nn.parallel.DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)
        name, trainee = "torch DDP", Trainee("torch DDP", wrapped, optimizers, module.zero_grad, wrapped.no_sync, step)
    loop = StepLoop(task, trainee, progress=progress, log=MetricsLog(None))
    train_s = loop.run()
    theirs = {name: weight for name, weight in module.state_dict().items() if weight.numel()}
    apart = {name: float((weights[name].double() - weight.double()).abs().max()) for name, weight in theirs.items()}
    found = [item for own in ranks.gather(apart) for item in own.items()]
    # NaN is neither larger nor smaller than a number, so max() could miss it.
    at, difference = max(found, key=lambda item: math.inf if math.isnan(item[1]) else item[1])
    return Comparison(
        reference=f"{' + '.join([name, *(type(each).__name__ for each in optimizers)])}, {task.model.dtype} parameters",
        max_abs_difference=difference,
        max_abs_difference_at=at,
        max_abs_weight=max(float(weight.abs().max()) for weight in theirs.values()),
        held_out_bits=(ours["held_out_bits_after"], task.held_out_bits(module)),
        steps_per_s=(ours["steps_per_s"], loop.totals["num_steps"] / train_s),
        note="" if task.model.dtype == "float32" else _ROUNDING,
    )


def describe_comparison(comparison: Comparison) -> str:
    """Return the comparison in a few lines, ours beside the reference."""
    lines = [f"compared with {comparison.reference}: same seed, data and steps", f"  {'':<27}{'ours':>16}{'reference':>16}"]
    for name, (ours, theirs) in (("held-out bits/byte", comparison.held_out_bits), ("steps/s", comparison.steps_per_s)):
        lines.append(f"  {name:<27}{ours:>16.6f}{theirs:>16.6f}")
    difference, where = comparison.max_abs_difference, f", in {comparison.max_abs_difference_at}"
    found = f"{difference:.3g}{where if difference != 0 else ': all weights are equal'}"
    lines.append(f"largest weight difference: {found} (largest weight: {comparison.max_abs_weight:.3g})")
    return "\n".join([*lines, comparison.note]).rstrip()


def _stepper(
    config: OptimizerConfig, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Callable[[], StepResult]:
    params = [param for param in module.parameters() if param.requires_grad]

    def step() -> StepResult:
        norm = _float64_norm([param.grad for param in params if param.grad is not None])
        if config.clip_grad > 0:
            torch.nn.utils.clip_grads_with_norm_(params, config.clip_grad, norm)
        for optimizer in optimizers:
            optimizer.step()
        return StepResult(updated=True, grad_norm=norm.item(), reason="")

    return step


def _float64_norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the global norm as ours is computed: summed in float64 and rounded to float32.

    ``clip_grad_norm_`` sums in float32, and its norm differs in the last bit. Training is chaotic: after a hundred steps that
    bit alone makes visible differences, which would hide any other.
    """
    total = torch.zeros((), dtype=torch.float64, device=grads[0].device)
    for grad in grads:
        total += torch.linalg.vector_norm(grad, dtype=torch.float64).square()
    return total.sqrt().float().double()
