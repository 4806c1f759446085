"""What a step launches on a device and how often the host waits for it: per step, per bucket, per parameter (docs/gpu.md).

Counted are torch's operations on the device. Most are one kernel; those over many tensors are one for all of them, or a few.
"""

import contextlib
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from fake_accelerator import fake_device
from fake_nccl import FakeNccl, fake_nccl, other_ranks

import megabucket as mb
from megabucket.buffer.finite import FiniteTest, any_beyond

NUMEL = 128  # of each parameter
ASKS_NOTHING = {"fence": False, "nonfinite_gradients": "allow"}
SHARDED = {"use_distributed_optimizer": True}

NO_LAUNCH = {"free", "is_set_to", "ones_like"}  # of the caching allocator, of metadata, and the loss's own gradient
OF_THE_MODEL = Counter(mul=1)  # a parameter, in each backward

COPIED, ADDED = Counter(_foreach_copy_=1), Counter(add_=1)
FINITE_NORM, SCALE, NORM = (Counter({name: 1}) for name in ("linalg_vector_norm", "mul_", "linalg_vector_norm"))
ROUNDED = {torch.float32: Counter(), torch.bfloat16: Counter(_foreach_copy_=1)}  # the main parameters of all shards
SUM, SCATTER, GATHER = (Counter({name: 1}) for name in ("all_reduce", "reduce_scatter", "all_gather"))
COMPARISON = Counter(["stack", "le", "all", "logical_not_"])
IN_PINNED_MEMORY = Counter(["empty", "copy_"])  # the fence's message, which the host writes; a copy that the host reads
FENCE = Counter(["copy_", "logical_or_", "all_reduce", "tolist"]) + IN_PINNED_MEMORY
NORM_OF_ALL = Counter(["stack", "pow_", "sum", "copy_", "_local_scalar_dense"])
CLIPPING = Counter(["_foreach_mul_"])
UPDATE = Counter(["_foreach_add_", "_fused_adamw_"])


class Factors(torch.nn.Module):
    """Parameters whose gradients cost one operation each."""

    def __init__(self, num_params, dtype, numel=NUMEL):
        super().__init__()
        self.factors = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(numel, dtype=dtype)) for _ in range(num_params)])

    def forward(self, inputs):
        return sum((inputs * factor).sum() for factor in self.factors)


class Counts:
    """What was launched, and how often the host waited, by part of a step."""

    def __init__(self, device):
        self._device, self.launches, self.waits = device, {}, {}

    @contextlib.contextmanager
    def part(self, name):
        self._device.operations.clear()
        before = self._device.num_host_waits
        yield
        self.launches[name] = Counter(one for one in self._device.operations if one not in NO_LAUNCH)
        self.waits[name] = self._device.num_host_waits - before


def counts_of(device, ddp, optimizer, *, finish=lambda: None):
    """Count the third step, of three microbatches: the first one learns."""
    counts = Counts(device)
    inputs = torch.ones_like(next(ddp.parameters()), requires_grad=False)
    for _ in range(3):
        for part in ("first microbatch", "further microbatch", "last microbatch"):
            with contextlib.nullcontext() if part == "last microbatch" else ddp.no_sync():
                loss = ddp(inputs)
                with counts.part(part):
                    loss.backward()
        with counts.part("finish"):
            finish()
        with counts.part("update"):
            optimizer.step()
        with counts.part("clearing"):
            optimizer.zero_grad()
    return counts


def times(number, counter):
    return Counter({name: number * count for name, count in counter.items()})


@pytest.fixture
def device(monkeypatch):
    with fake_device(monkeypatch) as made:
        FakeNccl.device = made
        yield made


@pytest.fixture(
    params=[(2, 1), (2, 2), (4, 2), *(pytest.param(shape, marks=pytest.mark.nightly) for shape in ((4, 1), (8, 2)))],
    ids=lambda shape: "{} buckets of {}".format(*shape),
)
def shape(request):
    return request.param


def counts_of_ours(
    device, shape, *, dtype=torch.float32, numel=NUMEL, is_plain=False, clip_grad=0.0, returns_grad_norm=True, **fields
):
    num_buckets, num_params = shape
    with fake_nccl(size=2), other_ranks():
        module = Factors(num_buckets * num_params, dtype, numel)
        ddp = mb.DistributedDataParallel(module, mb.DistributedDataParallelConfig(bucket_size=num_params * numel, **fields))
        assert ddp.layout.num_buckets == num_buckets
        adamw = torch.optim.AdamW(ddp.parameters(), fused=True)
        wrapped = {"clip_grad": clip_grad, "returns_grad_norm": returns_grad_norm}
        optimizer = adamw if is_plain else mb.DistributedOptimizer(adamw, ddp, **wrapped)
        finish = {"finish": ddp.finish_grad_sync} if "finish" in fields else {}
        counts = counts_of(device, ddp, optimizer, **finish)
        ddp.detach()
    return counts


def counts_of_torch_ddp(device, shape):
    """Count torch DDP in a group of one, whose mean is a product with 1 like any other."""
    num_buckets, num_params = shape
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = Factors(num_buckets * num_params, torch.float32)
        bucket_mb = num_params * NUMEL * 4 / 2**20
        ddp = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
        return counts_of(device, ddp, torch.optim.AdamW(ddp.parameters(), fused=True))
    finally:
        dist.destroy_process_group()


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
MODES = pytest.mark.parametrize("mode", [{}, SHARDED], ids=["all-reduce", "reduce-scatter"])


class TestMicrobatches:
    @DTYPES
    @MODES
    def test_without_a_sync_ask_for_the_gradients_places_and_nothing_else(self, device, shape, dtype, mode):
        num_buckets, num_params = shape

        counts = counts_of_ours(device, shape, dtype=dtype, **mode)

        of_the_model = times(num_buckets * num_params, OF_THE_MODEL)
        assert counts.launches["first microbatch"] - of_the_model == times(num_buckets, COPIED)
        assert counts.launches["further microbatch"] - of_the_model == times(num_buckets * num_params, ADDED)
        assert counts.waits["first microbatch"] == counts.waits["further microbatch"] == 0
        assert counts.launches["clearing"] == Counter()

    @pytest.mark.parametrize(
        ("num_params", "numel", "num_copies"),
        [(64, NUMEL, 1), (65, NUMEL, 2), (3, 32_768, 1), (3, 65_536, 3)],
        ids=["64 gradients", "one more", "128 KiB each", "more than 128 KiB each"],
    )
    def test_copy_the_gradients_of_a_bucket_together_up_to_a_size(self, device, num_params, numel, num_copies):
        counts = counts_of_ours(device, (1, num_params), numel=numel)

        copies = counts.launches["first microbatch"] - times(num_params, OF_THE_MODEL)
        assert set(copies) <= {"_foreach_copy_", "copy_"}  # of several gradients, and of one
        assert copies.total() == num_copies


class TestReduction:
    """From the last backward to the cleared gradients."""

    @staticmethod
    def rest(counts, shape):
        """What is launched beside the model's own work and the additions of the last microbatch."""
        num_params = shape[0] * shape[1]
        parts = ("last microbatch", "finish", "update", "clearing")
        return sum((counts.launches[part] for part in parts), Counter()) - times(num_params, OF_THE_MODEL + ADDED)

    @pytest.mark.parametrize("finish", [{}, {"finish": "explicit"}], ids=["auto", "explicit"])
    def test_of_an_all_reduce_and_a_plain_optimizer(self, device, shape, finish):
        counts = counts_of_ours(device, shape, is_plain=True, **finish)

        a_bucket, a_step = FINITE_NORM + SUM + SCALE, COMPARISON + IN_PINNED_MEMORY + FENCE + UPDATE
        assert self.rest(counts, shape) == times(shape[0], a_bucket) + a_step
        assert counts.waits["last microbatch"] + counts.waits["finish"] == 1
        assert counts.waits["update"] == 0

    @pytest.mark.parametrize("is_plain", [True, False], ids=["AdamW", "DistributedOptimizer"])
    def test_of_an_all_reduce_that_asks_nothing(self, device, shape, is_plain):
        counts = counts_of_ours(device, shape, is_plain=is_plain, **ASKS_NOTHING)

        a_bucket, of_all = SUM + SCALE, Counter()
        if not is_plain:
            a_bucket, of_all = a_bucket + NORM, NORM_OF_ALL + IN_PINNED_MEMORY
        assert self.rest(counts, shape) == times(shape[0], a_bucket) + of_all + UPDATE
        assert sum(counts.waits.values()) == (0 if is_plain else 1)

    def test_of_a_division_by_the_collective(self, device, shape):
        counts = counts_of_ours(device, shape, is_plain=True, average_in_collective=True, **ASKS_NOTHING)

        assert self.rest(counts, shape) == times(shape[0], SUM) + UPDATE

    @DTYPES
    @pytest.mark.parametrize("clip_grad", [0.0, 1e-6], ids=["unclipped", "clipped"])
    @pytest.mark.parametrize("finish", [{}, {"finish": "explicit"}], ids=["auto", "explicit"])
    def test_of_an_all_reduce(self, device, shape, dtype, clip_grad, finish):
        counts = counts_of_ours(device, shape, dtype=dtype, clip_grad=clip_grad, **finish)

        a_bucket = FINITE_NORM + SUM + SCALE + NORM
        a_step = COMPARISON + FENCE + NORM_OF_ALL + times(2, IN_PINNED_MEMORY) + UPDATE + ROUNDED[dtype]
        a_step += CLIPPING if clip_grad else Counter()
        assert self.rest(counts, shape) == times(shape[0], a_bucket) + a_step
        assert counts.waits["last microbatch"] + counts.waits["finish"] == 1
        assert counts.waits["update"] == 1

    @DTYPES
    @pytest.mark.parametrize("clip_grad", [0.0, 1e-6], ids=["unclipped", "clipped"])
    @pytest.mark.parametrize("finish", [{}, {"finish": "explicit"}], ids=["auto", "explicit"])
    def test_of_a_reduce_scatter(self, device, shape, dtype, clip_grad, finish):
        counts = counts_of_ours(device, shape, dtype=dtype, clip_grad=clip_grad, **SHARDED, **finish)

        a_bucket = FINITE_NORM + SCATTER + SCALE + NORM + GATHER
        a_step = ROUNDED[dtype] + COMPARISON + IN_PINNED_MEMORY + FENCE + SUM + NORM_OF_ALL + IN_PINNED_MEMORY + UPDATE
        a_step += CLIPPING if clip_grad else Counter()
        if finish:  # the ranks agree once more before an update that others take part in
            a_step += IN_PINNED_MEMORY + FENCE - Counter(["logical_or_"])
        assert self.rest(counts, shape) == times(shape[0], a_bucket) + a_step
        assert counts.waits["last microbatch"] == 0
        assert (counts.waits["finish"], counts.waits["update"]) == ((1, 2) if finish else (0, 2))

    def test_of_a_reduce_scatter_without_a_norm(self, device, shape):
        counts = counts_of_ours(device, shape, returns_grad_norm=False, **SHARDED)

        a_bucket, a_step = FINITE_NORM + SCATTER + SCALE + GATHER, COMPARISON + IN_PINNED_MEMORY + FENCE + UPDATE
        assert self.rest(counts, shape) == times(shape[0], a_bucket) + a_step
        assert sum(counts.waits.values()) == 1

    def test_of_a_reduce_scatter_that_asks_nothing(self, device, shape):
        counts = counts_of_ours(device, shape, **SHARDED, **ASKS_NOTHING)

        a_bucket, a_step = SCATTER + SCALE + NORM + GATHER, SUM + NORM_OF_ALL + IN_PINNED_MEMORY + UPDATE
        assert self.rest(counts, shape) == times(shape[0], a_bucket) + a_step
        assert sum(counts.waits.values()) == 1


class TestBesideTorchDDP:
    def test_what_torch_ddp_launches_for_each_parameter_and_each_bucket(self, device, shape):
        num_buckets, num_params = shape[0], shape[0] * shape[1]

        counts = counts_of_torch_ddp(device, shape)

        of_the_model = times(num_params, OF_THE_MODEL)
        assert counts.launches["first microbatch"] - of_the_model == Counter()  # autograd keeps the gradient
        assert counts.launches["further microbatch"] - of_the_model == times(num_params, ADDED)
        reduction = times(num_params, ADDED + Counter(mul=1)) + times(num_buckets, Counter(allreduce_=1))
        assert counts.launches["last microbatch"] - of_the_model == reduction
        assert counts.launches["update"] == UPDATE
        assert sum(counts.waits.values()) == 0

    @pytest.mark.parametrize(
        ("beyond", "fields"),
        [
            (1, {"is_plain": True, **ASKS_NOTHING}),  # the copy of the first microbatch
            (2, {"is_plain": True}),  # and the finite norm
            (3, {}),  # and the norm
            (3, {"dtype": torch.bfloat16}),  # main parameters are rounded all at once
            (4, SHARDED),  # the norm and the gather
            (4, {"dtype": torch.bfloat16, **SHARDED}),
        ],
        ids=["nothing asked", "all-reduce, plain", "all-reduce", "all-reduce, bf16", "reduce-scatter", "reduce-scatter, bf16"],
    )
    def test_what_a_bucket_of_one_parameter_costs_beyond(self, device, beyond, fields):
        """The smallest bucket there is: torch DDP divides each parameter's gradient by itself, we divide a bucket at a time."""

        def of_a_bucket(counts_of_system, **fields):
            of_four, of_eight = (
                sum(map(Counter.total, counts_of_system(device, (num_buckets, 1), **fields).launches.values()))
                for num_buckets in (4, 8)
            )
            return (of_eight - of_four) / 4

        assert of_a_bucket(counts_of_ours, **fields) - of_a_bucket(counts_of_torch_ddp) == beyond


def test_the_finite_test_compares_once_more_for_each_dtype_beyond_the_first(device):
    tests = [FiniteTest([], [torch.ones(8, dtype=dtype)]) for dtype in (torch.float32, torch.float32, torch.float16)]
    for one in tests:
        one.run()
    counts = Counts(device)

    with counts.part("comparison"):
        any_beyond(tests)

    assert counts.launches["comparison"] == COMPARISON + COMPARISON - Counter(["logical_not_"]) + Counter(["logical_and"])
