"""Memory that is given back between two steps and taken again: bits, bytes, and what is refused meanwhile. Loopback worlds."""

import copy
import gc
import itertools
import re
import threading
import weakref
from pathlib import Path

import pytest
import torch
from owner_steps import experts, grads_of, on_ranks, replicas

from megabucket import (
    ChainedOptimizer,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    DynamicGradScaler,
    ShardedEMA,
    named_weights,
    save_checkpoint,
)
from megabucket.comm import ForwardingCommunicator, LocalCommunicator
from megabucket.config.resolve import fp32_local_params
from megabucket.ddp import offload
from megabucket.ddp.offload import Memory
from megabucket.errors import CallMismatchError, LayoutMismatchError, PeerFailedError, PhaseError, WrapperBrokenError
from megabucket.layout.owners import plan_owners
from megabucket.planning.memory import OffloadBytes, offload_bytes
from megabucket.testing import LoopbackWorld

KINDS = ("grads", "optimizer", "main_params", "params")
PHASES = [{}, {"params": True}, {"optimizer": False, "main_params": False}, {"grads": False}]


class Net(torch.nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(12, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5)).to(dtype)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))

    def forward(self, inputs):
        return self.layers(inputs).float().square().mean()


def batch(rank, step, dtype):
    return torch.randn(6, 12, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def train(rank, ddp, optimizer, between, *, steps=4, dtype=torch.float32, zeroes=False):
    """Return weights, state and averages after steps with something between them."""
    ema = ShardedEMA(optimizer, decay=0.5)
    for step in range(steps):
        for micro in range(2):
            with ddp.no_sync() if micro == 0 else torch.enable_grad():
                ddp(batch(rank, 10 * step + micro, dtype)).backward()
        optimizer.step()
        ema.update()
        ddp.zero_grad(set_to_none=not zeroes)
        between(ddp, step)
    ddp.finish_param_sync()
    values = {name: param.detach().clone() for name, param in ddp.module.named_parameters()}
    return values, copy.deepcopy(optimizer.state_dict()), ema.values()


def nothing(*_):
    return None


def phase(**flags):
    def between(ddp, _):
        with ddp.offload(**flags) as given:
            assert given.held == []
            assert set(given.freed_bytes) <= set(KINDS)

    return between


def on_world(size, program, *, dtype=torch.float32, **config):
    world, fields = LoopbackWorld(size, timeout_s=20), {"bucket_size": 100, **config}

    def play(rank):
        ddp = DistributedDataParallel(
            Net(dtype), DistributedDataParallelConfig(**fields), communicator=world.communicator(rank)
        )
        optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.01), ddp, clip_grad=1.0)
        try:
            return program(rank, ddp, optimizer)
        finally:
            ddp.detach()

    return world.run(play)


def assert_bits(found, expected):
    """Compare nested values bit by bit, the sign of zero included."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_bits(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_bits(one, other)
    else:
        assert found == expected


PRECISIONS = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "16-bit gradients": (torch.bfloat16, {"grad_reduce_in_fp32": False}),
    "float32 sums": (
        torch.bfloat16,
        {"grad_reduce_in_fp32": False, "param_name_patterns_for_fp32_local_accumulation": ("*weight",)},
    ),
}


@pytest.mark.parametrize("flags", [PHASES[0], PHASES[1], *(pytest.param(one, marks=pytest.mark.nightly) for one in PHASES[2:])])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
def test_the_bits_of_a_run_with_phases_are_those_of_a_run_without(size, precision, flags):
    dtype, fields = PRECISIONS[precision]
    for is_sharded, zeroes in ((False, False), (True, False), (True, True)):
        config = {**fields, "use_distributed_optimizer": is_sharded, "overlap_param_gather": is_sharded}

        def program(between, rank, ddp, optimizer, *, zeroes=zeroes):
            return train(rank, ddp, optimizer, between, dtype=dtype, zeroes=zeroes)

        found = on_world(size, lambda *at, run=program: run(phase(**flags), *at), dtype=dtype, **config)
        expected = on_world(size, lambda *at, run=program: run(nothing, *at), dtype=dtype, **config)
        assert_bits(found, expected)


class Product(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, factors):
        return (self.weight * factors).sum()


@pytest.mark.parametrize("zeroes", [False, True])
@pytest.mark.parametrize("has_stepped", [False, True])
def test_so_is_the_sign_of_a_gradient_of_zero(has_stepped, zeroes):
    """It is added to what a fresh or a zeroed buffer holds, -0.0 or 0.0, or overwrites that of an earlier step."""

    def sign(between):
        module = Product()
        ddp = DistributedDataParallel(module)
        if has_stepped:
            ddp(torch.ones(3)).backward()
        if has_stepped or zeroes:
            ddp.zero_grad(set_to_none=not zeroes)
        between(ddp, 0)
        ddp(torch.full((3,), -0.0)).backward()
        return module.weight.main_grad.signbit().all().item()

    assert sign(nothing) == (not zeroes)
    assert sign(phase()) == sign(nothing)


@pytest.mark.parametrize("groups", [None, experts, replicas])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)])
def test_so_are_those_of_experts_replicas_and_owners_of_whole_tensors(groups, dtype):
    def program(between, rank, ddp, optimizer):
        norms = []
        for step in range(3):
            ddp(grads_of(rank, step)).backward()
            norms.append(optimizer.step().grad_norm)
            optimizer.zero_grad()
            between(ddp, step)
        values = {name: param.detach().clone() for name, param in ddp.module.named_parameters()}
        return norms, values, copy.deepcopy(optimizer.state_dict())

    found = on_ranks(4, lambda *at: program(phase(params=True), *at), groups=groups, dtype=dtype)
    expected = on_ranks(4, lambda *at: program(nothing, *at), groups=groups, dtype=dtype)

    assert_bits(found, expected)


def test_so_are_those_of_a_chain_of_wrappers_with_a_loss_scaler():
    def run(between):
        world = LoopbackWorld(2, timeout_s=20)

        def play(rank):
            config = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=100, nonfinite_gradients="allow")
            ddps = [
                DistributedDataParallel(Net(torch.float16), config, communicator=world.communicator(rank)) for _ in range(2)
            ]
            parts = [DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.01), ddp) for ddp in ddps]
            optimizer, scaler = ChainedOptimizer(parts, clip_grad=1.0), DynamicGradScaler(2.0**24, hysteresis=1)
            norms = []
            for step in range(5):
                for ddp in ddps:
                    scaler.scale(ddp(batch(rank, step, torch.float16))).backward()
                scaler.step(optimizer)
                scaler.update()
                norms.append(str(optimizer.last_step.grad_norm))
                optimizer.zero_grad()
                for ddp in ddps:
                    between(ddp, step)
            assert scaler.get_scale() < 2.0**24
            return norms, [{n: p.detach().clone() for n, p in ddp.module.named_parameters()} for ddp in ddps]

        return world.run(play)

    assert_bits(run(phase(params=True)), run(nothing))


# Bytes #


def living_tensors():
    gc.collect()
    found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return [each for each in found if each.layout is torch.strided]  # others, of other tests, have no storage


def bytes_of(tensors):
    return sum({id(one.untyped_storage()): one.untyped_storage().nbytes() for one in tensors}.values())


@pytest.mark.parametrize("flags", PHASES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_each_phase_frees_the_storages_that_the_plan_says_to_the_byte(flags, precision, is_sharded):
    dtype, fields = PRECISIONS[precision]
    wanted = {"grads": True, "optimizer": True, "main_params": True, "params": False, **flags}
    config = DistributedDataParallelConfig(bucket_size=100, use_distributed_optimizer=is_sharded, **fields)
    gc.collect()
    gc.freeze()
    try:
        model = Net(dtype)
        world = LoopbackWorld(2, timeout_s=20)

        def play(rank):
            module = copy.deepcopy(model)
            ddp = DistributedDataParallel(module, config, communicator=world.communicator(rank))
            optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.01), ddp)
            for step in range(2):
                ddp(batch(rank, step, dtype)).backward()
                optimizer.step()
                optimizer.zero_grad()
            ddp.finish_param_sync()
            return ddp, optimizer

        ranks = world.run(play)
        before = bytes_of(living_tensors())
        given = world.run(lambda rank: ranks[rank][0].offload(**flags))
        # Objects of guarded classes are not among them; they lie on one NaN of each dtype and rank.
        inside = bytes_of(living_tensors())
        on_host = sum(host.nbytes for ddp, _ in ranks for memory in ddp._away for host in memory._host)
        world.run(lambda rank: ranks[rank][0].onload())
        after = bytes_of(living_tensors())
        planned = [
            offload_bytes(
                ddp.layout,
                rank=rank,
                is_sharded=is_sharded,
                fp32_local=fp32_local_params(config, ddp.param_names.values()),
            )
            for rank, (ddp, _) in enumerate(ranks)
        ]
        for one, plan in zip(given, planned, strict=True):
            expected = {kind: getattr(plan, kind) for kind in KINDS if wanted[kind] and getattr(plan, kind)}
            assert {kind: num for kind, num in one.freed_bytes.items() if num} == expected
            assert one.held == []
        freed = sum(getattr(plan, kind) for plan in planned for kind in KINDS if wanted[kind])
        assert before == after
        assert inside - on_host == before - freed
        kept = sum(getattr(plan, kind) for plan in planned for kind in KINDS[1:] if wanted[kind])
        assert on_host == kept
        assert sum(getattr(plan, kind) > 0 for plan in planned for kind in KINDS) >= 4
    finally:
        gc.unfreeze()


def test_the_plan_counts_the_state_of_whole_tensors_at_their_owner():
    def program(rank, ddp, optimizer):
        ddp(grads_of(rank, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        given = ddp.offload(params=True)
        ddp.onload()
        return given.freed_bytes, ddp.layout, list(optimizer.sharding.owner_of)

    # ``Mirror`` has one tensor of state for each matrix, as Muon has; AdamW over the vectors has two of each.
    for rank, (freed, layout, whole) in enumerate(on_ranks(2, program, dtype=torch.bfloat16)):
        owners = plan_owners(layout, whole)
        groups = {name: int(name not in whole) for buffer in layout.buffers for name in buffer.params}
        planned = offload_bytes(layout, rank=rank, is_sharded=True, owners=owners, group_of=groups)
        assert freed == {kind: getattr(planned, kind) for kind in KINDS if getattr(planned, kind)}


def test_two_hundred_phases_leave_nothing_behind():
    def program(rank, ddp, optimizer):
        counts = []
        for step in range(200):
            if step % 20 == 0:
                ddp(batch(rank, step, torch.bfloat16)).backward()
                optimizer.step()
                ddp.zero_grad()
            phase(params=True)(ddp, step)
            if step in (20, 199):
                tensors = living_tensors()
                counts.append((len(tensors), bytes_of(tensors), len(gc.get_objects()) // 1000))
        return counts

    ((first, last),) = on_world(1, program, dtype=torch.bfloat16, use_distributed_optimizer=True)

    assert first[:2] == last[:2]
    assert last[2] <= first[2] + 1


def test_the_process_gets_smaller_by_the_gradient_buffers():
    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    model = torch.nn.Linear(5000, 5000, bias=False)  # 100 MB of parameters, 100 MB of gradients
    ddp = DistributedDataParallel(model)
    model.weight.main_grad.zero_()  # resident
    gc.collect()  # not between the measurements
    before = resident_bytes()

    given = ddp.offload()
    inside = resident_bytes()
    ddp.onload()
    after = resident_bytes()
    ddp.detach()

    grad_bytes = 4 * 25_000_064 // 64 * 64  # padded to 64 elements
    assert abs(given.freed_bytes["grads"] - grad_bytes) < 1024
    assert before - inside > 0.95 * grad_bytes
    assert abs(after - before) < 0.05 * grad_bytes


# What others hold #


def test_a_view_of_the_caller_keeps_its_storage_and_is_named_and_right_afterwards():
    def program(rank, ddp, optimizer):
        train(rank, ddp, optimizer, nothing, steps=1)
        weight = ddp.module.layers[0].weight
        row, values = weight.main_grad[0], weight.data
        saved = values.clone()
        given = ddp.offload(params=True)
        assert torch.equal(values, saved)  # still there
        row.fill_(3.0)  # memory of its own, as far as anybody else sees
        values[0, 0] = 7.0
        ddp.onload()
        assert torch.equal(row, torch.full_like(row, 3.0))
        assert row.data_ptr() == weight.main_grad.data_ptr()
        assert values.data_ptr() == weight.data_ptr()
        assert weight[0, 0] == 7.0
        del row, values
        ddp(torch.zeros(2, 12)).backward()
        assert not ddp.module.layers[0].weight.main_grad.any()  # the gradient of no input, without the 3.0
        ddp.zero_grad()
        assert ddp.offload(params=True).held == []
        ddp.onload()
        return given

    (given,) = on_world(1, program)
    texts = "\n".join(given.held)
    assert re.search(r"grads: \d+ bytes, by a Tensor of shape \(12,\) on the gradient of 'layers.0.weight'", texts)
    assert re.search(r"params: \d+ bytes, by a Tensor of shape \(30, 12\) on the parameter 'layers.0.weight'", texts)
    assert given.freed_bytes["grads"] == given.freed_bytes["params"] == 0


def test_an_autograd_graph_or_another_library_that_holds_a_gradient_is_found():
    def program(rank, ddp, optimizer):
        train(rank, ddp, optimizer, nothing, steps=1)
        other = torch.ones(30, requires_grad=True)
        loss = (other * ddp.module.layers[0].bias.main_grad[:]).sum()
        in_graph = ddp.offload()
        ddp.onload()
        loss.backward()
        assert torch.equal(other.grad, torch.full((30,), -0.0))
        del loss
        inputs = torch.ones(2, 12, requires_grad=True)
        loss = torch.nn.functional.linear(inputs, ddp.module.layers[0].weight.main_grad[:]).sum()  # transposes it in C++
        unseen = ddp.offload()
        ddp.onload()
        loss.backward()
        del loss
        assert ddp.offload().held == []
        ddp.onload()
        return in_graph.held, unseen.held

    (((in_graph,), (unseen,)),) = on_world(1, program)
    assert re.fullmatch(r"grads: \d+ bytes, by a Tensor of shape \(30,\) on the gradient of 'layers.0.bias'", in_graph)
    assert re.fullmatch(r"grads: \d+ bytes, by what is no tensor of Python: an autograd graph, or another library", unseen)


def test_a_graph_of_the_parameters_is_refused_after_they_have_gone():
    def program(rank, ddp, optimizer):
        ddp.eval()
        inputs = torch.ones(2, 12, requires_grad=True)
        loss = ddp.module(inputs)
        ddp.offload(params=True)
        ddp.onload()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, inputs)

    on_world(1, program)


class Pool(ForwardingCommunicator):
    """Allocates parts of larger memory, each time at another place; from one slab that it keeps, or from new memory."""

    def __init__(self, slab=None):
        super().__init__(LocalCommunicator())
        self.slab, self.start, self.num_bytes = slab, 64, []

    def allocate(self, numel, dtype, device):
        start, nbytes = self.start, numel * dtype.itemsize
        self.start += 64 + (nbytes if self.slab is not None else 0)
        self.num_bytes.append(nbytes)
        memory = self.slab if self.slab is not None else torch.zeros(start + nbytes + 64, dtype=torch.uint8)
        return memory[start : start + nbytes].view(dtype)


@pytest.mark.parametrize("keeps_slab", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_memory_of_a_pool_comes_from_the_pool_again_at_whatever_place(keeps_slab):
    def run(communicator, between):
        ddp = DistributedDataParallel(
            Net(torch.bfloat16), DistributedDataParallelConfig(bucket_size=100), communicator=communicator
        )
        optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.01), ddp)
        return train(0, ddp, optimizer, between, dtype=torch.bfloat16)

    def between(ddp, step):
        given = ddp.offload(params=True)
        assert [text.split(":")[0] for text in given.held] == (["params", "grads"] if keeps_slab else [])
        assert [given.freed_bytes[kind] > 0 for kind in ("params", "grads", "optimizer")] == [not keeps_slab] * 2 + [True]
        ddp.onload()

    pool = Pool(torch.zeros(100_000, dtype=torch.uint8) if keeps_slab else None)

    assert_bits(run(pool, between), run(None, nothing))
    assert pool.num_bytes == pool.num_bytes[:2] * (1 if keeps_slab else 5)  # when wrapping, and after each phase


# What is refused meanwhile #

READS = {
    "add": lambda tensor: tensor + 1,
    "__getitem__": lambda tensor: tensor[0],
    "zero_": lambda tensor: tensor.zero_(),
    "data_ptr": lambda tensor: tensor.data_ptr(),
    "numpy": lambda tensor: tensor.numpy(),
    "data": lambda tensor: tensor.data,
    "untyped_storage": lambda tensor: tensor.untyped_storage(),
    "tolist": lambda tensor: tensor.tolist(),
    "detach": lambda tensor: tensor.detach(),
    "_foreach_add_": lambda tensor: torch._foreach_add_([tensor], [tensor]),
    "data|__deepcopy__": copy.deepcopy,
    "data|__reduce_ex__": lambda tensor: tensor.__reduce_ex__(2),
    "stride": lambda tensor: tensor.stride(),
    "linear": lambda tensor: torch.nn.functional.linear(torch.ones(tensor.shape[-1]), tensor),
    "copy_": lambda tensor: torch.ones(tensor.shape).copy_(tensor),
    "is_nonzero": lambda tensor: tensor.is_nonzero(),
    "__dlpack__": lambda tensor: tensor.__dlpack__(),
}


def test_what_was_handed_out_refuses_every_read_by_name_and_shows_its_metadata():
    def program(rank, ddp, optimizer):
        ddp(batch(rank, 0, torch.float32)).backward()
        optimizer.step()
        weight = ddp.module.layers[0].weight
        held, kind = weight.grad, type(weight.grad)
        ddp.zero_grad()
        state = optimizer.sharding.shards[0]
        moment = optimizer.sharding.state_of(state)["exp_avg"]
        with ddp.offload(params=True):
            for name, read in READS.items():
                for tensor, what in (
                    (held, "the gradient of"),
                    (weight.main_grad, "the gradient of"),
                    (weight, "the parameter"),
                ):
                    with pytest.raises(PhaseError, match=f"({name}) was called on {what} 'layers.0.weight', which.*onload"):
                        read(tensor)
            with pytest.raises(PhaseError, match="the optimizer state of"):
                moment.mul_(2)
            with pytest.raises(PhaseError, match="onload"):
                ddp.module(torch.ones(2, 12))
            with pytest.raises(PhaseError, match="onload"):
                torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(torch.ones(2)), *_with_grad(weight, held)], 1.0)
            assert isinstance(weight, torch.nn.Parameter)
            assert (weight.shape, weight.dtype, weight.numel(), weight.requires_grad, weight.is_leaf, len(weight)) == (
                (30, 12),
                torch.float32,
                360,
                True,
                True,
                30,
            )
            assert repr(weight) == "<the parameter 'layers.0.weight': given back by ddp.offload()>"
            assert weight in ddp.param_names
        assert held.data_ptr() == weight.main_grad.data_ptr()
        assert (type(held), type(weight.main_grad), type(weight)) == (kind, torch.Tensor, torch.nn.Parameter)
        assert vars(weight.main_grad) == {}

    on_world(1, program)


def _with_grad(weight, grad):
    weight.grad = grad
    return [weight]


def text_of(call, *args):
    try:
        call(*args)
    except PhaseError as error:
        return str(error)
    return "nothing"


def test_every_step_and_call_is_refused_by_name_until_the_memory_is_back(tmp_path):
    inputs = torch.ones(2, 12)
    calls = {
        "forward": lambda ddp, _: ddp(inputs),
        "a gradient": lambda ddp, _: sum(p.sum() for p in ddp.module.parameters()).backward(),
        "finish": lambda ddp, _: ddp.finish_grad_sync(),
        "start": lambda ddp, _: ddp.start_grad_sync(),
        "step": lambda _, optimizer: optimizer.step(),
        "clip": lambda _, optimizer: optimizer.clip_grad_norm_(1.0),
        "zero_grad": lambda ddp, _: ddp.zero_grad(),
        "optimizer.zero_grad": lambda _, optimizer: optimizer.zero_grad(),
        "zero_grad_buffer": lambda ddp, _: ddp.zero_grad_buffer(),
        "scale": lambda ddp, _: ddp.scale_gradients(0.5),
        "save": lambda ddp, optimizer: save_checkpoint(tmp_path, ddp, optimizer, step=1),
        "state_dict": lambda _, optimizer: optimizer.state_dict(),
        "load_state_dict": lambda _, optimizer: optimizer.load_state_dict({"state": {}, "param_groups": []}),
        "rebuild": lambda ddp, _: ddp.rebuild(),
        "broadcast": lambda ddp, _: ddp.broadcast_params(),
        "check_replicas": lambda ddp, _: ddp.check_replicas(),
        "step()": lambda ddp, _: ddp.step().__enter__(),
        "abort": lambda ddp, _: ddp.abort_step("no"),
        "step_number": lambda ddp, _: setattr(ddp, "step_number", 3),
        "ema": lambda _, optimizer: ShardedEMA(optimizer, decay=0.5).update(),
        "reload": lambda _, optimizer: optimizer.reload_main_params(),
    }

    def program(between, rank, ddp, optimizer):
        first = train(rank, ddp, optimizer, nothing, steps=2, dtype=torch.bfloat16)
        between(ddp, optimizer)
        return first, train(rank, ddp, optimizer, nothing, steps=2, dtype=torch.bfloat16)

    def refused(ddp, optimizer):
        with ddp.offload():
            texts = {name: text_of(call, ddp, optimizer) for name, call in calls.items()}
            assert [name for name, text in texts.items() if "ddp.onload() on every rank" not in text] == []
            ddp.eval()
            with torch.no_grad():
                assert ddp(inputs.bfloat16()).isfinite()  # parameters are there
            ddp.train()
            assert ddp.state_dict().keys() == ddp.module.state_dict().keys()

    config = {"use_distributed_optimizer": True, "dtype": torch.bfloat16}
    found = on_world(2, lambda *at: program(refused, *at), **config)
    assert_bits(found, on_world(2, lambda *at: program(nothing, *at), **config))


def test_an_open_step_is_not_given_back():
    def program(rank, ddp, optimizer):
        with ddp.no_sync():
            ddp(batch(rank, 0, torch.float32)).backward()
        with pytest.raises(PhaseError, match=r"offload\(\) in the middle of a step"):
            ddp.offload()
        ddp(batch(rank, 1, torch.float32)).backward()
        assert optimizer.step().updated

    on_world(2, program)


def test_ranks_that_give_back_different_things_or_something_else_are_told_so_and_go_on():
    def program(rank, ddp, optimizer):
        with pytest.raises(LayoutMismatchError, match=r"params=False.*params=True"):
            ddp.offload(params=rank == 1)
        with pytest.raises(CallMismatchError, match=r"offload\(\)"):
            ddp.offload() if rank else ddp.check_replicas()
        if rank == 0:
            ddp(batch(rank, 0, torch.float32)).backward()
        with pytest.raises((CallMismatchError, PhaseError), match=r"offload\(\)"):
            ddp.offload() if rank else optimizer.step()
        optimizer.zero_grad()
        return train(rank, ddp, optimizer, phase(params=True))

    first, second = on_world(2, program, use_distributed_optimizer=True)
    assert_bits(first[0], second[0])


@pytest.mark.parametrize("where", ["offload", "onload"])
def test_memory_that_one_rank_cannot_allocate_loses_nothing_and_the_call_may_be_repeated(where, monkeypatch):
    method = "make_host_memory" if where == "offload" else "make_memory"
    original, failing = getattr(Memory, method), set()  # threads: one of each rank

    def allocate(memory):
        if threading.get_ident() in failing:
            raise torch.OutOfMemoryError("no more memory")
        return original(memory)

    monkeypatch.setattr(Memory, method, allocate)

    def between(ddp, step):
        if where == "onload":
            ddp.offload(params=True)
        failing.update([threading.get_ident()] if ddp.communicator.rank == 1 else ())
        with pytest.raises((PeerFailedError, torch.OutOfMemoryError), match="no more memory"):
            ddp.offload(params=True) if where == "offload" else ddp.onload()
        failing.discard(threading.get_ident())
        if where == "onload":
            with pytest.raises(PhaseError, match="onload"):
                ddp.zero_grad()
            ddp.onload()
        else:
            phase(params=True)(ddp, step)

    def program(between, rank, ddp, optimizer):
        return train(rank, ddp, optimizer, between, dtype=torch.bfloat16)

    found = on_world(2, lambda *at: program(between, *at), dtype=torch.bfloat16)
    assert_bits(found, on_world(2, lambda *at: program(nothing, *at), dtype=torch.bfloat16))


def go_on(ddp, optimizer, where):
    if where == "offload":
        ddp.offload(params=True)
    ddp.onload()
    ddp(batch(0, 0, torch.bfloat16)).backward()
    optimizer.step()


@pytest.mark.parametrize(("where", "at"), [("offload", 0), ("offload", 9), ("offload", 30), ("onload", 16), ("onload", 28)])
def test_an_interrupt_in_the_middle_loses_nothing(where, at, monkeypatch):
    count = itertools.count()
    original = {"offload": offload._guard_of, "onload": offload._empty_like}[where]

    def interrupting(*args):
        if threading.get_ident() in interrupted and next(count) == at:
            raise KeyboardInterrupt
        return original(*args)

    interrupted = set()
    monkeypatch.setattr(offload, original.__name__, interrupting)

    def program(rank, ddp, optimizer):
        train(rank, ddp, optimizer, nothing, steps=1, dtype=torch.bfloat16)
        before = {name: param.detach().clone() for name, param in ddp.module.named_parameters()}
        if where == "onload":
            ddp.offload(params=True)
        if rank == 1:
            interrupted.add(threading.get_ident())
        with pytest.raises(KeyboardInterrupt if rank else WrapperBrokenError):
            go_on(ddp, optimizer, where)
        interrupted.clear()
        module = ddp.detach()
        assert_bits({name: param.detach() for name, param in module.named_parameters()}, before)
        assert all(type(param) is torch.nn.Parameter for param in module.parameters())
        module(torch.ones(2, 12).bfloat16()).backward()

    on_world(2, program, dtype=torch.bfloat16)


def test_the_python_object_of_a_storage_lives_as_long_as_the_storage():
    """What the search for other owners relies on."""
    tensor = torch.ones(100)
    reference = weakref.ref(tensor.untyped_storage())
    graph = torch.nn.functional.linear(torch.ones(1, 10, requires_grad=True), tensor.view(10, 10))

    assert reference() is tensor.untyped_storage()
    tensor.data = torch.zeros(()).expand(100)
    assert reference() is not None  # the graph has a view that no object of Python stands for
    del graph
    assert reference() is None


# In and out #


def test_kinds_go_and_come_one_by_one():
    def between(ddp, step):
        ddp.offload(optimizer=False, main_params=False)
        ddp.offload(grads=False, params=True)
        assert ddp.offload().freed_bytes == {}  # all of that is away already
        ddp.onload(grads=False, optimizer=False, main_params=False)
        ddp.eval()
        with torch.no_grad():
            assert ddp(torch.ones(2, 12, dtype=torch.bfloat16)).isfinite()
        ddp.train()
        with pytest.raises(PhaseError, match="'grads', 'main_params', 'optimizer'"):
            ddp.zero_grad()
        ddp.onload(optimizer=False, main_params=False)
        ddp.onload()
        ddp.onload()  # nothing is away

    def program(between, rank, ddp, optimizer):
        return train(rank, ddp, optimizer, between, dtype=torch.bfloat16)

    config = {"use_distributed_optimizer": True, "dtype": torch.bfloat16}
    found = on_world(2, lambda *at: program(between, *at), **config)
    assert_bits(found, on_world(2, lambda *at: program(nothing, *at), **config))


def test_a_block_inside_another_takes_back_its_own_only():
    def between(ddp, _):
        with ddp.offload():
            with ddp.offload(params=True):
                assert ddp._kinds_away == set(KINDS)
            assert ddp._kinds_away == {"grads", "optimizer", "main_params"}
        assert ddp._kinds_away == set()

    def program(between, rank, ddp, optimizer):
        return train(rank, ddp, optimizer, between)

    assert_bits(on_world(2, lambda *at: program(between, *at)), on_world(2, lambda *at: program(nothing, *at)))


def test_an_exception_in_the_block_leaves_it_with_the_memory_back():
    def program(rank, ddp, optimizer):
        train(rank, ddp, optimizer, nothing, steps=1)
        with pytest.raises(ZeroDivisionError), ddp.offload(params=True):
            1 / 0  # noqa: B018
        return train(rank, ddp, optimizer, nothing, steps=1)

    on_world(2, program)


def test_the_module_of_a_wrapper_that_is_detached_meanwhile_is_whole():
    def program(rank, ddp, optimizer):
        train(rank, ddp, optimizer, nothing, steps=1)
        before = {name: param.detach().clone() for name, param in ddp.module.named_parameters()}
        with ddp.offload(params=True):
            module = ddp.detach()
        assert_bits({name: param.detach() for name, param in module.named_parameters()}, before)
        assert all(type(param) is torch.nn.Parameter and param.grad is None for param in module.parameters())
        module(torch.ones(2, 12)).backward()

    on_world(2, program)


def test_phases_inside_inference_mode_leave_tensors_that_can_be_trained():
    def between(ddp, _):
        with torch.inference_mode(), ddp.offload(params=True):
            pass

    def program(between, rank, ddp, optimizer):
        return train(rank, ddp, optimizer, between)

    assert_bits(on_world(2, lambda *at: program(between, *at)), on_world(2, lambda *at: program(nothing, *at)))


def test_values_written_by_hand_and_loaded_before_a_phase_count():
    """A main parameter follows a load when it leaves, so that the phase keeps nothing old."""

    def program(between, rank, ddp, optimizer):
        train(rank, ddp, optimizer, nothing, steps=1, dtype=torch.bfloat16)
        ddp.load_state_dict({name: torch.full_like(value, 0.5) for name, value in ddp.state_dict().items()})
        optimizer.state[next(iter(ddp.param_names))]["exp_avg"].fill_(0.25)
        between(ddp, 0)
        return train(rank, ddp, optimizer, nothing, steps=2, dtype=torch.bfloat16)

    config = {"use_distributed_optimizer": True, "dtype": torch.bfloat16}
    found = on_world(2, lambda *at: program(phase(params=True), *at), **config)
    assert_bits(found, on_world(2, lambda *at: program(nothing, *at), **config))


def test_bytes_add_up():
    assert sum([OffloadBytes(1, 2, 3, 4)] * 2, OffloadBytes()) == OffloadBytes(2, 4, 6, 8)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("reduction_order", ["backend", "rank"])
def test_weights_leave_while_other_memory_is_given_back(whole, reduction_order):
    def program(rank, ddp, optimizer):
        ddp(batch(rank, 0, torch.float32)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with ddp.offload():
            found = named_weights(ddp.export_weights(whole=whole))
            right = {name: param.detach().clone() for name, param in ddp.module.named_parameters()}
            assert_bits({name: found[name].clone() for name in right}, right)
            with pytest.raises(PhaseError, match=r"ddp\.onload\(\)"):
                ddp(batch(rank, 1, torch.float32)).backward()
        with ddp.offload(params=True), pytest.raises(PhaseError, match=r"ddp\.onload\(\)"):
            list(ddp.export_weights(whole=whole))
        ddp(batch(rank, 1, torch.float32)).backward()
        return optimizer.step().updated

    assert on_world(2, program, use_distributed_optimizer=True, reduction_order=reduction_order) == [True, True]
