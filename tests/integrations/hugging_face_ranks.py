"""Trains a tiny Llama under torch DDP and under megabucket, with ``Trainer`` and with accelerate; the first rank prints JSON.

python -m torch.distributed.run --nproc-per-node 2 hugging_face_ranks.py RUN_FOLDER
python -m torch.distributed.run --nproc-per-node 1 hugging_face_ranks.py RUN_FOLDER  # goes on with what two ranks have saved
python -m torch.distributed.run --nproc-per-node 2 hugging_face_ranks.py RUN_FOLDER  # and now with what one rank has saved
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
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import megabucket as mb
from megabucket.errors import ConfigError, OptimizerParametersError
from megabucket.integrations.transformers import MegabucketAccelerator, MegabucketTrainer

STEPS = 12
GLOBAL_BATCH = 4
CLIP = 0.05

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=16,
    tie_word_embeddings=True,
)
ALL_REDUCE = mb.DistributedDataParallelConfig(bucket_size=2_000)
OVERLAP = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=2_000)

SAVING = {"save_strategy": "steps", "save_steps": STEPS // 2}

Weights = dict[str, torch.Tensor]


class ExactTrainer(Trainer):
    """Clips as ``Trainer`` does, by a norm in float64 as ours is.

    In bf16 the last bit of a norm grows within a few steps: a weight on the edge between two bf16 values is rounded another
    way in forward. Two runs of torch DDP with norms summed in another order are as far apart.
    """

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        self.accelerator.unscale_gradients()
        return clip_exactly(model, self.args.max_grad_norm)


class ExactAccelerator(Accelerator):
    """See ``ExactTrainer``."""

    def clip_grad_norm_(self, parameters: object, max_norm: float) -> torch.Tensor:
        self.unscale_gradients()
        return clip_exactly(self._models[0], max_norm)


def clip_exactly(model: torch.nn.Module, max_norm: float) -> torch.Tensor:
    grads = [param.grad for param in model.parameters()]
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads])
    ).float()
    for grad in grads:
        grad.mul_(min(1.0, max_norm / (norm.item() + 1e-6)))
    return norm


class Data(torch.utils.data.Dataset):
    def __init__(self, num_samples: int) -> None:
        self.tokens = torch.randint(0, 61, (num_samples, 12), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def weights_of(model: torch.nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def distance(found: Weights, reference: Weights) -> float:
    """How far weights are from the reference, in units of how far it has moved."""
    first = make_model().state_dict()
    moved = max(float((reference[name] - first[name]).abs().max()) for name in reference)
    return max(float((found[name] - reference[name]).abs().max()) for name in reference) / moved


def make_trainer(kind: type[Trainer], folder: Path, *, accumulate: int = 1, **options: object) -> Trainer:
    config = {"ddp_config": options.pop("ddp_config")} if "ddp_config" in options else {}
    is_scaled = options.pop("scaled", False)
    defaults = {"max_steps": STEPS, "max_grad_norm": CLIP, "save_strategy": "no", "lr_scheduler_type": "linear"}
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=GLOBAL_BATCH // dist.get_world_size(),
        gradient_accumulation_steps=accumulate,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",  # the same samples in a step on any number of ranks
        **defaults | options,
    )
    data = Data(GLOBAL_BATCH * STEPS * accumulate)
    trainer = kind(model=make_model(), args=args, train_dataset=data, eval_dataset=Data(4), **config)
    if is_scaled:
        scale_losses(trainer.accelerator)
    return trainer


def train(kind: type[Trainer], folder: Path, *, resume_from: Path | None = None, **options: object) -> Trainer:
    trainer = make_trainer(kind, folder, **options)
    trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    return trainer


def logged(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def compare(root: Path, said: dict[str, object]) -> None:
    for bf16 in (False, True):
        for accumulate in (1, 3):
            options = {"accumulate": accumulate, "bf16": bf16}
            case = f"{'bf16' if bf16 else 'fp32'} {accumulate}"
            stock = train(Trainer, root, **options)
            exact = train(ExactTrainer, root, **options) if bf16 else stock
            for name, config, reference in (
                ("sharded", {}, exact),
                ("all-reduce", {"ddp_config": ALL_REDUCE}, stock),  # the trainer clips
                ("overlap", {"ddp_config": OVERLAP}, exact),
            ):
                trainer = train(MegabucketTrainer, root, **options, **config)
                said[f"{name} {case}"] = distance(weights_of(trainer.model), weights_of(reference.model))
                said[f"norms {name} {case}"] = [logged(trainer, "grad_norm"), logged(reference, "grad_norm")]
                said[f"losses {name} {case}"] = [logged(trainer, "loss"), logged(reference, "loss")]
    reference, found = (train(kind, root, max_grad_norm=0.0) for kind in (Trainer, MegabucketTrainer))
    said["without clipping"] = distance(weights_of(found.model), weights_of(reference.model))
    said["norms without clipping"] = [logged(found, "grad_norm"), logged(reference, "grad_norm")]
    for trainer in (reference, found):
        trainer.train()  # a second time, on the wrapper that is there
    said["trained again without clipping"] = distance(weights_of(found.model), weights_of(reference.model))
    # With a fused optimizer accelerate takes a skipped step for a step, and lets the schedule go on.
    plain = {"scaled": True, "optim": "adamw_torch"}
    reference, found = (train(kind, root, **plain) for kind in (ExactTrainer, MegabucketTrainer))
    said["scaled"] = [
        distance(weights_of(found.model), weights_of(reference.model)),
        *(logged(trainer, "grad_norm") for trainer in (found, reference)),
        *(trainer.accelerator.scaler.get_scale() for trainer in (found, reference)),
    ]
    clipped = train(Trainer, root)
    unclipped = train(Trainer, root, max_grad_norm=0.0)
    said["what clipping changes"] = distance(weights_of(clipped.model), weights_of(unclipped.model))


def resume(root: Path, said: dict[str, object]) -> None:
    whole = train(MegabucketTrainer, root / "run", ddp_config=OVERLAP, **SAVING)
    half = root / "run" / f"checkpoint-{STEPS // 2}"
    reference = weights_of(whole.model)
    said["resumed"] = distance(weights_of(train(MegabucketTrainer, root, resume_from=half).model), reference)
    said["resumed by Trainer"] = distance(weights_of(train(Trainer, root, resume_from=half).model), reference)
    train(Trainer, root / "theirs", **SAVING)
    theirs = root / "theirs" / f"checkpoint-{STEPS // 2}"
    said["resumed from Trainer"] = distance(weights_of(train(MegabucketTrainer, root, resume_from=theirs).model), reference)
    for name, options in {"accumulating": {"accumulate": 3}, "fp16": {"scaled": True}}.items():
        trainer = train(MegabucketTrainer, root / name, **options, **SAVING)
        half = root / name / f"checkpoint-{STEPS // 2}"
        found = train(MegabucketTrainer, root, resume_from=half, **options)
        said[f"resumed {name}"] = distance(weights_of(found.model), weights_of(trainer.model))
    said["evaluated"] = whole.evaluate()["eval_loss"]
    whole.save_model(str(root / "final"))
    dist.barrier()
    again = LlamaForCausalLM.from_pretrained(root / "final")
    said["from_pretrained"] = [
        all(torch.equal(value, reference[name]) for name, value in again.state_dict().items()),
        again.lm_head.weight is again.model.embed_tokens.weight,
    ]


def loop(
    accelerator: Accelerator, *, accumulate: int, folder: Path | None = None, first: int = 0
) -> tuple[Weights, list[float]]:
    """A loop as accelerate's documentation has it; saves after half of the steps, or begins there."""
    model, norms = make_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=6, gamma=0.5)
    batch = GLOBAL_BATCH // accelerator.num_processes
    loader = torch.utils.data.DataLoader(Data(GLOBAL_BATCH * STEPS * accumulate), batch_size=batch)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if first:
        accelerator.load_state(str(folder))
        loader = accelerator.skip_first_batches(loader, first * accumulate)
    for inputs in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**inputs).loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
        if folder is not None and not first and len(norms) == STEPS // 2 and accelerator.sync_gradients:
            accelerator.save_state(str(folder))
    weights = weights_of(accelerator.unwrap_model(model))
    for prepared in accelerator._models:
        if isinstance(prepared, mb.DistributedDataParallel):
            prepared.detach()
    accelerator.free_memory()
    return weights, norms


def accelerate_loops(root: Path, said: dict[str, object]) -> None:
    for precision in ("no", "bf16"):
        for accumulate in (1, 3):
            options = {"cpu": True, "mixed_precision": precision, "gradient_accumulation_steps": accumulate}
            case = f"accelerate {precision} {accumulate}"
            stock = loop(fresh(Accelerator, **options), accumulate=accumulate)
            exact = loop(fresh(ExactAccelerator, **options), accumulate=accumulate) if precision == "bf16" else stock
            for name, config, (reference, norms) in (
                ("sharded", None, exact),
                ("all-reduce", ALL_REDUCE, stock),  # accelerate clips
                ("overlap", OVERLAP, exact),
            ):
                weights, found = loop(fresh(MegabucketAccelerator, ddp_config=config, **options), accumulate=accumulate)
                said[f"{name} {case}"] = distance(weights, reference)
                said[f"norms {name} {case}"] = [found, norms]
    said["accelerate scaled"] = compare_scaled()
    folder = root / "state of 2"
    whole, _ = loop(fresh(MegabucketAccelerator, cpu=True), accumulate=1, folder=folder)
    found, norms = loop(fresh(MegabucketAccelerator, cpu=True), accumulate=1, folder=folder, first=STEPS // 2)
    said["accelerate resumed"] = [distance(found, whole), len(norms)]
    said["refusals"] = refusals()


def compare_scaled() -> list[object]:
    runs = []
    for kind in (MegabucketAccelerator, ExactAccelerator):
        accelerator = fresh(kind, cpu=True)
        scale_losses(accelerator)
        runs.append((*loop(accelerator, accumulate=1), accelerator.scaler.get_scale()))
    (weights, norms, scale), (reference, expected_norms, expected_scale) = runs
    return [distance(weights, reference), norms, expected_norms, scale, expected_scale]


def scale_losses(accelerator: Accelerator) -> None:
    """Let it train in fp16, which accelerate refuses on a CPU: it is told so after it was made."""
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)  # the first steps overflow


def fresh(kind: type[Accelerator], **options: object) -> Accelerator:
    """Return an accelerator of its own precision, which accelerate keeps for a process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    # Otherwise it steps the schedule once per rank, and two ranks have another one than one.
    return kind(step_scheduler_with_optimizer=False, **options)


def text_of_refusal(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except (ConfigError, OptimizerParametersError) as error:
        return str(error)
    return "not refused"


def refusals() -> list[str]:
    def clip_a_part() -> None:
        accelerator, model = fresh(MegabucketAccelerator, cpu=True), make_model()
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.clip_grad_norm_(list(model.parameters())[:2], 1.0)

    def optimizer_first() -> None:
        fresh(MegabucketAccelerator, cpu=True).prepare(torch.optim.SGD(make_model().parameters(), lr=0.1))

    def torch_ddp_arguments() -> None:
        make_trainer(MegabucketTrainer, Path(), ddp_bucket_cap_mb=3)

    return [text_of_refusal(attempt) for attempt in (clip_a_part, optimizer_first, torch_ddp_arguments)]


def resume_from(root: Path, said: dict[str, object], *, saved_by: int) -> None:
    """Go on with what another number of ranks has saved, and save what the other number goes on with."""
    if saved_by == 2:
        train(MegabucketTrainer, root / "run of 1", **SAVING)
        said["accumulated on one rank"] = accumulated()
    half = root / ("run" if saved_by == 2 else "run of 1") / f"checkpoint-{STEPS // 2}"
    reference = weights_of(train(Trainer, root).model)
    said["resumed"] = distance(weights_of(train(MegabucketTrainer, root, resume_from=half).model), reference)
    whole, _ = loop(fresh(MegabucketAccelerator, cpu=True), accumulate=1, folder=root / f"state of {3 - saved_by}")
    folder = root / f"state of {saved_by}"
    found, _ = loop(fresh(MegabucketAccelerator, cpu=True), accumulate=1, folder=folder, first=STEPS // 2)
    said["accelerate resumed"] = distance(found, whole)


def accumulated() -> float:
    options = {"cpu": True, "gradient_accumulation_steps": 3}
    reference, _ = loop(fresh(Accelerator, **options), accumulate=3)
    return distance(loop(fresh(MegabucketAccelerator, **options), accumulate=3)[0], reference)


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    root, said = Path(sys.argv[1]), {}
    if dist.get_world_size() == 1:
        resume_from(root, said, saved_by=2)
    elif (root / "run of 1").exists():
        resume_from(root, said, saved_by=1)
    else:
        compare(root, said)
        resume(root, said)
        accelerate_loops(root, said)
    if dist.get_rank() == 0:
        print("SAID " + json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
