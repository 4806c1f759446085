"""The first nine questions, and the bench that all use. Each looks at this rank's results and returns a ``Fact``.

In sums each rank adds a number to elements of its own and zero to all others, so a wrong sum says which rank is missing::

    element           0     1     2     3     4     5   ...
    rank 0 adds       5     0     0     5     0     0
    rank 1 adds       0     5     0     0     5     0
    rank 2 adds       0     0     5     0     0     5
    sum               5     5     5     5     5     5
    without rank 1    5     0     5     5     0     5
"""

from __future__ import annotations

import hashlib
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from megabucket._version import __version__
from megabucket.comm import (
    Accelerator,
    AllGather,
    AllReduce,
    Broadcast,
    Call,
    Communicator,
    HostMap,
    Place,
    ReduceOp,
    ReduceScatter,
)
from megabucket.comm.samehost import LEAST_BYTES, SameHostCommunicator
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.doctor.report import Fact, Status
from megabucket.errors import rank_list
from megabucket.optim.kernels import about_apex

OWN: Final = 5
"""A rank's addend to its own elements. Small and whole, and a mean of it is not exact for most numbers of ranks."""
_TOLERANCE: Final = 0.1
"""In counts of a rank: more than a mean in 16 bits is rounded by."""
_LARGE: Final = 2**62
_NUMELS: Final = (1, 7, 1_000, 65_537)


@dataclass(frozen=True, slots=True)
class Bench:
    """The communicator, device and config that the questions use."""

    communicator: Communicator
    device: torch.device
    config: DistributedDataParallelConfig
    group: dist.ProcessGroup | None = None
    """The process group behind the communicator, if there is one."""
    places: tuple[Place, ...] = ()
    """Of all ranks."""

    @property
    def hosts(self) -> HostMap:
        """The hosts of all ranks."""
        return HostMap.of(self.places)

    @property
    def rank(self) -> int:
        """The place of this rank among the ranks that are asked."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.communicator.size

    @property
    def grad_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes that gradients may be reduced in: 16 bits only if the config says so."""
        narrow = () if self.config.grad_reduce_in_fp32 else (torch.bfloat16, torch.float16)
        return (torch.float32, *narrow)

    def launch(self, *calls: Call) -> None:
        """Launch a batch and return when its results may be read."""
        self.communicator.launch(self.communicator.prepare(calls), label="doctor").wait()

    def shard(self, full: torch.Tensor) -> torch.Tensor:
        """Return the view of this rank's part."""
        return full.view(self.size, -1)[self.rank]

    def contribution(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's addend of a sum that tells which ranks are in it."""
        return contribution(self.rank, self.size, numel).to(self.device, dtype)

    def random_sum(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the all-reduced sum of random numbers, the same in every run, and the float32 inputs of all ranks."""
        generators = [torch.Generator().manual_seed(1_000_003 * rank + numel) for rank in range(self.size)]
        inputs = torch.stack([torch.randn(numel, generator=one, dtype=torch.float32, device="cpu") for one in generators])
        total = inputs[self.rank].to(self.device, dtype, copy=True)
        self.launch(AllReduce(total))
        return total.cpu(), inputs


def contribution(rank: int, size: int, numel: int) -> torch.Tensor:
    """Return the addend of ``rank`` to a sum of ``numel`` elements, in float64.

    >>> contribution(1, 3, 6).tolist()
    [0.0, 5.0, 0.0, 0.0, 5.0, 0.0]
    """
    return OWN * (torch.arange(numel, dtype=torch.int64, device="cpu") % size == rank).double()


def read_sum(sums: torch.Tensor, size: int, *, times: int = 1) -> tuple[str, tuple[int, ...]]:
    """Return what is wrong with sums of contributions, empty if they are exact, and the ranks at fault if that can be told.

    Args:
        sums: 1D.
        times: how often every rank should be counted.

    >>> read_sum(contribution(1, 2, 6), size=2)
    ('rank 0 is missing', (0,))
    """
    counts = sums.double().cpu() / OWN  # how often the rank is counted that an element belongs to
    if bool((counts == times).all()):
        return "", ()
    if not counts.isfinite().all():
        return "values are not finite", ()
    wrong = (counts - times).abs() > _TOLERANCE
    if not wrong.any():
        return "sums of whole numbers are rounded", ()
    if len(counts) >= size > 1 and bool((counts - counts[0]).abs().max() < 1e-3):
        return f"every value is {counts[0].item() / times:.3g} times the right one", ()
    is_whole = ((counts - counts.round()).abs() <= _TOLERANCE) & (counts.round() >= 0) & (counts <= 4 * times)
    for index in (wrong & ~is_whole).nonzero().flatten().tolist():
        text = f"element {index} is {OWN * counts[index].item():g} instead of {OWN * times}"
        return f"not a sum of ranks: {text}", ()
    owners = (torch.arange(len(counts), dtype=torch.int64, device="cpu") % size)[wrong].tolist()
    count_of = dict(sorted(zip(owners, counts[wrong].round().int().tolist(), strict=True)))
    texts = []
    for count in dict.fromkeys(count_of.values()):
        ranks = [rank for rank in count_of if count_of[rank] == count]
        how = "missing" if count == 0 else f"counted {count}x instead of {times}x"
        texts.append(f"{rank_list(ranks)} {'is' if len(ranks) == 1 else 'are'} {how}")
    return "; ".join(texts), tuple(count_of)


def versions(bench: Bench) -> Fact:
    """Compare versions as wrapping does: megabucket, torch and Python's minor version must be equal."""
    accelerator = Accelerator.of(bench.device)
    device = f"{bench.device.type} ({platform.machine()})" if accelerator is None else accelerator.name
    python, apex = platform.python_version(), about_apex(bench.device)
    libraries = f"megabucket {__version__}, torch {torch.__version__}, Python"
    alike = ", ".join(filter(None, (device, f"{libraries} {python}", apex)))
    answer = alike if bench.hosts.is_several else f"{socket.gethostname()}: {alike}"  # else the line names the hosts
    return Fact(answer, same=f"{libraries} {python.rpartition('.')[0]}", alike=alike)


def config(bench: Bench) -> Fact:
    """Compare fingerprints of the ``ddp`` section."""
    digest = hashlib.sha256(bench.config.model_dump_json().encode()).hexdigest()[:12]
    return Fact(digest, same=digest)


def _checked(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Fact:
    """Compare bits. All collectives of a question are over by then: no rank may leave early."""
    wrong = [
        f"{a.dtype}" for a, b in zip(got, expected, strict=True) if not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    ]
    return Fact(f"wrong result for {', '.join(wrong)}", Status.FINDING) if wrong else Fact("yes")


def all_gather(bench: Bench) -> Fact:
    """Check that all parts reach every rank."""
    got, expected = [], []
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        full = (torch.arange(bench.size * 60, dtype=torch.int64, device=bench.device) % 251).to(dtype)
        gathered = torch.zeros_like(full)
        bench.shard(gathered).copy_(bench.shard(full))
        bench.launch(AllGather(gathered, bench.shard(gathered)))
        got.append(gathered)
        expected.append(full)
    return _checked(got, expected)


def maximum(bench: Bench) -> Fact:
    """Check the maximum of large and negative integers."""
    last = bench.size - 1
    values = [bench.rank, -bench.rank, _LARGE + bench.rank, bench.rank - _LARGE, int(bench.rank == last)]
    tensor = torch.tensor(values, dtype=torch.int64, device=bench.device)
    bench.launch(AllReduce(tensor, ReduceOp.MAX))
    return _checked([tensor.cpu()], [torch.tensor([last, 0, _LARGE + last, last - _LARGE, 1], dtype=torch.int64, device="cpu")])


def broadcast(bench: Bench) -> Fact:
    """Check that bits arrive untouched."""
    # NaN payloads and -0.0 survive only where bytes are copied and nothing is computed.
    bits = torch.tensor([0x7FC0_0001, -(2**31), 0x0000_0001, 0x3F80_0000], dtype=torch.int32, device=bench.device)
    expected = [bits.view(torch.float32), bits.to(torch.int16), bits > 1]
    received = [tensor.clone() if bench.rank == 0 else torch.zeros_like(tensor) for tensor in expected]
    for tensor in received:
        bench.launch(Broadcast(tensor))
    return _checked(received, expected)


def all_reduce(bench: Bench) -> Fact:
    """Check that every rank is in the sum exactly once, in small and large tensors, alone and in a batch."""
    sums = []
    for dtype in bench.grad_dtypes:
        numels = (2 * bench.size, 2 * bench.size + 1, LEAST_BYTES // 4)  # from the last size on ranks of one host may copy
        small, odd, large = (bench.contribution(numel, dtype) for numel in numels)
        bench.launch(AllReduce(small), AllReduce(odd))
        bench.launch(AllReduce(large))
        sums += [small, odd, large]
    reads = isinstance(bench.communicator, SameHostCommunicator)
    return _exact(bench, sums, "exact; ranks of one host read each other's memory" if reads else "exact")


def reduce_scatter(bench: Bench) -> Fact:
    """Check that each rank gets the sum of its shard, into its own part of the input."""
    shards = []
    for dtype in bench.grad_dtypes:
        full = bench.contribution(2 * bench.size * bench.size, dtype)
        shards.append(bench.shard(full))
        bench.launch(ReduceScatter(shards[-1], full))
    return _exact(bench, shards, "exact")


def _exact(bench: Bench, sums: Sequence[torch.Tensor], answer: str) -> Fact:
    for tensor in sums:
        problem, ranks = read_sum(tensor, bench.size)
        if problem:
            return Fact(f"{tensor.dtype}: {problem}", Status.FINDING, ranks)
    return Fact(answer)


def same_bits(bench: Bench) -> Fact:
    """Compare digests of sums of random numbers."""
    digests = []
    for dtype in (torch.float32, torch.bfloat16):
        sums = torch.cat([bench.random_sum(numel, dtype)[0] for numel in _NUMELS])
        digest = hashlib.sha256(sums.view(torch.uint8).numpy().tobytes()).hexdigest()
        digests.append(f"{dtype} {digest[:12]}".removeprefix("torch."))
    return Fact(", ".join(digests), same=", ".join(digests))


def precision(bench: Bench) -> Fact:
    """Check that the error of a float32 sum is one that float32 additions can have."""
    total, inputs = bench.random_sum(_NUMELS[-1], torch.float32)
    exact = inputs.double()
    error = (total.double() - exact.sum(dim=0)).abs()
    # |s' - s| <= g * sum |x|, g = (n - 1) u / (1 - (n - 1) u): no order of float32 additions is worse.
    units = max(bench.size - 1, 1) * torch.finfo(torch.float32).eps / 2
    bound = units / (1 - units) * exact.abs().sum(dim=0)
    worst = (error / bound).max().item()
    # The reference in float64 has an error of its own, some 1e-9 of the bound.
    if worst <= 1 + 1e-6:
        return Fact("no error is larger than float32 rounding explains")
    return Fact(f"the largest error is {worst:.3g} times the most that float32 rounding can cause", Status.FINDING)
