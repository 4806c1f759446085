"""On a CUDA device: order across streams, no waits of the host that need not be, graphs. Skipped where there is none."""

import warnings

import pytest
import torch
from slow_gradient import Slow

import megabucket as mb
from megabucket.errors import PhaseError
from megabucket.fused import Linear
from megabucket.optim.norm import l2_norm

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
CUDA = torch.device("cuda")
ASKS_NOTHING = {"fence": False, "nonfinite_gradients": "allow"}


def model(cls=torch.nn.Linear, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(cls(64, 128), torch.nn.GELU(), cls(128, 128), torch.nn.GELU(), cls(128, 8)).to(CUDA, dtype)


def batch(dtype=torch.float32):
    return torch.linspace(-1, 1, 32 * 64).view(32, 64).to(CUDA, dtype)


def trained(module, config, *, steps=4, sharded=False):
    ddp = mb.DistributedDataParallel(module, config)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.01, fused=True), ddp)
    losses = []
    for _ in range(steps):
        with ddp.no_sync():
            ddp(batch(next(module.parameters()).dtype)).float().square().mean().backward()
        loss = ddp(batch(next(module.parameters()).dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "reduce-scatter"])
@pytest.mark.parametrize("cls", [torch.nn.Linear, Linear], ids=["plain", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_is_that_of_plain_torch(sharded, cls, dtype):
    module = model(dtype=torch.float32)
    plain = torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)
    expected = []
    for _ in range(4):
        for _ in range(2):
            loss = module(batch()).square().mean()
            loss.backward()
        plain.step()
        plain.zero_grad()
        expected.append(loss.item())

    losses = trained(model(cls, dtype), mb.DistributedDataParallelConfig(use_distributed_optimizer=sharded))

    assert losses == pytest.approx(expected, rel=1e-4 if dtype is torch.float32 else 0.05)


def test_the_weight_gradient_is_summed_in_float32():
    layer = Linear(64, 64, bias=False).to(CUDA, torch.bfloat16)
    ddp = mb.DistributedDataParallel(layer)
    inputs = torch.full((4_096, 64), 2.0**-6, device=CUDA, dtype=torch.bfloat16)
    expected = torch.zeros(64, 64, device=CUDA)
    for _ in range(8):
        with ddp.no_sync():
            (ddp(inputs) * 2.0**-6).sum().backward()
        expected += 1.0

    assert layer.weight.main_grad.dtype == torch.float32
    assert torch.allclose(layer.weight.main_grad, expected, rtol=1e-5)


def test_the_norm_takes_no_memory_beside_the_gradients():
    grad = torch.ones(1 << 24, dtype=torch.bfloat16, device=CUDA)
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()

    l2_norm(grad)

    assert torch.cuda.max_memory_allocated() - before_bytes < grad.nbytes / 8


class TestTheHostDoesNotWait:
    def waits_of_a_step(self, config):
        """Warnings of torch about calls that wait for the device, in one step after two to warm up."""
        ddp = mb.DistributedDataParallel(model(), config)
        plain = torch.optim.AdamW(ddp.parameters(), fused=True)
        optimizer = mb.DistributedOptimizer(plain, ddp) if config.use_distributed_optimizer else plain
        inputs = batch()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("warn")  # says once that it is a prototype, which is no wait
            torch.cuda.set_sync_debug_mode("default")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                torch.cuda.set_sync_debug_mode("warn" if step == 2 else "default")
                try:
                    ddp(inputs).square().mean().backward()
                    optimizer.step()
                    ddp.zero_grad()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        return [str(one.message) for one in caught if "synchronizing" in str(one.message)]

    def test_at_all_when_nothing_is_asked(self):
        assert self.waits_of_a_step(mb.DistributedDataParallelConfig(**ASKS_NOTHING)) == []

    def test_but_once_for_the_end_of_a_step(self):
        assert len(self.waits_of_a_step(mb.DistributedDataParallelConfig())) == 1

    def test_and_once_for_the_norm(self):
        config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True)

        assert len(self.waits_of_a_step(config)) == 2


def test_gradients_of_two_streams_are_all_there_when_they_are_sent():
    """Each branch sleeps on its stream before its gradient: a launch that waited for one of them only would read old values."""

    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1_000)) for _ in range(2)])
            self.streams = [torch.cuda.Stream() for _ in range(2)]

        def forward(self, inputs):
            current = torch.cuda.current_stream()
            results = []
            for weight, stream in zip(self.weights, self.streams, strict=True):
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    results.append(Slow.apply(weight * inputs))
                current.wait_stream(stream)
            return sum(result.sum() for result in results)

    module = Branches().to(CUDA)
    config = mb.DistributedDataParallelConfig(grad_reduction="sum")
    ddp = mb.DistributedDataParallel(module, config)
    for step in range(1, 4):
        ddp(torch.full((1_000,), float(step), device=CUDA)).backward()
        seen = [weight.grad.clone() for weight in module.weights]
        ddp.zero_grad()

        assert all(torch.equal(one, torch.full_like(one, float(step))) for one in seen)


class TestGraphs:
    def test_a_captured_step_trains_like_an_eager_one(self):
        losses = {}
        for captured in (False, True):
            ddp = mb.DistributedDataParallel(model(), mb.DistributedDataParallelConfig(**ASKS_NOTHING))
            optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, fused=True, capturable=True)
            inputs = batch()

            def run(ddp=ddp, optimizer=optimizer, inputs=inputs):
                loss = ddp(inputs).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                return loss.detach()

            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            of_steps = []
            if captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    loss = run()
                for _ in range(3):
                    graph.replay()
                    of_steps.append(loss.item())
            else:
                of_steps = [run().item() for _ in range(3)]
            losses[captured] = of_steps

        assert losses[True] == pytest.approx(losses[False], rel=1e-5)

    def test_a_step_that_asks_is_refused_by_name(self):
        ddp = mb.DistributedDataParallel(model())
        inputs = batch()
        ddp(inputs).sum().backward()
        ddp.zero_grad()

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = ddp(inputs).sum()
            with pytest.raises(PhaseError, match="CUDA graph is being captured"):
                loss.backward()


@pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "reduce-scatter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_phase_frees_what_it_says_and_changes_no_bit(sharded, dtype):
    def weights(has_phases):
        module = model(dtype=dtype)
        ddp = mb.DistributedDataParallel(module, mb.DistributedDataParallelConfig(use_distributed_optimizer=sharded))
        optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.01, fused=True), ddp)
        for _ in range(4):
            ddp(batch(dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if has_phases:
                before = torch.cuda.memory_allocated()
                given = ddp.offload(params=True)
                inside = torch.cuda.memory_allocated()
                assert given.held == []
                rounding_bytes = 512 * 64  # a block of 512 bytes more or less for each tensor, and a NaN of each dtype
                assert abs(sum(given.freed_bytes.values()) - (before - inside)) <= rounding_bytes
                ddp.onload()
                assert torch.cuda.memory_allocated() == before
        found = [param.detach().clone() for param in module.parameters()]
        ddp.detach()
        return found

    assert all(map(torch.equal, weights(True), weights(False)))
