"""The ten questions. What each rank sees is plain data; ``judge`` makes one answer of what all ranks saw.

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
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from megabucket import __version__
from megabucket.comm import Accelerator, AllGather, AllReduce, Broadcast, Call, Communicator, ReduceOp, ReduceScatter
from megabucket.comm.samehost import LEAST_BYTES, SameHostCommunicator
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.doctor import gradients
from megabucket.doctor.report import Verdict
from megabucket.errors import rank_list
from megabucket.optim.kernels import about_apex

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LARGE: Final = 2**62
_NUMELS: Final = (1, 7, 1_000, 65_537)
_BAD_TO_WORSE: Final = tuple(Verdict)


class Answer(NamedTuple):
    """What one rank says, or all ranks together."""

    verdict: Verdict
    text: str
    meaning: str
    ranks: tuple[int, ...] = ()
    """Those at fault, where that can be told."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What a question is asked on."""

    communicator: Communicator
    device: torch.device
    config: DistributedDataParallelConfig
    group: ProcessGroup | None = None
    """The process group behind the communicator, if there is one."""

    @property
    def rank(self) -> int:
        """Its place among the ranks that are asked."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.communicator.size

    @property
    def grad_dtypes(self) -> tuple[torch.dtype, ...]:
        """What gradients may be reduced in: 16 bits only where the config says so."""
        narrow = () if self.config.grad_reduce_in_fp32 else (torch.bfloat16, torch.float16)
        return (torch.float32, *narrow)

    def launch(self, *calls: Call) -> None:
        """Launch a batch and return when its results may be read."""
        self.communicator.launch(self.communicator.prepare(calls), label="doctor").wait()

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, in memory of its own."""
        tensor = values.clone()
        self.launch(AllReduce(tensor))
        return tensor

    def shard(self, full: torch.Tensor) -> torch.Tensor:
        """Return the view of this rank's part."""
        return full.view(self.size, -1)[self.rank]

    def contribution(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return what this rank adds to a sum that tells which ranks are in it."""
        return gradients.contribution(self.rank, self.size, numel).to(self.device, dtype)


# What all ranks say #


def by_rank(texts: Sequence[str | None]) -> str:
    """Return equal texts once, with the ranks that have them; ``None`` is left out.

    >>> by_rank(["yes", "yes"]), by_rank(["yes", "no"]), by_rank([None, "no"])
    ('yes', 'yes on rank 0; no on rank 1', 'no on rank 1')
    """
    ranks_of = {text: [rank for rank, other in enumerate(texts) if other == text] for text in texts if text is not None}
    return "; ".join(text if len(ranks) == len(texts) else f"{text} on {rank_list(ranks)}" for text, ranks in ranks_of.items())


def odd_ones_out(values: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the ranks whose value is not the most frequent one; of equally frequent ones the first rank's counts.

    >>> odd_ones_out(["a", "b", "a"])
    (1,)
    """
    usual = max(dict.fromkeys(values), key=list(values).count)
    return tuple(rank for rank, value in enumerate(values) if value != usual)


def merge(answers: Sequence[Sequence[Any]]) -> Answer:
    """Return one answer for those of all ranks: what the ranks with the worst verdict say.

    It names the ranks at fault where that can be told, else those that say so, unless all do.
    """
    said = [Answer(Verdict(verdict), text, meaning, tuple(ranks)) for verdict, text, meaning, ranks in answers]
    worst = max((answer.verdict for answer in said), key=_BAD_TO_WORSE.index)
    said_by = tuple(rank for rank, answer in enumerate(said) if answer.verdict is worst)
    at_fault = tuple(sorted({rank for speaker in said_by for rank in said[speaker].ranks}))
    text = by_rank([answer.text if answer.verdict is worst else None for answer in said])
    return Answer(worst, text, said[said_by[0]].meaning, at_fault or (said_by if len(said_by) < len(said) else ()))


def _check(meaning: str, *, is_right: bool, wrong: str) -> Answer:
    return Answer(Verdict.HOLDS, "yes", meaning) if is_right else Answer(Verdict.FINDING, "wrong result", wrong)


# The ranks #


def see_versions(bench: Bench) -> dict[str, str]:
    """Return host, device and versions."""
    accelerator = Accelerator.of(bench.device)
    return {
        "host": socket.gethostname(),
        "device": f"{bench.device.type} ({platform.machine()})" if accelerator is None else accelerator.name,
        "libraries": f"megabucket {__version__}, torch {torch.__version__}",
        "python": platform.python_version(),
        "apex": about_apex(bench.device),
    }


def judge_versions(facts: Sequence[dict[str, str]]) -> Answer:
    """Compare them as wrapping does: megabucket, torch and Python's minor version must be equal."""
    compared = [f"{fact['libraries']}, Python {fact['python'].rpartition('.')[0]}" for fact in facts]
    if len(set(compared)) > 1:
        meaning = "wrapping would raise LayoutMismatchError: ranks may launch different collectives"
        return Answer(Verdict.FINDING, by_rank(compared), meaning, odd_ones_out(compared))
    kinds = [f"{fact['device']}, {fact['libraries']}, Python {fact['python']}" for fact in facts]
    hosts = len({fact["host"] for fact in facts})
    ranks_text = "1 rank" if len(facts) == 1 else f"{len(facts)} ranks"
    text = f"{ranks_text} on {hosts} host{'' if hosts == 1 else 's'}: {by_rank(kinds)}"
    about = [fact["apex"] or "no amp_C" for fact in facts]
    if len(set(about)) > 1:
        return Answer(Verdict.NOTE, text, f"kernels='apex' would not work on all ranks: {by_rank(about)}", odd_ones_out(about))
    if len(set(kinds)) > 1:
        meaning = "harmless, but the slowest rank sets the pace, and last bits may depend on the rank"
        return Answer(Verdict.NOTE, text, meaning, odd_ones_out(kinds))
    return Answer(Verdict.HOLDS, text, "; ".join(filter(None, ("the same on every rank", facts[0]["apex"]))))


def see_config(bench: Bench) -> str:
    """Return a fingerprint of the ``ddp`` section."""
    return hashlib.sha256(bench.config.model_dump_json().encode()).hexdigest()[:12]


def judge_config(digests: Sequence[str]) -> Answer:
    """Compare the fingerprints."""
    if len(set(digests)) == 1:
        return Answer(Verdict.HOLDS, digests[0], "the same on every rank")
    meaning = "wrapping would raise LayoutMismatchError; give every rank the same file and overrides"
    return Answer(Verdict.FINDING, by_rank(digests), meaning, odd_ones_out(digests))


# Collectives #


def all_gather(bench: Bench) -> Answer:
    """Ask whether all parts reach every rank."""
    is_right = True
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        expected = (torch.arange(bench.size * 60, device=bench.device) % 251).to(dtype)
        gathered = torch.zeros_like(expected)
        bench.shard(gathered).copy_(bench.shard(expected))
        bench.launch(AllGather(gathered, bench.shard(gathered)))
        is_right = is_right and torch.equal(gathered, expected)
    wrong = "updated parameters and error reports would be garbled"
    return _check("updated parameters reach every rank", is_right=is_right, wrong=wrong)


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
    return _check(meaning, is_right=is_right, wrong="replicas would start different")


def total(bench: Bench) -> Answer:
    """Ask whether every rank is in an all-reduced sum exactly once, small or large, alone or in a batch."""
    numels = (2 * bench.size, 2 * bench.size + 1, LEAST_BYTES // 4)  # from the last on ranks of one host may copy
    for dtype in bench.grad_dtypes:
        sums = [bench.contribution(numel, dtype) for numel in numels]
        bench.launch(*[AllReduce(tensor) for tensor in sums[:-1]])
        bench.launch(AllReduce(sums[-1]))
        for tensor in sums:
            if (problem := gradients.read_sum(tensor, bench.size)) is not None:
                return _wrong_sum(problem, dtype)
    if isinstance(bench.communicator, SameHostCommunicator):
        meaning = "every rank is in the sum exactly once; ranks of one host read each other's memory"
        return Answer(Verdict.HOLDS, "exact; large ones read", meaning)
    return Answer(Verdict.HOLDS, "exact; sent", "every rank is in the sum exactly once")


def scatter(bench: Bench) -> Answer:
    """Ask whether each rank gets the sum of its shard, into its own part of the input."""
    for dtype in bench.grad_dtypes:
        full = bench.contribution(2 * bench.size * bench.size, dtype)
        shard = bench.shard(full)
        bench.launch(ReduceScatter(shard, full))
        if (problem := gradients.read_sum(shard, bench.size)) is not None:
            return _wrong_sum(problem, dtype)
    return Answer(Verdict.HOLDS, "exact", "each rank gets the sum of its shard")


def _wrong_sum(problem: gradients.Problem, dtype: torch.dtype) -> Answer:
    name = str(dtype).removeprefix("torch.")
    return Answer(Verdict.FINDING, f"{name}: {problem.text}", "gradients would be wrong", problem.ranks)


# Rounding: random numbers, the same in every run. Each rank makes those of all ranks, so each knows the exact answer #


def _inputs(bench: Bench, numel: int) -> list[torch.Tensor]:
    generators = [torch.Generator().manual_seed(1_000_003 * rank + numel) for rank in range(bench.size)]
    return [torch.randn(numel, generator=generator) for generator in generators]


def see_bits(bench: Bench) -> dict[str, str]:
    """Return digests of sums of random numbers."""
    digests = {}
    for dtype in (torch.float32, torch.bfloat16):
        for numel in _NUMELS:
            values = _inputs(bench, numel)[bench.rank].to(bench.device, dtype)
            data = bench.summed(values).cpu().view(torch.uint8).numpy().tobytes()
            digests[f"{numel} x {dtype}".replace("torch.", "")] = hashlib.sha256(data).hexdigest()[:16]
    return digests


def judge_bits(facts: Sequence[dict[str, str]]) -> Answer:
    """Compare the digests."""
    odd_of = {label: odd_ones_out([fact[label] for fact in facts]) for label in facts[0]}
    if not any(odd_of.values()):
        return Answer(Verdict.HOLDS, "yes", "replicas stay equal")
    text = "; ".join(
        f"{rank_list(ranks)}: {', '.join(label for label, odd in odd_of.items() if odd == ranks)}"
        for ranks in dict.fromkeys(filter(None, odd_of.values()))
    )
    ranks = tuple(sorted({rank for odd in odd_of.values() for rank in odd}))
    return Answer(Verdict.FINDING, f"other bits on {text}", "replicas would drift apart without a word", ranks)


def precision(bench: Bench) -> Answer:
    """Ask whether the error of a float32 sum is one that float32 additions can have."""
    inputs = _inputs(bench, _NUMELS[-1])
    exact = torch.stack(inputs).double()
    error = (bench.summed(inputs[bench.rank].to(bench.device)).cpu().double() - exact.sum(dim=0)).abs()
    # |s' - s| <= g * sum |x|, g = (n - 1) u / (1 - (n - 1) u): no order of float32 additions is worse.
    units = (bench.size - 1) * torch.finfo(torch.float32).eps / 2
    bound = units / (1 - units) * exact.abs().sum(dim=0)
    worst = (error / bound).max().item() if bench.size > 1 else error.max().item()
    # The reference in float64 has an error of its own, some 1e-9 of the bound.
    if worst <= 1 + 1e-6:
        return Answer(Verdict.HOLDS, f"worst error {worst:.2f} of the bound", "every addition rounds as float32 does")
    meaning = "gradients lose digits on the way: fewer bits travel than were given, or values are wrong"
    return Answer(Verdict.FINDING, f"error {worst:.2g} times the bound", meaning)


# Gradients through the real wrapper #


def see_gradients(bench: Bench) -> dict[str, Any]:
    """Train a small model for two steps and return the first difference from what must come out."""
    # As in training: over a process group the wrapper makes a communicator of its own, with heartbeats.
    ranks = {"communicator": bench.communicator} if bench.group is None else {"process_group": bench.group}
    return gradients.first_difference(bench.config, rank=bench.rank, size=bench.size, device=bench.device, **ranks)._asdict()


def judge_gradients(facts: Sequence[dict[str, Any]]) -> Answer:
    """Say which ranks are missing in the gradients; else that parameters, or last bits, are wrong."""
    # Wrong gradients make wrong parameters, also at ranks that own none of these gradients: those only follow.
    for is_cause in (True, False):
        wrong = [rank for rank, fact in enumerate(facts) if fact["problem"] and (fact["is_in_gradients"] or not is_cause)]
        if wrong:
            told = next((facts[rank] for rank in wrong if facts[rank]["ranks"]), facts[wrong[0]])
            text = f"{told['problem']} (in {told['where']})"
            ranks = sorted({at_fault for rank in wrong for at_fault in facts[rank]["ranks"]}) or wrong
            return Answer(Verdict.FINDING, text, "training would go wrong without a word", tuple(ranks))
    rounding = max(fact["rounding"] for fact in facts)
    if rounding > 0:
        text = f"every rank once, but rounded: up to {rounding:.1g}"
        return Answer(Verdict.NOTE, text, "AVG rounds on this back-end; ddp.average_in_collective=false does not")
    return Answer(Verdict.HOLDS, "exact", "with this config gradients, updates and gathered parameters are right")


@dataclass(frozen=True, slots=True)
class Question:
    """One line of the report."""

    text: str
    ask: Callable[[Bench], Any]
    """Return what this rank sees, ready for JSON."""
    judge: Callable[[Sequence[Any]], Answer]
    refusal: str
    """What it means that the back-end refuses."""
    is_required: bool = True
    """Whether a refusal is a finding."""


QUESTIONS: Final = (
    Question("ranks and versions", see_versions, judge_versions, "a rank cannot say what it is"),
    Question("config", see_config, judge_config, "a rank cannot say what it is"),
    Question("all-gather", all_gather, merge, "mode=reduce_scatter is not possible, and ranks cannot exchange reports"),
    Question("all-reduce MAX of integers", maximum, merge, "ranks cannot agree on a step"),
    Question("broadcast of bytes", broadcast, merge, "replicas cannot be made equal when wrapping"),
    Question("all-reduce SUM", total, merge, "gradients cannot be reduced"),
    Question("reduce-scatter in place", scatter, merge, "mode=reduce_scatter is not possible", is_required=False),
    Question("all ranks hold the same bits", see_bits, judge_bits, "how it rounds cannot be told"),
    Question("float32 sums are precise", precision, merge, "how it rounds cannot be told"),
    Question("gradients as configured", see_gradients, judge_gradients, "a wrapper with this config does not work here"),
)
