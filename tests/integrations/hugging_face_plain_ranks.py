"""Torch's own optimizers with Hugging Face: torch DDP against megabucket without shards, and schedule-free ones also on shards.

python -m torch.distributed.run --nproc-per-node 2 hugging_face_plain_ranks.py RUN_FOLDER
"""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from hugging_face_ranks import (
    ALL_REDUCE,
    CLIP,
    GLOBAL_BATCH,
    SAVING,
    STEPS,
    Data,
    Weights,
    distance,
    fresh,
    logged,
    make_model,
    make_trainer,
    scale_losses,
    weights_of,
)
from transformers import Trainer

import megabucket as mb
from megabucket.integrations.transformers import MegabucketAccelerator, MegabucketTrainer

sys.path.append(str(Path(__file__).parents[1] / "optim"))
from stand_ins import ScheduleFree


class SchedulesItself(ScheduleFree):
    """Begins as its package's do: not in train mode."""

    def __init__(self, params: object) -> None:
        super().__init__(params, lr=0.1, weight_decay=0.01)


def with_optimizer(kind: type[Trainer], make: Callable[..., torch.optim.Optimizer]) -> type[Trainer]:
    class Optimized(kind):
        def create_optimizer(self, *args: object) -> torch.optim.Optimizer:
            self.optimizer = make(self.model.parameters())
            return self.optimizer

    return Optimized


def train(kind: type[Trainer], folder: Path, *, resume_from: Path | None = None, **options: object) -> Trainer:
    trainer = make_trainer(kind, folder, **options)
    trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    return trainer


def trainers(root: Path, said: dict[str, object]) -> None:
    for name, options in {
        "Adafactor": {"optim": "adafactor", "lr_scheduler_type": "constant"},
        "Adafactor, accumulating in bf16": {"optim": "adafactor", "accumulate": 3, "bf16": True},
        "AdamW, scaled": {"optim": "adamw_torch", "scaled": True},
    }.items():
        reference = train(Trainer, root, **options)
        found = train(MegabucketTrainer, root, ddp_config=ALL_REDUCE, **options)
        said[name] = [
            distance(weights_of(found.model), weights_of(reference.model)),
            str(logged(found, "grad_norm")) == str(logged(reference, "grad_norm")),  # some are nan
            type(found.optimizer.optimizer).__name__,
        ]
    options = {"optim": "adafactor", **SAVING}
    whole = train(MegabucketTrainer, root / "ours", ddp_config=ALL_REDUCE, **options)
    train(Trainer, root / "theirs", **options)
    for name, (kind, config, folder) in {
        "resumed": (MegabucketTrainer, {"ddp_config": ALL_REDUCE}, "ours"),
        "resumed by Trainer": (Trainer, {}, "ours"),
        "resumed from Trainer": (MegabucketTrainer, {"ddp_config": ALL_REDUCE}, "theirs"),
    }.items():
        half = root / folder / f"checkpoint-{STEPS // 2}"
        found = train(kind, root, resume_from=half, optim="adafactor", **config)
        said[f"Adafactor {name}"] = distance(weights_of(found.model), weights_of(whole.model))


def schedule_free(root: Path, said: dict[str, object]) -> None:
    options = {"max_grad_norm": 0.0, "eval_strategy": "steps", "eval_steps": 4, "lr_scheduler_type": "constant"}
    reference = train(with_optimizer(Trainer, SchedulesItself), root, **options)
    for name, config in {"sharded": None, "without shards": ALL_REDUCE}.items():
        found = train(with_optimizer(MegabucketTrainer, SchedulesItself), root, ddp_config=config, **options)
        said[f"schedule-free {name}"] = [
            distance(weights_of(found.model), weights_of(reference.model)),
            logged(found, "eval_loss") == logged(reference, "eval_loss"),
            len(logged(found, "eval_loss")),
        ]


def clip_value(accelerator: Accelerator, model: torch.nn.Module, *_: object) -> None:
    accelerator.clip_grad_value_(model.parameters(), CLIP / 100)


def clip_whole(accelerator: Accelerator, model: torch.nn.Module, *_: object) -> None:
    accelerator.clip_grad_norm_(model.parameters(), CLIP)


def clip_parts(accelerator: Accelerator, _: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        accelerator.clip_grad_norm_(optimizer.param_groups[0]["params"], CLIP)


def no_clip(*_: object) -> None: ...


def loop(
    accelerator: Accelerator,
    *,
    accumulate: int,
    folder: Path | None = None,
    resumes: bool = False,
    clip: Callable[..., None] = clip_value,
) -> Weights:
    """Muon for matrices and AdamW for the rest; saves after half of the steps, or begins there."""
    model = make_model()
    matrices = torch.optim.Muon([param for param in model.parameters() if param.ndim == 2], lr=0.02)
    vectors = torch.optim.AdamW([param for param in model.parameters() if param.ndim < 2], lr=0.02)
    loader = torch.utils.data.DataLoader(
        Data(GLOBAL_BATCH * STEPS * accumulate), batch_size=GLOBAL_BATCH // accelerator.num_processes
    )
    matrices, model, vectors, loader = accelerator.prepare(matrices, model, vectors, loader)  # in any order
    if resumes:
        accelerator.load_state(str(folder))
        loader = accelerator.skip_first_batches(loader, STEPS // 2 * accumulate)
    num_steps = 0
    for inputs in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**inputs).loss)
            if accelerator.sync_gradients:
                num_steps += 1
                clip(accelerator, model, matrices, vectors)
            for optimizer in (matrices, vectors):
                optimizer.step()
                optimizer.zero_grad()
        if folder is not None and not resumes and num_steps == STEPS // 2 and accelerator.sync_gradients:
            accelerator.save_state(str(folder))
    weights = weights_of(accelerator.unwrap_model(model))
    for prepared in accelerator._models:
        if isinstance(prepared, mb.DistributedDataParallel):
            prepared.detach()
    accelerator.free_memory()
    return weights


def loops(root: Path, said: dict[str, object]) -> None:
    def ours(**options: object) -> Accelerator:
        return fresh(MegabucketAccelerator, cpu=True, ddp_config=ALL_REDUCE, **options)

    for accumulate in (1, 3):
        options = {"gradient_accumulation_steps": accumulate}
        reference = loop(fresh(Accelerator, cpu=True, **options), accumulate=accumulate)
        said[f"Muon and AdamW {accumulate}"] = distance(loop(ours(**options), accumulate=accumulate), reference)
    folder = root / "state"
    whole = loop(ours(), accumulate=1, folder=folder)
    said["Muon and AdamW resumed"] = distance(loop(ours(), accumulate=1, folder=folder, resumes=True), whole)
    scaled = []
    for accelerator in (fresh(Accelerator, cpu=True), ours()):
        scale_losses(accelerator)
        scaled.append((loop(accelerator, accumulate=1), accelerator.scaler.get_scale()))
    (reference, of_torch), (found, scale) = scaled
    said["Muon and AdamW scaled"] = [distance(found, reference), scale == of_torch]


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    root, said = Path(sys.argv[1]), {}
    trainers(root, said)
    schedule_free(root, said)
    loops(root, said)
    if dist.get_rank() == 0:
        print("SAID " + json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
