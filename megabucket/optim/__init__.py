"""The distributed optimizer: shards, norm, clipping, step."""

from megabucket.optim.distributed_optimizer import DistributedOptimizer, StepResult

__all__ = ["DistributedOptimizer", "StepResult"]
