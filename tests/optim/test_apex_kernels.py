"""``kernels="apex"``, with a stand-in that checks its arguments as ``amp_C`` takes them. Needs neither apex nor a GPU."""

import copy
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.errors import ConfigError, LayoutMismatchError
from megabucket.optim import kernels
from megabucket.testing import LoopbackWorld

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class AmpC:
    """The interface as recorded from apex: positional arguments, and lists of tensors of one dtype, alike in size."""

    __spec__ = None

    def __init__(self):
        self.called = []  # with the dtypes

    def take(self, name, chunk_numel, noop_flag, lists, num_lists):
        assert (type(chunk_numel), chunk_numel) == (int, 2048 * 32)
        assert (noop_flag.dtype, noop_flag.shape, int(noop_flag)) == (torch.int32, (1,), 0)
        assert type(lists) is list
        assert [type(one) for one in lists] == [list] * num_lists
        assert len({tuple(tensor.numel() for tensor in one) for one in lists}) == 1
        (dtype,) = {tensor.dtype for tensor in itertools.chain(*lists)}  # that of lists[0][0] decides
        assert dtype in (torch.float32, torch.bfloat16, torch.float16)
        assert all(tensor.is_contiguous() and 0 < tensor.numel() < 2**31 for tensor in itertools.chain(*lists))
        self.called.append((name, dtype))

    def multi_tensor_l2norm(self, chunk_numel, noop_flag, lists, per_tensor, /):
        self.take("l2norm", chunk_numel, noop_flag, lists, num_lists=1)
        assert per_tensor is False
        total = sum(tensor.float().square().sum() for tensor in lists[0])
        return total.sqrt().reshape(1), torch.empty(0)

    def multi_tensor_scale(self, chunk_numel, noop_flag, lists, scale, /):
        self.take("scale", chunk_numel, noop_flag, lists, num_lists=2)
        assert type(scale) is float
        for source, target in zip(*lists, strict=True):
            target.copy_(source.float() * scale)


@pytest.fixture
def amp_c(monkeypatch):
    stand_in = AmpC()
    monkeypatch.setitem(sys.modules, "amp_C", stand_in)
    monkeypatch.setattr(kernels, "_AMP_C_DEVICES", ("cpu",))
    return stand_in


def train(names, dtype, *, rebuilds=False, **switches):
    """Return the norms of three clipped steps on each rank, and the weights; ``names`` are the kernels of each rank."""
    world = LoopbackWorld(len(names), timeout_s=20)
    torch.manual_seed(0)
    initial = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 8)).to(dtype)
    models = [copy.deepcopy(initial) for _ in names]

    def program(rank):
        config = DistributedDataParallelConfig(bucket_size=300, **switches)
        ddp = DistributedDataParallel(models[rank], config, communicator=world.communicator(rank))
        inner = torch.optim.SGD(ddp.parameters(), lr=0.5)
        optimizer = DistributedOptimizer(inner, ddp, clip_grad=0.01, kernels=names[rank])
        norms = []
        for step in range(3):
            inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(2 * step + rank), dtype=torch.float32)
            ddp(inputs.to(dtype)).square().mean().backward()
            norms.append(optimizer.step().grad_norm)
            optimizer.zero_grad()
            if rebuilds:
                ddp.rebuild()
        ddp.finish_param_sync()
        return torch.tensor(norms), [param.detach() for param in ddp.module.parameters()]

    return world.run(program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("is_sharded", [False, True], ids=["all_reduce", "reduce_scatter"])
def test_norms_and_clipped_steps_are_those_of_torch(amp_c, dtype, is_sharded):
    switches = {"use_distributed_optimizer": is_sharded, "grad_reduce_in_fp32": False, "rebuilds": is_sharded}
    expected = train(["torch"] * 2, dtype, **switches)
    assert amp_c.called == []

    found = train(["apex"] * 2, dtype, **switches)

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    in_buffers = {torch.bfloat16: torch.bfloat16, torch.float32: torch.float32}
    assert set(amp_c.called) == ({("l2norm", in_buffers[dtype]), ("scale", torch.float32)} if dtype in in_buffers else set())


def test_kernels_that_differ_between_ranks_are_one_error(amp_c):
    with pytest.raises(LayoutMismatchError, match="kernels=apex"):
        train(["apex", "torch"], torch.float32)


def test_each_call_has_one_dtype(amp_c):
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float32)
    grads = [torch.full((3,), 4.0, dtype=dtype) for dtype in dtypes]

    kernels.find_kernels("apex", CPU).scale(grads, 0.25)

    assert all(torch.equal(grad, torch.ones(3, dtype=grad.dtype)) for grad in grads)
    assert amp_c.called == [("scale", torch.float32), ("scale", torch.bfloat16)]


def test_tensors_that_32_bits_cannot_count_are_cut(amp_c, monkeypatch):
    numels = []
    monkeypatch.setattr(amp_c, "multi_tensor_l2norm", lambda *args: numels.append(args[2]) or (torch.ones(1), None))
    monkeypatch.setattr(amp_c, "multi_tensor_scale", lambda *args: numels.append(args[2]))
    grad, found = torch.empty(2**31 + 5, device="meta"), kernels.find_kernels("apex", CPU)

    found.l2_norm(grad)
    found.scale([grad], 0.5)

    parts = [2**30, 2**30, 5]
    assert [[[part.numel() for part in one] for one in lists] for lists in numels] == [[parts], [parts, parts]]


class TestRefusals:
    @pytest.fixture(autouse=True)
    def packages(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        monkeypatch.delitem(sys.modules, "amp_C", raising=False)
        return tmp_path

    def refusal(self, name="apex", device=CUDA):
        with pytest.raises(ConfigError) as caught:
            kernels.find_kernels(name, device)
        return str(caught.value)

    def test_of_other_names_and_of_cpus(self):
        assert self.refusal("te") == "kernels must be 'torch' or 'apex', got 'te'"
        assert self.refusal(device=CPU) == (
            "kernels='apex' works on CUDA devices, and the gradients are on cpu; use kernels='torch'"
        )

    def test_where_nothing_is_installed_the_doctor_says_nothing(self):
        assert self.refusal().endswith(
            "(No module named 'amp_C'). Build NVIDIA apex from source with APEX_CPP_EXT=1 APEX_CUDA_EXT=1; `pip install apex` "
            "gets another project."
        )
        assert kernels.about_apex(CUDA) == ""

    def test_the_package_of_that_name_on_pypi_is_recognised(self, packages):
        (packages / "apex.py").touch()

        assert "The package apex that is installed is the project of that name on PyPI, or was built without" in self.refusal()
        assert kernels.about_apex(CUDA) == self.refusal()
        assert kernels.about_apex(CPU) == ""  # nobody could want it

    @pytest.mark.parametrize("kind", [ImportError, OSError])
    def test_an_extension_that_cannot_be_imported(self, packages, kind):
        (packages / "amp_C.py").write_text(f"raise {kind.__name__}('no libcudart.so.13')")

        assert self.refusal() == (
            "kernels='apex' needs amp_C, the extension of NVIDIA apex (no libcudart.so.13). It was built for another torch or "
            "CUDA: build NVIDIA apex again, with APEX_CPP_EXT=1 APEX_CUDA_EXT=1."
        )

    def test_an_extension_that_is_there_works(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "amp_C", SimpleNamespace(__spec__=None))

        assert kernels.about_apex(CUDA) == "kernels='apex' works (amp_C is found)"
