"""What saving and loading cost against plain files with hashing, and a reshard in memory and time.

    OMP_NUM_THREADS=1 python tests/benchmarks/checkpoint_cost.py [--mib 512] [--repetitions 7] [--reshard-gib 0] [--dir DIR]
    OMP_NUM_THREADS=1 python tests/benchmarks/checkpoint_cost.py --async-save [--repetitions 7] [--dir DIR]

Everything is paired within one run. "plain" writes (reads) the same bytes as files of 64 MiB with open and write (readinto),
hashes them with SHA-256 from the same memory and waits for the disk with fsync; "plain, threads" does that with as many
threads as the library. Loads come from the page cache, where the disk hides nothing. The snapshot of an asynchronous save
is against a copy of the same tensors into memory that is there already. ``--async-save`` measures what a whole
``Checkpointer.save`` of a model with AdamW costs the thread that trains, planning and exchanges included, against such a copy,
and what it costs it, in polls, that this is committed.
"""

import argparse
import hashlib
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from paired import interleave, ratio, timed

import megabucket as mb
from megabucket.checkpoint.capture import TrainingParts, capture
from megabucket.checkpoint.file_system import NUM_FILE_THREADS
from megabucket.checkpoint.format import Piece, Snapshot, TensorInfo
from megabucket.checkpoint.offline import reshard
from megabucket.checkpoint.ranks import AloneRanks
from megabucket.checkpoint.save import BackgroundWriter, SaveSettings, save_snapshot
from megabucket.checkpoint.stored import open_checkpoint
from megabucket.units import MIB

FILE_BYTES = 64 * MIB
CHUNK_BYTES = MIB
THREADS = NUM_FILE_THREADS


def state(total_bytes: int, *, large: int = 2048 * 2048) -> list[Piece]:
    """Tensors like those of a transformer: three copies (parameters, two moments) of matrices and vectors."""
    pieces, held, index = [], 0, 0
    while held < total_bytes:
        for kind in ("model", "optim.state", "optim.more"):
            for name, shape in (("matrix", (large // 2048, 2048)), ("bias", (2048,))):
                info = TensorInfo(f"{kind}.layers.{index}.{name}", "float32", shape, (0, 1)[: len(shape)])
                pieces.append(Piece(info, 0, info.numel, torch.randn(info.numel)))
                held += 4 * info.numel
        index += 1
    return pieces


def plain_write(root: Path, blobs: list[memoryview], *, threads: int) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()

    def write(index: int) -> str:
        digest = hashlib.sha256()
        with (root / f"{index}").open("wb", buffering=0) as file:
            for start in range(0, len(blobs[index]), CHUNK_BYTES):
                chunk = blobs[index][start : start + CHUNK_BYTES]
                digest.update(chunk)
                file.write(chunk)
            os.fsync(file.fileno())
        return digest.hexdigest()

    run_all(write, len(blobs), threads)


def plain_read(root: Path, blobs: list[memoryview], *, threads: int) -> None:
    """Read every file into the memory it came from, and hash it there."""

    def read(index: int) -> str:
        digest = hashlib.sha256()
        with (root / f"{index}").open("rb", buffering=0) as file:
            for start in range(0, len(blobs[index]), CHUNK_BYTES):
                chunk = blobs[index][start : start + CHUNK_BYTES]
                file.readinto(chunk)
                digest.update(chunk)
        return digest.hexdigest()

    run_all(read, len(blobs), threads)


def run_all(act: Callable[[int], object], count: int, threads: int) -> None:
    if threads == 1:
        for index in range(count):
            act(index)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(act, range(count)))


def report(title: str, seconds: dict[str, list[float]], numerator: str, denominator: str) -> None:
    median, low, high = ratio(seconds, numerator, denominator)
    print(f"  {title}: {median:.2f}x (quartiles {low:.2f} to {high:.2f})")


def show(seconds: dict[str, list[float]], total_bytes: int) -> None:
    for name, times in seconds.items():
        best, middle = min(times), sorted(times)[len(times) // 2]
        print(f"    {name:16s} median {middle:.3f} s, best {best:.3f} s, {total_bytes / middle / 2**30:.2f} GiB/s")


def save_and_load(base: Path, total_bytes: int, repetitions: int) -> None:
    pieces = state(total_bytes)
    snapshot = Snapshot(pieces, {"step": 1})
    total_bytes = sum(4 * piece.info.numel for piece in pieces)
    flat = torch.cat([piece.values for piece in pieces]).view(torch.uint8).numpy().data
    blobs = [flat[start : start + FILE_BYTES] for start in range(0, len(flat), FILE_BYTES)]
    settings, step = SaveSettings(keep_last=1), iter(range(10**6))

    def save() -> None:
        save_snapshot(base / "ours", next(step), snapshot, AloneRanks(), settings)

    def plain(threads: int) -> Callable[[], None]:
        return lambda: plain_write(base / f"plain-{threads}", blobs, threads=threads)

    saves = {"ours": timed(save), "plain": timed(plain(1)), "plain, threads": timed(plain(THREADS))}
    interleave(saves, repetitions=1)
    seconds = interleave(saves, repetitions=repetitions)
    print(f"save {total_bytes / 2**20:.0f} MiB in {len(pieces)} tensors, fsync on both sides")
    show(seconds, total_bytes)
    report("ours / plain", seconds, "ours", "plain")
    report("ours / plain, threads", seconds, "ours", "plain, threads")

    wanted = [Piece(piece.info, 0, piece.info.numel, torch.zeros(piece.info.numel)) for piece in pieces]
    loads = {
        "ours": timed(lambda: open_checkpoint(base / "ours").read(wanted)),
        "plain": timed(lambda: plain_read(base / "plain-1", blobs, threads=1)),
        "plain, threads": timed(lambda: plain_read(base / f"plain-{THREADS}", blobs, threads=THREADS)),
    }
    interleave(loads, repetitions=1)
    seconds = interleave(loads, repetitions=repetitions)
    print("load, from the page cache")
    show(seconds, total_bytes)
    report("ours / plain", seconds, "ours", "plain")
    report("ours / plain, threads", seconds, "ours", "plain, threads")
    assert all(torch.equal(mine.values, theirs.values) for mine, theirs in zip(wanted, pieces, strict=True))


def background(base: Path, total_bytes: int, repetitions: int) -> None:
    pieces = state(total_bytes)
    own = [torch.zeros_like(piece.values) for piece in pieces]
    memory = [torch.zeros_like(piece.values) for piece in pieces]
    writer, step = BackgroundWriter(base / "background", AloneRanks(), SaveSettings(keep_last=1)), iter(range(10**6))

    def copied() -> Snapshot:
        return Snapshot([Piece(p.info, p.start, p.stop, mine.copy_(p.values)) for p, mine in zip(pieces, own, strict=True)], {})

    def copy() -> None:
        for piece, mine in zip(pieces, memory, strict=True):
            mine.copy_(piece.values)

    def save() -> float:
        start_s = time.perf_counter()
        writer.save(next(step), copied)
        took_s = time.perf_counter() - start_s
        writer.close()
        return took_s

    candidates = {"save in background": save, "copy": timed(copy)}
    interleave(candidates, repetitions=1)
    seconds = interleave(candidates, repetitions=repetitions)
    print(f"what a save in the background costs the training thread, {4 * sum(p.info.numel for p in pieces) / 2**20:.0f} MiB")
    show(seconds, 4 * sum(piece.info.numel for piece in pieces))
    report("save in background / copy", seconds, "save in background", "copy")


def async_save(base: Path, layers: int, width: int, dtype: torch.dtype, repetitions: int) -> None:
    """Save a model of linear layers with AdamW again and again, and compare with a copy of all that is saved."""
    module = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)]).to(dtype)
    ddp = mb.DistributedDataParallel(module, mb.DistributedDataParallelConfig(use_distributed_optimizer=True))
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=True), ddp)
    ddp(torch.randn(4, width, dtype=dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    values = [piece.values for piece in capture(TrainingParts(ddp, optimizer)).pieces]
    memory = [torch.empty_like(one).copy_(one) for one in values]
    root, step, commits = base / "async", iter(range(10**6)), []

    def copy() -> None:
        for one, mine in zip(values, memory, strict=True):
            mine.copy_(one)

    with mb.Checkpointer(root, ddp, optimizer, asynchronous=True, keep_last=1) as checkpointer:

        def save() -> float:
            start_s = time.perf_counter()
            checkpointer.save(next(step))
            took_s = time.perf_counter() - start_s
            path, polls = None, []
            while path is None:
                time.sleep(0.01)
                polled_s = time.perf_counter()
                path = checkpointer.poll()
                polls.append(time.perf_counter() - polled_s)
            commits.append(sum(polls))
            return took_s

        candidates = {"copy": timed(copy), "save": save}
        interleave(candidates, repetitions=2)
        seconds = interleave(candidates, repetitions=repetitions)
    num_bytes, num_params = sum(one.nbytes for one in values), sum(1 for _ in module.parameters())
    print(f"{str(dtype).removeprefix('torch.')}, {num_bytes / 1e6:.0f} MB in {num_params} parameters, {len(values)} tensors")
    show(seconds, num_bytes)
    report("Checkpointer.save in background / copy", seconds, "save", "copy")
    print(f"  all polls until it is committed: median {statistics.median(commits[2:]) * 1e3:.1f} ms")
    shutil.rmtree(root)


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    """Count the peak from now on; ru_maxrss knows no reset, so the kernel's own figure is used where it can be."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_since_reset() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def resharded(base: Path, gib: float) -> None:
    """Write a large checkpoint from one small set of values, then reshard it from 1 to 8 writers."""
    chunk = torch.randn(64 * 2**20 // 4)
    infos = [TensorInfo(f"optim.state.layers.{i}.exp_avg", "float32", (chunk.numel(),), (0,)) for i in range(int(gib * 16))]
    pieces = [Piece(info, 0, chunk.numel(), chunk) for info in infos]
    save_snapshot(base / "large", 1, Snapshot(pieces, {}), AloneRanks(), SaveSettings())
    source = open_checkpoint(base / "large")
    held = peak_rss_bytes()
    reset_peak()
    start_s = time.perf_counter()
    before = peak_since_reset()

    reshard(source, base / "resharded", num_writers=8, settings=SaveSettings())

    took_s = time.perf_counter() - start_s
    grown = (peak_since_reset() - before) / 2**20
    total = sum(file.num_bytes for file in source.files)
    print(
        f"reshard of {total / 2**30:.1f} GiB, 1 to 8 writers: {took_s:.1f} s, {total / took_s / 2**30:.2f} GiB/s; "
        f"{grown:.0f} MiB more than before at the peak ({held / 2**20:.0f} MiB of program and state before)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the state that is saved and loaded")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument(
        "--reshard-gib", type=float, default=0, help="also reshard a checkpoint of this size; it needs twice that on the disk"
    )
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: a temporary directory)")
    parser.add_argument("--async-save", action="store_true", help="only what Checkpointer.save in the background costs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as base:
        if arguments.async_save:
            for dtype in (torch.float32, torch.bfloat16):
                for layers, width in ((26, 1024), (52, 724), (104, 1024)):
                    async_save(Path(base), layers, width, dtype, arguments.repetitions)
            return
        if arguments.reshard_gib:
            resharded(Path(base), arguments.reshard_gib)
        save_and_load(Path(base), arguments.mib * MIB, arguments.repetitions)
        background(Path(base), arguments.mib * MIB, arguments.repetitions)


if __name__ == "__main__":
    main()
