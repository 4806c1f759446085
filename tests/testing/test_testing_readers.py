"""Layouts of other libraries, read into ours and held to our theorems. Megatron's: tests/ranks/test_megatron_wheel.py."""

import pytest
import torch
import torch.distributed as dist

from megabucket import ParamSpec
from megabucket.errors import LayoutError
from megabucket.testing import assert_places, assert_sound, read_torch_ddp_layout

IGNORED = ["order-is-reverse-registration"]  # torch arranges buckets as gradients came


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def model():
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(100, 100)
            self.second = torch.nn.Linear(100, 300).double()
            self.third = torch.nn.Linear(300, 10).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(self.second(self.first(x).double()))

    return Model()


def test_buckets_of_torch_ddp_are_a_sound_layout(one_rank, model):
    model.first.bias.requires_grad_(False)  # a frozen one is in no bucket
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.05)
    for _ in range(2):
        wrapped(torch.ones(2, 100)).sum().backward()

    layout = read_torch_ddp_layout(wrapped)

    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    specs = [ParamSpec(name, tuple(param.shape), dtype=str(param.dtype)[6:]) for name, param in trained.items()]
    assert_sound(layout, ignoring=IGNORED)
    assert_places(layout, specs)
    assert {buffer.key.grad_dtype: len(buffer.buckets) for buffer in layout.buffers} == {"float64": 1, "float32": 1}
    assert layout.numel == sum(param.numel() for param in trained.values())


def test_a_gradient_in_the_wrong_place_is_found(one_rank, model, monkeypatch):
    """The seeded bug: what torch tells of a bucket has two gradients in one place."""
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped(torch.ones(2, 100)).sum().backward()
    told = wrapped.reducer._get_zeros_like_grad_buckets()

    class Shifted:
        def __init__(self, bucket) -> None:
            self.parameters, self.buffer, self._bucket = bucket.parameters, bucket.buffer, bucket

        def gradients(self):
            grads = self._bucket.gradients()
            return [self._bucket.buffer()[grad.storage_offset() // 2 :][: grad.numel()] for grad in grads]

    class Reducer:
        def _get_zeros_like_grad_buckets(self):
            return map(Shifted, told)

    monkeypatch.setattr(wrapped, "reducer", Reducer())

    with pytest.raises(AssertionError, match="violates"):
        assert_sound(read_torch_ddp_layout(wrapped), ignoring=IGNORED)


def test_a_torch_that_does_not_tell_its_buckets_is_named(one_rank, model, monkeypatch):
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    monkeypatch.setattr(wrapped, "reducer", object())

    with pytest.raises(LayoutError, match="its buckets cannot be read"):
        read_torch_ddp_layout(wrapped)
