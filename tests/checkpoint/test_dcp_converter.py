"""To and from ``torch.distributed.checkpoint``, in one process; several ranks and FSDP2: tests/ranks."""

import errno
import os
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_capture_and_restore import BUILDS, SHAPES, Tensors, factors_of, groups_of
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict

import megabucket as mb
from megabucket.checkpoint.canonical import info_of
from megabucket.checkpoint.convert.dcp import FlatRange, boxes_of, load_dcp, save_dcp
from megabucket.checkpoint.format import Piece
from megabucket.comm import LocalCommunicator
from megabucket.errors import CheckpointError, CheckpointMismatchError, ConfigError
from megabucket.testing import LoopbackWorld

MODES = pytest.mark.parametrize("sharded", [False, True], ids=["all_reduce", "reduce_scatter"])


class Ours:
    """A run of this library in one process."""

    def __init__(self, *, sharded, dtype=torch.float32, seed=1, kind="AdamW"):
        self.model = Tensors(dtype, seed=seed)
        optimizer = BUILDS[kind](groups_of(self.model))
        config = mb.DistributedDataParallelConfig(use_distributed_optimizer=sharded, bucket_size=64)
        self.ddp = mb.DistributedDataParallel(self.model, config, communicator=LocalCommunicator())
        self.optimizer = mb.DistributedOptimizer(optimizer, self.ddp)

    def train(self, steps):
        for step in steps:
            self.ddp(factors_of(step)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def outcome(self):
        return self.ddp.state_dict(), self.optimizer.state_dict()["state"]


class Plain:
    """A run of plain torch; its groups as those of ``Ours``."""

    def __init__(self, *, seed=1, kind="AdamW"):
        self.model = Tensors(seed=seed)
        self.optimizer = BUILDS[kind](groups_of(self.model))

    def train(self, steps):
        for step in steps:
            self.model(factors_of(step)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def outcome(self):
        return self.model.state_dict(), self.optimizer.state_dict()["state"]

    @property
    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}


EMPTY = 3
"""The parameter without elements; its state is in no checkpoint."""


def assert_same(one, other):
    assert one[0].keys() == other[0].keys()
    for name, tensor in one[0].items():
        assert torch.equal(tensor, other[0][name]), name
    in_both = one[1].keys() & other[1].keys() - {EMPTY}
    for index in in_both:
        for key, value in one[1][index].items():
            assert torch.equal(value, other[1][index][key]), (index, key)
    assert len(in_both) >= 4


def without_group_warning(act, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return act(*args, **kwargs)


@MODES
@pytest.mark.parametrize("kind", ["AdamW", "SGD momentum"])
def test_plain_torch_goes_on_from_what_is_saved_here(tmp_path, sharded, kind):
    save_dcp(tmp_path / "dcp", *vars_of(Ours(sharded=sharded, kind=kind).train(range(3))))

    plain = Plain(seed=2, kind=kind).train(range(1))
    state_dict = plain.state_dict
    # A frozen parameter and one without elements have state in torch's dict, and none here.
    wanted = {name: value for name, value in state_dict["optim"]["state"].items() if name not in "df"}
    state_dict = {"model": state_dict["model"], "optim": {**state_dict["optim"], "state": wanted}}
    without_group_warning(dcp.load, state_dict, checkpoint_id=str(tmp_path / "dcp"))
    plain.model.load_state_dict(state_dict["model"])
    for name, param in plain.model.named_parameters():
        if name in wanted:
            plain.optimizer.state[param] = wanted[name]
    plain.train(range(3, 5))

    assert_same(plain.outcome(), Ours(sharded=sharded, kind=kind).train(range(5)).outcome())


def vars_of(ours):
    return ours.ddp, ours.optimizer


@MODES
@pytest.mark.parametrize("kind", ["AdamW", "SGD momentum"])
def test_a_run_goes_on_from_what_plain_torch_has_saved(tmp_path, sharded, kind):
    without_group_warning(dcp.save, Plain(kind=kind).train(range(3)).state_dict, checkpoint_id=str(tmp_path))

    ours = Ours(sharded=sharded, kind=kind, seed=2)
    load_dcp(tmp_path, *vars_of(ours), trusted=True)
    ours.train(range(3, 5))

    assert_same(ours.outcome(), Plain(kind=kind).train(range(5)).outcome())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_there_and_back_in_another_mode_nothing_is_lost(tmp_path, dtype):
    first = Ours(sharded=True, dtype=dtype).train(range(3))
    save_dcp(tmp_path, *vars_of(first), data_position={"sample": 3}, extras={"mean": torch.arange(4.0)})

    second = Ours(sharded=False, dtype=dtype, seed=2)
    loaded = load_dcp(tmp_path, *vars_of(second), trusted=True)

    assert loaded.data_position == {"sample": 3}
    assert torch.equal(loaded.extras["mean"], torch.arange(4.0))
    assert_same(second.train(range(3, 5)).outcome(), first.train(range(3, 5)).outcome())


def test_weights_alone_load_without_an_optimizer(tmp_path):
    without_group_warning(dcp.save, {"model": Plain().model.state_dict()}, checkpoint_id=str(tmp_path))
    ours = Ours(sharded=True, seed=2)

    load_dcp(tmp_path, ours.ddp, trusted=True)

    assert all(torch.equal(tensor, Plain().model.state_dict()[name]) for name, tensor in ours.ddp.state_dict().items())


def test_torchs_converter_reads_whole_tensors_in_torchs_nesting(tmp_path):
    ours = Ours(sharded=True).train(range(2))
    save_dcp(tmp_path / "dcp", *vars_of(ours))

    without_group_warning(dcp_to_torch_save, tmp_path / "dcp", tmp_path / "file.pt")
    found = torch.load(tmp_path / "file.pt", weights_only=True)

    assert torch.equal(found["model"]["e"], ours.model.e)
    assert torch.equal(found["model"]["tied"], ours.model.a)
    assert found["optim"]["state"]["e"]["exp_avg"].shape == SHAPES["e"]
    assert found["optim"]["param_groups"][0]["params"] == ["b", "c"]
    assert found["optim"]["param_groups"][0]["lr"] == 0.02


def test_a_model_that_differs_is_named(tmp_path):
    save_dcp(tmp_path, *vars_of(Ours(sharded=True).train(range(1))))
    ours = Ours(sharded=True, kind="SGD")

    with pytest.raises(CheckpointMismatchError, match="the optimizer was AdamW and is SGD"):
        load_dcp(tmp_path, *vars_of(ours), trusted=True)


def test_files_are_read_only_where_they_are_trusted(tmp_path):
    with pytest.raises(ConfigError, match="would run code that its files contain"):
        load_dcp(tmp_path, *vars_of(Ours(sharded=True)), trusted=False)


@pytest.mark.parametrize("damage", ["cut off", "gone"])
def test_a_data_file_that_torch_cannot_read_is_a_named_error_and_changes_nothing(tmp_path, damage):
    save_dcp(tmp_path, *vars_of(Ours(sharded=True, kind="AdamW").train(range(2))))
    (data,) = tmp_path.glob("*.distcp")
    data.unlink() if damage == "gone" else data.write_bytes(data.read_bytes()[:100])
    ours = Ours(sharded=True, kind="AdamW", seed=2)
    before = [param.detach().clone() for param in ours.ddp.parameters()]

    with pytest.raises(CheckpointError, match="torch cannot read it"):
        load_dcp(tmp_path, *vars_of(ours), trusted=True)

    assert all(torch.equal(param, value) for param, value in zip(ours.ddp.parameters(), before, strict=True))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_pipe_in_the_place_of_a_file_is_an_error_at_once(tmp_path, name):
    save_dcp(tmp_path, *vars_of(Ours(sharded=True)))
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)

    with pytest.raises(CheckpointError, match=f"not a regular file: .*{name}"):
        load_dcp(tmp_path, *vars_of(Ours(sharded=True)), trusted=True)


def test_a_directory_without_such_a_checkpoint_is_an_error_that_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"it is no checkpoint of torch\.distributed\.checkpoint: \.metadata is missing"):
        load_dcp(tmp_path / "gone", *vars_of(Ours(sharded=True)), trusted=True)


def test_what_torch_cannot_write_is_a_named_error(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)

    with pytest.raises(CheckpointError, match="torch cannot write it: OSError"):
        save_dcp(tmp_path, *vars_of(Ours(sharded=True)))


def test_a_directory_that_holds_something_is_not_written_into(tmp_path):
    (tmp_path / "something").write_text("")

    with pytest.raises(CheckpointError, match="is not empty"):
        save_dcp(tmp_path, *vars_of(Ours(sharded=True)))


def test_ranks_without_a_process_group_are_refused(tmp_path):
    world = LoopbackWorld(2, timeout_s=5)

    def program(rank):
        ddp = mb.DistributedDataParallel(Tensors(), communicator=world.communicator(rank))
        with pytest.raises(ConfigError, match="needs a process group"):
            save_dcp(tmp_path / "dcp", ddp)

    world.run(program)


def test_a_flat_range_is_a_few_views_and_computes_nothing():
    whole = torch.arange(2 * 3 * 2 * 2.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last)
    info = info_of("w", whole)
    values = whole.permute(info.order).reshape(-1)[5:21].clone()

    made = FlatRange([Piece(info, 5, 21, values)])
    chunks = made.__create_chunk_list__()

    assert len(chunks) == len(boxes_of((2, 2, 2, 3), 5, 21))
    for item, chunk in zip(made.__create_write_items__("w", made), chunks, strict=True):
        box = tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
        view = made.__get_tensor_shard__(item.index)
        assert torch.equal(view, whole[box])
        assert view.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    with pytest.raises(TypeError, match="can only be saved or loaded"):
        made.clone()
