"""Averages of the weights and parameter groups by name, around the step."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import megabucket as mb
from megabucket.errors import CallMismatchError, ConfigError
from megabucket.testing import LoopbackWorld

DECAY, STEPS = 0.8, 6
GATHERS = {
    "all-reduced": {},
    "gathered at once": {"use_distributed_optimizer": True},
    "gathered in the next forward": {"use_distributed_optimizer": True, "overlap_param_gather": True},
    "gathered in one batch": {"use_distributed_optimizer": True, "overlap_param_gather": True, "bucket_groups": "single"},
}


def net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def data(step):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step))


def plain_average(steps=STEPS):
    model = net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(steps):
        model(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return dict(average.module.named_parameters())


class Rank:
    def __init__(self, communicator, initial, *, is_whole=False, **fields):
        config = mb.DistributedDataParallelConfig(bucket_size=20, **fields)
        self.ddp = mb.DistributedDataParallel(copy.deepcopy(initial), config, communicator=communicator)
        inner = torch.optim.AdamW(self.ddp.parameters(), lr=0.05)
        if is_whole:
            inner.update_kind = "tensor"
        self.optimizer = mb.DistributedOptimizer(inner, self.ddp)
        self.average = mb.ShardedEMA(self.optimizer, decay=DECAY)
        self.of_torch = AveragedModel(self.ddp.module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        self.rows = slice(communicator.rank * 4 // communicator.size, (communicator.rank + 1) * 4 // communicator.size)

    def train(self, steps):
        for step in steps:
            self.ddp(data(step)[self.rows]).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.average.update()
            self.of_torch.update_parameters(self.ddp)
        return self

    def averages(self):
        return {name: values.clone() for name, values in self.of_torch.module.named_parameters()}, self.average.values()


def run_ranks(size, program, **fields):
    world, initial = LoopbackWorld(size, timeout_s=20), net()
    return world.run(lambda rank: program(Rank(world.communicator(rank), initial, **fields)))


@pytest.mark.parametrize("fields", GATHERS.values(), ids=GATHERS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_averages_are_those_of_plain_torch_in_every_gather_mode(size, fields):
    expected = plain_average()
    for found in run_ranks(size, lambda one: one.train(range(STEPS)).averages(), **fields):
        for averages in found:
            torch.testing.assert_close(averages, {**expected}, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("path", ["state_dict", "rebuild", "checkpoint"])
def test_an_average_goes_on_where_it_was_saved(path, tmp_path):
    def program(one):
        one.train(range(3))
        if path == "rebuild":
            one.ddp.rebuild()
        elif path == "state_dict":
            one.optimizer.load_state_dict(one.optimizer.state_dict())
        else:
            mb.save_checkpoint(tmp_path, one.ddp, one.optimizer, step=3)
            one.train(range(5))
            mb.load_checkpoint(tmp_path, one.ddp, one.optimizer)
        return one.train(range(3, STEPS)).average.values()

    expected = plain_average()
    for found in run_ranks(2, program, **GATHERS["gathered in the next forward"]):
        torch.testing.assert_close(found, {**expected}, rtol=1e-5, atol=1e-6)


def test_an_average_begins_with_the_first_step_that_updates():
    def program(one):
        one.average.update()
        before = one.average.values()
        one.train([0])
        return before, one.average.values(), dict(one.ddp.named_parameters())

    ((before, after, now),) = run_ranks(1, program)
    assert before == {}
    assert all(torch.equal(after[name], value) for name, value in now.items())


def test_it_begins_so_if_the_caller_has_changed_state_since():
    def program(one):
        one.ddp(data(0)[one.rows]).square().mean().backward()
        one.optimizer.step()
        one.optimizer.state[next(one.ddp.parameters())]["exp_avg"] = torch.zeros(8, 4)
        one.optimizer.zero_grad()
        one.optimizer.state_dict()  # takes the change
        one.average.update()
        return one.average.values(), dict(one.ddp.named_parameters())

    ((found, now),) = run_ranks(1, program)
    assert all(torch.equal(found[name], value) for name, value in now.items())
    assert found.keys() == now.keys()


@pytest.mark.parametrize("fields", GATHERS.values(), ids=GATHERS)
def test_averages_of_a_bf16_model_are_those_of_its_float32_main_parameters(fields):
    world, initial = LoopbackWorld(2, timeout_s=20), net().bfloat16()

    def program(number):
        rank, seen = Rank(world.communicator(number), initial, **fields), []
        for step in range(STEPS):
            rank.ddp(data(step).bfloat16()).float().square().mean().backward()
            rank.optimizer.step()
            rank.optimizer.zero_grad()
            rank.average.update()
            seen.append({index: values["main_param"] for index, values in sorted(rank.optimizer.state_dict()["state"].items())})
        return seen, rank.average.values()

    for mains, average in world.run(program):
        expected = mains[0]
        for weights in mains[1:]:
            expected = {index: DECAY * expected[index] + (1 - DECAY) * weights[index] for index in weights}
        torch.testing.assert_close(
            list(average.values()), [expected[index] for index in sorted(expected)], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("path", ["rebuild", "load_state_dict"])
def test_an_average_waits_for_the_first_step_on_parameters_without_state(path):
    def program(one):
        fresh = one.optimizer.state_dict()
        one.train([0])
        if path == "rebuild":
            one.ddp.module.append(torch.nn.Linear(2, 2))
            one.optimizer.add_param_group({"params": [*one.ddp.module[4].parameters()]})
            one.ddp.rebuild()
        else:
            one.optimizer.load_state_dict(fresh)
        one.average.update()
        before = len(one.average.values())
        one.ddp(data(1)).square().mean().backward()
        one.optimizer.step()
        one.average.update()
        return before, len(one.average.values())

    expected = (6, 8) if path == "rebuild" else (0, 6)
    assert run_ranks(2, program, use_distributed_optimizer=True) == [expected] * 2


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_a_decay_that_is_none_is_refused(decay):
    with pytest.raises(ConfigError, match="decay must be a number from 0 to 1"):
        mb.ShardedEMA(None, decay=decay)


def plain_norms(dtype):
    """Gradient, weight and update of the last of three steps, by name, where one process takes all rows."""
    model = net().to(dtype)
    main = copy.deepcopy(model).float()
    optimizer = torch.optim.AdamW(main.parameters(), lr=0.05)
    for step in range(3):
        for p, m in zip(model.parameters(), main.parameters(), strict=True):
            p.data.copy_(m)
        before = [p.detach().clone() for p in main.parameters()]
        model(data(step).to(dtype)).square().mean().backward()
        for p, m in zip(model.parameters(), main.parameters(), strict=True):
            m.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(main.parameters(), 0.1)
        optimizer.step()
    return {
        name: (param.grad.norm().item(), param.norm().item(), (param - earlier).norm().item())
        for (name, param), earlier in zip(main.named_parameters(), before, strict=True)
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "fields", [*GATHERS.values(), {"use_distributed_optimizer": True, "is_whole": True}], ids=[*GATHERS, "updated at owners"]
)
def test_norms_of_each_parameter_are_those_of_plain_torch(size, fields, dtype):
    world, initial = LoopbackWorld(size, timeout_s=20), net().to(dtype)

    def program(number):
        rank = Rank(world.communicator(number), initial, grad_reduce_in_fp32=True, **fields)
        rank.optimizer.clip_grad = 0.1
        with mb.param_norms(rank.optimizer) as untaken:
            pass
        for step in range(3):
            rank.ddp(data(step).to(dtype)).square().mean().backward()  # the same rows on all ranks
            with mb.param_norms(rank.optimizer) as norms:
                rank.optimizer.step()
            rank.optimizer.zero_grad()
        assert untaken == {}
        return norms

    found = world.run(program)

    expected = plain_norms(dtype)
    assert all(norms == found[0] for norms in found)
    assert list(found[0]) == list(expected)
    for name, norms in found[0].items():
        assert norms == pytest.approx(expected[name], rel=1e-5 if dtype == torch.float32 else 1e-3), name
        assert norms.update_ratio == norms.update / norms.weight


def test_norms_over_replicas_and_several_groups_are_those_of_plain_torch():
    world, initial = LoopbackWorld(4, timeout_s=20), net()
    inside, over = world.subgroup([0, 1]) | world.subgroup([2, 3]), world.subgroup([0, 2]) | world.subgroup([1, 3])

    def program(number):
        everybody = world.communicator(number)
        ranks = {"dense": mb.ReductionGroup(inside[number], over[number]), "head": everybody}
        groups = mb.ParallelGroups(ranks, group_of={"3.*": "head"}, norm_group=everybody)
        config = mb.DistributedDataParallelConfig(bucket_size=20, use_distributed_optimizer=True)
        ddp = mb.DistributedDataParallel(copy.deepcopy(initial), config, groups=groups)
        optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.05), ddp, clip_grad=0.1)
        for step in range(3):
            ddp(data(step)).square().mean().backward()
            with mb.param_norms(optimizer) as norms:
                optimizer.step()
            optimizer.zero_grad()
        return norms

    found, expected = world.run(program), plain_norms(torch.float32)

    assert all(norms == found[0] for norms in found)
    assert {name: pytest.approx(norms, rel=1e-5) for name, norms in expected.items()} == found[0]


@pytest.mark.parametrize("is_measured", [False, True])
def test_an_owner_keeps_no_gradients_between_steps(is_measured):
    def program(one):
        one.ddp(data(0)).square().mean().backward()
        with mb.param_norms(one.optimizer) if is_measured else nullcontext():
            one.optimizer.step()
        owned = one.optimizer.sharding.whole_shards
        assert all(shard.main.grad is None for shard in owned)
        return [shard.grad.untyped_storage().nbytes() for shard in owned]

    found = run_ranks(2, program, use_distributed_optimizer=True, is_whole=True)

    assert [set(of_rank) for of_rank in found] == [{0}, {0}]


def test_a_step_that_is_skipped_has_no_norms():
    def program(one):
        one.ddp(data(0) * float("inf")).square().mean().backward()
        with mb.param_norms(one.optimizer) as norms:
            assert not one.optimizer.step().updated
        return norms

    assert run_ranks(2, program, use_distributed_optimizer=True, nonfinite_gradients="skip_step") == [{}, {}]


def test_a_rank_that_does_not_ask_for_norms_is_named():
    def program(one):
        watched = mb.param_norms(one.optimizer)
        if one.rows.start == 0:
            watched.__enter__()
        one.ddp(data(0)).square().mean().backward()
        one.optimizer.step()
        with pytest.raises(CallMismatchError, match=r"param_norms\(\)"):
            watched.__exit__(None, None, None) if one.rows.start == 0 else one.ddp.check_replicas()

    run_ranks(2, program, use_distributed_optimizer=True)


class TestParamGroups:
    def test_the_first_rule_that_takes_a_parameter_gets_it_and_frozen_ones_are_left_out(self):
        model = net()
        model[3].bias.requires_grad_(False)

        groups = mb.param_groups(
            model, ("0.*", {"lr": 0.1}), (lambda _, param: param.ndim < 2, {"weight_decay": 0.0}), ("3.w*", {"lr": 0.2})
        )

        names = {param: name for name, param in model.named_parameters()}
        assert [([names[p] for p in group.pop("params")], group) for group in groups] == [
            (["0.weight", "0.bias"], {"lr": 0.1}),
            (["1.weight", "1.bias"], {"weight_decay": 0.0}),
            (["3.weight"], {"lr": 0.2}),
        ]

    def test_they_are_those_of_a_distributed_optimizer(self):
        def program(rank):
            ddp = mb.DistributedDataParallel(net(), mb.DistributedDataParallelConfig(use_distributed_optimizer=True))
            groups = mb.param_groups(ddp.module, (lambda _, param: param.ndim < 2, {"weight_decay": 0.0}))
            optimizer = mb.DistributedOptimizer(torch.optim.AdamW(groups, weight_decay=0.1), ddp)
            return [len(group["params"]) for group in optimizer.state_dict()["param_groups"]]

        assert program(0) == [4, 2]

    def test_a_rule_that_takes_nothing_is_an_error(self):
        with pytest.raises(
            ConfigError, match=r"1 rule\(s\) for parameter groups match no trainable parameter: 'bias'\..*'0.weight'"
        ):
            mb.param_groups(net(), ("bias", {"weight_decay": 0.0}))
