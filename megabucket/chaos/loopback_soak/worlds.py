"""Draws worlds: how many ranks, which config, which module, which habits. A function of the seed."""

from __future__ import annotations

import random
from typing import Any

from megabucket.chaos.loopback_soak.program import Clearing, LayerSpec, ModelSpec, WorldSpec

_NUMELS = (1, 3, 7, 64, 70, 130, 0)


def draw_world(seed: int, **fixed: Any) -> WorldSpec:
    """Return the world of a seed.

    Args:
        fixed: config fields that are not drawn.
    """
    draw = random.Random(f"world {seed}")  # noqa: S311 - no secret
    switches = _draw_switches(draw) | fixed
    if switches["overlap_param_gather"]:
        switches["overlap_grad_reduce"] = switches["use_distributed_optimizer"] = True
    is_sharded = switches["use_distributed_optimizer"]
    wraps_optimizer = is_sharded or draw.random() < 0.3
    clearings = [Clearing.WRAPPER, Clearing.OPTIMIZER, Clearing.BUFFER]
    # Zeros that plain torch code has put into reduced gradients cannot be told from gradients that nobody has cleared.
    if wraps_optimizer or switches.get("grad_reduction") != "sum":
        clearings.append(Clearing.OPTIMIZER_ZEROS)
    return WorldSpec(
        seed=seed,
        num_ranks=draw.choice((2, 2, 3, 4)),
        switches=switches,
        model=_draw_model(draw),
        momentum=draw.choice((0.0, 1.0)),
        wraps_optimizer=wraps_optimizer,
        returns_grad_norm=random.Random(f"norm {seed}").random() < 0.5,  # noqa: S311 - no secret
        clearing=draw.choice(clearings),
        clears_first=draw.random() < 0.5,
        numbers_steps=draw.random() < 0.4,
        takes_turns=draw.random() < 0.95,
        completion=draw.choice(("immediate", "manual", "manual")),
    )


def _draw_switches(draw: random.Random) -> dict[str, Any]:
    is_sharded = draw.random() < 0.5
    overlaps = draw.random() < 0.7
    reduction: dict[str, Any] = draw.choice(({}, {}, {"grad_reduction": "sum"}, {"average_in_collective": True}))
    return {
        "use_distributed_optimizer": is_sharded,
        "overlap_grad_reduce": overlaps,
        "overlap_param_gather": is_sharded and overlaps and draw.random() < 0.5,
        "bucket_size": draw.choice((1, 1, 60, 200, 10_000)),
        "bucket_groups": draw.choice(("per_bucket", "per_bucket", "single")),
        "layout": draw.choice(("stable", "stable", "megatron")),
        "unused_parameters": draw.choice(("error", "zero")),
        "nonfinite_gradients": draw.choice(("error", "error", "skip_step", "allow")),
        "skipped_forwards": draw.choice(("error", "error", "allow")),
        "finish": draw.choice(("auto", "auto", "explicit")),
        **reduction,
    }


def _draw_model(draw: random.Random) -> ModelSpec:
    layers: list[LayerSpec] = []
    for index in range(draw.randint(2, 4)):
        numels = (draw.choice(_NUMELS[:-1]), *(draw.choice(_NUMELS) for _ in range(draw.randint(0, 1))))
        shares = draw.randrange(index) if index and draw.random() < 0.15 else -1
        layers.append(LayerSpec(numels, shares))
    return ModelSpec(tuple(layers), mixes_dtypes=draw.random() < 0.25, output=draw.choice(("tensor", "tuple", "dict")))
