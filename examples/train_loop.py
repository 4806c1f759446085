"""The loop of the README on two ranks, in both modes, checked against each other.

torchrun --standalone --nproc-per-node 2 examples/train_loop.py
"""

import os

import torch
import torch.distributed as dist

import megabucket as mb


def make_module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))


def microbatches(rank: int, step: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [(torch.randn(16, 32, generator=generator), torch.randn(16, 8, generator=generator)) for _ in range(count)]


def train(config: mb.DistributedDataParallelConfig, *, steps: int = 20) -> dict[str, torch.Tensor]:
    model = mb.DistributedDataParallel(make_module(), config)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model, clip_grad=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for step in range(steps):
        batch = microbatches(model.communicator.rank, step, count=2)
        for inputs, targets in batch[:-1]:
            with model.no_sync():
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
        inputs, targets = batch[-1]
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # the last microbatch launches the buckets
        result = optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if model.communicator.rank == 0 and step % 10 == 9:
            print(f"  step {step + 1}: loss {loss.item():.4f}, gradient norm {result.grad_norm:.4f}")
    return {name: value.clone() for name, value in model.state_dict().items()}


def main() -> None:
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    weights = []
    for use_distributed_optimizer in (False, True):
        config = mb.DistributedDataParallelConfig(use_distributed_optimizer=use_distributed_optimizer, bucket_size=1000)
        if is_first:
            print("reduce-scatter, sharded optimizer" if use_distributed_optimizer else "all-reduce")
        weights.append(train(config))
    same = all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    if is_first:
        print(f"weights equal bit for bit: {same}")
    dist.barrier()  # no rank ends while another one communicates
    dist.destroy_process_group()
    assert same


if __name__ == "__main__":
    assert "RANK" in os.environ, __doc__
    main()
