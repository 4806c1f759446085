"""Facts of every rank on every rank: the only exchange the doctor needs. It takes nothing but all-gathers that work."""

from __future__ import annotations

import json
from typing import Any, Final

import torch

from megabucket.comm import Communicator, Exchange
from megabucket.errors import CollectiveError

_LENGTH_BYTES: Final = 8
_MOST_BYTES: Final = 1 << 20
"""Of one rank's fact: a length beyond it is not one that was sent."""


def gather_facts(communicator: Communicator, fact: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """Return the ``fact`` of every rank, in rank order. Every rank must call it.

    Raises:
        CollectiveError: what arrived is not what was sent, so nothing about other ranks can be said at all.
    """

    def tell_all(payload: bytes, capacity_bytes: int) -> list[bytes]:
        return Exchange(communicator, payload, capacity_bytes=capacity_bytes, device=device, label="doctor facts").wait()

    text = json.dumps(fact).encode()
    lengths = tell_all(len(text).to_bytes(_LENGTH_BYTES, "little"), _LENGTH_BYTES)
    capacity_bytes = max(int.from_bytes(length, "little") for length in lengths)
    is_plausible = len(text) <= capacity_bytes <= _MOST_BYTES
    texts = tell_all(text, capacity_bytes) if is_plausible else lengths
    try:
        return [dict(json.loads(text)) for text in texts]
    except (ValueError, TypeError):
        raise CollectiveError(
            "an all-gather of bytes gave others than were sent, so the ranks cannot even compare notes. Nothing else about "
            "this back-end can be trusted. Check that all ranks run the same version of it and the same network settings."
        ) from None
