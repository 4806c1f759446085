"""Copies and pickles of a wrapped module: a deepcopy is the plain module, a pickle of the original is refused by name."""

import contextlib
import copy
import io
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import megabucket as mb
from megabucket.errors import PhaseError, UnsupportedParameterError
from megabucket.testing import LoopbackWorld

WAYS = {
    "all_reduce": {},
    "reduce_scatter": {"use_distributed_optimizer": True},
    "overlap": {"use_distributed_optimizer": True, "overlap_param_gather": True},
}
PICKLES = {
    "pickle": pickle.dumps,
    "torch.save": lambda held: torch.save(held, io.BytesIO()),
    "to another process": ForkingPickler.dumps,
}
in_all_ways = pytest.mark.parametrize("switches", WAYS.values(), ids=WAYS)
in_all_pickles = pytest.mark.parametrize("save", PICKLES.values(), ids=PICKLES)


class Own(torch.nn.Module):
    """Has a parameter of its own beside those of its layers."""

    def __init__(self):
        super().__init__()
        self.scale, self.layer = torch.nn.Parameter(torch.ones(4)), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x * self.scale)


def tied():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def compiled():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model.compile(backend="eager")
    return model


def note_call(*_):
    """A hook of the user."""


def hooked():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    model.register_forward_hook(note_call)
    model[0].register_forward_pre_hook(note_call)
    return model


MODULES = {
    "containers": lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4))),
    "own parameters": Own,
    "frozen ones": lambda: torch.nn.Sequential(torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 4)),
    "without parameters in the root": lambda: torch.nn.Sequential(torch.nn.ReLU(), torch.nn.BatchNorm1d(4)),
    "tied": tied,
    "compiled": compiled,
    "torch.compile": lambda: torch.compile(torch.nn.Linear(4, 4), backend="eager"),
    "user hooks": hooked,
    "graph": lambda: torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())),
}
in_all_modules = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


def wrap(model, **switches):
    return mb.DistributedDataParallel(model, mb.DistributedDataParallelConfig(**switches))


def train(ddp):
    ddp(torch.ones(3, 4)).square().sum().backward()


def values(module):
    return torch.cat([value.detach().flatten().float() for value in module.state_dict().values()])


@in_all_ways
@in_all_modules
@in_all_pickles
def test_a_pickle_of_a_wrapped_module_is_refused_by_name(save, make, switches):
    ddp = wrap(make(), **switches)

    for part in ddp.module.modules():
        with pytest.raises(PhaseError, match=r"a wrapped module cannot be pickled, nor .* ddp\.state_dict\(\).*deepcopy"):
            save(part)


@pytest.mark.parametrize("save", [pickle.dumps, lambda held: torch.save(held, io.BytesIO())], ids=["pickle", "torch.save"])
def test_a_pickle_of_its_parameters_is_refused_by_name_and_their_values_may_be_saved(save):
    ddp = wrap(Own())

    for held in (ddp.module.scale, list(ddp.module.parameters()), ddp.module.state_dict(keep_vars=True)):
        with pytest.raises(PhaseError, match="a wrapped module cannot be pickled"):
            save(held)
    save(ddp.module.state_dict())
    save(ddp.module.scale.detach())


@in_all_ways
@in_all_modules
@pytest.mark.parametrize("save", [pickle.dumps, lambda held: torch.save(held, io.BytesIO())], ids=["pickle", "torch.save"])
def test_after_detach_it_is_pickled_as_before_wrapping(save, make, switches):
    if make is MODULES["torch.compile"] or make is MODULES["compiled"]:
        torch.compiler.reset()
    ddp = wrap(make(), **switches)

    save(ddp.detach())


@in_all_ways
@in_all_modules
def test_a_deepcopy_is_pickled_as_a_plain_module_and_both_go_on(make, switches):
    ddp = wrap(make(), **switches)
    twin = copy.deepcopy(ddp.module)

    again = pickle.loads(pickle.dumps(twin))  # noqa: S301 - our own bytes

    assert b"megabucket" not in pickle.dumps(torch.nn.ModuleList([*twin.children()]))
    assert torch.equal(values(again), values(ddp.module))
    for module in (twin, again):
        module(torch.ones(3, 4)).square().sum().backward()
        assert [param.grad is not None for param in module.parameters()] == [p.requires_grad for p in ddp.module.parameters()]
    assert ddp.sync.is_between_steps
    train(ddp)


def test_the_pickle_of_a_copy_is_read_by_a_program_without_this_package(tmp_path):
    ddp = wrap(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), **WAYS["overlap"])
    torch.save(copy.deepcopy(ddp.module), tmp_path / "model.pt")
    program = (
        "import sys, torch; sys.modules['megabucket'] = None\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "model.load_state_dict(model.state_dict()); print(tuple(model(torch.ones(2, 4)).shape))"
    )

    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert found.stdout == "(2, 4)\n", found.stderr


def test_user_hooks_are_copied_and_ours_are_not():
    ddp = wrap(hooked(), **WAYS["overlap"])

    twin = copy.deepcopy(ddp.module)

    found = [
        hook
        for module in twin.modules()
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_post_hooks")
        for hook in getattr(module, kind).values()
    ]
    assert found.count(note_call) == 2
    others = [hook for hook in found if hook is not note_call]
    assert others
    assert {hook.__func__ for hook in others} == {contextlib.nullcontext.__exit__}


@pytest.mark.parametrize("save", [pickle.dumps, lambda held: torch.save(held, io.BytesIO())], ids=["pickle", "torch.save"])
def test_a_pickle_of_a_plain_optimizer_is_refused_by_what_to_save_and_a_deepcopy_is_that_of_torch(save):
    ddp = wrap(Own())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
    train(ddp)
    optimizer.step()

    with pytest.raises(PhaseError, match=r"the state_dict\(\) of an optimizer that holds the parameters"):
        save(optimizer)
    save(optimizer.state_dict())
    twin = copy.deepcopy(optimizer)

    assert all(map(torch.equal, twin.param_groups[0]["params"], ddp.module.parameters()))
    assert twin.state_dict()["state"][0]["step"] == 1


def test_a_copy_of_a_copy_is_plain_too():
    twin = copy.deepcopy(copy.deepcopy(wrap(Own(), **WAYS["overlap"]).module))

    assert torch.equal(values(pickle.loads(pickle.dumps(twin))), values(Own())) is False  # noqa: S301 - random weights
    assert torch.compile(twin, backend="eager", fullgraph=True)(torch.ones(2, 4)).shape == (2, 4)


def test_a_module_whose_rebuild_has_failed_is_refused_and_copied_as_well():
    ddp = wrap(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    ddp.module.extra = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(UnsupportedParameterError):
        ddp.rebuild()
    del ddp.module.extra

    with pytest.raises(PhaseError, match="a wrapped module cannot be pickled"):
        pickle.dumps(ddp.module)
    twin = copy.deepcopy(ddp.module)

    assert twin(torch.ones(2, 4)).shape == (2, 4)


COPIES = {
    "deepcopy": lambda ddp: copy.deepcopy(ddp.module),
    "each part by itself": lambda ddp: torch.nn.ModuleList([copy.deepcopy(part) for part in ddp.module.modules()]),
    "a list of module and parameters": lambda ddp: copy.deepcopy([*ddp.module.parameters(), ddp.module])[-1],
    "AveragedModel": lambda ddp: AveragedModel(ddp.module).module,
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("make", [MODULES["containers"], Own], ids=["containers", "own parameters"])
def test_a_copy_of_the_module_has_the_values_of_after_the_step_while_they_are_gathered(make, duplicate):
    initial = make()

    def play(communicator, *, overlaps):
        config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=overlaps, bucket_size=8)
        ddp = mb.DistributedDataParallel(copy.deepcopy(initial), config, communicator=communicator)
        optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.1), ddp)
        for _ in range(2):
            train(ddp)
            optimizer.step()
            optimizer.zero_grad()
        is_hidden = any(param.isnan().any() for param in ddp.module.parameters())
        found = [param.detach().clone() for param in duplicate(ddp).parameters()]
        train(ddp)
        optimizer.step()
        return is_hidden, found, values(ddp)

    runs = [LoopbackWorld(2, timeout_s=20), LoopbackWorld(2, timeout_s=20)]
    late = runs[0].run(lambda rank: play(runs[0].communicator(rank), overlaps=True))
    right = runs[1].run(lambda rank: play(runs[1].communicator(rank), overlaps=False))

    for (is_hidden, found, after), (_, expected, after_expected) in zip(late, right, strict=True):
        assert is_hidden
        assert all(map(torch.equal, found, expected))
        assert torch.equal(after, after_expected)
