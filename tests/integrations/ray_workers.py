"""Trains a small module on two workers of Ray Train, under torch DDP and under megabucket; prints JSON.

python ray_workers.py RUN_FOLDER
"""

import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import ray
import ray.train.torch
import torch
from ray.train import Checkpoint, CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig

import megabucket as mb

STEPS, SAVED_AFTER, LOST_IN = 8, 3, 5
GLOBAL_BATCH = 8

Outcome = dict[str, object]


def make_module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.GELU(), torch.nn.Linear(40, 4))


def batch_of(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a batch that does not depend on the number of ranks."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(GLOBAL_BATCH, 16, generator=generator), torch.randn(GLOBAL_BATCH, 4, generator=generator)
    return inputs.chunk(size)[rank], targets.chunk(size)[rank]


def wrap(how: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    if how == "torch DDP":
        model = ray.train.torch.prepare_model(make_module())
    else:
        config = mb.DistributedDataParallelConfig(use_distributed_optimizer=how == "sharded", bucket_size=200)
        model = mb.DistributedDataParallel(make_module(), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, mb.DistributedOptimizer(optimizer, model) if how == "sharded" else optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, rank: int, size: int, steps: Iterable[int]) -> Outcome:
    losses = []
    for step in steps:
        inputs, targets = batch_of(step, rank, size)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = {name.removeprefix("module."): value.clone() for name, value in model.state_dict().items()}
    return {"losses": losses, "weights": weights}


def compare(settings: dict[str, str]) -> None:
    """Run on each worker: all three ways."""
    context = ray.train.get_context()
    ranks = {"rank": context.get_world_rank(), "size": context.get_world_size()}
    outcomes = {how: train(*wrap(how), **ranks, steps=range(STEPS)) for how in ("torch DDP", "sharded", "all-reduced")}
    torch.save(outcomes, Path(settings["root"]) / f"compared {ranks['rank']}.pt")


def save_and_lose(settings: dict[str, str]) -> None:
    """Run on each worker: save into the storage, lose rank 1 once, and go on from what was saved."""
    context, root = ray.train.get_context(), Path(settings["root"])
    ranks = {"rank": context.get_world_rank(), "size": context.get_world_size()}
    model, optimizer = wrap("sharded")
    saved = ray.train.get_checkpoint()
    first = 0 if saved is None else mb.load_checkpoint(saved.path, model, optimizer).step
    if saved is None:
        train(model, optimizer, **ranks, steps=range(SAVED_AFTER))
        # A folder of its own for each report, in the storage, which all workers see: nothing is uploaded.
        folder = root / "broken" / f"step-{SAVED_AFTER}"
        mb.save_checkpoint(folder, model, optimizer, step=SAVED_AFTER)
        saved_there = {"checkpoint": Checkpoint(folder), "checkpoint_upload_mode": CheckpointUploadMode.NO_UPLOAD}
        ray.train.report({"step": SAVED_AFTER}, **saved_there)
        ray.train.get_all_reported_checkpoints()  # returns when Ray has noted it: after an earlier loss it would begin anew
        train(model, optimizer, **ranks, steps=range(SAVED_AFTER, LOST_IN))
        if ranks["rank"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        train(model, optimizer, **ranks, steps=range(LOST_IN, STEPS))
    torch.save(
        {"first": first, **train(model, optimizer, **ranks, steps=range(first, STEPS))}, root / f"resumed {ranks['rank']}.pt"
    )


def run(root: Path, name: str, function: object, *, max_failures: int = 0) -> ray.train.Result:
    return ray.train.torch.TorchTrainer(
        function,
        train_loop_config={"root": str(root)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=name, storage_path=str(root), failure_config=FailureConfig(max_failures=max_failures)),
    ).fit()


def distance(found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - value).abs().max()) for name, value in reference.items())


def main() -> None:
    root, said = Path(sys.argv[1]), {}
    ray.init(num_cpus=2, include_dashboard=False)
    run(root, "compared", compare)
    of_ranks = [torch.load(root / f"compared {rank}.pt") for rank in range(2)]
    reference = of_ranks[0]["torch DDP"]["weights"]
    said["moved"] = distance(make_module().state_dict(), reference)
    for how in ("sharded", "all-reduced"):
        said[f"{how}: losses"] = [[of_rank[one]["losses"] for one in (how, "torch DDP")] for of_rank in of_ranks]
        said[f"{how}: weights"] = [distance(of_rank[how]["weights"], reference) for of_rank in of_ranks]

    saved = run(root, "broken", save_and_lose, max_failures=1).checkpoint.path
    said["checkpoint"] = str(Path(saved).relative_to(root))
    resumed = [torch.load(root / f"resumed {rank}.pt") for rank in range(2)]
    said["resumed from"] = [one["first"] for one in resumed]
    said["resumed: weights"] = [distance(one["weights"], of_ranks[0]["sharded"]["weights"]) for one in resumed]

    model, optimizer = wrap("sharded")  # alone, in this process
    first = mb.load_checkpoint(saved, model, optimizer).step
    alone = train(model, optimizer, rank=0, size=1, steps=range(first, STEPS))
    said["resumed alone"] = [first, distance(alone["weights"], reference)]
    print("SAID " + json.dumps(said))
    ray.shutdown()


if __name__ == "__main__":
    main()
