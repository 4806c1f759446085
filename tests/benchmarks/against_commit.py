"""A step of this checkout beside a step of another one, and of torch DDP: one or two gloo ranks each, in turn, in one run.

    git worktree add ../before 95b15ed
    python tests/benchmarks/against_commit.py ../before

Ranks of all candidates live at the same time and wait on a pipe, so each turn measures them one right after the other. Prints
the median of the ratios with its quartiles (more than 1: this checkout is faster), and the peak memory of a rank.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve()
STEPS = {"gpt": 6, "tensors": 4}  # a turn
PATHS = ("sockets", "same host", "one rank")
CASES = [(model, mode, path) for model in STEPS for mode in ("all-reduce", "sharded") for path in PATHS]


class Gpt(torch.nn.Module):
    """4 layers of width 256: 4.4 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(2048, 256)
        layers = [torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True) for _ in range(4)]
        self.layers = torch.nn.ModuleList(layers)
        self.head = torch.nn.Linear(256, 2048, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Tensors(torch.nn.Module):
    """1,500 vectors of 512 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(512)) for _ in range(1500)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(vector * x).sum() for vector in self.vectors]).square().mean()


def make_step(model_name: str, mode: str, path: str, candidate: str):
    torch.manual_seed(0)
    model = Gpt() if model_name == "gpt" else Tensors()
    batch = torch.randint(0, 2048, (4, 64)) if model_name == "gpt" else torch.rand(512)
    if candidate == "torch":
        ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=4)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    else:
        import megabucket as mb

        is_sharded = mode == "sharded"
        config = mb.DistributedDataParallelConfig(
            bucket_size=1 << (20 if model_name == "gpt" else 17),
            use_distributed_optimizer=is_sharded,
            read_peer_memory=path == "same host",
        )
        ddp = mb.DistributedDataParallel(model, config)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        if is_sharded:
            optimizer = mb.DistributedOptimizer(optimizer, ddp, returns_grad_norm=False)

    def step() -> None:
        ddp(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def num_ranks(case: tuple[str, str, str]) -> int:
    return 1 if case[2] == "one rank" else 2


def serve(rank: int, port: int, candidate: str, case: tuple[str, str, str]) -> None:
    """One rank: runs a turn for each line of stdin, and answers with its seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks(case))
    step = make_step(*case, candidate)
    for _ in range(3):
        step()
    print("ready", flush=True)
    for _ in sys.stdin:
        dist.barrier()
        start_s = time.perf_counter()
        for _ in range(STEPS[case[0]]):
            step()
        print(time.perf_counter() - start_s, flush=True)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, flush=True)
    dist.destroy_process_group()


@dataclass
class Candidate:
    """One or two ranks, each at the end of a pipe."""

    ranks: list[subprocess.Popen]

    @staticmethod
    def start(name: str, root: Path, case: tuple[str, str, str]) -> "Candidate":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE), "--serve", json.dumps([port, name, case])]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for rank in range(num_ranks(case))
        ]
        candidate = Candidate(ranks)
        for rank in ranks:
            assert rank.stdout.readline().strip() == "ready"
        return candidate

    def turn(self) -> float:
        """Run one turn; return the seconds of the slower rank."""
        for rank in self.ranks:
            rank.stdin.write("\n")
            rank.stdin.flush()
        return max(float(rank.stdout.readline()) for rank in self.ranks)

    def stop(self) -> float:
        """End the ranks; return the peak memory of one in MiB."""
        for rank in self.ranks:
            rank.stdin.close()
        peak_mib = max(float(rank.stdout.readline()) for rank in self.ranks)
        for rank in self.ranks:
            rank.wait(timeout=60)
        return peak_mib


def compare(before: Path, case: tuple[str, str, str], *, num_turns: int) -> str:
    roots = {"before": before.resolve(), "now": HERE.parents[2]}
    if case[2] != "same host":
        roots["torch"] = HERE.parents[2]
    candidates = {name: Candidate.start(name, root, case) for name, root in roots.items()}
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(num_turns):
        order = list(candidates) if turn % 2 else list(candidates)[::-1]
        for name in order:
            seconds[name].append(candidates[name].turn())
    peaks = {name: candidate.stop() for name, candidate in candidates.items()}
    step_ms = 1e3 * statistics.median(seconds["now"]) / STEPS[case[0]]
    texts = [f"{', '.join(case):32} {step_ms:7.1f} ms a step"]
    for name in candidates:
        if name != "now":
            ratios = [other / own for other, own in zip(seconds[name], seconds["now"], strict=True)]
            low, median, high = statistics.quantiles(ratios, n=4)
            texts.append(f"{name} / now {median:.3f} [{low:.3f}, {high:.3f}]")
    texts.append(f"peak {peaks['now']:.0f} MiB, before {peaks['before']:.0f}")
    return "; ".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", type=Path, help="a checkout of the other commit")
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--only", default="", help="a part of the name of the cases to run")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        port, candidate, case = json.loads(arguments.serve)
        serve(arguments.rank, port, candidate, tuple(case))
        return
    for case in CASES:
        if arguments.only in ", ".join(case):
            print(compare(arguments.before, case, num_turns=arguments.turns), flush=True)


if __name__ == "__main__":
    main()
