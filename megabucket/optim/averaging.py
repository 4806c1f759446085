"""A sharded average of the weights, norms of each parameter in a step, and parameter groups by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Final, NamedTuple

import torch

from megabucket.comm import AllReduce
from megabucket.errors import ConfigError, refuse_copies
from megabucket.optim.distributed_optimizer import DistributedOptimizer
from megabucket.optim.shards import StatePiece

_KEY: Final = "ema"


class ShardedEMA:
    """An exponential moving average of the weights, of which each rank keeps its shard, in float32.

    It is part of the optimizer's state, under ``"ema"``: ``state_dict()``, checkpoints and ``rebuild()`` carry it like a
    moment, also to another number of ranks. ``update`` gathers nothing.

    Args:
        optimizer: call ``update`` after each of its steps.
        decay: the share of the average that an update keeps.

    Raises:
        ConfigError: ``decay`` is not between 0 and 1.
    """

    __reduce_ex__ = refuse_copies(
        "a {} cannot be copied or pickled: its average lies in the state of its optimizer, in shards. values() returns it "
        "whole, and the optimizer's state_dict() and save_checkpoint() save it; call them on every rank."
    )

    def __init__(self, optimizer: DistributedOptimizer, *, decay: float) -> None:
        if not 0 <= decay <= 1:
            raise ConfigError(f"decay must be a number from 0 to 1, got {decay!r}")
        self._optimizer = optimizer
        self._decay = decay

    @torch.inference_mode(False)
    @torch.no_grad()
    def update(self) -> None:
        """Add this rank's shard of the weights. The average begins with the weights after their first update."""
        sharding = self._optimizer.sharding
        for shard in sharding.shards:
            state = sharding.state_of(shard)
            if _KEY in state:
                state[_KEY].lerp_(shard.main, 1 - self._decay)
            elif shard.has_stepped:
                state[_KEY] = shard.main.detach().clone()

    def values(self) -> dict[str, torch.Tensor]:
        """Return the average by parameter name, whole, on every rank; empty before the first update. A collective call.

        ``module.load_state_dict(averages, strict=False)`` loads it into a copy of the module.

        Raises:
            PhaseError: a step is open.
        """
        state = self._optimizer.state_dict()["state"]
        names = self._optimizer.ddp.param_names
        params = chain.from_iterable(self._optimizer.sharding.by_group())
        kept = {names[param]: state.get(index, {}) for index, param in enumerate(params) if param in names}
        return {name: values[_KEY] for name, values in kept.items() if _KEY in values}


class ParamNorms(NamedTuple):
    """L2 norms of one parameter in one step."""

    grad: float  # unscaled and clipped
    weight: float  # after the step
    update: float  # weight after minus weight before

    @property
    def update_ratio(self) -> float:
        """Update over weight; infinite if the weight is zero."""
        return self.update / self.weight if self.weight else float("inf")


@contextmanager
def param_norms(optimizer: DistributedOptimizer) -> Iterator[dict[str, ParamNorms]]:
    """Measure the step inside the block; fill a mapping by parameter name when the block ends, the same on all ranks.

    A collective call: one all-reduce of 24 bytes for each parameter. It copies this rank's shards until the block ends and
    waits for the parameter gather, so use it in one step of many. Tensor-parallel parameters and experts have the norms of
    their local part. The mapping stays empty if no step was taken, if it was skipped, or if the block raises.

    Raises:
        MegabucketError: another rank is in another call, or a step is open when the block ends.
    """
    optimizer.sharding.refresh()
    # By parameter, because the step cuts shards again if the caller has changed state in between.
    before = {piece.param: piece.values.clone() for piece in _weights(optimizer)}
    found: dict[str, ParamNorms] = {}
    last = optimizer.last_step
    exchange = optimizer.sharding.exchange
    with nullcontext() if exchange is None else exchange.keeping_grads():
        yield found
        if optimizer.last_step is not None and optimizer.last_step is not last and optimizer.last_step.updated:
            found |= _norms_of_step(optimizer, before)


def _norms_of_step(optimizer: DistributedOptimizer, before: Mapping[str, torch.Tensor]) -> dict[str, ParamNorms]:
    """Return the norms of a step that was taken, by parameter. Overwrites the values from before it."""
    ddp = optimizer.ddp
    names = list(ddp.param_names.values())
    device = ddp.param_and_grad_buffers[0].grad_data.device
    with ddp.sync.call("param_norms()") as call:
        optimizer.sharding.settle("param_norms()")
        squared_norms = torch.zeros(len(names), 3, dtype=torch.float64, device=device)
        row_of = {name: dict(zip(ParamNorms._fields, row, strict=True)) for name, row in zip(names, squared_norms, strict=True)}
        after = list(_weights(optimizer))
        updates = [piece._replace(key="update", values=before[piece.param].neg_().add_(piece.values)) for piece in after]
        grads = [piece for shard in optimizer.sharding.shards for piece in shard.pieces({"grad": shard.grad})]
        for piece in chain(grads, after, updates):
            row_of[piece.param][piece.key] += torch.linalg.vector_norm(piece.values, dtype=torch.float64).square()
        call.open()
        for group, reduction in ddp.ranks.by_name.items():
            rows = [index for index, name in enumerate(names) if ddp.identities[name].group == group]
            if ddp.policy.is_sharded and rows:
                of_group = squared_norms[rows].flatten()
                handle = reduction.communicator.control.launch([AllReduce(of_group)], label="norms of each parameter")
                squared_norms[rows] = handle.read(of_group).to(device).view(-1, 3)
    return {name: ParamNorms(*norms) for name, norms in zip(names, squared_norms.sqrt().tolist(), strict=True)}


def _weights(optimizer: DistributedOptimizer) -> Iterator[StatePiece]:
    """Return this rank's main values of each parameter."""
    for shard in optimizer.sharding.shards:
        yield from shard.pieces({"weight": shard.main.detach()})


def param_groups(
    module: torch.nn.Module, *rules: tuple[str | Callable[[str, torch.nn.Parameter], bool], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return groups for a torch optimizer: one for each rule, then one for the rest. Frozen parameters are left out.

    Args:
        rules: a pattern of whole names (``"*.bias"``), or a function of name and parameter, with the hyperparameters of the
            group. A parameter belongs to the first rule that matches.

    Raises:
        ConfigError: a rule matches no parameter, or only those of earlier rules.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    >>> groups = param_groups(model, (lambda name, param: param.ndim < 2, {"weight_decay": 0.0}))  # norms and biases
    >>> [(len(group["params"]), group.get("weight_decay")) for group in groups]
    [(3, 0.0), (1, None)]
    """
    found: list[dict[str, Any]] = [{**options, "params": []} for _, options in rules]
    rest: list[torch.nn.Parameter] = []
    for name, param in module.named_parameters():
        if param.requires_grad:
            matches = (rule(name, param) if callable(rule) else fnmatchcase(name, rule) for rule, _ in rules)
            index = next((index for index, is_match in enumerate(matches) if is_match), None)
            (rest if index is None else found[index]["params"]).append(param)
    names = [name for name, _ in module.named_parameters()]
    empty = [repr(rule) for (rule, _), group in zip(rules, found, strict=True) if not group["params"]]
    if empty:
        raise ConfigError(
            f"{len(empty)} rule(s) for parameter groups match no trainable parameter: {', '.join(empty)}. Patterns are "
            f"compared with whole names, such as {names[:3]}, and the first rule that matches wins."
        )
    return [*found, {"params": rest}] if rest else found
