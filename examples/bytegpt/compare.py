"""``--compare torch-ddp``: train the same task with torch's own wrapper and optimizer; say how far the weights are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from rich.table import Table

from examples.bytegpt.config import DemoConfig, OptimizerConfig
from examples.bytegpt.metrics import MetricsLog
from examples.bytegpt.progress import SilentView
from examples.bytegpt.resume import Start
from examples.bytegpt.steps import StepLoop, Trainee
from examples.bytegpt.summary import Summary
from examples.bytegpt.task import Task, make_optimizer
from megabucket import StepResult
from megabucket.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs of the same task, ours first."""

    reference: str
    """What the other run was, in words."""
    max_abs_difference: float
    """Largest difference of any weight on any rank."""
    max_abs_difference_at: str
    """The parameter it was found in, on the first rank that has it."""
    max_abs_weight: float
    """Largest weight of the reference, for scale."""
    held_out_bits: tuple[float, float]
    last_bits_per_byte: tuple[float, float]
    steps_per_s: tuple[float, float]
    note: str
    """What has to be known to read the difference."""


def check_comparable(config: DemoConfig) -> None:
    """Refuse what torch's DDP cannot do, before anything is trained.

    Raises:
        ConfigError: gradients are summed; torch's DDP always takes the mean.
    """
    if config.ddp.grad_reduction == "sum":
        raise ConfigError(
            "ddp.grad_reduction='sum' cannot be compared with torch DDP, which always takes the mean over the ranks; "
            "set it to 'mean' or drop --compare"
        )


def check_same_run(start: Start, *, num_steps: int) -> None:
    """Refuse a run that has ended, or has become another one at a checkpoint: the reference has one config for all steps.

    Raises:
        ConfigError: nothing is left to train, or the config differs from that of the steps before.
    """
    if start.step == num_steps:
        raise ConfigError(
            f"{start.checkpoint} is of the last step, so there is nothing to train and to compare; drop --compare, raise "
            "train.steps, or begin anew in another checkpoint.folder"
        )
    if start.changes:
        raise ConfigError(
            f"--compare trains all steps anew with this config, but those before step {start.step} were made with another: "
            + "; ".join(start.changes)
        )


def compare_with_torch(
    task: Task, ours: Summary, weights: Mapping[str, torch.Tensor], view: SilentView, *, resumed_at: int = 0
) -> Comparison:
    """Train ``task`` again without our wrapper and compare where both ended. All ranks must call it.

    The other wrapper is torch's ``DistributedDataParallel``, or none in a single process. The optimizer is torch's, and so is
    clipping, but for the norm it clips by (see ``_float64_norm``).

    Args:
        weights: where ours ended.
        resumed_at: how many steps of ours were made by an earlier process; the reference makes all of them.
    """
    program, ranks, module = task.config.program, task.ranks, task.build_model()
    optimizer = make_optimizer(program.optimizer, module.parameters())
    step = _stepper(program.optimizer, module, optimizer)
    if ranks.backend == "none":
        name, trainee = "plain torch", Trainee("plain torch", module, optimizer, nullcontext, step)
    else:
        devices = [ranks.device] if ranks.device.type == "cuda" else None
        wrapped = torch.nn.parallel.DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)
        name, trainee = "torch DDP", Trainee("torch DDP", wrapped, optimizer, wrapped.no_sync, step)
    loop = StepLoop(task, trainee, view=view, log=MetricsLog(None))
    train_s = loop.run()
    theirs = {name: weight for name, weight in module.state_dict().items() if weight.numel()}
    apart = {name: float((weights[name].double() - weight.double()).abs().max()) for name, weight in theirs.items()}
    found = [item for own in ranks.gather(apart) for item in own.items()]
    # NaN compares as neither larger nor smaller, so max() would lose it among numbers.
    at, difference = max(found, key=lambda item: math.inf if math.isnan(item[1]) else item[1])
    return Comparison(
        reference=f"{name} + {type(optimizer).__name__}, {task.model.dtype} parameters",
        max_abs_difference=difference,
        max_abs_difference_at=at,
        max_abs_weight=max(float(weight.abs().max()) for weight in theirs.values()),
        held_out_bits=(ours.held_out_bits_after, task.held_out_bits(module)),
        last_bits_per_byte=(ours.totals.last_bits_per_byte, loop.totals.last_bits_per_byte),
        steps_per_s=(ours.steps_per_s, loop.totals.num_steps / train_s),
        note=_note(task, resumed_at),
    )


def comparison_table(comparison: Comparison) -> Table:
    """Return the comparison as a table, ours beside the reference."""
    table = Table(title=f"compared with {comparison.reference}", title_justify="left")
    table.add_column("same seed, data and steps", no_wrap=True)
    table.add_column("ours", justify="right", no_wrap=True)
    table.add_column("reference", justify="right", no_wrap=True)
    rows = (
        ("held-out bits/byte", comparison.held_out_bits, ".6f"),
        ("bits/byte of the last step", comparison.last_bits_per_byte, ".6f"),
        ("steps/s", comparison.steps_per_s, ".2f"),
    )
    for name, (ours, theirs), form in rows:
        table.add_row(name, format(ours, form), format(theirs, form))
    return table


def describe_difference(comparison: Comparison) -> str:
    """Return how far the weights are apart, in a line or two."""
    where = f", in {comparison.max_abs_difference_at}" if comparison.max_abs_difference != 0 else ": all weights are equal"
    text = (
        f"largest weight difference: {comparison.max_abs_difference:.3g}{where} "
        f"(largest weight: {comparison.max_abs_weight:.3g})"
    )
    return f"{text}\n{comparison.note}" if comparison.note else text


def _stepper(config: OptimizerConfig, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], StepResult]:
    params = [param for param in module.parameters() if param.requires_grad]

    def step() -> StepResult:
        norm = _float64_norm([param.grad for param in params if param.grad is not None])
        if config.clip_grad > 0:
            torch.nn.utils.clip_grads_with_norm_(params, config.clip_grad, norm)
        optimizer.step()
        return StepResult(updated=True, grad_norm=norm.item(), reason="")

    return step


def _float64_norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the global norm as ours is computed: summed in float64 and rounded to float32.

    ``clip_grad_norm_`` sums in float32, and its norm differs in the last bit. Training is chaotic: that bit alone drives two
    runs of a hundred steps visibly apart, and would hide whatever else differs.
    """
    total = torch.zeros((), dtype=torch.float64, device=grads[0].device)
    for grad in grads:
        total += torch.linalg.vector_norm(grad, dtype=torch.float64).square()
    return total.sqrt().float().double()


def _note(task: Task, resumed_at: int) -> str:
    notes = []
    if resumed_at:
        notes.append(f"Ours went on from a checkpoint of step {resumed_at}; the reference made all steps without a break.")
    if task.config.program.optimizer.clip_grad > 0:
        notes.append("Both clip by a norm summed in float64; torch's own clip_grad_norm_ sums in float32.")
    if task.model.dtype != "float32":
        notes.append(
            f"The reference reduces {task.model.dtype} gradients and updates {task.model.dtype} weights directly. Ours "
            "reduces gradients as configured and rounds float32 main parameters. The difference is that rounding, not an error."
        )
    return "\n".join(notes)
