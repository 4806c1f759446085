"""A checkpoint that 0.1.0-dev (commit 95b15ed) has written on two ranks, in version 1 of the format, loads bit by bit.

Two steps of AdamW with two groups of parameters, on a model in bfloat16 with a channels-last weight, running statistics and a
frozen parameter; sharded, buckets of 20 elements.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch

import megabucket as mb
from megabucket.checkpoint.canonical import empty_piece
from megabucket.checkpoint.offline import compare
from megabucket.testing import LoopbackWorld

GOLDEN = Path(__file__).parent / "golden_0_1_0_dev"

# The first 16 digits of the SHA-256 of the values of each tensor, taken with the safetensors library.
DIGESTS = {
    "extra.tensor": "ab25350e3e65efeb",
    "local.1.norm.running_mean": "a9e76a450cd5fb39",
    "local.1.norm.running_var": "c5a65f53fff8fe6a",
    "model.conv.bias": "6f00c2bf6a7a41fc",
    "model.conv.weight": "cadd5ccfe2ecfae4",
    "model.frozen": "b7056da3710847b2",
    "model.last.bias": "16fd3f58fb676abc",
    "model.last.weight": "bdd94dbc218acbbc",
    "model.norm.bias": "24d1bcb01aec6f0e",
    "model.norm.num_batches_tracked": "d86e8112f3c4c444",
    "model.norm.running_mean": "5de15507479ac229",
    "model.norm.running_var": "6ad4e9b6bee2f6f6",
    "model.norm.weight": "9b009691d44ecb3b",
    "optim.main.conv.bias": "34b7346872df91a9",
    "optim.main.conv.weight": "015c2074ab72a4e6",
    "optim.main.last.bias": "536fda2e129433b8",
    "optim.main.last.weight": "3c4b6a97946556da",
    "optim.main.norm.bias": "e5ddc6ce04215c26",
    "optim.main.norm.weight": "91b0f7ebba2174a1",
    "optim.state.conv.bias.exp_avg": "c30ec51452133539",
    "optim.state.conv.bias.exp_avg_sq": "d764e73c6efbefbf",
    "optim.state.conv.weight.exp_avg": "32c9ac52cc9ab95d",
    "optim.state.conv.weight.exp_avg_sq": "f2947d42aff4f298",
    "optim.state.last.bias.exp_avg": "8349a7ea5a030323",
    "optim.state.last.bias.exp_avg_sq": "771f27a1a4ddac13",
    "optim.state.last.weight.exp_avg": "2e399ca38f1c8eaf",
    "optim.state.last.weight.exp_avg_sq": "1abc58e476b86af6",
    "optim.state.norm.bias.exp_avg": "6605f673f6db423c",
    "optim.state.norm.bias.exp_avg_sq": "e02fd340b8f88b6e",
    "optim.state.norm.weight.exp_avg": "87ebd4edec9e3e38",
    "optim.state.norm.weight.exp_avg_sq": "a2b451ba6056a8c1",
}


class Net(torch.nn.Module):
    """What the golden run has trained, with other values."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 2, 3)
        self.norm = torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, 3)
        self.frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.to(torch.bfloat16)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, inputs):
        return self.last(self.norm(self.conv(inputs).flatten(1))) + self.frozen


def test_every_tensor_is_read_as_it_was_written():
    stored = mb.open_checkpoint(GOLDEN)
    pieces = [empty_piece(info, 0, info.numel) for name, info in stored.tensors.items() if not name.startswith("rng.")]

    stored.read(pieces)

    assert json.loads((stored.path / "manifest.json").read_text())["version"] == 1
    assert stored.tensors["model.conv.weight"].order == (0, 2, 3, 1)
    found = {piece.info.name: hashlib.sha256(piece.values.view(torch.uint8).numpy()).hexdigest()[:16] for piece in pieces}
    assert found == DIGESTS


@pytest.mark.parametrize("sharded", [False, True], ids=["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_runs_of_any_number_of_ranks_load_it_and_save_the_same(tmp_path, size, sharded):
    world = LoopbackWorld(size, timeout_s=20)

    def program(rank):
        model = Net()
        matrices = [param for param in model.parameters() if param.dim() > 1]
        others = [param for param in model.parameters() if param.dim() <= 1 and param.requires_grad]
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1.0)
        config = mb.DistributedDataParallelConfig(use_distributed_optimizer=sharded, bucket_size=30)
        ddp = mb.DistributedDataParallel(model, config, communicator=world.communicator(rank))
        optimizer = mb.DistributedOptimizer(optimizer, ddp)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        loaded = mb.load_checkpoint(GOLDEN, ddp, optimizer, schedulers=schedule)
        assert (loaded.step, loaded.data_position, loaded.rng_restored) == (2, {"sample": 12}, size == 2)
        assert schedule.last_epoch == 2
        root, more = tmp_path / "again", {"data_position": loaded.data_position, "extras": loaded.extras}
        mb.save_checkpoint(root, ddp, optimizer, step=2, schedulers=schedule, **more)
        ddp(torch.ones(6, 2, 4, 4, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()

    world.run(program)

    found = compare(mb.open_checkpoint(GOLDEN), mb.open_checkpoint(tmp_path / "again"))
    own = ("rng.", "local.")  # of each rank: random numbers, running statistics
    assert [one for one in found.tensors if not one.name.startswith(own)] == []
    assert [one.name for one in found.values] == ([] if size == 2 else ["rng_ranks"])
