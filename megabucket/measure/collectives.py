"""Times collectives on the ranks of a run, through the communicator that the wrapper uses.

Every collective is measured in several rounds, each through all of them in a different order, so that a slow moment of the
machine affects all sizes alike. The time of a collective is that of the slowest rank.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from megabucket.comm import (
    Accelerator,
    AllGather,
    AllReduce,
    AllToAll,
    Batch,
    Broadcast,
    Call,
    Communicator,
    ReduceScatter,
    exchange,
)
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
    """One collective to measure."""

    kind: CollectiveKind
    dtype: str
    num_bytes: int  # of the full buffer; of an all-to-all, those that each rank sends to others


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one collective on the slowest rank, one number for each repetition."""

    cell: Cell
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median over the repetitions."""
        return float(np.median(self.seconds))

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """Lower and upper quartile over the repetitions."""
        lower, upper = np.quantile(self.seconds, (0.25, 0.75))
        return float(lower), float(upper)


def sizes_up_to(max_bytes: int) -> tuple[int, ...]:
    """Return the sizes to measure: 1 KiB and four times as much each time, ending at ``max_bytes`` itself.

    Raises:
        ConfigError: fewer than two sizes, which do not tell latency from bandwidth.

    >>> sizes_up_to(20_000)
    (1024, 4096, 16384, 20000)
    """
    if max_bytes <= SMALLEST_BYTES:
        raise ConfigError(
            f"--max-bytes={max_bytes} leaves one size, and two are needed to tell latency from bandwidth; give more than "
            f"{SMALLEST_BYTES}"
        )
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * _SIZE_FACTOR < max_bytes:
        sizes.append(sizes[-1] * _SIZE_FACTOR)
    return (*sizes, max_bytes)


def cells_of(kinds: Sequence[CollectiveKind], dtypes: Sequence[str], max_bytes: int, num_ranks: int) -> tuple[Cell, ...]:
    """Return every collective to measure once, with sizes rounded to whole elements of equal shards."""
    cells = [
        Cell(kind, dtype, max(round(size / unit), 1) * unit)
        for dtype in dtypes
        for unit in [dtype_bytes(dtype) * num_ranks]
        for kind in kinds
        for size in sizes_up_to(max_bytes)
    ]
    return tuple(dict.fromkeys(cells))


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
        cells: the collectives.
        communicator: of more than one rank.
        device: of the buffers.
        repetitions: rounds; 1 or more.
        in_flight_bytes: 0: each collective is waited for before the next. Otherwise up to eight of a kind are launched before
            the first wait, as many as fit into these bytes and at least one; the time is divided by their number.
        note: called with the next activity.

    Returns:
        The timings in the order of ``cells``, equal on all ranks.

    Raises:
        ConfigError: the buffers do not fit into memory.
    """
    accelerator = Accelerator.of(device)
    sync = accelerator.synchronize if accelerator is not None else lambda: None
    batches = _make_batches(cells, communicator, device, in_flight_bytes)
    own = []
    for each in batches:
        _time_launches(each, _WARMUPS, communicator, sync)
        own.append(_time_launches(each, 1, communicator, sync) * len(each))
    # A chain of small collectives shows their cost with ranks in step; a single one shows how far apart the ranks were.
    sample_s = slowest(own, communicator, device=device)
    counts = [min(max(math.ceil(_SAMPLE_S / max(seconds, 1e-9)), 1), _MAX_CALLS) for seconds in sample_s]
    rounds = []
    meet = meeting(communicator, device=device)
    for number in range(repetitions):
        note(f"timing {len(cells)} collectives, round {number + 1} of {repetitions}")
        for index in random.Random(number).sample(range(len(cells)), len(cells)):  # noqa: S311 - alike on all ranks
            meet()  # no rank starts long before the others
            own[index] = _time_launches(batches[index], counts[index], communicator, sync)
        rounds.append(slowest(own, communicator, device=device))
    return tuple(Timing(cell, seconds) for cell, seconds in zip(cells, zip(*rounds, strict=True), strict=True))


def _make_batches(
    cells: Sequence[Cell], communicator: Communicator, device: torch.device, in_flight_bytes: int
) -> list[list[Batch]]:
    """Return for each collective the batches in flight together: in place, as the wrapper launches them, in one buffer."""
    counts = [min(max(in_flight_bytes // cell.num_bytes, 1), _MAX_IN_FLIGHT) for cell in cells]
    largest_bytes = max(count * cell.num_bytes for cell, count in zip(cells, counts, strict=True))
    try:
        buffer = torch.empty(largest_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise ConfigError(f"{largest_bytes} bytes do not fit into memory: lower --max-bytes ({error})") from None
    buffer.fill_(1).fill_(0)  # memory that was never written is one page and quick to read; a sum of zeros stays zero
    batches = []
    for cell, count in zip(cells, counts, strict=True):
        fulls = buffer[: count * cell.num_bytes].view(getattr(torch, cell.dtype)).view(count, -1)
        if cell.kind is CollectiveKind.ALL_TO_ALL:
            batches.append([communicator.prepare([_all_to_all(full, communicator)]) for full in fulls])
        else:
            batches.append([communicator.prepare([_call(cell.kind, full, communicator)]) for full in fulls])
    return batches


def _all_to_all(sent: torch.Tensor, communicator: Communicator) -> Call:
    """Return an all-to-all of a whole buffer to the other ranks, in parts as equal as can be."""
    others = communicator.size - 1
    numels = [0] + [(sent.numel() + place) // others for place in range(others)]  # by distance between the ranks
    ranks = range(communicator.size)
    return AllToAll(
        torch.zeros_like(sent),
        sent,
        received_numels=tuple(numels[(communicator.rank - source) % communicator.size] for source in ranks),
        sent_numels=tuple(numels[(destination - communicator.rank) % communicator.size] for destination in ranks),
    )


def _call(kind: CollectiveKind, full: torch.Tensor, communicator: Communicator) -> Call:
    shard = full.view(communicator.size, -1)[communicator.rank]
    if kind is CollectiveKind.ALL_REDUCE:
        return AllReduce(full)
    if kind is CollectiveKind.REDUCE_SCATTER:
        return ReduceScatter(shard, full)
    return AllGather(full, shard) if kind is CollectiveKind.ALL_GATHER else Broadcast(full)


def _time_launches(batches: Sequence[Batch], count: int, communicator: Communicator, sync: Callable[[], None]) -> float:
    """Return the mean seconds of one launch, if all batches are launched and then waited for ``count`` times."""
    sync()
    start_s = time.perf_counter()
    for _ in range(count):
        for handle in [communicator.launch(batch, label="calibrate") for batch in batches]:
            handle.wait()
    sync()
    return (time.perf_counter() - start_s) / (count * len(batches))


def meeting(communicator: Communicator, *, device: torch.device) -> Callable[[], None]:
    """Return a call that returns once every rank has made it and all earlier work of the device is done."""
    calls = communicator.prepare([AllReduce(torch.zeros(1, dtype=torch.float32, device=device))])
    accelerator = Accelerator.of(device)

    def meet() -> None:
        communicator.launch(calls, label="meet").wait()
        if accelerator is not None:
            accelerator.synchronize()

    return meet


def slowest(own: Sequence[float], communicator: Communicator, *, device: torch.device) -> list[float]:
    """Return the largest number of all ranks at each position. Collective call."""
    payloads = exchange(communicator, json.dumps(own).encode(), device=device, label="timings")
    return np.max([json.loads(payload) for payload in payloads], axis=0).tolist()  # type: ignore[no-any-return]
