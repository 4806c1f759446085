"""What a device is asked to do for each gradient and each update, counted in kernels. The counts are the same on a CPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megabucket as mb
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
