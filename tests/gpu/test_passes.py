"""What a device is asked to do for each gradient and each update, counted in kernels. The counts are the same on a CPU."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megabucket as mb
from megabucket.comm import Accelerator, LocalCommunicator
from megabucket.config.resolve import resolve_step
from megabucket.ddp.fence import Fence, Report, check_not_capturing
from megabucket.errors import PhaseError
from megabucket.optim.norm import l2_norm


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Factors(torch.nn.Module):
    """Five parameters whose gradients autograd hands over as they are."""

    def __init__(self, dtype):
        super().__init__()
        self.factors = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(100, dtype=dtype)) for _ in range(5)])

    def forward(self, inputs):
        return sum((inputs * factor).sum() for factor in self.factors)


def wrapped(config, dtype=torch.bfloat16):
    return mb.DistributedDataParallel(Factors(dtype), config)


def backward_ops(ddp):
    loss = ddp(torch.ones(100, dtype=next(ddp.parameters()).dtype))
    with Ops() as ops:
        loss.backward()
    return ops.seen


@pytest.mark.parametrize("microbatch", ["first", "second"])
def test_16_bit_gradients_reach_their_float32_places_in_one_pass(microbatch):
    """A copy or an addition of mixed dtypes is one operation; a conversion before it would be a second pass over memory."""
    ddp = wrapped(mb.DistributedDataParallelConfig(nonfinite_gradients="allow"))
    for _ in range(2):  # the first step adds, to what is in a fresh buffer
        backward_ops(ddp)
        ddp.zero_grad()
    with ddp.no_sync():
        seen = backward_ops(ddp)
        if microbatch == "second":
            seen = backward_ops(ddp)

    moves = [name for name in seen if name not in ("ones_like", "expand", "detach", "mul")]
    assert moves == (["_foreach_copy_"] if microbatch == "first" else ["add_"] * 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_a_fused_optimizer_is_one_kernel_for_all_flat_tensors(sharded, dtype):
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=sharded, bucket_size=200)
    ddp = wrapped(config, dtype)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), fused=True), ddp)
    backward_ops(ddp)
    with Ops() as ops:
        optimizer.step()

    assert ddp.layout.num_buckets == 3
    assert [name for name in ops.seen if "adam" in name] == ["_fused_adamw_"]


def test_the_norm_of_a_flat_gradient_is_one_pass():
    """On a CPU it is taken in chunks; on ``meta`` the package does as on any device."""
    grad = torch.empty(1 << 20, dtype=torch.bfloat16, device="meta")
    with Ops() as ops:
        l2_norm(grad)

    assert ops.seen == ["_foreach_norm"]


class TestCapture:
    """A CUDA graph is recorded while nothing runs, so whatever reads from the device is refused by name."""

    CUDA = torch.device("cuda")

    @pytest.fixture
    def capturing(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    @pytest.fixture
    def fence(self):
        policy = resolve_step(mb.DistributedDataParallelConfig())
        return Fence(LocalCommunicator(), num_buckets=1, policy=policy, device=self.CUDA)

    def test_a_fence_is_refused(self, capturing, fence):
        with pytest.raises(PhaseError, match=r"CUDA graph is being captured.*fence=False and nonfinite_gradients='allow'"):
            fence.send(Report(rank=0), torch.tensor(False))

    def test_with_nobody_to_ask_and_nothing_to_read_it_is_none(self, capturing, fence):
        fence.send(Report(rank=0))

        assert fence.take(lambda: Report(rank=0)) == []

    @pytest.mark.parametrize("returns_grad_norm", [True, False])
    def test_a_step_of_a_distributed_optimizer_is_refused(self, returns_grad_norm, capturing, monkeypatch):
        ddp = mb.DistributedDataParallel(
            torch.nn.Linear(2, 2), mb.DistributedDataParallelConfig(), communicator=LocalCommunicator()
        )
        sgd = torch.optim.SGD(ddp.parameters(), lr=1.0)
        optimizer = mb.DistributedOptimizer(sgd, ddp, returns_grad_norm=returns_grad_norm)
        ddp(torch.ones(2)).sum().backward()
        monkeypatch.setattr(optimizer.global_norm, "accelerator", Accelerator.of(self.CUDA))

        with pytest.raises(PhaseError, match=r"captured, and DistributedOptimizer.step\(\) decides on the host what to do"):
            optimizer.step()

    def test_nothing_is_asked_of_a_cpu(self, capturing):
        check_not_capturing(Accelerator.of(torch.device("cpu")), reader="x", remedy="")

    def test_the_device_of_the_buffer_is_asked_and_not_the_current_one(self, monkeypatch):
        current = [0]

        @contextmanager
        def device(of):
            current.append(of.index)
            yield
            current.pop()

        monkeypatch.setattr(torch.cuda, "device", device)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == 1)

        assert [Accelerator.of(torch.device("cuda", index)).is_capturing() for index in (0, 1)] == [False, True]

    def test_nothing_is_refused_outside_a_capture(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

        check_not_capturing(Accelerator.of(self.CUDA), reader="x", remedy="")
