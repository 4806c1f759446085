"""The two libraries the ranks can train with, behind the few calls that differ. The training loop is the same for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megabucket.comm import Communicator, LocalCommunicator
from megabucket.comm.torch import members_of
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.ddp.groups import ParallelGroups, ReductionGroup
from megabucket.layout.identity import ParamIdentity, plain_identity
from megabucket.optim import DistributedOptimizer
from megabucket.optim.chained import ChainedOptimizer
from megabucket.optim.scaler import DynamicGradScaler
from megabucket.trace.recorder import Launch

from .acts import ALL_LAYERS
from .cells import Combo, Form, Here
from .model import BUCKET_NUMEL, DELAYED, EXPERT, LEARNING_RATE, DelayedLinear, FaultModel, Part, muon_and_adamw

_HEARTBEAT_S = 0.5
_DEAD_AFTER_S = 6.0
"""Long enough for a machine with many more busy processes than cores. Kinds about frozen ranks have a shorter one."""
TORCH_TIMEOUT_S = 4.0
"""Of the group with torch DDP: all that ends a wait for a lost rank."""
SCALE = 8.0
"""Of losses, where a scaler is used: a power of two, so that sums stay exact."""


Groups = Mapping[str, Any]
"""Of one rank, by name: ``all`` ranks, its ``pair`` of neighbours, every ``second`` rank. Groups or communicators."""


def make_groups(combo: Combo, make: Callable[[list[int]], Mapping[int, Any]]) -> list[Groups]:
    """Return the groups of each rank, where the form of the program has any. ``make`` returns those of a few ranks, by rank."""
    made: list[dict[str, Any]] = [{} for _ in range(combo.num_ranks)]
    if combo.form in (Form.GROUPS, Form.REPLICAS, Form.COPIES):
        lines = {"all": [[0, 1, 2, 3]], "pair": [[0, 1], [2, 3]], "second": [[0, 2], [1, 3]]}
        for name, members in lines.items():
            for ranks in members:
                for rank, group in make(ranks).items():
                    made[rank][name] = group
    if combo.form is Form.CHAINED:
        for part in ("part 0", "part 1"):
            for rank, group in make(list(range(combo.num_ranks))).items():
                made[rank][part] = group
    return made


class Ours:
    """The library under test."""

    zeros_for_unused = True

    def __init__(
        self, combo: Combo, on_collective: Callable[[str], None] = lambda _: None, groups: Groups | None = None
    ) -> None:
        self._combo, self._groups = combo, groups or {}
        self.recorder = LabelRecorder(on_collective)

    def wrap(self, model: FaultModel, fields: Mapping[str, Any], communicator: Communicator | None = None) -> Any:
        """Wrap with small buckets, quick heartbeats, and all overlap there is, or none."""
        combo = self._combo
        settings: dict[str, Any] = {
            "use_distributed_optimizer": combo.is_sharded,
            "overlap_grad_reduce": combo.overlaps,
            "overlap_param_gather": combo.overlaps and combo.is_sharded,
            "finish": "explicit" if combo.is_explicit else "auto",
            "bucket_size": BUCKET_NUMEL if combo.overlaps or not combo.has_owners else None,
            "nonfinite_gradients": "allow" if combo.form in (Form.SCALER, Form.AMP) else "error",
            "heartbeat_s": _HEARTBEAT_S,
            "dead_after_s": _DEAD_AFTER_S,
            "straggler_warning_s": None,
        }
        config = DistributedDataParallelConfig(**{**settings, **fields})
        ranks: dict[str, Any] = {"recorder": self.recorder} if communicator is None else {"communicator": communicator}
        if combo.form is Form.DELAYED:
            model.layers["1"] = DelayedLinear(model.layers["1"])  # type: ignore[arg-type]
        if combo.form is Form.CHAINED:
            # Each wrapper has a group of its own, which over gloo it makes by itself.
            kind = "process_group" if communicator is None else "communicator"
            recorder = {"recorder": self.recorder} if communicator is None else {}
            parts = [{kind: self._groups[f"part {index}"], **recorder} for index in range(2)]
            return Chain(model, lambda part, index: DistributedDataParallel(part, config, **parts[index]))
        if self._groups:
            # A communicator has brought its recorder to those of the groups.
            ranks = {**({} if communicator else ranks), "groups": self._parallel_groups()}
        return DistributedDataParallel(model, config, **ranks)

    def _parallel_groups(self) -> ParallelGroups:
        ranks, form = self._groups, self._combo.form
        if form is Form.GROUPS:
            place = members_of(ranks["second"])[0]  # of the expert that this rank holds

            def identity(name: str, param: torch.Tensor) -> ParamIdentity | None:
                own = plain_identity(f"expert {place}: {name}", tuple(param.shape))
                return replace(own, group="expert") if name.startswith(EXPERT) else None

            return ParallelGroups({"dense": ranks["all"], "expert": ranks["second"]}, identity=identity)
        if form is Form.REPLICAS:
            shards = ReductionGroup(ranks["pair"], replicate=ranks["second"])
            return ParallelGroups({"dense": shards}, step_group=ranks["all"])
        return ParallelGroups(
            {"dense": ranks["second"]}, copies={"tp": ranks["pair"]}, norm_group=ranks["all"], step_group=ranks["all"]
        )

    def wrap_alone(self, model: FaultModel) -> Any:
        return DistributedDataParallel(model, communicator=LocalCommunicator())

    def make_optimizer(self, model: FaultModel, ddp: Any, momentum: float) -> Any:
        """Return plain SGD, or the distributed optimizer over it; of its second group only the first rank has a shard.

        Where weights have owners it is over Muon and AdamW.
        """
        form = self._combo.form
        if form is Form.CHAINED:
            return ChainedOptimizer([DistributedOptimizer(self._given(part.module, momentum), part) for part in ddp.parts])
        given = self._given(model, momentum)
        if not self._combo.has_own_optimizer:
            return given[0]
        ours = DistributedOptimizer(given, ddp)
        return Scaled(ours, make_scaler(form, SCALE)) if form in (Form.SCALER, Form.AMP) else ours

    def _given(self, model: torch.nn.Module, momentum: float) -> list[torch.optim.Optimizer]:
        return muon_and_adamw(model) if self._combo.has_owners else [_sgd(model, momentum)]

    def after_backward(self, here: Here) -> None:
        """Hand over the gradients that do not come through autograd."""
        if self._combo.form is Form.DELAYED:
            param = here.model.get_parameter(DELAYED)
            for grad in here.model.layers["1"].take_grads():  # type: ignore[operator]
                param.grad = grad
                here.ddp.grad_ready(param)

    def step_block(self, ddp: Any) -> AbstractContextManager[Any]:
        block: AbstractContextManager[Any] = ddp.step()
        return block

    def counter(self, ddp: Any) -> int:
        """Return how many steps the ranks have agreed on."""
        return int(ddp.sync.step)


def _sgd(model: torch.nn.Module, momentum: float) -> torch.optim.SGD:
    *others, last = model.parameters()
    return torch.optim.SGD([{"params": others}, {"params": [last]}], lr=LEARNING_RATE, momentum=momentum)


def make_scaler(form: Form, scale: float) -> Any:
    """Return a new loss scaler of ours or of torch's."""
    scaler = DynamicGradScaler(scale) if form is Form.SCALER else torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))  # before its first call torch's has no scale
    return scaler


class Scaled:
    """A distributed optimizer and its loss scaler, stepped as a loop does. Everything else is the optimizer's."""

    def __init__(self, optimizer: DistributedOptimizer, scaler: Any) -> None:
        self.optimizer, self.scaler = optimizer, scaler

    def step(self) -> None:
        """Unscale, step and choose the next scale. An exception leaves out what follows."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def give_up(self) -> None:
        """Do what torch asks of a loop that leaves a step: its scaler wants an ``update()`` once it has tested gradients."""
        if isinstance(self.scaler, torch.amp.GradScaler):
            with suppress(AssertionError):  # it has tested none
                self.scaler.update()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class Chain:
    """Wrappers around the halves of a model, behind the calls of one."""

    def __init__(self, model: FaultModel, wrap: Callable[[Part, int], DistributedDataParallel]) -> None:
        self.module = model
        self.parts: list[Any] = []
        try:
            for index, layers in enumerate((ALL_LAYERS[:2], ALL_LAYERS[2:])):
                self.parts.append(wrap(Part(model, layers), index))
        except BaseException:
            for part in self.parts:
                part.detach()
            raise

    def __call__(self, inputs: torch.Tensor, layers: Sequence[int] = ALL_LAYERS, checkpointed: Sequence[int] = ()) -> Any:
        hidden = None
        for part, own in zip(self.parts, (ALL_LAYERS[:2], ALL_LAYERS[2:]), strict=True):
            hidden = part(inputs, [index for index in layers if index in own], checkpointed, hidden)
        return hidden

    @property
    def sync(self) -> Any:
        return self.parts[0].sync

    @property
    def last_error(self) -> Any:
        return next((error for part in self.parts if (error := part.last_error)), None)

    def no_sync(self) -> AbstractContextManager[Any]:
        return self._within("no_sync")

    def step(self) -> AbstractContextManager[Any]:
        return self._within("step")

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            for part in reversed(self.parts):  # so that blocks end in the order in which the optimizer asks the parts
                stack.enter_context(getattr(part, name)())
            yield

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: value for part in self.parts for name, value in part.state_dict().items()}

    def load_state_dict(self, values: Mapping[str, torch.Tensor]) -> None:
        for part in self.parts:
            part.load_state_dict({name: values[name] for name in part.state_dict()})

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in ("step_number", "force_all_reduce"):
            for part in self.parts:
                setattr(part, name, value)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return the call of a method on each part."""
        methods = [getattr(part, name) for part in self.parts]

        def call_each(*args: Any, **kwargs: Any) -> None:
            for method in methods:
                method(*args, **kwargs)

        return call_each


class Torch:
    """torch's DistributedDataParallel, with ZeroRedundancyOptimizer in place of reduce-scatter."""

    zeros_for_unused = False

    def __init__(self, combo: Combo) -> None:
        self._combo = combo

    def wrap(self, model: FaultModel, fields: Mapping[str, Any], communicator: None = None) -> Any:
        """Wrap with buckets of the same size and those settings that torch has, too."""
        del communicator
        numel = fields.get("bucket_size", BUCKET_NUMEL)
        finds_unused = fields.get("unused_parameters") == "zero"
        return TorchDDP(model, bucket_cap_mb=numel * 4 / 2**20, find_unused_parameters=finds_unused)

    def wrap_alone(self, model: FaultModel) -> Any:
        """Return the model: torch does not mind."""
        return model

    def make_optimizer(self, model: FaultModel, ddp: Any, momentum: float) -> Any:
        """Return plain SGD, or torch's ZeRO-1 over it."""
        del ddp
        settings: dict[str, Any] = {"lr": LEARNING_RATE, "momentum": momentum}
        if not self._combo.is_sharded:
            return torch.optim.SGD(model.parameters(), **settings)
        # Imports torch.jit, which warns; only this system needs it.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, **settings)

    def after_backward(self, here: Here) -> None:
        """Do nothing."""

    def step_block(self, ddp: Any) -> AbstractContextManager[Any]:
        del ddp
        return nullcontext()

    def counter(self, ddp: Any) -> int:
        del ddp
        return 0


System = Ours | Torch


class LabelRecorder:
    """Tells the labels of collectives as they are launched."""

    records_time = False

    def __init__(self, on_collective: Callable[[str], None]) -> None:
        self._on_collective = on_collective

    def record_launch(self, launch: Launch) -> None:
        self._on_collective(launch.record.label)

    def enter_phase(self, step: int, phase: str) -> None:
        """Drop it."""

    def note_ready(self, label: str) -> None:
        """Drop it."""
