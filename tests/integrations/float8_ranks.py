"""torchao's float8 layers, emulated, under torch DDP and under megabucket; every rank runs it, the first one prints JSON.

python -m torch.distributed.run --nproc-per-node 2 float8_ranks.py RUN_FOLDER
"""

import dataclasses
import json
import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

import megabucket as mb
from megabucket.errors import UnsupportedParameterError

STEPS, BATCH, WIDTH, LR, CLIP = 12, 16, 32, 1e-2, 0.05
SHARDED = {"use_distributed_optimizer": True, "overlap_param_gather": True}
WAYS = {
    "reduce-scatter": SHARDED,
    "reduce-scatter without overlap": {"use_distributed_optimizer": True, "overlap_grad_reduce": False},
    "all-reduce": {},
}


def make_module(recipe: str, *, compiles: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, WIDTH)]
    module = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 8))
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(module, config=config, module_filter_fn=lambda _, name: name != "4")
    assert [isinstance(layer, Float8Linear) for layer in module] == [True, False, False, True, False]
    if compiles:
        module.compile()
    return module


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, accumulate: int, clip: float, autocast: bool
) -> tuple[list[torch.Tensor], list[float]]:
    """Return the weights, and the norms before clipping if there is a clip."""
    norms, is_ours = [], isinstance(optimizer, mb.DistributedOptimizer)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        for index in range(accumulate):
            inputs = torch.randn(BATCH, WIDTH, generator=generator)
            with nullcontext() if index == accumulate - 1 else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = (model(inputs) - inputs[:, :8]).float().square().mean() / accumulate
                loss.backward()
        if clip and not is_ours:
            grads = [param.grad for param in model.parameters()]
            norms.append(torch.nn.utils.get_total_norm(grads).item())
            # torch.nn.utils.clip_grad_norm_ with its factor in double precision, as ours has it.
            torch._foreach_mul_(grads, min(1.0, clip / (norms[-1] + 1e-6)))
        optimizer.step()
        if clip and is_ours:
            norms.append(optimizer.last_step.grad_norm)
        optimizer.zero_grad()
    weights = [param.detach().clone() for param in model.parameters()]
    if isinstance(model, mb.DistributedDataParallel):
        model.check_replicas()
        model.detach()
    return weights, norms


def compare(recipe: str, ways: dict[str, dict[str, Any]], *, compiles: bool = False, clip: float = 0.0, **options: Any) -> Any:
    """Return by way the largest difference of a weight from torch DDP, over the largest change, and the same for norms."""
    before = list(make_module(recipe).parameters())
    options = {"accumulate": 1, "autocast": False, "clip": clip} | options
    torch_ddp = torch.nn.parallel.DistributedDataParallel(make_module(recipe, compiles=compiles))
    expected, expected_norms = train(torch_ddp, torch.optim.AdamW(torch_ddp.parameters(), LR), **options)
    assert not clip or min(expected_norms) > 2 * clip
    moved = max(float((found - was).detach().abs().max()) for found, was in zip(expected, before, strict=True))
    said = {}
    for way, fields in ways.items():
        config = mb.DistributedDataParallelConfig(bucket_size=1500, **fields)
        model = mb.DistributedDataParallel(make_module(recipe, compiles=compiles), config)
        optimizer = mb.DistributedOptimizer(torch.optim.AdamW(model.parameters(), LR), model, clip_grad=clip)
        weights, norms = train(model, optimizer, **options)
        differences = [float((found - other).abs().max()) for found, other in zip(weights, expected, strict=True)]
        of_norms = [abs(found / other - 1) for found, other in zip(norms, expected_norms, strict=True)]
        said[way] = [max(differences) / moved, max(of_norms, default=math.nan if clip else 0.0)]
    return said


def refusal() -> str:
    """Return what wrapping says about weights made for FSDP2's gather."""
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    module = convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH)), config=config)
    try:
        mb.DistributedDataParallel(module)
    except UnsupportedParameterError as error:
        return str(error)
    return ""


def main() -> None:
    dist.init_process_group("gloo")
    said = {
        "tensorwise": compare("tensorwise", WAYS),
        "tensorwise, accumulating": compare("tensorwise", WAYS, accumulate=3),
        "rowwise": compare("rowwise", WAYS),
        "rowwise, accumulating in bf16": compare("rowwise", WAYS, accumulate=3, autocast=True),
        "rowwise_with_gw_hp": compare("rowwise_with_gw_hp", WAYS),
        "clipped": compare("tensorwise", WAYS, clip=CLIP),
        "compiled": compare("tensorwise", {"reduce-scatter": SHARDED}, compiles=True),
        "refusal": refusal(),
    }
    if dist.get_rank() == 0:
        print("SAID " + json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
