"""Do all ranks hold the same parameters? Asked on demand: a checksum of each parameter's bits, compared across ranks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

import torch

from megabucket.comm import Communicator, exchange_bytes
from megabucket.errors import ReplicasDivergedError


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's values in index order: equal bits, equal number."""
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return zlib.crc32(values.data)


def check_replicas(params: Mapping[str, torch.Tensor], communicator: Communicator, *, step: int) -> None:
    """Return when all ranks hold the same bits in every parameter.

    Raises:
        ReplicasDivergedError: they do not.
    """
    own = [0 if param.is_meta or not param.numel() else checksum(param) for param in params.values()]
    device = next((param.device for param in params.values() if not param.is_meta), torch.device("cpu"))
    answers = exchange_bytes(communicator, json.dumps(own).encode(), device=device, label="replica checksums")
    by_param = zip(*(json.loads(answer) for answer in answers), strict=True)
    differing = [(name, sums) for name, sums in zip(params, by_param, strict=True) if len(set(sums)) > 1]
    if differing:
        name, sums = differing[0]
        others = f" and {len(differing) - 1} more parameters" if len(differing) > 1 else ""
        raise ReplicasDivergedError(step=step, what=f"the bits of {name!r}{others} (CRC-32)", by_rank=sums)
