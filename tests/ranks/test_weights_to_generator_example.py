"""``examples/weights_to_generator.py``: two ranks train, a third one generates with their weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from crew import Place, crew

pytestmark = pytest.mark.dist

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
try:
    from weights_to_generator import PHASES, Model, generate, train
finally:
    sys.path.remove(str(EXAMPLES))


def run(place: Place) -> Any:
    group = dist.new_group([0, 1])
    found = generate(num_trainers=2) if place.index == 2 else train(place.index, 2, group)
    dist.destroy_process_group()
    return found


def test_a_generator_has_the_bits_of_the_training_ranks_in_each_phase():
    with crew(run, ranks=3) as started:
        first, second, (received, right) = [message.content for message in started.expect_all("returned", timeout_s=60)]

    assert first == second == received
    assert len({str(weights) for weights in received}) == PHASES  # each phase has trained
    assert received[0].keys() == Model().state_dict().keys()
    assert right[0] < right[-1] == 20  # and has learned
