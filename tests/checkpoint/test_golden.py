"""Files of version 1 of the format, written on two ranks: what they hold is read bit by bit, and the same is written again.

Two steps of AdamW with two groups of parameters and an average, on a model in bfloat16 with a channels-last weight, running
statistics and a frozen parameter; sharded. This file, run with a directory, writes such files there.
"""

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch

import megabucket as mb
from megabucket.checkpoint.canonical import empty_piece
from megabucket.checkpoint.offline import compare
from megabucket.testing import LoopbackWorld

GOLDEN = Path(__file__).parent / "golden_version_1"
EXTRAS = {"tensor": torch.arange(3), "plain": [(1, 2.5), b"\0\xff", float("inf"), {7: None}, 2**70, torch.tensor(0.5)]}

# What ``digests`` has returned for the golden files.
DIGESTS = {
    "extra.tensor": "ab25350e3e65efeb",
    "local.1.norm.running_mean": "922028e987841312",
    "local.1.norm.running_var": "87110ecd0bcadcae",
    "model.conv.bias": "89999b76cdebad69",
    "model.conv.weight": "2794b73faaafcedb",
    "model.frozen": "b64e2f17704206dc",
    "model.last.bias": "b32e272b099cd4dc",
    "model.last.weight": "d3a8e3bf11318df4",
    "model.norm.bias": "5783ed217f5f375a",
    "model.norm.num_batches_tracked": "d86e8112f3c4c444",
    "model.norm.running_mean": "2c9b65ef9222c1a1",
    "model.norm.running_var": "fa3aa8760ff105aa",
    "model.norm.weight": "8a7c10ec9d4f2d39",
    "optim.main.conv.bias": "c990144186d40d90",
    "optim.main.conv.weight": "7fcc85b7da466f13",
    "optim.main.last.bias": "7f50cee0261bf23e",
    "optim.main.last.weight": "5b5b105be4af41d7",
    "optim.main.norm.bias": "3108502e8a989c0b",
    "optim.main.norm.weight": "c90a87aac7d204cc",
    "optim.state.conv.bias.ema": "73fe87d95a1901ef",
    "optim.state.conv.bias.exp_avg": "1846c6af36b72bab",
    "optim.state.conv.bias.exp_avg_sq": "b95d626ef52d0ae7",
    "optim.state.conv.weight.ema": "6eafead9404f4eb3",
    "optim.state.conv.weight.exp_avg": "6da3f9f6b8002378",
    "optim.state.conv.weight.exp_avg_sq": "8d43e3ed34b1fc53",
    "optim.state.last.bias.ema": "536f51d9de2b4b53",
    "optim.state.last.bias.exp_avg": "e97237c9141c5ca9",
    "optim.state.last.bias.exp_avg_sq": "a9353824e6974881",
    "optim.state.last.weight.ema": "76de600a5aa6d929",
    "optim.state.last.weight.exp_avg": "484f8be052cebff8",
    "optim.state.last.weight.exp_avg_sq": "7e35de9fdab0cf0c",
    "optim.state.norm.bias.ema": "4249b1ddfdfcc894",
    "optim.state.norm.bias.exp_avg": "2474a18519043548",
    "optim.state.norm.bias.exp_avg_sq": "0b4229f02fc4e565",
    "optim.state.norm.weight.ema": "787d0d80cc369e15",
    "optim.state.norm.weight.exp_avg": "6ea3326bd474203a",
    "optim.state.norm.weight.exp_avg_sq": "0285ebb79c530a1c",
}


class Net(torch.nn.Module):
    """The model of the golden run."""

    def __init__(self, value):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 2, 3)
        self.norm = torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, 3)
        self.frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.linspace(-value, value, param.numel()).reshape(param.shape))
        self.to(torch.bfloat16)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, inputs):
        return self.last(self.norm(self.conv(inputs).flatten(1))) + self.frozen


class Run:
    """One rank of a run like the golden one."""

    def __init__(self, communicator, *, value=0.0, sharded=True, bucket_size=20):
        model = Net(value)
        matrices = [param for param in model.parameters() if param.dim() > 1]
        others = [param for param in model.parameters() if param.dim() <= 1 and param.requires_grad]
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=0.25)
        config = mb.DistributedDataParallelConfig(use_distributed_optimizer=sharded, bucket_size=bucket_size)
        self.ddp = mb.DistributedDataParallel(model, config, communicator=communicator)
        self.optimizer = mb.DistributedOptimizer(optimizer, self.ddp)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.5)
        self.average = mb.ShardedEMA(self.optimizer, decay=0.75)

    def step(self, seed):
        inputs = torch.rand(6, 2, 4, 4, generator=torch.Generator().manual_seed(seed)).bfloat16()
        self.ddp(inputs).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, root, *, data_position, extras):
        more = {"data_position": data_position, "extras": extras}
        mb.save_checkpoint(root, self.ddp, self.optimizer, step=2, schedulers=self.schedule, **more)


def write(root):
    """Write the golden files."""
    world = LoopbackWorld(2, timeout_s=20)

    def program(rank):
        run = Run(world.communicator(rank), value=0.5)
        for step in range(2):
            run.step(2 * step + rank)
            run.schedule.step()
            run.average.update()
        run.save(root, data_position={"sample": 12}, extras=EXTRAS)

    world.run(program)


def digests(root):
    """Return the first 16 digits of the SHA-256 of each tensor's values, in memory order."""
    stored = mb.open_checkpoint(root)
    pieces = [empty_piece(info, 0, info.numel) for name, info in stored.tensors.items() if not name.startswith("rng.")]
    stored.read(pieces)
    return {piece.info.name: hashlib.sha256(piece.values.view(torch.uint8).numpy()).hexdigest()[:16] for piece in pieces}


def test_every_tensor_is_read_as_it_was_written():
    stored = mb.open_checkpoint(GOLDEN)

    assert json.loads((stored.path / "manifest.json").read_text())["version"] == 1
    assert stored.tensors["model.conv.weight"].order == (0, 2, 3, 1)
    assert digests(GOLDEN) == DIGESTS


@pytest.mark.parametrize("sharded", [False, True], ids=["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_runs_of_any_number_of_ranks_load_it_and_save_the_same(tmp_path, size, sharded):
    world = LoopbackWorld(size, timeout_s=20)

    def program(rank):
        run = Run(world.communicator(rank), sharded=sharded, bucket_size=30)
        loaded = mb.load_checkpoint(GOLDEN, run.ddp, run.optimizer, schedulers=run.schedule)
        assert (loaded.step, loaded.data_position, loaded.rng_restored) == (2, {"sample": 12}, size == 2)
        assert loaded.extras["tensor"].tolist() == [0, 1, 2]
        assert loaded.extras["plain"] == EXTRAS["plain"]
        assert run.schedule.last_epoch == 2
        run.save(tmp_path / "again", data_position=loaded.data_position, extras=loaded.extras)
        run.step(rank)

    world.run(program)

    found = compare(mb.open_checkpoint(GOLDEN), mb.open_checkpoint(tmp_path / "again"))
    own = ("rng.", "local.")  # of each rank: random numbers, running statistics
    assert [one for one in found.tensors if not one.name.startswith(own)] == []
    assert [one.name for one in found.values] == ([] if size == 2 else ["rng_ranks"])


def test_the_same_run_writes_the_same_manifest_and_headers(tmp_path):
    world = LoopbackWorld(2, timeout_s=20)

    def program(rank):
        run = Run(world.communicator(rank))
        loaded = mb.load_checkpoint(GOLDEN, run.ddp, run.optimizer, schedulers=run.schedule)
        run.save(tmp_path, data_position=loaded.data_position, extras=loaded.extras)

    world.run(program)

    assert parts_of(tmp_path) == parts_of(GOLDEN)


def parts_of(root):
    """Return the manifest and the headers of the data files, without random numbers: the ranks are threads that share them."""
    path = mb.open_checkpoint(root).path
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["seal"]
    headers = []
    for file in manifest["files"]:
        contents = (path / file["name"]).read_bytes()
        header = json.loads(contents[8 : 8 + int.from_bytes(contents[:8], "little")])
        headers.append({name: entry for name, entry in header.items() if not name.startswith("rng.")})
        del file["sha256"], file["bytes"]
    manifest["tensors"] = {name: entry for name, entry in manifest["tensors"].items() if not name.startswith("rng.")}
    return json.dumps([manifest, headers])  # the order of keys included


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    sys.stdout.write(json.dumps(digests(sys.argv[1]), indent=4) + "\n")
