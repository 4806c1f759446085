"""``examples/pipeline.py`` on four ranks against the whole model in one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from odd_model import flat
from pool import Rank

pytestmark = pytest.mark.dist

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
try:
    from pipeline import CLIP, LR, NUM_STAGES, STEPS, batch_of, loss_of, make_part, train
finally:
    sys.path.remove(str(EXAMPLES))


def trained(_: Rank) -> torch.Tensor:
    part = train(dist.init_device_mesh("cpu", (2, NUM_STAGES), mesh_dim_names=("dp", "pp")))
    return flat(part.parameters())


def test_the_stages_end_with_the_weights_of_one_process(pool):
    parts = [make_part(stage) for stage in range(NUM_STAGES)]
    before = [flat(part.parameters()) for part in parts]
    model = torch.nn.Sequential(*parts)
    optimizer, norms = torch.optim.AdamW(model.parameters(), LR), []
    for step in range(STEPS):
        loss_of(model(batch := batch_of(step)), batch[:, :8]).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()

    results = pool.run(trained, ranks=4)

    assert min(norms) > 2 * CLIP  # it bites
    for rank, found in enumerate(results):
        stage = rank % NUM_STAGES
        reference = flat(parts[stage].parameters())
        assert (found - reference).abs().max() <= 1e-4 * (reference - before[stage]).abs().max()
