"""The wrapper: discovery, hooks, launch order, the state of a step, the fence and the param gather."""

from megabucket.ddp.distributed_data_parallel import AgreedStop, DistributedDataParallel

__all__ = ["AgreedStop", "DistributedDataParallel"]
