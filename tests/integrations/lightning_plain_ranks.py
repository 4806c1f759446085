"""Torch's own optimizers under Lightning's DDP and under megabucket without shards; every rank runs it, the first prints JSON.

python -m torch.distributed.run --nproc-per-node 2 lightning_plain_ranks.py RUN_FOLDER
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
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy
from lightning_ranks import CLIP, GLOBAL_BATCH, STEPS, Data, Net, is_plain, make_loader, make_trainer, scaling

import megabucket as mb
import megabucket.integrations.lightning as adapter


def without_shards(**fields: object) -> mb.DistributedDataParallelConfig:
    return mb.DistributedDataParallelConfig(use_distributed_optimizer=False, **{"bucket_size": 200} | fields)


def megabucket(*, of_ddp: dict[str, object] | None = None, **fields: object) -> adapter.MegabucketStrategy:
    return adapter.MegabucketStrategy(without_shards(**fields), **of_ddp or {})


class Optimized(Net):
    """Steps with any one optimizer."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())


def lbfgs(params: object) -> torch.optim.Optimizer:
    # As many evaluations on each rank, whatever its own loss is.
    return torch.optim.LBFGS(params, lr=0.05, max_iter=3, tolerance_grad=0.0, tolerance_change=0.0)


def adafactor(params: object) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=0.02)


class Both(Net):
    """Muon for matrices and AdamW for vectors, on one loss that is accumulated over two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        optimizers, is_last = self.optimizers(), index % 2 == 1
        with self.trainer.strategy.block_backward_sync() if not is_last else torch.enable_grad():
            self.manual_backward(self.loss(batch) / 2)
        if is_last:
            for optimizer in optimizers:
                self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
            for schedule in self.lr_schedulers():
                schedule.step()

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[object]]:
        matrices = torch.optim.Muon([param for param in self.parameters() if param.ndim == 2], lr=0.02)
        vectors = torch.optim.AdamW([param for param in self.parameters() if param.ndim < 2], lr=0.02)
        schedules = [torch.optim.lr_scheduler.StepLR(one, step_size=3, gamma=0.5) for one in (matrices, vectors)]
        return [matrices, vectors], schedules


class Gan(Net):
    """A generator and a discriminator, with a loss and an optimizer each. ``toggles`` freezes the other one meanwhile."""

    def __init__(self, *, toggles: bool, clips_by: str | None = "value", clears_after: bool = False) -> None:
        super().__init__()
        self.automatic_optimization, self.toggles = False, toggles
        self.clips_by, self.clears_after = clips_by, clears_after
        torch.manual_seed(1)
        self.judge = torch.nn.Sequential(torch.nn.Linear(4, 20), torch.nn.GELU(), torch.nn.Linear(20, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> None:
        inputs, real = batch
        for optimizer, loss in zip(
            self.optimizers(),
            (
                lambda: torch.nn.functional.softplus(-self.judge(self.net(inputs))).mean(),
                lambda: (
                    torch.nn.functional.softplus(-self.judge(real)).mean()
                    + torch.nn.functional.softplus(self.judge(self.net(inputs).detach())).mean()
                ),
            ),
            strict=True,
        ):
            if self.toggles:
                self.toggle_optimizer(optimizer)
            if not self.clears_after:
                optimizer.zero_grad()
            self.manual_backward(loss())
            if self.clips_by is not None:
                self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm=self.clips_by)
            optimizer.step()
            if self.clears_after:
                optimizer.zero_grad()
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def validation_step(self, *_: object) -> None: ...

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(part.parameters(), lr=1e-2, betas=(0.5, 0.9)) for part in (self.net, self.judge)]


def train(root: Path, strategy: object, net: Net, *, accumulate: int = 1, **options: object) -> Net:
    if net.automatic_optimization:
        options = {"accumulate_grad_batches": accumulate} | options
    places = {name: options.pop(name, None) for name in ("save_to", "ckpt_path")}
    trainer = make_trainer(root, strategy, **options)
    loader = make_loader(accumulate)
    trainer.fit(net, loader, ckpt_path=places["ckpt_path"], weights_only=False)
    if places["save_to"] is not None:
        trainer.save_checkpoint(places["save_to"])
    return net


def distance(found: torch.nn.Module, reference: torch.nn.Module) -> float:
    pairs = zip(found.state_dict().values(), reference.state_dict().values(), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


CLIPPED = {f"clipped by {kind}": {"gradient_clip_val": CLIP, "gradient_clip_algorithm": kind} for kind in ("norm", "value")}
FINDING = {"find_unused_parameters": True}
CASES: dict[str, tuple[Callable[[], Net], dict[str, object], dict[str, object], dict[str, object]]] = {
    # name: module, fields of the config, arguments of DDPStrategy, arguments of the trainer
    "LBFGS": (lambda: Optimized(lbfgs), {}, {}, {}),
    "Adafactor": (lambda: Optimized(adafactor), {}, {}, {}),
    "Adafactor, accumulating": (lambda: Optimized(adafactor), {}, {}, {"accumulate": 3, **CLIPPED["clipped by value"]}),
    "AdamW, clipped by norm": (Net, {}, {}, CLIPPED["clipped by norm"]),
    "AdamW, clipped by value": (Net, {}, {}, CLIPPED["clipped by value"]),
    "AdamW, accumulating in bf16": (Net, {}, {}, {"accumulate": 3, "precision": "bf16-mixed", **CLIPPED["clipped by norm"]}),
    "Muon and AdamW": (Both, {}, {}, {"accumulate": 2}),
    "GAN": (lambda: Gan(toggles=False), {"unused_parameters": "zero"}, FINDING, {}),
    "GAN, toggled": (
        lambda: Gan(toggles=True),
        {"unused_parameters": "zero", "check_model_changes": False},
        FINDING,
        {},
    ),
    "GAN, finding unused": (lambda: Gan(toggles=False), {}, FINDING, {}),
    "GAN, toggled, finding unused": (lambda: Gan(toggles=True), {}, FINDING, {}),
}


def compare(root: Path, said: dict[str, object]) -> None:
    for name, (make, fields, of_ddp, options) in CASES.items():
        reference = train(root, DDPStrategy(**of_ddp), make(), **options)
        found = train(root, megabucket(of_ddp={} if "unused_parameters" in fields else of_ddp, **fields), make(), **options)
        said[name] = {
            "moved": distance(make(), reference),
            "distance": distance(found, reference),
            "is plain": is_plain(found),
            "optimizers": [type(one).__name__ for one in found.trainer.optimizers],
            "holds the parameters": all(
                any(param is own for own in found.parameters())
                for one in found.trainer.optimizers
                for group in one.param_groups
                for param in group["params"]
            ),
        }
    reference, found = (
        train(root, strategy, Net(), plugins=[scaling()], **CLIPPED["clipped by value"]) for strategy in ("ddp", megabucket())
    )
    said["fp16"] = {"distance": distance(found, reference), "scales": [found.scales, reference.scales]}


def resume(root: Path, said: dict[str, object]) -> None:
    """Between both strategies, with two optimizers."""
    whole = train(root, "ddp", Both(), accumulate=2)
    for first in ("ddp", "megabucket"):
        file = root / f"half of {first}.ckpt"
        strategies = {"ddp": "ddp", "megabucket": megabucket()}
        train(root, strategies[first], Both(), accumulate=2, num_epochs=1, save_to=file)
        for second in ("ddp", "megabucket"):
            strategies = {"ddp": "ddp", "megabucket": megabucket()}
            found = train(root, strategies[second], Both(), accumulate=2, ckpt_path=file)
            said[f"{first} to {second}"] = distance(found, whole)


def fabric_gan(strategy: object, folder: Path, *, resumes: bool = False) -> torch.nn.Module:
    """Two modules with an optimizer each; saves after half of the batches, or begins there."""
    fabric = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    net = Gan(toggles=False)
    plain = torch.nn.ModuleList([net.net, net.judge])
    parts = [fabric.setup(part, optimizer) for part, optimizer in zip(plain, net.configure_optimizers(), strict=True)]
    (maker, of_maker), (judge, of_judge) = parts
    state = {"maker": maker, "judge": judge, "of_maker": of_maker, "of_judge": of_judge}
    if resumes:
        fabric.load(folder / "fabric.ckpt", state, weights_only=False)
    for index, (inputs, real) in enumerate(fabric.setup_dataloaders(make_loader(2))):
        if resumes and index < STEPS:
            continue
        judge.requires_grad_(False)
        fabric.backward(torch.nn.functional.softplus(-judge(maker(inputs))).mean())
        judge.requires_grad_(True)
        fabric.clip_gradients(maker, of_maker, max_norm=CLIP)
        of_maker.step()
        fabric.backward(torch.nn.functional.softplus(torch.cat([judge(maker(inputs).detach()), -judge(real)])).mean())
        fabric.clip_gradients(judge, of_judge, clip_val=CLIP)
        of_judge.step()
        for optimizer in (of_maker, of_judge):
            optimizer.zero_grad()
        if index == STEPS - 1 and not resumes:
            fabric.save(folder / "fabric.ckpt", state)
    fabric.strategy.teardown()
    return plain


def fabric_pair(strategy: object, *, closure: bool = False, clip: str = "clip_val") -> torch.nn.Module:
    """One module with two optimizers, or with LBFGS and its closures, accumulating over two batches."""
    fabric = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    net = Both()
    made = [lbfgs(net.net.parameters())] if closure else net.configure_optimizers()[0]
    model, *optimizers = fabric.setup(net.net, *made)
    batches = list(fabric.setup_dataloaders(make_loader(2)))

    def backward(pair: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for is_last, (inputs, targets) in enumerate(pair):
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = torch.nn.functional.mse_loss(model(inputs), targets) / 2
                fabric.backward(loss)
        return loss

    for pair in zip(batches[::2], batches[1::2], strict=True):
        if closure:
            optimizers[0].step(lambda pair=pair: backward(pair))
            continue
        backward(pair)
        for optimizer in optimizers:
            fabric.clip_gradients(model, optimizer, **{clip: CLIP})
            optimizer.step()
    fabric.strategy.teardown()
    return net.net


def with_fabric(root: Path, said: dict[str, object]) -> None:
    def strategy() -> adapter.MegabucketFabricStrategy:
        return adapter.MegabucketFabricStrategy(without_shards(check_model_changes=False))

    reference, found = fabric_gan("ddp", root), fabric_gan(strategy(), root)
    said["Fabric, GAN"] = [distance(found, reference), *is_plain(found)]
    said["Fabric, GAN resumed"] = distance(fabric_gan(strategy(), root, resumes=True), reference)
    for name, closure in {"Fabric, Muon and AdamW": False, "Fabric, LBFGS": True}.items():
        found = fabric_pair(strategy(), closure=closure)
        said[name] = [distance(found, fabric_pair("ddp", closure=closure)), *is_plain(found)]


class HeadFirst(Net):
    """Its first layer is frozen at first."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(filter(lambda param: param.requires_grad, self.parameters()), lr=1e-2)


class Unfreezing(BaseFinetuning):
    def freeze_before_training(self, pl_module: lightning.LightningModule) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: lightning.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=2e-3)


class UnfreezingByHand(lightning.Callback):
    """Does the same, and keeps nothing about the groups of the optimizer."""

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        pl_module.net[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.current_epoch == 1:
            pl_module.net[0].requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": pl_module.net[0].parameters(), "lr": 2e-3})


def unfrozen_alone() -> Net:
    """Every rank computes the batches of all: torch DDP never reduces what was frozen when it wrapped the module."""
    net, data = HeadFirst(), Data(STEPS * GLOBAL_BATCH)
    num_ranks = dist.get_world_size()
    samplers = [torch.utils.data.DistributedSampler(data, num_ranks, rank) for rank in range(num_ranks)]  # as Lightning's
    net.net[0].requires_grad_(False)
    optimizer = net.configure_optimizers()
    for epoch in range(2):
        if epoch == 1:
            net.net[0].requires_grad_(True)
            optimizer.add_param_group({"params": net.net[0].parameters(), "lr": 2e-3})
        for sampler in samplers:
            sampler.set_epoch(epoch)
        of_ranks = (
            torch.utils.data.DataLoader(data, batch_size=GLOBAL_BATCH // num_ranks, sampler=sampler) for sampler in samplers
        )
        for batches in zip(*of_ranks, strict=True):
            (sum(map(net.loss, batches)) / num_ranks).backward()
            optimizer.step()
            optimizer.zero_grad()
    return net


def finetune(root: Path, said: dict[str, object]) -> None:
    reference = unfrozen_alone()
    for callback in (Unfreezing, UnfreezingByHand):
        for name, strategy in {"sharded": "megabucket", "without shards": megabucket()}.items():
            found = HeadFirst()
            try:
                train(root, strategy, found, callbacks=[callback()])
                said[f"{callback.__name__} {name}"] = distance(found, reference)
            except Exception as error:
                said[f"{callback.__name__} {name}"] = f"{type(error).__name__}: {error}"


def main() -> None:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "megabucket"):
        logging.getLogger(name).setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    root, said = Path(sys.argv[1]), {}
    compare(root, said)
    resume(root, said)
    with_fabric(root, said)
    finetune(root, said)
    if dist.get_rank() == 0:
        print("SAID " + json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
