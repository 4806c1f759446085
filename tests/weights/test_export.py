"""``ddp.export_weights`` and ``ddp.import_weights``, in one process and in loopback worlds."""

import copy
import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megabucket as mb
from megabucket.buffer import ParamPhase
from megabucket.errors import (
    CallMismatchError,
    ConfigError,
    LayoutError,
    LayoutMismatchError,
    MegabucketError,
    PeerFailedError,
    PhaseError,
)
from megabucket.layout import ParamIdentity, plain_identity
from megabucket.testing import LoopbackWorld

BOTH = pytest.mark.parametrize("whole", [False, True], ids=["own", "whole"])
SHARDED = {"use_distributed_optimizer": True, "overlap_param_gather": True}


class Mixed(torch.nn.Module):
    """A channels-last convolution, running statistics, a shared layer, a tied weight, and frozen parts."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, dtype=dtype).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(8, dtype=dtype)
        self.up = torch.nn.Linear(8, 300, dtype=dtype)
        self.down = torch.nn.Linear(300, 8, bias=False, dtype=dtype)
        self.again, self.tied = self.norm, torch.nn.Linear(8, 300, dtype=dtype)
        self.tied.weight = self.up.weight
        self.scale = torch.nn.Parameter(torch.tensor(2.0, dtype=dtype))
        self.frozen = torch.nn.Conv2d(2, 3, 2, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_(False)
        self.register_buffer("table", torch.arange(12).reshape(3, 4).t())
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, images):
        hidden = self.again(self.norm(self.conv(images))).mean((2, 3))
        return (self.down(self.tied(hidden) + self.up(hidden)) * self.scale).square().mean()


def images(rank, step, dtype=torch.float32):
    return torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def sent(chunks):
    """What another process receives: headers through JSON, copies of the tensors."""
    return [mb.WeightChunk.from_header(json.loads(json.dumps(one.header())), one.tensor.clone()) for one in chunks]


def bits(weights):
    return {name: value.detach().clone() for name, value in weights.items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def train(ddp, optimizer, rank, steps, dtype=torch.float32):
    for step in steps:
        ddp(images(rank, step, dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrapped(**fields):
    torch.manual_seed(0)
    ddp = mb.DistributedDataParallel(Mixed(), mb.DistributedDataParallelConfig(bucket_size=500, **fields))
    return ddp, mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), 1e-2), ddp)


# Chunks #


@BOTH
def test_chunks_of_one_rank_are_views_of_the_buffer_and_hold_the_state_dict(whole):
    ddp, optimizer = wrapped()
    train(ddp, optimizer, 0, range(2))

    chunks = list(ddp.export_weights(max_bytes=2048, whole=whole))

    (buffer,) = ddp.param_and_grad_buffers
    begin, end = buffer.param_data.data_ptr(), buffer.param_data.data_ptr() + buffer.param_data.nbytes
    trained = set(ddp.layout.buffers[0].params)
    of_buffer = [one for one in chunks if {entry.name for entry in one.entries} <= trained]
    assert all(begin <= one.tensor.data_ptr() and one.tensor.data_ptr() + one.tensor.nbytes <= end for one in of_buffer)
    assert {entry.name for one in of_buffer for entry in one.entries} == trained
    assert all(one.tensor.is_contiguous() and one.tensor.nbytes <= 2048 and not one.tensor.requires_grad for one in chunks)
    weights = ddp.state_dict()
    assert_equal(mb.named_weights(sent(chunks)), weights)
    strides = {entry.name: tensor.stride() for entry, tensor in mb.joined_weights(chunks)}
    assert strides["conv.weight"] == ddp.module.conv.weight.stride() == (27, 1, 9, 3)
    assert strides["frozen.weight"] == ddp.module.frozen.weight.stride() == (8, 1, 4, 2)
    Mixed().load_state_dict(mb.named_weights(chunks))


@BOTH
def test_floating_weights_are_converted_and_others_are_not(whole):
    ddp, optimizer = wrapped()
    train(ddp, optimizer, 0, range(2))

    chunks = list(ddp.export_weights(torch.bfloat16, max_bytes=2048, whole=whole))

    assert {one.tensor.dtype for one in chunks} == {torch.bfloat16, torch.int64}
    assert all(one.tensor.nbytes <= 2048 for one in chunks)
    expected = {name: value.bfloat16() if value.is_floating_point() else value for name, value in ddp.state_dict().items()}
    assert_equal(mb.named_weights(chunks), expected)


@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=8),
    max_bytes=st.integers(1024, 20_000),
    dtype=st.sampled_from([None, torch.float64, torch.bfloat16]),
)
def test_chunks_hold_every_element_once_and_no_more_than_max_bytes(shapes, max_bytes, dtype):
    module = torch.nn.Module()
    for index, shape in enumerate([*shapes, [3]]):
        values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        module.register_parameter(f"p{index}", torch.nn.Parameter(values, requires_grad=index % 3 > 0 or shape == [3]))
    ddp = mb.DistributedDataParallel(module)

    chunks = list(ddp.export_weights(dtype, max_bytes=max_bytes))

    assert all(one.tensor.nbytes <= max_bytes for one in chunks)
    ranges = [(e.name, e.start, e.stop) for one in chunks for e in one.entries]
    assert len({(name, start) for name, start, _ in ranges}) == len(ranges)
    numels = {name: param.numel() for name, param in module.named_parameters()}
    assert {n: sum(stop - start for name, start, stop in ranges if name == n) for n in numels} == numels
    expected = {name: value.to(dtype or value.dtype) for name, value in module.state_dict().items()}
    assert_equal(mb.named_weights(chunks), expected)


def test_a_header_belongs_to_its_tensor():
    ddp, _ = wrapped()
    first, second, *_ = ddp.export_weights(max_bytes=2048)

    assert mb.WeightChunk.from_header(first.header()).tensor.shape == first.tensor.shape
    with pytest.raises(LayoutError, match="it belongs to another chunk"):
        mb.WeightChunk.from_header(first.header(), second.tensor)


def test_a_range_that_is_lost_on_the_way_is_named():
    ddp, _ = wrapped()
    chunks = list(ddp.export_weights(max_bytes=2048))  # down.weight, the first: 2,400 elements in ranges of 512
    (place, *_) = [index for index, one in enumerate(chunks) for entry in one.entries if entry.start > 0]

    with pytest.raises(LayoutError, match=r"elements 512 to 1024 of 'down\.weight'"):
        mb.named_weights([*chunks[:place], *chunks[place + 1 :]])
    with pytest.raises(LayoutError, match=r"elements 512 to 2400 of 'down\.weight'"):
        mb.named_weights(chunks[:place])


@pytest.mark.parametrize("arguments", [{"dtype": torch.int8}, {"dtype": "bf16"}, {"max_bytes": 0}, {"max_bytes": 1e9}])
def test_wrong_arguments_are_refused(arguments):
    ddp, _ = wrapped()

    with pytest.raises(ConfigError, match=next(iter(arguments))):
        ddp.export_weights(**arguments)


# Phases #


def test_parameters_that_are_still_gathered_arrive_before_a_chunk_leaves_or_is_written():
    world = LoopbackWorld(2, completion="manual", timeout_s=20)
    torch.manual_seed(0)
    model = Mixed()

    def program(rank):
        config = mb.DistributedDataParallelConfig(bucket_size=500, **SHARDED)
        ddp = mb.DistributedDataParallel(copy.deepcopy(model), config, communicator=world.communicator(rank))
        optimizer = mb.DistributedOptimizer(torch.optim.SGD(ddp.parameters(), 0.1), ddp)
        ddp(images(rank, 0)).backward()
        optimizer.step()
        assert {group.param_phase for group in ddp.bucket_groups} == {ParamPhase.IN_FLIGHT}
        chunks = sent(ddp.export_weights(max_bytes=4096))
        exported = bits(ddp.state_dict())
        optimizer.zero_grad()
        ddp(images(rank, 1)).backward()
        optimizer.step()
        assert {group.param_phase for group in ddp.bucket_groups} == {ParamPhase.IN_FLIGHT}
        ddp.import_weights(chunks)
        return mb.named_weights(chunks), exported, bits(ddp.state_dict())

    for found, expected, imported in world.run(program):
        assert_equal(found, expected)
        assert_equal(imported, expected)
        assert all(value.isfinite().all() for value in found.values())
        assert not torch.equal(found["up.weight"], model.up.weight)


@pytest.mark.parametrize("change", ["step", "load", "rebuild", "detach"])
@BOTH
def test_weights_that_change_between_two_chunks_are_not_mixed(change, whole):
    ddp, optimizer = wrapped()
    chunks = ddp.export_weights(max_bytes=2048, whole=whole)
    next(chunks)

    if change == "step":
        train(ddp, optimizer, 0, [0])
    elif change == "load":
        ddp.load_state_dict(bits(ddp.state_dict()))
    else:
        getattr(ddp, change)()

    with pytest.raises(PhaseError, match=r"weights have changed|detached"):
        next(chunks)


@BOTH
def test_nothing_leaves_or_comes_in_the_middle_of_a_step(whole):
    ddp, optimizer = wrapped()
    chunks = list(ddp.export_weights(whole=whole))
    ddp(images(0, 0)).backward()

    with pytest.raises(PhaseError, match="in the middle of a step"):
        ddp.export_weights(whole=whole)
    with pytest.raises(PhaseError, match="in the middle of a step"):
        ddp.import_weights(chunks)
    optimizer.step()
    optimizer.zero_grad()


# In #


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fields", [{}, {"use_distributed_optimizer": True}, SHARDED], ids=["ddp", "sharded", "overlapped"])
@BOTH
def test_a_round_trip_is_bitwise_and_training_goes_on_as_if_nothing_had_happened(dtype, fields, whole):
    world = LoopbackWorld(2, timeout_s=20)
    torch.manual_seed(0)
    model = Mixed(dtype)

    def program(rank):
        config = mb.DistributedDataParallelConfig(bucket_size=500, **fields)
        ddp = mb.DistributedDataParallel(copy.deepcopy(model), config, communicator=world.communicator(rank))
        optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), 1e-2), ddp)
        train(ddp, optimizer, rank, range(3), dtype)
        chunks = sent(ddp.export_weights(max_bytes=4096, whole=whole))
        exported = bits(ddp.state_dict())
        train(ddp, optimizer, rank, range(3, 5), dtype)
        moved = bits(ddp.state_dict())
        ddp.import_weights(chunks)
        imported = bits(ddp.state_dict())
        train(ddp, optimizer, rank, range(5, 6), dtype)
        return exported, moved, imported, bits(ddp.state_dict())

    def with_load(rank):
        """The same with ``load_state_dict``, which is the oracle for what main parameters and moments do."""
        config = mb.DistributedDataParallelConfig(bucket_size=500, **fields)
        ddp = mb.DistributedDataParallel(copy.deepcopy(model), config, communicator=world.communicator(rank))
        optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), 1e-2), ddp)
        train(ddp, optimizer, rank, range(3), dtype)
        weights = bits(ddp.state_dict())
        train(ddp, optimizer, rank, range(3, 5), dtype)
        ddp.load_state_dict(weights)
        train(ddp, optimizer, rank, range(5, 6), dtype)
        return bits(ddp.state_dict())

    results, loaded = world.run(program), world.run(with_load)

    for (exported, moved, imported, after), expected in zip(results, loaded, strict=True):
        assert_equal(imported, exported)
        assert not torch.equal(moved["up.weight"], exported["up.weight"])
        assert_equal(after, expected)


def without(name):
    def change(chunks):
        return [mb.WeightChunk(one.tensor, tuple(e for e in one.entries if e.name != name)) for one in chunks]

    return change


def with_entry(of, **fields):
    def change(chunks):
        return [
            mb.WeightChunk(one.tensor, tuple(replace(e, **fields) if e.name == of else e for e in one.entries))
            for one in chunks
        ]

    return change


CHANGES = {
    "missing": (without("down.weight"), r"hold 0 of the 2400 elements of 'down\.weight'"),
    "no buffer": (without("norm.running_mean"), r"hold 0 of the 8 elements of 'norm\.running_mean'"),
    "renamed": (with_entry("scale", name="other"), r"hold 0 of the 1 elements of 'scale'"),
    "in another shape": (
        with_entry("up.bias", shape=(30, 10), stride=(10, 1), offset=(0, 0), global_shape=(30, 10)),
        r"'up\.bias' has the shape \(30, 10\) in the chunks, and \(300,\) in the model",
    ),
    "a piece": (
        with_entry("up.bias", shape=(100,), stop=100),
        r"hold 100 of the 300 elements of 'up\.bias'",
    ),
    "in another dtype": (
        lambda chunks: [mb.WeightChunk(one.tensor.to(torch.float16), one.entries) for one in chunks],
        r"has the dtype torch\.float16 in the chunks, and torch\.float32 in the model",
    ),
    "unknown": (
        lambda chunks: [*chunks, mb.WeightChunk(torch.zeros(3), (mb.WeightEntry("new", (3,), (1,), (0,), (3,), stop=3),))],
        "'new' is in the chunks, and in the model of no rank",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_chunks_that_do_not_fit_are_named_and_nothing_is_written(change):
    ddp, optimizer = wrapped()
    chunks = sent(ddp.export_weights())
    train(ddp, optimizer, 0, range(1))
    before = bits(ddp.state_dict())
    make, match = CHANGES[change]

    with pytest.raises(LayoutError, match=match):
        ddp.import_weights(make(chunks))

    assert_equal(ddp.state_dict(), before)
    ddp.import_weights(chunks)


def test_chunks_that_do_not_fit_on_one_rank_are_written_on_none():
    world = LoopbackWorld(2, timeout_s=20)

    def program(rank):
        ddp = mb.DistributedDataParallel(Mixed(), communicator=world.communicator(rank))
        before = bits(ddp.state_dict())
        chunks = sent(ddp.export_weights())
        for one in chunks:
            one.tensor.zero_()
        with pytest.raises(
            PeerFailedError, match=r"rank 1 failed in import_weights\(\): LayoutError: .*'down\.weight'"
        ) as raised:
            ddp.import_weights(without("down.weight")(chunks) if rank else chunks)
        assert_equal(ddp.state_dict(), before)
        ddp.import_weights(chunks)
        assert not ddp.state_dict()["down.weight"].any()
        return raised.value

    torch.manual_seed(0)
    world.run(program)


# Several ranks #


def test_ranks_that_give_different_arguments_all_raise_that():
    world = LoopbackWorld(2, timeout_s=20)

    def program(rank):
        ddp = mb.DistributedDataParallel(Mixed(), communicator=world.communicator(rank))
        with pytest.raises(LayoutMismatchError, match="max_bytes") as raised:
            ddp.export_weights(whole=True, max_bytes=2048 * (1 + rank))
        with pytest.raises(PeerFailedError, match=r"rank 1 failed .* floating dtype"):
            ddp.export_weights(torch.int8 if rank else None, whole=True)
        assert len(list(ddp.export_weights(whole=True))) == 3  # the buffer, other floating values, integers
        return str(raised.value)

    torch.manual_seed(0)
    assert len(set(world.run(program))) == 1


class Parallel(torch.nn.Module):
    """A layer that two ranks cut along ``dim`` of its weight, a layer that they both hold, and an expert of each.

    Args:
        place: 0 or 1; ``None``: the whole model.
    """

    def __init__(self, place=None):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def values(*shape):
            return torch.randn(shape, generator=generator)

        cut = {"column": values(60, 40), "row": values(40, 60), "bias": values(60)}
        experts, both = [values(50, 40) for _ in range(2)], values(40, 40)
        self.cut, self.experts = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        for name, value in cut.items():
            dim = 1 if name == "row" else 0
            self.cut[name] = torch.nn.Parameter(value if place is None else value.chunk(2, dim)[place].clone())
        self.cut["bias"].requires_grad_(False)
        for number, value in enumerate(experts):
            if place is None or number == place:
                self.experts[str(number if place is None else 0)] = torch.nn.Parameter(value)
        self.both = torch.nn.Parameter(both)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        return sum((x @ param.flatten()[:4]).sum() for param in self.parameters() if param.requires_grad)

    @staticmethod
    def identity(place):
        """Return the function for ``ParallelGroups`` of a rank."""

        def identity(name, param):
            kind, _, last = name.rpartition(".")
            shape = tuple(param.shape)
            if kind == "experts":
                return ParamIdentity(f"experts.{place}", shape, (0, 0), "expert")
            if kind == "cut":
                dim = 1 if last == "row" else 0
                whole = tuple(size * (2 if index == dim else 1) for index, size in enumerate(shape))
                return ParamIdentity(name, whole, tuple(place * size if i == dim else 0 for i, size in enumerate(shape)))
            return replace(plain_identity(name, shape), copies=("tp",))

        return identity


class ParallelWorld:
    """Four ranks: ranks 0 and 1 (2 and 3) cut the model, ranks 0 and 2 (1 and 3) hold the same parts."""

    def __init__(self, identity=Parallel.identity, **fields):
        self.world = LoopbackWorld(4, timeout_s=20)
        dp, ep = ({place: self.world.subgroup([place, place + 2]) for place in range(2)} for _ in range(2))
        tp = {first: self.world.subgroup([first, first + 1]) for first in (0, 2)}

        def wrap(rank):
            place = rank % 2
            groups = mb.ParallelGroups(
                {"dense": dp[place][rank], "expert": ep[place][rank]},
                identity=identity(place),
                copies={"tp": tp[rank - place][rank]},
                norm_group=self.world.communicator(rank),
            )
            config = mb.DistributedDataParallelConfig(bucket_size=2000, **fields)
            return mb.DistributedDataParallel(Parallel(place), config, groups=groups)

        self.ddps = self.world.run(wrap)

    def run(self, program):
        return self.world.run(lambda rank: program(rank, self.ddps[rank]))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_bytes", [1024, 1 << 20])
def test_pieces_and_experts_of_four_ranks_become_the_whole_model_on_each(dtype, max_bytes):
    ranks = ParallelWorld()
    expected = {
        name: value.to(dtype or value.dtype) if value.is_floating_point() else value
        for name, value in Parallel().state_dict().items()
    }

    def program(_, ddp):
        return sent(ddp.export_weights(dtype, max_bytes=max_bytes, whole=True))

    results = ranks.run(program)

    for chunks in results:
        assert_equal(mb.named_weights(chunks), expected)
        assert all(one.tensor.nbytes <= max_bytes for one in chunks)
    # What each rank of tp has is not sent. Its two ranks hold all pieces and all experts: nothing is sent to other replicas.
    gathers = [text for text in ranks.world.schedule(0) if text.startswith("exported weights [broadcast")]
    assert len(gathers) == (1 if max_bytes > 1024 else 5)  # each matrix is larger than 1024 bytes


@pytest.mark.parametrize("fields", [{}, {"use_distributed_optimizer": True}], ids=["ddp", "sharded"])
def test_whole_tensors_and_pieces_are_imported_to_where_they_belong(fields):
    ranks = ParallelWorld(**fields)
    before = [bits(ddp.module.state_dict()) for ddp in ranks.ddps]

    def program(_, ddp):
        whole, own = (sent(ddp.export_weights(whole=whole)) for whole in (True, False))
        found = []
        for chunks in (whole, own):
            with torch.no_grad():
                for param in ddp.module.parameters():
                    param.zero_()
            ddp.note_written()
            ddp.import_weights(chunks)
            found.append(bits(ddp.state_dict()))
        return found, own

    for (found, own), expected in zip(ranks.run(program), before, strict=True):
        for weights in found:
            assert_equal(weights, expected)
        with pytest.raises(LayoutError, match=r"is a piece of shape \(.*\) at \(.*\) of a tensor of shape"):
            mb.named_weights(own)


def test_pieces_say_where_they_belong_and_nothing_is_sent():
    ranks = ParallelWorld()
    num_launched = [len(ranks.world.schedule(rank)) for rank in range(4)]
    whole = Parallel().state_dict()

    found = [{e.name: (e, t) for e, t in mb.joined_weights(ddp.export_weights())} for ddp in ranks.ddps]

    assert [len(ranks.world.schedule(rank)) for rank in range(4)] == num_launched
    assert set(found[1]) == {"cut.column", "cut.row", "cut.bias", "experts.1", "both", "count"}
    for of_rank, (name, (entry, tensor)) in itertools.chain.from_iterable(
        zip([one] * len(one), one.items(), strict=True) for one in found
    ):
        assert of_rank[name][0].global_shape == whole[name].shape
        assert torch.equal(tensor, whole[name][tuple(slice(start, stop) for start, stop in entry.box)])
    assert found[1]["cut.row"][0].offset == (0, 30)


def test_experts_that_have_one_name_on_two_ranks_are_not_taken_for_one():
    world = LoopbackWorld(2, timeout_s=20)
    alone = [world.subgroup([rank])[rank] for rank in range(2)]

    def program(rank):
        module = torch.nn.ModuleDict({"both": torch.nn.Linear(2, 2), "expert": torch.nn.Linear(2, 2)})
        groups = mb.ParallelGroups({"dense": world.communicator(rank), "expert": alone[rank]}, group_of={"expert.*": "expert"})
        ddp = mb.DistributedDataParallel(module, groups=groups)
        with pytest.raises(LayoutError, match=r"the blocks of 'expert\.weight' hold elements twice.*identity=") as raised:
            ddp.export_weights(whole=True)
        return str(raised.value)

    assert len(set(world.run(program))) == 1


def test_a_rank_that_steps_instead_of_taking_its_chunks_is_named_on_all():
    ranks = ParallelWorld()

    def program(rank, ddp):
        optimizer = mb.DistributedOptimizer(torch.optim.SGD(ddp.parameters(), 0.1), ddp, clip_grad=0.0)
        chunks = ddp.export_weights(max_bytes=1024, whole=True)
        next(chunks)
        try:
            if rank == 3:
                ddp(torch.ones(2, 4)).backward()
                optimizer.step()
            else:
                list(chunks)
        except MegabucketError as error:
            return error
        return None

    errors = ranks.run(program)

    assert all(isinstance(error, CallMismatchError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    assert "export_weights()" in str(errors[0])
    assert "rank 3" in str(errors[0])


@pytest.mark.parametrize("steps", [False, True])
def test_ranks_that_all_leave_an_export_go_on_and_the_rest_of_it_is_refused_after_a_step(steps):
    ranks = ParallelWorld()

    def program(_, ddp):
        optimizer = mb.DistributedOptimizer(torch.optim.SGD(ddp.parameters(), 0.1), ddp, clip_grad=0.0)
        chunks = ddp.export_weights(max_bytes=1024, whole=True)
        first = next(chunks).tensor
        if steps:
            ddp(torch.ones(2, 4)).backward()
            optimizer.step()
            with pytest.raises(PhaseError, match="weights have changed"):
                list(chunks)
        again = next(ddp.export_weights(max_bytes=1024, whole=True)).tensor
        return torch.equal(first, again)

    assert ranks.run(program) == [not steps] * 4


def random_blocks(number):
    """Return tensors, and for each its quadrants, at random cuts along two random dimensions, or of one. Some are empty."""
    whole, quadrants = {}, {}
    for index in range(6):
        shape = [number(1, 30) for _ in range(number(1, 4))]
        cuts = [(dim, [0, number(0, shape[dim]), shape[dim]]) for dim in (number(0, len(shape) - 1) for _ in range(2))]
        whole[f"{index}"] = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
        quadrants[f"{index}"] = by_rank = []
        for places in itertools.product(range(2), repeat=2):
            box = [(0, size) for size in shape]
            for (dim, cut), place in zip(cuts, places, strict=True):
                start, stop = max(box[dim][0], cut[place]), min(box[dim][1], cut[place + 1])
                box[dim] = (start, max(start, stop))
            by_rank.append(box)
    return whole, quadrants


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 200))])
def test_blocks_of_any_cut_are_put_together_and_cut_again(seed):
    random = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=random))

    whole, boxes = random_blocks(number)
    max_bytes, dtype = number(1024, 20_000), [None, torch.float16][number(0, 1)]
    world = LoopbackWorld(4, timeout_s=20)
    alone = [world.subgroup([rank])[rank] for rank in range(4)]

    def program(rank):
        module = torch.nn.Module()
        for name, value in whole.items():
            own = value[tuple(slice(start, stop) for start, stop in boxes[name][rank])].clone()
            module.register_parameter(name, torch.nn.Parameter(own))
        module.register_parameter("alone", torch.nn.Parameter(torch.ones(3)))

        def identity(name, param):
            if name == "alone":
                return replace(plain_identity(name, (3,)), global_name=f"alone.{rank}")
            return ParamIdentity(name, tuple(whole[name].shape), tuple(start for start, _ in boxes[name][rank]))

        groups = mb.ParallelGroups({"dense": alone[rank]}, identity=identity, norm_group=world.communicator(rank))
        ddp = mb.DistributedDataParallel(module, groups=groups)
        before = bits(module.state_dict())
        chunks = sent(ddp.export_weights(dtype, max_bytes=max_bytes, whole=True))
        if dtype is None:
            with torch.no_grad():
                for param in module.parameters():
                    param.zero_()
            ddp.import_weights(chunks)
            assert_equal(module.state_dict(), before)
        return chunks

    expected = {**whole, **{f"alone.{rank}": torch.ones(3) for rank in range(4)}}
    for chunks in world.run(program):
        assert all(one.tensor.nbytes <= max_bytes for one in chunks)
        assert_equal(mb.named_weights(chunks), {name: value.to(dtype or value.dtype) for name, value in expected.items()})


def test_stages_of_a_pipeline_become_one_model_and_their_tied_weight_is_sent_once():
    world = LoopbackWorld(2, timeout_s=20)
    alone, both = [world.subgroup([rank])[rank] for rank in range(2)], world.subgroup([0, 1])

    def program(rank):
        tied = torch.nn.Parameter(torch.arange(12.0).reshape(4, 3))
        module = torch.nn.ParameterDict(
            {"head" if rank else "embedding": tied, "layer": torch.nn.Parameter(torch.ones(3) * rank)}
        )

        def identity(name, param):
            if name == "layer":
                return plain_identity(f"layers.{rank}", tuple(param.shape))
            return ParamIdentity("embedding", (4, 3), (0, 0), copies=("embd",), partial=("embd",))

        groups = mb.ParallelGroups(
            {"dense": alone[rank]}, identity=identity, copies={"embd": both[rank]}, norm_group=world.communicator(rank)
        )
        config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True)
        ddp = mb.DistributedDataParallel(module, config, groups=groups)
        return {entry.name: tensor.tolist() for one in ddp.export_weights(whole=True) for entry, tensor in one.tensors()}

    expected = {"embedding": torch.arange(12.0).reshape(4, 3).tolist(), "layers.0": [0.0] * 3, "layers.1": [1.0] * 3}
    assert world.run(program) == [expected, expected]


class Quantized(torch.Tensor):
    """Its values are not what they seem."""


def test_what_chunks_cannot_hold_is_refused_by_name():
    module = torch.nn.Linear(3, 3)
    module.register_buffer("table", torch.eye(3).to_sparse())
    ddp = mb.DistributedDataParallel(module, mb.DistributedDataParallelConfig(init_sync=False))

    with pytest.raises(ConfigError, match=r"'table' is a Tensor with layout torch\.sparse_coo"):
        ddp.export_weights()
    module.table = torch.ones(3).as_subclass(Quantized)
    with pytest.raises(ConfigError, match="'table' is a Quantized"):
        ddp.export_weights()
    del module.table
    module.late = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(PhaseError, match="'late' came into the module after wrapping"):
        ddp.export_weights()
    module.late = None
    assert mb.named_weights(ddp.export_weights()).keys() == {"weight", "bias"}


def test_weights_leave_and_come_in_inference_mode():
    ddp, optimizer = wrapped()
    before = bits(ddp.state_dict())

    with torch.inference_mode():
        chunks = list(ddp.export_weights(whole=True))
        chunks = [mb.WeightChunk(one.tensor + 1, one.entries) for one in chunks]
        ddp.import_weights(chunks)

    assert_equal(ddp.state_dict(), {name: value + 1 for name, value in before.items()})
    train(ddp, optimizer, 0, range(1))


@pytest.mark.parametrize("is_distributed", [False, True])
def test_weights_leave_between_the_step_and_zero_grad(is_distributed):
    ddp = mb.DistributedDataParallel(Mixed())
    sgd = torch.optim.SGD(ddp.parameters(), 0.1)
    optimizer = mb.DistributedOptimizer(sgd, ddp) if is_distributed else sgd
    for step in range(2):
        ddp(images(0, step)).backward()
        optimizer.step()
        assert_equal(mb.named_weights(ddp.export_weights()), ddp.state_dict())
        optimizer.zero_grad()


def test_who_exports_nothing_loads_nothing_of_it():
    program = (
        "import sys, torch, megabucket as mb\n"
        "ddp = mb.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "optimizer = mb.DistributedOptimizer(torch.optim.SGD(ddp.parameters(), 0.1), ddp)\n"
        "ddp(torch.ones(1, 2)).sum().backward()\n"
        "optimizer.step()\n"
        "assert not [name for name in sys.modules if name.startswith('megabucket.weights')]\n"
        "ddp.export_weights()\n"
        "assert 'megabucket.weights.export' in sys.modules\n"
    )

    subprocess.run([sys.executable, "-c", program], check=True)
