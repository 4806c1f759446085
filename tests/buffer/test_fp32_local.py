"""float32 sums of microbatches over a 16-bit wire: the behaviours of Megatron's tests of the field, and ours in a step."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.errors import NonFiniteGradientError, UnusedParameterError
from megabucket.testing import LoopbackWorld

FIELD = "param_name_patterns_for_fp32_local_accumulation"
SMALL = 2.0**-9  # 1 + 2**-9 is 1 in bfloat16, whose values above 1 are 2**-7 apart


def config_of(*patterns, **switches):
    return DistributedDataParallelConfig(**{"grad_reduce_in_fp32": False, "bucket_size": 1, FIELD: patterns, **switches})


def model_of(dtype=torch.bfloat16):
    return torch.nn.Sequential(*(torch.nn.Linear(3, 3, dtype=dtype) for _ in range(3)))


def wrap(*patterns, dtype=torch.bfloat16, **switches):
    return DistributedDataParallel(
        model_of(dtype), config_of(*patterns, **switches), communicator=LoopbackWorld(1).communicator(0)
    )


def promoted(ddp):
    return {name for name, param in ddp.module.named_parameters() if hasattr(param, "main_grad_copy_in_grad_buffer")}


def give(ddp, factor):
    """A backward that brings every element of every parameter the same gradient."""
    (sum(param.sum() for param in ddp.module.parameters()) * factor).backward()


class TestOfMegatron:
    def test_the_field_excludes_a_reduction_in_float32(self):
        with pytest.raises(ValidationError, match=f"{FIELD} rounds float32 sums to 16 bits"):
            config_of("all", grad_reduce_in_fp32=True)

    def test_a_pattern_gives_the_parameters_it_matches_a_float32_main_grad_and_no_others(self):
        ddp = wrap("*.weight")

        for name, param in ddp.module.named_parameters():
            is_local = name.endswith("weight")
            assert param.main_grad.dtype == (torch.float32 if is_local else torch.bfloat16)
            assert hasattr(param, "main_grad_copy_in_grad_buffer") == is_local
            if is_local:
                assert param.main_grad_copy_in_grad_buffer.dtype == torch.bfloat16

    def test_all_matches_every_parameter(self):
        assert promoted(wrap("all")) == {f"{index}.{kind}" for index in range(3) for kind in ("weight", "bias")}

    def test_each_buffer_lists_the_float32_sums_of_the_parameters_that_match(self):
        ddp = wrap("0.*", "2.bias")

        (buffer,) = ddp.param_and_grad_buffers
        wanted = {name: param.main_grad for name, param in ddp.module.named_parameters() if name in promoted(ddp)}
        assert set(wanted) == {"0.weight", "0.bias", "2.bias"}
        assert set(map(id, buffer.local_grads)) == set(map(id, wanted.values()))

    @pytest.mark.parametrize("switches", [{}, {"dtype": torch.float32}])
    def test_without_a_pattern_or_in_float32_there_are_none(self, switches):
        ddp = wrap(*(["all"] if switches else []), **switches)

        assert ddp.param_and_grad_buffers[0].local_grads == []
        assert promoted(ddp) == set()

    def test_zero_grad_buffer_zeroes_both(self):
        ddp = wrap("all")
        (buffer,) = ddp.param_and_grad_buffers
        buffer.grad_data.fill_(1)
        for grads in buffer.local_grads:
            grads.fill_(42)

        ddp.zero_grad_buffer()

        assert not buffer.grad_data.any()
        assert not any(grads.any() for grads in buffer.local_grads)

    def test_scale_gradients_scales_both(self):
        ddp = wrap("all")
        (buffer,) = ddp.param_and_grad_buffers
        buffer.grad_data.fill_(2)
        for grads in buffer.local_grads:
            grads.fill_(4)

        ddp.scale_gradients(0.5)

        assert (buffer.grad_data == 1).all()
        assert all((grads == 2).all() for grads in buffer.local_grads)

    def test_a_sync_sends_main_grad_and_leaves_what_was_reduced_in_it(self):
        world, factors = LoopbackWorld(2), (1.0, 4.0)

        def program(rank):
            ddp = DistributedDataParallel(model_of(), config_of("all"), communicator=world.communicator(rank))
            give(ddp, factors[rank])
            params = list(ddp.module.parameters())
            assert all(torch.equal(param.main_grad, param.main_grad_copy_in_grad_buffer.float()) for param in params)
            return {param.main_grad.unique().item() for param in params}

        assert world.run(program) == [{2.5}] * 2


@settings(max_examples=20)
@given(
    num_small=st.integers(1, 12),
    overlaps=st.booleans(),
    is_sharded=st.booleans(),
    is_scattered_in_fp32=st.booleans(),
    set_to_none=st.booleans(),
)
def test_microbatches_are_rounded_once_and_not_one_by_one(num_small, overlaps, is_sharded, is_scattered_in_fp32, set_to_none):
    """Two steps of 1 + n * 2**-9: in bfloat16 the small ones are lost one by one, their sum is not."""
    config = config_of(
        "*.weight",
        overlap_grad_reduce=overlaps,
        use_distributed_optimizer=is_sharded,
        reduce_scatter_with_fp32_accumulation=is_sharded and is_scattered_in_fp32,
    )
    ddp = DistributedDataParallel(model_of(), config, communicator=LoopbackWorld(1).communicator(0))

    for _ in range(2):
        with ddp.no_sync():
            give(ddp, 1.0)
            for _ in range(num_small - 1):
                give(ddp, SMALL)
        give(ddp, SMALL)
        ddp.finish_grad_sync(force_all_reduce=True)
        shown = {name: param.grad.unique().item() for name, param in ddp.module.named_parameters()}
        ddp.zero_grad(set_to_none=set_to_none)

        rounded = torch.tensor(1 + num_small * SMALL).bfloat16().item()
        assert shown == {name: rounded if name.endswith("weight") else 1.0 for name in shown}


@pytest.mark.parametrize("is_sharded", [False, True])
def test_training_is_that_of_float32_gradients_where_the_sums_fit_into_16_bits(is_sharded):
    """The oracle is the same wrapper with a float32 wire: integers up to 256 are the same in both."""
    results = []
    for patterns, in_fp32 in ((["all"], False), ([], True)):
        config = config_of(*patterns, use_distributed_optimizer=is_sharded, grad_reduce_in_fp32=in_fp32)
        world = LoopbackWorld(2)
        torch.manual_seed(0)
        models = [model_of() for _ in range(2)]

        def program(rank, config=config, world=world, models=models):
            ddp = DistributedDataParallel(models[rank], config, communicator=world.communicator(rank))
            optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.1), ddp, clip_grad=1.0)
            for step in range(3):
                with ddp.no_sync():
                    give(ddp, float(step - rank))
                give(ddp, 4.0 * step)
                optimizer.step()
                optimizer.zero_grad()
            ddp.finish_param_sync()
            return [param.detach().clone() for param in ddp.module.parameters()]

        results.append(world.run(program))

    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_plain_torch_clips_steps_twice_and_goes_on_accumulating_on_reduced_gradients(optimizer_class):
    results = []
    for patterns in ((), ("all",)):
        torch.manual_seed(0)
        ddp = wrap(*patterns)
        optimizer = optimizer_class(ddp.parameters(), lr=0.125)
        give(ddp, 2.0)
        torch.nn.utils.clip_grad_value_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.step()
        give(ddp, 1.0)  # on top of the clipped ones
        optimizer.step()
        results.append([(param.detach().clone(), param.grad.clone()) for param in ddp.module.parameters()])

    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert {grad.unique().item() for _, grad in results[1]} == {2.0}


def test_what_is_done_to_param_grad_counts_for_a_distributed_optimizer():
    ddp = wrap("all")
    before = [param.detach().clone() for param in ddp.module.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
    give(ddp, 2.0)
    torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.0)

    optimizer.step()

    assert all(map(torch.equal, before, ddp.module.parameters()))


def test_a_sum_that_16_bits_cannot_hold_is_named():
    ddp = wrap("0.weight", dtype=torch.float16)
    with ddp.no_sync():
        (ddp.module[0].weight.sum() * 40_000.0).backward()

    with pytest.raises(NonFiniteGradientError, match=r"'0.weight'.*inf in 9 of 9 elements"):
        give(ddp, 40_000.0)


def test_detaching_removes_what_was_set_on_the_parameters():
    ddp = wrap("all")

    ddp.detach()

    assert promoted(ddp) == set()


def test_a_gradient_that_is_zeroed_in_place_is_none_of_the_next_step():
    ddp = DistributedDataParallel(model_of(), config_of("all"), communicator=LoopbackWorld(1).communicator(0))
    give(ddp, 1.0)
    ddp.zero_grad(set_to_none=False)

    with pytest.raises(UnusedParameterError, match=r"2\.weight"):
        ddp.module[0].weight.sum().backward()


def test_a_pattern_that_matches_nothing_is_said(caplog):
    with caplog.at_level("WARNING", logger="megabucket"):
        wrap("0.*", "*.typo-of-this-test")

    assert [record.message for record in caplog.records] == [
        f"megabucket: {FIELD}: no parameter on this rank matches '*.typo-of-this-test'"
    ]
