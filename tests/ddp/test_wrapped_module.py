"""The wrapper as a module: its state, its replicas, and how it goes away again."""

import copy
import gc
import inspect
import io
import pickle
import threading
import weakref

import pytest
import torch
from loop_ranks import Ranks, Weights, grads
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.comm import Communicator
from megabucket.errors import (
    AlreadyWrappedError,
    ConfigError,
    LayoutMismatchError,
    MegabucketError,
    NoTrainableParametersError,
    PeerFailedError,
    PhaseError,
)
from megabucket.testing import ListRecorder, LoopbackWorld

SHARDED = {"use_distributed_optimizer": True}
AGREEMENT = ["wrap", "wrap: buffers"]


def wrap(model, **switches):
    return DistributedDataParallel(model, DistributedDataParallelConfig(**switches))


def small_model():
    """Two linear layers with a frozen one between, and running statistics."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 2)
    )
    return model.double()


class Parts(torch.nn.Module):
    """Has parts with the names of attributes of the wrapper."""

    def __init__(self):
        super().__init__()
        self.layout, self.module = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.scale = torch.nn.Parameter(torch.ones(2))


def hook_counts(module):
    """How many hooks of each kind torch holds for a module and its parameters."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")
    kinds += ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    counts = [len(getattr(submodule, kind)) for submodule in module.modules() for kind in kinds]
    for param in module.parameters():
        counts += [len(param._backward_hooks or ()), len(param._post_accumulate_grad_hooks or ())]
    return counts


class TestReplicas:
    def test_wrapping_makes_parameters_frozen_ones_and_statistics_those_of_the_first_rank(self):
        def perturb(rank, module):
            with torch.no_grad():
                for tensor in [*module.parameters(), *module.buffers()]:
                    tensor.add_(10 * rank)

        ranks = Ranks(3, small_model(), prepare=perturb)

        expected = small_model().state_dict()
        for module in ranks.modules:
            for name, value in module.state_dict().items():
                assert torch.equal(value, expected[name]), name

    def test_a_frozen_parameter_in_another_memory_order_is_made_equal_too(self):
        def prepare(rank, module):
            module.weight = torch.nn.Parameter(torch.full((2, 3), float(rank)).t(), requires_grad=False)

        ranks = Ranks(2, torch.nn.Linear(2, 3), prepare=prepare)

        assert torch.equal(ranks.modules[1].weight, torch.zeros(3, 2))

    def test_an_expanded_buffer_is_made_equal_too(self):
        def prepare(rank, module):
            module.register_buffer("mask", torch.tensor([[1.0], [2.0]]).mul(rank + 1).expand(2, 5))

        ranks = Ranks(2, Weights("a"), prepare=prepare)

        assert torch.equal(ranks.modules[1].mask, torch.tensor([[1.0] * 5, [2.0] * 5]))

    def test_what_has_no_values_is_left_out(self):
        model = Weights("ab")
        model.b = torch.nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)

        ranks = Ranks(2, model)

        assert ranks.launched_by_wrapping() == [*AGREEMENT, "wrap: parameters", "initial broadcast"]  # of the buffer of a

    def test_a_frozen_sparse_parameter_cannot_be_made_equal(self):
        def prepare(_, module):
            module.b = torch.nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)

        with pytest.raises(ConfigError) as caught:
            Ranks(2, Weights("ab"), prepare=prepare)

        assert str(caught.value) == (
            "init_sync=True cannot make 'b' equal on all ranks, because it is sparse (torch.sparse_coo). Make it equal "
            "yourself and pass init_sync=False, or use a dense tensor."
        )

    def test_without_init_sync_no_value_is_sent_and_replicas_stay_different(self):
        def prepare(rank, module):
            module.a.data.fill_(rank)

        ranks = Ranks(2, Weights("a"), prepare=prepare, init_sync=False)

        assert ranks.launched_by_wrapping() == AGREEMENT
        assert [module.a[0].item() for module in ranks.modules] == [0.0, 1.0]


class TestAgreement:
    """All ranks wrap the same, or every rank refuses with the same text and no module is touched."""

    @staticmethod
    def refusals(models, configs=(None, None)):
        """What each rank says about wrapping its model."""
        before = [hook_counts(model) for model in models]
        world = LoopbackWorld(2)

        def wrap_one(rank):
            with pytest.raises(MegabucketError) as caught:
                DistributedDataParallel(models[rank], configs[rank], communicator=world.communicator(rank))
            return caught.value

        errors = world.run(wrap_one)

        assert [hook_counts(model) for model in models] == before
        for param in (param for model in models for param in model.parameters()):
            assert vars(param) == {}
            assert param.untyped_storage().nbytes() == param.nbytes
            assert torch.equal(param, torch.ones_like(param))
        assert str(errors[0]) == str(errors[1])
        assert type(errors[0]) is type(errors[1])
        return errors[0]

    def test_a_model_that_differs_between_ranks_is_refused_and_left_as_it_was(self):
        error = self.refusals([Weights("a"), Weights("abcdefg")])

        assert isinstance(error, LayoutMismatchError)
        assert error.num_different == 6
        assert [text.partition(": ")[2] for text in error.differences] == [
            f"rank 0 has nothing, rank 1 has {name} (100,) float32" for name in "bcdef"
        ]
        assert "and 1 more" in str(error)

    @pytest.mark.parametrize(
        ("change", "difference"),
        [
            (lambda model: model.b.requires_grad_(False), "rank 0 has b (100,) float32, rank 1 has b (100,) float32 frozen"),
            (lambda model: setattr(model, "b", model.a), "rank 0 has b (100,) float32, rank 1 has b (100,) float32 tied to a"),
            (lambda model: model.bfloat16(), "rank 0 has a (100,) float32, rank 1 has a (100,) bfloat16"),
            (lambda model: model.register_buffer("c", torch.ones(3)), "rank 0 has nothing, rank 1 has c (3,) float32 buffer"),
        ],
        ids=["trainability", "tie", "dtype", "buffer"],
    )
    def test_any_difference_of_one_rank_is_named(self, change, difference):
        models = [Weights("ab"), Weights("ab")]
        change(models[1])

        error = self.refusals(models)

        assert isinstance(error, LayoutMismatchError)
        assert error.differences[0].partition(": ")[2] == difference

    def test_another_order_of_the_same_parameters_is_named(self):
        error = self.refusals([Weights("ab"), Weights("ba")])

        assert isinstance(error, LayoutMismatchError)
        assert error.num_different == 2

    def test_configs_that_differ_are_refused_by_field(self):
        configs = [DistributedDataParallelConfig(unused_parameters=what) for what in ("error", "zero")]

        error = self.refusals([Weights("ab"), Weights("ab")], configs)

        assert isinstance(error, LayoutMismatchError)
        (difference,) = error.differences
        assert difference.partition(": ")[2] == (
            "rank 0 has config unused_parameters=error, rank 1 has config unused_parameters=zero"
        )

    def test_a_rank_that_cannot_wrap_its_model_keeps_nobody_waiting(self):
        models = [Weights("ab"), Weights("ab")]
        models[1].requires_grad_(False)

        error = self.refusals(models)

        assert isinstance(error, PeerFailedError)
        assert (error.rank, error.phase) == (1, "wrap")
        assert error.cause.startswith("NoTrainableParametersError: Weights has no parameter with requires_grad=True")
        assert str(error).endswith(". No rank was wrapped.")

    def test_a_rank_whose_memory_does_not_suffice_keeps_nobody_waiting(self, monkeypatch):
        models = [Weights("ab"), Weights("ab")]
        make = Communicator.allocate

        def make_where_there_is_room(*args, **kwargs):
            if threading.current_thread().name == "loopback-rank-0":
                raise torch.OutOfMemoryError("no room for 1024 bytes")
            return make(*args, **kwargs)

        monkeypatch.setattr(Communicator, "allocate", make_where_there_is_room)  # what buffers are made with
        error = self.refusals(models)

        assert isinstance(error, PeerFailedError)
        assert (error.rank, error.phase, error.cause) == (0, "wrap", "OutOfMemoryError: no room for 1024 bytes")

    def test_what_all_ranks_refuse_alike_is_their_own_error(self):
        models = [Weights("ab").requires_grad_(False) for _ in range(2)]

        assert isinstance(self.refusals(models), NoTrainableParametersError)


class TestState:
    def test_state_dict_has_the_names_of_the_module_and_its_current_values(self):
        model = small_model()
        names = list(model.state_dict())
        ddp = wrap(model)
        with torch.no_grad():
            model[0].weight.fill_(3)

        state = ddp.state_dict()

        assert list(state) == names
        assert torch.equal(state["0.weight"], torch.full((4, 3), 3.0, dtype=torch.float64))

    def test_state_goes_into_an_unwrapped_module_and_back(self):
        ddp, plain = wrap(small_model()), small_model()
        with torch.no_grad():
            for param in plain.parameters():
                param.add_(1)

        result = ddp.load_state_dict(plain.state_dict())

        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        plain.load_state_dict(ddp.state_dict())
        x = torch.ones(2, 3, dtype=torch.float64)
        assert torch.equal(ddp.eval()(x), plain.eval()(x))

    @pytest.mark.parametrize("strict", [True, False])
    def test_a_checkpoint_of_torch_ddp_is_loaded_without_its_prefix(self, strict):
        plain = small_model()
        with torch.no_grad():
            for param in plain.parameters():
                param.add_(1)
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            state = torch.nn.parallel.DistributedDataParallel(plain).state_dict()
        finally:
            torch.distributed.destroy_process_group()
        names, versions = list(state), dict(state._metadata)
        ddp = wrap(small_model())

        result = ddp.load_state_dict(state, strict=strict)

        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert all(map(torch.equal, ddp.module.state_dict().values(), plain.state_dict().values()))
        assert names[0] == "module.0.weight"
        assert (list(state), dict(state._metadata)) == (names, versions)  # they are the caller's

    def test_names_with_and_without_the_prefix_are_refused_as_torch_refuses_them(self):
        state = {"module.a": torch.ones(100), "b": torch.ones(100)}

        with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"a".*Unexpected key.*"module\.a"'):
            wrap(Weights("ab")).load_state_dict(state)

    def test_a_module_that_has_a_child_of_the_name_of_the_prefix_is_loaded_as_it_is(self):
        ddp = wrap(torch.nn.ModuleDict({"module": Weights("a")}))

        result = ddp.load_state_dict({"module.a": torch.full((100,), 5.0)})

        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert ddp.module["module"].a[0].item() == 5.0

    def test_an_outer_module_loads_what_it_has_saved_around_torch_ddp(self):
        outer = torch.nn.Sequential(wrap(Weights("a")), torch.nn.Linear(2, 2))
        state = {"0.module.a": torch.full((100,), 5.0), "1.weight": torch.ones(2, 2), "1.bias": torch.ones(2)}

        result = outer.load_state_dict(state)

        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert outer[0].module.a[0].item() == 5.0

    def test_an_outer_module_loads_what_it_has_saved(self):
        outer = torch.nn.Sequential(wrap(Weights("a")), torch.nn.Linear(2, 2))
        state = {name: value + 5 for name, value in outer.state_dict().items()}

        result = outer.load_state_dict(state)

        assert list(state) == ["0.a", "1.weight", "1.bias"]
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert outer[0].module.a[0].item() == 6.0

    def test_parameters_and_statistics_have_the_names_of_the_module(self):
        model = small_model()
        names, statistics = ([name for name, _ in found] for found in (model.named_parameters(), model.named_buffers()))

        ddp = wrap(model)

        assert [name for name, _ in ddp.named_parameters()] == names
        assert [name for name, _ in ddp.named_parameters(prefix="net")] == [f"net.{name}" for name in names]
        assert [name for name, _ in ddp.named_buffers()] == statistics
        assert list(ddp.named_parameters(recurse=False)) == []
        assert ddp.get_parameter("0.weight") is model[0].weight

    def test_an_outer_module_has_them_as_well(self):
        outer = torch.nn.Sequential(wrap(Weights("a")), torch.nn.Linear(2, 2))

        assert [name for name, _ in outer.named_parameters()] == list(outer.state_dict()) == ["0.a", "1.weight", "1.bias"]

    def test_the_wrapper_and_the_module_have_one_name_and_all_modules_are_there_once(self):
        ddp = wrap(small_model())
        ddp.extra = torch.nn.Linear(1, 1)

        assert [name for name, _ in ddp.named_modules()] == ["", "", "0", "1", "2", "3", "extra"]
        assert len(set(ddp.modules())) == len(list(ddp.modules())) == 7
        twice = [name for name, _ in torch.nn.ModuleList([ddp, ddp]).named_modules(remove_duplicate=False)]
        assert twice.count("0.3") == twice.count("1.3") == 1

    @pytest.mark.parametrize(
        ("put", "prefix"),
        [
            (wrap, ""),
            (lambda net: torch.nn.ModuleDict({"net": wrap(net)}), "net."),
            (lambda net: torch.compile(wrap(net), backend="eager"), ""),
            (lambda net: wrap(torch.nn.Sequential(torch.compile(net, backend="eager"))), "0."),
            (lambda net: wrap(torch.compile(net, backend="eager")), "_orig_mod."),  # as in its state_dict
        ],
        ids=["wrapped", "inside a module", "compiled", "around a compiled part", "around a compiled module"],
    )
    def test_torchs_state_dict_functions_give_the_optimizer_the_same_names_and_load_them(self, put, prefix):
        outer, other = put(Parts()), put(Parts())
        optimizer, another = (torch.optim.AdamW(one.parameters(), lr=rate) for one, rate in ((outer, 0.5), (other, 0.25)))
        with torch.no_grad():
            for param in outer.parameters():
                param.add_(3)

        model_state, state = get_state_dict(outer, optimizer)
        names = [f"{prefix}{name}" for name in ("layout.weight", "layout.bias", "scale", "module.weight", "module.bias")]
        assert sorted(model_state) == sorted(state["state"]) == sorted(names)

        set_state_dict(other, another, model_state_dict=dict(model_state), optim_state_dict=state)
        assert all(torch.equal(a, b) for a, b in zip(outer.parameters(), other.parameters(), strict=True))
        assert another.param_groups[0]["lr"] == 0.5

    def test_loading_copies_into_the_buffer(self):
        ddp = wrap(Weights("a"))
        pointer = ddp.module.a.data_ptr()

        ddp.load_state_dict({"a": torch.full((100,), 5.0)})

        assert ddp.module.a.data_ptr() == pointer
        assert ddp.param_and_grad_buffers[0].param_data[:100].tolist() == [5.0] * 100

    def test_missing_keys_are_an_error_unless_they_may_be(self):
        ddp = wrap(Weights("ab"))

        with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"b\""):
            ddp.load_state_dict({"a": torch.ones(100)})
        assert ddp.load_state_dict({"a": torch.ones(100)}, strict=False).missing_keys == ["b"]

    def test_assign_is_refused(self):
        ddp = wrap(Weights("a"))

        with pytest.raises(PhaseError) as caught:
            ddp.load_state_dict({"a": torch.ones(100)}, assign=True)

        assert str(caught.value) == (
            "load_state_dict(assign=True) would replace the parameters that live in the buffers, and their gradients would be "
            "reduced no more. Load with assign=False, which copies the values, or load before wrapping."
        )

    @pytest.mark.parametrize("which", ["wrapper", "module", "submodule"])
    @pytest.mark.parametrize("switches", [{}, SHARDED], ids=["all_reduce", "reduce_scatter"])
    def test_loading_reaches_the_float32_main_parameters_of_a_16_bit_model(self, which, switches):
        inner = Weights("a", dtype=torch.bfloat16)
        ddp = wrap(torch.nn.Sequential(inner), **switches)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
        target, prefix = {"wrapper": (ddp, "0."), "module": (ddp.module, "0."), "submodule": (inner, "")}[which]

        target.load_state_dict({f"{prefix}a": torch.full((100,), 8.0, dtype=torch.bfloat16)})
        (inner.a * 2).sum().backward()
        ddp.finish_grad_sync()
        optimizer.step()

        assert inner.a[0].item() == 6.0  # 8 - 2, not 1 - 2

    def test_a_broadcast_reaches_them_too(self):
        ddp = wrap(Weights("a", dtype=torch.bfloat16))
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)

        ddp.module.a.detach().fill_(8.0)
        ddp.broadcast_params()
        ddp(a=2).backward()
        optimizer.step()

        assert ddp.module.a[0].item() == 6.0

    def test_parameters_keep_their_identity_so_an_optimizer_may_be_built_before_or_after(self):
        model = Weights("a")
        params = list(model.parameters())

        ddp = wrap(model)

        assert all(before is after for before, after in zip(params, ddp.parameters(), strict=True))


class TestDetach:
    def wrapped(self, **switches):
        model = small_model()
        before = hook_counts(model)
        return model, before, wrap(model, **switches)

    @pytest.mark.parametrize(
        "switches",
        [{}, SHARDED, {**SHARDED, "overlap_param_gather": True}, {"finish": "explicit"}],
        ids=["all_reduce", "reduce_scatter", "overlapped_gather", "explicit"],
    )
    def test_it_leaves_no_hook_no_attribute_and_no_optimizer_behind(self, switches):
        model, before, ddp = self.wrapped(**switches)
        DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
        ddp(torch.ones(2, 3, dtype=torch.float64)).sum().backward()

        assert ddp.detach() is model

        assert hook_counts(model) == before
        assert all(vars(param) == {} for param in model.parameters())

    def test_plain_training_goes_on_from_the_same_values(self):
        model, _, ddp = self.wrapped()
        twin = small_model()
        for module in (ddp, twin):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
            module(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
            optimizer.step()

        ddp.detach()
        for module in (model, twin):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
            optimizer.zero_grad()
            module(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
            optimizer.step()

        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))

    def test_a_second_wrapper_works(self):
        ranks = Ranks(2, Weights("a"))
        ranks.run(lambda _, ddp: ddp(a=1).backward())
        ranks.run(lambda _, ddp: ddp.detach())

        def wrap_again(rank):
            ddp = DistributedDataParallel(ranks.modules[rank], communicator=ranks.world.communicator(rank))
            ddp(a=4 * rank).backward()
            return grads(ddp.module)

        assert ranks.world.run(wrap_again) == [{"a": 2.0}] * 2

    def test_a_second_call_does_not_undo_a_second_wrapper(self):
        model = Weights("a")
        first = wrap(model)
        first.detach()
        second = wrap(model)
        second(a=3).backward()

        assert first.detach() is model

        assert model.a.grad is model.a.main_grad
        assert grads(model) == {"a": 3.0}

    def test_it_completes_what_is_in_flight_so_that_no_rank_waits(self):
        ranks = Ranks(2, Weights("ab"), finish="explicit", completion="manual", bucket_size=1)

        def program(rank, ddp):
            ddp(a=1, b=1).backward()
            ddp.start_grad_sync()
            return ddp.detach().a.grad

        assert ranks.run(program) == [None, None]
        assert ranks.world.pending == ()

    def test_values_that_were_still_being_gathered_arrive_first(self):
        ranks = Ranks(2, Weights("ab"), overlap_param_gather=True, **SHARDED)

        def program(rank, ddp):
            optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
            ddp(a=3, b=5).backward()
            optimizer.step()
            module = ddp.detach()
            return module.a.unique().tolist(), module.b.unique().tolist()

        assert ranks.run(program) == [([-2.0], [-4.0])] * 2

    def test_an_optimizer_over_its_shards_no_longer_steps(self):
        _, _, ddp = self.wrapped(**SHARDED)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
        ddp(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        optimizer.step()

        ddp.detach()

        with pytest.raises(PhaseError):
            optimizer.step()

    @pytest.mark.parametrize("switches", [{}, SHARDED], ids=["all_reduce", "sharded"])
    @pytest.mark.parametrize(
        "use",
        [
            lambda ddp: ddp(torch.ones(2, 3, dtype=torch.float64)),
            lambda ddp: ddp.step(),
            lambda ddp: ddp.no_sync(),
            lambda ddp: ddp.finish_grad_sync(),
            lambda ddp: ddp.zero_grad(),
            lambda ddp: ddp.scale_gradients(0.5),
            lambda ddp: ddp.state_dict(),
            lambda ddp: ddp.rebuild(),
            lambda ddp: ddp.check_replicas(),
            lambda ddp: setattr(ddp, "step_number", 1),
        ],
    )
    def test_the_wrapper_is_refused_because_it_would_reduce_nothing(self, use, switches):
        model, _, ddp = self.wrapped(**switches)
        ddp.detach()

        with pytest.raises(PhaseError) as caught:
            use(ddp)

        assert str(caught.value) == (
            "this wrapper was detached: the module is a plain one again, and nothing would be reduced. Wrap it anew with "
            "DistributedDataParallel(module, ...) and make the optimizer anew; or, without reductions, call the module itself "
            "and make a torch optimizer of its parameters."
        )
        assert ddp.detach() is model

    def test_it_lets_go_of_the_buffers(self):
        _, _, ddp = self.wrapped()
        buffer = weakref.ref(ddp.param_and_grad_buffers[0])

        ddp.detach()
        gc.collect()

        assert buffer() is None


class TestCopies:
    @pytest.mark.parametrize("switches", [{}, {**SHARDED, "overlap_param_gather": True}], ids=["all_reduce", "sharded"])
    def test_a_deepcopy_of_the_inner_module_is_a_plain_module_as_averages_of_weights_need(self, switches):
        ddp = wrap(Weights("a"), **switches)

        average = torch.optim.swa_utils.AveragedModel(ddp.module)
        average.module(a=5).backward()

        assert grads(average.module) == {"a": 5.0}
        assert ddp.module.a.grad is None
        assert ddp.sync.is_between_steps
        assert average.module.a.data_ptr() != ddp.module.a.data_ptr()

    def test_a_backward_through_the_copy_never_touches_a_step_of_the_original(self):
        ddp = wrap(Weights("ab"), bucket_size=1)
        for _ in range(2):
            ddp(a=1, b=1).backward()
            ddp.zero_grad()
        twin = copy.deepcopy(ddp.module)
        loss = ddp(b=1) + ddp(a=1)
        ddp.module.b.register_hook(lambda _: 1 / 0)  # the backward of the original fails when a is in flight
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        phases = [group.grad_phase for group in ddp.bucket_groups]

        twin(a=5, b=5).backward()

        assert [group.grad_phase for group in ddp.bucket_groups] == phases

    def test_loading_into_the_copy_is_no_load_into_the_wrapped_module(self):
        ddp = wrap(Weights("a"))
        twin = copy.deepcopy(ddp.module)
        count = ddp.num_value_changes

        twin.load_state_dict({"a": torch.zeros(100)})

        assert ddp.num_value_changes == count

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, pickle.dumps])
    def test_copying_or_pickling_the_wrapper_is_refused(self, duplicate):
        ddp = wrap(Weights("a"))

        with pytest.raises(PhaseError) as caught:
            duplicate(ddp)

        assert str(caught.value) == (
            "a wrapper cannot be copied or pickled: a copy would have neither the hooks nor the buffers, and its gradients "
            "would never be reduced. Save ddp.state_dict(), or copy the inner module: copy.deepcopy(ddp.module) is a plain one "
            "and AveragedModel(ddp.module) an average. To copy parameters in another way call ddp.finish_param_sync() first: "
            "they are NaN while they are gathered (overlap_param_gather=True)."
        )

    @pytest.mark.parametrize(
        "save", [pickle.dumps, lambda module: torch.save(module, io.BytesIO())], ids=["pickle", "torch.save"]
    )
    def test_pickling_the_wrapped_module_is_refused_until_it_is_detached(self, save):
        ddp = wrap(Weights("a"))

        with pytest.raises(
            PhaseError, match=r"a wrapped module cannot be pickled, nor .* Save ddp.state_dict\(\), .* after ddp.detach\(\)"
        ):
            save(ddp.module)

        save(ddp.detach())


class TestTwoWrappers:
    def test_two_models_in_one_process_do_not_disturb_each_other(self):
        first, second = wrap(Weights("ab"), bucket_size=1), wrap(Weights("a"), finish="explicit")

        (first(a=2, b=3) + second(a=5)).backward()

        assert grads(first.module) == {"a": 2.0, "b": 3.0}
        assert first.sync.is_reduced
        assert not second.sync.is_reduced
        second.finish_grad_sync()
        assert grads(second.module) == {"a": 5.0}

    def test_a_second_wrapper_over_the_same_parameters_is_refused(self):
        model = Weights("abcdefg")
        first = wrap(model)

        with pytest.raises(AlreadyWrappedError) as caught:
            wrap(torch.nn.Sequential(model))

        assert str(caught.value) == (
            "'0.a', '0.b', '0.c', '0.d', '0.e' and 2 more already belong to another DistributedDataParallel wrapper: they have "
            "a main_grad. Two of them would move the same storage and reduce the same gradients twice. Wrap each parameter "
            "once: call detach() on the first wrapper before wrapping again; if it is Megatron-Core's, build the model anew "
            "without it."
        )
        first(a=1, b=1, c=1, d=1, e=1, f=1, g=1).backward()  # the first one is unharmed
        assert grads(model)["g"] == 1.0


class TestGarbage:
    @pytest.mark.parametrize("switches", [{}, {**SHARDED, "overlap_param_gather": True}], ids=["all_reduce", "sharded"])
    def test_a_dropped_wrapper_and_its_module_are_freed_with_their_buffers(self, switches):
        def use():
            ddp = wrap(Weights("ab"), **switches)
            optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters()), ddp)
            for _ in range(2):
                ddp(a=1, b=1).backward()
                optimizer.step()
                optimizer.zero_grad()
            things = (ddp, ddp.module, ddp.param_and_grad_buffers[0], ddp.sync, optimizer)
            return [weakref.ref(thing) for thing in things]

        references = use()
        gc.collect()

        assert [reference() for reference in references] == [None] * 5

    def test_the_module_alone_keeps_its_wrapper_alive(self):
        model = Weights("a")
        wrap(model, **SHARDED)
        gc.collect()

        model(a=3).backward()

        assert model.a.main_grad.unique().tolist() == [3.0]

    def test_parameters_that_outlive_both_are_refused_a_gradient_nobody_would_reduce(self):
        def leak():
            ddp = wrap(Weights("a"))
            return ddp.module.a

        param = leak()
        gc.collect()

        with pytest.raises(PhaseError) as caught:
            (param * 2).sum().backward()

        assert str(caught.value) == (
            "a parameter received a gradient, but the DistributedDataParallel wrapper that should reduce it is gone. Keep the "
            "wrapper or the wrapped module alive, or call detach() on the wrapper before dropping it."
        )


class TestOddModels:
    def test_tied_parameters_are_one_parameter_under_their_first_name(self):
        model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["embed"].weight
        ranks = Ranks(2, model)

        def step(rank, ddp):
            module = ddp.module
            module["head"](module["embed"](torch.tensor([rank, rank]))).sum().backward()
            return module["head"].weight.grad is module["embed"].weight.main_grad, module["embed"].weight.grad.clone()

        (tied, first), (_, second) = ranks.run(step)
        assert tied
        assert torch.equal(first, second)
        assert list(ranks.ddps[0].layout.buffers[0].params) == ["embed.weight"]

    def test_frozen_parameters_stay_where_they_are_and_get_no_gradient(self):
        model = Weights("ab")
        model.b.requires_grad_(False)
        pointer = model.b.data_ptr()
        ddp = wrap(model)

        ddp(a=1, b=1).backward()

        assert model.b.data_ptr() == pointer
        assert grads(model) == {"a": 1.0, "b": None}
        assert not hasattr(model.b, "main_grad")

    def test_scalars_empties_and_two_dtypes_train_side_by_side(self):
        class Odd(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.scalar = torch.nn.Parameter(torch.tensor(2.0))
                self.empty = torch.nn.Parameter(torch.empty(0, 3))
                self.short = torch.nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
                self.wide = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))

            def forward(self, factor):
                terms = (self.scalar, self.empty.sum(), self.short.float().sum(), self.wide.float().sum())
                return factor * sum(terms)

        for switches in ({}, SHARDED):
            ranks = Ranks(2, Odd(), bucket_size=1, **switches)

            def train(rank, ddp):
                optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.5), ddp)
                for _ in range(2):
                    ddp(2.0 * rank).backward()
                    assert optimizer.step().updated
                    optimizer.zero_grad()
                module = ddp.module
                return module.scalar.item(), module.short.tolist(), module.wide.tolist()

            # two steps of 0.5 * mean(0, 2)
            assert ranks.run(train) == [(1.0, [0.0] * 7, [0.0] * 3)] * 2

    def test_a_model_of_nothing_but_an_empty_parameter_can_be_wrapped(self):
        model = Weights("a")
        model.a = torch.nn.Parameter(torch.empty(0))
        ranks = Ranks(2, model)

        ranks.run(lambda _, ddp: (ddp(a=1).backward(), ddp.zero_grad()))

        assert ranks.schedule() == ["fence"]


class TestArguments:
    def test_a_communicator_and_a_recorder_contradict_each_other(self):
        with pytest.raises(ConfigError) as caught:
            DistributedDataParallel(Weights("a"), communicator=LoopbackWorld(1).communicator(0), recorder=ListRecorder())

        assert str(caught.value) == "communicator= brings its own ranks and recorder; drop process_group= and recorder="

    def test_a_recorder_of_a_single_process_is_told_its_phases(self):
        phases = []

        class Recorder(ListRecorder):
            def enter_phase(self, step: int, phase: str) -> None:
                phases.append(phase)

        ddp = DistributedDataParallel(torch.nn.Linear(2, 2), recorder=Recorder())

        with ddp.step():
            ddp(torch.ones(1, 2)).sum().backward()

        assert "forward" in phases

    def test_a_wrapper_without_a_config_all_reduces_with_overlap(self):
        ddp = DistributedDataParallel(Weights("a"))

        assert ddp.ddp_config == DistributedDataParallelConfig()


class WithConfig(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.config = {"width": 3}

    def forward(self, inputs, scale: float = 1.0):
        return self.linear(inputs) * scale

    def generate(self, num_rows):
        return self(torch.ones(num_rows, 3))


def test_the_wrapper_has_the_signature_of_the_modules_forward():
    module = WithConfig()
    expected = inspect.signature(module.forward)

    ddp = DistributedDataParallel(module)

    assert inspect.signature(ddp.forward) == expected
    assert torch.equal(ddp(torch.ones(1, 3), scale=2.0), 2 * module(torch.ones(1, 3)))


def test_what_the_wrapper_lacks_comes_from_the_module():
    module = WithConfig()
    ddp = DistributedDataParallel(module)

    assert ddp.config is module.config
    assert ddp.linear is module.linear
    assert ddp.generate(5).shape == (5, 2)
    assert ddp.module is module
    with pytest.raises(AttributeError, match="'WithConfig' object has no attribute 'nonsense'"):
        ddp.nonsense  # noqa: B018
