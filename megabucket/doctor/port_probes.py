"""Questions about the collectives the library launches, through its own port: whatever is behind it, also a loopback world.

Values say which ranks are in them (``rank_code``), so a wrong sum is not only found but read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from megabucket.comm import AllGather, AllReduce, Broadcast, Call, ReduceOp, ReduceScatter, with_same_host_copies
from megabucket.comm.samehost import LEAST_BYTES
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.doctor.probe import Bench, Fact, Judgement, Probe, by_rank, odd_ones_out, right_or
from megabucket.doctor.rank_code import WIDTHS, RankCode, Reading
from megabucket.doctor.report import Verdict
from megabucket.units import MIB

SECTION: Final = "collectives"
_NUMEL: Final = 60
"""Elements of a rank's part; more are used where the code of many ranks is longer."""
_LARGE: Final = 2**62


def port_probes(config: DistributedDataParallelConfig) -> list[Probe]:
    """Return the questions in the order in which they are asked; the config says what a refusal means."""
    needs_16_bit = not config.grad_reduce_in_fp32
    is_required = {"float32": True, "float64": True, "bfloat16": needs_16_bit, "float16": needs_16_bit}
    gradient_dtypes = ("float32", "bfloat16", "float16")
    return [
        _all_gather_probe(),
        _max_probe(config),
        *(_sum_probe(dtype, is_required=required) for dtype, required in is_required.items()),
        *(_scatter_probe(dtype, is_required=is_required[dtype]) for dtype in gradient_dtypes),
        *(_average_probe(dtype, config) for dtype in gradient_dtypes),
        _broadcast_probe(),
        _batch_probe(),
        _large_probe(config),
    ]


def launch(bench: Bench, calls: Sequence[Call]) -> None:
    """Launch a batch and return when its results may be read."""
    bench.communicator.launch(bench.communicator.prepare(calls), label="doctor").wait()


# Sums that say who is in them #


def _sum_probe(dtype: str, *, is_required: bool) -> Probe:
    def observe(bench: Bench) -> Fact:
        code, numel = _code(bench, dtype)
        tensor = _coded(bench, code, numel, dtype)
        launch(bench, [AllReduce(tensor)])
        return _explained(code, tensor, start=0)

    return Probe(
        SECTION,
        f"all-reduce SUM, {dtype}",
        observe,
        right_or("every rank is in the sum exactly once", wrong="gradients would be wrong", answer="exact"),
        refusal=f"gradients in {dtype} cannot be reduced" + ("" if is_required else "; the config reduces none"),
        is_required=is_required,
    )


def _scatter_probe(dtype: str, *, is_required: bool) -> Probe:
    def observe(bench: Bench) -> Fact:
        code, numel = _code(bench, dtype)
        size, rank = bench.communicator.size, bench.communicator.rank
        full = _coded(bench, code, numel * size, dtype)
        shard = full[rank * numel : (rank + 1) * numel]
        launch(bench, [ReduceScatter(shard, full)])
        return {**_explained(code, shard, start=rank * numel), "is_partial": True}

    return Probe(
        SECTION,
        f"reduce-scatter in place, {dtype}",
        observe,
        right_or(
            f"each rank gets the {dtype} sum of its shard",
            wrong="gradients of mode=reduce_scatter would be wrong",
            answer="exact",
        ),
        refusal="mode=reduce_scatter is not possible" + ("" if is_required else f" in {dtype}; the config reduces none"),
        is_required=is_required,
    )


def _code(bench: Bench, dtype: str) -> tuple[RankCode, int]:
    code = RankCode(bench.communicator.size, WIDTHS[dtype])
    return code, max(_NUMEL, 2 * code.period)


def _coded(bench: Bench, code: RankCode, numel: int, dtype: str) -> torch.Tensor:
    values = code.values(bench.communicator.rank, stop=numel)
    return torch.tensor(values, dtype=getattr(torch, dtype), device=bench.device)


def _explained(code: RankCode, sums: torch.Tensor, *, start: int) -> Fact:
    values = sums.double().tolist()
    if values == code.sums(start=start, stop=start + len(values)):
        return {"is_right": True}
    reading = code.read(values, start=start) or Reading("sums of whole numbers are rounded")
    return {"is_right": False, "problem": reading.text, "culprits": reading.ranks}


# Copies #


def _all_gather_probe() -> Probe:
    def observe(bench: Bench) -> Fact:
        size, rank = bench.communicator.size, bench.communicator.rank
        is_right = True
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            expected = (torch.arange(size * _NUMEL, device=bench.device) % 251).to(dtype)
            mine = slice(rank * _NUMEL, (rank + 1) * _NUMEL)
            in_place = torch.zeros_like(expected)
            in_place[mine] = expected[mine]
            launch(bench, [AllGather(in_place, in_place[mine])])
            apart = torch.zeros_like(expected)
            launch(bench, [AllGather(apart, expected[mine].clone())])
            is_right = is_right and torch.equal(in_place, expected) and torch.equal(apart, expected)
        return {"is_right": is_right}

    return Probe(
        SECTION,
        "all-gather, also in place",
        observe,
        right_or("updated parameters reach every rank", wrong="updated parameters and error reports would be garbled"),
        refusal="mode=reduce_scatter is not possible, and ranks cannot exchange reports",
    )


def _broadcast_probe() -> Probe:
    def observe(bench: Bench) -> Fact:
        # NaN payloads and -0.0 survive only where bytes are copied and nothing is computed.
        bits = torch.tensor([0x7FC0_0001, -(2**31), 0x0000_0001, 0x3F80_0000], dtype=torch.int32, device=bench.device)
        tensors = [bits.view(torch.float32), bits.to(torch.int16), bits > 1]
        is_right = True
        for expected in tensors:
            received = expected.clone() if bench.communicator.rank == 0 else torch.zeros_like(expected)
            launch(bench, [Broadcast(received)])
            is_right = is_right and torch.equal(received.view(torch.uint8), expected.contiguous().view(torch.uint8))
        return {"is_right": is_right}

    return Probe(
        SECTION,
        "broadcast of bytes",
        observe,
        right_or("replicas start equal, whatever the dtypes of the model", wrong="replicas would start different"),
        refusal="replicas cannot be made equal when wrapping",
    )


def _max_probe(config: DistributedDataParallelConfig) -> Probe:
    def observe(bench: Bench) -> Fact:
        size, rank = bench.communicator.size, bench.communicator.rank
        values = [rank, -rank, _LARGE + rank, rank - _LARGE, int(rank == size - 1)]
        tensor = torch.tensor(values, dtype=torch.int64, device=bench.device)
        launch(bench, [AllReduce(tensor, ReduceOp.MAX)])
        expected = [size - 1, 0, _LARGE + size - 1, size - 1 - _LARGE, 1]
        got = tensor.tolist()
        return {"is_right": got == expected, "problem": "" if got == expected else f"got {got} instead of {expected}"}

    return Probe(
        SECTION,
        "all-reduce MAX, int64",
        observe,
        right_or("the fence works: ranks agree on every step", wrong="the fence would miss errors of other ranks"),
        refusal="ranks cannot agree on a step" + ("" if config.fence else "; the config has switched the fence off"),
        is_required=config.fence,
    )


def _large_probe(config: DistributedDataParallelConfig) -> Probe:
    def observe(bench: Bench) -> Fact:
        code, _ = _code(bench, "float32")
        tensor = _coded(bench, code, LEAST_BYTES // 4, "float32")
        communicator = bench.communicator
        if config.read_peer_memory:
            communicator = with_same_host_copies(communicator, bench.device)
        communicator.launch(communicator.prepare([AllReduce(tensor)]), label="doctor").wait()
        return {**_explained(code, tensor, start=0), "is_read": communicator is not bench.communicator}

    def judge(facts: Sequence[Fact]) -> Judgement:
        found = right_or("every rank is in the sum exactly once", wrong="gradients would be wrong")(facts)
        if found.verdict is not Verdict.HOLDS:
            return found
        if facts[0]["is_read"]:
            meaning = "ranks of one host read each other's memory, which is faster than sending"
            return Judgement(Verdict.HOLDS, "exact; read", meaning)
        meaning = "nobody reads: several hosts, the kernel forbids it, or config or back-end have no use for it"
        return Judgement(Verdict.HOLDS, "exact; sent", meaning)

    return Probe(
        SECTION,
        "all-reduce of a large bucket",
        observe,
        judge,
        refusal=f"ranks lose each other in buckets of {LEAST_BYTES / MIB:g} MiB; try ddp.read_peer_memory=false",
    )


def _batch_probe() -> Probe:
    def observe(bench: Bench) -> Fact:
        size, rank = bench.communicator.size, bench.communicator.rank
        dtypes = ("float32", "float32", "bfloat16")
        codes = [_code(bench, dtype) for dtype in dtypes]
        tensors = [_coded(bench, code, numel, dtype) for (code, numel), dtype in zip(codes, dtypes, strict=True)]
        launch(bench, [AllReduce(tensor) for tensor in tensors])
        fulls = [_coded(bench, code, numel * size, dtype) for (code, numel), dtype in zip(codes, dtypes, strict=True)]
        shards = [full[rank * numel : (rank + 1) * numel] for full, (_, numel) in zip(fulls, codes, strict=True)]
        launch(bench, [ReduceScatter(shard, full) for shard, full in zip(shards, fulls, strict=True)])
        launch(bench, [AllGather(full, shard) for shard, full in zip(shards, fulls, strict=True)])
        results = [*zip(codes, tensors, strict=True), *zip(codes, fulls, strict=True)]
        facts = [_explained(code, tensor, start=0) for (code, _), tensor in results]
        return next((fact for fact in facts if not fact["is_right"]), {"is_right": True})

    return Probe(
        SECTION,
        "batches of collectives",
        observe,
        right_or(
            "ddp.bucket_groups=single works", wrong="gradients of ddp.bucket_groups=single would be wrong", answer="exact"
        ),
        refusal="ddp.bucket_groups=single is not possible",
    )


# What AVG is #


def _average_probe(dtype: str, config: DistributedDataParallelConfig) -> Probe:
    is_used = config.average_in_collective

    def observe(bench: Bench) -> Fact:
        size, kind = bench.communicator.size, getattr(torch, dtype)
        inputs = [_random(rank, kind) for rank in range(size)]
        own = inputs[bench.communicator.rank].to(bench.device)
        average, total, scaled = own.clone(), own.clone(), own * torch.tensor(1 / size, dtype=kind, device=bench.device)
        launch(bench, [AllReduce(average, ReduceOp.AVG)])
        launch(bench, [AllReduce(total)])
        launch(bench, [AllReduce(scaled)])
        exact = torch.stack([values.double() for values in inputs]).mean(dim=0)
        error = ((average.cpu().double() - exact).abs() / exact).max().item()
        same = {"sum / n": total / size, "scaled by a rounded 1/n first": scaled, "the sum, not divided": total}
        names = [name for name, values in same.items() if torch.equal(values, average)]
        bound = (size + 2) * torch.finfo(kind).eps
        return {"is": names[0] if names else "neither", "error": error, "is_close": error <= bound}

    return Probe(
        SECTION,
        f"all-reduce AVG, {dtype}",
        observe,
        _average_judge(is_used=is_used),
        refusal="ddp.average_in_collective=true is not possible"
        + ("" if is_used else "; the config does not ask for it: ranks are summed and the sum is divided"),
        is_required=is_used and (dtype == "float32" or not config.grad_reduce_in_fp32),
    )


def _random(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return (1 + torch.rand(_NUMEL, generator=generator)).to(dtype)  # all positive: nothing cancels


def _average_judge(*, is_used: bool) -> Callable[[Sequence[Fact]], Judgement]:
    def judge(facts: Sequence[Fact]) -> Judgement:
        kinds = [fact["is"] for fact in facts]
        wrong = tuple(rank for rank, fact in enumerate(facts) if not fact["is_close"])
        if wrong:
            texts = by_rank([f"{fact['is']}, off by {fact['error']:.1%}" for fact in facts])
            meaning = "AVG is not a mean; leave ddp.average_in_collective=false"
            return Judgement(Verdict.FINDING, texts, meaning, wrong if len(wrong) < len(facts) else ())
        if len(set(kinds)) > 1:
            return Judgement(Verdict.FINDING, by_rank(kinds), "ranks would train on different gradients", odd_ones_out(kinds))
        size, kind = len(facts), kinds[0]
        if kind == "sum / n":
            can_tell = size & (size - 1) != 0
            answer = kind if can_tell else f"{kind} ({size} ranks cannot tell: 1/{size} is exact)"
            return Judgement(Verdict.HOLDS, answer, "ddp.average_in_collective gives what the default gives")
        error = max(fact["error"] for fact in facts)
        meaning = f"relative error up to {error:.1g}; the default sums and divides once, so it has none of this"
        if is_used:
            meaning = f"relative error up to {error:.1g} in every gradient; ddp.average_in_collective=false has none of it"
        return Judgement(Verdict.NOTE, "rounds like neither" if kind == "neither" else kind, meaning)

    return judge
