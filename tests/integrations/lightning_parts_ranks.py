"""Several sharded optimizers in manual optimization, against Lightning's DDP; every rank runs it, the first prints JSON.

python -m torch.distributed.run --nproc-per-node 2 lightning_parts_ranks.py RUN_FOLDER
"""

import copy
import json
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning_plain_ranks import Both, Gan, distance, fabric_pair, train, without_shards
from lightning_ranks import Net, is_plain, make_loader, make_trainer, scaling, text_of_refusal

import megabucket as mb
import megabucket.integrations.lightning as adapter

CASES: dict[str, tuple[Callable[[], Net], bool, dict[str, Any]]] = {
    # name: module, whether parameters may be unused, arguments of the trainer
    "Muon and AdamW": (Both, False, {"accumulate": 2}),
    "GAN": (lambda: Gan(toggles=False, clips_by=None), True, {}),
    "GAN, toggled": (lambda: Gan(toggles=True, clips_by=None), True, {}),
    "GAN, cleared after each step": (lambda: Gan(toggles=True, clips_by=None, clears_after=True), True, {}),
    "GAN, clipped": (lambda: Gan(toggles=True, clips_by="norm"), True, {}),
    "GAN in bf16": (lambda: Gan(toggles=True, clips_by="norm"), True, {"precision": "bf16-mixed"}),
    "GAN, scaled": (lambda: Gan(toggles=True, clips_by=None), True, {"plugins": scaling}),
}


def strategies(*, finds_unused: bool) -> dict[str, adapter.MegabucketStrategy]:
    configs = {
        "sharded": mb.DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=200),
        "overlap": mb.DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=200, overlap_param_gather=True),
        "all-reduce": without_shards(),
    }
    unused = {"find_unused_parameters": True} if finds_unused else {}
    return {name: adapter.MegabucketStrategy(config, **unused) for name, config in configs.items()}


def fresh(options: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a trainer with a plugin of their own."""
    return options | ({"plugins": [options["plugins"]()]} if "plugins" in options else {})


def states_of(net: Net) -> list[dict[str, Any]]:
    return [copy.deepcopy(optimizer.state_dict()) for optimizer in net.trainer.optimizers]


def state_distance(found: list[dict[str, Any]], reference: list[dict[str, Any]]) -> float:
    worst = 0.0
    for one, other in zip(found, reference, strict=True):
        for key, of_param in other["state"].items():
            for name, value in of_param.items():
                worst = max(worst, float((torch.as_tensor(one["state"][key][name]) - torch.as_tensor(value)).abs().max()))
    return worst


def compare(root: Path, said: dict[str, object]) -> None:
    for name, (make, finds_unused, options) in CASES.items():
        reference = train(root, DDPStrategy(find_unused_parameters=finds_unused), make(), **fresh(options))
        for how, strategy in strategies(finds_unused=finds_unused).items():
            if how == "all-reduce" and name == "GAN, scaled":
                continue
            found = train(root, strategy, make(), **fresh(options))
            said[f"{name}, {how}"] = {
                "moved": distance(make(), reference),
                "distance": distance(found, reference),
                "state": state_distance(states_of(found), states_of(reference)),
                "scales": found.scales == reference.scales,
                "is plain": is_plain(found),
                "optimizers": [type(one).__name__ for one in found.trainer.optimizers],
                "rates": [one.param_groups[0]["lr"] for one in found.trainer.optimizers]
                == [one.param_groups[0]["lr"] for one in reference.trainer.optimizers],
            }


def resume(root: Path, said: dict[str, object]) -> None:
    """Between both strategies, with two optimizers."""

    def strategy(name: str) -> object:
        return DDPStrategy(find_unused_parameters=True) if name == "ddp" else strategies(finds_unused=True)[name]

    for case, make, finds_unused, options in (
        ("Muon and AdamW", Both, False, {"accumulate": 2}),
        ("GAN", lambda: Gan(toggles=True, clips_by="norm"), True, {}),
        ("GAN, cleared after each step", lambda: Gan(toggles=True, clips_by="norm", clears_after=True), True, {}),
    ):
        ddp = DDPStrategy(find_unused_parameters=finds_unused)
        whole = train(root, ddp, make(), **options)
        for first in ("ddp", "sharded"):
            saving = ModelCheckpoint(dirpath=root / f"{case} {first}", filename="{epoch}", save_top_k=-1)
            train(root, strategy(first), make(), num_epochs=1, callbacks=[saving], enable_checkpointing=True, **options)
            file = root / f"{case} {first}" / "epoch=0.ckpt"
            for second in ("ddp", "sharded"):
                found = train(root, strategy(second), make(), ckpt_path=file, **options)
                said[f"{case}, {first} to {second}"] = distance(found, whole)
            found = train(root, strategy(first), make(), num_epochs=1, save_to=file, **options)  # after fit
            said[f"{case}, {first} after fit"] = distance(
                train(root, strategy("sharded"), make(), ckpt_path=file, **options), whole
            )


def with_fabric(said: dict[str, object]) -> None:
    reference = fabric_pair("ddp", clip="max_norm")
    for how, config in {"sharded": adapter.SHARDED, "all-reduce": without_shards()}.items():
        found = fabric_pair(adapter.MegabucketFabricStrategy(config), clip="max_norm")
        said[f"Fabric, {how}"] = [distance(found, reference), *is_plain(found)]

    def one_by_one() -> None:
        import lightning

        fabric = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="megabucket")
        fabric.launch()
        net = Both()
        first, second = net.configure_optimizers()[0]
        fabric.setup_module(net.net)
        fabric.setup_optimizers(first, second)

    class Incomplete(Both):
        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD([param], lr=0.1) for param in list(self.parameters())[:2]]

    def incomplete() -> None:
        make_trainer(Path(), "megabucket").fit(Incomplete(), make_loader())

    said["refusals"] = [text_of_refusal(attempt) for attempt in (one_by_one, incomplete)]


def main() -> None:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "megabucket"):
        logging.getLogger(name).setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    root, said = Path(sys.argv[1]), {}
    compare(root, said)
    resume(root, said)
    with_fabric(said)
    if dist.get_rank() == 0:
        print("SAID " + json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
