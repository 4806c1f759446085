"""Several sharded optimizers of one model with accelerate, against torch DDP; every rank runs it, the first prints JSON.

python -m torch.distributed.run --nproc-per-node 2 hugging_face_parts_ranks.py RUN_FOLDER
"""

import json
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from hugging_face_plain_ranks import clip_parts, clip_whole, loop, no_clip
from hugging_face_ranks import ALL_REDUCE, OVERLAP, clip_exactly, distance, fresh, make_model, scale_losses, text_of_refusal

from megabucket.integrations.transformers import MegabucketAccelerator


class Exact(Accelerator):
    """Clips as ``Accelerator`` does, by a norm in float64 as ours is.

    Muon computes in bf16: the last bit of a gradient decides where a value on the edge between two bf16 values goes.
    """

    def clip_grad_norm_(self, parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
        self.unscale_gradients()
        return clip_exactly(torch.nn.ParameterList(parameters), max_norm)


class UpdatedOnce(torch.amp.GradScaler):
    """Updates at every second call. accelerate calls after each optimizer, and torch then unscales the next one twice."""

    calls = 0

    def update(self, new_scale: object = None) -> None:
        self.calls += 1
        if self.calls % 2 == 0:
            super().update(new_scale)


CONFIGS = {"sharded": None, "overlap": OVERLAP, "all-reduce": ALL_REDUCE}


def ours(config: object = None, **options: object) -> Accelerator:
    return fresh(MegabucketAccelerator, cpu=True, ddp_config=config, **options)


def overlapped() -> Accelerator:
    return ours(OVERLAP)


def compare(said: dict[str, object]) -> None:
    for accumulate in (1, 3):
        options = {"gradient_accumulation_steps": accumulate}
        for name, clip in {"": no_clip, "clipped ": clip_whole, "clipped by part ": clip_parts}.items():
            stock, exact = (
                loop(fresh(kind, cpu=True, **options), accumulate=accumulate, clip=clip) for kind in (Accelerator, Exact)
            )
            for how, config in CONFIGS.items():
                reference = stock if how == "all-reduce" else exact
                found = loop(ours(config, **options), accumulate=accumulate, clip=clip)
                said[f"{name}{accumulate} {how}"] = distance(found, reference)
    for name, clip in {"scaled": no_clip, "scaled clipped": clip_whole}.items():
        runs = []
        for make, scaler in (
            (lambda: fresh(Exact, cpu=True), UpdatedOnce),
            *((make, torch.amp.GradScaler) for make in (ours, overlapped)),
        ):
            accelerator = make()
            scale_losses(accelerator)
            accelerator.scaler = scaler("cpu", init_scale=256.0)  # without an overflow
            runs.append(loop(accelerator, accumulate=1, clip=clip))
        reference, *found = runs
        said[name] = [distance(weights, reference) for weights in found]
    accelerator = ours()
    scale_losses(accelerator)
    weights = loop(accelerator, accumulate=1, clip=no_clip)
    said["overflowing"] = [accelerator.scaler.get_scale(), all(bool(value.isfinite().all()) for value in weights.values())]


def resume(root: Path, said: dict[str, object]) -> None:
    whole = loop(fresh(Accelerator, cpu=True), accumulate=1, clip=no_clip, folder=root / "torch")
    loop(ours(), accumulate=1, clip=no_clip, folder=root / "sharded")
    for first in ("torch", "sharded"):
        for second in ("torch", "sharded"):
            accelerator = fresh(Accelerator, cpu=True) if second == "torch" else ours()
            found = loop(accelerator, accumulate=1, clip=no_clip, folder=root / first, resumes=True)
            said[f"{first} to {second}"] = distance(found, whole)


def refusals() -> list[str]:
    def parts_of(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        params = list(model.parameters())
        return [torch.optim.SGD(some, lr=0.1) for some in (params[:3], params[3:])]

    def incomplete() -> None:
        model = make_model()
        ours().prepare(model, parts_of(model)[0])

    def clip_some() -> None:
        accelerator, model = ours(), make_model()
        first, second = parts_of(model)
        accelerator.prepare(second, model, first)
        accelerator.clip_grad_norm_(list(model.parameters())[:2], 1.0)

    return [text_of_refusal(attempt) for attempt in (incomplete, clip_some)]


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    root, said = Path(sys.argv[1]), {}
    compare(said)
    resume(root, said)
    said["refusals"] = refusals()
    if dist.get_rank() == 0:
        print("SAID " + json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
