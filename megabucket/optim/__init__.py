"""The distributed optimizer: shards, norm, clipping, step; loss scalers."""

from megabucket.optim.distributed_optimizer import DistributedOptimizer, StepResult
from megabucket.optim.scaler import ConstantGradScaler, DynamicGradScaler

__all__ = ["ConstantGradScaler", "DistributedOptimizer", "DynamicGradScaler", "StepResult"]
