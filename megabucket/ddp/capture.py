"""What cannot be part of a CUDA graph: the host reads a number of the device, and a graph is recorded before there is one."""

from __future__ import annotations

import torch

from megabucket.errors import PhaseError


def check_not_capturing(device: torch.device, *, reader: str, remedy: str) -> None:
    """Refuse to let the host read from a device whose current stream is being captured. Costs nothing on a CPU.

    Args:
        reader: what reads, for the text.
        remedy: what to do instead.

    Raises:
        PhaseError: a CUDA graph is being captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise PhaseError(
            f"a CUDA graph is being captured, and {reader}: the host would wait for the device, which does nothing before the "
            f"graph is replayed. {remedy}"
        )
