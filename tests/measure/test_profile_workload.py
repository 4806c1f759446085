"""Profiling real modules that take known times: lower bounds and orders only, the machine may be busy."""

import json
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import megabucket as mb
from megabucket.config import DistributedDataParallelConfig
from megabucket.errors import ConfigError, PhaseError
from megabucket.layout import ParamSpec
from megabucket.measure.profile import choose_rank
from megabucket.measure.profile_steps import WorkloadProfile
from megabucket.planning.workload import TensorWork, Workload, check_workload_matches, model_fingerprint, workload_from_dict
from megabucket.testing import LoopbackWorld

SHORT_S, LONG_S = 0.004, 0.012


class Sleep(torch.autograd.Function):
    """The identity, which sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_s)
        return grad, None, None


class Layer(torch.nn.Module):
    """Weight and bias; its gradients come after its sleep in backward."""

    def __init__(self, forward_s=SHORT_S, backward_s=SHORT_S):
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
        self.seconds = (forward_s, backward_s)

    def forward(self, x):
        return Sleep.apply(x * self.weight + self.bias, *self.seconds)


def train(model, num_steps=3, *, num_microbatches=1, optimizer=None, after_step=lambda: None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        for _ in range(num_microbatches):
            model(torch.ones(4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()


def seconds(profile, name):
    (tensor,) = (tensor for tensor in profile.workload.tensors if tensor.name == name)
    return tensor.forward_s, tensor.backward_s


def ready_names(profile):
    return [profile.workload.tensors[index].name for index in profile.workload.ready_order]


def test_known_times_are_found_at_their_tensors():
    model = torch.nn.Sequential(Layer(SHORT_S, LONG_S), Layer(LONG_S, SHORT_S))

    with mb.profile_workload(model) as profiler:
        train(model, num_microbatches=2)
    profile = profiler.profile()

    assert [tensor.name for tensor in profile.workload.tensors] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert {name.partition(".")[0] for name in ready_names(profile)[:2]} == {"1"}
    by_layer = [[sum(seconds(profile, f"{layer}.{name}")[i] for name in ("weight", "bias")) for i in (0, 1)] for layer in "01"]
    (first_forward_s, first_backward_s), (second_forward_s, second_backward_s) = by_layer
    # A sleep is at least as long as asked for; what is taken off for hooks is microseconds.
    assert min(first_forward_s, second_backward_s) > 0.9 * SHORT_S
    assert min(first_backward_s, second_forward_s) > 0.9 * LONG_S
    assert (profile.workload.num_microbatches, profile.facts["num_steps"]) == (2, 2)
    assert profile.workload.optimizer_s > 0
    assert profile.facts["unused"] == []


def test_afterwards_the_model_is_as_it_was():
    model = torch.nn.Sequential(Layer(), Layer())
    with mb.profile_workload(model) as profiler:
        train(model, 2)
    before = profiler._steps()

    train(model, 1)

    assert profiler._steps() == before
    assert all(not module._forward_pre_hooks and not module._forward_hooks for module in model.modules())


class Shared(torch.nn.Module):
    """A layer used at both ends, one between them, one frozen, one unused, one whose parameters only others read."""

    def __init__(self):
        super().__init__()
        self.ends, self.middle, self.frozen, self.unused = Layer(), Layer(LONG_S, SHORT_S), Layer(), Layer()
        self.frozen.requires_grad_(False)
        self.inner = torch.nn.ModuleDict({"reader": Reader()})
        self.alias = self.ends

    def forward(self, x):
        x = self.frozen(self.middle(self.ends(x)))
        return self.alias(self.inner["reader"](x))


class Reader(torch.nn.Module):
    """Reads parameters of modules that are never called: a list and a layer, as attention does."""

    def __init__(self):
        super().__init__()
        self.scales = torch.nn.ParameterList([torch.ones(4)])
        self.projection = torch.nn.Linear(4, 4)

    def forward(self, x):
        return Sleep.apply((x * self.scales[0]) @ self.projection.weight + self.projection.bias, LONG_S, SHORT_S)


def test_tied_frozen_unused_and_never_called_parts_are_all_where_they_belong():
    model = Shared()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with mb.profile_workload(model) as profiler:
        train(model, optimizer=optimizer)
    profile = profiler.profile()

    names = [tensor.name for tensor in profile.workload.tensors]
    assert names == [name for name, param in model.named_parameters() if param.requires_grad]
    assert not any(name.startswith(("frozen", "alias")) for name in names)
    assert profile.facts["unused"] == ["unused.weight", "unused.bias"]
    assert set(ready_names(profile)[-2:]) == {"unused.weight", "unused.bias"}
    # The shared layer is ready only after its first use, which backward comes to last.
    assert {name.partition(".")[0] for name in ready_names(profile)[-4:-2]} == {"ends"}
    # Its second use, after the reader, counts for the reader: nothing new is needed for it.
    reader_s = sum(tensor.forward_s for tensor in profile.workload.tensors if tensor.name.startswith("inner.reader"))
    assert reader_s > 0.9 * (LONG_S + SHORT_S)
    # The frozen layer counts for the one before it.
    assert sum(seconds(profile, f"middle.{name}")[0] for name in ("weight", "bias")) > 0.9 * (LONG_S + SHORT_S)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_with_activation_checkpointing_the_second_forward_counts_in_backward(use_reentrant):
    class SleepsFirst(Layer):
        def forward(self, x):  # the gradient of the weight needs what comes out of the sleep
            return Sleep.apply(x, *self.seconds) * self.weight + self.bias

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Layer(SHORT_S, SHORT_S), SleepsFirst(LONG_S, SHORT_S)

        def forward(self, x):
            return checkpoint(self.second, self.first(x), use_reentrant=use_reentrant)

    model = Checkpointed()
    with mb.profile_workload(model) as profiler:
        train(model)
    profile = profiler.profile()

    second = [seconds(profile, f"second.{name}") for name in ("weight", "bias")]
    assert sum(forward_s for forward_s, _ in second) > 0.9 * LONG_S
    assert sum(backward_s for _, backward_s in second) > 0.9 * LONG_S
    assert profile.workload.num_microbatches == 1


def test_only_optimizers_of_the_model_count():
    model, other = torch.nn.Sequential(Layer(0, 0)), torch.nn.Sequential(Layer(0, 0))
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    with mb.profile_workload(model) as profiler:
        train(model, 3, after_step=other_optimizer.step)

    assert len(profiler._steps()) == 3


def test_an_optimizer_that_calls_another_one_counts_as_a_whole():
    model = torch.nn.Sequential(Layer(0, 0))

    class SlowSgd(torch.optim.SGD):
        def step(self, closure=None):
            time.sleep(LONG_S)
            return super().step(closure)

    with mb.profile_workload(model) as profiler:
        train(model, optimizer=SlowSgd(model.parameters(), lr=0.1))

    assert profiler.profile().workload.optimizer_s > 0.9 * LONG_S
    assert profiler.profile().facts["num_steps"] == 2


@pytest.mark.parametrize("switches", [{}, {"use_distributed_optimizer": True}], ids=["all-reduce", "reduce-scatter"])
@pytest.mark.parametrize("is_given", [False, True])
def test_our_wrapper_is_profiled_with_its_optimizer(switches, is_given):
    config = DistributedDataParallelConfig(bucket_size=1, **switches)
    ddp = mb.DistributedDataParallel(torch.nn.Sequential(Layer(), Layer()), config)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters()), ddp)

    with mb.profile_workload(ddp, optimizer=optimizer if is_given else None) as profiler:
        train(ddp, optimizer=optimizer)

    workload = profiler.profile().workload
    assert [tensor.name for tensor in workload.tensors] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert workload.optimizer_s > 0
    assert workload.backward_s > 0.9 * 2 * SHORT_S


def test_a_span_may_be_called_the_optimizers_and_what_it_holds_counts_once():
    model = torch.nn.Sequential(Layer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mb.profile_workload(model) as profiler:
        for _ in range(3):
            model(torch.ones(4)).sum().backward()
            with profiler.optimizer_step():
                time.sleep(LONG_S)
                optimizer.step()

    assert profiler.profile().workload.optimizer_s > 0.9 * LONG_S


def test_the_bytes_on_the_wire_are_those_the_wrapper_would_send():
    model = torch.nn.Linear(4, 4).bfloat16()
    sizes = []
    for config in (None, DistributedDataParallelConfig(grad_reduce_in_fp32=False)):
        with mb.profile_workload(model, config=config) as profiler:
            for _ in range(2):
                model(torch.ones(4, dtype=torch.bfloat16)).sum().backward()
                profiler.end_step()
        workload = profiler.profile().workload
        sizes.append((workload.bytes_per_element, workload.param_bytes_per_element))

    assert sizes == [(4, 2), (2, 2)]


# The file #


def test_a_written_workload_is_read_back_and_fits_its_model_only(tmp_path):
    model = torch.nn.Sequential(Layer(0, 0), Layer(0, 0))
    with mb.profile_workload(model) as profiler:
        train(model)

    written = profiler.write(tmp_path / "new" / "workload.json")

    data = json.loads((tmp_path / "new" / "workload.json").read_text())
    assert workload_from_dict(data) == written.workload
    assert WorkloadProfile.from_dict(data) == written
    specs = [ParamSpec(name, tuple(param.shape)) for name, param in model.named_parameters()]
    assert data["facts"]["model_fingerprint"] == model_fingerprint(specs)
    check_workload_matches(written.workload, specs, fingerprint=data["facts"]["model_fingerprint"])
    with pytest.raises(ConfigError, match="is from another model"):
        check_workload_matches(written.workload, specs[:2])
    assert data["facts"]["torch"] == torch.__version__


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        WorkloadProfile(Workload((TensorWork("a", 1),)), {}).write(tmp_path)


def test_a_callback_writes_after_its_steps_and_lets_go(tmp_path):
    model = torch.nn.Sequential(Layer(0, 0))
    callback = mb.ProfileCallback(mb.WorkloadProfiler(model), tmp_path / "workload.json", steps=2)

    train(model, 2, after_step=callback)
    assert callback.result is None
    train(model, 3, after_step=callback)

    assert callback.result.facts["num_steps"] == 2
    assert workload_from_dict(json.loads((tmp_path / "workload.json").read_text())) == callback.result.workload
    assert not model[0]._forward_pre_hooks


def test_all_ranks_get_the_profile_of_one_and_the_first_one_writes_it(tmp_path):
    world = LoopbackWorld(2)

    def run(rank):
        model = torch.nn.Sequential(Layer(0, LONG_S if rank == 1 else 0))
        with mb.profile_workload(model) as profiler:
            for _ in range(2):
                model(torch.ones(4)).sum().backward()
                profiler.end_step()
        return profiler.write(tmp_path / f"{rank}.json", communicator=world.communicator(rank))

    first, second = world.run(run)

    assert first == second
    assert (first.facts["rank"], len(first.facts["compute_s_of_ranks"])) == (1, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]


def profile_taking(seconds):
    return WorkloadProfile(Workload((TensorWork("a", 1, backward_s=seconds),)), {"of": seconds})


@pytest.mark.parametrize(
    ("seconds", "slowest", "median"), [([1.0], 0, 0), ([3.0, 1.0], 0, 0), ([3.0, 1.0, 2.0], 0, 2), ([4.0, 1.0, 3.0, 2.0], 0, 2)]
)
def test_one_rank_is_chosen_as_a_whole(seconds, slowest, median):
    profiles = [profile_taking(one) for one in seconds]

    for which, rank in (("slowest", slowest), ("median", median)):
        chosen = choose_rank(profiles, which)
        assert chosen.workload == profiles[rank].workload
        assert chosen.facts == {"of": seconds[rank], "rank": rank, "which_rank": which, "compute_s_of_ranks": seconds}


# Bad input #


def test_too_few_steps_are_refused_with_what_to_do():
    model = torch.nn.Sequential(Layer(0, 0))
    with mb.profile_workload(model, warmup_steps=2) as profiler:
        train(model, 2)

    with pytest.raises(PhaseError, match=r"only 2 step\(s\) were profiled, and 2 do not count"):
        profiler.profile()


def test_a_profile_of_nothing_is_refused():
    model = torch.nn.Sequential(Layer(0, 0))
    with mb.profile_workload(model) as profiler:
        pass

    with pytest.raises(PhaseError, match="no step was profiled"):
        profiler.profile()


def test_a_negative_number_of_steps_is_refused():
    with pytest.raises(ConfigError, match="warmup_steps must be 0 or more, got -1"):
        mb.profile_workload(torch.nn.Linear(2, 2), warmup_steps=-1)


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ConfigError, match="has no trainable parameter"):
        mb.profile_workload(torch.nn.Linear(2, 2).requires_grad_(False))
