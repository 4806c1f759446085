"""Megatron's bucket-space state, made by hand: what is where in it, and what is refused. Real ones: test_megatron_states.py."""

import pytest
import torch
from kept_in_memory import KeptInMemory

import megabucket as mb
from megabucket.checkpoint.capture import TrainingParts, capture, to_host
from megabucket.checkpoint.convert.megatron import DpZeroState, import_dp_zero
from megabucket.comm import LocalCommunicator
from megabucket.errors import CheckpointMismatchError
from megabucket.testing import LoopbackWorld

SHAPES = {"a": (3,), "b": (2, 2), "c": (70,)}
# The last one first, from multiples of 64, closed at 70 elements or more, padded to multiples of lcm(2, 128):
#   bucket 0: c at 0:70, tail up to 128       bucket 1: b at 128:132, a at 192:195, tail up to 256
# Without the tails: c at 0:70, b at 70:74, a gap, a at 70 + 64 = 134:137.
PLACES = {"c": slice(0, 70), "b": slice(70, 74), "a": slice(134, 137)}
NUMEL = 137
KEYS = ("param", "exp_avg", "exp_avg_sq")
GROUPS = ({"params": ["a"], "lr": 0.25}, {"params": ["b", "c", "frozen"]})
OTHERS = {"frozen": torch.tensor([1.5, 2.5]), "seen": torch.tensor(4)}  # of Module, and not in the state
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def layout_of(dtype=torch.float32, *, shapes=SHAPES, groups=None, dp_size=2, bucket_size=70):
    config = mb.DistributedDataParallelConfig(
        layout="megatron", use_distributed_optimizer=True, bucket_size=bucket_size, grad_reduce_in_fp32=True
    )
    dtype_name = str(dtype).removeprefix("torch.")
    specs = [mb.ParamSpec(name, shape, dtype_name, group=(groups or {}).get(name, "dense")) for name, shape in shapes.items()]
    return mb.build_layout(specs, config, dp_size=dp_size)


def values_of(name, key):
    """Values that bfloat16 cannot hold, different for every parameter and key."""
    numel = torch.Size(SHAPES[name]).numel()
    return torch.arange(1.0, numel + 1) * {"param": 1.001, "exp_avg": 0.501, "exp_avg_sq": 0.2501}[key] + ord(name)


def flats():
    found = {key: torch.zeros(NUMEL) for key in KEYS}
    for key, flat in found.items():
        for name, place in PLACES.items():
            flat[place] = values_of(name, key)
    return {**found, "numel_unpadded": NUMEL}


def state_of(dtype=torch.float32, **changes):
    param_state = {"buckets_coalesced": True, 0: {(dtype, torch.float32): flats()}}
    return DpZeroState(**{"param_state": param_state, "layout": layout_of(dtype), "step": 7, "weights": OTHERS, **changes})


class Module(torch.nn.Module):
    """The parameters, a frozen one and a module buffer."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))
        self.frozen = torch.nn.Parameter(torch.full((2,), 5.0), requires_grad=False)
        self.register_buffer("seen", torch.tensor(9))

    def forward(self, factor):
        return sum((param.float() * factor).sum() for param in self.parameters() if param.requires_grad)


def run_of(communicator=None, dtype=torch.float32, *, sharded=True, build=torch.optim.AdamW):
    module = Module(dtype)
    optimizer = build([{"params": [module.a], "lr": 0.25}, {"params": [module.b, module.c, module.frozen]}], lr=0.5)
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=sharded, bucket_size=10)
    ddp = mb.DistributedDataParallel(module, config, communicator=communicator or LocalCommunicator())
    return TrainingParts(ddp, mb.DistributedOptimizer(optimizer, ddp))


def check_tensors(kept, dtype, *, main_dtype=torch.float32):
    for name, shape in SHAPES.items():
        param = values_of(name, "param").view(shape)
        assert torch.equal(kept.whole(f"model.{name}"), param.to(dtype))
        assert torch.equal(kept.whole(f"optim.state.{name}.exp_avg"), values_of(name, "exp_avg").view(shape))
        assert torch.equal(kept.whole(f"optim.state.{name}.exp_avg_sq"), values_of(name, "exp_avg_sq").view(shape))
        if dtype == torch.bfloat16:
            assert torch.equal(kept.whole(f"optim.main.{name}"), param)


@BOTH
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("sharded", [True, False], ids=["reduce_scatter", "all_reduce"])
def test_a_run_of_any_ranks_and_buckets_takes_the_state(tmp_path, size, sharded, dtype):
    world = LoopbackWorld(size, timeout_s=10)
    path = import_dp_zero(state_of(dtype), tmp_path, groups=GROUPS)

    def program(rank):
        parts = run_of(world.communicator(rank), dtype, sharded=sharded)
        loaded = mb.load_checkpoint(tmp_path, parts.ddp, parts.optimizer)
        assert loaded.step == 7
        assert {float(state["step"]) for state in parts.optimizer.state.values()} <= {7.0}  # no shard, no state
        return to_host(capture(parts))

    kept = KeptInMemory(world.run(program))

    assert path.name == "step-00000007"
    check_tensors(kept, dtype)
    assert kept.whole("model.frozen").tolist() == [1.5, 2.5]
    assert kept.whole("model.seen").item() == 4
    learning_rates = [group["hyperparameters"]["lr"] for group in kept.values["optimizer"]["groups"]]
    assert learning_rates == [0.25, 0.5]  # the second was not given


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_the_next_step_is_that_of_an_optimizer_which_has_this_state(tmp_path, kind):
    build = getattr(torch.optim, kind)
    parts = run_of(build=build)
    import_dp_zero(state_of(), tmp_path, groups=GROUPS, optimizer_class=kind)
    mb.load_checkpoint(tmp_path, parts.ddp, parts.optimizer)
    plain = Module()
    with torch.no_grad():
        for name, shape in SHAPES.items():
            plain.get_parameter(name).copy_(values_of(name, "param").view(shape))
    expected = build([{"params": [plain.a], "lr": 0.25}, {"params": [plain.b, plain.c]}], lr=0.5)
    for name, shape in SHAPES.items():
        moments = {key: values_of(name, key).view(shape) for key in KEYS[1:]}
        expected.state[plain.get_parameter(name)] = {"step": torch.tensor(7.0), **moments}

    for module, optimizer in [(parts.ddp, parts.optimizer), (plain, expected)]:
        module(3.0).backward()
        optimizer.step()

    for name in SHAPES:
        assert torch.equal(parts.ddp.module.get_parameter(name), plain.get_parameter(name)), name


def test_one_group_has_all_parameters_when_none_is_given(tmp_path):
    import_dp_zero(state_of(), tmp_path)

    values = mb.open_checkpoint(tmp_path).values

    assert values["optimizer"]["groups"] == [{"params": ["a", "b", "c"], "hyperparameters": {"amsgrad": False}}]


def test_weights_alone_are_taken_without_an_optimizer(tmp_path):
    parts = run_of(dtype=torch.bfloat16)

    import_dp_zero(state_of(torch.bfloat16), tmp_path)
    mb.load_checkpoint(tmp_path, parts.ddp)

    for name, shape in SHAPES.items():
        assert torch.equal(parts.ddp.module.get_parameter(name), values_of(name, "param").view(shape).bfloat16())


def test_another_dtype_takes_cast_and_a_wider_model_the_main_parameters(tmp_path):
    parts = run_of(dtype=torch.float32)
    import_dp_zero(state_of(torch.bfloat16), tmp_path, groups=GROUPS)

    with pytest.raises(CheckpointMismatchError, match="is bfloat16 in the checkpoint and float32 here; cast=True"):
        mb.load_checkpoint(tmp_path, parts.ddp, parts.optimizer)
    mb.load_checkpoint(tmp_path, parts.ddp, parts.optimizer, cast=True)

    check_tensors(KeptInMemory([to_host(capture(parts))]), torch.float32)


class Only(torch.nn.Module):
    def __init__(self, shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))


def test_experts_are_in_a_state_of_their_own_behind_the_dense_ones(tmp_path):
    shapes = {"a": (3,), "b": (2, 2)}
    layout = layout_of(shapes=shapes, groups={"a": "expert"})
    assert [buffer.key.group for buffer in layout.buffers] == ["expert", "dense"]
    states = [
        {"buckets_coalesced": True, 0: {(torch.float32,) * 2: {key: values_of(name, key) for key in KEYS}}} for name in "ba"
    ]
    ddp = mb.DistributedDataParallel(Only(shapes), communicator=LocalCommunicator())

    import_dp_zero(DpZeroState(param_state=states, layout=layout, step=1), tmp_path)
    mb.load_checkpoint(tmp_path, ddp)

    assert torch.equal(ddp.module.a, values_of("a", "param"))
    assert torch.equal(ddp.module.b, values_of("b", "param").view(2, 2))


def test_weights_prove_a_layout_that_sizes_cannot_tell_from_another(tmp_path):
    flat = torch.zeros(68)
    flat[:4], flat[64:] = 1.0, 2.0  # y at 0:4, x at 64:68
    param_state = {"buckets_coalesced": True, 0: {(torch.float32,) * 2: dict.fromkeys(KEYS, flat)}}
    weights = {"x": torch.full((4,), 2.0), "y": torch.full((4,), 1.0)}
    right, swapped = layout_of(shapes={"x": (4,), "y": (4,)}), layout_of(shapes={"y": (4,), "x": (4,)})

    import_dp_zero(DpZeroState(param_state=param_state, layout=right, step=1, weights=weights), tmp_path)
    with pytest.raises(CheckpointMismatchError, match="or the layout is another"):
        import_dp_zero(DpZeroState(param_state=param_state, layout=swapped, step=2, weights=weights), tmp_path)


def with_flats(**changes):
    return {"param_state": {"buckets_coalesced": True, 0: {(torch.float32,) * 2: {**flats(), **changes}}}}


def marked(index):
    values = flats()["exp_avg"]
    values[index] = 1e-30
    return with_flats(exp_avg=values)


PROBLEMS = {
    "no state": ({"param_state": None}, "is not the result of get_parameter_state_dp_zero()"),
    "a list with a hole": (
        {"param_state": [state_of().param_state, None]},
        "is not the result of get_parameter_state_dp_zero()",
    ),
    "an older format": ({"param_state": {0: {torch.float32: {}}}}, "a dict with 'buckets_coalesced'"),
    "a buffer too many": (
        {"param_state": [state_of().param_state] * 2},
        "it has 2 buffers, and the layout has 1: dense/float32",
    ),
    "another dtype": (
        {"layout": layout_of(torch.bfloat16)},
        "and not one dict for (torch.bfloat16, torch.float32), the dtypes of parameters and gradients",
    ),
    "a buffer of None": ({"param_state": {"buckets_coalesced": True, 0: None}}, "the state is None, and not one dict for"),
    "a buffer without values": (
        {"param_state": {"buckets_coalesced": True, 0: {(torch.float32,) * 2: None}}},
        "the state is {(torch.float32, torch.float32): None}, and not one dict for",
    ),
    # One bucket: c at 0:70, b at 128:132, a at 192:195.
    "other buckets": (
        {"layout": layout_of(bucket_size=10_000)},
        "'param' is float32 (137,), and the layout has a flat float32 tensor of 195 elements, in buckets of 195",
    ),
    "a value in a gap": (marked(133), "'exp_avg' is not zero in 74:134, where the layout has no parameter"),
    # a would be where b is, with a gap behind it from 73.
    "another order": (
        {"layout": layout_of(shapes={"b": (2, 2), "a": (3,), "c": (70,)})},
        "a flat float32 tensor of 138 elements, in buckets of 70, 68",
    ),
    "no moments": (with_flats(exp_avg_sq=None), "'exp_avg_sq' is NoneType, and the layout has a flat float32 tensor of 137"),
    "moments in bfloat16": (
        with_flats(exp_avg=torch.zeros(137).bfloat16()),
        "'exp_avg' is bfloat16 (137,), and the layout has a flat float32",
    ),
    "half a step": ({"step": 2.5}, "the step is 2.5, and must be a whole number"),
    "no step": ({"step": float("nan")}, "the step is nan, and must be a whole number"),
    "a weight that is no tensor": ({"weights": {"x._extra_state": b""}}, "of the weights, 'x._extra_state' are no tensors"),
    "a weight of another step": (
        {"weights": {**OTHERS, "a": torch.zeros(3)}},
        "the weight 'a' is not the rounded main parameter",
    ),
    "a weight of another shape": (
        {"weights": {**OTHERS, "a": torch.zeros(4)}},
        "the weight 'a' is float32 (4,), and float32 (3,) in the layout",
    ),
    "an unknown parameter": (
        {"layout": layout_of(shapes={"other" if name == "a" else name: shape for name, shape in SHAPES.items()})},
        "the layout has 'other', and no group of the optimizer has",
    ),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_what_does_not_fit_is_named_and_nothing_is_written(tmp_path, case):
    changes, text = PROBLEMS[case]

    with pytest.raises(CheckpointMismatchError) as raised:
        import_dp_zero(state_of(**changes), tmp_path / "run", groups=GROUPS)

    assert text in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_chunks_whose_parameters_have_the_same_names_are_refused(tmp_path):
    state = state_of()
    twice = {**state.param_state, 1: {(torch.float32,) * 2: flats()}}
    chunks = state_of(param_state=twice, layout=mb.ModelLayout(state.layout.buffers * 2))

    with pytest.raises(CheckpointMismatchError, match="the layout has several parameters of one name: 'a', 'b', 'c'"):
        import_dp_zero(chunks, tmp_path / "run")


def test_weights_that_are_what_main_parameters_round_to_are_taken(tmp_path):
    weights = {name: values_of(name, "param").view(shape).bfloat16() for name, shape in SHAPES.items()}
    parts = run_of(dtype=torch.bfloat16)

    import_dp_zero(state_of(torch.bfloat16, weights={**OTHERS, **weights}), tmp_path, groups=GROUPS)
    mb.load_checkpoint(tmp_path, parts.ddp, parts.optimizer)

    check_tensors(KeptInMemory([to_host(capture(parts))]), torch.bfloat16)


def test_a_run_with_amsgrad_continues_without_it(tmp_path):
    parts = run_of(build=lambda groups, lr: torch.optim.AdamW(groups, lr, amsgrad=True))
    import_dp_zero(state_of(), tmp_path, groups=GROUPS)

    mb.load_checkpoint(tmp_path, parts.ddp, parts.optimizer)

    assert [group["amsgrad"] for group in parts.optimizer.param_groups] == [False, False]
    parts.ddp(3.0).backward()
    parts.optimizer.step()


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([["a", "b"]], "the layout has 'c', and no group of the optimizer has"),
        ([["a", "b", "c", "x"]], "the groups of the optimizer have 'x' twice, or the layout has not"),
        ([["a", "b"], ["b", "c"]], "the groups of the optimizer have 'b' twice, or"),
    ],
)
def test_groups_that_are_not_of_these_parameters_are_refused(tmp_path, groups, text):
    with pytest.raises(CheckpointMismatchError, match=text):
        import_dp_zero(state_of(), tmp_path / "run", groups=[{"params": names} for names in groups])

    assert not (tmp_path / "run").exists()
