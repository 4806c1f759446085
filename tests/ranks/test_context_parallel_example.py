"""``examples/context_parallel.py`` on four ranks, two sequences' halves in two replicas, against a single process."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from odd_model import flat
from pool import Rank
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.dist

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
try:
    from context_parallel import CLIP, LENGTH, LR, PADDING, WIDTH, Attention, Run, batch_of, loss_of, make_model
finally:
    sys.path.remove(str(EXAMPLES))

STEPS = 12
MODES = {
    "reduce-scatter": {"use_distributed_optimizer": True, "overlap_param_gather": True},
    "reduce-scatter without overlap": {"use_distributed_optimizer": True, "overlap_grad_reduce": False},
    "all-reduce": {},
    "all-reduce without overlap": {"overlap_grad_reduce": False},
}


class WholeAttention(Attention):
    """Torch's causal attention, of whole sequences."""

    def forward(self, hidden: torch.Tensor, positions: object) -> torch.Tensor:
        return scaled_dot_product_attention(*self.query_key_value(hidden).split(WIDTH, dim=-1), is_causal=True)


@cache
def in_one_process() -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """Return the weights before and after, and the norms before clipping: the mean over the tokens of both replicas."""
    model, norms = make_model(None, WholeAttention), []
    before, optimizer = flat(model.parameters()), torch.optim.AdamW(model.parameters(), LR)
    for step in range(STEPS):
        tokens, labels = (torch.cat(of_ranks) for of_ranks in zip(batch_of(step, 0), batch_of(step, 1), strict=True))
        (loss_of(model(tokens, torch.arange(LENGTH), None), labels) / (labels != PADDING).sum()).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return before, flat(model.parameters()), norms


def trained(rank: Rank, microbatches: int, form: str, fields: dict[str, Any]) -> tuple[torch.Tensor, list[float], list[int]]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    run = Run(mesh, process_group={"all ranks": None, "mesh": mesh}[form], microbatches=microbatches, **fields)
    steps = [run.step(step) for step in range(STEPS)]
    run.model.check_replicas()
    run.model.detach()
    return flat(run.model.module.parameters()), [norm for _, _, norm in steps], [tokens for _, tokens, _ in steps]


def by_night(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("mode", "microbatches", "form"),
    [
        ("reduce-scatter", 3, "all ranks"),
        ("all-reduce", 1, "all ranks"),
        by_night("reduce-scatter", 1, "all ranks"),
        by_night("all-reduce", 3, "all ranks"),
        *(
            by_night(f"{mode} without overlap", count, "all ranks")
            for mode in ("reduce-scatter", "all-reduce")
            for count in (1, 3)
        ),
        by_night("reduce-scatter", 3, "mesh"),  # shards inside a sequence, replicas across
    ],
)
def test_ranks_that_share_sequences_train_as_one_process_on_whole_ones(pool, mode, microbatches, form):
    before, expected, expected_norms = in_one_process()

    results = pool.run(trained, microbatches, form, MODES[mode], ranks=4)

    assert min(expected_norms) > 2 * CLIP  # it bites
    assert all(len(set(tokens)) > 1 for tokens in zip(*(tokens for *_, tokens in results), strict=True))  # never as many on all
    ratios = [float((weights - expected).abs().max() / (expected - before).abs().max()) for weights, *_ in results]
    print(f"largest difference over largest change of a weight: {max(ratios):.1e}")
    assert max(ratios) <= 1e-4
    for _, norms, _ in results:
        assert norms == pytest.approx(expected_norms, rel=1e-5)
