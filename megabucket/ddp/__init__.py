"""The wrapper: discovery, hooks, launch order, gradient sync and param gather."""

from megabucket.ddp.wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
