"""Checkpoints by global name and place: experts and pieces of tensors, from any ranks to any. Real files, loopback worlds."""

from dataclasses import replace

import pytest
import torch
from grouped_models import NUM_EXPERTS, STACKED, Model, Place, run_ranks, whole_shapes
from safetensors.torch import load_file
from typer.testing import CliRunner

import megabucket as mb
from megabucket.checkpoint.canonical import GlobalNames, empty_piece, in_shape
from megabucket.checkpoint.catalog import Latest, StepDirectory
from megabucket.checkpoint.convert.dcp import save_dcp
from megabucket.checkpoint.convert.huggingface import export_weights
from megabucket.checkpoint.format import Piece, Snapshot, TensorInfo, decode_manifest, encode_manifest, seal_of
from megabucket.checkpoint.offline import compare, reshard
from megabucket.checkpoint.ranks import AloneRanks
from megabucket.checkpoint.save import SaveSettings, save_snapshot
from megabucket.cli.main import app
from megabucket.errors import (
    CheckpointInvalidError,
    CheckpointMismatchError,
    CheckpointNotSavedError,
    ConfigError,
    LayoutError,
    OptimizerParametersError,
)
from megabucket.layout import ParamIdentity
from megabucket.testing import LoopbackWorld

MODES = pytest.mark.parametrize("sharded", [False, True], ids=["all_reduce", "reduce_scatter"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def stretch(root, first, dtype):
    """Load what the last stretch saved, train two steps and save; return what is not as in one process."""

    def program(run):
        if first:
            loaded = run.load(root)
            assert (loaded.step, loaded.data_position) == (first, first)
            for number, expert in zip(run.place.experts, run.model.local_experts, strict=True):
                assert expert.seen.tolist() == [number + first, first]
                assert expert.history.tolist() == [number, first]
            assert int(run.model.steps) == first
        run.train(range(first, first + 2))
        differing = run.differences(first + 2, dtype)
        run.save(root, first + 2)
        return differing

    return program


@DTYPES
@MODES
def test_experts_go_from_two_ranks_to_one_and_to_four_as_if_never_interrupted(tmp_path, sharded, dtype):
    plan = [(4, 2, sharded, 40), (2, 1, not sharded, None), (4, 4, sharded, 7), (8, 2, sharded, 64), (1, 1, sharded, 1)]
    for index, (size, ep, is_sharded, bucket_size) in enumerate(plan):
        settings = {"sharded": is_sharded, "bucket_size": bucket_size, "dtype": dtype, "seed": 3 * index}

        differing = run_ranks(size, stretch(tmp_path, 2 * index, dtype), ep=ep, **settings)

        assert differing == [[]] * size, (size, ep)


@DTYPES
@MODES
@pytest.mark.parametrize("channels_last", [False, True], ids=["row_major", "channels_last"])
def test_pieces_of_tensor_parallel_ranks_go_from_two_to_one_and_on(tmp_path, sharded, dtype, channels_last):
    plan = [(4, 2, sharded), (2, 1, not sharded), (1, 1, sharded), (4, 2, not sharded), (2, 2, sharded)]
    for index, (size, tp, is_sharded) in enumerate(plan):
        settings = {
            "sharded": is_sharded,
            "dtype": dtype,
            "seed": 3 * index,
            "channels_last": channels_last is (index % 2 == 0),
        }

        differing = run_ranks(size, stretch(tmp_path, 2 * index, dtype), tp=tp, **settings)

        assert differing == [[]] * size, (size, tp)


@MODES
def test_the_manifest_says_which_parts_of_the_whole_model_there_are(tmp_path, sharded):
    run_ranks(4, lambda run: run.train(range(1)).save(tmp_path / "ep", 1), ep=2, sharded=sharded)
    run_ranks(4, lambda run: run.train(range(1)).save(tmp_path / "tp", 1), tp=2, sharded=sharded)

    experts, cut = mb.open_checkpoint(tmp_path / "ep"), mb.open_checkpoint(tmp_path / "tp")

    assert {name.removeprefix("model."): info.shape for name, info in experts.tensors.items() if name.startswith("model.")} == {
        **whole_shapes(),
        **{f"experts.{number}.seen": (2,) for number in range(NUM_EXPERTS)},
        "steps": (),
    }
    stored = {**experts.manifest.tensors, **cut.manifest.tensors}
    blocks = {name: [info.box for info in tensor.infos(name)] for name, tensor in stored.items()}
    assert blocks[f"model.{STACKED}"] == [((0, 2), (0, 3), (0, 4)), ((2, 4), (0, 3), (0, 4))]
    assert blocks["optim.state.embedding.weight.exp_avg"] == [((0, 8), (0, 3)), ((0, 8), (3, 6))]
    assert blocks["optim.state.norm.weight.exp_avg"] == [((0, 6),)]  # copies on all ranks, written once
    groups = {name: info.group for name, info in experts.tensors.items()}
    assert groups["optim.state.experts.3.up.bias.exp_avg_sq"] == groups[f"model.{STACKED}"] == "expert"
    assert groups["model.norm.weight"] == "dense"
    members = [group["params"] for group in experts.values["optimizer"]["groups"]]
    assert sorted(name for group in members for name in group) == sorted(whole_shapes())


def test_reshard_compare_and_export_take_a_cut_tensor_for_the_whole_it_is(tmp_path):
    for tp in (1, 2):
        run_ranks(2 * tp, lambda run, tp=tp: run.train(range(2)).save(tmp_path / f"{tp}", 2), tp=tp, sharded=True)
    one, two = (mb.open_checkpoint(tmp_path / f"{tp}") for tp in (1, 2))

    reshard(two, tmp_path / "written", num_writers=3, settings=SaveSettings(max_file_bytes=700))
    (path,) = export_weights(two, tmp_path / "exported")

    written = mb.open_checkpoint(tmp_path / "written")
    assert {len(tensor.blocks) for tensor in two.manifest.tensors.values()} == {1, 2}
    assert {len(tensor.blocks) for tensor in written.manifest.tensors.values()} == {1}
    for first, second in [(one, two), (two, written)]:
        differing = [one.name for one in compare(first, second).tensors if not one.name.startswith("rng.")]
        assert differing == []
    assert torch.equal(load_file(path)["embedding.weight"], whole(one, "model.embedding.weight"))


def whole(stored, name):
    piece = empty_piece(stored.tensors[name], 0, stored.tensors[name].numel)
    stored.read([piece])
    return in_shape(piece.values, piece.info.shape, piece.info.order)


def test_the_command_line_shows_global_names_blocks_and_groups(tmp_path):
    run_ranks(4, lambda run: run.train(range(1)).save(tmp_path, 1), ep=2, sharded=True)

    result = CliRunner().invoke(app, ["checkpoint", "inspect", str(tmp_path)])

    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "tensor dtype shape elements bytes pieces blocks group" in lines
    assert "model.experts.3.up.bias float32 5 5 20 B 1 1 expert" in lines
    assert any(line.startswith("model.stacked.weight float32 4x3x4 48 192 B") and line.endswith("2 expert") for line in lines)


@MODES
def test_in_the_background_it_is_the_same_checkpoint(tmp_path, sharded):
    def program(run):
        with mb.Checkpointer(tmp_path / "kept", run.ddp, run.optimizer, asynchronous=True) as checkpointer:
            checkpointer.save(1, data_position=1)
            run.train(range(1))
            checkpointer.save(2, data_position=2)
        run.save(tmp_path / "fresh", 2)

    run_ranks(4, program, ep=2, sharded=sharded)

    kept, fresh = (mb.open_checkpoint(tmp_path / name) for name in ("kept", "fresh"))
    assert (kept.manifest.tensors, kept.files) == (fresh.manifest.tensors, fresh.files)


# What is missing, or there twice #


def errors_of(size, act, kind, **settings):
    """The errors that ``act(run)`` raises on each rank; the runs can train on."""

    def program(run):
        before = {name: param.detach().clone() for name, param in run.model.named_parameters()}
        with pytest.raises(kind) as caught:
            act(run)
        assert all(torch.equal(before[name], param) for name, param in run.model.named_parameters())
        run.train(range(1))
        return str(caught.value)

    return run_ranks(size, program, **settings)


def test_experts_without_a_global_name_are_claimed_twice(tmp_path):
    world = LoopbackWorld(4, timeout_s=20)
    same = [world.subgroup([0, 2]), world.subgroup([1, 3])]

    def program(rank):
        module = torch.nn.ModuleDict({"dense": torch.nn.Linear(2, 2), "expert": torch.nn.Linear(2, 2)})
        groups = mb.ParallelGroups(
            {"dense": world.communicator(rank), "expert": same[rank % 2][rank]}, group_of={"expert.*": "expert"}
        )
        ddp = mb.DistributedDataParallel(module, groups=groups)
        texts = []
        for act in (
            lambda: mb.save_checkpoint(tmp_path / "run", ddp, step=1),
            lambda: mb.load_checkpoint(tmp_path / "good", ddp),
        ):
            with pytest.raises(LayoutError) as caught:
                act()
            texts.append(str(caught.value))
        return texts

    plain = LoopbackWorld(1)
    module = torch.nn.ModuleDict({"dense": torch.nn.Linear(2, 2), "expert": torch.nn.Linear(2, 2)})
    mb.save_checkpoint(tmp_path / "good", mb.DistributedDataParallel(module, communicator=plain.communicator(0)), step=1)

    for texts in world.run(program):
        for text in texts:
            assert "'expert.weight' on ranks 0, 1 hold elements twice: [0:2, 0:2] and [0:2, 0:2]" in text
            assert "'expert.bias'" in text
            assert "'dense" not in text
            assert "identity= give each part its own global_name" in text
    assert not (tmp_path / "run").exists()


def test_a_piece_whose_other_pieces_no_rank_holds_is_named(tmp_path):
    world = LoopbackWorld(1)
    half = Place(0, 2, tp=2)
    groups = mb.ParallelGroups({"dense": world.communicator(0)}, identity=half.identity)
    ddp = mb.DistributedDataParallel(Model(half), groups=groups)

    with pytest.raises(LayoutError, match=r"'embedding.weight' on ranks 0 hold 24 of its 48 elements: \[0:8, 0:3\]"):
        mb.save_checkpoint(tmp_path, ddp, step=1)


@pytest.mark.parametrize("sharded", [False, True])
def test_experts_that_only_one_side_has_are_named_on_all_ranks(tmp_path, sharded):
    run_ranks(4, lambda run: run.train(range(1)).save(tmp_path / "with", 1), ep=4, sharded=sharded)
    run_ranks(2, lambda run: run.train(range(1)).save(tmp_path / "without", 1), sharded=sharded)

    surplus = errors_of(2, lambda run: run.load(tmp_path / "with"), CheckpointMismatchError, sharded=sharded)
    missing = errors_of(4, lambda run: run.load(tmp_path / "without"), CheckpointMismatchError, ep=2, sharded=sharded)

    assert len({*surplus}) == len({*missing}) == 1
    assert "'model.experts.3.up.bias' is in the checkpoint and not in the model" in surplus[0]
    assert "'model.experts.0.up.weight' is not in the checkpoint" in missing[0]


def test_a_rank_that_lacks_only_its_own_expert_is_heard_by_all(tmp_path):
    run_ranks(4, lambda run: run.train(range(1)).save(tmp_path, 1), ep=4, sharded=True)
    manifest = next(tmp_path.glob("step-*")) / "manifest.json"
    sealed = decode_manifest(manifest.read_bytes())
    tensors = {name: of for name, of in sealed.tensors.items() if name != "optim.state.experts.2.up.bias.exp_avg"}
    raw = encode_manifest(replace(sealed, tensors=tensors))
    manifest.write_bytes(raw)
    (tmp_path / "latest").write_bytes(Latest(StepDirectory(1, 1), seal_of(raw)).encode())

    texts = errors_of(4, lambda run: run.load(tmp_path), CheckpointMismatchError, ep=4, sharded=True, seed=1)

    assert len(set(texts)) == 1
    assert "'optim.state.experts.2.up.bias.exp_avg' is not in the checkpoint" in texts[0]


@pytest.mark.parametrize("what", ["flipped", "deleted"])
def test_a_damaged_or_missing_file_of_one_expert_is_named_on_all_ranks(tmp_path, what):
    run_ranks(4, lambda run: run.train(range(1)).save(tmp_path, 1), ep=4, sharded=True)
    stored = mb.open_checkpoint(tmp_path)
    (block,) = stored.manifest.tensors["model.experts.2.up.bias"].blocks
    victim = stored.path / stored.files[block.pieces[0].file].name
    raw = bytearray(victim.read_bytes())
    raw[-1] ^= 1
    victim.unlink() if what == "deleted" else victim.write_bytes(raw)

    # The weights of one expert are of no interest to the other ranks.
    texts = errors_of(4, lambda run: run.load(tmp_path), CheckpointInvalidError, ep=4, sharded=True, seed=1)

    assert victim.name == "rank-00002-00000.safetensors"
    assert len(set(texts)) == 1
    assert victim.name in texts[0]


def test_a_save_that_fails_on_the_rank_of_one_expert_saves_nothing_anywhere(tmp_path):
    (tmp_path / "file").write_text("")

    def save(run):
        run.save(tmp_path / "file" / "below" if run.rank == 2 else tmp_path / "run", 1)

    texts = errors_of(4, save, CheckpointNotSavedError, ep=4, sharded=True)

    assert len(set(texts)) == 1
    assert "step 1: the checkpoint was not saved: rank 2:" in texts[0]
    assert not list((tmp_path / "run").glob("step-*"))


@MODES
def test_step_counts_that_differ_between_copies_are_named(tmp_path, sharded):
    def save(run):
        if run.rank == 1:  # the second of the ranks along tp, which does not write
            for shard in run.optimizer.sharding.shards:
                if "norm.weight" in shard.segment.params:
                    run.optimizer.sharding.updates[0].twin.state[shard.main]["step"] += 1
        run.save(tmp_path, 1)

    def program(run):
        run.train(range(1))
        with pytest.raises(OptimizerParametersError) as caught:
            save(run)
        return str(caught.value)

    texts = run_ranks(2, program, tp=2, sharded=sharded)

    assert texts[0] == texts[1]
    assert "ranks hold different numbers" in texts[0]
    assert "norm.weight" in texts[0]


def test_whether_it_can_be_loaded_is_said_of_what_this_rank_takes(tmp_path):
    run_ranks(4, lambda run: run.train(range(1)).save(tmp_path, 1), ep=4, sharded=True)

    def ask(run):
        return mb.can_load(tmp_path, run.ddp, run.optimizer)

    assert run_ranks(4, ask, ep=2, sharded=False) == [[]] * 4
    assert run_ranks(2, ask, ep=None, sharded=True)[1][0].startswith("'model.experts.0.")
    assert run_ranks(2, ask, ep=1, sharded=True, dtype=torch.bfloat16)[1][0].startswith("'model.scale' is float32 in the")


def test_the_doors_to_other_formats_take_wrappers_with_one_group(tmp_path):
    def program(run):
        with pytest.raises(ConfigError, match="checkpoint is for wrappers whose ranks all hold the same"):
            save_dcp(tmp_path / "dcp", run.ddp, run.optimizer)
        return run.train(range(1)) is run

    assert all(run_ranks(4, program, ep=2, sharded=True))
    assert not (tmp_path / "dcp").exists()


def test_state_dicts_are_those_of_each_rank():
    def program(run):
        run.train(range(1))
        return set(run.ddp.state_dict()), len(run.optimizer.state_dict()["state"])

    results = run_ranks(4, program, ep=4, sharded=True)

    assert all("local_experts.0.up.weight" in names and len(names) == 10 for names, _ in results)
    assert {number for _, number in results} == {7}  # of 4 dense parameters, its part of the stacked one, and two of its expert


def test_module_buffers_keep_their_names_where_global_ones_are_not_clear():
    homes = {"a.weight": "x", "b.bias": "x", "c.weight": "late.c", "d.weight": "y", "d.bias": "z"}
    module = torch.nn.ModuleDict({name: torch.nn.Module() for name in "abcd"})
    for local in homes:
        module[local[0]].register_parameter(local[2:], torch.nn.Parameter(torch.zeros(2)))
        module[local[0]].register_buffer("seen", torch.zeros(1))
    module.register_buffer("all", torch.zeros(1))

    def identity(name, param):
        return ParamIdentity(f"{homes[name]}.{name[2:]}", (2,), (0,))

    groups = mb.ParallelGroups({"dense": LoopbackWorld(1).communicator(0)}, identity=identity)

    names = GlobalNames(mb.DistributedDataParallel(module, groups=groups))

    # Parameters of "a" and "b" are in one module of the whole model, those of "d" in two; "c" has moved as it is.
    assert list(names.buffers) == ["all", "a.seen", "b.seen", "late.c.seen", "d.seen"]


def test_of_a_cut_tensor_only_the_files_with_wanted_rows_are_read(tmp_path):
    weight = torch.arange(80.0).reshape(10, 8)
    infos = [TensorInfo("w", "float32", (10, 4), (0, 1), (0, column), (10, 8)) for column in (0, 4)]
    pieces = [Piece(info, 0, 40, weight[:, info.offset[1] : info.offset[1] + 4].reshape(-1)) for info in infos]
    save_snapshot(tmp_path, 1, Snapshot(pieces, {}), AloneRanks(), SaveSettings(max_file_bytes=80))
    stored = mb.open_checkpoint(tmp_path)
    blocks = stored.manifest.tensors["w"].blocks
    for block in blocks:
        for part in block.pieces[1:]:
            (stored.path / stored.files[part.file].name).unlink()
    num_rows = min(block.pieces[0].stop for block in blocks) // 4
    wanted = Piece(TensorInfo("w", "float32", (10, 8), (0, 1)), 3, 8 * num_rows, torch.empty(8 * num_rows - 3))

    stored.read([wanted])

    assert 1 <= num_rows < 10
    assert torch.equal(wanted.values, weight.reshape(-1)[3 : 8 * num_rows])
