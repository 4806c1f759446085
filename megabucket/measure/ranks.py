"""Which process this is and how it talks to the others: the only part of measuring that knows a launcher exists.

Reads torchrun's variables from a mapping the command line passes in, starts and ends ``torch.distributed``, and exchanges
small facts between ranks. One process without torchrun is a run like any other.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import torch
import torch.distributed as dist

# Its functions have dist.group.WORLD as a default argument, which is evaluated on import. torch.optim imports it when the first
# optimizer is made; imported here, before there is a group, it cannot hold one for ever (joined_ranks says why it must not).
import torch.distributed.nn.functional

from megabucket.errors import ConfigError, log_once
from megabucket.planning.run_config import FabricConfig

T = TypeVar("T")

Note: TypeAlias = Callable[[str], None]
"""Is told what happens next."""

_TIMEOUT: Final = timedelta(minutes=10)


def silent(_: str) -> None:
    """Say nothing: the default ``Note``."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What torchrun told this process."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    num_local_ranks: int = 1
    is_launched: bool = False
    """Whether a launcher started this process; without one there is no rendezvous to join."""
    has_own_device: bool = False
    """Whether the launcher lets this process see one GPU, its own, as SLURM does."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of one run, as each of them sees the others."""

    rank: int
    num_ranks: int
    device: torch.device
    backend: str
    """``gloo``, ``nccl``, ``megabucket_fabric``, or ``none`` for one process on its own."""
    note: Note = silent
    """Says what happens next, on the first rank."""

    def gather(self, value: T) -> list[T]:
        """Return the ``value`` of every rank, in rank order. All ranks must call it."""
        if self.backend == "none":
            return [value]
        values: list[T | None] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Return what torchrun's variables say, or one process when there are none.

    Raises:
        ConfigError: a variable is missing, not a number, or out of range.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return Launch()
    rank, num_ranks = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    local_rank, num_local_ranks = _number(environment, "LOCAL_RANK"), _number(environment, "LOCAL_WORLD_SIZE")
    if not (0 <= rank < num_ranks and 0 <= local_rank < num_local_ranks):
        raise ConfigError(
            f"the launcher's RANK={rank}, WORLD_SIZE={num_ranks}, LOCAL_RANK={local_rank}, "
            f"LOCAL_WORLD_SIZE={num_local_ranks} contradict each other; start with torchrun, or unset them all"
        )
    has_own_device = environment.get("CUDA_VISIBLE_DEVICES", "").count(",") == 0 and "CUDA_VISIBLE_DEVICES" in environment
    return Launch(rank, num_ranks, local_rank, num_local_ranks, is_launched=True, has_own_device=has_own_device)


def device_index(launch: Launch, num_devices: int) -> int | None:
    """Return on which of the GPUs that it sees a process works; ``None``: on the CPU.

    >>> device_index(Launch(local_rank=1, num_local_ranks=2), 4), device_index(Launch(local_rank=1, num_local_ranks=2), 1)
    (1, None)
    >>> device_index(Launch(local_rank=1, num_local_ranks=2, has_own_device=True), 1)
    0
    """
    if num_devices >= launch.num_local_ranks:
        return launch.local_rank
    if num_devices == 1 and launch.has_own_device:
        return 0
    if num_devices:
        log_once(
            f"this host runs {launch.num_local_ranks} processes and shows {num_devices} GPUs to this one, so all work on CPUs; "
            "start as many processes as there are GPUs, or show each its own with CUDA_VISIBLE_DEVICES"
        )
    return None


@contextmanager
def joined_ranks(launch: Launch, fabric: FabricConfig | None = None, *, note: Note = silent) -> Iterator[Ranks]:
    """Join the other processes for the time of the context: NCCL when this host has a GPU for each, else gloo on CPU.

    The process group is destroyed at the end, also after an error.

    Args:
        fabric: an emulated link to use instead, on CPU.
        note: called on the first rank alone.

    Raises:
        ConfigError: the ranks are not all on one machine, and a fabric is asked for.
    """
    index = device_index(launch, torch.cuda.device_count()) if fabric is None and torch.cuda.is_available() else None
    device = torch.device("cpu") if index is None else torch.device("cuda", index)
    if index is not None:
        torch.cuda.set_device(device)
    if not launch.is_launched:
        yield Ranks(rank=0, num_ranks=1, device=device, backend="none", note=note)
        return
    backend = _start_group(fabric, device)
    try:
        yield Ranks(launch.rank, launch.num_ranks, device, backend, note if launch.rank == 0 else silent)
    finally:
        # The group's threads live as long as anything holds it, and wrappers are full of reference cycles. A thread that still
        # releases the tensors of the last collective while the interpreter shuts down would abort the process.
        gc.collect()
        dist.destroy_process_group()


def _start_group(fabric: FabricConfig | None, device: torch.device) -> str:
    """Initialize the default process group and return the name of its back-end."""
    if fabric is None:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=_TIMEOUT, device_id=device if device.type == "cuda" else None)
        return backend
    from megabucket.testing.fabric import EmulatedFabric  # POSIX only

    emulated = EmulatedFabric(fabric.latency_s, fabric.bytes_per_s, moves_data=fabric.moves_data)
    emulated.init_process_group(timeout=_TIMEOUT)
    return emulated.register()


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None or not text.isdecimal():
        given = "is not set" if text is None else f"is {text!r}"
        raise ConfigError(f"the launcher's variable {name} {given}, but must be a number; start with torchrun")
    return int(text)


def check_writable(ranks: Ranks, paths: Sequence[Path]) -> None:
    """Look whether the first rank can write files, before minutes of measuring. All ranks must call it.

    Raises:
        ConfigError: on every rank, if a file cannot be written.
    """
    found = ranks.gather("".join(_why_not_writable(path) for path in paths) if ranks.rank == 0 else "")[0]
    if found:
        raise ConfigError(found)


def _why_not_writable(path: Path) -> str:
    reason = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            reason = "it is a directory"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            reason = "permission denied"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    return f"--out {path}: cannot be written: {reason}" if reason else ""
