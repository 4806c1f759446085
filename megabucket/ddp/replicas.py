"""Replicas hold the same values: made so by a broadcast, and looked after on demand by comparing checksums of all bits."""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable, Iterator, Mapping

import torch

from megabucket.comm import AllReduce, Broadcast, Communicator, Exchange, ReduceOp
from megabucket.errors import ConfigError, ReplicasDivergedError


def broadcast_replicas(tensors: Iterable[torch.Tensor], communicator: Communicator) -> None:
    """Copy tensors of the group's first rank to all ranks, one after the other."""
    if communicator.size == 1:
        return
    for tensor in tensors:
        dense = tensor if tensor.is_contiguous() else tensor.contiguous()
        communicator.launch([Broadcast(dense)], label="initial broadcast").wait()
        if dense is not tensor:
            tensor.copy_(dense)


def unbuffered_state(module: torch.nn.Module, buffered: Container[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    """Return frozen parameters and module buffers that have values.

    Args:
        buffered: the parameters that live in buffers, which are sent as a whole.

    Raises:
        ConfigError: one of them is sparse.
    """
    frozen = [(name, param) for name, param in module.named_parameters() if param not in buffered]
    for name, tensor in [*frozen, *module.named_buffers()]:
        if tensor.layout is not torch.strided:
            raise ConfigError(
                f"init_sync=True cannot make {name!r} equal on all ranks, because it is sparse ({tensor.layout}). Make it "
                "equal yourself and pass init_sync=False, or use a dense tensor."
            )
        if not tensor.is_meta:
            # Of an expanded dimension one element is all there is; torch refuses to write through the expanded view.
            yield tensor.detach()[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's values in index order: equal bits, equal number."""
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return zlib.crc32(values.data)


def check_replicas(params: Mapping[str, torch.Tensor], communicator: Communicator, *, step: int) -> None:
    """Return when all ranks hold the same bits in every parameter.

    One all-reduce of 16 bytes for each parameter, whatever the number of ranks: the largest checksum and the smallest.

    Raises:
        ReplicasDivergedError: they do not.
    """
    own = [0 if param.is_meta or not param.numel() else checksum(param) for param in params.values()]
    device = next((param.device for param in params.values() if not param.is_meta), torch.device("cpu"))
    extremes = torch.tensor([own, [-number for number in own]], dtype=torch.int64, device=device).flatten()  # 1D
    communicator.control.launch([AllReduce(extremes, ReduceOp.MAX)], label="replica checksums").wait()
    largest, negated = extremes.view(2, -1).tolist()
    differing = [index for index, (high, low) in enumerate(zip(largest, negated, strict=True)) if high != -low]
    if differing:
        first = own[differing[0]].to_bytes(4, "little")
        answers = Exchange(communicator, first, capacity_bytes=4, device=device, label="checksums that differ").wait()
        sums = [int.from_bytes(answer, "little") for answer in answers]
        name = list(params)[differing[0]]
        others = f" and {len(differing) - 1} more parameters" if len(differing) > 1 else ""
        raise ReplicasDivergedError(step=step, what=f"the bits of {name!r}{others} (CRC-32)", by_rank=sums)
