"""Training on parameters of all shapes, some updated whole: the steps of a rank, and one process that does the same."""

import torch
from whole_stand_ins import Tensors, factors_of, make

PULL = 0.25  # gradients follow the weights: a wrong update shows in the next gradient


def seed_of(step, rank, microbatch=0):
    return 1000 * step + 10 * rank + microbatch


def backward(ddp, rank, step, *, microbatches=1, pull=0.0):
    for microbatch in range(microbatches - 1):
        with ddp.no_sync():
            ddp(seed_of(step, rank, microbatch), pull).backward()
    ddp(seed_of(step, rank, microbatches - 1), pull).backward()


def train(ddp, optimizer, steps, rank, *, schedulers=(), **fields):
    """Return the norm and the weights after each step."""
    found = []
    for step in steps:
        backward(ddp, rank, step, **fields)
        norm = optimizer.step().grad_norm
        optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        ddp.finish_param_sync()
        found.append((norm, weights_of(ddp.module)))
    return found


def weights_of(module):
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def schedulers_of(optimizers):
    return [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]


class Alone:
    """The same optimizers in plain torch, on whole float32 copies and the exact mean gradient of all ranks."""

    def __init__(self, name, size, dtype=torch.float32):
        self.size, self.dtype = size, dtype
        self.mains = Tensors(dtype).float()
        self.optimizers = make(name, self.mains)
        self.schedulers = schedulers_of(self.optimizers)

    def train(self, steps, *, microbatches=1, clip=lambda _: 1.0, schedules=False):
        """Train on the gradients of all ranks, multiplied by ``clip(step)``; return the weights after each step."""
        found = []
        for step in steps:
            seeds = [seed_of(step, rank, microbatch) for rank in range(self.size) for microbatch in range(microbatches)]
            factors = [factors_of(seed) for seed in seeds]
            for name, main in self.mains.named_parameters():
                # An optimizer of matrices may fail on one without elements, and there is nothing to update.
                main.grad = None
                if main.numel():
                    main.grad = torch.empty_like(main).copy_(sum(one[name] for one in factors) / self.size).mul_(clip(step))
            for optimizer in self.optimizers:
                optimizer.step()
            for scheduler in self.schedulers if schedules else ():
                scheduler.step()
            found.append({name: values.to(self.dtype) for name, values in weights_of(self.mains).items()})
        return found


def assert_same(ours, theirs, where="it"):
    """Compare nested values, to the bit."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key, value in ours.items():
            assert_same(value, theirs[key], f"{where}[{key!r}]")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    elif isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=lambda text: f"{where}: {text}")
    else:
        assert ours == theirs, where
