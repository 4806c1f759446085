"""What torch knows about a process group but does not say in public.

Each probe gives a harmless answer when torch has changed.
"""

from __future__ import annotations

import ctypes
import json
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

FABRIC: Final = "megabucket_fabric"
"""Name of the emulated fabric among torch's back-ends."""

_RECORDER_CHARS: Final = 300
_RECORDER_ENTRIES: Final = 4


def store_of(group: dist.ProcessGroup) -> Store | None:
    """Return the store a group was made with."""
    try:
        store: Store = dist.distributed_c10d._get_process_group_store(group)
    except (AttributeError, KeyError):
        return None
    return store


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the back-end that tensors of a device travel over, or nothing when there is none."""
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:  # no back-end for this kind of device
        return ""


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether tensors of a device travel over gloo itself, with what it cannot do."""
    return backend_of(group, device) == "gloo"


def has_gloo_works(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether works behave as gloo's do: threads of C++ hold their tensors, and a wait may time out without harm."""
    return backend_of(group, device) in ("gloo", FABRIC)


def timeout_s_of(group: dist.ProcessGroup) -> float | None:
    """Return the time limit of a gloo group's collectives, or ``None`` when torch does not tell."""
    try:
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return None


def existence_of(group: dist.ProcessGroup) -> Callable[[], bool]:
    """Return a function that says whether the group still exists; it does not keep the group alive.

    Another default group that was initialized since is another group.
    """
    known = weakref.ref(group)

    def exists() -> bool:
        living = known()
        return living is not None and living in dist.distributed_c10d._world.pg_map

    return exists


def keep_for_ever(group: dist.ProcessGroup) -> None:
    """Never destruct a group, not even at the end of the program.

    The destructor of a gloo group joins threads that wait for the other ranks, up to the time limit of the group: with a
    frozen rank, destroy_process_group() and the end of the program would take that long. See docs/decisions/liveness.md.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def use_count(tensor: torch.Tensor) -> int:
    """Return how often C++ holds a tensor, all of Python being one holder."""
    count = getattr(tensor, "_use_count", None)
    return 1 if count is None else int(count())


def forget_coalescing(group: dist.ProcessGroup | None) -> None:
    """End a coalescing block that was left by an exception.

    torch does not: every later collective of the group would be noted for a batch that nobody sends.
    """
    if group is not None:
        dist.distributed_c10d._world.pg_coalesce_state.pop(group, None)


def flight_record(group_name: str) -> str:
    """Return torch's record of the last collectives of a group in one line, or nothing where there is none."""
    try:
        dump: dict[str, Any] = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())  # type: ignore[attr-defined]
        entries = [entry for entry in dump["entries"] if entry["process_group"][0] == group_name]
        lines = [_describe_entry(entry) for entry in entries[-_RECORDER_ENTRIES:]]
    except Exception:
        return ""  # a private format: whatever it is by now, it must not replace the error it is a part of
    return f"Last collectives: {', '.join(lines)}."[:_RECORDER_CHARS] if lines else ""


def _describe_entry(entry: dict[str, Any]) -> str:
    name = entry["profiling_name"].rpartition(":")[2]
    # Gloo's entries stay "scheduled" and are retired when they end.
    state = "ended" if entry["retired"] else entry["state"]
    return f"#{entry['collective_seq_id']} {name} {entry['input_sizes']} {state}"
