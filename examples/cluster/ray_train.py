"""The demo on workers of Ray Train: Ray starts them, forms their process group, and starts all again when one is lost.

python -m examples.cluster.ray_train --workers 2 --storage /shared/ray train.steps=200

A second call with the same storage goes on where the first one ended, on as many or other workers.
"""

import argparse
from pathlib import Path

import ray.train.torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig

from examples.bytegpt.config import DemoConfig, load_demo_config
from examples.bytegpt.report import Progress
from examples.bytegpt.train import run_training
from megabucket.measure.ranks import Ranks


def train(settings: dict[str, DemoConfig]) -> None:
    config, context = settings["config"], ray.train.get_context()
    rank, device = context.get_world_rank(), ray.train.torch.get_device()
    ranks = Ranks(rank, context.get_world_size(), device, dist.get_backend())
    report = run_training(config, ranks, progress=Progress(is_shown=rank == 0))
    # All ranks have written into the storage: there is nothing to upload.
    saved = Checkpoint(str(config.program.checkpoint.folder))
    ray.train.report(report.summary or {}, checkpoint=saved, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--storage", type=Path, required=True, help="a folder that all hosts see")
    parser.add_argument("overrides", nargs="*", help="key=value, as for examples.bytegpt")
    asked = parser.parse_args()
    storage = asked.storage.resolve()
    saving = [f"checkpoint.folder={storage / 'bytegpt' / 'checkpoints'}", "checkpoint.resume=auto"]
    config = load_demo_config(
        Path("configs/bytegpt.yaml"), [f"train.log_path={storage / 'log.jsonl'}", *saving, *asked.overrides]
    )
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"config": config},
        scaling_config=ScalingConfig(num_workers=asked.workers, use_gpu=asked.gpu),
        run_config=RunConfig(name="bytegpt", storage_path=str(storage), failure_config=FailureConfig(max_failures=3)),
    )
    result = trainer.fit()
    print(f"held-out bits/byte {result.metrics['held_out_bits_after']:.3f}, saved in {result.checkpoint.path}")


if __name__ == "__main__":
    main()
