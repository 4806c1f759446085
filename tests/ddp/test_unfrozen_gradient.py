"""The gradient of a parameter that is in no buffer, when its step is dropped."""

import pytest
import torch
from loop_ranks import Ranks, Weights

from megabucket.errors import TrainabilityChangedError


def test_a_dropped_step_leaves_no_gradient_of_a_parameter_that_one_rank_has_unfrozen():
    model = Weights("ab")
    model.b.requires_grad_(False)
    ranks = Ranks(2, model)

    def train(rank, ddp):
        optimizer = torch.optim.SGD(ddp.module.parameters(), lr=1.0)  # holds the frozen parameter as well
        ddp.module.b.requires_grad_(rank == 1)
        with pytest.raises(TrainabilityChangedError):
            ddp(a=1, b=2).backward()
        ddp.module.b.requires_grad_(False)  # it was a mistake
        ddp(a=1, b=2).backward()
        optimizer.step()
        return ddp.module.a[0].item(), ddp.module.b[0].item()

    assert ranks.run(train) == [(0.0, 1.0), (0.0, 1.0)]
