"""Counted, not timed: collectives and their bytes, passes over gradient memory, new tensors.

The model has three parameters of 300, 200 and 100 elements. With ``bucket_size=150`` and 2, 3 or 4 ranks the layout is, last
parameter first and each start at a multiple of 64::

    bucket 0   c: 0..100, b: 128..328 (328 >= 150 closes), padded to 384 = lcm(ranks, 128) * 3 or * 1
    bucket 1   a: 384..684 (300 >= 150 closes), padded to 768

so each bucket has 384 elements: 1536 bytes in float32, 768 in bfloat16.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from pool import Rank
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megabucket as mb
from megabucket.planning.memory import exchange_bytes
from megabucket.testing import ListRecorder

pytestmark = pytest.mark.dist

Call = tuple[str, str, int, int]  # kind, label, calls in the batch, bytes


class Vectors(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(300, dtype=dtype))
        self.b = torch.nn.Parameter(torch.ones(200, dtype=dtype))
        self.c = torch.nn.Parameter(torch.ones(100, dtype=dtype))

    def forward(self, x: float) -> torch.Tensor:
        return x * ((self.a * self.a).sum() + (self.b * self.b).sum() + (self.c * self.c).sum())


def wrapped(
    rank: Rank, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[mb.DistributedDataParallel, torch.optim.Optimizer, ListRecorder]:
    recorder = ListRecorder(records_time=False)  # for times a thread would complete the launches, out of sight of a Watch
    config = mb.DistributedDataParallelConfig(bucket_size=150, **options)
    ddp = mb.DistributedDataParallel(Vectors(dtype), config, process_group=rank.group, recorder=recorder)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.01, foreach=False)
    return ddp, mb.DistributedOptimizer(sgd, ddp, clip_grad=1e9), recorder


def calls(recorder: ListRecorder) -> list[Call]:
    """Take what was recorded since the last call, but for how processes of one host find out whether they can copy."""
    seen = [
        (one.kind.value, one.label, one.num_calls, one.payload_bytes)
        for one in recorder.collectives
        if not one.label.startswith("same-host copies")
    ]
    recorder.launches.clear()
    return seen


def collectives_by_phase(rank: Rank, dtype: torch.dtype, options: dict[str, Any]) -> list[dict[str, list[Call]]]:
    """Return the collectives of the wrap and of three steps of three microbatches, by the call that launched them."""
    ddp, optimizer, recorder = wrapped(rank, dtype, options)
    phases = [{"wrap": calls(recorder)}]
    for _ in range(3):
        step = {}
        for microbatch in range(2):
            with ddp.no_sync():
                ddp(1.0).backward()
            step[f"microbatch {microbatch}"] = calls(recorder)
        value = ddp(1.0)
        step["forward"] = calls(recorder)
        value.backward()
        step["backward"] = calls(recorder)
        optimizer.step()
        step["step"] = calls(recorder)
        optimizer.zero_grad()
        step["zero_grad"] = calls(recorder)
        phases.append(step)
    return phases


def step_of(**launched: list[Call]) -> dict[str, list[Call]]:
    """Return a step in which nothing is launched but what is given."""
    names = ("microbatch 0", "microbatch 1", "forward", "backward", "step", "zero_grad")
    return {name: launched.get(name, []) for name in names}


def wrap(*, params_bytes: int = 3072) -> dict[str, list[Call]]:
    """Return what wrapping launches: four gates, and all parameters."""
    labels = ("wrap", "wrap: buffers", "wrap: parameters", "DistributedOptimizer()")
    *gates, last = [("all_reduce", label, 1, 48) for label in labels]
    return {"wrap": [*gates, ("broadcast", "initial broadcast", 1, params_bytes), last]}  # both buckets: 2 * 1536


ALL_REDUCES = [("all_reduce", "bucket 0", 1, 1536), ("all_reduce", "bucket 1", 1, 1536)]
REDUCE_SCATTERS = [("reduce_scatter", "bucket 0", 1, 1536), ("reduce_scatter", "bucket 1", 1, 1536)]
FENCE = [("all_reduce", "fence", 1, 48)]  # 6 int64
NORM = [("all_reduce", "grad norm", 1, 8)]  # one float64
GATHERS = [("all_gather", "param gather 1", 1, 1536), ("all_gather", "param gather 0", 1, 1536)]  # in forward order


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_reduce_costs_one_collective_per_bucket_and_one_fence_per_step(pool, ranks, overlap):
    by_rank = pool.run(collectives_by_phase, torch.float32, {"overlap_grad_reduce": overlap}, ranks=ranks)

    assert by_rank == [[wrap(), *[step_of(backward=ALL_REDUCES + FENCE)] * 3]] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_reduce_scatter_costs_two_collectives_per_bucket_and_one_fence_and_one_number_per_step(pool, ranks):
    options = {"use_distributed_optimizer": True, "overlap_grad_reduce": False}
    by_rank = pool.run(collectives_by_phase, torch.float32, options, ranks=ranks)

    assert by_rank == [[wrap(), *[step_of(step=REDUCE_SCATTERS + FENCE + NORM + GATHERS)] * 3]] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_first_step_learns_and_from_the_second_on_backward_itself_launches(pool, ranks):
    by_rank = pool.run(collectives_by_phase, torch.float32, {"use_distributed_optimizer": True}, ranks=ranks)

    first = step_of(step=REDUCE_SCATTERS + FENCE + NORM + GATHERS)
    later = step_of(backward=REDUCE_SCATTERS, step=FENCE + NORM + GATHERS)
    assert by_rank == [[wrap(), first, later, later]] * ranks


def test_bfloat16_parameters_reduce_float32_and_gather_bfloat16(pool):
    by_rank = pool.run(collectives_by_phase, torch.bfloat16, {"use_distributed_optimizer": True}, ranks=2)

    gathers = [("all_gather", "param gather 1", 1, 768), ("all_gather", "param gather 0", 1, 768)]
    later = step_of(backward=REDUCE_SCATTERS, step=FENCE + NORM + gathers)
    assert [phases[0] for phases in by_rank] == [wrap(params_bytes=1536)] * 2
    assert [phases[3] for phases in by_rank] == [later] * 2


def test_one_group_is_one_coalesced_batch_of_all_buckets(pool):
    options = {"use_distributed_optimizer": True, "bucket_groups": "single"}
    by_rank = pool.run(collectives_by_phase, torch.float32, options, ranks=2)

    scatters, gathers = [("reduce_scatter", "bucket 0", 2, 3072)], [("all_gather", "param gather 0", 2, 3072)]
    assert [phases[3] for phases in by_rank] == [step_of(backward=scatters, step=FENCE + NORM + gathers)] * 2


def test_the_fence_can_be_saved(pool):
    by_rank = pool.run(collectives_by_phase, torch.float32, {"fence": False}, ranks=2)

    assert by_rank == [[wrap(), *[step_of(backward=ALL_REDUCES)] * 3]] * 2


@pytest.mark.parametrize("reduce_scatters", [True, False])
def test_one_rank_launches_nothing_at_all(pool, reduce_scatters):
    ((wrap, *steps),) = pool.run(collectives_by_phase, torch.float32, {"use_distributed_optimizer": reduce_scatters}, ranks=1)

    assert wrap == {"wrap": []}
    assert steps == [step_of()] * 3


# Passes over gradient memory, and new tensors #


class Watch(TorchDispatchMode):
    """Sees every operation of this thread, also those of autograd itself and of hooks."""

    def __init__(self, *, grads: torch.Tensor | None = None) -> None:
        super().__init__()
        self._grads = grads.untyped_storage().data_ptr() if grads is not None else None
        self.writes: Counter[tuple[str, int, int]] = Counter()
        """Operations that write into the storage of ``grads``: name, first element, number of elements."""
        self.new: Counter[str] = Counter()
        """Operations that return a tensor in memory of its own, with the bytes of that memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.new[f"{name}: {tensor.untyped_storage().nbytes()}"] += 1
        if func._schema.is_mutable and args and not name.startswith("allreduce"):
            for tensor in tree_leaves(args[0]):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() == self._grads:
                    self.writes[name, tensor.storage_offset(), tensor.numel()] += 1
        return result


def writes_in_steady_state(rank: Rank, dtype: torch.dtype, options: dict[str, Any], microbatches: int) -> dict[Any, int]:
    """Return the operations that write gradient memory in the third step, but for those of collectives."""
    ddp, optimizer, _ = wrapped(rank, dtype, options)
    for _ in range(3):
        with Watch(grads=ddp.param_and_grad_buffers[0].grad_data) as watch:
            for _ in range(microbatches - 1):
                with ddp.no_sync():
                    ddp(1.0).backward()
            ddp(1.0).backward()
            optimizer.step()
            optimizer.zero_grad()
    return dict(watch.writes)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduce_scatters", [True, False])
def test_each_gradient_passes_over_memory_once_and_the_mean_once_per_step(pool, microbatches, dtype, reduce_scatters):
    options = {"use_distributed_optimizer": reduce_scatters}

    by_rank = pool.run(writes_in_steady_state, dtype, options, microbatches, ranks=2)

    where = [(0, 100), (128, 200), (384, 300)]  # c, b, a
    for rank, writes in enumerate(by_rank):
        # The first microbatch: no zeroing before it.
        passes = {("_foreach_copy_", start, numel): 1 for start, numel in where}
        if microbatches > 1:
            passes |= {("add_", start, numel): microbatches - 1 for start, numel in where}  # the others, by autograd itself
        passes |= {("mul_", start, 384): 1 for start in (0, 384)}  # by 1/2, before the sum
        if reduce_scatters:
            # In this rank's half of each bucket what the other one has sent is added.
            passes |= {("add_", start + 192 * rank, 192): 1 for start in (0, 384)}
        else:
            # Small buckets are sent whole. Gloo adds larger ones itself.
            passes |= {("add_", start, 384): 1 for start in (0, 384)}
        assert writes == passes


def new_tensors(rank: Rank, dtype: torch.dtype, options: dict[str, Any]) -> list[dict[str, int]]:
    """Return what is allocated in the third step: by forward and backward, plain and wrapped, and by ``step``."""
    plain = Vectors(dtype)
    ddp, optimizer, _ = wrapped(rank, dtype, options)
    for _ in range(3):
        plain.zero_grad()
        with Watch() as of_plain:
            for _ in range(3):
                plain(1.0).backward()
        with Watch() as of_wrapped:
            for _ in range(2):
                with ddp.no_sync():
                    ddp(1.0).backward()
            ddp(1.0).backward()
            ddp.finish_grad_sync()
        with Watch() as of_step:
            optimizer.step()
            ddp.finish_param_sync()
            optimizer.zero_grad()
    return [dict(watch.new) for watch in (of_plain, of_wrapped, of_step)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"use_distributed_optimizer": False},
        {"use_distributed_optimizer": False, "overlap_grad_reduce": False},
        {"use_distributed_optimizer": True},
        {"use_distributed_optimizer": True, "overlap_param_gather": True},
        {"use_distributed_optimizer": True, "bucket_groups": "single"},
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", ["error", "allow"])
def test_the_wrapper_and_the_optimizer_make_only_single_numbers_in_the_steady_state(pool, dtype, options, policy):
    """Views are not counted: they own no memory. An SGD without momentum makes no tensor itself."""
    for by_plain, by_wrapped, by_step in pool.run(new_tensors, dtype, {**options, "nonfinite_gradients": policy}, ranks=2):
        assert sum(by_plain.values()) > 0
        # For the finite test: the norm of each of two buckets, float32.
        assert by_wrapped == by_plain | ({"linalg_vector_norm: 4": 2} if policy == "error" else {})
        # For the norm: that of each of two flat tensors, one per bucket; then all of them, and the sum of their squares.
        assert by_step == {"linalg_vector_norm: 8": 2, "stack: 16": 1, "sum: 8": 1}


# What an exchange is received in #


def exchange(rank: Rank, dtype: torch.dtype, options: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of what two steps have left in the plans of the gradients, and what ``planning.memory`` says."""
    ddp, optimizer, _ = wrapped(rank, dtype, {"use_distributed_optimizer": True, **options})
    for _ in range(2):
        ddp(1.0).backward()
        optimizer.step()
        optimizer.zero_grad()
    ddp.finish_param_sync()
    given = {tensor.untyped_storage().data_ptr() for tensor in (buffer.grad_data for buffer in ddp.param_and_grad_buffers)}
    plans = [group._grad_calls.plan for group in ddp.bucket_groups]
    taken = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for plan in plans
        for start in plan.starts
        for tensor in start.tensors
    }
    return sum(taken[place] for place in taken.keys() - given), exchange_bytes(ddp.layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_exchanges_take_what_the_formula_says(pool, ranks, dtype):
    buffer_bytes = 2 * 384 * 4  # gradients are float32

    by_rank = pool.run(exchange, dtype, {}, ranks=ranks)

    expected = buffer_bytes // 2 if ranks == 2 else buffer_bytes
    assert by_rank == [(expected, expected)] * ranks
