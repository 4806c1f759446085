"""Muon with owners beside Muon on every rank: step time, memory, bytes and the prediction of each, in one run.

    python tests/benchmarks/owners.py --ranks 2

Both wrappers live in the same gloo ranks, and take their steps in turn. ``sharded`` reduce-scatters, and each matrix has an
owner; ``all-reduced`` updates every matrix on every rank. AdamW has the rest of the parameters in both.

The predicted difference of the update is the formula of docs/optimizers.md: with F flop/s of a rank, the all-reduced update
takes sum(f) / F and the sharded one max over owners(f) / F. F is measured on the same matrices. The exchange comes on top.
"""

import argparse
import os
import socket
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from paired import interleave, ratio, timed

import megabucket as mb
from megabucket.layout import ModelLayout
from megabucket.layout.owners import newton_schulz_flop, plan_exchange, plan_owners

WIDTH, LAYERS, TOKENS = 512, 3, 64


class Blocks(torch.nn.Module):
    """Transformer blocks without an embedding: nearly all parameters are in matrices."""

    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS)]
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Run:
    """One wrapper and its optimizer."""

    def __init__(self, *, is_sharded: bool) -> None:
        torch.manual_seed(0)
        model = Blocks()
        # Buckets as a job of this size would have: about 1.5 M elements.
        config = mb.DistributedDataParallelConfig(use_distributed_optimizer=is_sharded, bucket_size=1_500_000)
        self.ddp = mb.DistributedDataParallel(model, config)
        matrices = [param for param in model.parameters() if param.ndim == 2]
        rest = [param for param in model.parameters() if param.ndim != 2]
        inner = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]
        self.optimizer = mb.DistributedOptimizer(inner, self.ddp, clip_grad=1.0)
        self.x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(self) -> None:
        self.ddp(self.x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, num: int) -> None:
        for _ in range(num):
            self.step()

    def state_bytes(self) -> int:
        """Return the bytes of state and main values of this rank, without those in the parameter buffer."""
        sharding = self.optimizer.sharding
        state = [value for of in sharding.stepped_state.values() for value in of.values() if isinstance(value, torch.Tensor)]
        return sum(value.nbytes for value in [*state, *(shard.main for shard in sharding.shards if shard.has_own_values)])


def flop_per_s(shapes: list[torch.Size]) -> float:
    """Return the flop/s of torch's Muon on these matrices."""
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    muon = torch.optim.Muon(params, lr=0.02)
    muon.step()
    seconds = [timed(muon.step)() for _ in range(3)]
    return sum(newton_schulz_flop(tuple(shape)) for shape in shapes) / statistics.median(seconds)


def main(rank: int, size: int, port: int, turns: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size)
    runs = {"sharded": Run(is_sharded=True), "all-reduced": Run(is_sharded=False)}
    for run in runs.values():
        run.steps(2)
    seconds = interleave({name: timed(partial(run.steps, 2)) for name, run in runs.items()}, repetitions=turns)

    layout = ModelLayout(tuple(buffer.layout for buffer in runs["sharded"].ddp.param_and_grad_buffers))
    names = {name: shape.shape for buffer in layout.buffers for name, shape in buffer.params.items() if len(shape.shape) == 2}
    plan = plan_owners(layout, names)
    matrices_numel = sum(torch.Size(shape).numel() for shape in names.values())
    sent = [
        sum(
            exchange.sent_numel(one) + exchange.received_numel(one)
            for buffer in layout.buffers
            for bucket in buffer.buckets
            if (exchange := plan_exchange(buffer, bucket, plan.owner_of, rank=one)) is not None
        )
        for one in range(size)
    ]
    rate = flop_per_s([torch.Size(shape) for shape in names.values()])
    state = torch.tensor([run.state_bytes() for run in runs.values()], dtype=torch.float64)
    largest = state.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.barrier()
    if rank == 0:
        middle, low, high = ratio(seconds, "all-reduced", "sharded")
        loads = plan.loads("dense")
        print(f"{size} ranks, {matrices_numel:,} elements in {len(names)} matrices, {turns} turns of 2 steps")
        for name, values in seconds.items():
            print(f"{name:12} {statistics.median(values) / 2 * 1e3:8.1f} ms a step (median)")
        print(f"all-reduced / sharded: {middle:.3f} ({low:.3f} to {high:.3f})")
        saved_s = (sum(loads) - max(loads)) / rate
        measured_s = (statistics.median(seconds["all-reduced"]) - statistics.median(seconds["sharded"])) / 2
        print(f"Newton-Schulz at {rate / 1e9:.1f} GFLOP/s a rank: {sum(loads) / rate * 1e3:.1f} ms on every rank, ", end="")
        print(f"{max(loads) / rate * 1e3:.1f} ms on the busiest owner")
        print(f"an update by owners saves {saved_s * 1e3:.1f} ms without its exchange; measured {measured_s * 1e3:.1f} ms")
        formula_bytes = 2 * 4 * matrices_numel / size * (size - 1) / size
        print(f"exchange: {max(sent) * 4:,} bytes on the busiest rank; (e_g + e_p) N / R (R - 1) / R = {formula_bytes:,.0f}")
        for name, most in zip(runs, largest.tolist(), strict=True):
            print(f"{name:12} {most:,.0f} bytes of state on the rank with most")
    for run in runs.values():
        run.ddp.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=10)
    chosen = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    start_s = time.perf_counter()
    mp.spawn(main, args=(chosen.ranks, free, chosen.turns), nprocs=chosen.ranks)
    print(f"{time.perf_counter() - start_s:.0f} s")
