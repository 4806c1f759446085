"""Shards put together again are what was cut, bit by bit, and what is cut from that are the same shards."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabucket import DistributedDataParallelConfig, ParamSpec, build_layout
from megabucket.buffer import ParamAndGradBuffer, _ParamAndGradBucketGroup
from megabucket.config.resolve import resolve_step
from megabucket.ddp.groups import single
from megabucket.ddp.step import GradSync
from megabucket.errors import OptimizerParametersError, PeerFailedError
from megabucket.layout.segments import plan_segments
from megabucket.optim.shards import MAIN, MainShard
from megabucket.optim.state_dict import ShardHolder, StateCutter, WholeState, state_pieces, unshard
from megabucket.testing import LoopbackWorld, layout_inputs, param_specs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class RankState:
    """One rank's buffers, shards and optimizer state, cut from state of whole parameters."""

    def __init__(self, layout, params, group_of, whole, *, communicator, config):
        self.params = params
        self.buffers = [ParamAndGradBuffer(buffer, params) for buffer in layout.buffers]
        policy = resolve_step(config)
        groups = [
            _ParamAndGradBucketGroup([bucket], index=index, communicator=communicator, policy=policy, divisor=communicator.size)
            for index, bucket in enumerate(bucket for buffer in self.buffers for bucket in buffer.buckets)
        ]
        sync = GradSync(groups, policy, ranks=single(communicator, policy))
        self.holder = ShardHolder(self.buffers, sync, config.use_distributed_optimizer)
        self.group_of = group_of
        self.shards, self.state = self.cut(whole)

    def cut(self, whole):
        cutter = StateCutter(whole, self.params)
        signature_of = {name: cutter.signature(name) for name in self.params}
        rank, is_sharded = self.holder.sync.ranks.step.rank, self.holder.is_sharded
        shards = [
            MainShard(segment, buffer)
            for buffer in self.buffers
            for segment in plan_segments(
                buffer.layout, self.group_of, rank=rank, is_sharded=is_sharded, signature_of=signature_of
            )
        ]
        for shard in shards:
            cutter.restore_main_values(shard)
        return shards, {shard.main: cutter.state_of(shard) for shard in shards}

    def unshard(self):
        return unshard(self.shards, self.state, self.holder)


def random_bits(shape, dtype, generator):
    """Every bit pattern, NaN and infinities included."""
    numel = torch.Size(shape).numel()
    bits = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(shape)


def random_state(kind, param, generator):
    """State as optimizers make it, and odder: other dtypes than the parameter's, numbers of several types."""
    main = torch.float32 if param.dtype.itemsize < 4 else param.dtype
    order = torch.channels_last if param.dim() == 4 and not param.is_contiguous() else torch.contiguous_format

    def elements(dtype):
        return random_bits(param.shape, dtype, generator).to(memory_format=order)

    if kind == 0:
        return {}
    if kind == 1:
        return {"momentum_buffer": elements(main)}
    if kind == 2:
        return {"step": torch.tensor(3.0), "exp_avg": elements(main), "exp_avg_sq": elements(torch.bfloat16)}
    return {
        "step": torch.tensor(7),
        "mask": elements(torch.uint8),
        "rate": 0.1,
        "calls": 4,
        "name": "x",
        "on": True,
        "not": None,
    }


def bits(value):
    if not isinstance(value, torch.Tensor):
        return type(value), repr(value)
    return value.dtype, tuple(value.shape), value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_same_state(found, expected, names):
    for name, param in names.items():
        mine, wanted = found.get(param, {}), expected.get(param, {})
        assert {key: bits(value) for key, value in mine.items()} == {key: bits(value) for key, value in wanted.items()}, name
        assert list(mine) == list(wanted)


@st.composite
def cases(draw):
    specs = param_specs(max_params=8, max_numel=300, groups=["dense"])
    size = draw(st.integers(1, 4))
    case = draw(layout_inputs(specs=specs, dp_size=st.just(size)))
    kinds = draw(st.lists(st.integers(0, 3), min_size=len(case.specs), max_size=len(case.specs)))
    groups = draw(st.lists(st.integers(0, 1), min_size=len(case.specs), max_size=len(case.specs)))
    return case, kinds, groups, draw(st.integers(0, 2**32))


def new_params(specs, generator):
    params = {}
    for spec in specs:
        values = torch.randn(spec.shape, generator=generator).to(DTYPES[spec.dtype])
        if values.dim() == 4:
            values = values.to(memory_format=torch.channels_last)
        params[spec.name] = torch.nn.Parameter(values)
    return params


@given(case=cases())
def test_cutting_and_putting_together_is_the_identity_on_every_rank(case):
    (specs, config, size, _), kinds, groups, seed = case
    layout = build_layout(specs, config, dp_size=size)
    world = LoopbackWorld(size)

    def play(rank):
        generator = torch.Generator().manual_seed(seed)  # the same values on every rank
        params = new_params(specs, generator)
        state = {param: random_state(kind, param, generator) for param, kind in zip(params.values(), kinds, strict=True)}
        mains = {}
        for param in params.values():
            if param.dtype.itemsize < 4:  # finer values that round to the parameter's
                mains[param] = param.detach().float() * (1 + 2.0**-13 * torch.rand(param.shape, generator=generator))
                mains[param] = torch.where(mains[param].to(param.dtype) == param, mains[param], param.detach().float())
        dtypes = {param: torch.float32 if param.dtype.itemsize < 4 else param.dtype for param in params.values()}
        ranks = RankState(
            layout,
            params,
            dict(zip(params, groups, strict=True)),
            WholeState(state, mains, dtypes),
            communicator=world.communicator(rank),
            config=config,
        )

        found = ranks.unshard()
        again = ranks.cut(found)

        in_shards = {name: param for name, param in params.items() if param.numel()}
        assert_same_state(found.values, state, in_shards)
        for name, main in ((name, mains[param]) for name, param in in_shards.items() if param in mains):
            assert bits(found.main_values[params[name]]) == bits(main), name
            assert found.main_values[params[name]].stride() == params[name].stride()
        assert [shard.segment for shard in again[0]] == [shard.segment for shard in ranks.shards]
        for before, after in zip(ranks.shards, again[0], strict=True):
            assert bits(after.main) == bits(before.main)
            state_before, state_after = ranks.state[before.main], again[1][after.main]
            assert {key: bits(value) for key, value in state_after.items()} == {k: bits(v) for k, v in state_before.items()}

    world.run(play)


def two_ranks(state_of, *, numels=(100, 100), bucket_size=None):
    """Two ranks that own shards of vectors ``a``, ``b``; ``state_of(rank, shard)`` is what each holds. Returns the ranks."""
    specs = [ParamSpec(name, (numel,)) for name, numel in zip("ab", numels, strict=True)]
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=bucket_size)
    layout = build_layout(specs, config, dp_size=2)
    world = LoopbackWorld(2)

    def play(rank):
        params = {spec.name: torch.nn.Parameter(torch.zeros(spec.shape)) for spec in specs}
        ranks = RankState(
            layout, params, {"a": 0, "b": 0}, WholeState({}), communicator=world.communicator(rank), config=config
        )
        ranks.state = {shard.main: state_of(rank, shard) for shard in ranks.shards}
        return ranks

    return world, world.run(play)


def test_pieces_are_the_ranges_of_each_key_with_main_values_last():
    specs = [ParamSpec("a", (200,), "bfloat16"), ParamSpec("b", (100,), "bfloat16")]
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    layout = build_layout(specs, config, dp_size=2)
    world = LoopbackWorld(2)

    def play(rank):
        params = {spec.name: torch.nn.Parameter(torch.ones(spec.shape, dtype=torch.bfloat16)) for spec in specs}
        state = {param: {"m": torch.ones_like(param), "step": 3} for param in params.values()}
        communicator = world.communicator(rank)
        ranks = RankState(layout, params, {"a": 0, "b": 0}, WholeState(state), communicator=communicator, config=config)
        pieces = list(state_pieces(ranks.shards, ranks.state))
        assert all(len(piece.values) == piece.in_param.numel for piece in pieces)
        assert all(piece.like.shape == params[piece.param].shape for piece in pieces)
        return [(piece.param, tuple(piece.in_param), piece.key) for piece in pieces]

    # b is at 0:100 and a at 128:328, in one bucket of 384 elements: each rank has 192 of them.
    assert world.run(play) == [
        [("b", (0, 100), "m"), ("b", (0, 100), MAIN), ("a", (0, 64), "m"), ("a", (0, 64), MAIN)],
        [("a", (64, 200), "m"), ("a", (64, 200), MAIN)],
    ]


class TestExamples:
    def test_buckets_without_a_key_are_not_sent(self):
        # Two buckets of 128 and 256 elements, b in the first and a in the second, which alone has moments.
        world, ranks = two_ranks(
            lambda _, shard: {"m": shard.main} if shard.segment.params == ("a",) else {}, numels=(200, 100), bucket_size=100
        )

        world.run(lambda rank: ranks[rank].unshard())

        assert world.schedule(0)[-1] == "optimizer state values [all_gather of 1024 x uint8]"

    def test_without_any_state_nothing_but_that_is_exchanged(self):
        world, ranks = two_ranks(lambda *_: {})

        world.run(lambda rank: ranks[rank].unshard())

        assert [text.split(" [")[0] for text in world.schedule(0)] == [
            "rebuild: descriptions of optimizer state",  # can every rank tell?
            "rebuild: descriptions of optimizer state length",
            "rebuild: descriptions of optimizer state",
            "rebuild: optimizer state",  # do the descriptions go together?
        ]


DIFFERENT_NUMBERS = (
    "ranks hold different numbers (step counts, say) or kinds of optimizer state for pieces of one parameter: one of them "
    "has missed an update, or its state was changed there alone: 'a'. Load the last checkpoint on every rank."
)


class TestRefusals:
    @staticmethod
    def errors(state_of):
        world, ranks = two_ranks(state_of)

        def play(rank):
            with pytest.raises((OptimizerParametersError, PeerFailedError)) as caught:
                ranks[rank].unshard()
            return caught.value

        return world.run(play)

    def test_different_numbers_for_pieces_of_one_parameter(self):
        world, ranks = two_ranks(lambda rank, _: {"step": torch.tensor(3.0 + rank)}, numels=(200, 100))

        def play(rank):
            with pytest.raises(OptimizerParametersError) as caught:
                ranks[rank].unshard()
            return str(caught.value)

        assert set(world.run(play)) == {DIFFERENT_NUMBERS}

    def test_an_object_on_one_rank_keeps_nobody_waiting(self):
        errors = self.errors(lambda rank, _: {"odd": object()} if rank == 1 else {})

        assert [type(error) for error in errors] == [PeerFailedError] * 2
        assert "rank 1 failed in rebuild: OptimizerParametersError: the optimizer holds, for a flat shard" in str(errors[0])
        assert "'odd: object'" in str(errors[0])
