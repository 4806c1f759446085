import pytest
import torch

from megabucket.errors import ConfigError
from megabucket.measure.ranks import Ranks, device_index, joined_ranks

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_without_a_launcher_there_is_one_process_and_no_process_group():
    with joined_ranks({}) as ranks:
        assert ranks == Ranks(0, 1, torch.device("cpu"), "none")
        assert ranks.gather("fact") == ["fact"]


@pytest.mark.parametrize(
    ("num_devices", "has_own", "index"),
    [(0, False, None), (0, True, None), (1, False, None), (1, True, 0), (2, False, 1), (4, True, 1)],
)
def test_a_process_takes_its_own_gpu_or_none(num_devices, has_own, index, caplog):
    assert device_index(1, 2, num_devices, has_own_device=has_own) == index

    unused = f"this host runs 2 processes and shows {num_devices} GPUs to this one, so all work on CPUs"
    assert (unused in caplog.text) == (num_devices > 0 and index is None)


@pytest.mark.parametrize("missing", sorted(TORCHRUN))
def test_a_variable_that_is_missing_is_named(missing):
    environment = {name: value for name, value in TORCHRUN.items() if name != missing}

    with pytest.raises(ConfigError, match=rf"{missing} is not set"), joined_ranks(environment):
        pass


@pytest.mark.parametrize(("name", "size"), [("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")])
def test_a_rank_beyond_the_number_of_ranks_is_refused_before_it_joins(name, size, monkeypatch):
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: pytest.fail("joins the other ranks"))
    environment = {**TORCHRUN, name: TORCHRUN[size]}

    with pytest.raises(ConfigError, match=rf"{name}=(\d) and {size}=\1 disagree"), joined_ranks(environment):
        pass


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'two'"), joined_ranks({**TORCHRUN, "WORLD_SIZE": "two"}):
        pass
