"""Errors about what is given: configs, models, optimizers, files."""

from __future__ import annotations

from collections.abc import Sequence

from megabucket.errors.base import MegabucketError, name_list


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


class CorpusError(MegabucketError, RuntimeError):
    """The training data cannot be read."""


class InvariantError(MegabucketError, RuntimeError):
    """A bug in this library; please report the text."""
