"""The two libraries the ranks can train with, behind the few calls that differ between them.

The training loop itself is the same plain torch loop for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megabucket.chaos.cell import Combo, Mode, SystemName
from megabucket.chaos.fault import Fault
from megabucket.chaos.model import BUCKET_NUMEL, LEARNING_RATE, ChaosModel
from megabucket.comm import LocalCommunicator
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import MegabucketError
from megabucket.optim import DistributedOptimizer
from megabucket.trace.recorder import CollectiveRecord, Interval

_HEARTBEAT_S: Final = 0.5
_DEAD_AFTER_S: Final = 6.0
"""Long enough for a machine with many more busy processes than cores. Kinds about frozen ranks have a shorter one."""
_TORCH_TIMEOUT_S: Final = 4.0


class System(Protocol):
    """What the rank needs of a library."""

    def group_timeout_s(self, fault: Fault) -> float:
        """Return the time limit of the process group."""
        ...

    @property
    def zeros_for_unused(self) -> bool:
        """Whether a parameter that no rank used gets a gradient of zero (rather than none) where that is allowed."""
        ...

    def wrap(self, model: ChaosModel, fields: Mapping[str, Any]) -> Any:
        """Return the wrapped model."""
        ...

    def wrap_alone(self, model: ChaosModel) -> Any:
        """Wrap a model without any other rank."""
        ...

    def make_optimizer(self, model: ChaosModel, ddp: Any, momentum: float) -> Any:
        """Return the optimizer that the loop steps."""
        ...

    def gather_weights(self, ddp: Any) -> None:
        """Make all weights readable."""
        ...

    def step_block(self, ddp: Any) -> AbstractContextManager[Any]:
        """Return the context in which a step runs when the fault asks for it."""
        ...

    def last_error(self, ddp: Any) -> BaseException | None:
        """Return the error all ranks agreed on last."""
        ...


class MegabucketSystem:
    """The library under test."""

    zeros_for_unused: Final = True

    def __init__(self, combo: Combo, on_collective: Callable[[str], None]) -> None:
        self._combo = combo
        self._recorder = _LabelRecorder(on_collective)

    def group_timeout_s(self, fault: Fault) -> float:
        """Return what the fault is about, or a time that no busy machine reaches."""
        return fault.group_timeout_s

    def wrap(self, model: ChaosModel, fields: Mapping[str, Any]) -> Any:
        """Wrap with small buckets, quick heartbeats, and all overlap there is, or none."""
        is_sharded = self._combo.mode is Mode.REDUCE_SCATTER
        settings: dict[str, Any] = {
            "use_distributed_optimizer": is_sharded,
            "overlap_grad_reduce": self._combo.overlaps,
            "overlap_param_gather": self._combo.overlaps and is_sharded,
            "bucket_size": BUCKET_NUMEL,
            "heartbeat_s": _HEARTBEAT_S,
            "dead_after_s": _DEAD_AFTER_S,
            "straggler_warning_s": None,
        }
        return DistributedDataParallel(model, DistributedDataParallelConfig(**{**settings, **fields}), recorder=self._recorder)

    def wrap_alone(self, model: ChaosModel) -> Any:
        """Wrap over a communicator of one rank."""
        return DistributedDataParallel(model, communicator=LocalCommunicator())

    def make_optimizer(self, model: ChaosModel, ddp: Any, momentum: float) -> Any:
        """Return plain SGD, or the distributed optimizer over it."""
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=momentum)
        return DistributedOptimizer(optimizer, ddp) if self._combo.mode is Mode.REDUCE_SCATTER else optimizer

    def gather_weights(self, ddp: Any) -> None:
        """Wait for parameters that are still gathered."""
        ddp.finish_param_sync()

    def step_block(self, ddp: Any) -> AbstractContextManager[Any]:
        """Return ``ddp.step()``."""
        block: AbstractContextManager[Any] = ddp.step()
        return block

    def last_error(self, ddp: Any) -> MegabucketError | None:
        """Return ``ddp.last_error``."""
        error: MegabucketError | None = ddp.last_error
        return error


class TorchSystem:
    """torch's DistributedDataParallel, with ZeroRedundancyOptimizer in place of reduce-scatter."""

    zeros_for_unused: Final = False

    def __init__(self, combo: Combo) -> None:
        self._combo = combo

    def group_timeout_s(self, fault: Fault) -> float:
        """Return a short time: it is all that ends a wait for a lost rank, and the default is 30 minutes."""
        del fault
        return _TORCH_TIMEOUT_S

    def wrap(self, model: ChaosModel, fields: Mapping[str, Any]) -> Any:
        """Wrap with buckets of the same size and those settings that torch has, too."""
        numel = fields.get("bucket_size", BUCKET_NUMEL)
        return TorchDDP(
            model, bucket_cap_mb=numel * 4 / 2**20, find_unused_parameters=fields.get("unused_parameters") == "zero"
        )

    def wrap_alone(self, model: ChaosModel) -> Any:
        """Return the model: torch does not mind."""
        return model

    def make_optimizer(self, model: ChaosModel, ddp: Any, momentum: float) -> Any:
        """Return plain SGD, or torch's ZeRO-1 over it."""
        del ddp
        settings: dict[str, Any] = {"lr": LEARNING_RATE, "momentum": momentum}
        if self._combo.mode is Mode.ALL_REDUCE:
            return torch.optim.SGD(model.parameters(), **settings)
        # Imports torch.jit, which warns; only this system needs it.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, **settings)

    def gather_weights(self, ddp: Any) -> None:
        """Do nothing: weights are whole after a step."""

    def step_block(self, ddp: Any) -> AbstractContextManager[Any]:
        """Return a context that does nothing: torch has none."""
        del ddp
        return nullcontext()

    def last_error(self, ddp: Any) -> None:
        """Return nothing: torch keeps no errors."""
        del ddp


class _LabelRecorder:
    """Tells the labels of collectives as they are launched."""

    records_time: Final = False

    def __init__(self, on_collective: Callable[[str], None]) -> None:
        self._on_collective = on_collective

    def record_interval(self, interval: Interval) -> None:
        """Drop it."""

    def record_collective(self, record: CollectiveRecord) -> None:
        """Tell its label."""
        self._on_collective(record.label)


def make_system(name: SystemName, combo: Combo, on_collective: Callable[[str], None]) -> System:
    """Return the library that a cell trains with."""
    return MegabucketSystem(combo, on_collective) if name is SystemName.MEGABUCKET else TorchSystem(combo)
