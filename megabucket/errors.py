"""Every error this library raises on purpose; nothing else here.

Each class carries its facts as attributes, so tests and tools never parse text; the text says what happened with
names and values, why it matters, and what to do. All of them pickle, so they cross process boundaries.

::

    MegabucketError
    ├── ConfigError (ValueError)               a config that cannot be honoured
    ├── LayoutError (ValueError)               parameters or numbers a layout cannot be built from
    ├── UnsupportedParameterError (ValueError) a parameter the buffers cannot hold
    ├── NoTrainableParametersError (ValueError)
    ├── AlreadyWrappedError (ValueError)       a parameter that another wrapper holds
    ├── OptimizerParametersError (ValueError)  optimizer and wrapper disagree about the parameters
    ├── ProcessGroupMissingError (RuntimeError)
    ├── PhaseError (RuntimeError)              an operation in a phase where it is not allowed
    │   ├── LateGradientError                  a gradient for a bucket that was already sent
    │   └── UnreducedGradientsError            an optimizer step without a gradient sync before it
    ├── UnusedParameterError (RuntimeError)    a parameter without a gradient at the gradient sync
    ├── PlainOptimizerError (RuntimeError)     a plain optimizer stepping on reduce-scattered gradients
    ├── MixedDtypeOptimizerError (RuntimeError) a plain optimizer that cannot mix parameter and gradient dtypes
    ├── CollectiveError (RuntimeError)
    │   ├── MismatchedCollectiveError          ranks launched different collectives
    │   ├── CollectiveDeadlockError            a wait that can never end
    │   └── InFlightWriteError                 a buffer changed while a collective owned it
    ├── CheckpointUnavailableError (RuntimeError)
    ├── CorpusError (RuntimeError)             the training data cannot be read
    └── InvariantError (RuntimeError)          a bug of ours
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_NAMES_SHOWN = 5


def name_list(names: Sequence[str]) -> str:
    """Return the first five names, quoted, and the count of the others.

    >>> name_list(["a", "b"])
    "'a', 'b'"
    >>> name_list([str(i) for i in range(7)])
    "'0', '1', '2', '3', '4' and 2 more"
    """
    shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
    hidden = len(names) - _NAMES_SHOWN
    return f"{shown} and {hidden} more" if hidden > 0 else shown


def _rebuild(cls: type[MegabucketError], args: tuple[Any, ...], fields: dict[str, Any]) -> MegabucketError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(fields)
    return error


class MegabucketError(Exception):
    """Base of all errors raised by this library."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by fields: constructors take keywords only, which the default protocol cannot call."""
        return _rebuild, (type(self), self.args, dict(self.__dict__))

    def to_dict(self) -> dict[str, Any]:
        """Return the class name, the text and the fields as plain data."""
        return {"error": type(self).__name__, "message": str(self), **self.__dict__}


class ConfigError(MegabucketError, ValueError):
    """A config that cannot be honoured; the text lists every problem found, not only the first."""

    def __init__(self, message: str, *, problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__(message)


class LayoutError(MegabucketError, ValueError):
    """Parameters, sizes or indices that no layout can be built from."""


class UnsupportedParameterError(MegabucketError, ValueError):
    """A parameter the buffers cannot hold."""

    def __init__(self, *, param: str, reason: str, remedy: str) -> None:
        self.param, self.reason, self.remedy = param, reason, remedy
        super().__init__(f"parameter {param!r} cannot live in a parameter and gradient buffer: {reason}. {remedy}")


class NoTrainableParametersError(MegabucketError, ValueError):
    """The module has nothing to reduce."""

    def __init__(self, *, module: str, frozen: Sequence[str]) -> None:
        self.module, self.frozen = module, tuple(frozen)
        found = f"its {len(frozen)} parameters are all frozen ({name_list(frozen)})" if frozen else "it has none at all"
        super().__init__(
            f"{module} has no parameter with requires_grad=True: {found}, so there is nothing to reduce. "
            "Call requires_grad_(True) on what should be trained before wrapping, or use the module without a wrapper."
        )


class AlreadyWrappedError(MegabucketError, ValueError):
    """Two wrappers would own the gradients of one parameter."""

    def __init__(self, *, params: Sequence[str]) -> None:
        self.params = tuple(params)
        super().__init__(
            f"{name_list(self.params)} already belong to another DistributedDataParallel wrapper. Two wrappers would move "
            "the same storage and reduce the same gradients twice. Wrap a module once; call detach() on the first "
            "wrapper before wrapping again."
        )


class OptimizerParametersError(MegabucketError, ValueError):
    """The optimizer's parameters are not the wrapper's."""

    def __init__(self, *, problem: str, params: Sequence[str], remedy: str) -> None:
        self.problem, self.params = problem, tuple(params)
        super().__init__(f"{problem}: {name_list(self.params)}. {remedy}")


class ProcessGroupMissingError(MegabucketError, RuntimeError):
    """More than one process was launched but they cannot talk to each other."""

    def __init__(self, *, world_size: int) -> None:
        self.world_size = world_size
        super().__init__(
            f"this process is one of {world_size} (WORLD_SIZE={world_size}) but torch.distributed is not initialized, so "
            "each of them would train alone and the replicas would drift apart. Call "
            "torch.distributed.init_process_group() before wrapping the module, or pass process_group=."
        )


class PhaseError(MegabucketError, RuntimeError):
    """An operation in a phase where it is not allowed."""


class LateGradientError(PhaseError):
    """A gradient arrived after its bucket had been sent."""

    def __init__(self, *, param: str, bucket: int, num_buckets: int, rank: int, phase: str) -> None:
        self.param, self.bucket, self.num_buckets, self.rank, self.phase = param, bucket, num_buckets, rank, phase
        super().__init__(
            f"[rank {rank}] {param!r} received a gradient although its bucket ({bucket} of {num_buckets}, counted from 0) "
            f"is {phase}. That gradient is in no reduction, so the step would be wrong. Usual causes: a second backward "
            "without zero_grad() or outside no_sync() (wrap all but the last backward of a step in no_sync()), or "
            "reentrant activation checkpointing of a layer that is used several times (pass use_reentrant=False). "
            "The gradients of this step are lost; call zero_grad() of the wrapper or of the DistributedOptimizer and go on."
        )


class UnreducedGradientsError(PhaseError):
    """The optimizer was asked to step although gradients are still local."""

    def __init__(self, *, rank: int) -> None:
        self.rank = rank
        super().__init__(
            f"[rank {rank}] step() was called, but the gradients of this rank are not reduced: since the last step or "
            "zero_grad(), no backward has run outside no_sync(), or finish_grad_sync() was not called where the config leaves "
            "that to the caller (finish='explicit'). Run the last backward of the step outside no_sync(), or call "
            "finish_grad_sync() yourself."
        )


class UnusedParameterError(MegabucketError, RuntimeError):
    """Parameters that got no gradient in the whole step."""

    def __init__(self, *, params: Sequence[str], bucket: int, num_buckets: int, num_params: int, rank: int) -> None:
        self.params, self.bucket, self.num_buckets, self.rank = tuple(params), bucket, num_buckets, rank
        self.num_params = num_params
        super().__init__(
            f"[rank {rank}] {len(self.params)} of {num_params} parameters got no gradient in this step: "
            f"{name_list(self.params)} (first in bucket {bucket} of {num_buckets}, counted from 0). They require grad but "
            "were not used in any forward of the step. Freeze them with requires_grad_(False) before wrapping, use them, "
            "or set unused_parameters='zero' to reduce zeros in their place. The collectives of this step were completed. "
            "If every rank says so, call zero_grad() and go on; ranks that did use them have stepped without this one."
        )


class PlainOptimizerError(MegabucketError, RuntimeError):
    """A plain torch optimizer stepping on parameters whose gradients were reduce-scattered."""

    def __init__(self, *, optimizer: str, params: Sequence[str], rank: int) -> None:
        self.optimizer, self.params, self.rank = optimizer, tuple(params), rank
        super().__init__(
            f"[rank {rank}] {optimizer}.step() would update whole parameters ({name_list(self.params)}), but "
            "use_distributed_optimizer=True reduce-scatters the gradients: this rank holds the reduced values of its own "
            "shard only, and the replicas would drift apart. Wrap the optimizer: megabucket.DistributedOptimizer(optimizer, "
            "ddp); or set use_distributed_optimizer=False."
        )


class MixedDtypeOptimizerError(MegabucketError, RuntimeError):
    """A plain torch optimizer that cannot step on 16-bit parameters with wider gradients."""

    def __init__(self, *, optimizer: str, param: str, param_dtype: str, grad_dtype: str, rank: int) -> None:
        self.optimizer, self.param, self.rank = optimizer, param, rank
        self.param_dtype, self.grad_dtype = param_dtype, grad_dtype
        super().__init__(
            f"[rank {rank}] torch's {optimizer} cannot mix dtypes in a step, and {param!r} is {param_dtype} with a "
            f"{grad_dtype} gradient (grad_reduce_in_fp32=True). Wrap the optimizer: "
            "megabucket.DistributedOptimizer(optimizer, ddp) works in both modes and keeps float32 main parameters; or set "
            "grad_reduce_in_fp32=False."
        )


class CollectiveError(MegabucketError, RuntimeError):
    """A collective that cannot give the right result."""


class MismatchedCollectiveError(CollectiveError):
    """Two ranks launched different collectives at the same position of their schedules."""

    def __init__(self, *, sequence: int, rank: int, call: str, other_rank: int, other_call: str) -> None:
        self.sequence, self.rank, self.call = sequence, rank, call
        self.other_rank, self.other_call = other_rank, other_call
        super().__init__(
            f"collective {sequence} differs between ranks: rank {other_rank} launched {other_call}, rank {rank} launched "
            f"{call}. On a real process group this hangs or mixes unrelated data. All ranks must launch the same "
            "collectives in the same order."
        )


class CollectiveDeadlockError(CollectiveError):
    """A rank waits for a collective that other ranks have not launched and cannot launch any more."""

    def __init__(self, *, sequence: int, rank: int, call: str, missing_ranks: Sequence[int]) -> None:
        self.sequence, self.rank, self.call, self.missing_ranks = sequence, rank, call, tuple(missing_ranks)
        super().__init__(
            f"[rank {rank}] waits for collective {sequence} ({call}), which rank(s) {', '.join(map(str, missing_ranks))} "
            "have not launched. Launch it on every rank before waiting, or run the ranks in threads."
        )


class InFlightWriteError(CollectiveError):
    """A buffer changed between the launch and the completion of the collective that owned it."""

    def __init__(self, *, sequence: int, rank: int, call: str, index: int) -> None:
        self.sequence, self.rank, self.call, self.index = sequence, rank, call, index
        super().__init__(
            f"[rank {rank}] the input of collective {sequence} ({call}) changed while it was in flight, first at element "
            f"{index}. On a real process group the reduced value would depend on timing. Nothing may write a buffer "
            "between launch and completion."
        )


class CheckpointUnavailableError(MegabucketError, RuntimeError):
    """Optimizer state was asked for in a form that one rank cannot give."""

    def __init__(self, *, rank: int, num_shards: int) -> None:
        self.rank, self.num_shards = rank, num_shards
        super().__init__(
            f"[rank {rank}] the optimizer's state is kept by flat shards, of which this rank holds 1 of {num_shards}, not by "
            "parameter, and state_dict() must not pass shards off as the whole. Saving and loading this state is not available "
            "in this version; the model's own state_dict() is complete on every rank."
        )


class CorpusError(MegabucketError, RuntimeError):
    """The training data cannot be read."""


class InvariantError(MegabucketError, RuntimeError):
    """A bug in this library; please report the text."""
