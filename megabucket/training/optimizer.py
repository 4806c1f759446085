"""From an ``OptimizerConfig`` to a torch optimizer, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from megabucket.config.training import OptimizerConfig


def make_optimizer(config: OptimizerConfig, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the torch optimizer over two groups: parameters with two or more dimensions, which decay, and the others.

    Without weight decay there is one group.
    """
    known = [param for param in params if param.requires_grad]
    groups: list[dict[str, Any]] = [{"params": known, "weight_decay": 0.0}]
    if config.weight_decay > 0:
        groups = [
            {"params": [param for param in known if param.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [param for param in known if param.ndim <= 1], "weight_decay": 0.0},
        ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=config.fused or None)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=config.fused or None)


def num_moments(config: OptimizerConfig) -> int:
    """Return how many tensors of state the optimizer keeps per element.

    >>> num_moments(OptimizerConfig()), num_moments(OptimizerConfig(name="sgd"))
    (2, 0)
    """
    return config.moments_per_element


def group_of(config: OptimizerConfig, param: torch.nn.Parameter) -> int:
    """Return the group that ``make_optimizer`` puts a parameter into; groups that stay empty are counted."""
    return int(config.weight_decay > 0 and param.ndim <= 1)


def learning_rate(config: OptimizerConfig, *, step: int, num_steps: int) -> float:
    """Return the learning rate of step ``step``, counted from 0, of ``num_steps``.

    Rises linearly over ``warmup_steps``, then falls along a half cosine to ``final_lr_fraction`` of its peak in the last step.

    >>> config = OptimizerConfig(lr=1.0, warmup_steps=2, final_lr_fraction=0.1)
    >>> [round(learning_rate(config, step=step, num_steps=5), 3) for step in range(5)]
    [0.5, 1.0, 0.775, 0.325, 0.1]
    """
    if step < config.warmup_steps:
        return config.lr * ((step + 1) / config.warmup_steps)
    progress = min(1.0, (step + 1 - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * (1 + math.cos(math.pi * progress)) / 2)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group of an optimizer the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
