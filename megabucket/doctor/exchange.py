"""Facts of every rank on every rank: the only exchange the doctor needs."""

from __future__ import annotations

import json
from typing import Any

import torch

from megabucket.comm import Communicator
from megabucket.comm.exchange import exchange
from megabucket.errors import CollectiveError


def gather_facts(communicator: Communicator, fact: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """Return the ``fact`` of every rank, in rank order. Every rank must call it.

    Raises:
        CollectiveError: what arrived is not what was sent, so nothing about other ranks can be said at all.
    """
    texts = exchange(communicator, json.dumps(fact).encode(), device=device, label="doctor facts")
    try:
        return [json.loads(text) for text in texts]
    except ValueError:
        raise CollectiveError(
            "an all-gather of bytes gave others than were sent, so the ranks cannot even compare notes. Nothing else about "
            "this back-end can be trusted. Check that all ranks run the same version of it and the same network settings."
        ) from None
