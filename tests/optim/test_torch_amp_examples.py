"""The examples of torch's page on automatic mixed precision, with nothing changed but the optimizer and its clipping.

The first two of them, with and without clipping, are the loop of ``test_grad_scaler.py``.

Each runs once as it stands there, in one process, and once on the ranks, which all have the same data: the mean of their
gradients is the gradient of one. The scale begins so high that the first steps overflow.
"""

import copy
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch.amp import GradScaler, autocast

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.testing import LoopbackWorld

DTYPE = torch.float16
MODES = pytest.mark.parametrize("is_sharded", [False, True], ids=["all_reduce", "reduce_scatter"])
loss_fn = torch.nn.functional.mse_loss


def data(num_batches=12):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 20, generator=generator), torch.randn(8, 6, generator=generator)) for _ in range(num_batches)]


def clip_by_torch(model, _, max_norm):
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def clip_by_optimizer(_, optimizer, max_norm):
    optimizer.clip_grad_norm_(max_norm)


def no_sync(models):
    stack = ExitStack()
    for model in models:
        if isinstance(model, DistributedDataParallel):
            stack.enter_context(model.no_sync())
    return stack


def accumulation(models, optimizers, scaler, clip, iters_to_accumulate=3):
    (model,), (optimizer,) = models, optimizers
    for i, (inputs, target) in enumerate(data(36)):
        is_last = (i + 1) % iters_to_accumulate == 0
        with autocast(device_type="cpu", dtype=DTYPE):
            output = model(inputs)
            loss = loss_fn(output, target)
            loss = loss / iters_to_accumulate
        with no_sync([] if is_last else [model]):
            scaler.scale(loss).backward()
        if is_last:
            scaler.unscale_(optimizer)
            clip(model, optimizer, 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        yield loss.item(), scaler.get_scale()


def penalty(models, optimizers, scaler, clip):
    (model,), (optimizer,) = models, optimizers
    for inputs, target in data():
        optimizer.zero_grad()
        with autocast(device_type="cpu", dtype=DTYPE):
            output = model(inputs)
            loss = loss_fn(output, target)
        params = list(model.parameters())
        scaled_grad_params = torch.autograd.grad(outputs=scaler.scale(loss), inputs=params, create_graph=True)
        inv_scale = 1.0 / scaler.get_scale()
        grad_params = [p * inv_scale for p in scaled_grad_params]
        with autocast(device_type="cpu", dtype=DTYPE):
            grad_norm = 0
            for grad in grad_params:
                grad_norm += grad.pow(2).sum()
            grad_norm = grad_norm.sqrt()
            loss = loss + grad_norm
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield loss.item(), scaler.get_scale()


def several_models_losses_and_optimizers(models, optimizers, scaler, clip):
    (model0, model1), (optimizer0, optimizer1) = models, optimizers
    for inputs, target in data():
        optimizer0.zero_grad()
        optimizer1.zero_grad()
        with autocast(device_type="cpu", dtype=DTYPE):
            output0 = model0(inputs)
            output1 = model1(inputs)
            loss0 = loss_fn(2 * output0 + 3 * output1, target)
            loss1 = loss_fn(3 * output0 - 5 * output1, target)
        with no_sync(models):  # both losses have gradients for both models
            scaler.scale(loss0).backward(retain_graph=True)
        scaler.scale(loss1).backward()
        scaler.unscale_(optimizer0)
        scaler.step(optimizer0)
        scaler.step(optimizer1)
        scaler.update()
        yield loss0.item() + loss1.item(), scaler.get_scale()


EXAMPLES = [accumulation, penalty, several_models_losses_and_optimizers]


def make_models():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 6)) for _ in range(2)]


make_optimizer = partial(torch.optim.SGD, lr=0.02, momentum=0.9)


@MODES
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.__name__)
def test_an_example_trains_as_without_the_ranks(example, size, is_sharded):
    world = LoopbackWorld(size, timeout_s=30)
    switches = {"nonfinite_gradients": "allow", "use_distributed_optimizer": is_sharded}
    config = DistributedDataParallelConfig(bucket_size=300, **switches)
    originals = make_models() if example is several_models_losses_and_optimizers else make_models()[:1]

    def run(models, optimizers, clip):
        return list(example(models, optimizers, GradScaler("cpu", init_scale=2.0**22), clip))

    def play(rank):
        comm, copies = world.communicator(rank), copy.deepcopy(originals)
        models = [DistributedDataParallel(module, config, communicator=comm) for module in copies]
        optimizers = [DistributedOptimizer(make_optimizer(model.parameters()), model) for model in models]
        return run(models, optimizers, clip_by_optimizer)

    results = world.run(play)

    expected = run(originals, [make_optimizer(model.parameters()) for model in originals], clip_by_torch)
    scales = [scale for _, scale in expected]
    assert 2 <= len(set(scales)) <= 10  # some steps were skipped, most were not
    for result in results:
        assert [scale for _, scale in result] == scales
        assert [loss for loss, _ in result] == pytest.approx([loss for loss, _ in expected], rel=1e-5, nan_ok=True)
