"""Questions about the collectives the library launches, through its own port, and about how they round.

Each rank adds something of its own to each sum, so a wrong one is not only found but read::

    element           0     1     2     3     4     5   ...
    rank 0 adds       3     1     1     3     1     1
    rank 1 adds       1     3     1     1     3     1
    rank 2 adds       1     1     3     1     1     3
    sum               5     5     5     5     5     5
    without rank 1    4     2     4     4     2     4       1 less everywhere, and another 2 at its own elements

Larger groups are cut into blocks, and a rank adds nothing to the elements of other blocks: whole numbers stay exact in 16 bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Final, NamedTuple

import torch

from megabucket.comm import AllGather, AllReduce, Broadcast, ReduceOp, ReduceScatter, with_same_host_copies
from megabucket.comm.samehost import LEAST_BYTES
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.doctor.question import NO_PEERS, Answer, Asking, Bench, Question, by_rank, check, merge, odd_ones_out
from megabucket.doctor.report import Verdict
from megabucket.errors import rank_list
from megabucket.units import MIB

_BLOCK: Final = 16
"""Ranks that add to the same elements."""
_EXTRA: Final = 2
"""What a rank adds to its own elements above the 1 of all others. With 1, the sum of rounded 1/n would often be exact."""
_TOLERANCE: Final = 0.25
"""Of whole numbers that were divided by the number of ranks: less than half of what one rank makes."""
_OFTEN: Final = MappingProxyType({1: "once", 2: "twice"})
_NUMEL: Final = 60
"""Elements of a rank's part; more where there are many ranks."""
_LARGE: Final = 2**62
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_NUMELS: Final = (1, 7, 1_000, 65_537)
_PART: Final = 1_024
"""Elements of each rank's part in sums of random numbers."""


class Problem(NamedTuple):
    """What a wrong sum says."""

    text: str
    ranks: tuple[int, ...] = ()
    """Those that are missing or counted too often, where that can be told."""


def contribution(rank: int, size: int, start: int, stop: int) -> torch.Tensor:
    """Return what ``rank`` adds to the elements ``[start, stop)``, in float64.

    >>> contribution(1, 3, 0, 6).tolist(), whole_sum(3, 0, 6).tolist()
    ([1.0, 3.0, 1.0, 1.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0, 5.0, 5.0])
    """
    target = torch.arange(start, stop) % size
    return (target // _BLOCK == rank // _BLOCK).double() + _EXTRA * (target == rank)


def whole_sum(size: int, start: int, stop: int, *, times: int = 1) -> torch.Tensor:
    """Return the sum over all ranks of the elements ``[start, stop)``, every rank counted ``times`` times."""
    first_in_block = torch.arange(start, stop) % size // _BLOCK * _BLOCK
    return times * ((size - first_in_block).clamp(max=_BLOCK) + _EXTRA).double()


def read_sum(sums: torch.Tensor, size: int, *, start: int = 0, times: int = 1) -> Problem | None:
    """Return what is wrong with sums, or ``None`` when they are exact.

    Args:
        sums: 1D, of the elements ``[start, start + len(sums))``.
        times: how often every rank should be counted.

    >>> read_sum(contribution(1, 2, 0, 6), size=2)
    Problem(text='rank 0 is missing', ranks=(0,))
    """
    sums = sums.double().cpu()
    right = whole_sum(size, start, start + len(sums), times=times)
    off = sums - right
    if not off.any():
        return None
    if not sums.isfinite().all():
        return Problem("values are not finite")
    wrong = off.abs() > _TOLERANCE
    if not wrong.any():
        return Problem("sums of whole numbers are rounded")
    factors = sums / right
    if len(sums) >= min(size, 2 * _BLOCK) and bool((factors - factors[0]).abs().max() < 1e-4):
        return Problem(_describe_factor(round(factors[0].item(), 4)))
    counts = _count(off, size, start, times)
    if counts:
        return Problem(_describe_counts(counts, times), tuple(sorted(counts)))
    first = int(wrong.nonzero()[0])
    return Problem(f"not a sum of ranks: element {start + first} is {sums[first]:g} instead of {right[first]:g}")


def _count(off: torch.Tensor, size: int, start: int, times: int) -> dict[int, int]:
    """Return how often ranks are counted that are not counted ``times`` times; empty when nothing explains the sums.

    A rank that is counted k times too often makes the elements of its block wrong by k, and its own by ``_EXTRA * k`` more.
    """
    target = torch.arange(start, start + len(off)) % size
    wrong_by = dict.fromkeys(target.tolist(), 0.0)  # per rank: by how much its own elements are wrong
    for index in (off.abs() > _TOLERANCE).nonzero().flatten().flip(0).tolist():
        wrong_by[int(target[index])] = off[index].item()  # in the end that of the first wrong element
    counts: dict[int, int] = {}
    for first in range(0, size, _BLOCK):
        block = {rank: wrong_by[rank] for rank in range(first, min(first + _BLOCK, size)) if rank in wrong_by}
        if not any(block.values()):
            continue
        common = sum(block.values()) / (len(block) + _EXTRA)  # the k of all ranks together
        extra = {rank: (value - common) / _EXTRA for rank, value in block.items()}
        is_whole = all(abs(value - round(value)) <= _TOLERANCE / _EXTRA for value in extra.values())
        is_complete = len(block) == min(_BLOCK, size - first)
        if not (is_complete and is_whole and all(-times <= round(value) <= 4 for value in extra.values())):
            return {}
        counts |= {rank: times + round(value) for rank, value in extra.items() if round(value)}
    return counts


def _describe_factor(factor: float) -> str:
    if factor == 0:
        return "every rank is missing: all values are 0"
    if factor > 1 and factor.is_integer():
        return f"every value is {factor:g} times the right one: not divided, or every rank counted as often"
    if 0 < factor < 1 and round(1 / factor, 2).is_integer():
        return f"every value is 1/{round(1 / factor):g} of the right one: divided once too often"
    return f"every value is {factor:g} times the right one"


def _describe_counts(counts: dict[int, int], times: int) -> str:
    texts = []
    for count in dict.fromkeys(counts.values()):
        ranks = [rank for rank in counts if counts[rank] == count]
        instead = "" if times == 1 else f" instead of {_OFTEN.get(times, f'{times} times')}"
        often = "missing" if count == 0 else f"counted {_OFTEN.get(count, f'{count} times')}{instead}"
        texts.append(f"{rank_list(ranks)} {'is' if len(ranks) == 1 else 'are'} {often}")
    return "; ".join(texts)


def collective_questions(config: DistributedDataParallelConfig) -> Iterator[Question]:
    """Return the questions about collectives in the order in which they are asked; the config says what a refusal means."""
    ask = partial(Question, "collectives")
    scatters, averages = "mode=reduce_scatter is not possible", config.average_in_collective
    # 16-bit gradients are reduced only where the config says so, and nothing else needs them.
    unused = {dtype: config.grad_reduce_in_fp32 and dtype.itemsize == 2 for dtype in (*_DTYPES, torch.float64)}
    suffix = {dtype: "; the config reduces none" if is_unused else "" for dtype, is_unused in unused.items()}
    fenceless = "" if config.fence else "; the config has switched the fence off"
    yield ask("all-gather, also in place", all_gather, f"{scatters}, and ranks cannot exchange reports")
    yield ask("all-reduce MAX, int64", maximum, f"ranks cannot agree on a step{fenceless}", config.fence)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        refusal = f"gradients in {name_of(dtype)} cannot be reduced{suffix[dtype]}"
        yield ask(f"all-reduce SUM, {name_of(dtype)}", partial(total, dtype=dtype), refusal, not unused[dtype])
    for dtype in _DTYPES:
        refusal = f"{scatters} in {name_of(dtype)}{suffix[dtype]}"
        yield ask(f"reduce-scatter in place, {name_of(dtype)}", partial(scatter, dtype=dtype), refusal, not unused[dtype])
    unasked = "" if averages else "; the config does not ask for it: ranks are summed and the sum is divided"
    for dtype in _DTYPES:
        refusal = f"ddp.average_in_collective=true is not possible{unasked}"
        is_required = averages and not unused[dtype]
        yield ask(f"all-reduce AVG, {name_of(dtype)}", partial(average, dtype=dtype), refusal, is_required)
    yield ask("broadcast of bytes", broadcast, "replicas cannot be made equal when wrapping")
    yield ask("batches of collectives", batches, "ddp.bucket_groups=single is not possible")
    lost = f"ranks lose each other in buckets of {LEAST_BYTES / MIB:g} MiB; try ddp.read_peer_memory=false"
    yield ask("all-reduce of a large bucket", large_bucket, lost)


def numeric_questions() -> Iterator[Question]:
    """Return the questions about rounding in the order in which they are asked."""
    ask = partial(Question, "numerics", refusal="how it rounds cannot be told")
    yield ask("all ranks hold the same bits", same_bits)
    yield ask("float32 sums are precise", precision)
    yield ask("bfloat16 sums", bfloat16_sums, is_required=False)
    yield ask("the same sum again has the same bits", repeated)
    yield ask("all-reduce = reduce-scatter + all-gather", modes)
    yield ask("a sum does not depend on the cuts", cuts)


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its package."""
    return str(dtype).removeprefix("torch.")


# Collectives #


def total(bench: Bench, dtype: torch.dtype) -> Answer:
    """Ask whether every rank is in an all-reduced sum exactly once."""
    tensor = _coded(bench, _part(bench), dtype)
    bench.launch(AllReduce(tensor))
    return _exact(read_sum(tensor, bench.size), "every rank is in the sum exactly once", wrong="gradients would be wrong")


def scatter(bench: Bench, dtype: torch.dtype) -> Answer:
    """Ask whether each rank gets the sum of its shard, into its own part of the input."""
    full = _coded(bench, _part(bench) * bench.size, dtype)
    shard = _shard(bench, full)
    bench.launch(ReduceScatter(shard, full))
    problem = read_sum(shard, bench.size, start=bench.rank * len(shard))
    meaning = f"each rank gets the {name_of(dtype)} sum of its shard"
    return _exact(problem, meaning, wrong="gradients of mode=reduce_scatter would be wrong")


def all_gather(bench: Bench) -> Answer:
    """Ask whether all parts reach every rank, also when the rank's own part already lies in the result."""
    is_right = True
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        expected = (torch.arange(bench.size * _NUMEL, device=bench.device) % 251).to(dtype)
        in_place, apart = torch.zeros_like(expected), torch.zeros_like(expected)
        _shard(bench, in_place).copy_(_shard(bench, expected))
        bench.launch(AllGather(in_place, _shard(bench, in_place)))
        bench.launch(AllGather(apart, _shard(bench, expected).clone()))
        is_right = is_right and torch.equal(in_place, expected) and torch.equal(apart, expected)
    wrong = "updated parameters and error reports would be garbled"
    return check("updated parameters reach every rank", is_right=is_right, wrong=wrong)


def maximum(bench: Bench) -> Answer:
    """Ask for the maximum of large and negative integers."""
    last = bench.size - 1
    values = [bench.rank, -bench.rank, _LARGE + bench.rank, bench.rank - _LARGE, int(bench.rank == last)]
    tensor = torch.tensor(values, dtype=torch.int64, device=bench.device)
    bench.launch(AllReduce(tensor, ReduceOp.MAX))
    got, expected = tensor.tolist(), [last, 0, _LARGE + last, last - _LARGE, 1]
    if got != expected:
        return Answer(Verdict.FINDING, f"got {got} instead of {expected}", "the fence would miss errors of other ranks")
    return Answer(Verdict.HOLDS, "yes", "the fence works: ranks agree on every step")


def average(bench: Bench, dtype: torch.dtype) -> Asking:
    """Ask whether AVG divides the sum by n, or multiplies inputs by a rounded 1/n."""
    # All positive: nothing cancels.
    inputs = [1 + torch.rand(_NUMEL, generator=torch.Generator().manual_seed(1000 + rank)) for rank in range(bench.size)]
    inputs = [values.to(dtype) for values in inputs]
    own = inputs[bench.rank].to(bench.device)
    averaged = own.clone()
    bench.launch(AllReduce(averaged, ReduceOp.AVG))
    summed = _summed(bench, own)
    scaled = _summed(bench, own * torch.tensor(1 / bench.size, dtype=dtype, device=bench.device))
    same = {"sum / n": summed / bench.size, "scaled by a rounded 1/n first": scaled, "the sum, not divided": summed}
    exact = torch.stack(inputs).double().mean(dim=0)
    error = ((averaged.cpu().double() - exact).abs() / exact).max().item()
    kind = next((name for name, values in same.items() if torch.equal(values, averaged)), "rounds like neither")
    if not error <= (bench.size + 2) * torch.finfo(dtype).eps:
        meaning = "AVG is not a mean; leave ddp.average_in_collective=false"
        own_answer = Answer(Verdict.FINDING, f"{kind}, off by {error:.1%}", meaning)
    elif kind == "sum / n":
        is_exact = bench.size & (bench.size - 1) == 0
        text = f"{kind} ({bench.size} ranks cannot tell: 1/{bench.size} is exact)" if is_exact else kind
        own_answer = Answer(Verdict.HOLDS, text, "ddp.average_in_collective gives what the default gives")
    else:
        remedy = "; the default sums and divides once, so it has none of this"
        if bench.config.average_in_collective:
            remedy = " in every gradient; ddp.average_in_collective=false has none of it"
        own_answer = Answer(Verdict.NOTE, kind, f"relative error up to {error:.1g}{remedy}")
    facts = yield {"kind": kind, "answer": own_answer}

    answer, kinds = merge([fact["answer"] for fact in facts]), [fact["kind"] for fact in facts]
    if answer.verdict is not Verdict.FINDING and len(set(kinds)) > 1:
        return Answer(Verdict.FINDING, by_rank(kinds), "ranks would train on different gradients", odd_ones_out(kinds))
    return answer


def broadcast(bench: Bench) -> Answer:
    """Ask whether bits arrive untouched."""
    # NaN payloads and -0.0 survive only where bytes are copied and nothing is computed.
    bits = torch.tensor([0x7FC0_0001, -(2**31), 0x0000_0001, 0x3F80_0000], dtype=torch.int32, device=bench.device)
    is_right = True
    for expected in (bits.view(torch.float32), bits.to(torch.int16), bits > 1):
        received = expected.clone() if bench.rank == 0 else torch.zeros_like(expected)
        bench.launch(Broadcast(received))
        is_right = is_right and torch.equal(received.view(torch.uint8), expected.contiguous().view(torch.uint8))
    meaning = "replicas start equal, whatever the dtypes of the model"
    return check(meaning, is_right=is_right, wrong="replicas would start different")


def batches(bench: Bench) -> Answer:
    """Ask for several collectives of two dtypes in one launch."""
    dtypes = (torch.float32, torch.float32, torch.bfloat16)
    sums = [_coded(bench, _part(bench), dtype) for dtype in dtypes]
    bench.launch(*[AllReduce(tensor) for tensor in sums])
    fulls = [_coded(bench, _part(bench) * bench.size, dtype) for dtype in dtypes]
    bench.launch(*[ReduceScatter(_shard(bench, full), full) for full in fulls])
    bench.launch(*[AllGather(full, _shard(bench, full)) for full in fulls])
    problems = [read_sum(tensor, bench.size) for tensor in (*sums, *fulls)]
    first = next((problem for problem in problems if problem is not None), None)
    return _exact(first, "ddp.bucket_groups=single works", wrong="gradients of ddp.bucket_groups=single would be wrong")


def large_bucket(bench: Bench) -> Answer:
    """Ask for a sum so large that ranks of one host read it from each other's memory, and whether they can."""
    tensor, communicator = _coded(bench, LEAST_BYTES // 4, torch.float32), bench.communicator
    if bench.config.read_peer_memory:
        communicator = with_same_host_copies(communicator, bench.device)
    communicator.launch(communicator.prepare([AllReduce(tensor)]), label="doctor").wait()
    problem = read_sum(tensor, bench.size)
    if problem is not None:
        return Answer(Verdict.FINDING, problem.text, "gradients would be wrong", problem.ranks)
    if communicator is not bench.communicator:
        return Answer(Verdict.HOLDS, "exact; read", "ranks of one host read each other's memory, which is faster than sending")
    meaning = "nobody reads: several hosts, the kernel forbids it, or config or back-end have no use for it"
    return Answer(Verdict.HOLDS, "exact; sent", meaning)


def _part(bench: Bench) -> int:
    return max(_NUMEL, 2 * bench.size)  # every rank's own elements are in every part


def _coded(bench: Bench, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return contribution(bench.rank, bench.size, 0, numel).to(bench.device, dtype)


def _shard(bench: Bench, full: torch.Tensor) -> torch.Tensor:
    return full.view(bench.size, -1)[bench.rank]


def _exact(problem: Problem | None, meaning: str, *, wrong: str) -> Answer:
    if problem is not None:
        return Answer(Verdict.FINDING, problem.text, wrong, problem.ranks)
    return Answer(Verdict.HOLDS, "exact", meaning)


def _summed(bench: Bench, values: torch.Tensor) -> torch.Tensor:
    tensor = values.clone()
    bench.launch(AllReduce(tensor))
    return tensor


# Rounding: random numbers, the same in every run. Each rank makes those of all ranks, so each knows the exact answer #


def _inputs(bench: Bench, numel: int) -> list[torch.Tensor]:
    generators = [torch.Generator().manual_seed(1_000_003 * rank + numel) for rank in range(bench.size)]
    return [torch.randn(numel, generator=generator) for generator in generators]


def _own(bench: Bench, numel: int) -> torch.Tensor:
    return _inputs(bench, numel)[bench.rank].to(bench.device)


def same_bits(bench: Bench) -> Asking:
    """Ask whether a sum has the same bits on all ranks."""
    digests = {}
    for dtype in (torch.float32, torch.bfloat16):
        for numel in _NUMELS:
            data = _summed(bench, _own(bench, numel).to(dtype)).cpu().view(torch.uint8).numpy().tobytes()
            digests[f"{numel} x {name_of(dtype)}"] = hashlib.sha256(data).hexdigest()
    facts = yield {"digests": digests}

    labels_of: dict[tuple[int, ...], list[str]] = {}
    for label in digests:
        labels_of.setdefault(odd_ones_out([fact["digests"][label] for fact in facts]), []).append(label)
    labels_of.pop((), None)
    if not labels_of:
        return Answer(Verdict.HOLDS, "yes", "replicas stay equal")
    texts = [
        f"{rank_list(ranks)} {'differs' if len(ranks) == 1 else 'differ'} for {', '.join(labels)}"
        for ranks, labels in labels_of.items()
    ]
    odd = tuple(sorted({rank for ranks in labels_of for rank in ranks}))
    return Answer(Verdict.FINDING, "; ".join(texts), "replicas would drift apart without a word", odd)


def precision(bench: Bench) -> Answer:
    """Ask whether the error of a sum is one that float32 additions can have."""
    exact = torch.stack(_inputs(bench, _NUMELS[-1])).double()
    error = (_summed(bench, _own(bench, _NUMELS[-1])).cpu().double() - exact.sum(dim=0)).abs()
    # |s' - s| <= g * sum |x|, g = (n - 1) u / (1 - (n - 1) u): no order of float32 additions is worse.
    units = (bench.size - 1) * torch.finfo(torch.float32).eps / 2
    bound = units / (1 - units) * exact.abs().sum(dim=0)
    worst = (error / bound).max().item() if bench.size > 1 else error.max().item()
    # The reference in float64 has an error of its own, some 1e-9 of the bound.
    if worst <= 1 + 1e-6:
        return Answer(Verdict.HOLDS, f"worst error {worst:.2f} of the bound", "every addition rounds as float32 does")
    meaning = "gradients lose digits on the way: fewer bits travel than were given, or values are wrong"
    return Answer(Verdict.FINDING, f"error {worst:.2g} times the bound", meaning)


def bfloat16_sums(bench: Bench) -> Answer:
    """Ask whether bfloat16 numbers are added in bfloat16."""
    if bench.size == 1:
        return NO_PEERS
    # Next to 256 bfloat16 has steps of 2. Adding 1 to 256 gives 256 every time; in float32 the ones are not lost. In element e
    # rank e has the 256, so whatever the order is, somewhere the 256 comes before two ones.
    values = torch.ones(bench.size, dtype=torch.bfloat16, device=bench.device)
    values[bench.rank] = 256
    exact = torch.tensor(255.0 + bench.size).bfloat16().item()
    got = _summed(bench, values).tolist()
    if bench.size == 2:
        answer = "2 ranks cannot tell: one addition rounds the same in both"
        return Answer(Verdict.HOLDS, answer, "with more ranks bfloat16 gradients may lose digits")
    if all(value == exact for value in got):
        return Answer(Verdict.HOLDS, "added in more than bfloat16", "16-bit gradients are rounded once, not once per rank")
    answer = f"added in bfloat16: 256 + {bench.size - 1} ones gave {min(got):g} instead of {exact:g}"
    meaning = "16-bit gradients lose digits with every rank; float32 gradients (ddp.grad_reduce_in_fp32=true) do not"
    return Answer(
        Verdict.NOTE, answer, meaning + ("" if bench.config.grad_reduce_in_fp32 else ", and the config has 16-bit ones")
    )


def repeated(bench: Bench) -> Answer:
    """Ask whether a sum has the same bits when it is computed again."""
    is_same = True
    for numel in _NUMELS[1:]:
        values = _own(bench, numel)
        first, *others = [_summed(bench, values) for _ in range(3)]
        is_same = is_same and all(torch.equal(other, first) for other in others)
    return _same(
        "a run can be repeated bit by bit", wrong="two equal runs may differ in last bits", is_same=is_same, answer="yes"
    )


def modes(bench: Bench) -> Answer:
    """Ask whether a reduce-scatter with an all-gather gives the bits of an all-reduce."""
    full = _own(bench, bench.size * _PART)
    summed = _summed(bench, full)
    bench.launch(ReduceScatter(_shard(bench, full), full))
    bench.launch(AllGather(full, _shard(bench, full)))
    wrong = "mode=all_reduce and mode=reduce_scatter may differ in last bits"
    return _same("both modes give the same bits", wrong=wrong, is_same=torch.equal(full, summed))


def cuts(bench: Bench) -> Answer:
    """Ask whether a sum has the same bits when it is computed in pieces."""
    values = _own(bench, bench.size * _PART)
    places = (0, len(values) // 3 + 1, len(values) // 2, len(values))
    pieces = torch.cat([_summed(bench, values[start:stop]) for start, stop in pairwise(places)])
    wrong = "another ddp.bucket_size may change last bits; nothing else does"
    return _same(
        "another ddp.bucket_size gives the same bits", wrong=wrong, is_same=torch.equal(pieces, _summed(bench, values))
    )


def _same(meaning: str, *, wrong: str, is_same: bool, answer: str = "bit by bit") -> Answer:
    return Answer(Verdict.HOLDS, answer, meaning) if is_same else Answer(Verdict.NOTE, "no", wrong)
