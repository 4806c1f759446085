"""Any program is a workload: a function of one's own, run through the same doors as the demo."""

import functools
import itertools
from typing import Annotated

import pytest
import torch
from pydantic import Field
from typer.testing import CliRunner

from megabucket.cli.main import app
from megabucket.comm import LocalCommunicator
from megabucket.config import DistributedDataParallelConfig
from megabucket.errors import ConfigError
from megabucket.measure.profile import ProfilePlan, profile_program
from megabucket.measure.program import Trainee, TrainingProgram, load_workload, load_workload_config, make_program
from megabucket.measure.ranks import Ranks
from megabucket.planning import RunConfig

MODULE = """
import torch

from megabucket.measure.program import TrainingProgram


def workload(config, ranks):
    model = torch.nn.Linear(8, 4, device=ranks.device)

    def losses(model):
        for _ in range(2):
            yield model(torch.ones(3, 8, device=ranks.device)).square().mean()

    return TrainingProgram(model, torch.optim.SGD(model.parameters(), lr=0.1), losses, num_microbatches=3)
"""


def program_of(losses, **fields):
    model = torch.nn.Linear(2, 2)
    return TrainingProgram(model, torch.optim.SGD(model.parameters(), lr=0.5), losses, **fields)


def endless(model):
    for _ in itertools.count():
        yield model(torch.ones(1, 2)).sum()


class OwnConfig(RunConfig):
    program: Annotated[int, Field(gt=0)] = 1


def own_workload(config: OwnConfig, ranks):
    return program_of(endless)


def test_a_function_in_the_working_directory_is_profiled_without_a_config(tmp_path, monkeypatch):
    (tmp_path / "my_program.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)

    result = CliRunner().invoke(app, ["profile", "--workload", "my_program:workload", "--steps", "2", "--warmup", "1"])

    assert result.exit_code == 0, result.output
    assert "wrote workload.json: 2 tensors, 36 elements" in result.stdout
    assert "microbatches: 3; nothing sent" in result.stdout


def test_a_function_is_profiled_from_python():
    plan = ProfilePlan(num_steps=2, num_warmup_steps=1)

    workload = profile_program(own_workload, RunConfig(), plan, ranks=Ranks()).workload

    assert [tensor.name for tensor in workload.tensors] == ["weight", "bias"]


def workload_with_an_unknown_name(config: "NotImported", ranks):  # noqa: F821 - as after an import under TYPE_CHECKING
    return program_of(endless)


@pytest.mark.parametrize(
    ("workload", "why"),
    [
        (workload_with_an_unknown_name, "NameError: name 'NotImported' is not defined"),
        (functools.partial(own_workload), "TypeError: "),
    ],
)
def test_annotations_that_cannot_be_read_are_a_config_error(workload, why):
    with pytest.raises(ConfigError, match=f"the annotations of the function cannot be read: {why}"):
        load_workload_config(workload, None, [])


def test_the_config_is_read_with_the_class_that_the_function_asks_for():
    config = load_workload_config(own_workload, None, ["program=7"])

    assert isinstance(config, OwnConfig)
    with pytest.raises(ConfigError, match="program"):
        load_workload_config(own_workload, None, ["program=0"])
    assert load_workload_config(print, None, ["program={a: 1}"]).program == {"a": 1}


@pytest.mark.parametrize("name", ["nothing_here:workload", "megabucket:nothing", "::"])
def test_a_function_that_is_not_there_is_named(name):
    with pytest.raises(ConfigError, match=r"--workload .* cannot be used: .*Steps are measured in a program of yours"):
        load_workload(name)


def test_a_function_of_a_model_is_no_workload():
    with pytest.raises(ConfigError, match=r"--workload .*:model_factory cannot be used: TypeError: too many positional"):
        load_workload(f"{__name__}:model_factory")


def model_factory():
    return torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["-c", "gpt2-124m"], "--workload is not given. Steps are measured in a program of yours"),
        (
            ["-w", "gpt2-124m"],
            "--workload gpt2-124m names no function: presets and config.json say which parameters a model has",
        ),
        (["-w", "my_program:workload", "-c", "gpt2-124m"], "this workload (2 tensors) is from another model"),
    ],
)
def test_a_model_alone_is_not_measured(arguments, problem, tmp_path, monkeypatch):
    (tmp_path / "my_program.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)

    result = CliRunner().invoke(app, ["profile", *arguments])

    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {problem}")


def test_a_step_has_as_many_microbatches_as_the_program_says_and_data_that_ends_begins_again():
    begun = []

    def one_epoch(model):
        begun.append(model)
        yield from itertools.islice(endless(model), 2)

    trainee = Trainee(program_of(one_epoch, num_microbatches=3), DistributedDataParallelConfig(), LocalCommunicator())
    before = trainee.ddp.module.weight.detach().clone()

    trainee.step()
    trainee.step()

    assert begun == [trainee.ddp] * 3  # 6 losses, 2 at a time
    assert torch.allclose(before - trainee.ddp.module.weight, torch.full((2, 2), 2 * 3 * 0.5))


def test_gradients_are_clipped_as_the_program_says():
    trainee = Trainee(program_of(endless, clip_grad=1e-9), DistributedDataParallelConfig(), LocalCommunicator())
    before = trainee.ddp.module.weight.detach().clone()

    trainee.step()

    assert torch.allclose(before, trainee.ddp.module.weight)


@pytest.mark.parametrize("given", [None, (1, 2), program_of(endless, num_microbatches=0)])
def test_what_is_no_program_is_refused(given):
    with pytest.raises(ConfigError, match="not a TrainingProgram with microbatches"):
        make_program(lambda *_: given, RunConfig(), Ranks())


def test_a_program_without_data_is_refused():
    trainee = Trainee(program_of(lambda _: iter(())), DistributedDataParallelConfig(), LocalCommunicator())

    with pytest.raises(ConfigError, match="yields no loss"):
        trainee.backward()
