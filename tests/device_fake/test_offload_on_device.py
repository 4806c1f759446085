"""Phases without memory on a fake device: no unordered access, one wait of the host, and what host memory it takes."""

import copy

import pytest
import torch
from fake_accelerator import fake_device

import megabucket as mb
from megabucket.ddp.offload import _parts

LARGE = 1 << 20


def trained(phases, device=None):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Tanh(), torch.nn.Linear(300, 300)).bfloat16()
    ddp = mb.DistributedDataParallel(module, mb.DistributedDataParallelConfig(bucket_size=50_000))
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.01), ddp)
    for step in range(3):
        inputs = torch.randn(4, 300, generator=torch.Generator().manual_seed(step)).bfloat16()
        ddp(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if phases:
            before = device.num_host_waits
            given = ddp.offload(params=True)
            assert device.num_host_waits == before + 1
            assert given.held == []
            pinned = [host.nbytes for memory in ddp._away for host in memory._host]
            kept = sum(num for kind, num in given.freed_bytes.items() if kind != "grads")
            assert sum(pinned) == kept
            assert sum(1 << (num - 1).bit_length() for num in pinned) < 1.1 * kept  # as torch rounds
            ddp.onload()
            assert device.num_host_waits == before + 2
    values = [param.detach().clone() for param in ddp.parameters()]
    ddp.detach()
    return values


def test_nothing_is_read_before_it_is_there_and_the_host_waits_once_in_each_direction(monkeypatch):
    expected = copy.deepcopy(trained(False))

    with fake_device(monkeypatch) as device:
        found = trained(True, device)

    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("num_bytes", [1, 65_535, 65_536, 200_000, 3 * LARGE + 5, (1 << 30) + 12_345_678])
def test_pinned_memory_has_the_sizes_that_torch_rounds_to_but_for_a_rest(num_bytes):
    parts = list(_parts(num_bytes, are_pinned=True))

    assert sum(parts) == num_bytes
    assert all(part == 1 << (part.bit_length() - 1) for part in parts[:-1])
    assert sum(1 << (part - 1).bit_length() for part in parts) < num_bytes + 65_536
    assert list(_parts(num_bytes, are_pinned=False)) == [num_bytes]
