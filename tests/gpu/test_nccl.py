"""Two ranks over NCCL, each on a GPU of its own: both modes train like one process with the whole batch. Skipped elsewhere."""

import pytest
import torch
import torch.distributed as dist
from slow_gradient import Slow

import megabucket as mb

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices on this machine"),
]


class Branches(torch.nn.Module):
    """Two layers on streams of their own, which wait before they hand out their gradients."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))

    def forward(self, inputs):
        current, results = torch.cuda.current_stream(), []
        for layer in self.layers:
            stream = torch.cuda.Stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                results.append(Slow.apply(layer(inputs)))
            current.wait_stream(stream)
        return sum(results)


def batch(rank, step):
    return torch.linspace(-1, 1, 16 * 64).view(16, 64) * (rank + 1) + step


def model():
    torch.manual_seed(0)
    return Branches()


def train(rank, folder, fields):
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    ddp = mb.DistributedDataParallel(model().cuda(), mb.DistributedDataParallelConfig(bucket_size=1, **fields))
    optimizer = mb.DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.01), ddp)
    for step in range(3):
        ddp(batch(rank, step).cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ddp.finish_param_sync()
    if rank == 0:
        torch.save({name: param.cpu() for name, param in ddp.module.named_parameters()}, f"{folder}/weights")
    ddp.detach()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "fields",
    [{}, {"use_distributed_optimizer": True}, {"use_distributed_optimizer": True, "overlap_param_gather": True}],
    ids=["all-reduce", "reduce-scatter", "gather overlapped"],
)
def test_two_ranks_train_like_one_process(fields, tmp_path):
    torch.multiprocessing.spawn(train, args=(str(tmp_path), fields), nprocs=2)
    plain = model().cuda()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for step in range(3):
        sum(plain(batch(rank, step).cuda()).square().mean() / 2 for rank in range(2)).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = torch.load(tmp_path / "weights", weights_only=True)

    assert all(torch.allclose(found[name], param.cpu(), rtol=1e-4) for name, param in plain.named_parameters())
