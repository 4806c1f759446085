"""Steps in which each matrix is updated by its owner, against one process. ``test_owner_mutants.py`` shows what each is for."""

import threading

import pytest
import torch
from owner_steps import (
    IN_ONE_BUCKET,
    IN_SEVERAL,
    RATE,
    STEPS,
    Model,
    assert_equal,
    experts,
    grads_of,
    holds_same_expert,
    in_one_process,
    make_optimizers,
    on_ranks,
    replicas,
    tensor_parallel,
    train,
)

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.errors import (
    ConfigError,
    NonFiniteGradientError,
    OptimizerParametersError,
    PeerFailedError,
    UpdateFailedError,
    WrapperBrokenError,
)
from megabucket.testing import LoopbackWorld
from megabucket.trace.recorder import Launch

CLIP, SCALE = 20.0, 8.0


def test_owners_update_as_one_process_does():
    overlapping = {**IN_SEVERAL, "overlap_param_gather": True}
    for size, config in ((2, IN_SEVERAL), (2, IN_ONE_BUCKET), (4, IN_ONE_BUCKET), (4, overlapping)):
        assert_equal(on_ranks(size, train, **config), in_one_process(size), rtol=1e-6, atol=1e-6)


def test_nothing_that_owners_exchange_is_used_before_it_is_waited_for():
    assert_equal(on_ranks(2, train, completion="manual"), in_one_process(2), rtol=1e-6, atol=1e-6)


def test_gradients_are_clipped_at_owners_by_the_norm_of_all():
    assert_equal(on_ranks(4, train, settings={"clip_grad": CLIP}), in_one_process(4, clip=CLIP), rtol=1e-5, atol=1e-5)


def test_owners_of_16_bit_parameters_step_on_float32_and_return_rounded_values():
    found = on_ranks(4, train, dtype=torch.bfloat16)

    assert_equal(found, in_one_process(4, dtype=torch.bfloat16))


def test_gradients_that_were_unscaled_reach_owners_once():
    for dtype in (torch.float32, torch.bfloat16):
        found = on_ranks(
            2, lambda *given: train(*given, scale=SCALE), dtype=dtype, nonfinite_gradients="allow", grad_reduce_in_fp32=False
        )

        assert_equal(found, in_one_process(2, dtype=dtype), rtol=1e-6, atol=1e-6)


def test_the_norm_is_that_of_unscaled_gradients():
    def program(rank, ddp, optimizer):
        norms = []
        for scale in (1.0, SCALE):
            (ddp(grads_of(rank, 0)) * scale).backward()
            if scale != 1.0:
                optimizer.unscale_grads(1 / scale)
            norms.append(optimizer.step().grad_norm)
            optimizer.zero_grad()
        return norms

    for dtype in (torch.float32, torch.bfloat16):
        for plain, unscaled in on_ranks(2, program, dtype=dtype, nonfinite_gradients="allow", grad_reduce_in_fp32=False):
            assert unscaled == plain


def test_optimizers_that_step_one_after_the_other_have_the_same_unscaled_gradients():
    def program(rank, ddp, optimizer):
        for step in range(STEPS):
            (ddp(grads_of(rank, step)) * SCALE).backward()
            optimizer.unscale_grads(1 / SCALE)
            assert all(optimizer.step_part(part).updated for part in (1, 0))
            optimizer.zero_grad()
        return train(rank, ddp, optimizer, steps=())

    for dtype in (torch.float32, torch.bfloat16):
        found = on_ranks(2, program, dtype=dtype, nonfinite_gradients="allow", grad_reduce_in_fp32=False)

        assert_equal(found, in_one_process(2, dtype=dtype), rtol=1e-6, atol=1e-6)


def test_owners_leave_a_matrix_alone_that_no_rank_has_used():
    def skips(step):
        return ("c.weight", "b.bias") if step == 2 else ()

    found = on_ranks(2, lambda *given: train(*given, skips=skips), unused_parameters="skip")

    assert_equal(found, in_one_process(2, skips=skips), rtol=1e-6, atol=1e-6)


def test_gradients_of_a_skipped_step_are_dropped_on_their_way():
    def program(rank, ddp, optimizer):
        train(rank, ddp, optimizer, steps=range(2))
        (ddp(grads_of(rank, 9)) * 1000.0).backward()
        assert not optimizer.step().updated
        optimizer.zero_grad()
        return train(rank, ddp, optimizer, steps=range(2, STEPS))

    found = on_ranks(2, program, settings={"grad_norm_skip_threshold": 1000.0})

    assert_equal(found, in_one_process(2), rtol=1e-6, atol=1e-6)


def test_experts_have_owners_in_their_own_group():
    found = on_ranks(4, train, groups=experts)

    assert_equal(found, in_one_process(4, holds_same=holds_same_expert), rtol=1e-6, atol=1e-6)


def test_replicas_have_owners_of_their_own_and_stay_equal():
    def program(rank, ddp, optimizer):
        weights = train(rank, ddp, optimizer)
        ddp.check_replicas()
        return weights, optimizer.sharding.owner_of

    found = on_ranks(4, program, groups=replicas)

    weights = [own for own, _ in found]
    assert_equal(weights, in_one_process(4), rtol=1e-6, atol=1e-6)
    assert_equal(weights, [weights[0]] * 4)
    assert {frozenset(owner_of.values()) for _, owner_of in found} == {frozenset({0, 1})}  # of the pair


# Faults #


class Labels:
    """The labels of all launches."""

    records_time = False

    def __init__(self):
        self.labels = []

    def record_launch(self, launch: Launch):
        self.labels.append(launch.record.label)

    def enter_phase(self, step, phase):
        """Drop it."""

    def note_ready(self, label):
        """Drop it."""


def test_gradients_leave_for_owners_only_after_the_verdict_of_all_ranks():
    recorders = [Labels() for _ in range(2)]

    def program(rank, ddp, optimizer):
        train(rank, ddp, optimizer, steps=range(1))
        before = list(recorders[rank].labels)
        grads = grads_of(rank, 1)
        if rank == 1:
            grads["b.bias"][3] = torch.nan
        ddp(grads).backward()
        with pytest.raises(NonFiniteGradientError):
            optimizer.step()
        return before, recorders[rank].labels[len(before) :]

    for right, dropped in on_ranks(2, program, recorder=lambda rank: recorders[rank]):
        at_fence = [index for index, label in enumerate(right) if label.startswith("fence")][-1]
        to_owners = [index for index, label in enumerate(right) if label.startswith("gradients to owners")]
        assert len(to_owners) >= 2
        assert min(to_owners) > at_fence
        assert not [label for label in dropped if label.startswith(("gradients to owners", "values to shards"))]


class BoomError(RuntimeError):
    """On purpose."""


def _failing(culprit):
    """Let the second update of a matrix on one rank fail: the first one has changed already."""

    def on_update(rank):
        updated = []

        def count(param):
            updated.append(param)
            if rank == culprit and len(updated) == 2:
                raise BoomError("no more")

        return count

    return on_update


def test_a_failing_update_is_named_on_all_ranks_and_nothing_of_it_is_gathered():
    # The ranks that own three of the four matrices.
    for culprit, config in ((0, IN_SEVERAL), (0, {**IN_SEVERAL, "overlap_param_gather": True}), (1, IN_ONE_BUCKET)):
        _check_failing_owner(culprit, config)


def _check_failing_owner(culprit, config):
    def program(rank, ddp, optimizer):
        before = {name: param.detach().clone() for name, param in ddp.module.named_parameters()}
        owner_of = dict(optimizer.sharding.owner_of)
        errors = []
        for step in range(2):
            with pytest.raises((UpdateFailedError, WrapperBrokenError)) as raised:
                train(rank, ddp, optimizer, steps=[step])
            errors.append(raised.value)
        with pytest.raises(WrapperBrokenError) as refused:
            ddp.zero_grad()
        ddp.detach()
        after = {name: param.detach().clone() for name, param in ddp.module.named_parameters()}
        return before, after, owner_of, errors, str(refused.value)

    found = on_ranks(2, program, on_update=_failing(culprit), **config)

    texts = {text for *_, text in found}
    assert len(texts) == 1
    (text,) = texts
    _, _, owner_of, errors, _ = found[culprit]
    names = [name for name, owner in owner_of.items() if owner == culprit]
    assert type(errors[0]) is UpdateFailedError
    assert errors[0].param in names
    assert f"rank {culprit} stopped in optimizer.step()" in text
    assert f"Mirror has failed to update {errors[0].param!r} (BoomError: no more)" in text
    before, after, _, errors, _ = found[1 - culprit]
    assert [type(error) for error in errors] == [WrapperBrokenError] * 2
    assert len(names) == 3
    for name in names:
        assert torch.equal(after[name], before[name]), name


def test_state_that_cannot_be_sent_is_named_on_all_ranks_and_breaks_nothing():
    def program(rank, ddp, optimizer):
        train(rank, ddp, optimizer, steps=range(1))
        state = optimizer.sharding.state_of(optimizer.sharding.whole_shards[0])
        for value in (threading.Lock(), [{"x": Model}]) if rank == 1 else (None, None):
            if rank == 1:
                state["odd"] = value
            with pytest.raises((OptimizerParametersError, PeerFailedError), match=r"weight: 'odd' has a (lock|type) "):
                optimizer.state_dict()
            with pytest.raises((OptimizerParametersError, PeerFailedError), match=r"weight: 'odd' has a (lock|type) "):
                ddp.rebuild()
        if rank == 1:
            state["odd"] = ({"list": [torch.ones(3), 1.5]}, "text", None)
        saved = optimizer.state_dict()["state"]
        assert len([state for state in saved.values() if "odd" in state]) == 1
        return train(rank, ddp, optimizer, steps=range(1, STEPS))

    assert_equal(on_ranks(2, program), in_one_process(2), rtol=1e-6, atol=1e-6)


# What is refused #


class Coupled(torch.optim.SGD):
    update_kind = "coupled"


def _wrap_and_make(size, make, *, groups=None, is_sharded=True):
    """Return the text of the error of each rank about what ``make`` returns; empty if there is none."""
    world = LoopbackWorld(size, timeout_s=20)
    given = groups(world) if groups else None
    config = DistributedDataParallelConfig(use_distributed_optimizer=is_sharded)

    def play(rank):
        ranks = {"communicator": world.communicator(rank)} if given is None else {"groups": given(rank)}
        ddp = DistributedDataParallel(Model(), config, **ranks)
        try:
            DistributedOptimizer(make(ddp.module), ddp)
        except ConfigError as error:
            return str(error)
        return ""

    return world.run(play)


def test_an_update_that_couples_parameters_is_refused_with_shards_and_with_experts():
    def make(model):
        return Coupled(model.parameters(), lr=RATE)

    for groups, is_sharded, size in ((None, True, 2), (experts, False, 4), (experts, True, 4)):
        for text in _wrap_and_make(size, make, groups=groups, is_sharded=is_sharded):
            assert "Coupled updates one parameter depending on others: it declares update_kind = 'coupled'" in text
    assert _wrap_and_make(2, make, is_sharded=False) == ["", ""]


def test_pieces_of_tensors_are_refused_unless_the_optimizer_works_on_pieces():
    world = LoopbackWorld(4, timeout_s=20)
    groups = tensor_parallel(world)

    def play(rank):
        found = []
        for is_allowed in (False, True):
            model = Model()
            param = model.c.weight
            param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, 0, 1
            config = DistributedDataParallelConfig(use_distributed_optimizer=True)
            ddp = DistributedDataParallel(model, config, groups=groups(rank))
            mirror, adamw = make_optimizers(model)
            if is_allowed:
                mirror.works_on_pieces = True
            try:
                DistributedOptimizer([mirror, adamw], ddp)
                found.append("")
            except ConfigError as error:
                found.append(str(error))
            ddp.detach()
        return found

    for refused, allowed in world.run(play):
        assert (
            "Mirror updates whole tensors, and these are pieces of tensors that are cut over other ranks: 'c.weight'" in refused
        )
        assert "optimizer.works_on_pieces = True" in refused
        assert allowed == ""
