"""Wraps a module: layout, buffers, bucket groups, hooks. All ranks succeed or fail together, and a failure changes nothing.

``DistributedDataParallel`` has one ``Wrapping`` at a time; a rebuild makes another. Unsupported parameters are refused first:
every error names the parameter, the reason and the remedy.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, Final, NoReturn, Protocol

import torch
from torch.nn.parameter import UninitializedParameter

from megabucket._version import __version__
from megabucket.buffer import ParamAndGradBuffer, ParamPhase, _ParamAndGradBucketGroup, dtype_name
from megabucket.buffer.param_and_grad_buffer import _ParamAndGradBucket
from megabucket.comm import exchange
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.config.resolve import StepPolicy, fp32_local_params
from megabucket.ddp.backward import refuse_in_backward
from megabucket.ddp.calls import calling
from megabucket.ddp.groups import (
    DENSE,
    ParallelGroups,
    RankGroups,
    buffer_groups,
    check_group_uses,
    copies_key,
    group_uses,
    identify,
)
from megabucket.ddp.hooks import ModuleHook, backward_hooks_of, register_hooks
from megabucket.ddp.module_watch import ModelWatch, moved_params
from megabucket.ddp.offload import Memory
from megabucket.ddp.optimizer_guard import PlainOptimizerGuard
from megabucket.ddp.owners import OwnerGuard, find_owner, is_in_fsdp
from megabucket.ddp.param_gather import ParamGather
from megabucket.ddp.report import Entry
from megabucket.ddp.step import GradSync
from megabucket.errors import (
    AlreadyWrappedError,
    ConfigError,
    LateGradientError,
    MegabucketError,
    ModelChangedError,
    NonFiniteGradientError,
    NoTrainableParametersError,
    PhaseError,
    UnsupportedParameterError,
    UnusedParameterError,
    log_once,
    name_list,
)
from megabucket.layout import ModelLayout, ParamSpec, build_layout, launch_order
from megabucket.layout.identity import ParamIdentity, by_place, check_identities
from megabucket.units import DTYPE_BYTES

_CUTTING_FIELDS: Final = frozenset(
    {"bucket_size", "bucket_cap_mb", "num_buckets", "bucket_cuts", "bucket_order", "bucket_groups"}
)
"""Config fields that a rebuild may change: where buckets are cut and how they are batched."""

_DTENSOR: Final = "DTensor"
PLACES: Final = "_megabucket_places"
"""Attribute of a module with local pieces of DTensors: the place of each, by the name of the parameter."""

_LISTS: Final = ("bucket_cuts", "bucket_order")


class LocalPieces(Protocol):
    """DTensor parameters, of which the buffers hold the local pieces; see ``ddp/dtensors.py``."""

    def localize(self) -> None:
        """Put the local pieces into the module, in place of DTensors."""

    def watch_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Let a torch optimizer over pieces save its state as DTensors, and load them."""


class FollowsRebuild(Protocol):
    """An optimizer whose tensors lie in the buffers."""

    def before_rebuild(self) -> None:
        """Copy the state to keep out of the buffers."""

    def after_rebuild(self) -> None:
        """Put it into the new buffers."""

    def memory(self, *, settles: bool) -> Iterator[Memory]:
        """Return its memory that ``offload`` may give back."""


# Supported parameters #


def has_dtensors(module: torch.nn.Module) -> bool:
    """Return whether parameters of the module are DTensors, or local pieces of them. Does not import DTensors.

    Those of FSDP do not count: it reduces them itself, and they may be there only if they are frozen.
    """
    parts = [part for part in module.modules() if not is_in_fsdp(part)]
    is_one = any(type(param).__name__ == _DTENSOR for part in parts for param in part._parameters.values())
    return is_one or any(PLACES in vars(part) for part in parts)


def discover_params(module: torch.nn.Module, dtensors: LocalPieces | None = None) -> dict[str, torch.nn.Parameter]:
    """Return the trainable parameters of ``module``, which buffers will hold, by first name; tied ones once.

    Args:
        dtensors: of the module, to be replaced by their local pieces.

    Raises:
        NoTrainableParametersError: nothing requires a gradient.
        UnsupportedParameterError: a trainable parameter cannot live in a buffer.
        AlreadyWrappedError: another wrapper, perhaps of another library, holds some of the parameters.
    """
    trainable = _trainable(module)
    if not trainable:
        raise NoTrainableParametersError(module=type(module).__name__, frozen=[name for name, _ in module.named_parameters()])

    if (error := find_owner(module, trainable)) is not None:
        raise error
    if dtensors is not None:
        dtensors.localize()
        trainable = _trainable(module)
    wrapped = [name for name, param in trainable.items() if getattr(param, "main_grad", None) is not None]
    if wrapped:
        raise AlreadyWrappedError(params=wrapped)
    first_name, first = next(iter(trainable.items()))
    for name, param in trainable.items():
        for reason, remedy in _obstacles(param, first, first_name):
            raise UnsupportedParameterError(param=name, reason=reason, remedy=remedy)
    _check_disjoint_memory(module, trainable)
    return trainable


def _trainable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


def _specs(params: Mapping[str, torch.nn.Parameter], identities: Mapping[str, ParamIdentity]) -> list[ParamSpec]:
    """Describe parameters for ``build_layout``."""
    return [
        ParamSpec(
            name=name,
            shape=tuple(param.shape),
            dtype=dtype_name(param.dtype),
            group=identities[name].group,
            shared_embedding=bool(getattr(param, "shared_embedding", False)),
        )
        for name, param in params.items()
    ]


def _obstacles(param: torch.nn.Parameter, first: torch.nn.Parameter, first_name: str) -> Iterator[tuple[str, str]]:
    """Yield reasons why a parameter cannot live in a buffer, each with a remedy. The first one explains the others.

    Args:
        first: the first trainable parameter, whose device the buffers use.
    """
    if isinstance(param, UninitializedParameter):
        yield "it is uninitialized (a lazy module)", "Run one forward before wrapping."
    if torch.is_inference_mode_enabled() or param.is_inference():
        reason = "tensors of torch.inference_mode() take part in no backward"
        yield reason, "Make and wrap the module outside of it."
    if param.is_meta:
        remedy = "Call module.to_empty(device=...) and initialize the parameters before wrapping."
        yield "it is on the meta device and has no values", remedy
    if param.is_nested or param.layout is not torch.strided:
        reason = "it is a nested tensor" if param.is_nested else f"it is sparse ({param.layout})"
        yield reason, "Use a dense parameter, or freeze it."
    is_localized = getattr(param, "_st_info", None) is not None  # torch's mark, between forwards
    if (kind := type(param.data).__name__) == _DTENSOR or is_localized:
        remedy = (
            "Wrap it with process_group=mesh[...], the ranks that hold the same piece; after a change of the module that is "
            "detach() and wrapping anew. Leave out fully_shard() and _pre_dp_module_transform()."
        )
        when = " in each forward, by torch's _pre_dp_module_transform()" if is_localized else ""
        yield f"it is a DTensor{when}, which torch cuts and reduces itself", remedy
    if type(param.data) is not torch.Tensor:
        remedy = "Wrap the module before sharding or quantizing it, or freeze the parameter."
        yield f"it is a {kind}, not a plain tensor", remedy
    if dtype_name(param.dtype) not in DTYPE_BYTES:
        remedy = f"Buffers hold {', '.join(DTYPE_BYTES)}; convert the parameter before wrapping, or freeze it."
        yield f"its dtype is {dtype_name(param.dtype)}", remedy
    if any(stride == 0 and size > 1 for stride, size in zip(param.stride(), param.shape, strict=True)):
        reason = f"it is expanded: shape {tuple(param.shape)} with strides {param.stride()} repeats the same memory"
        yield reason, "Make it a parameter of its own with .clone() before wrapping."
    if param.device != first.device:
        remedy = "One buffer lives on one device: move the module to a single device before wrapping."
        yield f"it is on {param.device}, but {first_name!r} is on {first.device}", remedy


def _check_disjoint_memory(module: torch.nn.Module, trainable: Mapping[str, torch.nn.Parameter]) -> None:
    """Refuse a trainable parameter that shares memory with another tensor: moving it would break the tie.

    Only address ranges are compared, so interleaved views, such as columns of one matrix, count as sharing.
    """
    others = [(name, tensor) for name, tensor in module.named_parameters() if name not in trainable]
    # Trainable parameters last, so that the later one of a pair is a parameter that would move.
    device = next(iter(trainable.values())).device
    tensors = [
        (name, tensor)
        for name, tensor in [*module.named_buffers(), *others, *trainable.items()]
        if tensor.device == device and type(tensor.data) is torch.Tensor and tensor.layout is torch.strided and tensor.nbytes
    ]
    farthest, owner = 0, 0  # the largest end address so far, and the tensor that ends there
    for start, stop, index in sorted((*_byte_range(tensor), index) for index, (_, tensor) in enumerate(tensors)):
        earlier, name = tensors[min(index, owner)][0], tensors[max(index, owner)][0]
        if start < farthest and name in trainable:
            raise UnsupportedParameterError(
                param=name,
                reason=f"it shares memory with {earlier!r} but is a different tensor, so the tie would be lost",
                remedy="Register the same Parameter object under both names, or clone() one of them before wrapping.",
            )
        if stop > farthest:
            farthest, owner = stop, index


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _check_finish(params: Mapping[str, torch.Tensor], policy: StepPolicy, ranks: RankGroups) -> None:
    """Refuse ``finish="auto"`` if gradients may come after backward, or if other ranks wait for the end of backward.

    Raises:
        ConfigError: it cannot work.
    """
    if not policy.finishes_with_backward:
        return
    delayed = [name for name, param in params.items() if getattr(param, "skip_backward_post_hook", False)]
    why = f"gradients of {name_list(delayed)} may come after backward (skip_backward_post_hook=True)" if delayed else ""
    if not ranks.all_copies.keys().isdisjoint(("pp", "embd")):
        why = "an earlier pipeline stage waits for the result of backward on a later one"
    if why:
        raise ConfigError(
            f"{why}, but with finish='auto' and all-reduce backward waits for the gradient sync of all ranks. Set "
            "finish='explicit' and call ddp.finish_grad_sync() or finalize_grads() before the optimizer's step, or "
            "use_distributed_optimizer=True."
        )


# Entries that must be equal on all ranks #


def config_entries(config: DistributedDataParallelConfig) -> list[Entry]:
    """Return the entries that must be equal on all ranks: versions and config fields."""
    entries: list[Entry] = [
        ("megabucket", __version__),
        ("torch", str(torch.__version__)),
        # Patch releases of Python may differ between nodes.
        ("python", ".".join(platform.python_version_tuple()[:2])),
    ]
    return entries + [(f"config {name}={value}",) for name, value in config.model_dump(exclude=set(_CUTTING_FIELDS)).items()]


def model_entries(
    module: torch.nn.Module, config: DistributedDataParallelConfig, identities: Mapping[str, ParamIdentity]
) -> dict[str, list[Entry]]:
    """Return, by reduction group, the entries that must be equal on its ranks: parameters with aliases, and module buffers.

    Entries of parameters include their layout, and whether they have a gradient, which counts in the first step.
    """
    lists = {field: getattr(config, field) for field in _LISTS}
    # Bucket cuts must be equal only on the ranks that share buckets: pipeline stages may differ.
    cuts = {field: getattr(config, field) for field in sorted(_CUTTING_FIELDS)}
    cuts |= {field: f"{len(names)} names" for field, names in lists.items() if names is not None}
    entries: dict[str, list[Entry]] = {
        group: [(f"config {field}={value}",) for field, value in cuts.items()]
        for group in {DENSE, *(identity.group for identity in identities.values())}
    }
    first_name_of: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        first_name = first_name_of.setdefault(id(param), name)
        identity = identities[first_name]
        facts = {
            "frozen": not param.requires_grad,
            f"tied to {first_name}": first_name is not name,
            "with shared_embedding": getattr(param, "shared_embedding", False),
            "with a gradient from before wrapping": param.grad is not None and param.requires_grad,
            f"at {identity.offset} of {identity.global_name} {identity.global_shape}": (
                (identity.global_name, identity.global_shape) != (first_name, tuple(param.shape))
            ),
        }
        entries[identity.group].append(_entry_of(name, param, *(fact for fact, holds in facts.items() if holds)))
    group_of = buffer_groups(module, identities)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        entries.setdefault(group_of[name], []).append(_entry_of(name, buffer, "buffer"))
    # One entry per name, so that an error shows the differing names; last, because lists of two lengths shift later entries.
    for field, names in lists.items():
        for index, name in enumerate(names or ()):
            group = identities[name].group if name in identities else DENSE
            entries.setdefault(group, []).append((f"config {field}[{index}]={name}",))
    return entries


def partial_entries(
    params: Mapping[str, torch.nn.Parameter],
    identities: Mapping[str, ParamIdentity],
    layout: ModelLayout,
    ranks: RankGroups,
    copies: Iterable[str],
) -> dict[str, list[Entry]]:
    """Return, for each of some ``copies``, entries of the parameters whose gradients its ranks sum, frozen ones included.

    With shards each rank sums the part that it owns, so the parameters must have equal places in their buckets, and the ranks
    must own the same shard.
    """
    entries: dict[str, list[Entry]] = {copies_key(along): [] for along in copies}
    slots = {name: buffer for buffer in layout.buffers for name in buffer.params}
    for name in by_place((name for name in params if identities[name].partial), identities):
        identity, facts = identities[name], ["frozen"]
        if (buffer := slots.get(name)) is not None:
            facts = [f"with gradients of {buffer.key.grad_dtype}"]
            if ranks.by_name[identity.group].policy.is_sharded:
                slot = buffer.params[name]
                bucket = buffer.buckets[slot.bucket]
                facts.append(f"from element {slot.start - bucket.start} of a bucket of {bucket.numel}")
                facts.append(f"as shard {ranks.by_name[identity.group].communicator.rank} of {buffer.num_shards}")
                facts.append("(param.shared_embedding = True gives it a bucket of its own)")
        entry = _entry_of(f"{identity.global_name} at {identity.offset} of shape", params[name], *facts)
        for key in entries.keys() & map(copies_key, identity.partial):
            entries[key].append(entry)
    return entries


def _entry_of(name: str, tensor: torch.Tensor, *facts: str) -> Entry:
    """Return name, shape, dtype, and layout of a tensor."""
    place: tuple[object, ...] = ()
    if tensor.is_meta:
        place = ("meta",)
    elif tensor.layout is not torch.strided:
        place = (str(tensor.layout),)
    elif not tensor.is_contiguous():
        place = ("strides", *tensor.stride())
    return (name, tuple(tensor.shape), dtype_name(tensor.dtype), *place, *facts)


def exchange_device(module: torch.nn.Module) -> torch.device:
    """Return the device for messages about a module: that of its first parameter, if that has memory."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None or first.is_meta else first.device


# Wrapping one module #


class Wrapping:
    """The buffers, bucket groups, hooks and step state of one module.

    Args:
        groups: as given by the user; they assign parameters to groups.
        on_load: called after a ``load_state_dict`` of the module or of any submodule.

    Raises:
        LayoutMismatchError: the ranks do not hold the same module, config and versions; nothing was moved on any rank.
        PeerFailedError: another rank could not move its parameters; they are back where they were on all ranks.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: DistributedDataParallelConfig,
        policy: StepPolicy,
        ranks: RankGroups,
        *,
        groups: ParallelGroups | None = None,
        dtensors: LocalPieces | None = None,
        on_load: Callable[[], None],
    ) -> None:
        self.module, self.policy = module, policy
        params, self.identities, self.layout = _agree_on_model(module, config, policy, ranks, groups, dtensors)
        self.param_names = {param: name for name, param in params.items()}
        self.buffers: list[ParamAndGradBuffer] = []
        self.groups: list[_ParamAndGradBucketGroup] = []
        self._handles: list[Any] = []
        """To be removed at the end."""
        self._is_attached = True
        try:
            self.groups += _attach(self.layout, params, config, policy, ranks, into=self.buffers)
            watch = ModelWatch(module, params, self.groups) if self.policy.watches_model else None
            partial = frozenset(name for name, identity in self.identities.items() if identity.partial)
            hooks = backward_hooks_of(module)
            self.sync = GradSync(self.groups, self.policy, watch, backward_hooks=hooks, ranks=ranks, partial=partial)
            self.gather = ParamGather(self.groups, overlaps=self.policy.overlaps_params)
            self._handles.extend(self.gather.register_hooks(module))
            on_first = None if dtensors is None else dtensors.watch_state
            guard = PlainOptimizerGuard(params, self.sync, rank=ranks.step.rank, on_first=on_first)
            self._handles.append(guard)
            owners = OwnerGuard(module, params)
            self._handles.append(owners)
            owners.watch()
            self.call_compiled = register_hooks(
                module, self.groups, self.sync, check_forward=owners.check_forward, on_load=on_load, into=self._handles
            )
        except BaseException:
            self._release()
            raise

    def check_is_wrapped(self, module: torch.nn.Module) -> None:
        """Refuse to call a module that has replaced the wrapped one.

        Raises:
            PhaseError: it is another module.
        """
        if module is not self.module:
            raise PhaseError(
                "ddp.module was replaced: the gradients of the module that is there now would never be reduced. Wrap it anew "
                "with DistributedDataParallel(module, ...), after ddp.detach()."
            )

    def find_obstacle(self) -> PhaseError | None:
        """Return why the module cannot be rebuilt in its present state, or ``None``."""
        spoiled = list(moved_params(group for group in self.groups if group.param_phase is not ParamPhase.GATHERED))
        if not spoiled:
            return None
        return PhaseError(
            f"rebuild() cannot take {name_list(spoiled)}: moved or written while the values were on their way "
            "(overlap_param_gather=True), so what was moved is NaN. The values are back now: change the module again, then "
            "call ddp.rebuild(); and call ddp.finish_param_sync() before you touch parameters outside forward."
        )

    def undo(self) -> None:
        """Give the parameters their own storage again and remove all hooks. A second call does nothing."""
        if not self._is_attached:
            return
        try:
            if self.sync.broken is None:
                self.sync.leave()
            if self.sync.broken is None:
                self.gather.finish()
        finally:  # also after the loss of a rank
            self._release()

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        for group in self.groups:
            group.show_params()
        for buffer in self.buffers:
            buffer.detach()
        self._is_attached = False  # last: an interrupted call is repeated


class Detached:
    """Replaces a wrapping after ``detach()``: every use of the wrapper raises an error. The module is a plain one.

    Args:
        text: of the error.
    """

    def __init__(
        self,
        text: str = (
            "this wrapper was detached: the module is a plain one again, and nothing would be reduced. Wrap it anew with "
            "DistributedDataParallel(module, ...) and make the optimizer anew; or, without reductions, call the module itself "
            "and make a torch optimizer of its parameters."
        ),
    ) -> None:
        self._text = text

    def undo(self) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse every attribute.

        Raises:
            PhaseError: for every public name.
        """
        if name.startswith("_"):
            raise AttributeError(name)  # Python itself looks these up
        raise PhaseError(self._text)


class Unwrapped(Detached):
    """Replaces a wrapping after a failed rebuild: every use of the wrapper, or of the module, raises an error.

    Args:
        sync: its counts continue in the next wrapping.
        reason: why the rebuild failed.
    """

    def __init__(self, module: torch.nn.Module, sync: GradSync, *, reason: str) -> None:
        text = (
            "the module is not wrapped, because rebuild() has failed; gradients would not be reduced. Repair what the error "
            "has named and call ddp.rebuild() again on every rank; parameters, moments and main parameters are kept. "
            f"The error was {reason}"
        )
        super().__init__(text)
        self.sync_before = sync

        def refuse(called: torch.nn.Module, _: Any) -> None:
            if called is module:  # a shallow copy shares the hook
                raise PhaseError(text)

        self._handle = module.register_forward_pre_hook(ModuleHook(refuse), prepend=True)

    def undo(self) -> None:
        """Allow calls of the module again. A second call does nothing."""
        self._handle.remove()


def find_difference(before: DistributedDataParallelConfig, after: DistributedDataParallelConfig) -> ConfigError | None:
    """Return an error if a config for a rebuild differs in other fields than those of bucket cuts."""
    old, new = (config.model_dump(exclude=set(_CUTTING_FIELDS)) for config in (before, after))
    different = [f"{name}={old[name]} to {name}={new[name]}" for name in old if old[name] != new[name]]
    if not different:
        return None
    allowed = ", ".join(sorted(_CUTTING_FIELDS))
    return ConfigError(
        f"rebuild() cannot change {'; '.join(different)}. It may only cut buckets anew, by {allowed}; for the rest, detach and "
        "wrap again."
    )


def prepare_rebuild(
    wrapping: Wrapping | Detached, sync: GradSync, *, num_optimizers: int, obstacle: ConfigError | None = None
) -> None:
    """Agree with all ranks on a rebuild and drop the open step.

    Changes nothing else.

    Args:
        sync: of the wrapping, or the one whose counts continue.
        obstacle: why this rank cannot rebuild.

    Raises:
        ConfigError: the obstacle.
        LayoutMismatchError: a rank has another number of optimizers, or is in another state.
        PhaseError: the module cannot be rebuilt as it is now, or the wrapper was detached.
        StepMismatchError: other ranks take a step.
        PeerFailedError: another rank cannot rebuild its module, or has failed in the step.
    """
    refuse_in_backward("rebuild()")
    failure: MegabucketError | None = obstacle
    if isinstance(wrapping, Unwrapped):
        description = "a module that no rebuild has wrapped yet"
    else:
        description, failure = "a wrapped module", obstacle or wrapping.find_obstacle()
        # First, because in an open step ranks may have launched different numbers of buckets. Its gradients are not wanted, and
        # a changed module is why the caller rebuilds.
        with suppress(ModelChangedError, LateGradientError, UnusedParameterError, NonFiniteGradientError):
            sync.reset()
        wrapping.gather.finish()
    with sync.call("rebuild") as call:
        call.entries = [("optimizers to take along:", num_optimizers), (description,)]
        if failure is not None:
            raise failure


def _agree_on_model(
    module: torch.nn.Module,
    config: DistributedDataParallelConfig,
    policy: StepPolicy,
    ranks: RankGroups,
    groups: ParallelGroups | None,
    dtensors: LocalPieces | None,
) -> tuple[dict[str, torch.nn.Parameter], dict[str, ParamIdentity], ModelLayout]:
    """Return the parameters, their identities and the layout of a module, after comparing it on all ranks.

    Raises:
        LayoutMismatchError: module, config or versions differ.
        LayoutError: ``identity=`` lets two ranks hold the same part of the whole model.
        ConfigError: a group has no parameter on any rank.
        PeerFailedError: some rank cannot wrap its module.
        MegabucketError: what ``discover_params``, ``identify`` and ``build_layout`` raise, where all ranks raise it alike.
    """
    with calling("wrap", ranks, exchange_device(module)) as call:
        params = discover_params(module, dtensors)
        _check_finish(params, policy, ranks)
        identities = identify(module, ranks, groups)
        sizes = {name: group.communicator.size for name, group in ranks.by_name.items()}
        layout = build_layout(_specs(params, identities), config, dp_size=sizes[DENSE], group_sizes=sizes)
        order = [layout.buffers[index].key.group for index, _ in launch_order(layout)]
        call.entries = config_entries(config)
        by_group = model_entries(module, config, identities)
        for of_group in by_group.values() if len(ranks.by_name) > 1 else ():
            of_group.append(("groups of the buckets, in launch order", *order))
        copies = partial_entries(dict(module.named_parameters()), identities, layout, ranks, ranks.copies)
        call.by_group = {**by_group, **copies}
    if groups is not None:
        _compare_identities(module, identities, ranks, groups)
    return params, identities, layout


def _compare_identities(
    module: torch.nn.Module, identities: Mapping[str, ParamIdentity], ranks: RankGroups, groups: ParallelGroups
) -> None:
    """Compare identities and groups of parameters on all ranks, of which each may hold another part of the model.

    Raises:
        LayoutError: the results of ``identity=`` contradict each other. Without a result a parameter may have a local name.
        ConfigError: a group has no parameter on any rank.
    """
    given = [(name, param) for name, param in module.named_parameters() if groups.identity and groups.identity(name, param)]
    claims = []
    for name, param in given:
        own = identities[name]
        # Copies along dimensions without given ranks are unknown.
        if ranks.copies.keys() >= {*own.copies} and ranks.is_first(own):
            claims.append((name, own.global_name, own.offset, tuple(param.shape), own.global_shape))
    said = {"claims": claims, **group_uses(identities, ranks, groups.group_of)}
    rows = [json.dumps(said, default=int).encode()]  # default= for integers of numpy
    if not ranks.has_same_params:
        rows = exchange(ranks.step, rows[0], device=exchange_device(module), label="wrap: identities")
    by_rank = [json.loads(row) for row in rows]
    by_owner = {f"{name} on rank {rank}": claim for rank, row in enumerate(by_rank) for name, *claim in row["claims"]}
    check_identities(
        {owner: ParamIdentity(of, tuple(whole), tuple(offset)) for owner, (of, offset, _, whole) in by_owner.items()},
        {owner: tuple(shape) for owner, (_, _, shape, _) in by_owner.items()},
    )
    check_group_uses(by_rank)


def _attach(
    layout: ModelLayout,
    params: Mapping[str, torch.nn.Parameter],
    config: DistributedDataParallelConfig,
    policy: StepPolicy,
    ranks: RankGroups,
    *,
    into: list[ParamAndGradBuffer],
) -> list[_ParamAndGradBucketGroup]:
    """Move the parameters into buffers, and return bucket groups in launch order.

    Args:
        into: gets the buffers. After an error, on all ranks, the caller detaches them.
    """
    groups: list[_ParamAndGradBucketGroup] = []
    device = next(iter(params.values())).device
    fp32_local = fp32_local_params(config, params)
    for pattern in config.param_name_patterns_for_fp32_local_accumulation:
        if pattern != "all" and not any(fnmatchcase(name, pattern) for name in params):
            log_once(f"param_name_patterns_for_fp32_local_accumulation: no parameter on this rank matches {pattern!r}")
    with calling("wrap: buffers", ranks, device):
        for one in layout.buffers:
            communicator = ranks.by_name[one.key.group].communicator
            into.append(ParamAndGradBuffer(one, params, fp32_local=fp32_local, communicator=communicator))
        batches: dict[object, list[_ParamAndGradBucket]] = {}
        for bucket_id in launch_order(layout):
            bucket = into[bucket_id.buffer].buckets[bucket_id.bucket]
            batches.setdefault(bucket.buffer.layout.key.group if policy.is_one_batch else bucket_id, []).append(bucket)
        for index, batch in enumerate(batches.values()):
            reduction = ranks.by_name[batch[0].buffer.layout.key.group]._asdict()
            del reduction["places"]
            groups.append(_ParamAndGradBucketGroup(batch, index=index, **reduction))
    return groups


def has_prefix_of_torch(module: torch.nn.Module, names: Iterable[str], prefix: str = "") -> bool:
    """Return whether names of a ``state_dict`` have the ``module.`` that torch DDP puts before those of the module.

    Args:
        prefix: of all names.
    """
    has_own = "module" in {*module._modules, *module._parameters, *module._buffers}
    return not has_own and all(name.startswith(f"{prefix}module.") for name in names)


def restore_prefix(wrapper: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let an outer module that contains the wrapper load its own ``state_dict``, whose names lack ``module.``."""
    keys = [key for key in state_dict if key.startswith(prefix)]
    for key in () if has_prefix_of_torch(wrapper.module, keys, prefix) else keys:  # type: ignore[arg-type]
        state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
