import pytest

from megabucket.errors import ConfigError
from megabucket.measure.ranks import Launch, device_index, joined_ranks, read_launch

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_without_a_launcher_there_is_one_process_and_no_process_group():
    launch = read_launch({})

    assert launch == Launch()
    with joined_ranks(launch) as ranks:
        assert (ranks.rank, ranks.num_ranks, ranks.backend) == (0, 1, "none")
        assert ranks.gather("fact") == ["fact"]


def test_the_variables_of_torchrun_say_which_process_this_is():
    assert read_launch(TORCHRUN) == Launch(rank=3, num_ranks=8, local_rank=1, num_local_ranks=2, is_launched=True)


@pytest.mark.parametrize(("visible", "own"), [(None, False), ("", True), ("3", True), ("0,1", False)])
def test_a_process_that_sees_one_gpu_of_several_has_its_own(visible, own):
    shown = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}

    assert read_launch({**TORCHRUN, **shown}).has_own_device == own


def test_fewer_gpus_than_processes_are_not_used_and_that_is_said(caplog):
    assert device_index(Launch(local_rank=1, num_local_ranks=2), 1) is None

    assert "this host runs 2 processes and shows 1 GPUs to this one, so all work on CPUs" in caplog.text


def test_without_a_gpu_nothing_is_said(caplog):
    assert device_index(Launch(local_rank=1, num_local_ranks=2), 0) is None

    assert caplog.text == ""


@pytest.mark.parametrize("missing", sorted(TORCHRUN))
def test_a_variable_that_is_missing_is_named(missing):
    environment = {name: value for name, value in TORCHRUN.items() if name != missing}

    with pytest.raises(ConfigError, match=rf"{missing} is not set"):
        read_launch(environment)


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'two'"):
        read_launch({**TORCHRUN, "WORLD_SIZE": "two"})


@pytest.mark.parametrize("wrong", [{"RANK": "8"}, {"LOCAL_RANK": "2"}, {"WORLD_SIZE": "0"}])
def test_ranks_outside_their_world_are_refused(wrong):
    with pytest.raises(ConfigError, match="contradict each other"):
        read_launch({**TORCHRUN, **wrong})
