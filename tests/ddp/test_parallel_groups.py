"""Named reduction groups: experts over their own ranks, norms over all, faults named everywhere. Loopback worlds of four ranks.

Ranks 0 and 2 hold expert 0, ranks 1 and 3 expert 1; everything else is dense. What is right is computed from plain gradients of
each rank, without any wrapper.
"""

import copy
import math
import re
import threading
from contextlib import nullcontext

import pytest
import torch

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.ddp.groups import ParallelGroups, ReductionGroup
from megabucket.errors import (
    ConfigError,
    LayoutError,
    LayoutMismatchError,
    NonFiniteGradientError,
    PeerFailedError,
    ReplicasDivergedError,
    UnusedParameterError,
)
from megabucket.layout import ParamIdentity
from megabucket.layout.identity import plain_identity
from megabucket.testing import LoopbackWorld

EXPERT_RANKS = {0: [0, 2], 1: [1, 3]}
MODES = [False, True]


SEEDED = threading.Lock()  # ranks are threads, and all of them draw from one generator


class Moe(torch.nn.Module):
    """A dense layer, the expert of this rank, and a dense head."""

    def __init__(self, expert):
        super().__init__()
        with SEEDED:
            torch.manual_seed(0)
            self.dense = torch.nn.Linear(6, 10)
            self.head = torch.nn.Linear(10, 3)
            torch.manual_seed(100 + expert)
            self.expert = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Tanh(), torch.nn.Linear(10, 10))
        for param in self.expert.parameters():
            param.allreduce = False

    def forward(self, inputs):
        return self.head(self.expert(self.dense(inputs)))


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 6, generator=generator)


def loss_of(output):
    return output.square().mean()


class MoeWorld:
    """Four ranks, wrapped with groups."""

    def __init__(self, *, model=Moe, group_of=None, **fields):
        self.world = LoopbackWorld(4, timeout_s=20)
        self.models = [model(rank % 2) for rank in range(4)]
        self.initial = [copy.deepcopy(model) for model in self.models]
        experts = {number: self.world.subgroup(ranks) for number, ranks in EXPERT_RANKS.items()}
        fields = {"bucket_size": 60, **fields}

        def wrap(rank):
            groups = ParallelGroups(
                {"dense": self.world.communicator(rank), "expert": experts[rank % 2][rank]}, group_of=group_of
            )
            return DistributedDataParallel(self.models[rank], DistributedDataParallelConfig(**fields), groups=groups)

        self.ddps = self.world.run(wrap)

    def run(self, program):
        return self.world.run(program)


def averaged_grads(models, step):
    """By rank and name: what the reduction must give, from plain backwards of copies of the models."""
    grads = []
    for rank, model in enumerate(models):
        plain = copy.deepcopy(model)
        plain.zero_grad()
        loss_of(plain(batch(rank, step))).backward()
        grads.append({name: param.grad for name, param in plain.named_parameters()})
    return [
        {
            name: sum(grads[other][name] for other in (EXPERT_RANKS[rank % 2] if "expert" in name else range(4))) / 4
            for name in grads[rank]
        }
        for rank in range(4)
    ]


def norm_of(grads):
    """Over all ranks: dense gradients once, those of each expert once."""
    dense = sum(float(grad.double().square().sum()) for name, grad in grads[0].items() if "expert" not in name)
    experts = sum(
        float(grad.double().square().sum()) for rank in (0, 1) for name, grad in grads[rank].items() if "expert" in name
    )
    return math.sqrt(dense + experts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("is_sharded", MODES)
def test_gradients_of_an_expert_that_one_rank_holds_are_divided_once(is_sharded, averages, dtype):
    """Nothing is sent for such a group: Megatron's issue 6660 is one that doubles its gradients with every microbatch."""
    world = LoopbackWorld(2, timeout_s=20)
    alone = {rank: world.subgroup([rank])[rank] for rank in range(2)}
    config = DistributedDataParallelConfig(use_distributed_optimizer=is_sharded, average_in_collective=averages)

    def program(rank):
        expert = torch.nn.Linear(3, 1, bias=False, dtype=dtype)
        expert.weight.allreduce = False
        model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False, dtype=dtype), expert)
        groups = {"dense": world.communicator(rank), "expert": alone[rank]}
        ddp = DistributedDataParallel(model, config, groups=groups)
        for _ in range(2):
            for is_last in (False, True):
                with nullcontext() if is_last else ddp.no_sync():
                    (expert.weight.sum() * (1 + rank) + ddp.module[0].weight.sum()).backward()
            ddp.finish_grad_sync(force_all_reduce=True)
            grad = expert.weight.main_grad.clone()
            ddp.zero_grad()
        return grad.unique().tolist()

    assert world.run(program) == [[(1 + 1) / 2], [(2 + 2) / 2]]  # two microbatches over two data-parallel ranks


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("is_sharded", MODES)
def test_training_with_experts_is_that_of_plain_optimizers_on_the_right_gradients(is_sharded, overlaps):
    world = MoeWorld(use_distributed_optimizer=is_sharded, overlap_grad_reduce=overlaps)
    clip, num_steps = 0.05, 6

    def program(rank):
        ddp = world.ddps[rank]
        optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=1e-2), ddp, clip_grad=clip)
        norms = []
        for step in range(num_steps):
            loss_of(ddp(batch(rank, step))).backward()
            norms.append(optimizer.step().grad_norm)
            optimizer.zero_grad()
        ddp.finish_param_sync()
        return norms, {name: param.detach().clone() for name, param in ddp.module.named_parameters()}

    results = world.run(program)

    models = [copy.deepcopy(model) for model in world.initial]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(num_steps):
        grads = averaged_grads(models, step)
        norm = norm_of(grads)
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            assert results[rank][0][step] == pytest.approx(norm, rel=1e-5)
            for name, param in model.named_parameters():
                param.grad = grads[rank][name] * min(1.0, clip / (norm + 1e-6))
            optimizer.step()
    for rank, model in enumerate(models):
        for name, param in model.named_parameters():
            moved = (param - dict(world.initial[rank].named_parameters())[name]).abs().max()
            assert (results[rank][1][name] - param).abs().max() <= 1e-4 * moved, f"{name} on rank {rank}"


def test_an_expert_without_a_token_has_a_gradient_of_zero():
    class Routed(Moe):
        def forward(self, inputs):
            return self.head(self.dense(inputs))

    world = MoeWorld(model=Routed)

    def program(rank):
        ddp = world.ddps[rank]
        loss_of(ddp(batch(rank, 0))).backward()
        return [param.grad.abs().max() for param in ddp.module.expert.parameters()]

    assert world.run(program) == [[torch.tensor(0.0)] * 4] * 4


def test_an_expert_without_a_token_is_named_where_its_group_says_so():
    world = LoopbackWorld(2, timeout_s=20)

    def program(rank):
        everybody = world.communicator(rank)
        experts = ReductionGroup(everybody, unused_parameters="error")
        ddp = DistributedDataParallel(Moe(0), groups={"dense": everybody, "expert": experts})
        with pytest.raises(UnusedParameterError, match=r"expert\.0\.weight"):
            loss_of(ddp.module.head(ddp.module.dense(batch(rank, 0)))).backward()

    world.run(program)


def test_the_ranks_of_a_group_start_with_the_same_values_and_keep_those_of_other_groups_apart():
    class Random(Moe):
        def __init__(self, expert):
            super().__init__(expert)
            with torch.no_grad():
                for param in self.parameters():
                    param.add_(torch.randn(param.shape))

    world = MoeWorld(model=Random)
    values = [dict(model.named_parameters()) for model in world.models]

    for rank in range(4):
        torch.testing.assert_close(values[rank]["dense.weight"], values[0]["dense.weight"], rtol=0, atol=0)
        torch.testing.assert_close(values[rank]["expert.0.weight"], values[rank % 2]["expert.0.weight"], rtol=0, atol=0)
    assert not torch.equal(values[0]["expert.0.weight"], values[1]["expert.0.weight"])
    world.run(lambda rank: world.ddps[rank].check_replicas())


def test_a_replica_of_an_expert_that_differs_is_named_by_its_rank_among_all():
    world = MoeWorld()
    with torch.no_grad():
        world.models[3].expert[0].weight[0, 0] += 1.0

    def program(rank):
        with pytest.raises(ReplicasDivergedError) as caught:
            world.ddps[rank].check_replicas()
        return caught.value

    errors = world.run(program)
    assert {error.ranks for error in errors} == {(1, 3)}
    (text,) = set(map(str, errors))
    assert re.search(r"'expert.0.weight'.*: \d+ on rank 1; \d+ on rank 3", text)


@pytest.mark.parametrize(
    "group_of",
    [
        pytest.param({"expert.*": "expert"}, id="patterns"),
        pytest.param(lambda name, tensor: "expert" if name.startswith("expert.") and tensor.dim() else None, id="function"),
    ],
)
def test_groups_by_names(group_of):
    world = MoeWorld(model=Unmarked, group_of=group_of)

    assert {name for name, one in world.ddps[0].identities.items() if one.group == "expert"} == {
        "expert.0.weight",
        "expert.0.bias",
        "expert.2.weight",
        "expert.2.bias",
    }
    assert [buffer.key.group for buffer in world.ddps[0].layout.buffers] == ["dense", "expert"]


def wrap_error(world, wrap):
    errors = []

    def program(rank):
        try:
            wrap(rank)
        except Exception as error:
            errors.append((rank, error))

    world.run(program)
    return [error for _, error in sorted(errors, key=lambda pair: pair[0])]


def test_another_expert_on_one_rank_of_a_group_is_named_on_all_ranks():
    world = LoopbackWorld(4, timeout_s=20)
    experts = {number: world.subgroup(ranks) for number, ranks in EXPERT_RANKS.items()}

    def wrap(rank):
        model = Moe(rank % 2)
        if rank == 3:
            model.expert = torch.nn.Linear(10, 10)
            for param in model.expert.parameters():
                param.allreduce = False
        DistributedDataParallel(model, groups={"dense": world.communicator(rank), "expert": experts[rank % 2][rank]})

    errors = wrap_error(world, wrap)
    assert [type(error) for error in errors] == [LayoutMismatchError] * 4
    (text,) = set(map(str, errors))
    assert "rank 1 has expert.0.weight (10, 10) float32, rank 3 has expert.weight" in text


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        pytest.param(
            {"ranks": [3]}, "expert: .*ranks 1, 3, divisor=None.* on rank 1; rank 3, divisor=None.* on rank 3", id="ranks"
        ),
        pytest.param({"ranks": None}, "expert: .*ranks 1, 3,.* on rank 1; nothing on rank 3", id="name"),
        pytest.param({"divisor": 2}, "expert: .*divisor=None.* on rank 1; .*divisor=2.* on rank 3", id="divisor"),
        pytest.param(
            {"unused_parameters": "error"}, "ranks 1, 3,.*unused_parameters='error'.* on rank 3", id="unused parameters"
        ),
    ],
)
def test_a_group_that_is_another_one_on_one_rank_is_named_on_all_ranks(odd, text):
    """Nothing is made of groups before: ranks would wait for others that never come."""
    world = LoopbackWorld(4, timeout_s=20)
    experts = {ranks[0]: world.subgroup(ranks) for ranks in (*EXPERT_RANKS.values(), [3])}

    def wrap(rank):
        fields = {"ranks": EXPERT_RANKS[rank % 2], **(odd if rank == 3 else {})}
        ranks = fields.pop("ranks")
        groups = {"dense": world.communicator(rank)}
        if ranks is not None:
            groups["expert"] = ReductionGroup(experts[ranks[0]][rank], **fields)
        DistributedDataParallel(Moe(rank % 2), groups=groups)

    errors = wrap_error(world, wrap)
    assert [type(error) for error in errors] == [LayoutMismatchError] * 4
    assert len(set(map(str, errors))) == 1
    assert re.search(text, str(errors[0]))


def test_a_tensor_parallel_group_that_is_another_one_on_one_rank_is_named_on_all_ranks():
    world = LoopbackWorld(4, timeout_s=20)
    pairs, alone = world.subgroup([0, 1]) | world.subgroup([2, 3]), world.subgroup([3])

    def wrap(rank):
        everybody = world.communicator(rank)
        copies = {"tp": (alone if rank == 3 else pairs)[rank]}
        groups = ParallelGroups({"dense": everybody}, copies=copies, norm_group=everybody)
        DistributedDataParallel(torch.nn.Linear(2, 2), groups=groups)

    texts = set(map(str, wrap_error(world, wrap)))
    assert len(texts) == 1
    assert re.search("copies 'tp': ranks 0, 1 .* on ranks 0, 1; ranks 2, 3 .* on rank 2; rank 3 .* on rank 3", texts.pop())


def test_a_parameter_that_one_rank_puts_into_two_groups_is_named_on_all_ranks():
    world = LoopbackWorld(4, timeout_s=20)
    experts = {number: world.subgroup(ranks) for number, ranks in EXPERT_RANKS.items()}

    def wrap(rank):
        reduction = {"dense": world.communicator(rank), "expert": experts[rank % 2][rank]}
        groups = ParallelGroups(reduction, group_of={"expert.0.*": "dense"} if rank == 3 else None)
        DistributedDataParallel(Moe(rank % 2), groups=groups)

    errors = wrap_error(world, wrap)
    assert [type(error) for error in errors] == [PeerFailedError] * 4
    assert all("rank 3 failed in wrap: ConfigError: parameter 'expert.0.weight' is claimed by" in str(one) for one in errors)


@pytest.mark.parametrize(
    ("shapes", "offsets", "text"),
    [
        (
            [(4, 4), (4, 4)],
            [0, 0],
            r"'part on rank 0' and 'part on rank 1' claim the same part of 'experts.w': shape \(2, 4\) at \(0, 0\)",
        ),
        (
            [(4, 4), (4, 4)],
            [0, 1],
            r"the same part of 'experts.w': shape \(2, 4\) at \(0, 0\) of \(4, 4\), and \(2, 4\) at \(1, 0\)",
        ),
        (
            [(4, 4), (2, 4)],
            [2, 0],
            r"'experts.w': shape \(2, 4\) at \(2, 0\) of \(4, 4\), and \(2, 4\) at \(0, 0\) of \(2, 4\)",
        ),
        ([(4, 4), (4, 4)], [0, 2], None),
        ([(6, 4), (6, 4)], [0, 2], None),  # a part that no rank holds is missing in a checkpoint only
    ],
)
def test_identities_that_contradict_those_of_another_rank_are_refused_on_all(shapes, offsets, text):
    """Ranks 0 and 2 hold a part of one weight, ranks 1 and 3 another part; all other parameters have local names."""
    world = LoopbackWorld(4, timeout_s=20)
    experts = {number: world.subgroup(ranks) for number, ranks in EXPERT_RANKS.items()}

    def wrap(rank):
        def identity(name, param):
            part = rank % 2
            return ParamIdentity("experts.w", shapes[part], (offsets[part], 0), "expert") if name == "part" else None

        module = Moe(rank % 2)
        module.part = torch.nn.Parameter(torch.zeros(2, 4))
        reduction = {"dense": world.communicator(rank), "expert": experts[rank % 2][rank]}
        DistributedDataParallel(module, groups=ParallelGroups(reduction, identity=identity))

    errors = wrap_error(world, wrap)
    assert [type(error) for error in errors] == [LayoutError] * (0 if text is None else 4)
    assert all(re.search(text, str(error)) for error in errors)


def test_groups_may_be_given_in_another_order_on_each_rank():
    world = LoopbackWorld(4, timeout_s=20)
    experts = {number: world.subgroup(ranks) for number, ranks in EXPERT_RANKS.items()}

    def grads(rank):
        groups = {"dense": world.communicator(rank), "expert": experts[rank % 2][rank]}
        names = sorted(groups, reverse=rank % 2 == 1)
        ddp = DistributedDataParallel(Moe(rank % 2), groups={name: groups[name] for name in names})
        loss_of(ddp(batch(rank, 0))).backward()
        return {name: param.grad.clone() for name, param in ddp.module.named_parameters()}

    results = world.run(grads)
    expected = averaged_grads([Moe(rank % 2) for rank in range(4)], 0)
    for rank in range(4):
        for name, grad in results[rank].items():
            torch.testing.assert_close(grad, expected[rank][name])


def test_an_expert_without_a_group_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'expert.0.weight'.*groups="):
        DistributedDataParallel(Moe(0))


@pytest.mark.parametrize(
    ("group_of", "text"),
    [
        ({"expert.*": "dense"}, "'expert.0.weight' is claimed by the groups 'dense', 'expert'"),
        ({"head.*": "heads"}, "'head.weight' is of group 'heads'; the wrapper has 'dense', 'expert'"),
    ],
)
def test_double_and_missing_claims_are_named(group_of, text):
    world = LoopbackWorld(1)
    groups = ParallelGroups({"dense": world.communicator(0), "expert": world.communicator(0)}, group_of=group_of)
    with pytest.raises(ConfigError, match=text):
        DistributedDataParallel(Moe(0), groups=groups)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"unused_parameters": "zeros"}, "must be 'error', 'zero' or 'skip', got 'zeros'"),
        ({"divisor": 0.0}, "above 0, got 0.0"),
    ],
)
def test_a_group_with_a_wrong_setting_is_refused(fields, text):
    with pytest.raises(ConfigError, match=text):
        DistributedDataParallel(Moe(0), groups={"dense": ReductionGroup(LoopbackWorld(1).communicator(0), **fields)})


def test_groups_without_dense_are_refused():
    with pytest.raises(ConfigError, match="groups need 'dense'"):
        DistributedDataParallel(Moe(0), groups={"expert": LoopbackWorld(1).communicator(0)})


def test_a_nan_in_an_expert_of_one_rank_is_named_on_all_ranks():
    world = MoeWorld()

    def program(rank):
        ddp = world.ddps[rank]
        loss = loss_of(ddp(batch(rank, 0)))
        if rank == 1:
            loss = loss + ddp.module.expert[0].weight.sum() * math.nan
        with pytest.raises(NonFiniteGradientError) as caught:
            loss.backward()
        ddp.zero_grad()
        loss_of(ddp(batch(rank, 1))).backward()  # the next step is right
        return str(caught.value), ddp.module.head.weight.grad.clone()

    results = world.run(program)
    assert len({text for text, _ in results}) == 1
    assert "'expert.0.weight' on rank 1" in results[0][0]
    expected = averaged_grads(world.initial, 1)[0]["head.weight"]
    for _, grad in results:
        torch.testing.assert_close(grad, expected)


def test_the_state_of_an_optimizer_with_experts_is_that_of_plain_torch():
    world = MoeWorld(use_distributed_optimizer=True)

    def program(rank):
        ddp = world.ddps[rank]
        optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=1e-2), ddp)
        loss_of(ddp(batch(rank, 0))).backward()
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        ddp.rebuild()
        again = optimizer.state_dict()
        return state, again

    expected = averaged_grads(world.initial, 0)
    for rank, (state, again) in enumerate(world.run(program)):
        for index, (name, _) in enumerate(world.initial[rank].named_parameters()):
            moment = state["state"][index]["exp_avg"]
            torch.testing.assert_close(moment, expected[rank][name] * 0.1)
            torch.testing.assert_close(again["state"][index]["exp_avg"], moment, rtol=0, atol=0)


def test_a_broadcast_makes_values_equal_inside_each_group_alone():
    world = MoeWorld()

    def program(rank):
        with torch.no_grad():
            for param in world.models[rank].parameters():
                param.fill_(rank)
        world.ddps[rank].broadcast_params()
        return {name: param.unique().tolist() for name, param in world.models[rank].named_parameters()}

    for rank, values in enumerate(world.run(program)):
        assert values == {name: [float(rank % 2 if "expert" in name else 0)] for name in values}


class Unmarked(Moe):
    """Its experts have no mark of Megatron's."""

    def __init__(self, expert):
        super().__init__(expert)
        for param in self.parameters():
            param.allreduce = True


@pytest.mark.parametrize(
    ("doors", "said"),
    [
        pytest.param(
            {"group_of": {"experts.*": "expert", "head.*": "dense"}},
            " ('experts.*' of group_of= matches no name)",
            id="patterns",
        ),
        pytest.param({"group_of": lambda name, _: "expert" if name.startswith("experts.") else None}, "", id="function"),
        pytest.param({"identity": lambda name, param: plain_identity(name, tuple(param.shape))}, "", id="identity"),
        pytest.param({}, "", id="marks"),
        pytest.param(None, "", id="dict"),
    ],
)
def test_a_group_that_no_parameter_of_any_rank_is_in_is_refused_on_all_ranks_by_every_door(doors, said):
    world = LoopbackWorld(4, timeout_s=20)
    experts = {number: world.subgroup(ranks) for number, ranks in EXPERT_RANKS.items()}

    def wrap(rank):
        reduction = {"dense": world.communicator(rank), "expert": experts[rank % 2][rank]}
        groups = reduction if doors is None else ParallelGroups(reduction, **(doors if rank != 3 else {}))
        DistributedDataParallel(Unmarked(rank % 2), groups=groups)

    errors = wrap_error(world, wrap)
    assert [type(error) for error in errors] == [ConfigError] * 4
    (text,) = {str(error) for error in errors}
    assert text == (
        f"no parameter of any rank is in the group 'expert'{said}, so what belongs there would be averaged over the ranks of "
        "'dense'. Assign parameters to it by group_of={pattern: 'expert'}, by the group that identity= returns, or, for "
        "experts of Megatron, by param.allreduce = False; or leave 'expert' out of the groups."
    )


def test_a_group_may_have_its_parameters_on_some_ranks_only(caplog):
    world = LoopbackWorld(2, timeout_s=20)
    stages = [world.subgroup([rank])[rank] for rank in range(2)]

    def wrap(rank):
        layer = torch.nn.ModuleDict({("mixer", "expert")[rank]: torch.nn.Linear(2, 2)})
        groups = ParallelGroups(
            {"dense": stages[rank], "expert": stages[rank]},
            group_of={"expert.*": "expert", "experts.*": "expert"},
            step_group=world.communicator(rank),
        )
        return DistributedDataParallel(layer, groups=groups).layout.buffers[0].key.group

    assert world.run(wrap) == ["dense", "expert"]
    told = {record.getMessage() for record in caplog.records if "group_of=" in record.getMessage()}
    assert told == {"megabucket: group_of= has 'experts.*', which is no name of a parameter on any rank"}


def test_a_group_that_no_parameter_is_in_is_refused_on_one_rank_and_beside_groups_that_are_used():
    own = LoopbackWorld(1).communicator(0)
    group_of = {"expert.*": "expert"}

    with pytest.raises(ConfigError, match="is in the group 'vision'"):
        DistributedDataParallel(Moe(0), groups=ParallelGroups({"dense": own, "expert": own, "vision": own}, group_of=group_of))
    with pytest.raises(ConfigError, match="is in the group 'expert'"):
        DistributedDataParallel(Unmarked(0), groups={"dense": own, "expert": own})


def test_a_frozen_parameter_is_in_its_group():
    own, model = LoopbackWorld(1).communicator(0), Moe(0)
    model.expert.requires_grad_(False)

    DistributedDataParallel(model, groups={"dense": own, "expert": own})


def test_a_group_may_be_empty_after_a_rebuild_no_more_than_when_wrapping():
    own = LoopbackWorld(1).communicator(0)
    ddp = DistributedDataParallel(Moe(0), groups={"dense": own, "expert": own})
    for param in ddp.module.parameters():
        param.allreduce = True

    with pytest.raises(ConfigError, match="is in the group 'expert'"):
        ddp.rebuild()


def errors_of_wrong_expert_ranks(groups_of_ranks):
    """Ranks 0 and 2 hold expert 0, ranks 1 and 3 expert 1, by global names."""
    world = LoopbackWorld(4, timeout_s=20)
    experts = {rank: group for ranks in groups_of_ranks for rank, group in world.subgroup(ranks).items()}

    def wrap(rank):
        def identity(name, param):
            is_expert = name.startswith("expert.")
            whole = f"experts.{rank % 2}.{name}" if is_expert else name
            return ParamIdentity(whole, tuple(param.shape), (0,) * param.dim(), "expert" if is_expert else "dense")

        reduction = {"dense": world.communicator(rank), "expert": experts[rank]}
        DistributedDataParallel(Moe(rank % 2), groups=ParallelGroups(reduction, identity=identity))

    return wrap_error(world, wrap)


def test_a_group_that_joins_ranks_with_different_experts_is_named_with_its_ranks_on_all_ranks():
    errors = errors_of_wrong_expert_ranks([[0, 1], [2, 3]])

    assert [type(error) for error in errors] == [LayoutMismatchError] * 4
    assert {(error.group, error.ranks) for error in errors} == {("the group 'expert'", (0, 1))}
    assert len(set(map(str, errors))) == 1
    assert "is not the same on the ranks that the group 'expert' joins (ranks 0, 1): " in str(errors[0])
    assert "experts.0.expert.0.weight" in str(errors[0])
    assert "experts.1.expert.0.weight" in str(errors[0])
    assert (
        "If these ranks are not to hold the same, the group 'expert' joins the wrong ones: pass the ranks that hold the same "
        "parameters in groups=." in str(errors[0])
    )
    assert "Give every rank" not in str(errors[0])


def test_a_group_that_leaves_out_ranks_with_the_same_expert_is_no_advice_to_rename_it():
    errors = errors_of_wrong_expert_ranks([[0], [1], [2], [3]])

    (text,) = set(map(str, errors))
    assert "'expert.0.weight on rank 0' and 'expert.0.weight on rank 2' claim the same part" in text
    assert "if they are copies on two ranks, pass a group (in groups=, or copies=) that joins these ranks" in text


def test_tensor_parallel_ranks_with_different_copies_are_named_as_those_of_copies():
    world = LoopbackWorld(2, timeout_s=20)

    def wrap(rank):
        def identity(name, param):
            return ParamIdentity(f"{name} of {rank}", tuple(param.shape), (0,) * param.dim(), copies=("tp",), partial=("tp",))

        own = world.communicator(rank)
        groups = ParallelGroups({"dense": alone[rank]}, identity=identity, copies={"tp": own}, norm_group=own)
        DistributedDataParallel(torch.nn.Linear(2, 2), groups=groups)

    alone = {rank: world.subgroup([rank])[rank] for rank in range(2)}
    errors = wrap_error(world, wrap)
    assert {(type(error), error.group, error.ranks) for error in errors} == {(LayoutMismatchError, "copies 'tp'", (0, 1))}


@pytest.mark.parametrize("is_sharded", MODES)
def test_an_overflow_in_one_expert_is_a_skip_of_torchs_scaler_on_all_ranks_and_clipping_knows_the_whole_model(is_sharded):
    world = MoeWorld(use_distributed_optimizer=is_sharded, nonfinite_gradients="allow")
    expected_norm = norm_of(averaged_grads(world.initial, 1))

    def program(rank):
        ddp = world.ddps[rank]
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
        scaler, seen = torch.amp.GradScaler("cpu", init_scale=1024.0), []
        for step in range(2):
            loss = loss_of(ddp(batch(rank, step)))
            if step == 0:  # finite in the dense layers of each rank, infinite in the expert that ranks 1 and 3 hold
                loss = loss + (ddp.module.expert[0].bias * (math.inf if rank == 3 else 1.0)).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = optimizer.clip_grad_norm_(0.5 * expected_norm).item()
            scaler.step(optimizer)
            scaler.update()
            seen.append((optimizer.last_step.updated, scaler.get_scale(), norm))
            optimizer.zero_grad()
        return seen, optimizer.last_step.grad_norm

    for (first, second), norm_after in world.run(program):
        assert first[:2] == (False, 512.0)
        assert second == (True, 512.0, pytest.approx(expected_norm, rel=1e-5))
        assert norm_after == pytest.approx(0.5 * expected_norm, rel=1e-5)
