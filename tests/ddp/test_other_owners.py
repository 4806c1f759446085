"""Wrappers of libraries that are not installed, known by the names of their classes; and second wrappers of our own.

Torch's own ones: ``tests/ranks/test_other_owners_on_ranks.py``. The classes here take a module as those of the libraries do.
"""

import gc

import pytest
import torch
from torch.nn.modules.module import _global_module_registration_hooks

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.errors import AlreadyWrappedError, ForeignWrapperError, PeerFailedError
from megabucket.testing import LoopbackWorld

MODES = pytest.mark.parametrize("is_sharded", [False, True])


class Takes(torch.nn.Module):
    """Registers the module, as apex and Megatron-Core do."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, inputs):
        return self.module(inputs)


class Hides(torch.nn.Module):
    """Sets the module without torch's registration, as DeepSpeed's engine does, and looks unknown attributes up in it."""

    def __init__(self, module):
        super().__init__()
        self._modules["module"] = module
        self.__dict__["module"] = module

    def __getattr__(self, name):
        return getattr(self.__dict__["module"], name)

    def forward(self, inputs):
        return self.module(inputs)


def named(name, base):
    module, _, own = name.rpartition(".")
    return type(own, (base,), {"__module__": module})


KINDS = {
    name: named(name, base)
    for name, base in {
        "deepspeed.runtime.engine.DeepSpeedEngine": Hides,
        "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel": Takes,
        "apex.parallel.distributed.DistributedDataParallel": Takes,
        "fairscale.nn.data_parallel.sharded_ddp.ShardedDataParallel": Takes,
    }.items()
}
KINDS["deepspeed.runtime.engine.DeepSpeedEngine of a subclass"] = type(
    "PipelineEngine", (KINDS["deepspeed.runtime.engine.DeepSpeedEngine"],), {}
)
OF_EACH_KIND = pytest.mark.parametrize("kind", KINDS)
INPUTS = torch.ones(3, 4)


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def wrap(module, **fields):
    return DistributedDataParallel(module, DistributedDataParallelConfig(**fields))


def owner_of(kind):
    return kind.partition(" ")[0]


@OF_EACH_KIND
def test_it_is_refused_inside_with_its_class_its_path_and_the_parameters(kind):
    module = net()
    module[2] = KINDS[kind](module[2])

    with pytest.raises(ForeignWrapperError) as caught:
        wrap(module)

    assert caught.value.owner == owner_of(kind)
    assert caught.value.where == "at '2' inside this module"
    assert caught.value.params == ("2.module.weight", "2.module.bias")
    assert not any("main_grad" in vars(param) for param in module.parameters())  # nothing was moved


@MODES
@OF_EACH_KIND
@pytest.mark.parametrize("place", ["wrapper", "module", "part", "outer module"])
def test_it_is_refused_around_ours_before_a_backward(kind, place, is_sharded):
    ddp = wrap(net(), use_distributed_optimizer=is_sharded)
    target = {"wrapper": ddp, "module": ddp.module, "part": ddp.module[2], "outer module": torch.nn.Sequential(ddp)}[place]

    def train():
        other = KINDS[kind](target)
        if place == "part":  # one that is called by the module is inside of it
            ddp.module[2] = other
        (ddp if place == "part" else other)(INPUTS)

    with pytest.raises(ForeignWrapperError) as caught:
        train()

    assert caught.value.owner == owner_of(kind)
    assert set(caught.value.params) >= {"2.weight", "2.bias"} or place == "part"


@OF_EACH_KIND
def test_one_that_was_made_first_is_refused_in_each_training_forward_until_it_is_left_out(kind):
    module = net()
    other = KINDS[kind](module)
    ddp = wrap(module)

    for _ in range(2):
        with pytest.raises(ForeignWrapperError, match="around this module"):
            other(INPUTS)
    other.eval()
    other(INPUTS)  # evaluation reduces nothing
    other.train()
    with torch.no_grad():
        other(INPUTS)

    ddp(INPUTS).sum().backward()
    assert ddp.sync.is_reduced


def test_a_refused_forward_on_one_rank_drops_the_step_of_all_and_the_next_one_runs():
    world = LoopbackWorld(2, timeout_s=20)

    def program(rank):
        module = net()
        other = KINDS["apex.parallel.distributed.DistributedDataParallel"](module)
        ddp = DistributedDataParallel(module, communicator=world.communicator(rank))
        with pytest.raises(PeerFailedError) as caught, ddp.step():
            (other if rank == 1 else ddp)(INPUTS).sum().backward()
        ddp(INPUTS).sum().backward()
        return str(caught.value)

    told, other = world.run(program)
    assert told == other
    assert "rank 1 failed in forward: ForeignWrapperError: apex.parallel.distributed.DistributedDataParallel" in told


def test_one_inside_is_refused_when_a_rebuild_finds_it_and_the_rebuild_works_without_it():
    ddp = wrap(net())
    plain = ddp.module[2]
    other = KINDS["deepspeed.runtime.engine.DeepSpeedEngine"](plain)
    ddp.module[2] = other

    with pytest.raises(ForeignWrapperError, match="'2' inside"):
        ddp.rebuild()
    ddp.module[2] = plain
    ddp.rebuild()

    ddp(INPUTS).sum().backward()
    assert ddp.sync.is_reduced


def test_a_frozen_teacher_in_one_is_no_second_owner():
    module = net()
    module.append(KINDS["apex.parallel.distributed.DistributedDataParallel"](torch.nn.Linear(2, 2)).requires_grad_(False))

    wrap(module)(INPUTS).sum().backward()


def test_one_around_a_module_of_ours_that_is_frozen_holds_nothing_of_ours():
    ddp = wrap(net())
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)

    KINDS["apex.parallel.distributed.DistributedDataParallel"](frozen)
    ddp(INPUTS).sum().backward()


def test_a_user_class_of_the_same_short_name_is_no_wrapper_of_a_library():
    class DeepSpeedEngine(Takes):
        pass

    module = net()
    module[0] = DeepSpeedEngine(module[0])
    ddp = wrap(module)

    DeepSpeedEngine(ddp)(INPUTS).sum().backward()
    assert ddp.sync.is_reduced


def test_wrappers_of_ours_that_are_gone_refuse_nothing_and_leave_one_hook():
    module = net()
    wrap(module).detach()
    before = len(_global_module_registration_hooks)
    for _ in range(5):
        wrap(net())
    gc.collect()

    other = KINDS["apex.parallel.distributed.DistributedDataParallel"](module)
    other(INPUTS).sum().backward()
    assert len(_global_module_registration_hooks) == before


# Two wrappers of our own, through a parent module #


@MODES
@pytest.mark.parametrize("order", ["part first", "parent first"])
def test_a_parent_and_a_part_cannot_both_be_wrapped(order, is_sharded):
    fields = {"use_distributed_optimizer": is_sharded}
    part, parent = net(), torch.nn.Sequential()
    parent.append(part)
    parent.append(torch.nn.Linear(2, 2))
    first, second = (part, parent) if order == "part first" else (parent, part)
    ddp = wrap(first, **fields)

    with pytest.raises(AlreadyWrappedError) as caught:
        wrap(second, **fields)

    prefix = "0." if second is parent else ""
    assert caught.value.params == tuple(f"{prefix}{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias"))
    ddp(INPUTS).sum().backward()  # the first one is unharmed
    ddp.finish_grad_sync()
    assert ddp.sync.is_reduced


def test_two_modules_that_share_one_part_cannot_both_be_wrapped_and_the_second_is_left_as_it_was():
    shared = torch.nn.Linear(4, 4)
    first, second = torch.nn.Sequential(shared, torch.nn.Linear(4, 2)), torch.nn.Sequential(torch.nn.Linear(4, 4), shared)
    wrap(first)

    with pytest.raises(AlreadyWrappedError) as caught:
        wrap(second)

    assert caught.value.params == ("1.weight", "1.bias")
    assert "main_grad" not in vars(second[0].weight)


def test_a_parent_may_be_wrapped_after_its_part_is_detached():
    part = net()
    parent = torch.nn.Sequential(part, torch.nn.Linear(2, 2))
    wrap(part).detach()

    ddp = wrap(parent, use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
    ddp(INPUTS).sum().backward()
    optimizer.step()
