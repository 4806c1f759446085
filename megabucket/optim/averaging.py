"""Beside a step: an average of the weights on this rank's shards, norms of each parameter, and parameter groups by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Final, NamedTuple

import torch

from megabucket.comm import AllReduce
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
        sharding = self._optimizer.sharding
        for shard in sharding.shards:
            state = self._optimizer.state[shard.main]
            if _KEY in state:
                state[_KEY].lerp_(shard.main, 1 - self._decay)
            elif sharding.has_stepped:
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


class ParamNorms(NamedTuple):
    """L2 norms of one parameter in one step."""

    grad: float  # as it was stepped on: unscaled and clipped
    weight: float  # after the step
    update: float  # of the difference that the step made

    @property
    def update_ratio(self) -> float:
        """How large the update was beside the weight; infinite where that is zero."""
        return self.update / self.weight if self.weight else float("inf")


@contextmanager
def param_norms(optimizer: DistributedOptimizer) -> Iterator[dict[str, ParamNorms]]:
    """Watch the step that is taken inside, and fill a mapping by parameter name when the block ends, alike on all ranks.

    A collective call: one all-reduce of 24 bytes for each parameter. Until the block ends it takes the memory of a copy of the
    shards, and it waits for the gather of the parameters, so it is for one step in many. Of a parameter that is cut over
    tensor-parallel ranks, or is an expert, the norms are those of the part that is here. The mapping stays empty where no step
    was taken, or it was skipped, and when the block raises.

    Raises:
        MegabucketError: another rank is elsewhere, or a step is open when the block ends.
    """
    optimizer.sharding.refresh()
    before = {shard: shard.main.detach().clone() for shard in optimizer.sharding.shards}
    found: dict[str, ParamNorms] = {}
    last = optimizer.last_step
    yield found
    if optimizer.last_step is None or optimizer.last_step is last or not optimizer.last_step.updated:
        return
    optimizer.sharding.settle("param_norms()")
    ddp = optimizer.ddp
    ddp.sync.call("param_norms()")
    names = list(ddp.param_names.values())
    squares = torch.zeros(len(names), 3, dtype=torch.float64, device=ddp.param_and_grad_buffers[0].grad_data.device)
    row_of = dict(zip(names, squares, strict=True))
    for shard, values in before.items():
        main = shard.main.detach()
        for piece in shard.pieces():
            here = slice(*piece.in_segment)
            parts = shard.grad[here], main[here], main[here] - values[here]
            row_of[piece.param] += torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]).square()
    for group, reduction in ddp.ranks.by_name.items():
        rows = [index for index, name in enumerate(names) if ddp.identities[name].group == group]
        if ddp.policy.is_sharded and rows:
            of_group = squares[rows].flatten()
            handle = reduction.communicator.control.launch([AllReduce(of_group)], label="norms of each parameter")
            squares[rows] = handle.read(of_group).to(squares.device).view(-1, 3)
    found |= {name: ParamNorms(*norms) for name, norms in zip(names, squares.sqrt().tolist(), strict=True)}


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
