"""The processes of one run: joins them, and exchanges small facts between them.

Reads torchrun's variables from a mapping that the command line passes in. A process without torchrun is a run of one.
"""

from __future__ import annotations

import gc
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import torch
import torch.distributed as dist

# Default arguments of its functions hold dist.group.WORLD as it is on import, and torch.optim imports it with the first
# optimizer. Imported here, before there is a group, it cannot keep one alive (joined_ranks says why nothing may).
import torch.distributed.nn.functional

from megabucket._version import __version__
from megabucket.comm import Accelerator, HostMap, Place
from megabucket.comm.hosts import LOOPBACK_ADVICE, find_place, loopback_problem
from megabucket.errors import ConfigError, log_once
from megabucket.planning.run_config import FabricConfig

T = TypeVar("T")

Note: TypeAlias = Callable[[str], None]
"""Called with the next activity, for the user to see."""

_TIMEOUT: Final = timedelta(minutes=10)

CheckPlaces: TypeAlias = Callable[[int, Sequence[Place]], None]
"""Called with this rank and the places of all before they connect; an error ends the run on every rank."""


def refuse_loopback(_: int, places: Sequence[Place]) -> None:
    """Refuse addresses that other hosts cannot reach: gloo would try to connect, then fail without their names.

    Raises:
        ConfigError: ranks are on several hosts, and gloo makes some of them reachable on loopback only.
    """
    problem, _ranks = loopback_problem(places)
    if problem:
        raise ConfigError(f"{problem}; {LOOPBACK_ADVICE}")


def silent(_: str) -> None:
    """Do nothing: the default ``Note``."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of one run, as one of them sees the others; by default this process alone."""

    rank: int = 0
    num_ranks: int = 1
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    backend: str = "none"
    """``gloo``, ``nccl``, ``megabucket_fabric``, or ``none`` for one process alone."""
    note: Note = silent
    """Tells the user the next activity, on the first rank."""
    places: tuple[Place, ...] = ()
    """Of all ranks; empty: all of them share one host."""

    @property
    def hosts(self) -> HostMap:
        """The hosts of all ranks."""
        return HostMap.of(self.places)

    def gather(self, value: T) -> list[T]:
        """Return the ``value`` of every rank, in rank order. All ranks must call it."""
        if self.backend == "none":
            return [value]
        values: list[T | None] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]


@contextmanager
def joined_ranks(
    environment: Mapping[str, str],
    fabric: FabricConfig | None = None,
    *,
    note: Note = silent,
    check_places: CheckPlaces = refuse_loopback,
) -> Iterator[Ranks]:
    """Join the other processes inside the context: over NCCL if this host has a GPU for each, else over gloo on CPU.

    The process group is destroyed at the end, also after an error.

    Args:
        environment: has torchrun's variables; without them this process is alone.
        fabric: an emulated link to use instead, on CPU.
        note: called on the first rank only.
        check_places: called before the ranks connect, while only their store is there.

    Raises:
        ConfigError: a variable is missing, not a number or out of range, or the ranks are not all on one machine and a fabric
            is given, or other hosts cannot reach the address of a rank.
    """
    is_launched = "RANK" in environment or "WORLD_SIZE" in environment
    rank, num_ranks, local_rank, num_local_ranks = (
        (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        if is_launched
        else (0, 1, 0, 1)
    )
    for name, number, count in (("RANK", rank, num_ranks), ("LOCAL_RANK", local_rank, num_local_ranks)):
        if number >= count:
            size = name.replace("RANK", "WORLD_SIZE")
            raise ConfigError(
                f"the launcher's variables {name}={number} and {size}={count} disagree: ranks count from 0; start with torchrun"
            )
    device = torch.device("cpu")
    if fabric is None and torch.cuda.is_available():
        device = _choose_device(environment, local_rank, num_local_ranks)
    if not is_launched:
        yield Ranks(device=device, note=note)
        return
    places: tuple[Place, ...] = ()
    if fabric is None:
        backend = "nccl" if device.type == "cuda" else "gloo"
        store, _, _ = next(dist.rendezvous("env://", rank, num_ranks, timeout=_TIMEOUT))
        store.set_timeout(_TIMEOUT)
        places = _exchange_places(store, rank, num_ranks, find_place(environment, uses_gloo=backend == "gloo"), check_places)
        device_id = device if device.type == "cuda" else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT, device_id=device_id)
        del store  # the group holds it
    else:
        backend = _start_fabric(fabric)
    try:
        yield Ranks(rank, num_ranks, device, backend, note if rank == 0 else silent, places)
    finally:
        # The group's threads live as long as anything refers to it, and wrappers have reference cycles. A thread that releases
        # the tensors of the last collective while the interpreter shuts down would abort the process.
        gc.collect()
        dist.destroy_process_group()


def _choose_device(environment: Mapping[str, str], local_rank: int, num_local_ranks: int) -> torch.device:
    # SLURM shows each process one GPU, its own.
    has_own = "," not in environment.get("CUDA_VISIBLE_DEVICES", ",")
    index = device_index(local_rank, num_local_ranks, torch.cuda.device_count(), has_own_device=has_own)
    if index is None:
        return torch.device("cpu")
    torch.cuda.set_device(device := torch.device("cuda", index))
    return device


def device_index(local_rank: int, num_local_ranks: int, num_devices: int, *, has_own_device: bool) -> int | None:
    """Return the index of this process's GPU among those it sees; ``None``: the CPU.

    >>> device_index(1, 2, 4, has_own_device=False), device_index(1, 2, 1, has_own_device=True)
    (1, 0)
    """
    if num_devices >= num_local_ranks:
        return local_rank
    if num_devices == 1 and has_own_device:
        return 0
    if num_devices:
        log_once(
            f"this host runs {num_local_ranks} processes and shows {num_devices} GPUs to this one, so all work on CPUs; start "
            "as many processes as there are GPUs, or show each its own with CUDA_VISIBLE_DEVICES"
        )
    return None


def _exchange_places(store: dist.Store, rank: int, num_ranks: int, place: Place, check: CheckPlaces) -> tuple[Place, ...]:
    """Return the places of all ranks after all of them have checked these."""
    keys = [f"megabucket/place/{index}" for index in range(num_ranks)]
    store.set(keys[rank], json.dumps(place))
    places = tuple(Place(*json.loads(store.get(key))) for key in keys)
    try:
        check(rank, places)
    finally:
        # A launcher ends all ranks once one has failed, so none leaves before the first one has printed.
        store.set(f"megabucket/checked/{rank}", "")
        store.wait([f"megabucket/checked/{index}" for index in range(num_ranks)])
    return places


def _start_fabric(fabric: FabricConfig) -> str:
    """Initialize the default process group on an emulated link and return the name of its back-end."""
    from megabucket.testing.fabric import EmulatedFabric  # POSIX only

    emulated = EmulatedFabric(fabric.latency_s, fabric.bytes_per_s, moves_data=fabric.moves_data)
    emulated.init_process_group(timeout=_TIMEOUT)
    return emulated.register()


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        given = f"is {text!r}" if text else "is not set"
        raise ConfigError(f"the launcher's variable {name} {given}, but must be a number; start with torchrun")
    return int(text)


def check_writable(ranks: Ranks, paths: Sequence[Path]) -> None:
    """Check that the first rank can write files, before minutes of measuring. All ranks must call it.

    Raises:
        ConfigError: on every rank, if a file cannot be written.
    """
    problems = [_why_not_writable(path) for path in paths] if ranks.rank == 0 else []
    if found := list(filter(None, ranks.gather(problems)[0])):
        raise ConfigError("\n".join(found))


def _why_not_writable(path: Path) -> str | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_there = path.exists()
        path.open("ab").close()
        if not is_there:
            path.unlink()
    except OSError as error:
        return f"--out {path}: cannot be written: {error.strerror}"
    return None


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Return the versions and the name of a device, for the files that measurements write."""
    accelerator = Accelerator.of(device)
    return {
        "megabucket": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": platform.machine() if accelerator is None else accelerator.name,
    }
