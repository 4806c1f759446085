"""What a checkpoint costs as ranks become more: files, collectives, bytes of the exchanges, length of the manifest."""

import pytest
import torch

import megabucket as mb
from megabucket.layout import ParamSpec, build_layout
from megabucket.testing import LoopbackWorld

SIZES = (8, 16, 32, 64)
NUM_PARAMS = 8
PARAM_NUMEL = 1_024


def bytes_of(schedule, label):
    """Return the bytes that each rank receives in an exchange."""
    prefix = f"{label} [all_gather of "
    (found,) = (text.removeprefix(prefix) for text in schedule if text.startswith(prefix))
    return int(found.partition(" ")[0])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """For each number of ranks: the schedules of rank 0 for saving and for loading, files, bytes of the manifest."""
    found = {}
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=PARAM_NUMEL)
    for size in SIZES:
        world, root = LoopbackWorld(size, timeout_s=120), tmp_path_factory.mktemp("run")

        def act(rank, world=world, root=root):
            params = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(PARAM_NUMEL)) for _ in range(NUM_PARAMS)])
            ddp = mb.DistributedDataParallel(params, config, communicator=world.communicator(rank))
            optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.1), ddp)
            sum(param.sum() for param in params).backward()
            optimizer.step()
            optimizer.zero_grad()
            lengths = [len(world.schedule(rank))]
            mb.save_checkpoint(root, ddp, optimizer, step=1)
            lengths.append(len(world.schedule(rank)))
            mb.load_checkpoint(root, ddp, optimizer)
            schedule = world.schedule(rank)
            return schedule[lengths[0] : lengths[1]], schedule[lengths[1] :]

        save, load = world.run(act)[0]
        (manifest,) = root.rglob("manifest.json")
        found[size] = save, load, len(mb.open_checkpoint(root).files), manifest.stat().st_size
    return found


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_writes_one_file_where_its_state_is_less_than_64_mib(saved, size):
    assert saved[size][2] == size


def test_saving_takes_15_collectives_and_loading_19_and_the_gathers_whatever_the_number_of_ranks(saved):
    for save, load, _, _ in saved.values():
        assert len(save) == 15
        assert len([text for text in load if not text.startswith("param gather")]) == 19


@pytest.mark.parametrize("size", SIZES[1:])
def test_twice_as_many_ranks_receive_twice_as_many_bytes_about_the_model(saved, size):
    for kind, label in enumerate(("saving a checkpoint: model", "loading a checkpoint: model")):
        assert bytes_of(saved[size][kind], label) == 2 * bytes_of(saved[size // 2][kind], label)


@pytest.mark.parametrize("size", SIZES[2:])
def test_the_manifest_grows_by_the_same_bytes_for_each_rank(saved, size):
    """Those of the file of a rank and of its pieces: here of the parameter and two moments, in each of eight buckets."""
    per_rank = (saved[size][3] - saved[size // 2][3]) / (size // 2)

    assert per_rank == pytest.approx((saved[size // 2][3] - saved[size // 4][3]) / (size // 4), rel=0.02)
    assert 700 < per_rank < 900


@pytest.mark.parametrize("size", [8, 16, 64, 128, 1_024, 4_096, 16_384])
def test_a_bucket_is_padded_to_a_multiple_of_the_ranks(size):
    """Of 128 or of the number of ranks, if that is more: both are powers of two here."""
    layout = build_layout(
        [ParamSpec(f"p{index}", (5_000,)) for index in range(3)],
        mb.DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=5_000),
        dp_size=size,
    )

    unit = max(size, 128)
    assert [bucket.numel for bucket in layout.buffers[0].buckets] == [-(-5_000 // unit) * unit] * 3
