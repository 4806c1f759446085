"""State that has neither one value per element nor one number: factors of rows and columns, and lists of them."""

import copy

import pytest
import torch
from grouped_models import run_ranks

import megabucket as mb
from megabucket.errors import OptimizerParametersError
from megabucket.testing import LoopbackWorld

torch.manual_seed(0)
NET = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 4, bias=False))


class Preconditioned(torch.optim.Optimizer):
    """Keeps a square factor for each dimension, in a list and by itself."""

    update_kind = "tensor"

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, grad = self.state[param], param.grad.flatten(1) if param.dim() > 1 else param.grad.view(-1, 1)
                if not state:
                    state |= {
                        "step": 0,
                        "left": torch.eye(len(grad)),
                        "factors": [torch.eye(len(grad)), torch.eye(grad.shape[1])],
                    }
                state["step"] += 1
                state["left"] += grad @ grad.T
                state["factors"][1] += grad.T @ grad
                param.sub_(group["lr"] * (state["left"] @ grad @ state["factors"][1]).view_as(param))


def run(directory, kind, *, size, is_sharded=True, saves):
    world = LoopbackWorld(size, timeout_s=20)

    def program(rank):
        config = mb.DistributedDataParallelConfig(use_distributed_optimizer=is_sharded)
        ddp = mb.DistributedDataParallel(copy.deepcopy(NET), config, communicator=world.communicator(rank))
        optimizer = mb.DistributedOptimizer(kind(ddp.parameters()), ddp)
        if saves:
            ddp(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            mb.save_checkpoint(directory, ddp, optimizer, step=1)
        else:
            mb.load_checkpoint(directory, ddp, optimizer)
        return optimizer.state_dict()["state"]

    return world.run(program)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, Preconditioned])
@pytest.mark.parametrize("saver", [{"size": 2}, {"size": 2, "is_sharded": False}], ids=["sharded", "all-reduced"])
@pytest.mark.parametrize("loader", [{"size": 3}, {"size": 1, "is_sharded": False}], ids=["3 ranks", "alone"])
def test_it_is_saved_and_loaded_on_another_number_of_ranks(tmp_path, kind, saver, loader):
    saved, *_ = run(tmp_path, kind, **saver, saves=True)

    for loaded in run(tmp_path, kind, **loader, saves=False):
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, Preconditioned])
def test_that_of_a_piece_of_a_parameter_is_refused_by_name_and_nothing_is_saved(tmp_path, kind):
    def program(cut):
        inner = kind(cut.ddp.parameters())
        inner.works_on_pieces = True
        cut.optimizer = mb.DistributedOptimizer(inner, cut.ddp)
        cut.train([0])
        with pytest.raises(OptimizerParametersError, match=r"head\.weight\.\w+: shape .* of \(4, 2, 3, 3\)"):
            cut.save(tmp_path, 1)
        return list(tmp_path.iterdir())

    assert run_ranks(2, program, tp=2, sharded=True) == [[], []]
