"""The two libraries the ranks can train with, behind the few calls that differ. The training loop is the same for both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megabucket.comm import Communicator, LocalCommunicator
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.optim import DistributedOptimizer
from megabucket.trace.recorder import Launch

from .cells import Combo, Fault
from .model import BUCKET_NUMEL, LEARNING_RATE, FaultModel

_HEARTBEAT_S = 0.5
_DEAD_AFTER_S = 6.0
"""Long enough for a machine with many more busy processes than cores. Kinds about frozen ranks have a shorter one."""
_TORCH_TIMEOUT_S = 4.0


class Ours:
    """The library under test."""

    zeros_for_unused = True

    def __init__(self, combo: Combo, on_collective: Callable[[str], None] = lambda _: None) -> None:
        self._combo = combo
        self.recorder = _LabelRecorder(on_collective)

    def group_timeout_s(self, fault: Fault) -> float:
        return fault.group_timeout_s

    def wrap(self, model: FaultModel, fields: Mapping[str, Any], communicator: Communicator | None = None) -> Any:
        """Wrap with small buckets, quick heartbeats, and all overlap there is, or none."""
        combo = self._combo
        settings: dict[str, Any] = {
            "use_distributed_optimizer": combo.is_sharded,
            "overlap_grad_reduce": combo.overlaps,
            "overlap_param_gather": combo.overlaps and combo.is_sharded,
            "finish": "explicit" if combo.is_explicit else "auto",
            "bucket_size": BUCKET_NUMEL,
            "heartbeat_s": _HEARTBEAT_S,
            "dead_after_s": _DEAD_AFTER_S,
            "straggler_warning_s": None,
        }
        config = DistributedDataParallelConfig(**{**settings, **fields})
        if communicator is not None:
            return DistributedDataParallel(model, config, communicator=communicator)
        return DistributedDataParallel(model, config, recorder=self.recorder)

    def wrap_alone(self, model: FaultModel) -> Any:
        return DistributedDataParallel(model, communicator=LocalCommunicator())

    def make_optimizer(self, model: FaultModel, ddp: Any, momentum: float) -> Any:
        """Return plain SGD, or the distributed optimizer over it; of its second group only the first rank has a shard."""
        *others, last = model.parameters()
        optimizer = torch.optim.SGD([{"params": others}, {"params": [last]}], lr=LEARNING_RATE, momentum=momentum)
        return DistributedOptimizer(optimizer, ddp) if self._combo.is_sharded else optimizer

    def step_block(self, ddp: Any) -> AbstractContextManager[Any]:
        block: AbstractContextManager[Any] = ddp.step()
        return block

    def counter(self, ddp: Any) -> int:
        """Return how many steps the ranks have agreed on."""
        return int(ddp.sync.step)


class Torch:
    """torch's DistributedDataParallel, with ZeroRedundancyOptimizer in place of reduce-scatter."""

    zeros_for_unused = False

    def __init__(self, combo: Combo) -> None:
        self._combo = combo

    def group_timeout_s(self, fault: Fault) -> float:
        """Return a short time: it is all that ends a wait for a lost rank, and the default is 30 minutes."""
        del fault
        return _TORCH_TIMEOUT_S

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

    def step_block(self, ddp: Any) -> AbstractContextManager[Any]:
        del ddp
        return nullcontext()

    def counter(self, ddp: Any) -> int:
        del ddp
        return 0


System = Ours | Torch


class _LabelRecorder:
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
