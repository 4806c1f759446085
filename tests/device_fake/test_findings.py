"""What a reading of the paths for GPUs has found (reference/gpu-review.md), each as it shows on a device that is not there."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch
from fake_accelerator import fake_device
from fake_nccl import FakeNccl, fake_nccl, other_ranks
from schedules import Layer, Microbatch, Schedule, run

import megabucket as mb
from megabucket.buffer.finite import FiniteTest, any_beyond
from megabucket.checkpoint.capture import to_host
from megabucket.checkpoint.format import Snapshot
from megabucket.comm import LocalCommunicator, ReduceOp, ReduceScatter
from megabucket.comm.plan import Plan
from megabucket.ddp.backward import Backward
from megabucket.errors import ConcurrentBackwardError
from megabucket.fused import kernels
from megabucket.optim.norm import l2_norm

ASKS_NOTHING, SHARDED = {"fence": False, "nonfinite_gradients": "allow"}, {"use_distributed_optimizer": True}
LARGEST = torch.finfo(torch.float32).max


@pytest.fixture
def device(monkeypatch):
    with fake_device(monkeypatch) as made:
        yield made


class Follower:
    """Follows a backward whose end autograd does not keep here."""

    backward = None

    def abandon_backward(self) -> None:
        pass


class TestOneBackwardAtATime:
    @pytest.fixture(autouse=True)
    def _autograd(self, monkeypatch):
        monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", SimpleNamespace(queue_callback=lambda _: None))
        monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: self.task_id)

    def test_two_backwards_in_the_thread_of_a_device_are_two(self):
        self.task_id = 1
        backward = Backward(Follower())
        self.task_id = 2

        with pytest.raises(ConcurrentBackwardError):
            backward.check_is_this(rank=0)

    def test_one_backward_in_the_threads_of_device_and_host_is_one(self):
        self.task_id, found = 1, []
        backward = Backward(Follower())

        def in_the_other_thread():
            backward.check_is_this(rank=0)
            found.append("one")

        thread = threading.Thread(target=in_the_other_thread)
        thread.start()
        thread.join()

        assert found == ["one"]


def test_the_norm_makes_no_copy_of_a_gradient():
    grad = torch.empty(1_000, dtype=torch.bfloat16, device="meta")
    made = []
    with Made(made):
        l2_norm(grad)

    assert max(made) == 1


class Made(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, numels):
        super().__init__()
        self._numels = numels

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        self._numels += [one.numel() for one in torch.utils._pytree.tree_leaves(outputs)]
        return outputs


def test_a_torch_that_refuses_the_wide_product_is_not_asked_for_it(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("self and mat2 must have the same dtype")

    monkeypatch.setattr(torch.ops.aten, "addmm", SimpleNamespace(dtype_out=refuse))
    kernels._has_wide_product.cache_clear()
    try:
        assert not kernels._has_wide_product(torch.device("cpu"), torch.bfloat16)
    finally:
        kernels._has_wide_product.cache_clear()


@pytest.mark.parametrize("size", [2, 64])
def test_parts_of_all_ranks_are_added_up_in_float32_by_two_operations(device, size):
    full = torch.ones(size * 4, dtype=torch.bfloat16)
    plan = Plan(rank=1, size=size, waits_like_gloo=False, is_kept=True)

    plan.add_in_rank_order([ReduceScatter(full[4:8], full, ReduceOp.SUM, in_fp32=True, divisor=2.0)])
    target, source, *_ = plan.starts[0].arguments
    target.copy_(source)
    for operation in plan.after:
        operation()

    assert len(plan.after) == 3  # and the division
    assert full[4:8].tolist() == [size / 2] * 4


class TestFinite:
    @pytest.mark.parametrize(
        ("value", "is_found"),
        [(1.0, False), (-LARGEST, False), (math.nan, True), (-math.inf, True)],
        ids=["one", "the largest", "nan", "inf"],
    )
    def test_what_is_not_finite_is_found_without_the_host(self, device, value, is_found):
        tests = [FiniteTest([], [torch.tensor([1.0, last])]) for last in (value, 1.0)]

        for test in tests:
            test.run()
        assert device.num_host_waits == 0
        assert bool(any_beyond(tests)) == is_found

    def test_what_leaves_no_headroom_is_found(self, device):
        test = FiniteTest([], [torch.tensor([LARGEST / 2])], headrooms=[4.0])

        test.run()

        assert bool(any_beyond([test]))

    def test_a_bucket_costs_one_launch_and_a_step_one_comparison(self, device):
        tests = [FiniteTest([], [torch.ones(8)]) for _ in range(5)]
        device.operations.clear()

        for test in tests:
            test.run()
        assert device.operations == ["linalg_vector_norm"] * 5
        any_beyond(tests)
        assert device.operations.count("le") == 1


def test_a_checkpoint_waits_once_for_all_its_copies(device):
    with device.stream(1):
        pieces = [SimpleNamespace(info=None, start=0, stop=4, values=torch.full((4,), 7.0)) for _ in range(3)]
        copied = to_host(Snapshot(pieces, {}))

    assert [piece.values.tolist() for piece in copied.pieces] == [[7.0] * 4] * 3
    assert device.num_host_waits == 1


class TestHostWaits:
    """How often the host waits in a step; the first one learns."""

    @pytest.mark.parametrize(
        ("fields", "waits"),
        [
            ({"is_plain": True}, 1),
            ({"is_plain": True, "config": ASKS_NOTHING}, 0),
            ({"is_plain": True, "config": {"fence": False}}, 1),
            ({"is_plain": True, "half": "float16"}, 2),
            ({"is_plain": True, "half": "bfloat16"}, 1),
            ({"is_plain": True, "sets_to_none": False}, 1),
            ({"is_plain": True, "sets_to_none": False, "zeroes": "optimizer"}, 1),
            ({"config": SHARDED}, 2),
            ({"config": SHARDED | ASKS_NOTHING}, 1),
            ({"config": SHARDED | {"fence": False}}, 2),
            ({"config": SHARDED | {"overlap_param_gather": True}}, 2),
            ({"config": SHARDED | {"bucket_groups": "single"}}, 2),
            ({"config": SHARDED, "half": "float16"}, 2),
            ({"config": SHARDED, "has_replicas": True}, 2),
            ({"config": SHARDED, "forces_all_reduce": True}, 2),
            ({"config": SHARDED, "flushes": "finish_grad_sync"}, 3),
            ({"config": SHARDED, "has_copies": True}, 4),
            ({"config": SHARDED | {"nonfinite_gradients": "allow"}, "scales_loss": True}, 6),
        ],
        ids=[
            "all-reduce: the fence",
            "nothing asked",
            "without a fence: the finite test",
            "float16: the fence, the test of the sum",
            "bfloat16: the fence",
            "zeroed gradients: the fence",
            "gradients that torch zeroes: the fence",
            "reduce-scatter: the fence, the norm",
            "only the norm",
            "without a fence: the finite test, the norm",
            "gather overlapped",
            "one group of buckets",
            "float16 shards",
            "replicas",
            "force_all_reduce",
            "finish, then step: two fences, the norm",
            "finalize_grads: two fences, its call, a norm over another group",
            "GradScaler: two fences, the scale, infinities here and in torch, the norm",
        ],
    )
    @pytest.mark.parametrize("num_microbatches", [1, 3])
    def test_of_a_step(self, device, fields, waits, num_microbatches):
        FakeNccl.device = device
        layers = (Layer(8, 0), Layer(64, 1), Layer(40_000, 2))
        steps = ((Microbatch((0, 0, 0)),) * num_microbatches,) * 3
        config = {"bucket_size": 64, **fields.get("config", {})}

        with fake_nccl(size=2), other_ranks():
            found = run(device, Schedule(layers, steps, **{**fields, "config": config}))

        assert found == [waits] * 3


def test_one_rank_has_no_races_and_no_waits_but_for_the_finite_test(device):
    model = torch.nn.Linear(4, 4)
    ddp = mb.DistributedDataParallel(model, communicator=LocalCommunicator())
    ddp(torch.ones(4)).sum().backward()

    assert device.num_host_waits == 1
