"""Shards inside each replica, reductions over the replicas (HSDP, Megatron's instances). Loopback worlds of four ranks.

Ranks 0 and 1 are one replica, 2 and 3 the other; ranks 0 and 2 hold the first shard of each bucket, 1 and 3 the second.
"""

import copy
import math
import re
import threading
from contextlib import nullcontext

import pytest
import torch

from megabucket import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    finalize_grads,
    load_checkpoint,
    save_checkpoint,
)
from megabucket.comm import Handle, ReplicaReducer
from megabucket.ddp.groups import ParallelGroups, ReductionGroup
from megabucket.errors import (
    ConfigError,
    LayoutMismatchError,
    NonFiniteGradientError,
    PeerFailedError,
    ReplicasDivergedError,
    UnusedParameterError,
)
from megabucket.testing import LoopbackWorld

SHARDED = {"use_distributed_optimizer": True}
GRIDS = {(2, 2): [[0, 1], [2, 3]], (1, 4): [[0, 1, 2, 3]], (4, 1): [[0], [1], [2], [3]]}  # replicas and shards: ranks


class Net(torch.nn.Module):
    """Three layers, each in a bucket of its own."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(size, size + 6, dtype=dtype) for size in (6, 12, 18)])

    def forward(self, inputs, *, uses_bias=True):
        first, second, third = self.layers
        hidden = torch.nn.functional.linear(first(inputs), second.weight, second.bias if uses_bias else None)
        return torch.tanh(third(hidden))


class Grid:
    """Ranks in replicas of equal size."""

    def __init__(self, replicas, *, completion="immediate"):
        size = sum(map(len, replicas))
        self.world = LoopbackWorld(size, timeout_s=20, completion=completion)
        self.everybody = [self.world.communicator(rank) for rank in range(size)]
        self.inside, self.over = {}, {}
        for replica in replicas:
            self.inside |= self.world.subgroup(replica)
        for same_shard in zip(*replicas, strict=True):
            self.over |= self.world.subgroup(same_shard)

    def groups(self, rank, **fields):
        dense = ReductionGroup(self.inside[rank], self.over[rank], **fields)
        return ParallelGroups({"dense": dense}, step_group=self.everybody[rank])

    def wrap(self, rank, module, *, group=None, **config):
        config = DistributedDataParallelConfig(**{"bucket_size": 40, **SHARDED, **config})
        return DistributedDataParallel(module, config, groups=self.groups(rank, **(group or {})))

    def run(self, program):
        return self.world.run(program)


def grid_of(replicas, shards):
    return Grid(GRIDS[replicas, shards])


def batch(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 6, generator=generator).to(dtype)


def loss_of(output):
    return output.square().mean()


def values_of(module):
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def train(ddp, rank, *, steps=6, microbatches=1, **optimizer_fields):
    """Return the norms and the last weights."""
    optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=1e-2), ddp, **optimizer_fields)
    norms = []
    for step in range(steps):
        for index in range(microbatches - 1):
            with ddp.no_sync():
                loss_of(ddp(batch(rank, 100 * step + index))).backward()
        loss_of(ddp(batch(rank, 100 * step + 99))).backward()
        norms.append(optimizer.step().grad_norm)
        optimizer.zero_grad()
    ddp.finish_param_sync()
    return norms, values_of(ddp.module)


def plain_run(modules, config, **fields):
    """Train on four ranks in one group."""
    world = LoopbackWorld(4, timeout_s=20)
    config = DistributedDataParallelConfig(**{"bucket_size": 40, **SHARDED, **config})

    def program(rank):
        return train(DistributedDataParallel(modules[rank], config, communicator=world.communicator(rank)), rank, **fields)

    return world.run(program)


# The gradients #


@pytest.mark.parametrize("shape", list(GRIDS), ids=str)
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 2.5),
        ({"average_in_collective": True}, 2.5),
        ({"grad_reduction": "sum"}, 10.0),
        ({"overlap_grad_reduce": False}, 2.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_added_up_over_all_ranks_and_divided_once(shape, config, expected, dtype):
    grid = grid_of(*shape)
    models = [Net(dtype) for _ in range(4)]

    def program(rank):
        ddp = grid.wrap(rank, models[rank], **config)
        for is_last in (False, True):
            with nullcontext() if is_last else ddp.no_sync():
                (sum(param.sum() for param in ddp.module.parameters()) * (1 + rank) / 2).backward()
        ddp.finish_grad_sync(force_all_reduce=True)
        return {float(value) for param in ddp.module.parameters() for value in param.main_grad.unique()}

    assert grid.run(program) == [{expected}] * 4  # 1 + 2 + 3 + 4, over four ranks


def test_tokens_are_counted_over_all_replicas():
    grid, tokens = grid_of(2, 2), [1, 2, 3, 4]

    def program(rank):
        ddp = grid.wrap(rank, torch.nn.Linear(3, 1, bias=False), grad_reduction="sum")
        ddp.force_all_reduce = True
        (ddp.module.weight.sum() * tokens[rank]).backward()
        finalize_grads(ddp, num_tokens=tokens[rank])
        return ddp.module.weight.main_grad.unique().tolist()

    assert grid.run(program) == [[pytest.approx(1.0)]] * 4  # a gradient of 10 over 10 tokens


def test_another_divisor_divides_the_sum_over_all_replicas():
    grid = grid_of(2, 2)

    def program(rank):
        ddp = grid.wrap(rank, torch.nn.Linear(3, 3), group={"divisor": 5.0})
        sum(param.sum() for param in ddp.module.parameters()).backward()
        ddp.finish_grad_sync(force_all_reduce=True)
        return float(ddp.module.weight.main_grad[0, 0])

    assert grid.run(program) == [pytest.approx(4 / 5)] * 4


# Training #


@pytest.mark.parametrize("shape", list(GRIDS), ids=str)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"overlap_grad_reduce": False},
        {"overlap_param_gather": True},
        {"fence": False},
        {"average_in_collective": True},
        {"bucket_groups": "single"},
    ],
    ids=str,
)
def test_training_with_replicas_is_that_of_one_group_of_all_ranks(shape, config):
    grid, clip = grid_of(*shape), {"clip_grad": 0.02, "microbatches": 2}
    models = [Net() for _ in range(4)]
    initial = values_of(models[0])
    expected = plain_run([copy.deepcopy(model) for model in models], config, **clip)

    results = grid.run(lambda rank: train(grid.wrap(rank, models[rank], **config), rank, **clip))

    assert min(expected[0][0]) > 0.04  # clipping halves them at least
    for norms, weights in results:
        assert norms == pytest.approx(expected[0][0], rel=1e-5)
        for name, values in weights.items():
            torch.testing.assert_close(values, results[0][1][name], rtol=0, atol=0)  # the replicas stay equal bit by bit
            moved = (expected[0][1][name] - initial[name]).abs().max()
            assert (values - expected[0][1][name]).abs().max() <= 1e-4 * moved, name


@pytest.mark.parametrize("has_norm_group", [False, True])
@pytest.mark.parametrize("shape", list(GRIDS), ids=str)
def test_a_norm_of_ones_counts_each_element_once(shape, has_norm_group):
    grid = grid_of(*shape)

    def program(rank):
        groups = grid.groups(rank)
        if has_norm_group:
            groups = ParallelGroups(groups.reduction, norm_group=grid.everybody[rank])
        ddp = DistributedDataParallel(Net(), DistributedDataParallelConfig(bucket_size=40, **SHARDED), groups=groups)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.0), ddp)
        sum(param.sum() for param in ddp.module.parameters()).backward()
        return optimizer.step().grad_norm

    num_elements = sum(param.numel() for param in Net().parameters())
    assert grid.run(program) == [float(torch.tensor(math.sqrt(num_elements), dtype=torch.float32))] * 4


def test_a_norm_group_of_one_replica_gives_the_norm_of_all_of_them():
    grid = grid_of(2, 2)
    models = [Net() for _ in range(4)]

    def program(rank):
        groups = ParallelGroups(grid.groups(rank).reduction, norm_group=grid.inside[rank], step_group=grid.everybody[rank])
        config = DistributedDataParallelConfig(bucket_size=40, **SHARDED)
        return train(DistributedDataParallel(models[rank], config, groups=groups), rank, steps=2)[0]

    norms = grid.run(program)
    assert norms == [norms[0]] * 4
    assert norms[0] == pytest.approx(plain_run([Net() for _ in range(4)], {}, steps=2)[0][0], rel=1e-5)


def test_experts_and_dense_parameters_have_replicas_of_their_own():
    """Dense parameters are sharded over pairs; each expert has two ranks, which are two replicas of one shard."""
    grid = grid_of(2, 2)
    alone = {rank: grid.world.subgroup([rank])[rank] for rank in range(4)}

    def program(rank):
        model = torch.nn.ModuleDict({"dense": torch.nn.Linear(5, 5), "expert": torch.nn.Linear(5, 5)})
        for param in model["expert"].parameters():
            param.allreduce = False
        groups = {"dense": grid.groups(rank).reduction["dense"], "expert": ReductionGroup(alone[rank], grid.over[rank])}
        groups = ParallelGroups(groups, step_group=grid.everybody[rank])
        config = DistributedDataParallelConfig(bucket_size=1, **SHARDED)
        ddp = DistributedDataParallel(model, config, groups=groups)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.0), ddp)
        (sum(param.sum() for param in model.parameters()) * (1 + rank)).backward()
        norm = optimizer.step().grad_norm
        return norm, [float(group.grad_shards[0][0]) for group in ddp.bucket_groups if group.slots[0].name == "expert.weight"]

    results = grid.run(program)

    assert [grads for _, grads in results] == [[(1 + 3) / 4], [(2 + 4) / 4]] * 2
    assert [norm for norm, _ in results] == [pytest.approx(math.sqrt(30 * 2.5**2 + 30 * (1.0 + 1.5**2)), rel=1e-6)] * 4


def test_the_state_of_the_optimizer_is_equal_on_replicas_and_survives_a_rebuild():
    grid = grid_of(2, 2)
    models = [Net() for _ in range(4)]

    def program(rank):
        ddp = grid.wrap(rank, models[rank])
        optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=1e-2), ddp)
        for step in range(4):
            if step == 2:
                ddp.rebuild(DistributedDataParallelConfig(bucket_size=200, **SHARDED))
                optimizer.load_state_dict(optimizer.state_dict())
            loss_of(ddp(batch(rank, 100 * step + 99))).backward()
            optimizer.step()
            optimizer.zero_grad()
        ddp.check_replicas()
        return values_of(ddp.module), optimizer.state_dict()["state"]

    results = grid.run(program)

    expected = plain_run([Net() for _ in range(4)], {}, steps=4)[0][1]
    for weights, state in results:
        for index, moments in state.items():
            torch.testing.assert_close(moments["exp_avg"], results[0][1][index]["exp_avg"], rtol=0, atol=0)
        for name, values in weights.items():
            torch.testing.assert_close(values, expected[name], rtol=1e-4, atol=1e-5)


def test_a_bucket_without_a_gradient_on_one_rank_is_reduced_over_the_replicas_all_the_same():
    """Megatron leaves one that was never dispatched unreduced, without a word, where there are several instances."""
    grid = grid_of(2, 2)

    def program(rank):
        ddp = grid.wrap(rank, Net(), unused_parameters="zero")
        for _ in range(3):
            layers = ddp.module.layers[1:] if rank == 3 else ddp.module.layers
            sum(param.sum() for layer in layers for param in layer.parameters()).backward()
            ddp.finish_grad_sync(force_all_reduce=True)
            grads = [float(layer.weight.main_grad[0, 0]) for layer in ddp.module.layers]
            ddp.zero_grad()
        return grads

    assert grid.run(program) == [[0.75, 1.0, 1.0]] * 4


# What is sent, and when #


def test_the_bytes_of_a_step_are_those_of_the_formula():
    grid = grid_of(2, 2)

    def program(rank):
        ddp = grid.wrap(rank, Net(), step_traces=True)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
        for step in range(2):
            loss_of(ddp(batch(rank, step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        records = [one for one in ddp.last_step_trace.collectives if one.label.startswith(("bucket", "param gather"))]
        return [(one.kind.value, one.num_ranks, one.payload_bytes, one.wire_bytes) for one in records], [
            bucket.numel * 4 for bucket in ddp.layout.buffers[0].buckets
        ]

    for records, sizes in grid.run(program):
        assert sorted(records) == sorted(
            record
            for size in sizes  # two replicas of two shards
            for record in (
                ("reduce_scatter", 2, size, size / 2),
                ("all_reduce", 2, size // 2, size / 2),
                ("all_gather", 2, size, size / 2),
            )
        )


class Meeting(torch.autograd.Function):
    """Lets the backward of a rank go on when that of all ranks has come here."""

    @staticmethod
    def forward(ctx, inputs, barrier):
        ctx.barrier = barrier
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, grad):
        ctx.barrier.wait(20)
        return grad, None


def test_the_reduction_over_replicas_follows_the_one_inside_while_backward_runs():
    grid, barrier = grid_of(2, 2), threading.Barrier(4)

    class Met(Net):
        def forward(self, inputs):
            for layer in self.layers:
                inputs = layer(Meeting.apply(inputs, barrier) if inputs.requires_grad else inputs)
            return inputs

    models = [Met() for _ in range(4)]

    def program(rank):
        ddp = grid.wrap(rank, models[rank])
        for step in range(2):  # the first one only counts gradients
            before = len(grid.world.schedule(rank))
            loss_of(ddp(batch(rank, step))).backward()
            sent = grid.world.schedule(rank)[before:]
            ddp.finish_grad_sync()
            ddp.zero_grad()
        return [text.partition(" [")[0] for text in sent]

    for sent in grid.run(program):
        over = [text for text in sent if "over" in text]
        assert [text for text in sent if text not in over] == ["bucket 0", "bucket 1", "bucket 2"]
        assert over[:2] == ["bucket 0 over replicas", "bucket 1 over replicas"]  # the third one may be sent by the wait
        # All ranks have sent bucket 0 when the backward of the second layer begins, so it is complete when bucket 1 is sent.
        assert sent.index(over[0]) < sent.index("bucket 2")


# Faults #


def test_16_bit_gradients_are_scaled_before_they_are_sent_while_backward_runs():
    """Megatron's issue 3670, as far as a host shows it: with several replicas reduce-scatters began on unscaled gradients.

    Scaled any later, the sum would be infinite, or the world would find a buffer that was written while it was sent.
    """
    grid = Grid(GRIDS[2, 2], completion="manual")
    models = [Net(torch.float16) for _ in range(4)]

    def program(rank):
        ddp = grid.wrap(rank, models[rank], grad_reduce_in_fp32=False)
        for _ in range(2):  # the first step only counts gradients
            ddp.zero_grad()
            (sum(param.sum() for param in ddp.module.parameters()) * 30_000).backward()
            ddp.finish_grad_sync(force_all_reduce=True)
        return {float(value) for param in ddp.module.parameters() for value in param.main_grad.unique()}

    assert grid.run(program) == [{30_000.0}] * 4


def test_a_grid_that_is_none_is_named_on_all_ranks():
    world = LoopbackWorld(4, timeout_s=20)
    inside = world.subgroup([0, 1]) | world.subgroup([3, 2])
    over = world.subgroup([0, 2]) | world.subgroup([1, 3])

    def program(rank):
        groups = ParallelGroups({"dense": ReductionGroup(inside[rank], over[rank])}, step_group=world.communicator(rank))
        with pytest.raises((LayoutMismatchError, PeerFailedError)) as caught:
            DistributedDataParallel(Net(), DistributedDataParallelConfig(**SHARDED), groups=groups)
        return str(caught.value)

    for text in world.run(program):
        assert "replicate= of shard 0 of 2" in text
        assert "replicate= of shard 1 of 2" in text


def test_replicas_whose_shards_belong_to_different_replicas_are_named():
    """Eight ranks: every group has one shard index, but the first and the second shard have other partners."""
    world = LoopbackWorld(8, timeout_s=20)
    inside, over = {}, {}
    for pair in ([0, 1], [2, 3], [4, 5], [6, 7]):
        inside |= world.subgroup(pair)
    for pair in ([0, 2], [1, 5], [4, 6], [7, 3]):
        over |= world.subgroup(pair)

    def program(rank):
        groups = ParallelGroups({"dense": ReductionGroup(inside[rank], over[rank])}, step_group=world.communicator(rank))
        with pytest.raises((LayoutMismatchError, PeerFailedError)) as caught:
            DistributedDataParallel(Net(), DistributedDataParallelConfig(**SHARDED), groups=groups)
        return str(caught.value)

    texts = world.run(program)
    assert len(set(texts)) == 1
    assert "rank 0 has ranks of each replica: [0, 1] [2, 3], rank 1 has ranks of each replica: [0, 1] [4, 5]" in texts[0]


def test_a_model_that_differs_between_replicas_is_named():
    grid = grid_of(2, 2)

    def program(rank):
        model = torch.nn.Linear(3, 3 if rank < 2 else 4)
        with pytest.raises((LayoutMismatchError, PeerFailedError)) as caught:
            grid.wrap(rank, model)
        return str(caught.value)

    assert all("rank 0 has weight (3, 3) float32, rank 2 has weight (4, 3)" in text for text in grid.run(program)[::2])


def test_all_ranks_start_with_the_values_of_the_first_one_and_a_replica_that_drifts_is_named():
    grid = grid_of(2, 2)
    models = [Net() for _ in range(4)]
    for model in models[1:]:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn(param.shape))

    def program(rank):
        ddp = grid.wrap(rank, models[rank])
        start = values_of(ddp.module)
        if rank >= 2:
            with torch.no_grad():
                ddp.module.layers[1].bias[0] += 1.0
        with pytest.raises((ReplicasDivergedError, PeerFailedError)) as caught:
            ddp.check_replicas()
        return start, caught.value

    for start, error in grid.run(program):
        torch.testing.assert_close(start, dict(Net().named_parameters()), rtol=0, atol=0)
        assert "'layers.1.bias'" in str(error)


def fail(_):
    raise RuntimeError("broken")


def backward_with(fault, ddp, rank, step):
    """Run a forward and a backward, with a fault or without."""
    output = ddp(batch(rank, 100 * step + 99), uses_bias=fault != "unused")
    loss = loss_of(output)
    if fault == "exception":
        output.register_hook(fail)
    if fault == "nan":
        loss = loss + ddp.module.layers[1].bias.sum() * math.nan
    loss.backward()


FAULTS = {"nan": NonFiniteGradientError, "exception": (PeerFailedError, RuntimeError), "unused": UnusedParameterError}


@pytest.mark.parametrize("fault", list(FAULTS))
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_fault_on_one_rank_is_named_in_both_replicas_and_the_next_step_is_right(fault, overlaps):
    grid = grid_of(2, 2)
    models = [Net() for _ in range(4)]

    def program(rank):
        ddp = grid.wrap(rank, models[rank], overlap_grad_reduce=overlaps)
        optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=1e-2), ddp)
        errors = []
        for step in range(4):
            try:
                backward_with(fault if step == 2 and rank == 1 else "", ddp, rank, step)
                optimizer.step()
            except Exception as error:
                errors.append(error)
            optimizer.zero_grad()
        return errors, values_of(ddp.module)

    results = grid.run(program)

    expected = train_without_step_2(Net())
    for errors, weights in results:
        assert [isinstance(error, FAULTS[fault]) for error in errors] == [True], errors
        assert re.search("rank 1|broken", str(errors[0]))
        for name, values in weights.items():
            torch.testing.assert_close(values, results[0][1][name], rtol=0, atol=0)
            torch.testing.assert_close(values, expected[name], rtol=1e-4, atol=1e-5)


def train_without_step_2(model):
    """Return the weights of plain torch on the mean of all ranks' gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in (0, 1, 3):
        sum(loss_of(model(batch(rank, 100 * step + 99))) / 4 for rank in range(4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


# What is refused #


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"use_distributed_optimizer": False}, "'dense' has replicate=.*only with use_distributed_optimizer=True"),
        ({"reduce_scatter_with_fp32_accumulation": True}, "rounds once.*'dense' cannot.*Use grad_reduce_in_fp32=True"),
    ],
    ids=["all-reduce", "fp32 accumulation"],
)
def test_settings_without_a_meaning_for_replicas_are_refused(config, text):
    world = LoopbackWorld(1)
    group = ReductionGroup(world.communicator(0), replicate=world.communicator(0))
    with pytest.raises(ConfigError, match=text):
        DistributedDataParallel(Net(), DistributedDataParallelConfig(**{**SHARDED, **config}), groups={"dense": group})


def test_replicas_need_a_group_of_all_ranks():
    grid = grid_of(2, 2)
    groups = ParallelGroups(grid.groups(0).reduction)
    with pytest.raises(ConfigError, match=r"no group has all ranks.*replicas of 'dense': \[0, 2\].*step_group="):
        DistributedDataParallel(Net(), DistributedDataParallelConfig(**SHARDED), groups=groups)


# An interrupt between the two reductions #


class SomeHandle(Handle):
    """A launch that a test completes."""

    def __init__(self, name, log, *, interrupts=0):
        self._name, self._log, self._interrupts = name, log, interrupts
        self.is_complete = False

    @property
    def is_started(self):
        return self._name in self._log

    def start(self):
        if self._interrupts:
            self._interrupts -= 1
            raise KeyboardInterrupt
        if not self.is_started:
            self._log.append(self._name)

    def wait(self):
        assert self.is_started, f"{self._name} is waited for and was not sent"
        self._log.append(f"wait {self._name}")
        self.is_complete = True

    def poll(self):
        return self.is_complete


@pytest.mark.parametrize("at", ["inside 1", "over 0"])
def test_an_interrupt_leaves_the_order_of_the_reductions_over_replicas_as_it_was(at, monkeypatch):
    log = []
    reducer = ReplicaReducer(LoopbackWorld(2).communicator(0), None)

    def launch(index, attempt=0):
        inside = SomeHandle(f"inside {index}", log, interrupts=at == f"inside {index}" and not attempt)
        over = SomeHandle(f"over {index}", log, interrupts=at == f"over {index}" and not attempt)
        monkeypatch.setattr(reducer.communicator, "handle", lambda *_, **__: over)
        return inside, reducer.behind(inside, (), label="")

    first_inside, first = launch(0)
    first.start()
    first_inside.is_complete = True
    _, second = launch(1)
    with pytest.raises(KeyboardInterrupt):
        second.start()
    if not second.is_started:
        _, second = launch(1, attempt=1)
        second.start()
    second.wait()
    first.wait()

    assert [text for text in log if "wait" not in text] == (["inside 0", "inside 1", "over 0", "over 1"])
    assert not reducer.pending


@pytest.mark.parametrize("layouts", [[(2, 2), (1, 4), (4, 1)], [(1, 4), (2, 2), (2, 2)]], ids=str)
def test_checkpoints_go_from_any_number_of_replicas_to_any_other(tmp_path, layouts):
    """The first replica writes what all hold. All but the last stretch save; training goes on from there bit by bit."""

    def program(grid, rank, module, first, *, is_last):
        ddp = grid.wrap(rank, module)
        optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=1e-2), ddp)
        if first:
            load_checkpoint(tmp_path, ddp, optimizer)
        for step in range(first, first + 2):
            # Integers and powers of two: sums over ranks are exact, whatever their order.
            (sum(param.sum() for param in module.parameters()) * float(2**step * (rank + 1))).backward()
            optimizer.step()
            optimizer.zero_grad()
        if not is_last:
            save_checkpoint(tmp_path, ddp, optimizer, step=first + 2)
        ddp.finish_param_sync()
        return values_of(module)

    for number, layout in enumerate(layouts):
        grid, modules, is_last = grid_of(*layout), [Net() for _ in range(4)], number == len(layouts) - 1

        def stretch(rank, grid=grid, modules=modules, number=number, is_last=is_last):
            return program(grid, rank, modules[rank], 2 * number, is_last=is_last)

        results = grid.run(stretch)

    plain, steps = Net(), 2 * len(layouts)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(steps):
        for param in plain.parameters():
            param.grad = torch.full_like(param, 2.0**step * 2.5)  # the mean of 1, 2, 3 and 4
        optimizer.step()
    for weights in results:
        assert [name for name, values in values_of(plain).items() if not torch.equal(weights[name], values)] == []
