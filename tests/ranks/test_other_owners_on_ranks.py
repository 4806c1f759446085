"""Data-parallel wrappers of torch inside a wrapped module and around it, made before and after: torch's own, on two ranks.

Both reduce the same gradients. Without the checks some give wrong weights, and others fail with errors about something else.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Rank
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

import megabucket as mb
from megabucket.errors import ForeignWrapperError, MegabucketError, ParametersChangedError, UnsupportedParameterError

pytestmark = pytest.mark.dist

RANKS = 2
TORCH_DDP = torch.nn.parallel.DistributedDataParallel


class Outer(torch.nn.Module):
    """A module with a part and a head of its own."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.part = part
        self.head = torch.nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.part(inputs))  # type: ignore[no-any-return]


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def ours(module: torch.nn.Module, rank: Rank, **fields: Any) -> mb.DistributedDataParallel:
    return mb.DistributedDataParallel(module, mb.DistributedDataParallelConfig(**fields), process_group=rank.group)


def fsdp1(module: torch.nn.Module, rank: Rank, **arguments: Any) -> torch.nn.Module:
    return FullyShardedDataParallel(module, process_group=rank.group, device_id=torch.device("cpu"), **arguments)


def cut(module: torch.nn.Module, rank: Rank) -> torch.nn.Module:
    return fully_shard(module, mesh=DeviceMesh.from_group(rank.group, "cpu"))


OTHERS: dict[str, Callable[[torch.nn.Module, Rank], torch.nn.Module]] = {
    "DistributedDataParallel": lambda module, rank: TORCH_DDP(module, process_group=rank.group),
    "DataParallel": lambda module, _: torch.nn.DataParallel(module),
    "replicate": lambda module, rank: replicate(module, process_group=rank.group),
    "FullyShardedDataParallel": fsdp1,
    "FullyShardedDataParallel of given parameters": lambda module, rank: fsdp1(module, rank, use_orig_params=True),
    "fully_shard": cut,
}
AROUND = {
    "the wrapper": lambda ddp: ddp,
    "its module": lambda ddp: ddp.module,
    "a part of its module": lambda ddp: ddp.module[0],
    "a module with the wrapper in it": Outer,
}


def error_of(program: Callable[[], object]) -> str:
    """Return the class and the text of the error of a program, without the number of the rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about FSDP on a CPU
        try:
            program()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            gc.collect()
    return "no error"


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def errors_around(rank: Rank, kind: str, fields: dict[str, Any]) -> dict[str, str]:
    def program(place: str) -> None:
        ddp = ours(net(), rank, **fields)
        try:
            other = OTHERS[kind](AROUND[place](ddp), rank)
            model = ddp if place == "a part of its module" else other
            model(torch.ones(3, 4)).sum().backward()
        finally:
            ddp.detach()

    return {place: error_of(lambda place=place: program(place)) for place in AROUND}


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("kind", OTHERS)
def test_another_wrapper_around_ours_is_refused_by_name_before_any_backward(pool, kind, is_sharded):
    first, *others = pool.run(errors_around, kind, {"use_distributed_optimizer": is_sharded}, ranks=RANKS)

    assert others == [first]
    for place, text in first.items():
        assert text.startswith("ForeignWrapperError: "), (place, text)
        assert re_name(kind) in text.partition(", owns the gradients of ")[0], (place, text)
        assert "'0.weight'" in text


def re_name(kind: str) -> str:
    # torch's replicate() makes its DistributedDataParallel in the first forward.
    return "D" if kind == "replicate" else kind.partition(" ")[0]


def errors_inside(rank: Rank, kind: str) -> list[str]:
    def as_a_part() -> None:
        module = net()
        module[0] = OTHERS[kind](module[0], rank)
        ours(module, rank)

    def as_the_module() -> None:
        ours(OTHERS[kind](net(), rank), rank)

    def of_the_same_module() -> None:
        module = net()
        other = OTHERS[kind](module, rank)
        ddp = ours(module, rank)
        try:
            other(torch.ones(3, 4)).sum().backward()
        finally:
            ddp.detach()

    return [error_of(program) for program in (as_a_part, as_the_module, of_the_same_module)]


@pytest.mark.parametrize("kind", OTHERS)
def test_another_wrapper_that_was_there_first_is_refused_by_name_inside_ours_and_around_it(pool, kind):
    first, *others = pool.run(errors_inside, kind, ranks=RANKS)

    assert others == [first]
    for text in first:
        assert text.startswith("ForeignWrapperError: "), text
        assert re_name(kind) in text.partition(", owns the gradients of ")[0], text
    assert ", at '0" in first[0]
    assert " inside this module, owns" in first[0]


# What is allowed #


def largest_difference_beside_torch_ddp(rank: Rank, order: str) -> float:
    """Train one part with ours and the rest with torch DDP, which ignores the part; compare with torch DDP alone."""
    generator = torch.Generator().manual_seed(rank.index)
    batches = [torch.randn(5, 4, generator=generator) for _ in range(4)]
    torch.manual_seed(1)
    model = Outer(net())
    torch.manual_seed(1)
    expected = Outer(net())
    alone = TORCH_DDP(expected, process_group=rank.group)
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.1)
    for batch in batches:
        step(alone, optimizer, batch)

    ignored = [f"part.{name}" for name, _ in model.part.named_parameters()]
    if order == "ours first":
        model.part = ours(model.part, rank)
        ignored = [name for name, _ in model.named_parameters() if name.startswith("part.")]
    model._ddp_params_and_buffers_to_ignore = ignored
    theirs = TORCH_DDP(model, process_group=rank.group)
    if order != "ours first":
        model.part = ours(model.part, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for batch in batches:
        step(theirs, optimizer, batch)
    model.part.detach()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


@pytest.mark.parametrize("order", ["ours first", "torch DDP first"])
def test_a_part_that_torch_ddp_ignores_trains_beside_it_as_under_torch_ddp_alone(pool, order):
    assert pool.run(largest_difference_beside_torch_ddp, order, ranks=RANKS) == [0.0, 0.0]


def wrap_with_a_teacher(rank: Rank, kind: str) -> str:
    def program() -> None:
        module = net()
        teacher = OTHERS[kind](torch.nn.Linear(2, 2), rank)
        teacher.requires_grad_(False)
        module.append(teacher)
        ddp = ours(module, rank, init_sync=False)
        ddp(torch.ones(3, 4)).sum().backward()
        ddp.detach()

    return error_of(program)


@pytest.mark.parametrize("kind", ["DistributedDataParallel", "fully_shard"])
def test_a_frozen_part_may_be_in_another_wrapper(pool, kind):
    assert pool.run(wrap_with_a_teacher, kind, ranks=RANKS) == ["no error"] * RANKS


def use_after_ours_is_gone(rank: Rank, ending: str) -> str:
    def program() -> None:
        module = net()
        ddp = ours(module, rank)
        if ending == "detached":
            ddp.detach()
        else:
            del ddp
            module = net()
            gc.collect()
        TORCH_DDP(module, process_group=rank.group)(torch.ones(3, 4)).sum().backward()

    return error_of(program)


@pytest.mark.parametrize("ending", ["detached", "dropped"])
def test_torch_ddp_takes_a_module_after_our_wrapper_is_gone(pool, ending):
    assert pool.run(use_after_ours_is_gone, ending, ranks=RANKS) == ["no error"] * RANKS


def torch_ddp_of_another_model(rank: Rank) -> str:
    def program() -> None:
        ddp = ours(net(), rank)
        other = TORCH_DDP(net(), process_group=rank.group)
        (other(torch.ones(3, 4)).sum() + ddp(torch.ones(3, 4)).sum()).backward()
        ddp.detach()

    return error_of(program)


def test_torch_ddp_of_another_model_works_beside_ours(pool):
    assert pool.run(torch_ddp_of_another_model, ranks=RANKS) == ["no error"] * RANKS


def fsdp_that_ignores_ours(rank: Rank, kind: str) -> str:
    def program() -> None:
        part = ours(net(), rank)
        if kind == "fully_shard":
            mesh = DeviceMesh.from_group(rank.group, "cpu")
            model = fully_shard(Outer(part), mesh=mesh, ignored_params=set(part.parameters()))
        else:
            model = fsdp1(Outer(part), rank, ignored_modules=[part])
        model(torch.ones(3, 4)).sum().backward()
        part.detach()

    return error_of(program)


@pytest.mark.parametrize("kind", ["fully_shard", "FullyShardedDataParallel"])
def test_a_part_that_fsdp_ignores_is_ours(pool, kind):
    assert pool.run(fsdp_that_ignores_ours, kind, ranks=RANKS) == ["no error"] * RANKS


# One rank alone, and what is seen by other names #


def around_on_one_rank(rank: Rank) -> list[str]:
    """Call the module through torch's DataParallel, which waits for nobody, on the second rank only."""
    module = net()
    other = torch.nn.DataParallel(module)
    ddp = ours(module, rank)
    found = []
    for _ in range(2):
        with pytest.raises(MegabucketError) as caught:
            (other if rank.index == 1 else ddp)(torch.ones(3, 4)).sum().backward()
        found.append(caught.typename)
    ddp(torch.ones(3, 4)).sum().backward()  # without it
    ddp.detach()
    return found


def test_a_wrapper_around_ours_on_one_rank_only_fails_the_step_on_all(pool):
    calls, refused = pool.run(around_on_one_rank, ranks=RANKS)

    assert refused == ["ForeignWrapperError"] * 2
    assert calls == ["PeerFailedError"] * 2


def replicated_with_fsdp(rank: Rank) -> None:
    ddp = ours(net(), rank)
    replicate_with_fsdp(ddp.module, mesh=DeviceMesh.from_group(rank.group, "cpu"))
    with pytest.raises((ForeignWrapperError, ParametersChangedError)):
        ddp(torch.ones(3, 4)).sum().backward()
    ddp.detach()


def test_replicate_of_fsdp_is_named_at_the_first_step_at_the_latest(pool):
    pool.run(replicated_with_fsdp, ranks=RANKS)


def wrap_localized_dtensors(rank: Rank) -> None:
    module = parallelize_module(net(), DeviceMesh.from_group(rank.group, "cpu"), {"0": ColwiseParallel()})
    _pre_dp_module_transform(module)
    with pytest.raises(UnsupportedParameterError, match=r"'0\.weight'.*_pre_dp_module_transform"):
        mb.DistributedDataParallel(module, process_group=dist.group.WORLD if rank.size == dist.get_world_size() else rank.group)


def test_parameters_that_torch_makes_dtensors_of_in_each_forward_are_refused_by_the_name_of_that_transform(pool):
    pool.run(wrap_localized_dtensors, ranks=RANKS)
