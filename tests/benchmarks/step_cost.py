"""Seconds per step beside torch DDP, same model, same optimizer kernel, interleaved step by step in one run.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tests/benchmarks/step_cost.py [gpt|tensors]

Every system starts from the same weights, sees the same batches, and must end with the same loss.
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import megabucket as mb

WARMUPS, REPETITIONS = 3, 25


class Gpt(torch.nn.Module):
    """About 11 M parameters in 75 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, 384)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True, norm_first=True) for _ in range(6)
        )
        self.head = torch.nn.Linear(384, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class ManyTensors(torch.nn.Module):
    """About 15.8 M parameters in 1,500 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(145, 145) for _ in range(750))
        self.embedding = torch.nn.Embedding(256, 145)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens).mean(1, keepdim=True)
        for layer in self.layers:
            hidden = hidden + layer(hidden) * 0.01
        return hidden @ self.embedding.weight.t()


MODELS = {"gpt": (Gpt, (4, 64)), "tensors": (ManyTensors, (8, 8))}


def adamw(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def torch_ddp(module: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = TorchDDP(module, gradient_as_bucket_view=True)
    return model, adamw(model.parameters())


def no_sync_at_all(module: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return module, adamw(module.parameters())


def ours_all_reduce(module: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = mb.DistributedDataParallel(module, mb.DistributedDataParallelConfig(bucket_cap_mb=25))
    return model, adamw(model.parameters())


def ours_all_reduce_flat(module: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = mb.DistributedDataParallel(module, mb.DistributedDataParallelConfig(bucket_cap_mb=25))
    return model, mb.DistributedOptimizer(adamw(model.parameters()), model)


def ours_reduce_scatter(module: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_cap_mb=25)
    model = mb.DistributedDataParallel(module, config)
    return model, mb.DistributedOptimizer(adamw(model.parameters()), model)


def ours_reduce_scatter_gather(module: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True, bucket_cap_mb=25)
    model = mb.DistributedDataParallel(module, config)
    return model, mb.DistributedOptimizer(adamw(model.parameters()), model)


SYSTEMS = {
    "no synchronisation": no_sync_at_all,
    "torch DDP": torch_ddp,
    "megabucket all-reduce, plain AdamW": ours_all_reduce,
    "megabucket all-reduce, flat AdamW": ours_all_reduce_flat,
    "megabucket reduce-scatter": ours_reduce_scatter,
    "megabucket reduce-scatter, gather in forward": ours_reduce_scatter_gather,
}


def stepper(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, int]
) -> Callable[[int], tuple[float, float]]:
    def step(index: int) -> tuple[float, float]:
        generator = torch.Generator().manual_seed(97 * index + dist.get_rank())
        tokens = torch.randint(0, 256, shape, generator=generator)
        dist.barrier()
        start_s = time.perf_counter()
        output = model(tokens)
        loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), tokens[:, : output.shape[1]].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start_s, loss.item()

    return step


def main(name: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    make, shape = MODELS[name]
    torch.manual_seed(0)
    module = make()
    steps = {label: stepper(*build(copy.deepcopy(module)), shape) for label, build in SYSTEMS.items()}
    seconds: dict[str, list[float]] = {label: [] for label in steps}
    losses: dict[str, float] = {}
    for index in range(WARMUPS + REPETITIONS):
        for label, step in steps.items():
            elapsed_s, losses[label] = step(index)
            if index >= WARMUPS:
                seconds[label].append(elapsed_s)
    if dist.get_rank() == 0:
        numel = sum(param.numel() for param in module.parameters())
        print(f"{name}: {numel / 1e6:.1f} M parameters, {len(list(module.parameters()))} tensors, torch {torch.__version__}")
        print(
            f"{dist.get_world_size()} ranks, {REPETITIONS} interleaved steps; ratio to torch DDP is the median of paired ratios"
        )
        for label, values in seconds.items():
            ratios = [theirs / ours for theirs, ours in zip(seconds["torch DDP"], values, strict=True)]
            low, median, high = statistics.quantiles(ratios, n=4)
            print(
                f"  {label:<46}{statistics.median(values) * 1e3:8.1f} ms (best {min(values) * 1e3:7.1f})"
                f"   {median:5.2f}x (quartiles {low:.2f} to {high:.2f})   last loss {losses[label]:.5f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    for model_name in sys.argv[1:] or ["gpt"]:
        main(model_name)
