"""The ranks of one wrapper: named reduction groups, and the groups that agree on steps and norms.

With data parallelism alone there is one group, ``dense``. Experts are reduced over the ranks that hold the same ones. All ranks
that share a group agree on steps. A norm covers all ranks that hold parts of the model, and counts each element once.
"""

from __future__ import annotations

import fnmatch
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch

from megabucket.comm import (
    Accelerator,
    Communicator,
    Liveness,
    ReplicaReducer,
    discover_communicator,
    exchange,
    with_same_host_copies,
)
from megabucket.comm.communicator import RankState
from megabucket.comm.torch import default_group_of, levels_of, members_of, process_group_of
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.config.resolve import StepPolicy
from megabucket.ddp.report import Entry
from megabucket.errors import (
    ConfigError,
    LayoutMismatchError,
    PeerFailedError,
    log_once,
    name_list,
    rank_list,
    values_by_rank,
)
from megabucket.layout.identity import IdentityOf, ParamIdentity, check_identities, megatron_identity, plain_identity

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DENSE: Final = "dense"
"""The default group."""
_EXPERT: Final = "expert"  # of parameters that Megatron marks with allreduce=False

GroupOf = Callable[[str, torch.Tensor], "str | None"] | Mapping[str, str]
"""A function from name and parameter to its group (``None``: the default), or a dict from name patterns to groups."""


@dataclass(frozen=True, slots=True)
class ReductionGroup:
    """The ranks that the parameters of one named group are reduced over.

    Args:
        ranks: a process group, a device mesh, or a communicator. A mesh of two dimensions is ``ranks`` along its last one and
            ``replicate`` along its first.
        replicate: the ranks that hold the same shard, one of each replica, this one included: gradients are reduce-scattered
            over ``ranks`` and then all-reduced over these. Needs the distributed optimizer. ``None``: there is one replica.
        divisor: of the mean. ``None``: the number of ranks of ``dense`` in all replicas, for every group, as in Megatron: the
            gradient of an expert is a sum over the tokens that all these ranks have sent to it.
        unused_parameters: as the config field of this name. ``None``: the config's value for ``dense``; for other groups
            ``"skip"`` if the config says so, else ``"zero"``, because an expert may get no token.
    """

    ranks: Any
    replicate: Any = None
    divisor: float | None = None
    unused_parameters: Literal["error", "zero", "skip"] | None = None


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """The parallel groups of a model.

    Args:
        reduction: the ranks of each named group, as ``ReductionGroup`` or its ``ranks``. ``dense`` is the default group.
        group_of: the group of a parameter: a function of its name and itself, or a dict of name patterns. Parameters without a
            result are in ``expert`` if Megatron's layers have marked them (``allreduce=False``), else in ``dense``.
        identity: the identity of a parameter under tensor, pipeline or expert parallelism, as a function of its local name and
            itself; ``None`` for the default. With ``copies={"tp": ...}`` the default follows Megatron's attributes
            (``tensor_model_parallel``, ``partition_dim``, ``shared``); ``expert_tp`` is for experts cut over other ranks.
        copies: ranks that hold copies of parameters, by the names in identities; also the pipeline stages, as ``pp``, for
            the token count of ``finalize_grads``.
        copies_across: as ``copies``, for copies that may be in other wrappers of their ranks: the chunks of a virtual
            pipeline, of which the first has the embedding and the last the head. ``ChainedOptimizer`` compares them and makes
            them equal, and ``finalize_grads`` sums them over all wrappers.
        norm_group: all ranks that hold parts of the model; the norm over them counts each element once. With all-reduced
            gradients the ranks of one replica are enough. ``None``: the ranks that agree on steps. With a single group a norm
            is then refused if other ranks hold parts or copies, or agree on steps as well.
        step_group: ranks that agree on steps. ``None``: the given group, ``norm_group`` included, that contains all others; or
            all ranks of the program, if they are the replicas of one group.
    """

    reduction: Mapping[str, Any]
    group_of: GroupOf | None = None
    identity: IdentityOf | None = None
    copies: Mapping[str, Any] = field(default_factory=dict)
    copies_across: Mapping[str, Any] = field(default_factory=dict)
    norm_group: Any = None
    step_group: Any = None


class Reduction(NamedTuple):
    """The reduction of one named group."""

    communicator: Communicator
    """Of the ranks that gradients are reduced over, inside one replica."""
    divisor: float
    policy: StepPolicy
    replicas: ReplicaReducer | None = None
    """Of the ranks that hold the same shard, one of each replica; ``None``: there is one replica."""
    places: Sequence[Sequence[Entry]] = ((),)
    """Entries that must be equal on the ranks of each of ``communicators``, so that shards and replicas form a grid."""

    @property
    def replica(self) -> int:
        """The number of this rank's replica. The first one counts for the norm and writes checkpoints."""
        return 0 if self.replicas is None else self.replicas.communicator.rank

    @property
    def communicators(self) -> list[Communicator]:
        """Together they connect all ranks that hold these parameters."""
        return [self.communicator] if self.replicas is None else [self.communicator, self.replicas.communicator]


class RankGroups:
    """The communicators of one wrapper.

    Attributes:
        by_name: the reduction groups, ``dense`` first.
        step: all ranks that agree on steps and calls; it contains every reduction group.
        norm: all ranks that hold different parts of the model; ``None``: those of ``dense``.
        copies: ranks that hold copies of a parameter, by the names in identities.
        copies_across: the same, for copies that may be in other wrappers.
    """

    def __init__(
        self,
        by_name: Mapping[str, Reduction],
        *,
        step: Communicator,
        norm: Communicator | None = None,
        copies: Mapping[str, Communicator] | None = None,
        copies_across: Mapping[str, Communicator] | None = None,
        owned: Sequence[Communicator] = (),
    ) -> None:
        self.by_name = dict(by_name)
        self.step, self.norm = step, norm
        self.copies, self.copies_across = dict(copies or {}), dict(copies_across or {})
        self._owned = tuple(owned)
        self.has_same_params = len(self.by_name) == 1 and self.by_name[DENSE].communicator is step
        """Whether all ranks that agree on steps hold the same parameters."""

    @property
    def communicators(self) -> list[Communicator]:
        """All communicators, each once, to notify when a rank breaks off."""
        of_groups = chain.from_iterable(group.communicators for group in self.by_name.values())
        found = [self.step, *of_groups, *self.all_copies.values()]
        return list(dict.fromkeys(found if self.norm is None else [*found, self.norm]))

    @property
    def all_copies(self) -> dict[str, Communicator]:
        """The ranks of ``copies`` and of ``copies_across``."""
        return self.copies | self.copies_across

    def close(self) -> None:
        """Close the communicators that were made for the wrapper."""
        for communicator in self._owned:
            communicator.close()

    def counts(self, identity: ParamIdentity, *, is_sharded: bool) -> bool:
        """Return whether this rank's values of a parameter enter the norm, so that each element is counted once.

        They do on the first of the ranks in the norm that hold the same values (all ranks of the reduction group without
        shards, else one per replica), and only where that reduction group contains the first of the parameter's copies.

        Args:
            is_sharded: whether the ranks of its reduction group hold different parts of its gradient.
        """
        group = self.by_name[identity.group]
        if self.norm is None:
            return group.replica == 0
        shards, *replicas = group.communicators
        for alike in replicas if is_sharded else [shards]:
            if alike.members[alike.rank] != next(filter(self.norm.members.__contains__, alike.members)):
                return False
        return all(self.all_copies[name].members[0] in shards.members for name in identity.copies)

    def writes(self, identity: ParamIdentity) -> bool:
        """Return whether the reduction group of this rank holds the first of all copies of a parameter, for checkpoints.

        Copies in other wrappers do not count: each wrapper has its own checkpoint.
        """
        group = self.by_name[identity.group]
        first = [self.copies[name].members[0] for name in identity.copies if name in self.copies]
        return group.replica == 0 and all(rank in group.communicator.members for rank in first)

    def is_first(self, identity: ParamIdentity) -> bool:
        """Return whether this is the first rank with this part of the whole model."""
        return self.by_name[identity.group].communicator.rank == 0 and self.writes(identity)

    def find_norm_obstacle(
        self, identities: Mapping[str, ParamIdentity], params: Mapping[torch.nn.Parameter, str]
    ) -> ConfigError | None:
        """Return an error with a parameter if the norm would miss parts of the model, or count some twice.

        Args:
            identities: by name.
            params: the names of the trainable parameters.
        """
        others_agree = self.step.size > math.prod(one.size for one in self.by_name[DENSE].communicators)
        for param, name in params.items():
            is_part = identities[name].global_shape != tuple(param.shape)
            # Megatron marks parameters also where one rank holds all of them.
            is_unknown = getattr(param, "tensor_model_parallel", False) and not is_part and "tp" not in self.copies
            if is_unknown or (self.norm is None and (others_agree or is_part or identities[name].copies)):
                return ConfigError(
                    f"other ranks than those of its data-parallel group agree on steps or hold {name!r}, and the wrapper does "
                    "not know which ranks make up the model: each would take another norm, and clipping would let copies drift "
                    'apart. Pass groups=ParallelGroups({"dense": dp}, copies={"tp": tp}, norm_group=...) to '
                    "DistributedDataParallel, with all ranks of the model as norm_group; or clip_grad=0 and "
                    "returns_grad_norm=False to DistributedOptimizer."
                )
        return None


def copies_key(along: str) -> str:
    """Return the key of entries for the ranks of ``copies[along]``, which differs from all group names."""
    return f"copies {along!r}"


def single(communicator: Communicator, policy: StepPolicy, *, is_owned: bool = False) -> RankGroups:
    """Return the ranks of a wrapper with one group."""
    ranks = Reduction(communicator, communicator.size, policy)
    return RankGroups({DENSE: ranks}, step=communicator, owned=(communicator,) if is_owned else ())


def discover(
    given: ParallelGroups,
    config: DistributedDataParallelConfig,
    policy: StepPolicy,
    *,
    device: torch.device,
    state: RankState,
) -> RankGroups:
    """Return the ranks of a wrapper with several groups. All ranks of each group call it, with the same names.

    Args:
        device: of the parameters.
        state: of this rank; has the recorders. Given communicators have their own.

    Raises:
        ConfigError: there is no group ``dense``, a value is no group, no given group contains all others, the ranks of the norm
            lack copies or shards, or there are replicas without shards.
        LayoutMismatchError: two ranks of a group do not agree on its name, ranks or settings.
        PeerFailedError: the groups of another rank are such a ConfigError.
        MegabucketError: another rank does not come, or is in another call.
    """
    names = sorted(given.reduction, key=lambda name: (name != DENSE, name))
    if DENSE not in names:
        raise ConfigError(f"groups need {DENSE!r}, the ranks of parameters in no other group; got {name_list(names)}")
    made = _CommunicatorMaker(config, policy, device, state)
    groups = {name: as_group(given.reduction[name]) for name in names}
    replicated = {name: group for name, group in groups.items() if group.replicate is not None}
    candidates = {name: group.ranks for name, group in groups.items()}
    copies = {copies_key(name): ranks for name, ranks in {**given.copies, **given.copies_across}.items()}
    obstacles = [_find_obstacle(name, group, policy) for name, group in groups.items()]
    if given.norm_group is not None:
        inside, why = {**(candidates if policy.is_sharded else {}), **copies}, "gradients would be missing in the norm"
        obstacles.append(_find_missing("norm_group=", given.norm_group, inside, why))
        candidates["norm_group"] = given.norm_group
    candidates |= copies | {f"replicas of {name!r}": group.replicate for name, group in replicated.items()}
    step_ranks = _widest(candidates, replicated) if given.step_group is None else given.step_group
    obstacles.append(_find_missing("step_group=", step_ranks, candidates, "all of them agree on each step"))
    # First, because the others share its state.
    step = made.communicator(step_ranks)
    made.state, step.state.ranks.members = step.state, step.members
    facts = {name: f", divisor={one.divisor}, unused_parameters={one.unused_parameters!r}" for name, one in groups.items()}
    own = {name: (members_of(ranks), facts.get(name, "")) for name, ranks in candidates.items()}
    _check_alike(step, own, device, next(filter(None, obstacles), None))
    by_name: dict[str, Reduction] = {}
    for name, group in groups.items():
        is_default = name == DENSE or policy.skips_unused
        unused = group.unused_parameters or (config.unused_parameters if is_default else "zero")
        policy_of_group = replace(policy, allows_unused=unused != "error", skips_unused=unused == "skip")
        by_name[name] = reduction = made.reduction(group, policy_of_group)
        divisor = math.prod(one.size for one in by_name[DENSE].communicators) if group.divisor is None else group.divisor
        by_name[name] = reduction._replace(divisor=float(divisor))
    norm = made.communicator(given.norm_group) if given.norm_group is not None else step if len(by_name) > 1 else None
    known, across = (
        {name: made.communicator(ranks) for name, ranks in sorted(ranks_of.items())}
        for ranks_of in (given.copies, given.copies_across)
    )
    return RankGroups(by_name, step=step, norm=norm, copies=known, copies_across=across, owned=made.owned)


def communicator_for(
    process_group: ProcessGroup | None,
    config: DistributedDataParallelConfig,
    policy: StepPolicy,
    *,
    device: torch.device,
    state: RankState,
) -> Communicator:
    """Return the communicator of a process group by the config. Arguments and errors: see ``discover_communicator``.

    Args:
        device: of the parameters.
    """
    liveness = Liveness(
        heartbeat_s=config.heartbeat_s,
        dead_after_s=config.dead_after_s,
        straggler_warning_s=config.straggler_warning_s,
        is_default="dead_after_s" not in config.model_fields_set,
    )
    made = discover_communicator(process_group, liveness, state=state)
    return with_same_host_copies(made, device) if policy.copies_on_host else made


class _CommunicatorMaker:
    """Makes one communicator per group."""

    def __init__(
        self, config: DistributedDataParallelConfig, policy: StepPolicy, device: torch.device, state: RankState
    ) -> None:
        self._config, self._policy, self._device = config, policy, device
        self.state = state
        """Shared by all communicators; errors number ranks by their place in its ``ranks.members``."""
        self._made: dict[Any, Communicator] = {}
        self._replicas: dict[Communicator, ReplicaReducer] = {}
        self.owned: list[Communicator] = []

    def communicator(self, ranks: Any) -> Communicator:
        group = process_group_of(ranks)
        if isinstance(group, Communicator):
            group.state.ranks.members = self.state.ranks.members
            return group
        if group not in self._made:
            made = communicator_for(group, self._config, self._policy, device=self._device, state=self.state)
            self._made[group] = made
            self.owned.append(made)
        return self._made[group]

    def reduction(self, group: ReductionGroup, policy: StepPolicy) -> Reduction:
        """Return the reduction of a group, without its divisor. All of its ranks call it."""
        inside = self.communicator(group.ranks)
        over = None if group.replicate is None else self.communicator(group.replicate)
        if over is None or over.size == 1:
            return Reduction(inside, 1.0, policy)
        # One per communicator, so that all of its launches have one order.
        replicas = self._replicas.setdefault(over, ReplicaReducer(over, Accelerator.of(self._device)))
        own = json.dumps(list(inside.members)).encode()
        grid = [json.loads(row) for row in exchange(over, own, device=self._device, label="replicas")]
        places = [[("ranks of each replica:", *grid)], [(f"replicate= of shard {inside.rank} of {inside.size}",)]]
        return Reduction(inside, 1.0, policy, replicas, places)


def as_group(given: Any) -> ReductionGroup:
    """Return a value of ``ParallelGroups.reduction`` as a ``ReductionGroup`` without a mesh of two dimensions."""
    group = given if isinstance(given, ReductionGroup) else ReductionGroup(given)
    if group.replicate is None:
        ranks, replicate = levels_of(group.ranks)
        group = replace(group, ranks=ranks, replicate=replicate)
    return group


def _find_obstacle(name: str, group: ReductionGroup, policy: StepPolicy) -> ConfigError | None:
    """Return why a group cannot be reduced with this policy."""
    if group.divisor is not None and not (math.isfinite(group.divisor) and group.divisor > 0):
        return ConfigError(f"the divisor of the group {name!r} must be a finite number above 0, got {group.divisor!r}")
    if group.unused_parameters not in (None, "error", "zero", "skip"):
        return ConfigError(
            f"unused_parameters of the group {name!r} must be 'error', 'zero' or 'skip', got {group.unused_parameters!r}"
        )
    if group.replicate is not None and not policy.is_sharded:
        return ConfigError(
            f"the group {name!r} has replicate=, the ranks that hold the same shard; there are shards only with "
            "use_distributed_optimizer=True. Switch it on, or pass all ranks as one group, which is all-reduced at once."
        )
    if group.replicate is not None and policy.accumulates_in_fp32:
        return ConfigError(
            f"reduce_scatter_with_fp32_accumulation=True adds up 16-bit gradients in float32 and rounds once, which the group "
            f"{name!r} cannot: its sums are rounded inside each replica and added up over them. Use grad_reduce_in_fp32=True."
        )
    return None


def _find_missing(what: str, ranks: Any, others: Mapping[str, Any], why: str) -> ConfigError | None:
    for name, other in others.items():
        if lacking := set(members_of(other)) - set(members_of(ranks)):
            return ConfigError(f"{what} lacks ranks {sorted(lacking)} of {name}: {why}")
    return None


def _check_alike(
    step: Communicator, own: Mapping[str, tuple[Sequence[int], str]], device: torch.device, obstacle: ConfigError | None
) -> None:
    """Compare groups over all ranks that agree on steps, before communicators are made, which would wait for missing ranks.

    Args:
        own: ranks and settings of this rank's groups, by name.
        obstacle: why this rank cannot have them.

    Raises:
        ConfigError: the obstacle, if all ranks have it.
        PeerFailedError: another rank has an obstacle.
        LayoutMismatchError: a member of a group has other ranks or settings for its name, or none.
    """
    views = {
        name: (len(members), f"{rank_list(members)}{settings} (CRC-32 {zlib.crc32(repr([*members]).encode()):08x})")
        for name, (members, settings) in own.items()
    }
    said = {"obstacle": "" if obstacle is None else str(obstacle), "views": views}
    by_rank = [json.loads(row) for row in exchange(step, json.dumps(said).encode(), device=device, label="groups=")]
    causes = [row["obstacle"] for row in by_rank]
    if obstacle is not None and len(set(causes)) == 1:
        raise obstacle
    if any(causes):
        rank = next(rank for rank, cause in enumerate(causes) if cause)
        cause = f"{ConfigError.__name__}: {causes[rank]}"
        raise PeerFailedError(step=0, rank=rank, phase="groups=", cause=cause) from obstacle
    rows = [row["views"] for row in by_rank]
    num_alike = Counter((name, *view) for row in rows for name, view in row.items())
    # Ranks that agree on a group are as many as it has members.
    odd = sorted({name for (name, num_members, _), num_ranks in num_alike.items() if num_ranks != num_members})
    if odd:
        texts = [f"{name}: {values_by_rank([row.get(name, (0, 'nothing'))[1] for row in rows])}" for name in odd]
        num_groups = len({name for name, *_ in num_alike})
        raise LayoutMismatchError(differences=texts[:1], num_different=len(odd), num_entries=num_groups, phase="groups=")


def _widest(candidates: Mapping[str, Any], replicated: Mapping[str, ReductionGroup]) -> Any:
    """Return the group that contains all others.

    Args:
        replicated: groups with replicas, whose ranks are not all known to one rank.

    Raises:
        ConfigError: there is none.
    """
    members = {name: set(members_of(ranks)) for name, ranks in candidates.items()}
    everybody = set[int]().union(*members.values())
    for name, ranks in candidates.items():
        if members[name] == everybody:
            return ranks
    for group in replicated.values():
        if whole := default_group_of(len(members_of(group.ranks)) * len(members_of(group.replicate))):
            return whole
    found = ", ".join(f"{name}: {sorted(ranks)}" for name, ranks in members.items())
    raise ConfigError(
        f"no group has all ranks of the others ({found}), so they could not agree on a step. Pass step_group=, a group of the "
        f"ranks {sorted(everybody)} at least, and of all replicas where a group has replicate=."
    )


# Parameters to groups #


def identify(module: torch.nn.Module, ranks: RankGroups, given: ParallelGroups | None) -> dict[str, ParamIdentity]:
    """Return the identity of each parameter, frozen ones included, by first name.

    Raises:
        ConfigError: a parameter is claimed by two groups, or by a missing one; or identities contradict each other.
    """
    group_of, identity = (None, None) if given is None else (given.group_of, given.identity)
    if identity is None and not ranks.all_copies.keys().isdisjoint(("tp", "embd")):
        place = {name: (ranks.copies[name].rank, ranks.copies[name].size) for name in ranks.copies}
        tp_rank, tp_size = place.get("tp", (0, 1))
        identity = megatron_identity(tp_rank=tp_rank, tp_size=tp_size, expert_tp=place.get("expert_tp"))
    found: dict[str, ParamIdentity] = {}
    for name, param in module.named_parameters():
        own = identity(name, param) if identity is not None else None
        found[name] = own or plain_identity(name, tuple(param.shape))
        claims = (
            None if group_of is None else _group_in(group_of, name, param),
            None if found[name].group == DENSE else found[name].group,
            _EXPERT if getattr(param, "allreduce", True) is False else None,
        )
        groups = list(dict.fromkeys(claim for claim in claims if claim is not None)) or [DENSE]
        if len(groups) > 1:
            raise ConfigError(f"parameter {name!r} is claimed by the groups {name_list(groups)}; it can be in one")
        found[name] = replace(found[name], group=groups[0])
        if groups[0] not in ranks.by_name:
            raise ConfigError(
                f"parameter {name!r} is of group {groups[0]!r}; the wrapper has {name_list(list(ranks.by_name))}. Pass "
                f"groups= with the ranks that hold the same parameters of {groups[0]!r}"
            )
    unknown = sorted({copy for one in found.values() for copy in one.copies} - set(ranks.all_copies))
    if unknown and ranks.norm is not None:
        raise ConfigError(f"identities have copies along {name_list(unknown)}: pass copies={{name: ranks}} for each of them")
    check_identities(found, {name: tuple(param.shape) for name, param in module.named_parameters()})
    return found


def group_uses(identities: Mapping[str, ParamIdentity], ranks: RankGroups, group_of: GroupOf | None) -> dict[str, Any]:
    """Return this rank's part for ``check_group_uses``; plain data."""
    patterns = group_of if isinstance(group_of, Mapping) else {}
    return {
        "used": sorted({identity.group for identity in identities.values()}),
        "wanted": [name for name in ranks.by_name if name != DENSE],
        "patterns": [(pattern, group, bool(fnmatch.filter(identities, pattern))) for pattern, group in patterns.items()],
    }


def check_group_uses(by_rank: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a group without parameters on all ranks. On some ranks it may have none: pipeline stages differ.

    Args:
        by_rank: the results of ``group_uses``.

    Raises:
        ConfigError: there is one; the same on all ranks.
    """
    used = set(chain.from_iterable(row["used"] for row in by_rank))
    is_met: dict[tuple[str, str], bool] = {}
    for pattern, group, matches in chain.from_iterable(row["patterns"] for row in by_rank):
        is_met[pattern, group] = is_met.get((pattern, group), False) or matches
    for name in dict.fromkeys(chain.from_iterable(row["wanted"] for row in by_rank)):
        if name not in used:
            patterns = [pattern for pattern, group in is_met if group == name]
            found = f" ({name_list(patterns)} of group_of= matches no name)" if patterns else ""
            raise ConfigError(
                f"no parameter of any rank is in the group {name!r}{found}, so what belongs there would be averaged over the "
                f"ranks of {DENSE!r}. Assign parameters to it by group_of={{pattern: {name!r}}}, by the group that identity= "
                f"returns, or, for experts of Megatron, by param.allreduce = False; or leave {name!r} out of the groups."
            )
    for pattern, _ in (one for one, matches in is_met.items() if not matches):
        log_once(f"group_of= has {pattern!r}, which is no name of a parameter on any rank")


def _group_in(group_of: GroupOf, name: str, tensor: torch.Tensor) -> str | None:
    if isinstance(group_of, Mapping):
        return next((group for pattern, group in group_of.items() if fnmatch.fnmatchcase(name, pattern)), None)
    return group_of(name, tensor)


def buffer_groups(module: torch.nn.Module, identities: Mapping[str, ParamIdentity]) -> dict[str, str]:
    """Return the group of each module buffer: that of all parameters in its module if they share one, else ``dense``."""
    groups: dict[str, set[str]] = {}
    for name, identity in identities.items():
        path = name
        while path:
            path = path.rpartition(".")[0]
            groups.setdefault(path, set()).add(identity.group)
    names = [name for name, _ in module.named_buffers(remove_duplicate=False)]
    around = {name: groups.get(name.rpartition(".")[0], {DENSE}) for name in names}
    return {name: next(iter(of_name)) if len(of_name) == 1 else DENSE for name, of_name in around.items()}
