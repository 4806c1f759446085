"""``RunConfig``: everything one config file may say, and ``load_config``, which reads it. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import annotated_types as at
from pydantic import BeforeValidator, Field, model_validator

from megabucket.config.ddp import DistributedDataParallelConfig, NonNegative, Positive, PositiveCount, Section, read_tuple
from megabucket.errors import ConfigError, name_list
from megabucket.layout import ParamSpec
from megabucket.planning.links import LinkConfig
from megabucket.planning.load import load_run
from megabucket.planning.model_config import ArchitectureConfig
from megabucket.planning.workload import WorkloadConfig, hidden_matrices

Decay = Annotated[NonNegative, at.Lt(1)]


class OptimizerConfig(Section):
    """The torch optimizer, whose state per element is a part of the memory of a rank."""

    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    """The class in ``torch.optim``: ``AdamW``, ``Adam``, ``SGD`` or ``Muon``. Muon updates matrices whole, each at an owner,
    and AdamW the rest: embeddings, the output projection, and what is no matrix."""

    momentum: Decay = 0.0
    """Momentum of SGD; nothing else reads it."""

    flops_per_s: Positive = 4e14
    """Operations per second in Muon's products of matrices, for ``megabucket simulate``; nothing else reads it. Some 40 % of an
    H100's peak in bfloat16."""

    @property
    def moments_per_element(self) -> int:
        """How many tensors of state the optimizer keeps per element."""
        return int(self.momentum > 0) if self.name == "sgd" else 2

    def whole_params(self, specs: Iterable[ParamSpec]) -> frozenset[str]:
        """Return the parameters that are updated whole, with one tensor of state (the momentum) instead of the moments."""
        return hidden_matrices(specs) if self.name == "muon" else frozenset()

    @model_validator(mode="after")
    def _momentum_belongs_to_sgd(self) -> OptimizerConfig:
        if self.momentum and self.name != "sgd":
            raise ValueError(f"momentum={self.momentum} is read by name='sgd' only, but name={self.name!r}; drop one of them")
        return self


class FabricConfig(Section):
    """An emulated alpha-beta link between the ranks of one machine, in place of gloo or NCCL.

    See docs/emulated-fabric.md.
    """

    latency_s: NonNegative
    """Seconds of each step of a ring: ``2 (n-1)`` steps in an all-reduce of ``n`` ranks, half of that in other collectives."""

    bytes_per_s: Positive
    """Bytes per second from each rank to the next."""

    moves_data: bool = True
    """``False``: only the time passes, and gradients and parameters stay where they are (docs/emulated-fabric.md). The numbers
    are wrong then, but communication takes no time of the CPU that computes."""


class SweepConfig(Section):
    """Which plans ``megabucket simulate`` compares."""

    bucket_numel: Annotated[tuple[PositiveCount, ...], BeforeValidator(read_tuple), at.Len(1, 1_000)] | None = None
    """Bucket sizes in elements. ``None``: some 20 sizes from the smallest tensor to everything in one bucket."""


class RunConfig(Section):
    """One run: the model, how its gradients travel, and what its training program is told."""

    mode: Literal["all_reduce", "reduce_scatter"] | None = None
    """Short for ``ddp.use_distributed_optimizer``: ``reduce_scatter`` sets it; ``all_reduce`` clears it, and with it
    ``ddp.overlap_param_gather``, which would have nothing to gather."""

    model: ArchitectureConfig | None = None
    """The model, by the ``kind`` of its description. Or one word: the name of a preset, the path of a Hugging Face
    ``config.json``, or ``module:callable``."""

    ddp: DistributedDataParallelConfig = Field(default_factory=DistributedDataParallelConfig)
    """How gradients are stored, cut into buckets and reduced."""

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The optimizer, for the memory that it takes."""

    group_sizes: Annotated[dict[Annotated[str, at.Len(1, 1_000)], PositiveCount], at.MaxLen(100)] = Field(default_factory=dict)
    """Ranks that the parameters of a reduction group are reduced over, by the group's name, for the commands that plan;
    ``--dp-size`` for all others. Routed experts of the built-in decoders are of the group ``expert``."""

    num_distributed_optimizer_instances: PositiveCount = 1
    """Replicas, each of which holds all shards, for the commands that plan: a shard is one of ``--dp-size`` divided by this
    number, and gradients are reduced inside a replica first, then over them. Training takes it from its process groups; the
    demo makes them by it."""

    program: Any = None
    """Settings of the training program, passed unread to the function of ``--workload``."""

    fabric: FabricConfig | None = None
    """An emulated link to run over, for commands that start with torchrun. ``None``: the machine's own."""

    link: LinkConfig | None = None
    """The cost of a collective, by the ``kind`` of its description, for ``megabucket simulate``."""

    workload: WorkloadConfig | None = None
    """The compute of a step and when gradients become ready."""

    sweep: SweepConfig = Field(default_factory=SweepConfig)
    """Which bucket sizes are compared."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Complete ``ddp`` by ``mode``, unless it says itself which mode it is; ``_fields_agree`` reports contradictions."""
        if not isinstance(data, Mapping):
            return data
        # A section whose lines are all commented out is null in YAML and means the defaults.
        filled = {key: value for key, value in data.items() if value is not None}
        ddp = filled.get("ddp", {})
        if isinstance(ddp, Section):
            ddp = ddp.model_dump(exclude_unset=True)
        if isinstance(ddp, Mapping) and "use_distributed_optimizer" not in ddp:
            if filled.get("mode") == "reduce_scatter":
                filled["ddp"] = {**ddp, "use_distributed_optimizer": True}
            elif filled.get("mode") == "all_reduce":
                filled["ddp"] = {**ddp, "use_distributed_optimizer": False, "overlap_param_gather": False}
        return filled

    @model_validator(mode="after")
    def _fields_agree(self) -> RunConfig:
        given = self.ddp.use_distributed_optimizer
        if self.mode is not None and given != (self.mode == "reduce_scatter"):
            raise ValueError(f"mode={self.mode} contradicts ddp.use_distributed_optimizer={given}; keep one of them")
        if self.num_distributed_optimizer_instances > 1 and not given:
            raise ValueError(
                f"num_distributed_optimizer_instances={self.num_distributed_optimizer_instances} are replicas of shards, and "
                "there are shards only with ddp.use_distributed_optimizer=True; switch it on, or drop it"
            )
        return self


def group_sizes_of(run: RunConfig, specs: Sequence[ParamSpec], *, expert_dp_size: int | None = None) -> dict[str, int]:
    """Return the ranks of the reduction groups that have another number of them than all, as ``build_layout`` takes them.

    Args:
        expert_dp_size: of the group ``expert``, in place of the config's.

    Raises:
        ConfigError: the config sizes a group that no parameter is of.
    """
    known = list(dict.fromkeys(spec.group for spec in specs))
    if unknown := [name for name in run.group_sizes if name not in known]:
        raise ConfigError(
            f"group_sizes has {name_list(unknown)}, but "
            + (f"the parameters of the model are of {name_list(known)}" if known else "there is no model with groups")
            + "; correct the name, or drop it: it would change nothing"
        )
    return {**run.group_sizes, **({} if expert_dp_size is None else {"expert": expert_dp_size})}


def shard_counts(dp_size: int, group_sizes: Mapping[str, int], num_instances: int) -> dict[str, int]:
    """Return by reduction group, ``dense`` included, into how many shards its buckets are cut.

    Raises:
        ConfigError: the ranks of a group are no multiple of the instances.

    >>> shard_counts(16, {"expert": 4}, 2)
    {'dense': 8, 'expert': 2}
    """
    sizes = {"dense": dp_size, **group_sizes}
    if uneven := [f"{name}: {size}" for name, size in sizes.items() if size % num_instances]:
        raise ConfigError(
            f"num_distributed_optimizer_instances={num_instances} does not divide the ranks of {', '.join(uneven)}; each "
            "replica has equally many"
        )
    return {name: size // num_instances for name, size in sizes.items()}


def load_config(source: Path | str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return a run: ``load_run`` with ``RunConfig``.

    Raises:
        ConfigError: anything wrong with the source, an override or a value.
    """
    return load_run(source, overrides, RunConfig)
