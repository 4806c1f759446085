"""Models cut by torch's ``parallelize_module``, wrapped over the data-parallel dimension of their mesh, on four ranks.

The oracles are a single process on the concatenated batch, and torch's own ``fully_shard`` with the same tensor parallelism.
"""

from __future__ import annotations

import copy
import itertools
import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dtensor_models import (
    CLIP,
    FORMS,
    LR,
    VOCABULARY,
    WIDTH,
    batches_of,
    loss_of,
    mesh_of,
    parallel_model,
    plain_model,
    train,
    whole,
    wrapped,
)
from pool import Rank, WorkerPool
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import megabucket as mb
from megabucket.errors import (
    ConfigError,
    ForeignWrapperError,
    LayoutMismatchError,
    MegabucketError,
    UnsupportedParameterError,
)

pytestmark = pytest.mark.dist

STEPS = 12
MESHES = {"tp 2 x dp 2": (2, 2), "tp 4": (1, 4), "tp 1 x dp 4": (4, 1)}
Weights = dict[str, torch.Tensor]


class Run(NamedTuple):
    initial: Weights
    weights: Weights
    norms: list[float]


def in_one_process(dp_size: int, num_microbatches: int = 1, dtype: torch.dtype = torch.float32) -> Run:
    model = plain_model(dtype)
    run = Run(_values(model), {}, [])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        for tokens in batches_of(step, dp_size, num_microbatches):
            (loss_of(model, tokens) / num_microbatches).backward()
        run.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    run.weights.update(_values(model))
    return run


def _values(model: nn.Module) -> Weights:
    return {name: whole(value).clone() for name, value in model.state_dict().items()}


def largest_error(weights: Weights, expected: Run) -> float:
    """The largest error of a weight, relative to the largest change of one in the same tensor."""
    moved = {name: (value - expected.initial[name]).abs().max() for name, value in expected.weights.items()}
    return max(float((weights[name] - value).abs().max() / moved[name]) for name, value in expected.weights.items())


# Training #


def train_wrapped(
    _: Rank, mesh_name: str, form: str, num_microbatches: int, fields: dict[str, Any]
) -> tuple[list[float], Weights]:
    mesh = mesh_of(MESHES[mesh_name], ("dp", "tp"))
    ddp, optimizer = wrapped(mesh, form, **fields)
    norms = train(ddp, optimizer, mesh["dp"], range(STEPS), num_microbatches=num_microbatches)
    ddp.check_replicas()
    weights = _values(ddp)
    module = ddp.detach()
    assert type(module.up) is nn.Linear
    assert module.out.weight is module.emb.weight
    assert all(torch.equal(weights[name], value) for name, value in _values(module).items())
    return norms, weights


MODES: dict[str, dict[str, Any]] = {
    "all-reduced": {"overlap_grad_reduce": False},
    "all-reduced, overlapped": {},
    "sharded": {"use_distributed_optimizer": True, "overlap_grad_reduce": False},
    "sharded, overlapped": {"use_distributed_optimizer": True, "overlap_param_gather": True},
}
CELLS = list(itertools.product(MESHES, FORMS, (1, 3), MODES))
BY_DAY = {
    ("tp 2 x dp 2", "sequence parallel", 3, "sharded, overlapped"),
    ("tp 2 x dp 2", "tensor parallel", 1, "all-reduced, overlapped"),
}


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=[] if cell in BY_DAY else pytest.mark.nightly) for cell in CELLS], ids=str
)
def test_weights_and_norms_are_those_of_a_single_process(pool: WorkerPool, cell: tuple[str, str, int, str]) -> None:
    mesh_name, form, num_microbatches, mode = cell
    expected = in_one_process(MESHES[mesh_name][0], num_microbatches)
    assert min(expected.norms) > CLIP  # each step is clipped

    results = pool.run(train_wrapped, mesh_name, form, num_microbatches, MODES[mode], ranks=4)

    for norms, weights in results:
        assert largest_error(weights, expected) <= 1e-4
        assert norms == pytest.approx(expected.norms, rel=1e-6)


def train_beside_fsdp(_: Rank, dtype: torch.dtype) -> list[Run]:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    runs = []
    for is_ours in (True, False):
        if is_ours:
            model, optimizer = wrapped(mesh, "sequence parallel", dtype=dtype, use_distributed_optimizer=True)
            norms = train(model, optimizer, mesh["dp"], range(STEPS))
        else:
            theirs = fully_shard(parallel_model(mesh["tp"], "sequence parallel", dtype), mesh=mesh["dp"])
            adamw, norms = torch.optim.AdamW(theirs.parameters(), lr=LR), []
            clip = partial(_clip_as_torch, theirs, norms)
            train(theirs, adamw, mesh["dp"], range(STEPS), check=clip)
            model = theirs
        runs.append(Run({}, _values(model), norms))
    return runs


def _clip_as_torch(model: nn.Module, norms: list[float]) -> None:
    norms.append(float(whole(nn.utils.clip_grad_norm_(model.parameters(), CLIP))))


def test_weights_are_those_of_fully_shard_on_the_same_mesh(pool: WorkerPool) -> None:
    initial = _values(plain_model())

    for ours, theirs in pool.run(train_beside_fsdp, torch.float32, ranks=4):
        assert largest_error(ours.weights, theirs._replace(initial=initial)) <= 1e-4
        assert ours.norms == pytest.approx(theirs.norms, rel=1e-6)


@pytest.mark.nightly
def test_weights_in_16_bits_are_near_those_of_a_single_process_in_float32(pool: WorkerPool) -> None:
    # Main values are float32, so what differs is the rounding of activations and gradients: 2^-8 of each.
    expected = in_one_process(2)
    initial = _values(plain_model(torch.bfloat16))

    for ours, _ in pool.run(train_beside_fsdp, torch.bfloat16, ranks=4):
        assert ours.norms == pytest.approx(expected.norms, rel=0.03)
        moved = torch.cat([(value.float() - initial[name].float()).flatten() for name, value in ours.weights.items()])
        target = torch.cat([(value - expected.initial[name]).flatten() for name, value in expected.weights.items()])
        assert torch.cosine_similarity(moved, target, dim=0) > 0.98


# Meshes and placements #


def places_beside_torch(_: Rank) -> list[tuple[Any, Any]]:
    from megabucket.ddp.dtensors import Place

    found = []
    mesh = mesh_of((2, 2), ("a", "b"))
    for shape, first, second in itertools.product([(8, 6), (7, 5), (3, 1), (1, 4)], *[[Replicate(), Shard(0), Shard(1)]] * 2):
        tensor = distribute_tensor(torch.zeros(shape), mesh, [first, second])
        of_torch = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
        found.append(((tuple(tensor.to_local().shape), Place.of(tensor).offset), (tuple(of_torch[0]), tuple(of_torch[1]))))
    return found


def test_pieces_lie_where_torch_says(pool: WorkerPool) -> None:
    for found in pool.run(places_beside_torch, ranks=4):
        for (shape, offset), (torch_shape, torch_offset) in found:
            assert shape == torch_shape
            assert offset == torch_offset or 0 in shape  # an empty piece has no place


def train_on_three_dimensions(_: Rank, names: tuple[str, ...]) -> Weights:
    """One of the dimensions has one rank. ``other`` is of the program, but not of the model."""
    mesh = mesh_of((2, 1, 2), names)
    own = mesh["replicate", "dp"] if "replicate" in names else mesh["dp"]
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True)
    ddp = mb.DistributedDataParallel(parallel_model(mesh["tp"], "sequence parallel"), config, process_group=own)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=LR), ddp, clip_grad=CLIP)
    dp = mesh["replicate"] if "replicate" in names else mesh["dp"]
    train(ddp, optimizer, dp, range(STEPS))
    ddp.check_replicas()
    return _values(ddp)


@pytest.mark.parametrize("names", [("replicate", "dp", "tp"), ("other", "dp", "tp")], ids=lambda names: names[0])
def test_a_mesh_may_have_more_dimensions(pool: WorkerPool, names: tuple[str, ...]) -> None:
    expected = in_one_process(2 if names[0] == "replicate" else 1)

    for weights in pool.run(train_on_three_dimensions, names, ranks=4):
        assert largest_error(weights, expected) <= 1e-4


class Scaled(nn.Module):
    """A replicated parameter whose gradient arrives as a part, as a whole and cut, by the way it is used."""

    def __init__(self, mesh: Any, use: str) -> None:
        super().__init__()
        self.mesh, self.use = mesh, use
        self.weight = nn.Parameter(distribute_tensor(torch.arange(4.0) + 1, mesh, [Replicate()]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.use == "part":  # each rank sums over its rows
            rows = DTensor.from_local(inputs, self.mesh, [Shard(0)])
            return (rows * self.weight).sum().full_tensor()
        if self.use == "whole":
            rows = DTensor.from_local(inputs, self.mesh, [Replicate()])
            return (rows * self.weight).sum().full_tensor()
        columns = distribute_tensor(inputs.sum(0), self.mesh, [Shard(0)])
        return (columns * self.weight).sum().full_tensor()


def grads_of_uses(rank: Rank, use: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient after the wrapper, and that of torch without one."""
    grads = []
    mesh = mesh_of((2, 2), ("dp", "tp"))
    inputs = torch.arange(8.0).reshape(2, 4) + (rank.index if use == "part" else 0)
    for wraps in (True, False):
        model: Any = Scaled(mesh["tp"], use)
        plain = model
        if wraps:
            model = mb.DistributedDataParallel(model, process_group=mesh["dp"])
        model(inputs).backward()
        (param,) = plain.parameters()
        grads.append(whole(param.grad).clone())
        if wraps:
            model.detach()
    return grads[0], grads[1]


@pytest.mark.parametrize("use", ["part", "whole", "cut"])
def test_a_replicated_parameter_takes_gradients_of_any_placement(pool: WorkerPool, use: str) -> None:
    results = pool.run(grads_of_uses, use, ranks=4)

    # Torch's gradient is the sum over tp; the wrapper takes the mean over dp as well. Ranks 0 and 2 are of different tp groups.
    expected = (results[0][1] + results[2][1]) / 2
    for ours, _ in results:
        assert torch.equal(ours, expected)


class Local(nn.Module):
    """Computes with the local values of a parameter whose mesh has the wrapper's dimension, as torchtitan's embedding does."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.arange(4.0) + 1, mesh, [Replicate(), Shard(0)]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs * self.weight.to_local()).sum()


def grads_on_the_whole_mesh(rank: Rank) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    inputs = torch.arange(2.0) + rank.index
    ddp = mb.DistributedDataParallel(Local(mesh), process_group=mesh["dp"])
    ddp(inputs).backward()
    (param,) = ddp.parameters()
    grad = param.grad.clone()
    ddp.detach()
    return inputs, grad


def test_the_mesh_of_a_parameter_may_have_the_dimension_of_the_wrapper(pool: WorkerPool) -> None:
    results = pool.run(grads_on_the_whole_mesh, ranks=4)

    for tp_rank in range(2):  # ranks 0 and 2, and 1 and 3, hold the same piece
        mean = (results[tp_rank][0] + results[tp_rank + 2][0]) / 2
        for dp_rank in range(2):
            assert torch.equal(results[tp_rank + 2 * dp_rank][1], mean)


# What torch does with a module #


def use_as_a_module(_: Rank) -> None:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    ddp, optimizer = wrapped(mesh, "sequence parallel", use_distributed_optimizer=True)
    train(ddp, optimizer, mesh["dp"], range(2))
    module, tokens = ddp.module, batches_of(0, 1, 1)[0]
    # Read outside of the module's own forward.
    assert isinstance(module.emb.weight, DTensor)
    assert module.emb.weight.shape == (VOCABULARY, WIDTH)
    assert not isinstance(next(module.parameters()), DTensor)
    assert isinstance(module.up, nn.Linear)
    assert repr(module) == repr(plain_model())
    assert list(module.state_dict()) == list(plain_model().state_dict())
    with pytest.raises(AttributeError, match="bias"):
        module.emb.bias  # noqa: B018 - no parameter
    # A copy has its own values.
    copied, before = copy.deepcopy(module), whole(module(tokens))
    train(ddp, optimizer, mesh["dp"], range(2, 4))
    assert torch.equal(whole(copied(tokens)), before)
    assert not torch.equal(whole(module(tokens)), before)
    copied.load_state_dict(module.state_dict())
    assert torch.equal(whole(copied(tokens)), whole(module(tokens)))
    average = torch.optim.swa_utils.AveragedModel(module)
    average.update_parameters(module)
    assert torch.equal(whole(average(tokens)), whole(module(tokens)))
    with pytest.raises(UnsupportedParameterError, match="copy of a wrapped module"):
        mb.DistributedDataParallel(copied, process_group=mesh["dp"])
    assert isinstance(copied.emb.weight, DTensor)  # a failed wrapping changes nothing
    # Whole plain tensors load as well.
    module.load_state_dict({name: value + 1 for name, value in plain_model().state_dict().items()})
    assert all(torch.equal(whole(value), plain_model().state_dict()[name] + 1) for name, value in ddp.state_dict().items())
    ddp.detach()


def test_the_module_is_used_as_before(pool: WorkerPool) -> None:
    pool.run(use_as_a_module, ranks=4)


def train_compiled(_: Rank, backend: str) -> tuple[float, int]:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    torch._dynamo.reset()
    weights = []
    for compiles in (False, True):
        ddp, optimizer = wrapped(mesh, "sequence parallel", use_distributed_optimizer=True)
        model: Any = torch.compile(ddp.module, backend=backend, fullgraph=True) if compiles else ddp
        train(model, optimizer, mesh["dp"], range(4))
        weights.append(_values(ddp))
        ddp.detach()
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return max(float((weights[0][name] - value).abs().max()) for name, value in weights[1].items()), count


@pytest.mark.nightly
def test_the_module_compiles_to_one_graph(pool: WorkerPool) -> None:
    for difference, num_graphs in pool.run(train_compiled, "eager", ranks=4):
        assert (difference, num_graphs) == (0.0, 1)


def rebuild_with_a_frozen_layer(_: Rank) -> None:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    ddp, optimizer = wrapped(mesh, "sequence parallel", use_distributed_optimizer=True)
    train(ddp, optimizer, mesh["dp"], range(2))
    for param in ddp.module.norm.parameters():
        param.requires_grad_(False)
    ddp.rebuild()
    frozen = whole(ddp.module.norm.weight).clone()
    train(ddp, optimizer, mesh["dp"], range(2, 4))
    ddp.check_replicas()
    assert torch.equal(whole(ddp.module.norm.weight), frozen)
    ddp.detach()


def test_a_rebuild_keeps_the_pieces(pool: WorkerPool) -> None:
    pool.run(rebuild_with_a_frozen_layer, ranks=4)


# State #


def resume_by_torch(_: Rank, path: str, sharded: bool, is_plain: bool) -> None:
    def make() -> tuple[Any, Any]:
        ddp, optimizer = wrapped(mesh, "sequence parallel", use_distributed_optimizer=sharded)
        return (ddp, torch.optim.AdamW(ddp.parameters(), lr=LR)) if is_plain else (ddp, optimizer)

    mesh = mesh_of((2, 2), ("dp", "tp"))
    ddp, optimizer = make()
    train(ddp, optimizer, mesh["dp"], range(3))
    of_model, of_optimizer = get_state_dict(ddp, optimizer)
    state = [value for of_param in of_optimizer["state"].values() for value in of_param.values()]
    assert all(isinstance(value, DTensor) for value in [*of_model.values(), *state] if value.ndim)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=path)
    options = StateDictOptions(full_state_dict=True)
    full_model, full_optimizer = get_state_dict(ddp, optimizer, options=options)

    by_dcp = make()
    of_model, of_optimizer = get_state_dict(*by_dcp)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=path)
    set_state_dict(*by_dcp, model_state_dict=of_model, optim_state_dict=of_optimizer)

    by_broadcast = make()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    is_source = mesh.get_rank() == 0
    set_model_state_dict(by_broadcast[0], copy.deepcopy(full_model) if is_source else {}, options=options)
    set_optimizer_state_dict(*by_broadcast, copy.deepcopy(full_optimizer) if is_source else {}, options=options)

    by_hand = make()  # before the optimizer has stepped
    by_hand[0].load_state_dict(ddp.state_dict())
    by_hand[1].load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch would share the tensors

    results = []
    for model, one in ((ddp, optimizer), by_dcp, by_broadcast, by_hand):
        train(model, one, mesh["dp"], range(3, 6))
        results.append(_values(model))
        model.detach()
    for resumed in results[1:]:
        assert all(torch.equal(resumed[name], value) for name, value in results[0].items())


@pytest.mark.parametrize(
    ("sharded", "is_plain"),
    [
        pytest.param(True, False, id="sharded"),
        pytest.param(False, True, id="all-reduced, plain", marks=pytest.mark.nightly),
        pytest.param(False, False, id="all-reduced", marks=pytest.mark.nightly),
    ],
)
def test_torch_saves_and_loads_dtensors(pool: WorkerPool, tmp_path: Path, sharded: bool, is_plain: bool) -> None:
    pool.run(resume_by_torch, str(tmp_path), sharded, is_plain, ranks=4)


def save_or_resume(_: Rank, mesh_name: str, path: str, steps: range, fields: dict[str, Any]) -> Weights:
    mesh = mesh_of(MESHES[mesh_name], ("dp", "tp"))
    ddp, optimizer = wrapped(mesh, "sequence parallel", **fields)
    if steps.start:
        mb.load_checkpoint(path, ddp, optimizer)
    # Every mesh trains on the batches of two data-parallel ranks.
    size, rank = mesh["dp"].size(), mesh["dp"].get_local_rank()
    for step in steps:
        optimizer.zero_grad()
        (tokens,) = batches_of(step, 2, 1)
        loss_of(ddp, tokens.chunk(size)[rank]).backward()
        optimizer.step()
    mb.save_checkpoint(path, ddp, optimizer, step=steps.stop)
    weights = _values(ddp)
    ddp.detach()
    return weights


def test_a_checkpoint_is_resumed_under_another_tensor_parallelism(pool: WorkerPool, tmp_path: Path) -> None:
    expected, path = in_one_process(2), str(tmp_path / "checkpoint")
    sharded = {"use_distributed_optimizer": True}

    pool.run(save_or_resume, "tp 2 x dp 2", path, range(4), sharded, ranks=4)
    pool.run(save_or_resume, "tp 1 x dp 4", path, range(4, 8), {}, ranks=4)
    results = pool.run(save_or_resume, "tp 4", path, range(8, STEPS), sharded, ranks=4)

    for weights in results:
        assert largest_error(weights, expected) <= 1e-4


def save_buffers(_: Rank, path: str) -> None:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = parallel_model(mesh["tp"], "sequence parallel")
    model.register_buffer("table", distribute_tensor(torch.arange(4.0), mesh["tp"], [Replicate()]))
    ddp = mb.DistributedDataParallel(model, process_group=mesh["dp"])
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters()), ddp)
    mb.save_checkpoint(path, ddp, optimizer, step=1)
    model.table.to_local().zero_()
    mb.load_checkpoint(path, ddp, optimizer)
    assert whole(model.table).tolist() == [0.0, 1.0, 2.0, 3.0]
    model.table = distribute_tensor(torch.arange(4.0), mesh["tp"], [Shard(0)])
    with pytest.raises(ConfigError, match="the module buffer 'table' is a DTensor with the placements"):
        mb.save_checkpoint(path, ddp, optimizer, step=2)
    ddp.detach()


def test_a_checkpoint_holds_buffers_that_are_dtensors_and_whole(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(save_buffers, str(tmp_path / "checkpoint"), ranks=4)


# Whole matrices #


def train_with_muon(_: Rank) -> tuple[Weights, str]:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh["tp"], [Replicate()]))
    model[1].weight = nn.Parameter(distribute_tensor(model[1].weight.detach(), mesh["tp"], [Shard(0)]))
    model.forward = lambda x: _through(model, x, mesh["tp"])  # type: ignore[method-assign]
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True)
    ddp = mb.DistributedDataParallel(model, config, process_group=mesh["dp"])
    whole_one, cut = list(ddp.parameters())
    with pytest.raises(ConfigError, match=r"pieces of tensors that are cut over other ranks: '1.weight'") as refused:
        mb.DistributedOptimizer(torch.optim.Muon([whole_one, cut], lr=0.1), ddp)
    optimizer = mb.DistributedOptimizer([torch.optim.Muon([whole_one], lr=0.1), torch.optim.AdamW([cut], lr=0.1)], ddp)
    for step in range(3):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        ddp(inputs).backward()
        optimizer.step()
    weights = _values(ddp)
    ddp.detach()
    return weights, str(refused.value)


def _through(model: nn.Sequential, inputs: torch.Tensor, tp: Any) -> torch.Tensor:
    hidden = DTensor.from_local(inputs, tp, [Replicate()]) @ model[0].weight.T
    return (hidden @ model[1].weight.T).square().sum().full_tensor()


def test_a_matrix_that_is_whole_is_updated_at_its_owner_and_a_cut_one_is_refused(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    optimizers = [torch.optim.Muon([model[0].weight], lr=0.1), torch.optim.AdamW([model[1].weight], lr=0.1)]
    for step in range(3):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(inputs).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    for weights, _ in pool.run(train_with_muon, ranks=4):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=2e-2, atol=2e-2)  # Newton-Schulz runs in bfloat16


# Faults #


def wrap_wrongly(rank: Rank, fault: str) -> Exception | None:
    """Return the error: one that leaves the function would cost a new pool."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model, group = parallel_model(mesh["tp"], "sequence parallel"), mesh["dp"]
    if fault == "the default group":
        group = None
    elif fault == "the wrong dimension":
        group = mesh["tp"]
    elif fault == "another placement on some ranks":
        replicated = nn.Parameter(model.up.weight.detach().redistribute(placements=[Replicate()]))
        model.up.weight = replicated if rank.index % 2 else model.up.weight
    elif fault == "another mesh on some ranks" and rank.index >= 2:
        model.up.weight = nn.Parameter(distribute_tensor(whole(model.up.weight), mesh["tp"], [Shard(1)]))
    elif fault == "a partial parameter":
        model.norm.weight = nn.Parameter(DTensor.from_local(torch.ones(WIDTH), mesh["tp"], [Partial()]))
    elif fault == "FSDP2":
        fully_shard(model, mesh=mesh["dp"])
    elif fault == "hooks":
        model.norm.weight.register_hook(print)
    try:
        mb.DistributedDataParallel(model, process_group=group).detach()
    except MegabucketError as error:
        return error
    finally:
        assert all(type(part).__mro__[1] is nn.Module or fault == "FSDP2" for part in model.modules())
    return None


FAULTS = {
    "the default group": (UnsupportedParameterError, r"'emb.weight'.*S\(0\) along 'tp' of its mesh.*process_group=mesh"),
    "the wrong dimension": (UnsupportedParameterError, r"'emb.weight'.*S\(0\) along 'tp' of its mesh.*process_group=mesh"),
    "another placement on some ranks": (MegabucketError, r"up.weight|groups="),
    "another mesh on some ranks": (LayoutMismatchError, r"up.weight"),
    "a partial parameter": (UnsupportedParameterError, r"'norm.weight'.*P\(sum\)"),
    "FSDP2": (ForeignWrapperError, r"fully_shard"),
    "hooks": (UnsupportedParameterError, r"'norm.weight'.*hooks"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_wrapped_is_named_on_all_ranks(pool: WorkerPool, fault: str) -> None:
    kind, text = FAULTS[fault]

    for error in pool.run(wrap_wrongly, fault, ranks=4):
        assert isinstance(error, kind)
        assert re.search(text, str(error), re.DOTALL)
