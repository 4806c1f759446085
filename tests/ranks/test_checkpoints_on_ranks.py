"""Checkpoints on gloo: a run that was resumed is the run that was not interrupted, bit by bit.

The first model is an ordinary one, with dropout, so each rank draws random numbers of its own. The gradients of the second are
integers and do not depend on the weights: sums over any number of ranks are exact, so a run that changes its number of ranks
must agree bit by bit with one process of plain torch that never stopped.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pool import Rank, WorkerPool

import megabucket as mb
from megabucket.errors import CheckpointInvalidError, CheckpointMismatchError, CheckpointNotSavedError

pytestmark = pytest.mark.dist


class Net(torch.nn.Module):
    """A convolution in channels-last order, a normalization with running statistics, dropout, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm1d(16)
        self.first = torch.nn.Linear(16, 30)
        self.second = torch.nn.Linear(30, 30)
        self.third = torch.nn.Linear(30, 30)
        self.third.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x.unsqueeze(1)).flatten(1)
        x = torch.nn.functional.dropout(self.first(self.norm(x)).tanh(), 0.3)
        return self.third(self.second(x).tanh())


class Run:
    """A run with everything that a checkpoint must bring back."""

    def __init__(self, rank: Rank, seed: int, mode: str, dtype: torch.dtype, *, overlaps: bool) -> None:
        torch.manual_seed(seed)
        model = Net().to(dtype)
        torch.manual_seed(100 * seed + rank.index)
        random.seed(100 * seed + rank.index)
        sharded = mode == "reduce-scatter"
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in model.parameters() if p.dim() > 1]},
                {"params": [p for p in model.parameters() if p.dim() < 2]},
            ],
            lr=0.01,
        )
        config = mb.DistributedDataParallelConfig(
            use_distributed_optimizer=sharded,
            overlap_grad_reduce=overlaps,
            overlap_param_gather=sharded and overlaps,
            bucket_size=500,
            grad_reduce_in_fp32=mode != "plain",
        )
        self.ddp = mb.DistributedDataParallel(model, config, process_group=rank.group)
        if mode != "plain":
            optimizer = mb.DistributedOptimizer(optimizer, self.ddp, clip_grad=1.0)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        self.optimizer, self.scheduler, self.dtype, self.sample = optimizer, scheduler, dtype, rank.index
        self.stride = rank.size
        self.losses: list[float] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.sample)
            x = torch.randn(6, 4, 4, generator=generator).to(self.dtype) * random.choice([0.5, 1.0, 2.0])
            self.sample += self.stride
            loss = self.ddp(x).float().square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.losses.append(loss.item())

    def checkpointer(self, root: str, **more: Any) -> mb.Checkpointer:
        return mb.Checkpointer(root, self.ddp, self.optimizer, schedulers=self.scheduler, **more)

    def outcome(self) -> list[Any]:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return [self.losses[-4:], rates, torch.rand(1), random.random(), *self.ddp.state_dict().values()]


def run_through(rank: Rank, root: str, mode: str, dtype: torch.dtype, overlaps: bool, asynchronous: bool) -> list[Any]:
    run = Run(rank, 1, mode, dtype, overlaps=overlaps)
    with run.checkpointer(root, asynchronous=asynchronous) as checkpointer:
        run.train(3)
        checkpointer.save(3, data_position=run.sample - rank.index)
        run.train(4)
    return run.outcome()


def resume(rank: Rank, root: str, mode: str, dtype: torch.dtype, overlaps: bool, asynchronous: bool) -> list[Any]:
    run = Run(rank, 2, mode, dtype, overlaps=overlaps)
    run.train(1)
    loaded = run.checkpointer(root).load()
    assert loaded.step == 3
    run.sample = loaded.data_position + rank.index
    run.train(4)
    return run.outcome()


def are_equal(one: Sequence[Any], other: Sequence[Any]) -> list[bool]:
    return [torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("mode", "overlaps", "asynchronous"),
    [
        ("reduce-scatter", True, True),
        ("reduce-scatter", False, False),
        ("all-reduce", True, False),
        ("all-reduce", False, True),
        ("plain", True, False),
    ],
    ids=["scatter_overlapped", "scatter_in_turn", "all_reduce_overlapped", "all_reduce_in_turn", "plain"],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    pool: WorkerPool, tmp_path: Any, mode: str, overlaps: bool, asynchronous: bool, dtype: torch.dtype
) -> None:
    expected = pool.run(run_through, str(tmp_path), mode, dtype, overlaps, asynchronous, ranks=2)

    found = pool.run(resume, str(tmp_path), mode, dtype, overlaps, asynchronous, ranks=2)

    for rank in range(2):
        assert all(are_equal(found[rank], expected[rank])), are_equal(found[rank], expected[rank])
    assert expected[0][2] != expected[1][2], "the ranks draw the same random numbers, so this shows nothing about them"


# Any number of ranks #

NUMELS = {"a": 100, "b": 300, "c": 7, "d": 1}
SAMPLES = 12  # of a step, shared by 1, 2, 3 or 4 ranks


class Vectors(torch.nn.Module):
    """Named vectors; the gradient of each is the factor it is multiplied by."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, numel in NUMELS.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(numel, generator=generator).to(dtype)))

    def forward(self, factors: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(param.float() * factors[name]).sum() for name, param in self.named_parameters()]).sum()


def mean_factors(samples: Sequence[int]) -> dict[str, torch.Tensor]:
    """The mean over samples, each a multiple of 12 * 12: exact for any number of ranks and samples of a rank."""
    found = {name: torch.zeros(numel) for name, numel in NUMELS.items()}
    for sample in samples:
        generator = torch.Generator().manual_seed(sample)
        for name, numel in NUMELS.items():
            found[name] += 144.0 * torch.randint(-1, 2, (numel,), generator=generator)
    return {name: total / len(samples) for name, total in found.items()}


def stretch(
    rank: Rank, root: str, first: int, steps: int, mode: str, bucket_size: int | None, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], Any]:
    """Train some steps from where the last checkpoint is, save, and return weights and optimizer state."""
    model = Vectors(first, dtype)
    sharded = mode == "reduce-scatter"
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = mb.DistributedDataParallelConfig(
        use_distributed_optimizer=sharded, overlap_param_gather=sharded, bucket_size=bucket_size, grad_reduce_in_fp32=True
    )
    ddp = mb.DistributedDataParallel(model, config, process_group=rank.group)
    if mode != "plain":
        optimizer = mb.DistributedOptimizer(optimizer, ddp)
    if first:
        loaded = mb.load_checkpoint(root, ddp, optimizer)
        assert loaded.step == first
        assert loaded.data_position == first * SAMPLES
    for step in range(first, first + steps):
        own = range(step * SAMPLES + rank.index, (step + 1) * SAMPLES, rank.size)
        ddp(mean_factors(own)).backward()
        optimizer.step()
        optimizer.zero_grad()
    done = first + steps
    mb.save_checkpoint(root, ddp, optimizer, step=done, data_position=done * SAMPLES, keep_last=None)
    return {name: tensor.clone() for name, tensor in ddp.state_dict().items()}, optimizer.state_dict()


def alone(steps: int, dtype: torch.dtype) -> tuple[Vectors, torch.optim.Optimizer]:
    """Plain torch in one process: float32 parameters that begin as the rounded ones do."""
    model = Vectors(0, dtype).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        model(mean_factors(range(step * SAMPLES, (step + 1) * SAMPLES))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_two_three_one_and_four_ranks_take_over_from_each_other(pool: WorkerPool, tmp_path: Any, dtype: torch.dtype) -> None:
    done = 0
    plan = [
        (2, "reduce-scatter", 128),
        (3, "all-reduce", None),
        (1, "reduce-scatter", 10_000),
        (4, "reduce-scatter", 1),
        (2, "all-reduce" if dtype == torch.bfloat16 else "plain", 200),
    ]

    for ranks, mode, bucket_size in plan:
        results = pool.run(stretch, str(tmp_path), done, 2, mode, bucket_size, dtype, ranks=ranks)
        done += 2

        model, optimizer = alone(done, dtype)
        for weights, state_dict in results:
            for index, (name, param) in enumerate(model.named_parameters()):
                assert torch.equal(weights[name], param.detach().to(dtype)), (ranks, name)
                for key, value in optimizer.state[param].items():
                    assert torch.equal(state_dict["state"][index][key], value), (ranks, name, key)


# Faults #


def save_twice(rank: Rank, root: str) -> None:
    stretch(rank, root, 0, 1, "reduce-scatter", 128, torch.float32)
    stretch(rank, root, 1, 1, "reduce-scatter", 128, torch.float32)


def try_to_load(rank: Rank, root: str, wrong_on: int, what: str) -> list[Any]:
    """Load what cannot be loaded, then train on: returns the text of the error and whether nothing had changed."""
    model = Vectors(5, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01) if what == "optimizer" else torch.optim.AdamW(model.parameters())
    ddp = mb.DistributedDataParallel(
        model, mb.DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=128), process_group=rank.group
    )
    distributed = mb.DistributedOptimizer(optimizer, ddp)

    def step() -> None:
        ddp(mean_factors([rank.index])).backward()
        distributed.step()
        distributed.zero_grad()

    step()
    before = [param.detach().clone() for param in model.parameters()], distributed.state_dict()
    with pytest.raises((CheckpointMismatchError, CheckpointInvalidError)) as caught:
        mb.load_checkpoint(root, ddp, distributed, schedulers=None)
    after = [param.detach().clone() for param in model.parameters()], distributed.state_dict()
    same = all(map(torch.equal, before[0], after[0])) and all(
        torch.equal(before[1]["state"][index][key], after[1]["state"][index][key])
        for index in before[1]["state"]
        for key in before[1]["state"][index]
    )
    step()
    return [type(caught.value).__name__, str(caught.value), same]


@pytest.mark.parametrize("what", ["flipped", "deleted", "optimizer"])
def test_a_load_that_fails_is_one_error_and_changes_nothing(pool: WorkerPool, tmp_path: Any, what: str) -> None:
    pool.run(save_twice, str(tmp_path), ranks=2)
    victim = max((tmp_path / "step-00000002").glob("*.safetensors"))
    if what == "flipped":
        raw = bytearray(victim.read_bytes())
        raw[len(raw) // 2] ^= 1
        victim.write_bytes(raw)
    elif what == "deleted":
        victim.unlink()

    results = pool.run(try_to_load, str(tmp_path), 1, what, ranks=3)

    assert results[0] == results[1] == results[2]
    kind, text, same = results[0]
    assert same
    assert kind == ("CheckpointMismatchError" if what == "optimizer" else "CheckpointInvalidError")
    assert ("the optimizer was AdamW and is SGD" if what == "optimizer" else victim.name) in text


def save_nowhere(rank: Rank, root: str) -> str:
    model = Vectors(5, torch.float32)
    ddp = mb.DistributedDataParallel(model, process_group=rank.group)
    with pytest.raises(CheckpointNotSavedError) as caught:
        mb.save_checkpoint(root if rank.index else f"{root}/file/below", ddp, step=1)
    ddp(mean_factors([0])).backward()  # training goes on
    return str(caught.value)


def test_a_save_that_fails_on_one_rank_is_one_error_on_all(pool: WorkerPool, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")

    texts = pool.run(save_nowhere, str(tmp_path), ranks=3)

    assert texts[0] == texts[1] == texts[2]
    assert "step 1: the checkpoint was not saved: rank 0:" in texts[0]
