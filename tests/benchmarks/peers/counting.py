"""Collectives and bytes of a step, counted the same way for all systems, in steps of their own that are not timed.

Over gloo torch's profiler sees every work that gloo takes on, whoever launches it and through which interface. On the emulated
fabric, which is a process group in Python, its methods are watched. What a system asks for and what the back-end makes of it
may differ: gloo's reduce-scatter is an all-reduce inside, and is counted as that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

ELEMENT_BYTES = {"float": 4, "double": 8, "int": 4, "long int": 8, "unsigned char": 1, "signed char": 1, "bool": 1}
HALF_BYTES = 2  # of c10::BFloat16 and c10::Half
GATHERING = ("all_gather", "gather")
FABRIC_METHODS = {  # of the group: which argument holds the full buffers
    "allreduce": 0,
    "allreduce_coalesced": 0,
    "broadcast": 0,
    "reduce": 0,
    "all_gather_single": 0,
    "all_gather_single_coalesced": 0,
    "_allgather_base": 0,
    "allgather": 0,
    "reduce_scatter_single": 1,
    "reduce_scatter_single_coalesced": 1,
    "_reduce_scatter_base": 1,
    "reduce_scatter": 1,
    "all_to_all_single": 0,
    "alltoall_base": 0,
    "send": 0,
    "barrier": None,
}


class Counts:
    """Calls and bytes of full buffers by kind of collective, on this rank."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def add(self, kind: str, num_bytes: int) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += num_bytes

    def to_dict(self, steps: int) -> dict[str, dict[str, float]]:
        """Return calls and bytes of one step; ``all`` holds everything but the receiving side of messages."""
        kinds = {kind: {"calls": self.calls[kind] / steps, "bytes": self.bytes[kind] / steps} for kind in sorted(self.calls)}
        sent = [counts for kind, counts in kinds.items() if kind != "recv"]
        return {**kinds, "all": {name: sum(counts[name] for counts in sent) for name in ("calls", "bytes")}}


def count(run: Callable[[], None], *, steps: int, is_fabric: bool) -> dict[str, dict[str, float]]:
    """Return what ``run``, which takes so many steps, launches in one of them."""
    counts = Counts()
    if is_fabric:
        with watched_fabric(counts):
            run()
    else:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            run()
        for event in seen.profiler.kineto_results.events():
            if event.name().startswith("gloo:"):
                kind = event.name().removeprefix("gloo:")
                counts.add(kind, full_bytes(kind, event.shapes(), event.dtypes(), ranks=dist.get_world_size()))
    return counts.to_dict(steps)


def full_bytes(kind: str, shapes: list[Any], dtypes: list[str], *, ranks: int) -> int:
    """Return the bytes of the full buffer: gloo notes inputs, and the input of a gather is one rank's part."""
    total = 0
    for shape, dtype in zip(shapes, dtypes, strict=False):
        numel = 1
        for size in shape:
            numel *= size
        total += numel * ELEMENT_BYTES.get(dtype, HALF_BYTES)
    return total * (ranks if kind in GATHERING else 1)


@contextmanager
def watched_fabric(counts: Counts) -> Iterator[None]:
    """Count what is launched on groups of the emulated fabric."""
    from megabucket.testing.fabric.group import FabricGroup

    depth = [0]  # a method of the group may call another one

    def watching(method: str, position: int | None) -> Callable[..., Any]:
        original = getattr(FabricGroup, method)

        def launch(group: Any, *args: Any, **kwargs: Any) -> Any:
            if depth[0] == 0:
                counts.add(method.strip("_").removesuffix("_coalesced"), 0 if position is None else nbytes(args[position]))
            depth[0] += 1
            try:
                return original(group, *args, **kwargs)
            finally:
                depth[0] -= 1

        return launch

    with ExitStack() as stack:
        for method, position in FABRIC_METHODS.items():
            stack.enter_context(mock.patch.object(FabricGroup, method, watching(method, position)))
        yield


def nbytes(tensors: Any) -> int:
    return tensors.nbytes if isinstance(tensors, torch.Tensor) else sum(map(nbytes, tensors))
