"""The recipes for contributors: the communicator and the wire of the pages train a model."""

import re
import threading
from pathlib import Path

import pytest
import torch
from launched import run_launched, run_script

import megabucket as mb
from megabucket.comm import AllToAll
from megabucket.doctor import run_doctor
from megabucket.testing import LoopbackWorld

PAGES = Path(__file__).parents[2] / "docs" / "contributing"
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODES = pytest.mark.parametrize("is_sharded", [False, True], ids=["all-reduce", "reduce-scatter"])


def code_of(page):
    (code,) = PYTHON_BLOCK.findall((PAGES / page).read_text(encoding="utf-8"))
    return code


@pytest.fixture(scope="module")
def recipe():
    names = {}
    for page in ("communicator.md", "wire.md"):
        exec(compile(code_of(page), page, "exec"), names)  # noqa: S102
    return names


def model():
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    with torch.no_grad():  # ranks are threads, which share the random generator
        for param in module.parameters():
            param.copy_(torch.linspace(-1.0, 1.0, param.numel()).view_as(param))
    return module


def loss_of(module, *, rank, step=0):
    return module(torch.linspace(0.1, 1.0 + step + rank, 6).view(2, 3)).square().sum()


def train(communicator, *, is_sharded=False, num_steps=3):
    """Return gradients of the first step, where they are whole, and the parameters after the last."""
    module = model()
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=is_sharded)
    ddp = mb.DistributedDataParallel(module, config, communicator=communicator)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(module.parameters(), lr=0.1), ddp, clip_grad=1.0)
    grads = []
    for step in range(num_steps):
        loss_of(ddp, rank=communicator.rank, step=step).backward()
        if not is_sharded and not grads:
            ddp.finish_grad_sync()
            grads = [param.main_grad.clone() for param in module.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    ddp.finish_param_sync()
    params = [param.detach().clone() for param in module.parameters()]
    ddp.detach()
    return grads, params


def in_threads(function, size):
    """Call ``function(rank)`` in one thread for each rank; return the results."""
    results = {}
    threads = [threading.Thread(target=lambda rank=rank: results.update({rank: function(rank)})) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[rank] for rank in range(size)]


def on_loopback(decorate=lambda inner: inner, **options):
    world = LoopbackWorld(2)
    around = [decorate(world.communicator(rank)) for rank in range(2)]
    return world.run(lambda rank: train(around[rank], **options)), world


def same_bits(ours, theirs):
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@MODES
def test_training_over_the_communicator_of_the_page_has_the_bits_of_the_loopback_world(recipe, is_sharded):
    ranks = recipe["Ranks"](2)
    around = [recipe["ThreadCommunicator"](ranks, rank) for rank in range(2)]

    ours = in_threads(lambda rank: train(around[rank], is_sharded=is_sharded), 2)
    theirs, _ = on_loopback(is_sharded=is_sharded)

    for (grads, params), (grads_there, params_there) in zip(ours, theirs, strict=True):
        assert same_bits(grads, grads_there)
        assert same_bits(params, params_there)


def test_the_communicator_of_the_page_brings_each_rank_its_parts(recipe):
    ranks = recipe["Ranks"](3)
    received = [torch.zeros(rank) for rank in range(3)]  # of 0, 1 and 2 elements, all from rank 0

    def exchange(rank):
        sent = torch.arange(3.0) if rank == 0 else torch.zeros(0)
        call = AllToAll(received[rank], sent, (rank, 0, 0), (0, 1, 2) if rank == 0 else (0, 0, 0))
        recipe["ThreadCommunicator"](ranks, rank).launch([call], label="parts").wait()

    in_threads(exchange, 3)

    assert [tensor.tolist() for tensor in received] == [[], [0.0], [1.0, 2.0]]


def test_the_doctor_finds_nothing_about_the_communicator_of_the_page(recipe):
    ranks = recipe["Ranks"](3)
    around = [recipe["ThreadCommunicator"](ranks, rank) for rank in range(3)]

    reports = in_threads(lambda rank: run_doctor(communicator=around[rank]), 3)

    assert [report.findings for report in reports] == [(), (), ()]


def test_gradients_over_the_wire_of_the_page_are_sums_of_bfloat16(recipe):
    modules = [model(), model()]
    for rank, module in enumerate(modules):
        loss_of(module, rank=rank).backward()
    (own, _), _ = on_loopback(recipe["Bfloat16Wire"])

    expected = [
        (first.grad.bfloat16() + second.grad.bfloat16()).float() / 2  # halving is exact, so its place does not matter
        for first, second in zip(*(module.parameters() for module in modules), strict=True)
    ]
    assert same_bits(own[0], expected)


def test_ranks_that_train_over_the_wire_of_the_page_agree_and_are_near_those_without(recipe):
    (first, second), _ = on_loopback(recipe["Bfloat16Wire"])
    (plain, _), _ = on_loopback()

    assert same_bits(first[1], second[1])
    assert not same_bits(first[1], plain[1])
    for ours, theirs in zip(first[1], plain[1], strict=True):
        assert torch.allclose(ours, theirs, atol=0.05)


def test_what_is_no_gradient_goes_past_the_wire_of_the_page(recipe):
    _, over_wire = on_loopback(recipe["Bfloat16Wire"])
    _, plain = on_loopback()

    narrowed = [(one, other) for one, other in zip(over_wire.schedule(0), plain.schedule(0), strict=True) if one != other]

    assert narrowed
    assert all(one.startswith("bucket ") and "bfloat16" in one for one, _ in narrowed)
    assert all(other == one.replace("bfloat16", "float32") for one, other in narrowed)


@pytest.mark.dist
def test_the_wire_of_the_page_runs_over_gloo(tmp_path):
    script = tmp_path / "wire.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        f"{code_of('wire.md')}\n"
        "ddp(torch.full((2, 8), 1.0 + communicator.rank)).sum().backward()\n"
        "ddp.finish_grad_sync()\n"
        "print(ddp.module.bias.main_grad.tolist(), communicator.inner.size)\n"
        "ddp.detach()\n"
        "communicator.close()\n"
        "dist.destroy_process_group()\n"
    )

    done = run_launched(run_script, (script, tmp_path), tmp_path / "said")

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("[2.0, 2.0, 2.0, 2.0] 2") == 2  # a batch of two, on two ranks
