"""``finalize_grads``: tensor- and pipeline-parallel gradients, tied weights and tokens, against the whole model in one process.

Several tests are bugs that users of other frameworks have met; their numbers are those of Megatron-LM.
"""

import copy
import math
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
from grids import Grid, cut

from megabucket import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    ParallelGroups,
    finalize_grads,
)
from megabucket.comm import AllReduce, Broadcast
from megabucket.errors import (
    CallMismatchError,
    ConfigError,
    LayoutMismatchError,
    PeerFailedError,
    ReplicasDivergedError,
    WrapperBrokenError,
)
from megabucket.layout.identity import megatron_identity
from megabucket.testing import LoopbackWorld
from megabucket.trace.recorder import Recorder

MODES = [pytest.param(False, id="all-reduce"), pytest.param(True, id="reduce-scatter")]
NUM_STEPS, CLIP = 20, 0.5
SGD = {"lr": 0.1, "momentum": 0.9}


def assert_trained_alike(weights, expected, before):
    """``|w - w_ref|_inf <= 1e-4 |w_ref - w_0|_inf`` for each tensor of the whole model."""
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        moved = (value - before[name]).abs().max()
        assert moved > 0
        assert (weights[name] - value).abs().max() <= 1e-4 * moved, name


def trained_whole(model, loss_of_step, *, clip=CLIP):
    """Train plain torch; return weights and norms."""
    optimizer, norms = torch.optim.SGD(model.parameters(), **SGD), []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of_step(model, step).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}, norms


# Tensor parallelism with a sequence that is cut as well #


def _summed(tensor, communicator):
    result = tensor.contiguous().clone()
    communicator.launch([AllReduce(result.view(-1))], label="tensor parallel").wait()
    return result


def _own(tensor, tp):
    return tensor.chunk(tp.size)[tp.rank]


class _Gather(torch.autograd.Function):
    """The whole sequence from its parts; every rank uses all of it, so gradients are summed and cut."""

    @staticmethod
    def forward(ctx, part, tp):
        ctx.tp = tp
        whole = part.new_zeros(tp.size * len(part), *part.shape[1:])
        _own(whole, tp).copy_(part)
        return _summed(whole, tp)

    @staticmethod
    def backward(ctx, grad):
        return _own(_summed(grad, ctx.tp), ctx.tp), None


class _SumAndCut(torch.autograd.Function):
    """The own part of the sum over all ranks."""

    @staticmethod
    def forward(ctx, whole, tp):
        ctx.tp = tp
        return _own(_summed(whole, tp), tp).clone()

    @staticmethod
    def backward(ctx, grad):
        whole = grad.new_zeros(ctx.tp.size * len(grad), *grad.shape[1:])
        _own(whole, ctx.tp).copy_(grad)
        return _summed(whole, ctx.tp), None


class WholeBlock(torch.nn.Module):
    """Norm, two layers with a norm of each head between them, and a final norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(6)
        self.column = torch.nn.Linear(6, 8)
        self.head_scale = torch.nn.Parameter(torch.rand(2) + 0.5)  # of each of 4 heads
        self.row = torch.nn.Linear(8, 4)
        self.final_norm = torch.nn.LayerNorm(4)

    def forward(self, inputs):
        hidden = torch.tanh(self.column(self.norm(inputs))).unflatten(-1, (-1, 2)) * self.head_scale
        return self.final_norm(self.row(hidden.flatten(1)))


class CutBlock(torch.nn.Module):
    """What ``WholeBlock`` computes, on tensor-parallel ranks with half of the features, and between them of the sequence."""

    def __init__(self, whole, tp):
        super().__init__()
        self._tp = tp
        self.norm, self.final_norm = copy.deepcopy(whole.norm), copy.deepcopy(whole.final_norm)
        self.column_weight = cut(torch.nn.Parameter(_own(whole.column.weight.detach(), tp).clone()), 0)
        self.column_bias = cut(torch.nn.Parameter(_own(whole.column.bias.detach(), tp).clone()), 0)
        self.head_scale = torch.nn.Parameter(whole.head_scale.detach().clone())
        self.row_weight = cut(torch.nn.Parameter(_own(whole.row.weight.detach().T, tp).T.clone()), 1)
        self.row_bias = torch.nn.Parameter(whole.row.bias.detach().clone())
        for param in (*self.norm.parameters(), *self.final_norm.parameters(), self.row_bias):
            param.sequence_parallel = True

    def forward(self, inputs):
        gathered = _Gather.apply(self.norm(_own(inputs, self._tp)), self._tp)
        hidden = torch.tanh(torch.nn.functional.linear(gathered, self.column_weight, self.column_bias))
        hidden = (hidden.unflatten(-1, (-1, 2)) * self.head_scale).flatten(1)
        return self.final_norm(_SumAndCut.apply(torch.nn.functional.linear(hidden, self.row_weight), self._tp) + self.row_bias)


def batch(step, dp_rank):
    generator = torch.Generator().manual_seed(10 * step + dp_rank)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)


def whole_loss(model, step):
    losses = [(model(batch(step, dp_rank)[0]) - batch(step, dp_rank)[1]).square().mean() for dp_rank in range(2)]
    return sum(losses) / 2


def sums_of_heads(tp):
    """Each rank has some of the heads, so their common scale gets a part of its gradient there. No attribute says so."""
    by_attribute = megatron_identity(tp_rank=tp.rank, tp_size=tp.size)

    def identity(name, param):
        found = by_attribute(name, param)
        return replace(found, partial=("tp",)) if name == "head_scale" else found

    return identity


def train_cut_block(grid, rank, **fields):
    """Train on tp 2 x dp 2; return the wrapper and the norms."""
    tp = grid.of(rank, "tp")
    ddp = grid.wrap(
        rank, CutBlock(grid.whole, tp), config=fields, reduction=["dense"], copies=["tp"], identity=sums_of_heads(tp)
    )
    optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), **SGD), ddp, clip_grad=CLIP)
    norms = []
    for step in range(NUM_STEPS):
        inputs, targets = batch(step, rank // 2)
        ((ddp(inputs) - _own(targets, tp)).square().sum() / targets.numel()).backward()  # of the tokens of this rank
        finalize_grads(ddp)
        norms.append(optimizer.step().grad_norm)
        optimizer.zero_grad()
    return ddp, norms


def tp_grid():
    grid = Grid(2, 2)
    grid.whole = WholeBlock()
    return grid


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("is_sharded", MODES)
def test_tensor_and_sequence_parallel_training_is_that_of_the_whole_model(is_sharded, overlaps):
    """Issue 1446: gradients of a norm differ between tensor-parallel ranks. Issue 7452: norms without that sum."""
    grid = tp_grid()
    fields = {"use_distributed_optimizer": is_sharded, "overlap_grad_reduce": overlaps}

    def program(rank):
        ddp, norms = train_cut_block(grid, rank, **fields)
        ddp.check_replicas()
        return norms, {name: param.detach().clone() for name, param in ddp.module.named_parameters()}

    before = {name: param.detach().clone() for name, param in grid.whole.named_parameters()}
    results = grid.run(program)
    expected, norms = trained_whole(grid.whole, whole_loss)

    assert sum(CLIP / norm < 0.5 for norm in norms) >= NUM_STEPS / 2  # clipping bites
    for own, _ in results:
        assert own == pytest.approx(norms, rel=1e-4)
    first, second = (weights for _, weights in results[:2])
    joined = {name: value for name, value in first.items() if "norm" in name or name == "head_scale"}
    joined["column.weight"] = torch.cat([first["column_weight"], second["column_weight"]])
    joined["column.bias"] = torch.cat([first["column_bias"], second["column_bias"]])
    joined["row.weight"] = torch.cat([first["row_weight"], second["row_weight"]], dim=1)
    joined["row.bias"] = first["row_bias"]
    assert_trained_alike(joined, expected, before)


@pytest.mark.parametrize("is_sharded", MODES)
def test_a_scaler_after_finalize_grads_trains_as_without_and_skips_on_all_ranks(is_sharded):
    """Scales are powers of two, so no bit differs; in step 1 one tensor-parallel rank has an infinite gradient."""
    grid = tp_grid()

    def train(rank, *, scales):
        tp = grid.of(rank, "tp")
        config = {"use_distributed_optimizer": is_sharded, "nonfinite_gradients": "allow"}
        net = CutBlock(grid.whole, tp)
        ddp = grid.wrap(rank, net, config=config, reduction=["dense"], copies=["tp"], identity=sums_of_heads(tp))
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), **SGD), ddp, clip_grad=CLIP)
        scaler, updates = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scales), []
        for step in range(4) if scales else (0, 2, 3):
            loss = (ddp(batch(step, rank // 2)[0]) - _own(batch(step, rank // 2)[1], tp)).square().sum()
            scaler.scale(loss * (math.inf if (step, rank) == (1, 1) else 1.0)).backward()
            finalize_grads(ddp)
            scaler.step(optimizer)
            scaler.update()
            updates.append(optimizer.last_step.updated)
            optimizer.zero_grad()
        ddp.check_replicas()
        return updates, {name: param.detach().clone() for name, param in net.named_parameters()}

    scaled, plain = (grid.run(partial(train, scales=scales)) for scales in (True, False))

    for (updates, weights), (_, expected) in zip(scaled, plain, strict=True):
        assert updates == [True, False, True, True]
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_whole_gradients_are_summed_whole():
    """With ``force_all_reduce`` each rank has all of a gradient, not only its shard."""
    grid = tp_grid()

    def program(rank):
        tp = grid.of(rank, "tp")
        fields = {"use_distributed_optimizer": True}
        ddp = grid.wrap(
            rank, CutBlock(grid.whole, tp), config=fields, reduction=["dense"], copies=["tp"], identity=sums_of_heads(tp)
        )
        ddp.force_all_reduce = True
        inputs, targets = batch(0, rank // 2)
        ((ddp(inputs) - _own(targets, tp)).square().sum() / targets.numel()).backward()
        finalize_grads(ddp)
        return {name: getattr(ddp.module, name).grad.clone() for name in ("head_scale", "row_bias", "column_bias")}

    results = grid.run(program)
    whole_loss(grid.whole, 0).backward()

    for rank, grads in enumerate(results):
        torch.testing.assert_close(grads["head_scale"], grid.whole.head_scale.grad)
        torch.testing.assert_close(grads["row_bias"], grid.whole.row.bias.grad)
        torch.testing.assert_close(grads["column_bias"], grid.whole.column.bias.grad.chunk(2)[rank % 2])


# Pipeline stages with tied embeddings #

VOCABULARY, WIDTH = 11, 6


class WholeModel(torch.nn.Module):
    """Embedding, two layers, and a head with the weight of the embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return torch.nn.functional.linear(hidden, self.embedding.weight)


class Stage(torch.nn.Module):
    """One of two stages of ``WholeModel``, with local names: both have a ``layer``."""

    def __init__(self, whole, stage, *, isolates=True):
        super().__init__()
        self.layer = copy.deepcopy(whole.layers[stage])
        self.is_last = stage == 1
        if self.is_last:
            self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
            torch.nn.init.zeros_(self.head.weight)  # as Megatron has it, until the stages make it equal
        else:
            self.embedding = copy.deepcopy(whole.embedding)
        tied = self.head if self.is_last else self.embedding
        tied.weight.shared, tied.weight.shared_embedding = True, isolates

    def forward(self, inputs):
        hidden = torch.tanh(self.layer(inputs if self.is_last else self.embedding(inputs)))
        return self.head(hidden) if self.is_last else hidden


TIED = ("embedding.weight", "head.weight")
"""The tied parameter by stage."""


def name_in_stage(stage):
    """Return from local to global names."""
    return lambda name: "embedding.weight" if name == "head.weight" else name.replace("layer.", f"layers.{stage}.")


class Pipeline:
    """pp 2 x dp 2: ranks 0 and 1 hold the first stage, ranks 2 and 3 the last one."""

    def __init__(self):
        self.world = LoopbackWorld(4, timeout_s=20)
        self.dp = self.world.subgroup([0, 1]) | self.world.subgroup([2, 3])
        self.pp = self.world.subgroup([0, 2]) | self.world.subgroup([1, 3])
        self.embd = self.world.subgroup([0, 2]) | self.world.subgroup([1, 3])
        self.whole = WholeModel()

    def wrap(self, rank, module, *, names=True, disable_bucketing=False, **fields):
        stage = rank // 2
        identity = megatron_identity(tp_rank=0, tp_size=1, name_of=name_in_stage(stage)) if names else None
        groups = ParallelGroups(
            {"dense": self.dp[rank]},
            copies={"embd": self.embd[rank], "pp": self.pp[rank]},
            norm_group=self.world.communicator(rank),
            identity=identity,
        )
        config = DistributedDataParallelConfig(**{"bucket_size": 40, **fields})
        return DistributedDataParallel(module, config, groups=groups, disable_bucketing=disable_bucketing)

    def backward(self, rank, forward, tokens, loss_of):
        """Run one microbatch through both stages."""
        pp = self.pp[rank]
        hidden = torch.zeros(len(tokens), WIDTH)
        if rank < 2:
            output = forward(tokens)
            hidden.copy_(output.detach())
        pp.launch([Broadcast(hidden, 0)], label="activations").wait()
        if rank >= 2:
            hidden.requires_grad_()
            loss_of(forward(hidden), tokens).backward()
        grad = hidden.grad if rank >= 2 else torch.empty_like(hidden)
        pp.launch([Broadcast(grad, 1)], label="gradients of activations").wait()
        if rank < 2:
            output.backward(grad)


def tokens_of(step, microbatch, dp_rank, *, is_ragged=False):
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + dp_rank)
    return torch.randint(VOCABULARY, (6 + 3 * dp_rank * is_ragged + microbatch * is_ragged,), generator=generator)


def mean_loss(logits, tokens):
    return torch.nn.functional.cross_entropy(logits, tokens * 3 % VOCABULARY)


def sum_loss(logits, tokens):
    return torch.nn.functional.cross_entropy(logits, tokens * 3 % VOCABULARY, reduction="sum")


@pytest.mark.parametrize("counts_tokens", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"finish": "explicit"}, id="all-reduce"),
        pytest.param({"use_distributed_optimizer": True, "overlap_grad_reduce": False}, id="reduce-scatter, no overlap"),
        pytest.param({"use_distributed_optimizer": True}, id="reduce-scatter"),
        pytest.param({"use_distributed_optimizer": True, "overlap_param_gather": True}, id="gather overlapped"),
    ],
)
def test_pipeline_training_with_tied_embeddings_is_that_of_the_whole_model(fields, counts_tokens):
    """Issue 844: partial sums of different shards. Issue 656: weights that come untied with overlap."""
    pipeline = Pipeline()
    fields = {**fields, "grad_reduction": "sum"} if counts_tokens else fields

    def program(rank):
        ddp = pipeline.wrap(rank, Stage(pipeline.whole, rank // 2), disable_bucketing=rank >= 2, **fields)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), **SGD), ddp, clip_grad=CLIP)
        norms = []
        for step in range(NUM_STEPS):
            num_tokens = 0
            for microbatch in range(2):
                tokens = tokens_of(step, microbatch, rank % 2, is_ragged=counts_tokens)
                num_tokens += len(tokens)
                with ddp.no_sync() if microbatch == 0 else nullcontext():
                    loss_of = sum_loss if counts_tokens else lambda *pair: mean_loss(*pair) / 2
                    pipeline.backward(rank, ddp, tokens, loss_of)
            # What the first stage says does not count, as long as it says something.
            finalize_grads(ddp, num_tokens=(num_tokens if rank >= 2 else 1_000) if counts_tokens else None)
            norms.append(optimizer.step().grad_norm)
            optimizer.zero_grad()
        ddp.check_replicas()
        names = [ddp.identities[name].global_name for name, _ in ddp.module.named_parameters()]
        weights = [param.detach().clone() for param in ddp.module.parameters()]
        return norms, dict(zip(names, weights, strict=True)), ddp.layout.num_buckets

    def loss_of_step(model, step):
        batches = [tokens_of(step, micro, dp, is_ragged=counts_tokens) for micro in range(2) for dp in range(2)]
        if counts_tokens:
            return sum(sum_loss(model(tokens), tokens) for tokens in batches) / sum(map(len, batches))
        return sum(mean_loss(model(tokens), tokens) for tokens in batches) / 4

    before = {name: param.detach().clone() for name, param in pipeline.whole.named_parameters()}
    results = pipeline.world.run(program)
    expected, norms = trained_whole(pipeline.whole, loss_of_step)

    assert sum(CLIP / norm < 1 for norm in norms) >= NUM_STEPS / 2
    for own, _, _ in results:
        assert own == pytest.approx(norms, rel=1e-4)  # naive, tied weights count twice: the first norm is 20 % larger
    assert_trained_alike({**results[0][1], **results[3][1]}, expected, before)
    assert_trained_alike({**results[3][1], **results[0][1]}, expected, before)
    assert torch.equal(results[0][1]["embedding.weight"], results[3][1]["embedding.weight"])  # to the bit
    assert [num_buckets for _, _, num_buckets in results] == [2, 2, 2, 2]


def test_stages_that_finalize_nothing_come_untied_and_are_found():
    """Issue 656: each stage steps on its own use of the tied weight."""
    pipeline = Pipeline()

    def program(rank):
        ddp = pipeline.wrap(rank, Stage(pipeline.whole, rank // 2), use_distributed_optimizer=True)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), **SGD), ddp)
        pipeline.backward(rank, ddp, tokens_of(0, 0, rank % 2), mean_loss)
        optimizer.step()
        with pytest.raises((ReplicasDivergedError, PeerFailedError)) as caught:
            ddp.check_replicas()
        return str(caught.value)

    assert all("copies along 'embd'" in text for text in pipeline.world.run(program))


def tied_grads(*, isolates, **fields):
    """Return by rank the tied gradient, and that of the whole model, where only the last stage has one bucket."""
    pipeline = Pipeline()

    def program(rank):
        stage = Stage(pipeline.whole, rank // 2, isolates=isolates)
        ddp = pipeline.wrap(rank, stage, disable_bucketing=rank >= 2, **fields)
        pipeline.backward(rank, ddp, tokens_of(0, 0, rank % 2), mean_loss)
        finalize_grads(ddp)
        tied = stage.head if stage.is_last else stage.embedding
        return tied.weight.grad.clone()

    grads = pipeline.world.run(program)
    (sum(mean_loss(pipeline.whole(tokens), tokens) for tokens in (tokens_of(0, 0, 0), tokens_of(0, 0, 1))) / 2).backward()
    return grads, pipeline.whole.embedding.weight.grad


def test_whole_gradients_of_tied_weights_may_lie_anywhere():
    grads, expected = tied_grads(isolates=False, finish="explicit")

    for grad in grads:
        torch.testing.assert_close(grad, expected)


def test_shards_of_tied_weights_that_lie_in_different_places_are_refused():
    """Issue 844: the stages own different parts of the tied gradient, so adding up what they own mixes unrelated elements."""
    match = (
        r"embedding\.weight at \(0, 0\) of shape \(11, 6\) float32 with gradients of float32 from element 0 of a bucket of 128 "
        r"as shard.*from element 0 of a bucket of 256 as shard \d of 2 \(param.shared_embedding = True gives it a bucket of"
    )
    with pytest.raises(LayoutMismatchError, match=match):
        tied_grads(isolates=False, use_distributed_optimizer=True)


def test_shards_of_tied_weights_with_different_numbers_are_refused():
    """Issue 844 again: everything lies alike, and each rank meets the one that owns the other shard."""
    pipeline = Pipeline()
    pipeline.embd = pipeline.world.subgroup([0, 3]) | pipeline.world.subgroup([1, 2])

    def program(rank):
        with pytest.raises((LayoutMismatchError, PeerFailedError), match=r"embedding\.weight.*as shard \d of 2.*as shard"):
            pipeline.wrap(rank, Stage(pipeline.whole, rank // 2), use_distributed_optimizer=True)

    pipeline.world.run(program)


def test_tied_weights_in_different_groups_of_the_optimizers_are_refused():
    """Both stages have the same two learning rates, and the tied weight one each."""
    pipeline = Pipeline()

    def program(rank):
        stage = Stage(pipeline.whole, rank // 2)
        ddp = pipeline.wrap(rank, stage, use_distributed_optimizer=True)
        tied, rest = [stage.get_parameter(TIED[rank // 2])], list(stage.layer.parameters())
        first, second = (tied, rest) if rank < 2 else (rest, tied)
        optimizer = torch.optim.SGD([{"params": first, "lr": 0.1}, {"params": second, "lr": 0.2}])
        with pytest.raises((LayoutMismatchError, PeerFailedError)) as caught:
            DistributedOptimizer(optimizer, ddp)
        return str(caught.value)

    for text in pipeline.world.run(program):
        assert "embedding.weight in group 0" in text
        assert "embedding.weight in group 1" in text


def in_another_order(stage):
    if stage.is_last:
        stage.head.weight.data = torch.zeros(6, 11).T


UNLIKE = {
    "dtypes": (lambda stage: stage if stage.is_last else stage.bfloat16(), "bfloat16 with gradients of float32"),
    "memory orders": (in_another_order, r"of shape \(11, 6\) float32 strides 1 11 with"),  # what is summed are the flat buffers
    "frozen on one stage": (
        lambda stage: tied_weight(stage).requires_grad_(not stage.is_last),
        r"embedding\.weight at \(0, 0\) of shape \(11, 6\) float32 frozen",
    ),
}


@pytest.mark.parametrize(("change", "match"), UNLIKE.values(), ids=UNLIKE)
def test_tied_weights_that_differ_between_stages_are_refused(change, match):
    pipeline = Pipeline()

    def program(rank):
        stage = Stage(pipeline.whole, rank // 2)
        change(stage)
        with pytest.raises((LayoutMismatchError, PeerFailedError), match=match):
            pipeline.wrap(rank, stage, use_distributed_optimizer=True)

    pipeline.world.run(program)


def test_tied_weights_are_told_by_their_global_names():
    """Issue 7452: local names taken for global ones. The stages would add up whatever comes in their order."""
    pipeline = Pipeline()

    def program(rank):
        with pytest.raises(LayoutMismatchError) as caught:
            pipeline.wrap(rank, Stage(pipeline.whole, rank // 2), names=False, use_distributed_optimizer=True)
        return str(caught.value)

    assert all("embedding.weight" in text and "head.weight" in text for text in pipeline.world.run(program))


def test_a_norm_counts_layers_with_the_same_local_name_each_and_tied_weights_once():
    pipeline = Pipeline()

    def program(rank):
        ddp = pipeline.wrap(rank, Stage(pipeline.whole, rank // 2), use_distributed_optimizer=True)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
        sum(param.sum() for param in ddp.module.parameters()).backward()
        finalize_grads(ddp)
        return optimizer.step().grad_norm

    # Two layers of 36 + 6 gradients of 1, and 66 tied ones of 1 + 1. Naive, with parts of the tied ones: (84 + 2 * 66) ** 0.5.
    expected = (2 * 42 + 66 * 2**2) ** 0.5
    assert pipeline.world.run(program) == pytest.approx([expected] * 4, rel=1e-6)


def tied_weight(stage):
    return stage.get_parameter(TIED[stage.is_last])


def test_a_frozen_tied_weight_is_that_of_the_first_stage_and_is_tied_again_when_it_is_unfrozen():
    pipeline = Pipeline()

    def program(rank):
        stage = Stage(pipeline.whole, rank // 2)
        tied_weight(stage).requires_grad_(False).fill_(rank)
        ddp = pipeline.wrap(rank, stage, use_distributed_optimizer=True)
        frozen = tied_weight(stage).unique().tolist()
        tied_weight(stage).fill_(10.0 + rank).requires_grad_()
        ddp.rebuild()
        return frozen, tied_weight(stage).unique().tolist()

    assert pipeline.world.run(program) == [([0.0], [10.0])] * 4


def test_an_expanded_frozen_tied_weight_is_written_through_its_memory():
    pipeline = Pipeline()

    def program(rank):
        stage = Stage(pipeline.whole, rank // 2)
        expanded = torch.nn.Parameter(torch.full((11, 1), float(rank)).expand(11, 6), requires_grad=False)
        expanded.shared = True
        (stage.head if stage.is_last else stage.embedding).weight = expanded
        pipeline.wrap(rank, stage, use_distributed_optimizer=True)
        return tied_weight(stage).unique().tolist()

    assert pipeline.world.run(program) == [[0.0]] * 4


def test_weights_are_tied_before_main_parameters_are_cloned():
    """Of 16-bit weights the optimizer steps on float32 copies, which would keep the values from before."""
    pipeline = Pipeline()

    def program(rank):
        stage = Stage(pipeline.whole, rank // 2).bfloat16()
        ddp = pipeline.wrap(rank, stage, use_distributed_optimizer=True)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.0), ddp)
        sum(param.float().sum() for param in stage.parameters()).backward()
        finalize_grads(ddp)
        optimizer.step()
        return tied_weight(stage).detach().clone()

    for weight in pipeline.world.run(program):
        assert torch.equal(weight, pipeline.whole.embedding.weight.bfloat16())


# Several chunks on a rank #


@pytest.mark.parametrize("is_one_wrapper", [True, False])
def test_gradients_of_a_virtual_pipeline_are_those_of_the_whole_model(is_one_wrapper):
    """Each rank holds two stages: all in one wrapper, with one norm; or each in a wrapper, for plain optimizers."""
    grid = Grid(1, 2)
    whole = WholeBlock()
    single = {name: grid.line(lambda rank: rank) for name in ("tp",)}

    def program(rank):
        tp = single["tp"][rank]
        first = torch.nn.Sequential(copy.deepcopy(whole.norm), copy.deepcopy(whole.column))
        last = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(8, 4))
        with torch.no_grad():
            last[1].weight.copy_(whole.row.weight)
            last[1].bias.copy_(whole.row.bias)
        groups = ParallelGroups({"dense": grid.of(rank, "dense")}, copies={"tp": tp}, norm_group=grid.of(rank, "dense"))
        config = DistributedDataParallelConfig(bucket_size=40, finish="explicit", grad_reduction="sum")
        parts = [torch.nn.ModuleList([first, last])] if is_one_wrapper else [first, last]
        wrappers = [DistributedDataParallel(part, config, groups=groups) for part in parts]
        hidden = first(batch(0, rank)[0])
        cut_here = hidden.detach().requires_grad_()
        last(cut_here).square().sum().backward()
        hidden.backward(cut_here.grad)
        finalize_grads(wrappers, num_tokens=torch.tensor(8))
        result = None
        if is_one_wrapper:
            optimizer = DistributedOptimizer(torch.optim.SGD(wrappers[0].parameters(), lr=0.1), wrappers[0])
            result = optimizer.step().grad_norm
        grads = [param.grad.clone() for part in (first, last) for param in part.parameters()]
        return grads, result

    results = grid.run(program)
    plain = torch.nn.Sequential(whole.norm, whole.column, torch.nn.Tanh(), whole.row)
    (sum(plain(batch(0, rank)[0]).square().sum() for rank in range(2)) / 16).backward()
    expected = [param.grad for param in plain.parameters()]

    for grads, norm in results:
        for grad, value in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, value)
        if is_one_wrapper:
            assert norm == pytest.approx(float(torch.stack([value.norm() for value in expected]).norm()), rel=1e-5)


# What is wrong is named on all ranks #


def test_a_backward_that_would_wait_for_all_stages_is_refused():
    """An earlier stage gets the gradient of its outputs after backward of the later one has returned."""
    pipeline = Pipeline()

    def program(rank):
        with pytest.raises(ConfigError, match=r"earlier pipeline stage waits.*finish='explicit'"):
            pipeline.wrap(rank, Stage(pipeline.whole, rank // 2))

    pipeline.world.run(program)


def failing(program_of, error, *, match, **fields):
    """Run backward and ``program_of`` by rank, and expect the same error on all ranks."""
    grid = tp_grid()

    def program(rank):
        tp = grid.of(rank, "tp")
        ddp = grid.wrap(
            rank,
            CutBlock(grid.whole, tp),
            config={"use_distributed_optimizer": True, **fields},
            reduction=["dense"],
            copies=["tp"],
        )
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
        ddp(batch(0, rank // 2)[0]).square().sum().backward()
        with pytest.raises(error, match=match):
            program_of(rank, ddp, optimizer)

    grid.run(program)


def test_tokens_and_means_over_ranks_are_refused():
    failing(lambda _, ddp, __: finalize_grads(ddp, num_tokens=8), ConfigError, match=r"grad_reduction='mean'.*divided twice")


def test_tokens_that_only_some_ranks_give_are_named():
    failing(
        lambda rank, ddp, _: finalize_grads(ddp, num_tokens=None if rank == 1 else 8),
        LayoutMismatchError,
        match=r"rank 0 has num_tokens is given: True, rank 1 has num_tokens is given: False",
        grad_reduction="sum",
    )


def test_a_rank_that_finalizes_nothing_is_named():
    def program(rank, ddp, optimizer):
        ddp.finish_grad_sync()
        if rank != 3:
            finalize_grads(ddp)
        optimizer.step()

    failing(program, CallMismatchError, match=r"finalize_grads\(\) on ranks 0, 1, 2; the end of a step on rank 3")


class NoRoom(Recorder):
    """Lets the launch of a sum raise."""

    records_time = False

    def record_launch(self, launch):
        if launch.record.label == "gradients along tp":
            raise MemoryError("no room for a sum")

    def enter_phase(self, step, phase):
        pass

    def note_ready(self, label):
        pass


def test_a_rank_that_cannot_add_up_breaks_the_wrapper_on_all_ranks():
    """The others wait for its part, or have added it up already: there is no way back."""

    def program(rank, ddp, optimizer):
        if rank != 1:
            finalize_grads(ddp)
            optimizer.step()
        ddp.ranks.copies["tp"].recorders.active = (NoRoom(),)
        with pytest.raises(MemoryError):
            finalize_grads(ddp)
        optimizer.step()

    failing(program, WrapperBrokenError, match=r"rank 1 stopped in finalize_grads\(\).*no room for a sum")


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("is_sharded", MODES)
def test_a_wrapper_that_has_failed_on_one_rank_fails_all_of_them_with_the_same_error(is_sharded, failing):
    """Its rank waited at the fence of that wrapper, and the others at the fence of the first one."""
    world = LoopbackWorld(2, timeout_s=20)
    parts = [[torch.nn.Linear(2, 2) for _ in range(2)] for _ in range(2)]
    finish = {"use_distributed_optimizer": True} if is_sharded else {"finish": "explicit"}

    def program(rank):
        config = DistributedDataParallelConfig(**finish)
        ddps = [DistributedDataParallel(part, config, communicator=world.communicator(rank)) for part in parts[rank]]
        for index, ddp in enumerate(ddps):
            with suppress(RuntimeError), ddp.sync.noting("forward"):
                ddp(torch.ones(1, 3 if (rank, index) == (1, failing) else 2)).sum().backward()
        with pytest.raises(PeerFailedError, match=r"rank 1 failed in .*shapes cannot be multiplied") as caught:
            finalize_grads(ddps)
        for ddp in ddps:
            ddp.zero_grad()
        for ddp in ddps:
            ddp(torch.ones(1, 2)).sum().backward()
        finalize_grads(ddps)
        return str(caught.value)

    assert len(set(world.run(program))) == 1
