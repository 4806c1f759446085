"""The habits of plain torch code around an optimizer: a ``DistributedOptimizer`` does with them what plain torch does."""

import copy
from collections import defaultdict

import pytest
import torch
import torch.distributed.checkpoint.state_dict
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_ranks import in_ways, run_wrapped
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megabucket import DistributedOptimizer, ShardedEMA, param_norms
from megabucket.errors import ConfigError, OptimizerParametersError, PeerFailedError, PhaseError

MODES = in_ways("all_reduce", "reduce_scatter")
SIZES = pytest.mark.parametrize("size", [1, 2])
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.5),
}
PER_ELEMENT = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class Odd(torch.nn.Module):
    """A parameter that two ranks share in every plan, two that lie on one of them, and a scalar."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.long = torch.nn.Parameter(torch.linspace(-1, 1, 300).to(dtype))
        self.wide = torch.nn.Parameter(torch.linspace(-2, 2, 35).view(5, 7).to(dtype))
        self.short = torch.nn.Parameter(torch.linspace(0, 1, 7).to(dtype))
        self.scale = torch.nn.Parameter(torch.tensor(1.5, dtype=dtype))


def loss(module, seed):
    """Every gradient depends on the values and the seed."""
    return sum((param.float() * (1 + 0.1 * seed)).sin().sum() for param in module.parameters())


class Plain:
    """Torch's optimizer in one process, on float32 main parameters."""

    def __init__(self, make, dtype=torch.float32):
        self.module = Odd(dtype)
        self.params = {name: torch.nn.Parameter(param.detach().float()) for name, param in self.module.named_parameters()}
        self.optimizer = make(self.params.values())

    def step(self, seed=0):
        loss(self.module, seed).backward()
        for name, param in self.module.named_parameters():
            self.params[name].grad, param.grad = param.grad.float(), None
        self.optimizer.step()
        for name, param in self.module.named_parameters():
            param.data.copy_(self.params[name].detach())

    def rebuild(self):
        """There is nothing to rebuild."""


class Wrapped:
    """The same on one rank of several, all with the same data."""

    def __init__(self, ddp, optimizer):
        self.ddp, self.module, self.optimizer = ddp, ddp.module, optimizer
        self.params = dict(ddp.module.named_parameters())

    def step(self, seed=0):
        loss(self.module, seed).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def rebuild(self):
        self.ddp.rebuild()

    @property
    def held(self):
        """The parameters of which this rank has a part: of others it has no numbers of their own."""
        return {name for shard in self.optimizer.sharding.shards for name in shard.segment.params}


def on_ranks(size, make, program, dtype=torch.float32, **switches):
    """Call ``program(wrapped)`` on each rank."""
    return run_wrapped(
        size,
        Odd(dtype),
        lambda _, ddp, optimizer: program(Wrapped(ddp, optimizer)),
        lambda ddp: DistributedOptimizer(make(ddp.parameters()), ddp),
        **switches,
    )


def weights(side):
    return {name: param.detach().clone() for name, param in side.module.named_parameters()}


def shown(side):
    """Which parameters have state, with its numbers and the names of the rest."""
    names = {param: name for name, param in side.params.items()}
    found = {}
    for param, values in side.optimizer.state.items():
        elements = sorted(values.keys() & set(PER_ELEMENT))
        found[names[param]] = {key: float(values[key]) for key in values.keys() & {"step"}}, elements
    return found


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def check_beside_torch(size, make, program, **switches):
    """Weights and state after ``program(side)`` are those of plain torch."""
    plain = Plain(make)
    program(plain)

    def play(side):
        program(side)
        return weights(side), shown(side), side.held, side.optimizer.state_dict()["state"]

    for found, state, held, packed in on_ranks(size, make, play, **switches):
        assert_equal(found, weights(plain))
        assert only(held, state) == only(held, shown(plain))
        assert_same_state(packed, plain.optimizer.state_dict()["state"])


def only(names, found):
    return {name: value for name, value in found.items() if name in names}


def assert_same_state(found, expected):
    assert found.keys() == expected.keys()
    for index, values in expected.items():
        assert found[index].keys() - {"main_param"} == values.keys() - {"main_param"}
        for key, value in values.items():
            assert torch.equal(found[index][key], value), (index, key)


# State #


@MODES
@SIZES
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_state_of_a_parameter_is_torchs_where_this_rank_has_it_and_a_piece_of_it_elsewhere(make, size, switches):
    plain = Plain(make)
    for seed in range(3):
        plain.step(seed)

    def program(side):
        assert not side.optimizer.state
        for seed in range(3):
            side.step(seed)
        state = side.optimizer.state
        assert (len(state), bool(state), list(state)) == (4, True, list(side.params.values()))
        return {name: {key: value.clone() for key, value in state[param].items()} for name, param in side.params.items()}

    ranks = on_ranks(size, make, program, bucket_size=40, **switches)

    for name, param in plain.params.items():
        for key, expected in plain.optimizer.state[param].items():
            values = [rank[name][key] for rank in ranks]
            assert all(rank[name].keys() == plain.optimizer.state[param].keys() for rank in ranks)
            if key == "step" or "use_distributed_optimizer" not in switches:
                assert all(torch.equal(value, expected) for value in values)
            else:
                assert all(value.shape == expected.shape or value.dim() == 1 for value in values)
                assert torch.equal(torch.cat([value.flatten() for value in values]), expected.flatten())


def delete_one(side):
    for seed in range(4):
        if seed == 2:
            del side.optimizer.state[side.params["wide"]]
        side.step(seed)


def pop_twice(side):
    param = side.params["long"]
    assert side.optimizer.state.pop(param, None) is None
    side.step()
    assert side.optimizer.state.pop(param).keys() & set(PER_ELEMENT)
    assert param not in side.optimizer.state
    with pytest.raises(KeyError):
        side.optimizer.state.pop(param)
    with pytest.raises(KeyError):
        del side.optimizer.state[param]
    assert len(side.optimizer.state) == 3
    side.step(1)


def clear(side):
    side.step()
    side.optimizer.state.clear()
    assert not side.optimizer.state
    side.step(1)


def assign_an_empty_one(side):
    side.step()
    side.optimizer.state = defaultdict(dict)
    assert len(side.optimizer.state) == 0
    side.step(1)


def assign_the_same_one(side):
    side.step()
    state = side.optimizer.state
    side.optimizer.state = state
    side.step(1)


def assign_it_without_one(side):
    side.step()
    short = side.params["short"]
    side.optimizer.state = defaultdict(dict, {key: value for key, value in side.optimizer.state.items() if key is not short})
    side.step(1)


def set_that_of_one(side):
    side.step()
    side.step(1)
    param = side.params["wide"]
    kept = {key: torch.ones(5, 7) if key in PER_ELEMENT else torch.tensor(7.0) for key in side.optimizer.state[param]}
    side.optimizer.state[param] = {key: value for key, value in kept.items() if key != "main_param"}
    side.step(2)


def write_in_place(side):
    side.step()
    for param in side.params.values():
        for key in side.optimizer.state[param].keys() & set(PER_ELEMENT):
            side.optimizer.state[param][key].mul_(0.5)
    side.step(1)


def replace_entries(side):
    side.step()
    for param in side.params.values():
        state = side.optimizer.state[param]
        for key in state.keys() & set(PER_ELEMENT):
            state[key] = state[key] * 0.5
    side.step(1)


def set_numbers(side):
    side.step()
    for index, param in enumerate(side.params.values()):
        state = side.optimizer.state[param]
        if "step" in state and index % 2:
            state["step"] += index
        elif "step" in state:
            state["step"] = torch.tensor(10.0)
    side.step(1)


def default_one(side):
    param = side.params["scale"]
    assert side.optimizer.state.get(param, 3) == 3
    side.step()
    before = side.optimizer.state.get(param)
    assert side.optimizer.state.setdefault(param, {}) is before
    side.step(1)


def keep_something_under_another_key(side):
    side.optimizer.state["seen"] = {"steps": 1}
    side.step()
    assert side.optimizer.state.pop("seen") == {"steps": 1}
    assert side.optimizer.state.pop("seen", 5) == 5
    with pytest.raises(KeyError):
        side.optimizer.state.pop("unknown")
    side.step(1)


HABITS = [
    delete_one,
    pop_twice,
    clear,
    assign_an_empty_one,
    assign_the_same_one,
    assign_it_without_one,
    set_that_of_one,
    write_in_place,
    replace_entries,
    set_numbers,
    default_one,
    keep_something_under_another_key,
]


@MODES
@SIZES
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("habit", HABITS)
def test_what_is_done_to_the_state_counts_as_with_torch(habit, make, size, switches):
    check_beside_torch(size, make, habit, bucket_size=40, **switches)


NAMES = st.sampled_from(["long", "wide", "short", "scale"])
ACTS = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 5)),
    st.tuples(st.just("del"), NAMES),
    st.tuples(st.sampled_from(["clear", "read", "save and load", "rebuild"])),
    st.tuples(st.sampled_from(["scale", "replace", "renew"]), NAMES, st.sampled_from([0.25, 0.5, 3.0])),
    st.tuples(st.just("count"), NAMES, st.integers(1, 9)),
)


def act(side, kind, *args):  # noqa: C901, PLR0912 - one branch for each
    """Do one of ``ACTS``."""
    optimizer = side.optimizer
    state = optimizer.state.get(side.params[args[0]], {}) if len(args) > 1 or kind == "del" else {}
    moments = sorted(state.keys() & set(PER_ELEMENT))
    if kind == "step":
        side.step(*args)
    elif kind == "del" and state:
        del optimizer.state[side.params[args[0]]]
    elif kind == "clear":
        optimizer.state.clear()
    elif kind == "read":
        list(optimizer.state.values())
    elif kind == "save and load":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif kind == "rebuild":
        side.rebuild()
    elif kind == "scale":
        for key in moments:
            state[key].mul_(args[1])
    elif kind == "replace":  # by a tensor of this rank's part
        for key in moments:
            state[key] = state[key] * args[1]
    elif kind == "renew":  # by one of the whole parameter
        whole = torch.linspace(0.1, args[1], side.params[args[0]].numel()).view(side.params[args[0]].shape)
        for key in moments:
            state[key] = whole.clone()
    elif kind == "count" and "step" in state:
        state["step"] += args[1]


@settings(max_examples=settings.default.max_examples * 3 // 10)  # each trains on both sides, with up to twelve acts
@given(
    acts=st.lists(ACTS, max_size=10),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    size=st.sampled_from([1, 2]),
    is_sharded=st.booleans(),
    bucket_size=st.sampled_from([1, 100, 300, None]),
)
def test_any_sequence_of_steps_and_changes_of_state_ends_as_with_torch(acts, name, dtype, size, is_sharded, bucket_size):
    acts = [("step", 0), *acts, ("step", 1)]
    plain, expected = Plain(OPTIMIZERS[name], dtype), []
    for one in acts:
        act(plain, *one)
        expected.append((shown(plain), weights(plain)))

    def program(side):
        for one, (state, values) in zip(acts, expected, strict=True):
            act(side, *one)
            assert only(side.held, shown(side)) == only(side.held, state), one
            assert_equal(weights(side), values)
        return side.optimizer.state_dict()["state"]

    switches = {"use_distributed_optimizer": is_sharded, "bucket_size": bucket_size}
    for packed in on_ranks(size, OPTIMIZERS[name], program, dtype, **switches):
        assert_same_state(packed, plain.optimizer.state_dict()["state"])


@MODES
@SIZES
def test_a_write_to_the_main_values_of_a_16_bit_parameter_is_stepped_on(size, switches):
    def program(side):
        side.step()
        for param in side.params.values():
            side.optimizer.state[param]["main_param"].fill_(3.0)
        wide = side.params["wide"]
        side.optimizer.state[wide]["main_param"] = torch.full_like(wide, 5.0)
        side.optimizer.param_groups[0]["lr"] = 0.0
        side.step()
        return {name: values.unique().tolist() for name, values in weights(side).items()}

    found = on_ranks(size, OPTIMIZERS["SGD"], program, torch.bfloat16, **switches)

    assert found == [{"long": [3.0], "wide": [5.0], "short": [3.0], "scale": [3.0]}] * size


@MODES
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_moments_that_are_given_in_the_dtype_of_a_16_bit_parameter_become_float32(make, switches):
    def program(side):
        side.step()
        for param in side.params.values():
            for key in side.optimizer.state[param].keys() & set(PER_ELEMENT):
                side.optimizer.state[param][key] = torch.zeros_like(param)
        side.step()
        return {value.dtype for values in side.optimizer.state.values() for value in values.values() if value.dim()}

    assert on_ranks(2, make, program, torch.bfloat16, **switches) == [{torch.float32}] * 2


@MODES
@pytest.mark.parametrize("key", ["exp_avg", "main_param"])
def test_a_value_of_another_shape_is_refused_by_name_and_changes_nothing(key, switches):
    def program(side):
        side.step()
        before = side.optimizer.state_dict()["state"]
        side.optimizer.state[side.params["wide"]][key] = torch.zeros(3)
        with pytest.raises(OptimizerParametersError, match=rf"{key} of wide: shape \(3,\) for \(5, 7\)"):
            side.step()
        side.optimizer.zero_grad()
        assert_same_state(side.optimizer.state_dict()["state"], before)
        side.step()

    on_ranks(2, OPTIMIZERS["AdamW"], program, torch.bfloat16, **switches)


@MODES
def test_a_value_that_fits_nowhere_on_one_rank_ends_a_rebuild_on_all(switches):
    def program(rank, ddp, optimizer):
        side = Wrapped(ddp, optimizer)
        side.step()
        if rank == 1:
            optimizer.state[side.params["wide"]]["exp_avg"] = torch.zeros(3)
        with pytest.raises(PeerFailedError, match=r"rank 1 failed in rebuild.*exp_avg of wide: shape \(3,\) for \(5, 7\)"):
            ddp.rebuild()
        side.step(1)
        return weights(side)

    def make(ddp):
        return DistributedOptimizer(OPTIMIZERS["AdamW"](ddp.parameters()), ddp)

    first, second = run_wrapped(2, Odd(), program, make, **switches)
    assert_equal(first, second)


@MODES
def test_weights_that_are_loaded_count_although_the_state_was_changed_as_well(switches):
    def program(side):
        side.step()
        del side.optimizer.state[side.params["long"]]
        side.module.load_state_dict({name: torch.full_like(value, 4.0) for name, value in weights(side).items()})
        side.optimizer.param_groups[0]["lr"] = 0.0
        side.step()
        return {value for values in weights(side).values() for value in values.unique().tolist()}

    assert on_ranks(2, OPTIMIZERS["AdamW"], program, torch.bfloat16, **switches) == [{4.0}] * 2


@MODES
@SIZES
@pytest.mark.parametrize("in_fp32", [False, True])
def test_state_that_is_changed_after_clipping_leaves_the_gradients_as_they_are(in_fp32, size, switches):
    def program(side, *, changes=True):
        side.step()
        loss(side.module, 1).backward()
        side.optimizer.clip_grad_norm_(0.5)
        if changes:
            side.optimizer.state[side.params["long"]] = {}
            side.optimizer.state[side.params["wide"]]["momentum_buffer"] = torch.zeros(5, 7)
        norm = side.optimizer.step().grad_norm
        return norm, weights(side)["short"].tolist()

    def without(side):
        return program(side, changes=False)

    options = {"grad_reduce_in_fp32": in_fp32, **switches}
    found = on_ranks(size, OPTIMIZERS["SGD"], program, torch.bfloat16, **options)

    assert found == on_ranks(size, OPTIMIZERS["SGD"], without, torch.bfloat16, **options)
    assert found[0][0] == pytest.approx(0.5, rel=1e-2)


@MODES
def test_state_may_be_changed_together_with_groups_before_a_rebuild(switches):
    def program(side):
        side.step()
        side.module.late = torch.nn.Parameter(torch.ones(9))
        side.optimizer.add_param_group({"params": [side.module.late]})
        side.params["short"].requires_grad_(False)
        del side.optimizer.state[side.params["long"]]
        side.rebuild()
        side.step()
        steps = {name: int(side.optimizer.state[param]["step"]) for name, param in side.module.named_parameters()}
        return side.held, steps

    for held, found in on_ranks(2, OPTIMIZERS["AdamW"], program, **switches):
        assert only(held, found) == only(held, {"long": 1, "wide": 2, "short": 1, "scale": 2, "late": 1})


@MODES
def test_norms_of_a_step_before_which_state_was_changed_are_those_of_the_step(switches):
    def program(side):
        side.step()
        with param_norms(side.optimizer) as norms:
            side.optimizer.state.clear()
            side.step()
        return norms

    for norms in on_ranks(2, OPTIMIZERS["SGD"], program, torch.bfloat16, **switches):
        assert all(of_param.update == pytest.approx(0.05 * of_param.grad, rel=1e-3) for of_param in norms.values())
        assert len(norms) == 4


@MODES
def test_an_average_of_the_weights_survives_a_change_of_other_state(switches):
    def program(side):
        average = ShardedEMA(side.optimizer, decay=0.5)
        side.step()
        average.update()
        first = average.values()
        side.optimizer.state[side.params["long"]]["exp_avg"] = torch.zeros(300)
        side.step()
        return first, average.values()

    for first, second in on_ranks(2, OPTIMIZERS["AdamW"], program, **switches):
        assert_equal(first, second)


@MODES
@SIZES
def test_torchs_state_dict_api_makes_state_where_it_was_cleared(size, switches):
    def program(side):
        side.step()
        side.optimizer.state.clear()
        made = torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(side.ddp, side.optimizer)["state"]
        return {name: (float(values["step"]), values["exp_avg"].abs().sum().item()) for name, values in made.items()}

    names = ("long", "wide", "short", "scale")
    assert on_ranks(size, OPTIMIZERS["AdamW"], program, **switches) == [dict.fromkeys(names, (1.0, 0.0))] * size


@MODES
@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy])
def test_a_copy_of_the_mapping_is_refused_and_entries_can_be_cloned(copies, switches):
    def program(side):
        side.step()
        with pytest.raises(PhaseError, match="a ParamState cannot be copied or pickled"):
            copies(side.optimizer.state)
        return {key: value.clone() for key, value in side.optimizer.state[side.params["scale"]].items()}.keys()

    assert on_ranks(1, OPTIMIZERS["SGD"], program, **switches) == [{"momentum_buffer"}]


# Hooks #


def record_hooks(held, name, calls):
    held.register_step_pre_hook(lambda given, *_: calls.append((f"before {name}", given is held)))
    held.register_step_post_hook(lambda given, *_: calls.append((f"after {name}", given is held)))


@MODES
def test_hooks_of_a_step_are_called_once_with_the_optimizer_they_are_on(switches):
    def program(side):
        calls, outer = [], side.optimizer
        handle = register_optimizer_step_pre_hook(lambda stepped, *_: calls.append(("any", stepped is outer)))
        record_hooks(outer, "outer", calls)
        record_hooks(outer.torch_optimizer, "given", calls)
        side.step()
        handle.remove()
        return calls

    names = ["any", "before outer", "before given", "after given", "after outer"]
    assert on_ranks(1, OPTIMIZERS["AdamW"], program, **switches) == [[(name, True) for name in names]]


@MODES
@SIZES
@pytest.mark.parametrize("is_given", [False, True])
def test_a_hook_may_read_and_change_state_and_hyperparameters_as_with_torch(is_given, size, switches):
    def program(side):
        held = getattr(side.optimizer, "torch_optimizer", side.optimizer) if is_given else side.optimizer

        def before(*_):
            for param in side.params.values():
                state = side.optimizer.state.get(param, {})
                for key in state.keys() & set(PER_ELEMENT):
                    state[key].mul_(0.5)
            held.param_groups[0]["lr"] *= 0.5

        def after(*_):
            for state in side.optimizer.state.values():
                for key in state.keys() & set(PER_ELEMENT):
                    state[key] = state[key] * 0.5

        held.register_step_pre_hook(before)
        held.register_step_post_hook(after)
        for seed in range(3):
            side.step(seed)

    check_beside_torch(size, OPTIMIZERS["AdamW"], program, bucket_size=100, **switches)


@MODES
@pytest.mark.parametrize("is_given", [False, True])
def test_hooks_of_saving_and_loading_see_whole_parameters(is_given, switches):
    def program(side):
        held, calls = side.optimizer.torch_optimizer if is_given else side.optimizer, []
        held.register_state_dict_pre_hook(lambda _: calls.append("before saving"))
        held.register_state_dict_post_hook(lambda _, saved: saved.update(note="kept"))
        held.register_load_state_dict_pre_hook(lambda _, loaded: calls.append(loaded["note"]))
        held.register_load_state_dict_post_hook(lambda _: calls.append("after loading"))
        side.step()
        side.optimizer.load_state_dict(side.optimizer.state_dict())
        return calls

    assert on_ranks(2, OPTIMIZERS["SGD"], program, **switches) == [["before saving", "kept", "after loading"]] * 2


# Groups #


def with_options(kind, **options):
    return lambda params: kind(params, **{"lr": 0.05, **options})


def two_groups(params):
    params = list(params)
    return torch.optim.AdamW([{"params": params[:2], "lr": 0.1}, {"params": params[2:], "weight_decay": 0.5}], lr=0.01)


OPTIONS = {
    "maximize": with_options(torch.optim.AdamW, maximize=True),
    "foreach": with_options(torch.optim.AdamW, foreach=True),
    "one by one": with_options(torch.optim.AdamW, foreach=False),
    "tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.05)),
    "tensor lr of SGD": lambda params: torch.optim.SGD(params, lr=torch.tensor(0.05), momentum=0.9),
    "nesterov": with_options(torch.optim.SGD, momentum=0.9, nesterov=True),
    "two groups": two_groups,
}


def change_rates(side):
    for seed in range(3):
        side.step(seed)
        rate = side.optimizer.param_groups[0]["lr"]
        if isinstance(rate, torch.Tensor):
            rate.mul_(0.5)
        else:
            side.optimizer.param_groups[0]["lr"] = rate * 0.5


@MODES
@SIZES
@pytest.mark.parametrize("make", OPTIONS.values(), ids=OPTIONS)
def test_options_of_torch_do_what_they_do_there(make, size, switches):
    check_beside_torch(size, make, change_rates, bucket_size=100, **switches)


@MODES
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_fused_kernel_steps_as_with_torch_up_to_how_it_vectorizes(kind, switches):
    make = with_options(kind, fused=True)
    plain = Plain(make)
    change_rates(plain)

    for found in on_ranks(2, make, lambda side: (change_rates(side), weights(side))[1], **switches):
        for name, value in weights(plain).items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@MODES
def test_defaults_and_text_are_those_of_the_given_optimizer(switches):
    def program(side):
        optimizer = side.optimizer
        assert optimizer.defaults is optimizer.torch_optimizer.defaults
        assert repr(optimizer).endswith(f"of\n{optimizer.torch_optimizer!r}")

    on_ranks(1, OPTIMIZERS["AdamW"], program, **switches)


@MODES
@SIZES
def test_groups_may_be_assigned(size, switches):
    def program(side):
        side.step()
        side.optimizer.param_groups = [{**group, "lr": 0.5} for group in side.optimizer.param_groups]
        side.step(1)

    check_beside_torch(size, two_groups, program, **switches)


@MODES
@SIZES
@pytest.mark.parametrize("is_given", [False, True])
def test_a_group_that_is_added_to_either_is_trained_after_a_rebuild(is_given, size, switches):
    def program(side):
        side.step()
        side.module.late = torch.nn.Parameter(torch.linspace(0, 3, 33))
        own = torch.nn.Parameter(side.module.late.detach().clone()) if isinstance(side, Plain) else side.module.late
        side.params["late"] = own
        held = getattr(side.optimizer, "torch_optimizer", side.optimizer) if is_given else side.optimizer
        held.add_param_group({"params": [own], "lr": 0.5})
        side.rebuild()
        side.step(1)
        side.step(2)

    check_beside_torch(size, OPTIMIZERS["AdamW"], program, **switches)


# What torch itself cannot do #


@MODES
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"differentiable": True}, "group 0 of the AdamW has differentiable=True, .* cannot update the parameters of a module"),
        ({"capturable": True}, "group 0 of the AdamW has capturable=True, .* are on the CPU"),
    ],
    ids=["differentiable", "capturable"],
)
def test_an_option_with_which_torch_itself_cannot_step_is_refused_by_name(options, text, switches):
    make = with_options(torch.optim.AdamW, **options)
    with pytest.raises((RuntimeError, AssertionError)):
        Plain(make).step()

    def program(_, ddp, __):
        with pytest.raises(ConfigError, match=text):
            DistributedOptimizer(make(ddp.parameters()), ddp)
        DistributedOptimizer(torch.optim.AdamW(ddp.parameters()), ddp)

    run_wrapped(2, Odd(), program, lambda _: None, **switches)


# Behind the state #


class BF16Moments(torch.optim.Optimizer):
    """Chooses the dtype of its moments."""

    update_kind = "elementwise"

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            moment = self.state[param].setdefault("exp_avg", torch.zeros_like(param, dtype=torch.bfloat16))
            param.sub_(0.05 * moment.add_(param.grad.to(moment.dtype)))


@MODES
def test_moments_in_a_dtype_that_the_optimizer_has_chosen_keep_it_when_other_state_is_changed(switches):
    def program(side):
        side.step()
        del side.optimizer.state[side.params["long"]]
        side.step()
        return {values["exp_avg"].dtype for values in side.optimizer.state.values()}

    assert on_ranks(2, BF16Moments, program, torch.bfloat16, **switches) == [{torch.bfloat16}] * 2


@MODES
def test_a_group_may_be_removed_together_with_state_before_a_rebuild(switches):
    def program(side):
        side.step()
        side.optimizer.param_groups.pop()
        for name in ("short", "scale"):
            side.params[name].requires_grad_(False)
        del side.optimizer.state[side.params["long"]]
        side.rebuild()
        side.step()
        steps = {name: int(side.optimizer.state[side.params[name]]["step"]) for name in ("long", "wide")}
        return side.held, steps

    for held, found in on_ranks(2, two_groups, program, **switches):
        assert only(held, found) == only(held, {"long": 1, "wide": 2})
