"""With ``overlap_param_gather=True`` the parameters arrive in the next forward; what else reads them in a known way waits."""

import copy

import pytest
import torch
from optim_ranks import Net
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import megabucket as mb
from megabucket.checkpoint.format import Piece
from megabucket.errors import PhaseError
from megabucket.testing import LoopbackWorld

SIZE = 2


class Rank:
    def __init__(self, communicator, *, overlaps):
        config = mb.DistributedDataParallelConfig(bucket_size=20, use_distributed_optimizer=True, overlap_param_gather=overlaps)
        self.ddp = mb.DistributedDataParallel(Net(), config, communicator=communicator)
        self.module, self.rank = self.ddp.module, communicator.rank
        self.optimizer = mb.DistributedOptimizer(torch.optim.AdamW(self.ddp.parameters(), lr=0.1), self.ddp)

    def train(self):
        self.ddp(torch.full((3, 4), self.rank + 1.0)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    @property
    def is_hidden(self):
        return all(param.isnan().all() for param in self.module.parameters())


def run_ranks(program, *, overlaps=True):
    world = LoopbackWorld(SIZE, timeout_s=20)
    return world.run(lambda rank: program(Rank(world.communicator(rank), overlaps=overlaps).train()))


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def averaged(one):
    average = AveragedModel(one.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(one.ddp)
    one.train()
    average.update_parameters(one.ddp)
    return flat(average.module.parameters())


def saved(one, root):
    mb.save_checkpoint(root, one.ddp, one.optimizer, step=1)
    stored, pieces = mb.open_checkpoint(root), []
    for name, _ in one.module.named_parameters():
        info = stored.tensors[f"model.{name}"]
        pieces.append(Piece(info, 0, info.numel, torch.empty(info.numel)))
    stored.read(pieces)
    return flat(piece.values for piece in pieces)


def after(call):
    def read(one, root):
        call(one)
        return flat(one.module.parameters())

    return read


READERS = {
    "named_parameters": lambda one, _: flat(param for _, param in one.ddp.named_parameters()),
    "parameters": lambda one, _: torch.nn.utils.parameters_to_vector(one.ddp.parameters()).detach(),
    "averaged model": lambda one, _: averaged(one),
    "state_dict": lambda one, _: flat(one.ddp.state_dict().values()),
    "state_dict of the module": lambda one, _: flat(one.module.state_dict().values()),
    "state_dict of a part": lambda one, _: flat(
        [*one.module.first.state_dict().values(), *one.module.last.state_dict().values()]
    ),
    "a copy of the module": lambda one, _: flat(copy.deepcopy(one.module).parameters()),
    "checkpoint": saved,
    "check_replicas": after(lambda one: one.ddp.check_replicas()),
    "broadcast_params": after(lambda one: one.ddp.broadcast_params()),
    "state_dict of the optimizer": after(lambda one: one.optimizer.state_dict()),
    "rebuild": after(lambda one: one.ddp.rebuild()),
    "detach": after(lambda one: one.ddp.detach()),
    "finish_param_sync": after(lambda one: one.ddp.finish_param_sync()),
    "start_param_sync by force": after(lambda one: one.ddp.start_param_sync(force_sync=True)),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_reads_parameters_in_a_known_way_gets_those_of_after_the_step(read, tmp_path):
    def program(one):
        assert one.is_hidden == one.ddp.policy.overlaps_params
        return read(one, tmp_path / str(one.ddp.policy.overlaps_params))

    for found, expected in zip(run_ranks(program), run_ranks(program, overlaps=False), strict=True):
        assert torch.isfinite(found).all()
        assert torch.equal(found, expected)


DIRECT = {
    "parameters of the module": lambda one: flat(one.module.parameters()),
    "values held from before": lambda one: flat([one.module.first.weight.data]),
}


@pytest.mark.parametrize("read", DIRECT.values(), ids=DIRECT)
def test_a_direct_read_finds_nan_and_one_call_helps(read):
    def program(one):
        early = read(one)
        one.ddp.finish_param_sync()
        return early, read(one)

    for early, late in run_ranks(program):
        assert early.isnan().all()
        assert torch.isfinite(late).all()


def test_an_average_is_made_of_the_inner_module_as_a_wrapper_cannot_be_copied():
    def program(one):
        with pytest.raises(PhaseError, match=r"copy the inner module: copy\.deepcopy\(ddp\.module\)"):
            AveragedModel(one.ddp)

    run_ranks(program)
