"""``torch.distributed.checkpoint.state_dict`` on a wrapper and an optimizer, beside torch DDP and FSDP2.

Gradients are integers, equal on all ranks and independent of the weights, so everything must agree bit by bit, whatever the
number of ranks and whoever holds the state.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pool import FOUR_AT_NIGHT, Rank, WorkerPool
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import megabucket as mb

pytestmark = pytest.mark.dist

DISTRIBUTED_OPTIMIZER_TAKES_PART = True
"""Whether ``DistributedOptimizer`` answers torch's state-dict API."""

PLAIN = "a plain optimizer, all-reduced"
OURS = {
    PLAIN: {},
    "DistributedOptimizer, all-reduced": {},
    "DistributedOptimizer, sharded": {"use_distributed_optimizer": True},
}
KINDS = list(OURS) if DISTRIBUTED_OPTIMIZER_TAKES_PART else [PLAIN]
TORCH_DDP, FSDP2 = "torch DDP", "FSDP2"

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: MappingProxyType[str, MakeOptimizer] = MappingProxyType(
    {
        "AdamW, two groups, tensor lr": lambda params: torch.optim.AdamW(
            [{"params": params[:2]}, {"params": params[2:], "lr": torch.tensor(0.02), "weight_decay": 0.3}], lr=0.01
        ),
        "SGD": lambda params: torch.optim.SGD(params, lr=0.01),
        "SGD, momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    }
)
STATELESS = "SGD"

OPTIONS: MappingProxyType[str, dict[str, bool]] = MappingProxyType(
    {
        "no option": {},
        "full": {"full_state_dict": True},
        "cpu offload": {"cpu_offload": True},
        "broadcast from rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
        "full on rank 0, broadcast": {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True},
        "flattened": {"flatten_optimizer_state_dict": True},
        "not strict": {"strict": False},
        "without frozen": {"ignore_frozen_params": True, "strict": False},
    }
)
"""Together with ``full_state_dict`` torch loads no flattened state, whoever wraps: it looks for keys that are not flattened."""
OPTIONS_BY_DAY = ("no option", "full on rank 0, broadcast", "flattened", "without frozen")


class Part(torch.nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.randn(shape)), torch.nn.Parameter(torch.randn(shape[0]))


class Net(torch.nn.Module):
    """Tensors whose gradients are the factors they are multiplied by; a tied, a frozen one, a module buffer.

    One part has the name of an attribute of the wrapper.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.layout, self.head = Part(7, 5), Part(3, 4), Part(7, 5)
        self.frozen = Part(4, 2).requires_grad_(False)
        self.head.weight = self.first.weight
        self.scale = torch.nn.Parameter(torch.randn(1))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        terms = []
        for _, param in self.named_parameters():
            if param.requires_grad:
                whole = torch.Size(param.shape)
                terms.append((param * (12.0 * torch.randint(-5, 6, whole, generator=generator))).sum())
        self.seen += 1
        return torch.stack(terms).sum()


def trained_params(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [param for param in module.parameters() if param.requires_grad]


def made(rank: Rank, kind: str, optimizer: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = Net(seed)
    if kind == FSDP2:
        fully_shard(model, mesh=DeviceMesh.from_group(rank.group, "cpu", mesh=list(range(rank.size)), mesh_dim_names=("dp",)))
        return model, OPTIMIZERS[optimizer](trained_params(model))
    if kind == TORCH_DDP:
        theirs = torch.nn.parallel.DistributedDataParallel(model, process_group=rank.group)
        return theirs, OPTIMIZERS[optimizer](trained_params(theirs))
    config = mb.DistributedDataParallelConfig(bucket_size=20, **OURS[kind])
    ddp = mb.DistributedDataParallel(model, config, process_group=rank.group)
    plain = OPTIMIZERS[optimizer](trained_params(ddp))
    return ddp, plain if kind == PLAIN else mb.DistributedOptimizer(plain, ddp)


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        module(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def rates_spoiled(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Set other hyperparameters, which the load must replace."""
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.5
        group["lr"] = torch.tensor(0.5) if isinstance(group["lr"], torch.Tensor) else 0.5
    return optimizer


def outcome(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything, whole, by the names that torch's API gives it."""
    whole = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    of_model, of_optimizer = get_state_dict(module, optimizer, options=whole)
    return {key: copy.deepcopy(value) for key, value in {**of_model, **of_optimizer}.items()}


def alone(optimizer: str, num_before: int) -> dict[str, Any]:
    """Train one process, read its state after ``num_before`` steps, and train two more."""
    model = Net(1)
    plain = OPTIMIZERS[optimizer](trained_params(model))
    train(model, plain, range(num_before))
    get_optimizer_state_dict(model, plain)  # before the first step it makes state, and counts that as a step
    train(model, plain, range(num_before, num_before + 2))
    return outcome(model, plain)


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    missing = [f"{key} on one side" for key in found.keys() ^ expected.keys()]
    shared = [key for key in expected if key in found]
    return missing + [key for key in shared if not _equal(found[key], expected[key])]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    if isinstance(a, tuple | list):  # a load of a full state makes lists of tuples
        return list(a) == list(b)
    return bool(a == b)


# Through memory #


def through_memory(rank: Rank, kind: str, optimizer: str, options: dict[str, bool], num_before: int) -> dict[str, Any]:
    """Train, get, set in a fresh pair, train both: what was got, and the outcome of each."""
    flags = StateDictOptions(**options)
    module, first = made(rank, kind, optimizer, seed=1)
    train(module, first, range(num_before))
    of_model, of_optimizer = copy.deepcopy(get_state_dict(module, first, options=flags))
    got = {"model": copy.deepcopy(of_model), "optimizer": copy.deepcopy(of_optimizer)}
    assert of_model.keys() == get_model_state_dict(module, options=flags).keys()
    assert of_optimizer.keys() == get_optimizer_state_dict(module, first, options=flags).keys()
    other, second = made(rank, kind, optimizer, seed=2)
    rates_spoiled(second)
    if options.get("broadcast_from_rank0"):
        if rank.index:
            of_model, of_optimizer = {}, {}
        # Together they would leave the model out where its state is empty.
        set_model_state_dict(other, of_model, options=flags)
        set_optimizer_state_dict(other, second, of_optimizer, options=flags)
    else:
        set_state_dict(other, second, model_state_dict=of_model, optim_state_dict=of_optimizer, options=flags)
    train(module, first, range(num_before, num_before + 2))
    train(other, second, range(num_before, num_before + 2))
    return got | {"went on": outcome(module, first), "resumed": outcome(other, second)}


def through_memory_all(rank: Rank, kind: str, cases: list[tuple[str, dict[str, bool], int]]) -> list[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, in FSDP2 and in the API
        return [through_memory(rank, kind, *case) for case in cases]


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flat(value, f"{path}/{key}")
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from flat(value, f"{path}/{index}")
    else:
        yield path, tree


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerPool]:
    """Two ranks and no others: ``broadcast_from_rank0`` uses the default group."""
    pool = WorkerPool("forkserver", num_ranks=2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def of_torch_ddp(pair: WorkerPool) -> Callable[[str], list[list[dict[str, Any]]]]:
    """Return what torch DDP has, by the name of the options."""
    return functools.cache(lambda options: pair.run(through_memory_all, TORCH_DDP, cases_of(options), ranks=2))


def cases_of(options: str) -> list[tuple[str, dict[str, bool], int]]:
    flags = OPTIONS[options]
    # Torch asserts that a whole state that it loads has a tensor.
    names = [name for name in OPTIMIZERS if not (name == STATELESS and flags.get("full_state_dict"))]
    return [(name, flags, num_before) for name in names for num_before in (0, 3)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [pytest.param(one, marks=[] if one in OPTIONS_BY_DAY else pytest.mark.nightly) for one in OPTIONS]
)
def test_a_fresh_pair_takes_over_and_what_it_takes_is_what_torch_ddp_has(pair, of_torch_ddp, kind, options):
    flags, cases = OPTIONS[options], cases_of(options)

    ours = pair.run(through_memory_all, kind, cases, ranks=2)
    theirs = of_torch_ddp(options)

    wrong = []
    for rank in range(2):
        for (name, _, num_before), one, other in zip(cases, ours[rank], theirs[rank], strict=True):
            expected = alone(name, num_before)
            if flags.get("ignore_frozen_params"):
                expected = {key: value for key, value in expected.items() if not key.startswith("frozen")}
                one["resumed"] = {key: value for key, value in one["resumed"].items() if not key.startswith("frozen")}
            else:
                wrong += [f"{name} after {num_before}: {key}" for key in differing(one["went on"], expected)]
            wrong += [f"{name} resumed after {num_before}: {key}" for key in differing(one["resumed"], expected)]
            for part in ("model", "optimizer"):
                found = differing(dict(flat(one[part])), dict(flat(other[part])))
                wrong += [f"{name} after {num_before}, {part} beside torch DDP: {key}" for key in found]
    assert wrong == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_that_is_not_strict_says_what_torch_ddp_says(pair, kind):
    ours, theirs = (pair.run(load_with_gaps, one, ranks=2) for one in (kind, TORCH_DDP))

    assert ours == theirs == [((["scale"], ["extra"]), 'Unexpected key(s) in state_dict: "extra".')] * 2


def load_with_gaps(rank: Rank, kind: str) -> tuple[Any, str]:
    module, _ = made(rank, kind, STATELESS, seed=1)
    state = get_model_state_dict(module)
    del state["scale"]
    state["extra"] = torch.ones(2)
    found = set_model_state_dict(module, dict(state), options=StateDictOptions(strict=False))
    names = ([key.removeprefix("module.") for key in found[0]], [key.removeprefix("module.") for key in found[1]])
    try:
        set_model_state_dict(module, {**state, "scale": torch.ones(1)})
    except RuntimeError as error:
        return names, str(error).replace("module.", "").partition(":")[2].strip()
    return names, "no error"


# Through torch.distributed.checkpoint #


def save(rank: Rank, path: str, kind: str, optimizer: str, num_steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, first = made(rank, kind, optimizer, seed=1)
        train(module, first, range(num_steps))
        of_model, of_optimizer = get_state_dict(module, first)
        dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=path, process_group=rank.group)


def resume(rank: Rank, path: str, kind: str, optimizer: str, num_steps: int) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, second = made(rank, kind, optimizer, seed=2)
        rates_spoiled(second)
        of_model, of_optimizer = get_state_dict(module, second)
        state = {"model": of_model, "optim": of_optimizer}
        dcp.load(state, checkpoint_id=path, process_group=rank.group)
        set_state_dict(module, second, model_state_dict=state["model"], optim_state_dict=state["optim"])
        train(module, second, range(num_steps, num_steps + 2))
        return outcome(module, second)


def save_all(rank: Rank, path: str, kind: str) -> None:
    for optimizer, num_steps in CASES:
        save(rank, f"{path}/{optimizer} {num_steps}", kind, optimizer, num_steps)


def resume_all(rank: Rank, path: str, kind: str) -> list[dict[str, Any]]:
    return [resume(rank, f"{path}/{optimizer} {num_steps}", kind, optimizer, num_steps) for optimizer, num_steps in CASES]


CASES = [("AdamW, two groups, tensor lr", 0), ("AdamW, two groups, tensor lr", 3), ("SGD, momentum", 3), (STATELESS, 3)]
BY_DAY = [(kind, kind) for kind in KINDS] + [(kind, FSDP2) for kind in KINDS] + [(TORCH_DDP, kind) for kind in KINDS]
AT_NIGHT = [(kind, TORCH_DDP) for kind in KINDS] + [(FSDP2, kind) for kind in KINDS]
AT_NIGHT += [(kind, other) for kind in KINDS for other in KINDS if kind != other]
PAIRS = BY_DAY + [pytest.param(*pair, marks=pytest.mark.nightly) for pair in AT_NIGHT]


@pytest.mark.parametrize("ranks", [1, 2, FOUR_AT_NIGHT])
@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_what_two_ranks_have_saved_any_number_of_ranks_resumes(pool, tmp_path, writer, reader, ranks):
    pool.run(save_all, str(tmp_path), writer, ranks=2)

    by_rank = pool.run(resume_all, str(tmp_path), reader, ranks=ranks)

    wrong = [
        f"{optimizer} after {num_steps}: {key}"
        for found in by_rank
        for (optimizer, num_steps), one in zip(CASES, found, strict=True)
        for key in differing(one, alone(optimizer, num_steps))
    ]
    assert wrong == []
