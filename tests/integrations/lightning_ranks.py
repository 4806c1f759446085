"""Trains a small module under Lightning's own DDP and under megabucket; every rank runs it, the first one prints JSON.

python -m torch.distributed.run --nproc-per-node 2 lightning_ranks.py RUN_FOLDER
python -m torch.distributed.run --nproc-per-node 1 lightning_ranks.py RUN_FOLDER  # goes on with what two ranks have saved
python -m torch.distributed.run --nproc-per-node 2 lightning_ranks.py RUN_FOLDER  # and now with what one rank has saved
"""

import json
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision

import megabucket as mb
import megabucket.integrations.lightning as adapter
from megabucket.errors import ConfigError, OptimizerParametersError

STEPS = 6  # of each of two epochs
CLIP = 0.05  # every step has a norm above it, as the test asserts
GLOBAL_BATCH = 8

Weights = dict[str, torch.Tensor]


class Data(torch.utils.data.Dataset):
    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(num_samples, 16, generator=generator)
        self.targets = torch.randn(num_samples, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.GELU(), torch.nn.Linear(40, 4))
        self.norms: list[float] = []
        self.scales: list[float] = []

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_train_batch_end(self, *_: object) -> None:
        step = getattr(self.optimizers(), "last_step", None)
        if step is not None:
            self.norms.append(step.grad_norm)
        if self.trainer.scaler is not None:
            self.scales.append(self.trainer.scaler.get_scale())

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ManualNet(Net):
    """Accumulates over two batches by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        optimizer, is_last = self.optimizers(), index % 2 == 1
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(self.loss(batch) / 2)
        if is_last:
            self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


def make_trainer(root: Path, strategy: object, *, num_epochs: int = 2, **options: object) -> lightning.Trainer:
    return lightning.Trainer(
        default_root_dir=root,
        strategy=strategy,
        max_epochs=num_epochs,
        accelerator="cpu",
        devices=int(dist.get_world_size()),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False} | options,
    )


def make_loader(accumulate: int = 1) -> torch.utils.data.DataLoader:
    # Lightning's sampler gives rank r the samples r, r + ranks, ...: a step sees the same ones on any number of ranks.
    return torch.utils.data.DataLoader(
        Data(STEPS * GLOBAL_BATCH * accumulate), batch_size=GLOBAL_BATCH // dist.get_world_size()
    )


def train(root: Path, strategy: object, *, net: Net | None = None, accumulate: int = 1, **options: object) -> Net:
    net = net if net is not None else Net()
    ckpt_path = options.pop("ckpt_path", None)
    if net.automatic_optimization:
        options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": CLIP} | options
    save_to = options.pop("save_to", None)
    trainer = make_trainer(root, strategy, **options)
    loader = make_loader(accumulate)
    trainer.fit(net, loader, torch.utils.data.DataLoader(Data(8), batch_size=4), ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return net


def distance(found: Weights, reference: Weights) -> float:
    """How far weights are from the reference, in units of how far it has moved."""
    first = Net().state_dict()
    moved = max(float((reference[name] - first[name]).abs().max()) for name in reference)
    return max(float((found[name] - reference[name]).abs().max()) for name in reference) / moved


def scaling() -> MixedPrecision:
    """fp16 on a CPU, with a scale whose first steps overflow, and that grows every other step until they do again."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2))


def all_reduced() -> adapter.MegabucketStrategy:
    return adapter.MegabucketStrategy(mb.DistributedDataParallelConfig(bucket_size=200))


def overlapped() -> adapter.MegabucketStrategy:
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=200)
    return adapter.MegabucketStrategy(config)


def compare(root: Path, said: dict[str, object]) -> None:
    for precision in ("32-true", "bf16-mixed"):
        for accumulate in (1, 3):
            options = {"accumulate": accumulate, "precision": precision}
            reference = train(root, "ddp", **options).state_dict()
            for name, strategy in {"megabucket": "megabucket", "all-reduce": all_reduced(), "overlap": overlapped()}.items():
                net = train(root, strategy, **options)
                said[f"{name} {precision} {accumulate}"] = distance(net.state_dict(), reference)
                if name != "all-reduce":  # its optimizer is torch's, which tells no norm
                    said.setdefault("smallest norm", 1e9)
                    said["smallest norm"] = min(said["smallest norm"], *net.norms)
    reference, found = (train(root, strategy, plugins=[scaling()]) for strategy in ("ddp", "megabucket"))
    said["fp16"] = distance(found.state_dict(), reference.state_dict())
    said["scales"] = [found.scales, reference.scales]
    exact = train(root, "ddp").state_dict()
    said["bf16-true"] = [
        distance(train(root, strategy, precision="bf16-true").float().state_dict(), exact) for strategy in ("megabucket", "ddp")
    ]
    clipped, unclipped = (train(root, "ddp", gradient_clip_val=clip).state_dict() for clip in (CLIP, None))
    said["what clipping changes"] = distance(clipped, unclipped)
    reference = train(root, "ddp", net=ManualNet(), accumulate=2).state_dict()
    said["manual"] = distance(train(root, "megabucket", net=ManualNet(), accumulate=2).state_dict(), reference)


def resume(root: Path, said: dict[str, object]) -> None:
    during = ModelCheckpoint(dirpath=root / "during", filename="{epoch}", save_top_k=-1)
    whole = train(root, "megabucket", callbacks=[during], enable_checkpointing=True).state_dict()
    said["resumed from one of fit"] = distance(
        train(root, "megabucket", ckpt_path=root / "during" / "epoch=0.ckpt").state_dict(), whole
    )
    checkpoint, of_ddp = root / "half.ckpt", root / "ddp.ckpt"
    half = train(root, "megabucket", num_epochs=1, save_to=checkpoint)
    said["half is no whole"] = distance(half.state_dict(), whole)
    said["resumed"] = distance(train(root, "megabucket", ckpt_path=checkpoint).state_dict(), whole)
    said["resumed by ddp"] = distance(train(root, "ddp", ckpt_path=checkpoint).state_dict(), whole)
    train(root, "ddp", num_epochs=1, save_to=of_ddp)
    said["resumed from ddp"] = distance(train(root, "megabucket", ckpt_path=of_ddp).state_dict(), whole)
    said["plain after fit"] = [
        *is_plain(half),
        [type(optimizer).__name__ for optimizer in half.trainer.optimizers] == ["AdamW"],
    ]
    whole = train(root, "megabucket", plugins=[scaling()])
    train(root, "megabucket", plugins=[scaling()], num_epochs=1, save_to=root / "scaled.ckpt")
    resumed = train(root, "megabucket", plugins=[scaling()], ckpt_path=root / "scaled.ckpt")
    said["fp16 resumed"] = [distance(resumed.state_dict(), whole.state_dict()), resumed.scales, whole.scales[STEPS:]]


def is_plain(module: torch.nn.Module) -> list[bool]:
    """Return whether no parameter has a place in a buffer, and whether each has a storage of its own."""
    params = list(module.parameters())
    return [
        not any(hasattr(param, "main_grad") for param in params),
        len({param.untyped_storage().data_ptr() for param in params}) == len(params),
    ]


def resume_from(root: Path, said: dict[str, object], *, saved_by: int) -> None:
    """Go on with what another number of ranks has saved, and save what the other number goes on with."""
    whole = train(root, "megabucket").state_dict()
    if saved_by == 2:
        train(root, "megabucket", num_epochs=1, save_to=root / "half of 1.ckpt")
    checkpoint = root / ("half.ckpt" if saved_by == 2 else "half of 1.ckpt")
    said["resumed"] = distance(train(root, "megabucket", ckpt_path=checkpoint).state_dict(), whole)
    whole, _ = fabric_run("megabucket", folder=root)
    found, norms = fabric_run("megabucket", folder=root, saved_by=saved_by)
    said["fabric resumed"] = [distance(found, whole), len(norms)]


def fabric_run(
    strategy: str,
    accumulate: int = 1,
    precision: str | None = "32-true",
    plugin: object = None,
    *,
    folder: Path | None = None,
    saved_by: int = 0,
) -> tuple[Weights, list[float]]:
    """Train with Fabric; save in ``folder`` after half of the steps, or begin with what so many ranks have saved there."""
    fabric = lightning.Fabric(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, precision=precision, plugins=plugin
    )
    fabric.launch()
    plain = Net().net
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    model, optimizer = fabric.setup(plain, optimizer)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if saved_by:
        fabric.load(folder / f"fabric of {saved_by}.ckpt", state)
    norms = []
    for index, (inputs, targets) in enumerate(fabric.setup_dataloaders(make_loader(2 * accumulate))):
        if saved_by and index < STEPS * accumulate:
            continue
        is_last = index % accumulate == accumulate - 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(torch.nn.functional.mse_loss(model(inputs), targets) / accumulate)
        if is_last:
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=CLIP)))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if folder is not None and not saved_by and index == STEPS * accumulate - 1:
            fabric.save(folder / f"fabric of {fabric.world_size}.ckpt", state)
    weights = {f"net.{name}": value.clone() for name, value in model.state_dict().items()}
    fabric.strategy.teardown()
    assert strategy == "ddp" or is_plain(plain) == [True, True]
    return weights, norms


class FailsOnTheSecondRank(Net):
    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        if index == 2 and dist.get_rank() == 1:
            raise ValueError("a bad batch")
        return super().training_step(batch, index)


def failure_on_one_rank(root: Path, strategy: object) -> list[list[object]]:
    """Return, of each rank, the error and whether the module is a plain one after it."""
    net, found = FailsOnTheSecondRank(), ["nothing"]
    try:
        train(root, strategy, net=net)
    except Exception as error:
        found = [type(error).__name__]
    found.append(not hasattr(next(net.parameters()), "main_grad"))
    of_ranks: list[list[object]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, found)
    return of_ranks


def text_of_refusal(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except (ConfigError, OptimizerParametersError) as error:
        return str(error)
    return "not refused"


def refusals() -> list[str]:
    return [
        text_of_refusal(attempt)
        for attempt in (
            lambda: adapter.MegabucketStrategy(bucket_cap_mb=3),
            lambda: adapter.MegabucketStrategy(ddp_comm_hook=print, ddp_comm_state={}),
            lambda: make_trainer(Path(), "megabucket", gradient_clip_val=1.0, gradient_clip_algorithm="value").fit(
                Net(), make_loader()
            ),
        )
    ]


def main() -> None:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "megabucket"):
        logging.getLogger(name).setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    root, said = Path(sys.argv[1]), {}
    if dist.get_world_size() == 1:
        resume_from(root, said, saved_by=2)
    elif (root / "half of 1.ckpt").exists():
        resume_from(root, said, saved_by=1)
    else:
        compare(root, said)
        resume(root, said)
        for precision in ("32-true", "bf16-mixed"):
            for accumulate in (1, 3):
                reference, norms = fabric_run("ddp", accumulate, precision)
                weights, found = fabric_run("megabucket", accumulate, precision)
                said[f"fabric {precision} {accumulate}"] = distance(weights, reference)
                said[f"fabric norms {precision} {accumulate}"] = [found, norms]
        plugins = [FabricMixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0)) for _ in range(2)]
        scaled = [
            fabric_run(strategy, 1, None, plugin) for strategy, plugin in zip(("megabucket", "ddp"), plugins, strict=True)
        ]
        said["fabric fp16"] = distance(scaled[0][0], scaled[1][0])
        said["fabric norms fp16"] = [scaled[0][1], scaled[1][1]]
        whole, _ = fabric_run("megabucket", folder=root)
        found, norms = fabric_run("megabucket", folder=root, saved_by=2)
        said["fabric resumed"] = [distance(found, whole), len(norms)]
        said["refusals"] = refusals()
        said["failure on one rank"] = [failure_on_one_rank(root, strategy) for strategy in ("megabucket", all_reduced())]
    if dist.get_rank() == 0:
        print("SAID " + json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
