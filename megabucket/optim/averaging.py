"""Beside a step: an average of the weights on this rank's shards, and parameter groups by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Final

import torch

from megabucket.errors import ConfigError
from megabucket.optim.distributed_optimizer import DistributedOptimizer

_KEY: Final = "ema"


class ShardedEMA:
    """An exponential moving average of the weights, of which each rank keeps its shard, in float32.

    It lies in the optimizer's state, under ``"ema"``: ``state_dict()``, checkpoints and ``rebuild()`` carry it like a moment,
    also to another number of ranks. Neither ``update`` nor a step gathers anything for it.

    Args:
        optimizer: after each of its steps ``update`` is called.
        decay: the share of the average that an update keeps.

    Raises:
        ConfigError: ``decay`` is not between 0 and 1.
    """

    def __init__(self, optimizer: DistributedOptimizer, *, decay: float) -> None:
        if not 0 <= decay <= 1:
            raise ConfigError(f"decay must be a number from 0 to 1, got {decay!r}")
        self._optimizer = optimizer
        self._decay = decay

    @torch.no_grad()
    def update(self) -> None:
        """Take this rank's shard of the weights in. The average begins with the weights after the first update of theirs."""
        last = self._optimizer.last_step
        for shard in self._optimizer.sharding.shards:
            state = self._optimizer.state[shard.main]
            if _KEY in state:
                state[_KEY].lerp_(shard.main, 1 - self._decay)
            elif last is not None and last.updated:  # an optimizer that has not stepped takes any state for its own
                state[_KEY] = shard.main.detach().clone()

    def values(self) -> dict[str, torch.Tensor]:
        """Return the average by parameter name, whole, on every rank; empty before the first update. A collective call.

        ``module.load_state_dict(averages, strict=False)`` puts it into a copy of the module.

        Raises:
            PhaseError: a step is open.
        """
        state = self._optimizer.state_dict()["state"]
        names = self._optimizer.ddp.param_names
        params = chain.from_iterable(self._optimizer.sharding.members.by_group())
        kept = {names[param]: state.get(index, {}) for index, param in enumerate(params) if param in names}
        return {name: values[_KEY] for name, values in kept.items() if _KEY in values}


def param_groups(
    module: torch.nn.Module, *rules: tuple[str | Callable[[str, torch.nn.Parameter], bool], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return groups for a torch optimizer: one for each rule, then one of what no rule takes. Frozen parameters are left out.

    Args:
        rules: what to take, and its hyperparameters. A pattern over whole names (``"*.bias"``), or a function of name and
            parameter. The first rule that takes a parameter gets it.

    Raises:
        ConfigError: a rule gets nothing, which is a pattern written wrong or after one that takes it all.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    >>> groups = param_groups(model, (lambda name, param: param.ndim < 2, {"weight_decay": 0.0}))  # norms and biases
    >>> [(len(group["params"]), group.get("weight_decay")) for group in groups]
    [(3, 0.0), (1, None)]
    """
    found: list[dict[str, Any]] = [{**options, "params": []} for _, options in rules]
    rest: list[torch.nn.Parameter] = []
    for name, param in module.named_parameters():
        if param.requires_grad:
            takes = (rule(name, param) if callable(rule) else fnmatchcase(name, rule) for rule, _ in rules)
            index = next((index for index, is_taken in enumerate(takes) if is_taken), None)
            (rest if index is None else found[index]["params"]).append(param)
    names = [name for name, _ in module.named_parameters()]
    empty = [repr(rule) for (rule, _), group in zip(rules, found, strict=True) if not group["params"]]
    if empty:
        raise ConfigError(
            f"{len(empty)} rule(s) for parameter groups take no trainable parameter: {', '.join(empty)}. Patterns are compared "
            f"with whole names, such as {names[:3]}, and the first rule that fits wins."
        )
    return [*found, {"params": rest}] if rest else found
