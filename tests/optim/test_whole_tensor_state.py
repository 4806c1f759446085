"""State of parameters that are updated whole: saved, loaded, rebuilt, read and written. Gradients are exact, so bits agree."""

import contextlib
import copy

import pytest
import torch
from optim_ranks import run_wrapped
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from typer.testing import CliRunner
from whole_ranks import run_ranks
from whole_stand_ins import OPTIMIZERS, SHAPES, Tensors, factors_of, make
from whole_training import Alone, assert_same, seed_of, train, weights_of

from megabucket import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from megabucket.checkpoint.convert.dcp import load_dcp, save_dcp
from megabucket.cli.main import app
from megabucket.comm import LocalCommunicator
from megabucket.errors import LayoutMismatchError

NAMES = pytest.mark.parametrize("name", OPTIMIZERS)
AT_NIGHT = pytest.mark.nightly
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SIZE = 4
"""Of the ranks whose gradients make a step, whoever takes it."""
TARGETS = [
    {"size": 1, "bucket_size": 10**6},
    {"size": 2, "bucket_size": 20},
    {"size": 4, "bucket_size": 150},
    {"size": 2, "sharded": False},
]
SOURCE = {"size": 4, "bucket_size": 64}


def exact(ddp, optimizer, steps, rank, size):
    """Train on the gradients of all four ranks of a step, on any number of ranks; return the weights after each step."""
    found = []
    for step in steps:
        shares = range(SIZE // size * rank, SIZE // size * (rank + 1))
        for share in shares:
            with contextlib.nullcontext() if share == shares[-1] else ddp.no_sync():
                (ddp(seed_of(step, share)) / SIZE).backward()
        optimizer.step()
        optimizer.zero_grad()
        ddp.finish_param_sync()
        found.append(weights_of(ddp.module))
    return found


def run(name, dtype, program, *, size, **fields):
    """Call ``program(go_on, ddp, optimizer)`` on each rank; ``go_on(steps)`` is ``exact``."""

    def play(rank, ddp, optimizer):
        return program(lambda steps: exact(ddp, optimizer, steps, rank, size), ddp, optimizer)

    return run_ranks(size, name, play, dtype=dtype, grad_reduction="sum", **fields)


def begin(name, dtype, save, **fields):
    def program(go_on, ddp, optimizer):
        go_on(range(3))
        return save(ddp, optimizer)

    return run(name, dtype, program, **fields)[0]


def resume(name, dtype, load, **fields):
    def program(go_on, ddp, optimizer):
        go_on([7])  # other weights and state, which the load must replace
        load(ddp, optimizer)
        return go_on(range(3, 6))

    return run(name, dtype, program, **fields)


@NAMES
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=AT_NIGHT), torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_checkpoint_resumes_with_other_buckets_owners_and_ranks(name, dtype, target, tmp_path):
    begin(name, dtype, lambda ddp, optimizer: save_checkpoint(tmp_path, ddp, optimizer, step=3), **SOURCE)

    found = resume(name, dtype, lambda ddp, optimizer: load_checkpoint(tmp_path, ddp, optimizer), **target)

    alone = Alone(name, SIZE, dtype).train(range(6))[3:]
    for of_rank in found:
        assert_same(of_rank, alone)


@NAMES
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=AT_NIGHT)], ids=str)
@pytest.mark.parametrize("target", [pytest.param(TARGETS[0], marks=AT_NIGHT), *TARGETS[1:3]], ids=str)
def test_a_state_dict_resumes_with_other_buckets_owners_and_ranks(name, dtype, target):
    model, state = begin(name, dtype, lambda ddp, opt: (copy.deepcopy(ddp.state_dict()), opt.state_dict()), **SOURCE)

    def load(ddp, optimizer):
        ddp.load_state_dict(model)
        optimizer.load_state_dict(copy.deepcopy(state))

    found = resume(name, dtype, load, **target)

    alone = Alone(name, SIZE, dtype).train(range(6))[3:]
    for of_rank in found:
        assert_same(of_rank, alone)


@NAMES
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=AT_NIGHT)], ids=str)
def test_state_of_an_all_reduced_run_resumes_on_owners(name, dtype, tmp_path):
    source = {**SOURCE, "sharded": False}
    begin(name, dtype, lambda ddp, optimizer: save_checkpoint(tmp_path, ddp, optimizer, step=3), **source)

    found = resume(name, dtype, lambda ddp, optimizer: load_checkpoint(tmp_path, ddp, optimizer), size=4, bucket_size=150)

    alone = Alone(name, SIZE, dtype).train(range(6))[3:]
    for of_rank in found:
        assert_same(of_rank, alone)


@NAMES
@DTYPES
def test_a_rebuild_keeps_everything(name, dtype):
    def program(go_on, ddp, optimizer):
        found = go_on(range(2))
        ddp.rebuild(ddp.ddp_config.model_copy(update={"bucket_size": 150}))  # other owners
        found += go_on(range(2, 4))
        ddp.rebuild()
        return found + go_on(range(4, 6))

    alone = Alone(name, SIZE, dtype).train(range(6))
    for of_rank in run(name, dtype, program, **SOURCE):
        assert_same(of_rank, alone)


# From and to plain torch #

PLAIN = ["Muon, AdamW", "Adafactor", "LAMB"]
"""Those that step on 16-bit tensors."""


def plain_run(name, dtype, num_steps=2):
    """Return a model and optimizers that plain torch has trained in the dtype of the model."""
    model = Tensors(dtype)
    optimizers = make(name, model)
    for step in range(num_steps):
        for key, param in model.named_parameters():
            param.grad = torch.empty_like(param).copy_(factors_of(step)[key]) if param.numel() else None
        for optimizer in optimizers:
            optimizer.step()
    return model, optimizers


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", PLAIN)
@DTYPES
def test_state_of_plain_torch_moves_in_at_the_start_or_is_loaded_part_by_part(name, dtype, sharded):
    model, plain = plain_run(name, dtype)
    states = [optimizer.state_dict() for optimizer in plain]

    def adopting(ddp):
        inner = make(name, ddp.module)
        for optimizer, state in zip(inner, states, strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))
        return DistributedOptimizer(inner, ddp)

    def loading(rank, ddp, optimizer):
        for part, state in zip(optimizer.parts, states, strict=True):
            part.load_state_dict(copy.deepcopy(state))
        return train(ddp, optimizer, range(3), rank)

    switches = {"use_distributed_optimizer": sharded, "bucket_size": 64}
    adopted = run_wrapped(2, model, lambda rank, ddp, optimizer: train(ddp, optimizer, range(3), rank), adopting, **switches)
    loaded = run_ranks(2, name, loading, model=model, sharded=sharded)

    assert_same(adopted, loaded)
    if dtype == torch.float32:
        alone = Alone(name, 2)
        alone.mains, alone.optimizers = plain_run(name, dtype)
        assert_same([weights for _, weights in adopted[0]], alone.train(range(3)))


@pytest.mark.parametrize("name", ["Adafactor", "LAMB", "AdamW on whole tensors"])
@DTYPES
def test_a_checkpoint_of_a_plain_optimizer_is_loaded_on_owners_and_one_of_theirs_by_a_plain_one(name, dtype, tmp_path):
    # Plain ones fail on tensors without elements.
    switches = {"use_distributed_optimizer": False, "grad_reduce_in_fp32": dtype == torch.float32}
    model = Tensors(dtype, [name for name in SHAPES if name != "empty"])

    def plain_step(ddp, optimizer, step, rank):
        ddp(seed_of(step, rank)).backward()
        optimizer.step()
        ddp.zero_grad()
        return weights_of(ddp.module)

    def begin_plain(rank, ddp, optimizer):
        plain_step(ddp, optimizer, 0, rank)
        save_checkpoint(tmp_path / "plain", ddp, optimizer, step=1)
        return plain_step(ddp, optimizer, 1, rank)

    def go_on(rank, ddp, optimizer):
        train(ddp, optimizer, [8], rank)
        load_checkpoint(tmp_path / "plain", ddp, optimizer, cast=True)
        save_checkpoint(tmp_path / "owners", ddp, optimizer, step=1)
        return train(ddp, optimizer, [1], rank)[0][1], optimizer.state_dict()["state"]

    def go_on_plain(rank, ddp, optimizer):
        load_checkpoint(tmp_path / "owners", ddp, optimizer, cast=True)
        return plain_step(ddp, optimizer, 1, rank)

    expected = run_wrapped(2, model, begin_plain, lambda ddp: make(name, ddp.module)[0], **switches)
    (weights, state), other = run_ranks(2, name, go_on, model=model)
    returned = run_wrapped(2, model, go_on_plain, lambda ddp: make(name, ddp.module)[0], **switches)

    assert_same(returned, expected)
    assert_same((weights, state), other)
    values = [value for of in state.values() for key, value in of.items() if isinstance(value, torch.Tensor) and key != "step"]
    assert {value.dtype for value in values} == {torch.float32}
    if dtype == torch.float32:
        assert_same(weights, expected[0])


# By parameter #


def test_nested_state_is_read_as_it_is_and_what_is_written_into_it_counts():
    def program(rank, ddp, optimizer):
        train(ddp, optimizer, range(2), rank)
        param = ddp.module.square
        if param in optimizer.state:  # on its owner
            optimizer.state[param]["GG"][0].fill_(7.0)
            optimizer.state[param]["Q"] = (torch.ones(8, 8), torch.zeros(8, 8))
        index = [id(one) for group in optimizer.param_groups for one in group["params"]].index(id(param))
        state = optimizer.state_dict()["state"][index]
        return state["GG"][0], state["Q"]

    for found in run_ranks(2, "SOAP", program):
        assert_same(found, (torch.full((8, 8), 7.0), (torch.ones(8, 8), torch.zeros(8, 8))))


@NAMES
def test_owners_alone_show_state_which_every_rank_may_delete_and_replace(name):
    def program(rank, ddp, optimizer):
        train(ddp, optimizer, range(2), rank)
        owned = {name for name in optimizer.sharding.owner_of if getattr(ddp.module, name) in optimizer.state}
        is_right = owned == {name for name, owner in optimizer.sharding.owner_of.items() if owner == rank}
        optimizer.state.clear()
        return is_right, len(optimizer.state), train(ddp, optimizer, range(2, 4), rank)

    alone = Alone(name, 3)
    alone.train(range(2))
    for optimizer in alone.optimizers:
        optimizer.state.clear()
    expected = alone.train(range(2, 4))

    for is_right, num_left, found in run_ranks(3, name, program):
        assert is_right
        assert num_left == 0
        assert_same([weights for _, weights in found], expected)


# Through torch's state-dict API, and tools #


def without_empty(dtype):
    """Tensors of which all have elements: torch's API misses state of others."""
    return Tensors(dtype, [name for name in SHAPES if name != "empty"])


@NAMES
def test_torchs_state_dict_api_carries_state_to_other_owners(name):
    def save(rank, ddp, optimizer):
        train(ddp, optimizer, range(2), rank)
        saved = copy.deepcopy(get_state_dict(ddp, optimizer, options=StateDictOptions(full_state_dict=True)))
        return saved, train(ddp, optimizer, range(2, 4), rank)

    def load(rank, ddp, optimizer):
        of_model, of_optimizer = copy.deepcopy(saved)
        set_state_dict(ddp, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        return train(ddp, optimizer, range(2, 4), rank)

    (saved, expected), *_ = run_ranks(2, name, save, model=without_empty(torch.bfloat16))

    for sharded in (True, False):
        for found in run_ranks(2, name, load, model=without_empty(torch.bfloat16), bucket_size=150, sharded=sharded):
            assert_same(found, expected)


def test_flattened_state_is_refused_on_all_ranks_and_nothing_is_loaded():
    """Torch reads the keys of such state from ``optimizer.state``, and those of an owned parameter are at its owner."""
    flattened = StateDictOptions(flatten_optimizer_state_dict=True)

    def program(rank, ddp, optimizer):
        train(ddp, optimizer, range(2), rank)
        saved = get_optimizer_state_dict(ddp, optimizer, options=flattened)
        before = optimizer.state_dict()
        with pytest.raises(LayoutMismatchError, match="the optimizer state to load is not the same on all ranks"):
            set_optimizer_state_dict(ddp, optimizer, saved, options=flattened)
        assert_same(optimizer.state_dict(), before)

    run_ranks(2, "Muon, AdamW", program, model=without_empty(torch.float32))


@NAMES
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=AT_NIGHT), torch.bfloat16], ids=str)
def test_a_checkpoint_of_torch_distributed_holds_whole_state(name, dtype, tmp_path):
    def alone_of(bucket_size):
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=bucket_size)
        ddp = DistributedDataParallel(Tensors(dtype), config, communicator=LocalCommunicator())
        return ddp, DistributedOptimizer(make(name, ddp.module), ddp)

    ddp, optimizer = alone_of(64)
    train(ddp, optimizer, range(2), 0)
    save_dcp(tmp_path, ddp, optimizer)
    expected = train(ddp, optimizer, range(2, 4), 0)

    other, other_optimizer = alone_of(10**6)
    train(other, other_optimizer, [7], 0)
    load_dcp(tmp_path, other, other_optimizer, trusted=True)

    assert_same(train(other, other_optimizer, range(2, 4), 0), expected)


def test_a_checkpoint_of_owners_is_verified_and_written_again_for_other_ranks(tmp_path):
    def save(rank, ddp, optimizer):
        train(ddp, optimizer, range(2), rank)
        save_checkpoint(tmp_path / "old", ddp, optimizer, step=2)
        return train(ddp, optimizer, [2], rank)

    def load(rank, ddp, optimizer):
        load_checkpoint(tmp_path / "new", ddp, optimizer)
        return train(ddp, optimizer, [2], rank)

    expected = run_ranks(3, "SOAP", save, dtype=torch.bfloat16)
    for arguments in (["verify", "old"], ["reshard", "old", "new", "--ranks", "2"], ["diff", "old", "new"]):
        command, *rest = arguments
        paths = [str(tmp_path / one) if one in ("old", "new") else one for one in rest]
        assert CliRunner().invoke(app, ["checkpoint", command, *paths]).exit_code == 0, arguments

    assert_same(run_ranks(3, "SOAP", load, dtype=torch.bfloat16, bucket_size=200), expected)
