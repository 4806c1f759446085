"""Lightning's Trainer with megabucket: accumulation, clipping, a schedule, and a run that goes on from its checkpoint.

torchrun --standalone --nproc-per-node 2 examples/lightning_trainer.py
"""

import os
import tempfile
from typing import Any

import lightning
import torch
import torch.distributed as dist

import megabucket.integrations.lightning  # noqa: F401 - makes strategy="megabucket" known


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


def train(model: Regression, epochs: int, root: str, checkpoint: str | None = None) -> lightning.Trainer:
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    options = {"logger": False, "default_root_dir": root, "devices": int(os.environ["WORLD_SIZE"]), "accelerator": "cpu"}
    training = {"max_epochs": epochs, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "precision": "bf16-mixed"}
    trainer = lightning.Trainer(strategy="megabucket", **training, **options)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=checkpoint)
    return trainer


def main() -> None:
    dist.init_process_group("gloo")
    roots = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(roots)
    whole, half, resumed = Regression(), Regression(), Regression()
    train(whole, 4, roots[0])
    train(half, 2, roots[0]).save_checkpoint(f"{roots[0]}/half.ckpt")  # complete, also after fit
    train(resumed, 4, roots[0], f"{roots[0]}/half.ckpt")  # any number of devices, or strategy="ddp", would do
    same = all(torch.equal(one, other) for one, other in zip(whole.parameters(), resumed.parameters(), strict=True))
    if dist.get_rank() == 0:
        print(f"resumed after 2 of 4 epochs; the same weights, bit by bit: {same}")
    dist.barrier()
    dist.destroy_process_group()
    assert same


if __name__ == "__main__":
    main()
