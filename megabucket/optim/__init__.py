"""The distributed optimizer: shards, norm, clipping, step."""

from megabucket.optim.distributed_optimizer import DistributedOptimizer
from megabucket.optim.step_result import StepResult

__all__ = ["DistributedOptimizer", "StepResult"]
