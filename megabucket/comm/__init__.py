"""Communication: the port, and what stands behind it. The only package that calls ``torch.distributed``."""

from megabucket.comm.loopback import LoopbackWorld
from megabucket.comm.port import (
    AllGather,
    AllReduce,
    Broadcast,
    Communicator,
    Handle,
    LocalCommunicator,
    ReduceOp,
    ReduceScatter,
)
from megabucket.comm.torch_group import ProcessGroupCommunicator, discover_communicator

__all__ = [
    "AllGather",
    "AllReduce",
    "Broadcast",
    "Communicator",
    "Handle",
    "LocalCommunicator",
    "LoopbackWorld",
    "ProcessGroupCommunicator",
    "ReduceOp",
    "ReduceScatter",
    "discover_communicator",
]
