"""What cannot be wrapped: each refusal with its whole text, and the model untouched."""

from inspect import signature

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Linear
from torch.nn.parameter import UninitializedParameter

from megabucket import DistributedDataParallel, DistributedDataParallelConfig
from megabucket.errors import (
    AlreadyWrappedError,
    ConfigError,
    NoTrainableParametersError,
    ProcessGroupMissingError,
    UnsupportedParameterError,
)


class Model(torch.nn.Module):
    """Registers what it is given, in order: parameters, and buffers under names that start with ``buffer``."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            if name.startswith("buffer"):
                self.register_buffer(name, tensor)
            else:
                self.register_parameter(name, tensor)


def param(tensor=None, **kwargs):
    return torch.nn.Parameter(torch.ones(4) if tensor is None else tensor, **kwargs)


def refusal(kind, model):
    """The error that wrapping raises; the model must be as it was."""
    before = [(name, tensor.data_ptr() if tensor.layout is torch.strided else 0) for name, tensor in addressable(model)]
    with pytest.raises(kind) as caught:
        DistributedDataParallel(model)
    assert [(name, t.data_ptr() if t.layout is torch.strided else 0) for name, t in addressable(model)] == before
    assert not any(hasattr(tensor, "main_grad") for tensor in model.parameters())
    return caught.value


def addressable(model):
    return [(name, p) for name, p in model.named_parameters() if not p.is_meta and not isinstance(p, UninitializedParameter)]


def unsupported(**tensors):
    return str(refusal(UnsupportedParameterError, Model(ok=param(), **tensors)))


HEAD = "parameter 'w' cannot live in a parameter and gradient buffer: "


class TestNothingToTrain:
    WAY_OUT = (
        ", so there is nothing to reduce. Call requires_grad_(True) on what should be trained before wrapping, or use the "
        "module without a wrapper."
    )

    def test_a_module_without_parameters(self):
        error = refusal(NoTrainableParametersError, torch.nn.ReLU())

        assert str(error) == "ReLU has no parameter with requires_grad=True: it has none at all" + self.WAY_OUT
        assert (error.module, error.frozen) == ("ReLU", ())

    def test_a_module_whose_parameters_are_all_frozen(self):
        error = refusal(NoTrainableParametersError, torch.nn.Linear(2, 2).requires_grad_(False))

        assert str(error) == (
            "Linear has no parameter with requires_grad=True: its 2 parameters are all frozen ('weight', 'bias')" + self.WAY_OUT
        )

    def test_a_module_with_nothing_but_integer_parameters(self):
        model = Model(table=param(torch.arange(3), requires_grad=False))

        text = str(refusal(NoTrainableParametersError, model))

        assert text.startswith("Model has no parameter with requires_grad=True: its 1 parameters are all frozen ('table'), ")


class TestUnsupportedParameters:
    @pytest.mark.parametrize("name", ["complex64", "float8_e4m3fn", "float8_e5m2"])
    def test_a_dtype_that_no_buffer_holds(self, name):
        assert unsupported(w=param(torch.zeros(2).to(getattr(torch, name)))) == HEAD + (
            f"its dtype is {name}. Buffers hold float64, float32, bfloat16, float16; convert the parameter before wrapping, or "
            "freeze it."
        )

    def test_sparse(self):
        assert unsupported(w=param(torch.eye(2).to_sparse())) == HEAD + (
            "it is sparse (torch.sparse_coo). Use a dense parameter, or freeze it."
        )

    # torch warns that this layout is a prototype.
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    def test_nested(self, layout):
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)

        with pytest.raises(UnsupportedParameterError) as caught:
            DistributedDataParallel(Model(ok=param(), w=param(nested)))

        assert str(caught.value) == HEAD + "it is a nested tensor. Use a dense parameter, or freeze it."

    @pytest.mark.parametrize("is_made_inside", [False, True])
    def test_what_is_wrapped_or_made_in_inference_mode(self, is_made_inside):
        with torch.inference_mode(is_made_inside):
            model = Model(w=param())

        with torch.inference_mode(not is_made_inside), pytest.raises(UnsupportedParameterError) as caught:
            DistributedDataParallel(model)

        assert str(caught.value) == HEAD + (
            "tensors of torch.inference_mode() take part in no backward. Make and wrap the module outside of it."
        )

    def test_meta(self):
        assert unsupported(w=param(torch.ones(2, device="meta"))) == HEAD + (
            "it is on the meta device and has no values. Call module.to_empty(device=...) and initialize the parameters "
            "before wrapping."
        )

    def test_a_parameter_on_another_device_than_the_others_is_named_for_what_it_is(self):
        # The only second device of a machine without accelerators is meta, which is refused first.
        model = Model(w=param(torch.ones(2, device="meta")), ok=param())

        assert str(refusal(UnsupportedParameterError, model)).startswith(HEAD + "it is on the meta device")

    @pytest.mark.device
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
    def test_two_devices(self):
        assert unsupported(w=param(torch.ones(2, device="cuda"))) == HEAD + (
            "it is on cuda:0, but 'ok' is on cpu. One buffer lives on one device: move the module to a single device before "
            "wrapping."
        )

    def test_expanded(self):
        assert unsupported(w=param(torch.ones(1, 3).expand(4, 3))) == HEAD + (
            "it is expanded: shape (4, 3) with strides (0, 1) repeats the same memory. Make it a parameter of its own with "
            ".clone() before wrapping."
        )

    @pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
    def test_uninitialized(self):
        text = str(refusal(UnsupportedParameterError, torch.nn.LazyLinear(3)))

        assert text == (
            "parameter 'weight' cannot live in a parameter and gradient buffer: it is uninitialized (a lazy module). Run one "
            "forward before wrapping."
        )

    def test_a_tensor_subclass(self):
        class Quantized(torch.Tensor):
            pass

        assert unsupported(w=param(torch.ones(2).as_subclass(Quantized))) == HEAD + (
            "it is a Quantized, not a plain tensor. Wrap the module before sharding or quantizing it, or freeze the parameter."
        )

    def test_a_dtensor_without_process_groups(self):
        mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)

        assert unsupported(w=param(DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False))) == HEAD + (
            "it is a DTensor, which torch cuts and reduces itself. Wrap it with process_group=mesh[...], the ranks that hold "
            "the same piece; after a change of the module that is detach() and wrapping anew. Leave out fully_shard() and "
            "_pre_dp_module_transform()."
        )

    def test_an_expert_parameter(self):
        expert = param()
        expert.allreduce = False

        with pytest.raises(ConfigError, match=r"parameter 'w' is of group 'expert'; the wrapper has 'dense'\. Pass groups="):
            DistributedDataParallel(Model(w=expert))

    def test_an_integer_parameter_cannot_require_grad_and_is_left_alone(self):
        model = Model(ok=param(), table=param(torch.arange(3), requires_grad=False))

        ddp = DistributedDataParallel(model)

        assert list(ddp.layout.buffers[0].params) == ["ok"]

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.ones(2, dtype=torch.complex64),
            torch.eye(2).to_sparse(),
            torch.ones(1, 3).expand(4, 3),
            torch.ones(2, device="meta"),
            torch.zeros(2).to(torch.float8_e5m2),
        ],
        ids=["complex", "sparse", "expanded", "meta", "float8"],
    )
    def test_frozen_it_is_nobodys_business(self, tensor):
        model = Model(ok=param(), w=param(tensor, requires_grad=False))

        DistributedDataParallel(model)

        assert not hasattr(model.w, "main_grad")


MEMORY = torch.ones(6, 4)
OVERLAPS = {
    "the same memory": (MEMORY, MEMORY),
    "a transposed view": (MEMORY, MEMORY.t()),
    "a row of it": (MEMORY, MEMORY[2]),
    "a column of it": (MEMORY, MEMORY[:, 1]),
    "overlapping rows": (MEMORY[0:3], MEMORY[2:5]),
    "a row and a column": (MEMORY[1], MEMORY[:, 1]),
    "other bits of the same bytes": (MEMORY, MEMORY.view(torch.bfloat16)),
    "columns, which lie between one another": (MEMORY[:, 0], MEMORY[:, 1]),
}


class TestSharedMemory:
    """The tie would be lost: each parameter moves to a place of its own."""

    @staticmethod
    def text(name, other):
        return (
            f"parameter {name!r} cannot live in a parameter and gradient buffer: it shares memory with {other!r} but is a "
            "different tensor, so the tie would be lost. Register the same Parameter object under both names, or clone() one "
            "of them before wrapping."
        )

    @pytest.mark.parametrize(("first", "second"), OVERLAPS.values(), ids=OVERLAPS)
    def test_different_parameters_over_the_same_memory_are_refused(self, first, second):
        model = Model(a=param(first), b=param(second))

        assert str(refusal(UnsupportedParameterError, model)) == self.text("b", "a")

    def test_the_one_it_is_tied_to_is_named_among_many_on_the_same_storage(self):
        model = Model(a=param(MEMORY[0]), b=param(MEMORY[1]), c=param(MEMORY[2]), d=param(MEMORY[1, 1:3]))

        assert str(refusal(UnsupportedParameterError, model)) == self.text("d", "b")

    def test_a_frozen_parameter_over_the_same_memory_is_refused(self):
        model = Model(a=param(MEMORY), target=param(MEMORY, requires_grad=False))

        assert str(refusal(UnsupportedParameterError, model)) == self.text("a", "target")

    def test_a_module_buffer_over_the_same_memory_is_refused(self):
        model = Model(a=param(MEMORY), buffer=MEMORY[0])

        assert str(refusal(UnsupportedParameterError, model)) == self.text("a", "buffer")

    def test_halves_of_one_storage_are_no_tie(self):
        base = torch.ones(6, 4)
        model = Model(a=param(base[:3]), b=param(base[3:]))

        DistributedDataParallel(model)

        assert model.a.untyped_storage().data_ptr() == model.b.untyped_storage().data_ptr()  # of the buffer

    def test_frozen_tensors_may_share_memory_with_one_another(self):
        frozen = {name: param(MEMORY.expand(2, 6, 4), requires_grad=False) for name in ("x", "y")}

        DistributedDataParallel(Model(ok=param(), **frozen), DistributedDataParallelConfig(init_sync=False))

    def test_one_parameter_under_two_names_is_tied_for_good(self):
        tied = param()

        ddp = DistributedDataParallel(Model(a=tied, b=tied))

        assert list(ddp.layout.buffers[0].params) == ["a"]
        assert ddp.module.a is ddp.module.b


class TestWrappingTwice:
    TEXT = (
        "{} already belong to another DistributedDataParallel wrapper: they have a main_grad. Two of them would move the same "
        "storage and reduce the same gradients twice. Wrap each parameter once: call detach() on the first wrapper before "
        "wrapping again; if it is Megatron-Core's, build the model anew without it."
    )

    @pytest.mark.parametrize(
        ("again", "names"),
        [
            (lambda ddp: ddp.module, ("weight",)),
            (lambda ddp: ddp, ("weight",)),
            (lambda ddp: torch.nn.Sequential(torch.nn.Linear(2, 2), ddp.module), ("1.weight",)),
        ],
        ids=["the same module", "a wrapper", "a module with a layer that is wrapped"],
    )
    def test_it_is_refused(self, again, names):
        ddp = DistributedDataParallel(torch.nn.Linear(2, 2, bias=False))

        with pytest.raises(AlreadyWrappedError) as caught:
            DistributedDataParallel(again(ddp))

        assert str(caught.value) == self.TEXT.format(f"'{names[0]}'")
        assert caught.value.params == names


def test_several_processes_without_a_process_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    model = torch.nn.Linear(2, 2)

    with pytest.raises(ProcessGroupMissingError) as caught:
        DistributedDataParallel(model)

    assert str(caught.value) == (
        "this process is one of 8 (WORLD_SIZE=8) but torch.distributed is not initialized, so each of them would train alone "
        "and the replicas would drift apart. Call torch.distributed.init_process_group() before wrapping the module, or pass "
        "process_group=. If this process is to train alone, unset WORLD_SIZE."
    )
    assert not hasattr(model.weight, "main_grad")


class TestArgumentsOfTorch:
    """Those of torch DDP, which a program that is ported still passes."""

    OURS = ("self", "module", "process_group")
    NAMES = sorted(signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters.keys() - set(OURS))

    @pytest.mark.parametrize("name", NAMES)
    def test_each_one_is_known_and_a_value_of_no_use_is_refused_by_name(self, name):
        with pytest.raises(ValueError, match=name):
            DistributedDataParallel(Linear(2, 2), **{name: object()})

    def test_its_second_argument_is_known_as_well(self):
        with pytest.raises(ConfigError, match=r"device_ids= cannot be honoured: a rank has one device; move the module there"):
            DistributedDataParallel(Linear(2, 2), [0])

    def test_what_torch_does_not_have_is_refused_as_python_does(self):
        with pytest.raises(TypeError, match=r"__init__\(\) got an unexpected keyword argument 'bucket_cap'$"):
            DistributedDataParallel(Linear(2, 2), bucket_cap=25)

    def test_values_that_mean_what_happens_anyway_are_taken(self):
        taken = {"device_ids": None, "find_unused_parameters": False, "forward_sync_buffers": False, "broadcast_buffers": False}

        ddp = DistributedDataParallel(Linear(2, 2), gradient_as_bucket_view=True, static_graph=True, **taken)

        assert ddp.ddp_config == DistributedDataParallelConfig()

    def test_fields_of_the_config_are_taken_beside_it(self):
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)

        ddp = DistributedDataParallel(Linear(2, 2), config, bucket_cap_mb=25, init_sync=False)

        expected = {"use_distributed_optimizer": True, "bucket_cap_mb": 25, "init_sync": False}
        assert ddp.ddp_config == DistributedDataParallelConfig(**expected)

    def test_what_stands_in_the_config_is_not_given_a_second_time(self):
        with pytest.raises(ConfigError, match="'init_sync' given as an argument and in the config"):
            DistributedDataParallel(Linear(2, 2), DistributedDataParallelConfig(init_sync=True), init_sync=False)


class TestMethodsOfTorch:
    """Those of FSDP2 and of torch DDP, which a program that is ported still calls."""

    NAMES = sorted(
        {
            *(name for name in set(dir(FSDPModule)) - set(dir(torch.nn.Module)) if not name.startswith("_")),
            *("clip_grad_norm_", "join", "register_comm_hook"),
        }
    )

    @pytest.mark.parametrize("name", NAMES)
    def test_each_one_is_missing_with_what_to_do_instead(self, name):
        ddp = DistributedDataParallel(Linear(2, 2))

        assert not hasattr(ddp, name)
        with pytest.raises(AttributeError, match=rf"^{name} of torch's data parallelism is not here; \w+"):
            getattr(ddp, name)

    def test_holding_gradients_back_names_no_sync(self):
        ddp = DistributedDataParallel(Linear(2, 2))

        with pytest.raises(AttributeError, match=r"with ddp\.no_sync\(\)"):
            ddp.set_requires_gradient_sync(False)

    def test_one_that_the_module_has_itself_is_called(self):
        class Joins(Linear):
            def join(self):
                return "joined"

        assert DistributedDataParallel(Joins(2, 2)).join() == "joined"
