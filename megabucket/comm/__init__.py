"""Communication: the port, and what stands behind it. The only package that calls ``torch.distributed``."""

from megabucket.comm.exchange import Exchange, exchange_bytes, exchange_some
from megabucket.comm.liveness import Liveness, StragglerWarning
from megabucket.comm.port import (
    AllGather,
    AllReduce,
    Broadcast,
    Communicator,
    Handle,
    LocalCommunicator,
    Progress,
    ReduceOp,
    ReduceScatter,
)
from megabucket.comm.torch_group import ProcessGroupCommunicator, discover_communicator

__all__ = [
    "AllGather",
    "AllReduce",
    "Broadcast",
    "Communicator",
    "Exchange",
    "Handle",
    "Liveness",
    "LocalCommunicator",
    "ProcessGroupCommunicator",
    "Progress",
    "ReduceOp",
    "ReduceScatter",
    "StragglerWarning",
    "discover_communicator",
    "exchange_bytes",
    "exchange_some",
]
