"""Communication: the port and its implementations."""

from megabucket.comm.communicator import (
    AllGather,
    AllReduce,
    AllToAll,
    Batch,
    Broadcast,
    Call,
    Communicator,
    ForwardingCommunicator,
    Handle,
    LocalCommunicator,
    ReduceOp,
    ReduceScatter,
    ReplicaReducer,
)
from megabucket.comm.device import Accelerator, Arrival, GradStreams
from megabucket.comm.exchange import Exchange, Gate, exchange
from megabucket.comm.hosts import HostMap, Place
from megabucket.comm.liveness.watch import Liveness
from megabucket.comm.samehost import SameHostCommunicator, with_same_host_copies
from megabucket.comm.torch import ProcessGroupCommunicator, discover_communicator

__all__ = [
    "Accelerator",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Arrival",
    "Batch",
    "Broadcast",
    "Call",
    "Communicator",
    "Exchange",
    "ForwardingCommunicator",
    "Gate",
    "GradStreams",
    "Handle",
    "HostMap",
    "Liveness",
    "LocalCommunicator",
    "Place",
    "ProcessGroupCommunicator",
    "ReduceOp",
    "ReduceScatter",
    "ReplicaReducer",
    "SameHostCommunicator",
    "discover_communicator",
    "exchange",
    "with_same_host_copies",
]
