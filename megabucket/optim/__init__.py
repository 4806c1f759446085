"""The distributed optimizer: shards, norm, clipping, step; loss scalers."""

from megabucket.optim.distributed_optimizer import DistributedOptimizer, OptimizerPart, StepResult
from megabucket.optim.scaler import ConstantGradScaler, DynamicGradScaler

__all__ = ["ConstantGradScaler", "DistributedOptimizer", "DynamicGradScaler", "OptimizerPart", "StepResult"]
