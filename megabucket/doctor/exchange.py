"""Facts of every rank on every rank, over the port: the only exchange the doctor needs."""

from __future__ import annotations

import json
from typing import Any

import torch

from megabucket.comm import AllGather, Communicator
from megabucket.errors import CollectiveError


def gather_facts(communicator: Communicator, fact: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """Return the ``fact`` of every rank, in rank order. Every rank must call it.

    Raises:
        CollectiveError: what arrived is not what was sent, so nothing about other ranks can be said at all.
    """
    if communicator.size == 1:
        return [fact]
    text = json.dumps(fact).encode()
    own_length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    lengths = _gather(communicator, own_length, "doctor lengths").tolist()
    longest = max(lengths)
    if not 0 < longest < 2**24:
        raise CollectiveError(_broken(f"an all-gather of one number a rank gave {lengths}"))
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(device)
    received = bytes(_gather(communicator, padded, "doctor facts").cpu().numpy())
    pieces = [received[rank * longest : (rank + 1) * longest] for rank in range(communicator.size)]
    try:
        return [json.loads(piece) for piece in pieces]
    except ValueError:
        raise CollectiveError(_broken("an all-gather of bytes gave others than were sent")) from None


def _gather(communicator: Communicator, shard: torch.Tensor, label: str) -> torch.Tensor:
    full = torch.zeros(shard.numel() * communicator.size, dtype=shard.dtype, device=shard.device)
    communicator.launch([AllGather(full, shard)], label=label).wait()
    return full


def _broken(finding: str) -> str:
    return (
        f"{finding}, so the ranks cannot even compare notes. Nothing else about this back-end can be trusted. Check that all "
        "ranks run the same version of it and the same network settings."
    )
