"""What collectives cost on the ranks that run: timed through the communicator that the wrapper uses.

Every collective is measured several times, in rounds that go through all of them in an order of their own, so that a slow
moment of the machine hits all sizes alike. What counts is the slowest rank.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

import torch

from megabucket.comm import Accelerator, AllGather, AllReduce, Batch, Broadcast, Call, Communicator, ReduceScatter, exchange
from megabucket.errors import ConfigError
from megabucket.measure.ranks import Note, silent
from megabucket.trace import CollectiveKind
from megabucket.units import dtype_bytes

SMALLEST_BYTES: Final = 1024
_SIZE_FACTOR: Final = 4
_SAMPLE_S: Final = 5e-3
_MAX_CALLS: Final = 50
_MAX_IN_FLIGHT: Final = 8
_WARMUPS: Final = 2


@dataclass(frozen=True, slots=True)
class Cell:
    """One collective that is measured."""

    kind: CollectiveKind
    dtype: str
    num_bytes: int  # of the full buffer


@dataclass(frozen=True, slots=True)
class Timing:
    """The seconds of one collective on the slowest rank, one number for each repetition."""

    cell: Cell
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median over the repetitions."""
        return statistics.median(self.seconds)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """Lower and upper quartile over the repetitions."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        lower, _, upper = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return lower, upper

    def to_dict(self) -> dict[str, Any]:
        """Return size and times as plain data."""
        times = {"median_s": self.median_s, "quartiles_s": self.quartiles_s, "seconds": self.seconds}
        return {"bytes": self.cell.num_bytes, **times}


def sizes_up_to(max_bytes: int) -> tuple[int, ...]:
    """Return the sizes that are measured: 1 KiB and four times as much each time, ending at ``max_bytes`` itself.

    Raises:
        ConfigError: fewer than two sizes, from which no bandwidth can be told.

    >>> sizes_up_to(20_000)
    (1024, 4096, 16384, 20000)
    """
    if max_bytes <= SMALLEST_BYTES:
        raise ConfigError(
            f"--max-bytes={max_bytes} leaves one size, and two are needed to tell latency from bandwidth; give more than "
            f"{SMALLEST_BYTES}"
        )
    count = math.ceil(math.log(max_bytes / SMALLEST_BYTES, _SIZE_FACTOR))
    sizes = [SMALLEST_BYTES * _SIZE_FACTOR**power for power in range(count)]
    return (*[size for size in sizes if size < max_bytes], max_bytes)


def cells_of(kinds: Sequence[CollectiveKind], dtypes: Sequence[str], max_bytes: int, num_ranks: int) -> tuple[Cell, ...]:
    """Return every collective to measure; sizes are rounded to whole elements of equal shards, and each comes once."""
    cells = []
    for dtype in dtypes:
        unit = dtype_bytes(dtype) * num_ranks
        for kind in kinds:
            sizes = dict.fromkeys(max(round(size / unit), 1) * unit for size in sizes_up_to(max_bytes))
            cells += [Cell(kind, dtype, size) for size in sizes]
    return tuple(cells)


def time_collectives(
    cells: Sequence[Cell],
    communicator: Communicator,
    *,
    device: torch.device,
    repetitions: int,
    in_flight_bytes: int = 0,
    note: Note = silent,
) -> tuple[Timing, ...]:
    """Measure collectives. All ranks call it with the same arguments.

    Args:
        cells: what to measure.
        communicator: of more than one rank.
        device: where the buffers lie.
        repetitions: rounds; 1 or more.
        in_flight_bytes: with 0 each collective is waited for before the next. Otherwise up to eight of a kind are launched
            before the first wait, as many as these bytes hold and one at least; a collective takes its part of the whole.
        note: called with what happens next.

    Returns:
        The timings in the order of ``cells``, equal on all ranks.

    Raises:
        ConfigError: the buffers do not fit into memory.
    """
    calls = _make_calls(cells, communicator, device, in_flight_bytes)
    accelerator = Accelerator.of(device)
    sync = accelerator.synchronize if accelerator is not None else lambda: None
    counts = _count_calls(calls, communicator, device, sync)
    own: list[list[float]] = [[] for _ in cells]
    meet = meeting(communicator, device=device)
    for number in range(repetitions):
        note(f"timing {len(cells)} collectives, round {number + 1} of {repetitions}")
        for index in random.Random(number).sample(range(len(cells)), len(cells)):  # noqa: S311 - alike on all ranks
            meet()  # nobody starts long before the others
            own[index].append(_time_calls(calls[index], counts[index], communicator, sync))
    all_s = iter(slowest(list(chain.from_iterable(own)), communicator, device=device))
    return tuple(Timing(cell, tuple(islice(all_s, repetitions))) for cell in cells)


def _make_calls(
    cells: Sequence[Cell], communicator: Communicator, device: torch.device, in_flight_bytes: int
) -> list[list[Batch]]:
    """Return each collective as the wrapper launches it, in place, as often as it is in flight; in one buffer of each dtype."""
    counts = [min(max(in_flight_bytes // cell.num_bytes, 1), _MAX_IN_FLIGHT) for cell in cells]
    largest: dict[str, int] = {}
    for cell, count in zip(cells, counts, strict=True):
        largest[cell.dtype] = max(largest.get(cell.dtype, 0), count * cell.num_bytes)
    buffers = {}
    try:
        for dtype, num_bytes in largest.items():
            buffers[dtype] = torch.empty(num_bytes // dtype_bytes(dtype), dtype=getattr(torch, dtype), device=device)
    except RuntimeError as error:
        raise ConfigError(f"the buffers ({largest}) do not fit into memory: lower --max-bytes ({error})") from None
    for buffer in buffers.values():
        buffer.fill_(1).fill_(0)  # written, because memory that never was is one page, and quick to read; zeros stay zeros
    calls = []
    for cell, count in zip(cells, counts, strict=True):
        numel = cell.num_bytes // dtype_bytes(cell.dtype)
        fulls = buffers[cell.dtype][: count * numel].view(count, numel)
        calls.append([communicator.prepare([_call(cell.kind, full, communicator)]) for full in fulls])
    return calls


def _call(kind: CollectiveKind, full: torch.Tensor, communicator: Communicator) -> Call:
    shard = full.view(communicator.size, -1)[communicator.rank]
    if kind is CollectiveKind.ALL_REDUCE:
        return AllReduce(full)
    if kind is CollectiveKind.REDUCE_SCATTER:
        return ReduceScatter(shard, full)
    return AllGather(full, shard) if kind is CollectiveKind.ALL_GATHER else Broadcast(full)


def _count_calls(
    calls: Sequence[Sequence[Sequence[Call]]], communicator: Communicator, device: torch.device, sync: Callable[[], None]
) -> list[int]:
    """Return how often each collective is called in one measurement, so that it takes a few milliseconds.

    A chain of small ones shows what each costs when the ranks are in step, where a single one shows how far they were apart.
    """
    own = []
    for batches in calls:
        _time_calls(batches, _WARMUPS, communicator, sync)
        own.append(_time_calls(batches, 1, communicator, sync) * len(batches))
    slowest_s = slowest(own, communicator, device=device)
    return [min(max(math.ceil(_SAMPLE_S / max(seconds, 1e-9)), 1), _MAX_CALLS) for seconds in slowest_s]


def _time_calls(batches: Sequence[Sequence[Call]], count: int, communicator: Communicator, sync: Callable[[], None]) -> float:
    """Return the mean seconds of one launch, when ``count`` times all of them are launched and then waited for."""
    sync()
    start_s = time.perf_counter()
    for _ in range(count):
        for handle in [communicator.launch(batch, label="calibrate") for batch in batches]:
            handle.wait()
    sync()
    return (time.perf_counter() - start_s) / (count * len(batches))


def meeting(communicator: Communicator, *, device: torch.device) -> Callable[[], None]:
    """Return a call that returns when every rank has made it and everything launched before is through."""
    calls = communicator.prepare([AllReduce(torch.zeros(1, device=device))])
    accelerator = Accelerator.of(device)

    def meet() -> None:
        communicator.launch(calls, label="meet").wait()
        if accelerator is not None:
            accelerator.synchronize()

    return meet


def slowest(own: Sequence[float], communicator: Communicator, *, device: torch.device) -> list[float]:
    """Return the largest of all ranks' numbers, place by place. Collective call."""
    payloads = exchange(communicator, json.dumps(own).encode(), device=device, label="timings")
    return [max(column) for column in zip(*map(json.loads, payloads), strict=True)]
