"""Questions about rounding: what may be expected bit for bit on this back-end, and how precisely it adds.

Random numbers, the same for every run: each rank makes those of all ranks, so each knows the exact answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch

from megabucket.comm import AllGather, AllReduce, ReduceScatter
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.doctor.port_probes import launch
from megabucket.doctor.probe import Bench, Fact, Judgement, Probe, by_rank, odd_ones_out, right_or
from megabucket.doctor.report import Verdict
from megabucket.errors import rank_list

SECTION: Final = "numerics"
_NUMELS: Final = (1, 7, 1_000, 65_537)
_DTYPES: Final = (torch.float32, torch.bfloat16)
_REPEATS: Final = 3
_PART: Final = 1_024
"""Elements of each rank's part."""


def numeric_probes(config: DistributedDataParallelConfig) -> list[Probe]:
    """Return the questions in the order in which they are asked."""
    refusal, note = "how it rounds cannot be told", Verdict.NOTE
    adds_in_16_bit = not config.grad_reduce_in_fp32

    def accumulation(facts: Sequence[Fact]) -> Judgement:
        return _judge_accumulation(facts, is_used=adds_in_16_bit)

    return [
        Probe(SECTION, "all ranks hold the same bits", _observe_digests, _judge_digests, refusal),
        Probe(SECTION, "float32 sums are precise", _observe_precision, _judge_precision, refusal),
        Probe(SECTION, "bfloat16 sums", _observe_accumulation, accumulation, refusal, is_required=False, needs_peers=True),
        Probe(
            SECTION,
            "the same sum again has the same bits",
            _observe_repeats,
            right_or("a run can be repeated bit by bit", wrong="two equal runs may differ in last bits", otherwise=note),
            refusal,
        ),
        Probe(
            SECTION,
            "all-reduce = reduce-scatter + all-gather",
            _observe_modes,
            right_or(
                "both modes give the same bits",
                wrong="mode=all_reduce and mode=reduce_scatter may differ in last bits",
                otherwise=note,
                answer="bit by bit",
            ),
            refusal,
        ),
        Probe(
            SECTION,
            "a sum does not depend on the cuts",
            _observe_cuts,
            right_or(
                "another ddp.bucket_size gives the same bits",
                wrong="another ddp.bucket_size may change last bits; nothing else does",
                otherwise=note,
                answer="bit by bit",
            ),
            refusal,
        ),
    ]


def _inputs(size: int, numel: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return what each rank adds."""
    generators = (torch.Generator().manual_seed(1_000_003 * rank + numel) for rank in range(size))
    return [torch.randn(numel, generator=generator).to(dtype) for generator in generators]


def _own(bench: Bench, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return _inputs(bench.communicator.size, numel, dtype)[bench.communicator.rank].to(bench.device)


def _summed(bench: Bench, values: torch.Tensor) -> torch.Tensor:
    tensor = values.clone()
    launch(bench, [AllReduce(tensor)])
    return tensor


def _observe_digests(bench: Bench) -> Fact:
    digests = {}
    for dtype in _DTYPES:
        for numel in _NUMELS:
            total = _summed(bench, _own(bench, numel, dtype)).cpu()
            label = f"{numel} x {str(dtype).removeprefix('torch.')}"
            digests[label] = hashlib.sha256(total.view(torch.uint8).numpy().tobytes()).hexdigest()
    return {"digests": digests}


def _judge_digests(facts: Sequence[Fact]) -> Judgement:
    labels_of: dict[tuple[int, ...], list[str]] = {}
    for label in facts[0]["digests"]:
        ranks = odd_ones_out([fact["digests"][label] for fact in facts])
        labels_of.setdefault(ranks, []).append(label)
    labels_of.pop((), None)
    if not labels_of:
        return Judgement(Verdict.HOLDS, "yes", "replicas stay equal")
    odd = tuple(sorted({rank for ranks in labels_of for rank in ranks}))
    texts = [
        f"{rank_list(ranks)} {'differs' if len(ranks) == 1 else 'differ'} for {', '.join(labels)}"
        for ranks, labels in labels_of.items()
    ]
    return Judgement(Verdict.FINDING, "; ".join(texts), "replicas would drift apart without a word", odd)


def _observe_precision(bench: Bench) -> Fact:
    inputs = _inputs(bench.communicator.size, _NUMELS[-1])
    got = _summed(bench, inputs[bench.communicator.rank].to(bench.device)).cpu().double()
    exact = torch.stack(inputs).double()
    # |s' - s| <= g * sum |x|, g = (n - 1) u / (1 - (n - 1) u): no order of float32 additions is worse.
    units = (len(inputs) - 1) * torch.finfo(torch.float32).eps / 2
    bound = units / (1 - units) * exact.abs().sum(dim=0)
    error = (got - exact.sum(dim=0)).abs()
    # The reference in float64 has an error of its own, some 1e-9 of the bound; one rank has a bound of 0.
    worst = (error / bound.clamp_min(torch.finfo(torch.float64).tiny)).max().item() if len(inputs) > 1 else error.max().item()
    return {"worst": worst}


def _judge_precision(facts: Sequence[Fact]) -> Judgement:
    wrong = tuple(rank for rank, fact in enumerate(facts) if not fact["worst"] <= 1 + 1e-6)
    worst = max(fact["worst"] for fact in facts)
    if not wrong:
        return Judgement(Verdict.HOLDS, f"worst error {worst:.2f} of the bound", "every addition rounds as float32 does")
    texts = by_rank([f"error {fact['worst']:.2g} times the bound" for fact in facts])
    meaning = "gradients lose digits on the way: fewer bits travel than were given, or values are wrong"
    return Judgement(Verdict.FINDING, texts, meaning, wrong if len(wrong) < len(facts) else ())


def _observe_accumulation(bench: Bench) -> Fact:
    # Next to 256 bfloat16 has steps of 2. Adding 1 to 256 gives 256 every time; in float32 the ones are not lost. In element e
    # rank e has the 256, so whatever the order is, somewhere the 256 comes before two ones.
    size, rank = bench.communicator.size, bench.communicator.rank
    values = torch.ones(size, dtype=torch.bfloat16, device=bench.device)
    values[rank] = 256
    exact = torch.tensor(255.0 + size).bfloat16().item()
    got = _summed(bench, values).tolist()
    return {"num_lost": sum(value != exact for value in got), "smallest": min(got), "exact": exact}


def _judge_accumulation(facts: Sequence[Fact], *, is_used: bool) -> Judgement:
    if len(facts) == 2:
        answer = "2 ranks cannot tell: one addition rounds the same in both"
        return Judgement(Verdict.HOLDS, answer, "with more ranks bfloat16 gradients may lose digits")
    kept = "float32 gradients (ddp.grad_reduce_in_fp32=true) do not"
    if any(fact["num_lost"] for fact in facts):
        fact = facts[0]
        answer = f"added in bfloat16: 256 + {len(facts) - 1} ones gave {fact['smallest']:g} instead of {fact['exact']:g}"
        meaning = f"16-bit gradients lose digits with every rank; {kept}"
        return Judgement(Verdict.NOTE, answer, meaning + (", and the config has 16-bit ones" if is_used else ""))
    return Judgement(Verdict.HOLDS, "added in more than bfloat16", "16-bit gradients are rounded once, not once per rank")


def _observe_repeats(bench: Bench) -> Fact:
    is_right = True
    for numel in _NUMELS[1:]:
        values = _own(bench, numel)
        totals = [_summed(bench, values) for _ in range(_REPEATS)]
        is_right = is_right and all(torch.equal(total, totals[0]) for total in totals)
    return {"is_right": is_right, "problem": "" if is_right else "no"}


def _observe_modes(bench: Bench) -> Fact:
    size, rank = bench.communicator.size, bench.communicator.rank
    full = _own(bench, size * _PART)
    total = _summed(bench, full)
    shard = full[rank * _PART : (rank + 1) * _PART]
    launch(bench, [ReduceScatter(shard, full)])
    launch(bench, [AllGather(full, shard)])
    is_right = torch.equal(full, total)
    return {"is_right": is_right, "problem": "" if is_right else "no"}


def _observe_cuts(bench: Bench) -> Fact:
    numel = bench.communicator.size * _PART
    values = _own(bench, numel)
    total = _summed(bench, values)
    cuts = (0, numel // 3 + 1, numel // 2, numel)
    pieces = [_summed(bench, values[start:stop]) for start, stop in pairwise(cuts)]
    is_right = torch.equal(torch.cat(pieces), total)
    return {"is_right": is_right, "problem": "" if is_right else "no"}
