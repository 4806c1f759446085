"""``megabucket checkpoint``: what it prints, and its exit codes."""

import json
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import megabucket as mb
from examples.bytegpt.checkpoints import BATCH_FACT, CORPUS_FACT, config_facts
from examples.bytegpt.config import load_demo_config
from examples.bytegpt.model import next_byte_loss
from examples.bytegpt.task import initial_model, make_optimizers
from megabucket.checkpoint.format import Piece, Snapshot, TensorInfo, seal_body
from megabucket.checkpoint.offline import compare
from megabucket.checkpoint.ranks import AloneRanks
from megabucket.checkpoint.save import SaveSettings, save_snapshot
from megabucket.checkpoint.stored import open_checkpoint
from megabucket.cli.main import app


def save(root, step, *, weight=0.0, lr=0.1):
    tensors = {"model.weight": torch.full((20, 30), weight), "model.bias": torch.zeros(30, dtype=torch.bfloat16)}
    pieces = [
        Piece(TensorInfo(name, str(t.dtype)[6:], tuple(t.shape), tuple(range(t.dim()))), 0, t.numel(), t.reshape(-1))
        for name, t in tensors.items()
    ]
    settings = SaveSettings(keep_last=None, max_file_bytes=1_000)
    return save_snapshot(root, step, Snapshot(pieces, {"lr": lr, "note": "a\x1bb"}), AloneRanks(), settings)


@pytest.fixture
def root(tmp_path):
    save(tmp_path / "run", 1)
    save(tmp_path / "run", 2, weight=1.0)
    return tmp_path / "run"


def invoke(*arguments):
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


def test_inspect_prints_what_is_there_and_escapes_what_would_control_the_terminal(root):
    result = invoke("inspect", root)

    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines == [
        f"{root}/step-00000002: step 2, written by 1 ranks",
        "3 files, 2.82 KiB; 2 tensors",
        "",
        "tensor dtype shape elements bytes pieces",
        "model.bias bfloat16 30 30 60 B 1",
        "model.weight float32 20x30 600 2.34 KiB 3",
        "",
        "lr: 0.1",
        r"note: 'a\x1bb'",
    ]


@pytest.mark.parametrize("where", ["root and step", "directory"])
def test_a_checkpoint_is_named_by_root_and_step_or_by_its_directory(root, where):
    arguments = [root, "--step", 1] if where == "root and step" else [root / "step-00000001"]

    answer = json.loads(invoke("inspect", *arguments, "--json").stdout)

    assert answer["step"] == 1
    assert answer["tensors"]["model.bias"] == {
        "dtype": "bfloat16",
        "shape": [30],
        "group": "dense",
        "blocks": [{"offset": [0], "shape": [30], "order": [0], "pieces": [[2, 0, 30]]}],
    }
    assert answer["values"] == {"lr": 0.1, "note": "a\x1bb"}
    assert len(answer["files"]) == 3


def test_verify_says_that_every_file_is_right(root):
    result = invoke("verify", root)

    assert result.exit_code == 0
    assert result.stdout == f"{root}/step-00000002: step 2, 3 files, 2.82 KiB: every file is right\n"


def test_verify_names_every_file_that_is_not_what_was_written(root):
    for name in ("rank-00000-00000.safetensors", "rank-00000-00002.safetensors"):
        path = root / "step-00000002" / name
        path.write_bytes(path.read_bytes()[:-1] + b"!")

    result, as_json = invoke("verify", root), invoke("verify", root, "--json")

    assert result.exit_code == as_json.exit_code == 6
    assert result.stdout.count("its SHA-256 is") == 2
    assert "2 of 3 files are not what was written" in result.stdout
    assert len(json.loads(as_json.stdout)["problems"]) == 2


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_damaged_manifest_is_exit_code_6_with_the_steps_that_are_left(root, command):
    path = root / "step-00000002" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-30])

    result = invoke(command, root)

    assert result.exit_code == 6
    assert "manifest.json: it does not end with a seal" in result.stderr
    assert "step 1 can be tried: name one as the step to read" in result.stderr


def test_an_empty_directory_is_exit_code_6(tmp_path):
    result = invoke("inspect", tmp_path)

    assert result.exit_code == 6
    assert "It holds no checkpoint at all: check the path" in result.stderr


def test_diff_names_what_differs_and_exits_with_1(root):
    result = invoke("diff", root, root, "--step", 1, "--other-step", 2)

    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "1 tensors are equal bit for bit, 1 differ; 0 other values differ",
        "tensor model.weight: 600 of elements 0:600 differ, the first at 0, by up to 1",
    ]


def test_diff_of_the_same_is_0(root, tmp_path):
    invoke("reshard", root, tmp_path / "out", "--ranks", 3)

    result = invoke("diff", root, tmp_path / "out", "--json")

    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"num_equal_tensors": 2, "tensors": [], "values": []}


def test_reshard_writes_for_other_ranks_and_prints_where(root, tmp_path):
    result = invoke("reshard", root, tmp_path / "out", "--ranks", 3, "--step", 1)

    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path}/out/step-00000001\n"
    assert open_checkpoint(tmp_path / "out").world_size == 3


def test_reshard_over_a_step_that_is_there_is_refused_unless_allowed(root, tmp_path):
    again = ["reshard", root, tmp_path / "out", "--ranks", 3]

    codes = [invoke(*again).exit_code, invoke(*again).exit_code, invoke(*again, "--overwrite").exit_code]

    assert codes == [0, 6, 0]


DEMO = ("--workload", "examples.bytegpt.workload:workload")
TINY = """
model: {kind: gpt, vocab_size: 256, hidden_size: 16, num_layers: 1, num_heads: 2, sequence_length: 8}
"""


@pytest.fixture
def trained(tmp_path):
    """A config, and a checkpoint of what it builds after one step."""
    (tmp_path / "run.yaml").write_text(TINY)
    config = load_demo_config(tmp_path / "run.yaml", [])
    program = config.program
    model = mb.DistributedDataParallel(initial_model(config, config.model, torch.device("cpu")), config.ddp)
    optimizer = mb.DistributedOptimizer(make_optimizers(program.optimizer, dict(model.named_parameters())), model)
    next_byte_loss(model, torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64)).backward()
    optimizer.step()
    facts = {**config_facts(config, config.model), BATCH_FACT: 2 * program.train.microbatch_size, CORPUS_FACT: "a"}
    position = {"run": facts}
    mb.save_checkpoint(tmp_path / "run", model, optimizer, step=1, data_position=position)
    mb.save_checkpoint(tmp_path / "later", model, optimizer, step=3, data_position=position)
    mb.save_checkpoint(tmp_path / "others", model, optimizer, step=1)
    model.detach()
    return tmp_path


def test_can_load_says_that_everything_fits(trained):
    result = invoke("can-load", trained / "run", *DEMO, "-c", trained / "run.yaml", "mode=reduce_scatter")

    assert result.exit_code == 0, result.output
    assert result.stdout.endswith(": everything fits\n")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("model.hidden_size=32", "shape"),
        ("model.num_layers=2", "is not in the checkpoint"),
        ("program.optimizer.name=sgd", "the optimizer was AdamW and is SGD"),
        ("model.dtype=bfloat16", "cast=True"),
        ("program.optimizer.weight_decay=0.5", "group"),
        ("program.train.seed=5", "train.seed: 0 in the checkpoint, 5 now"),
        ("program.optimizer.lr=0.5", "optimizer.lr: "),
        ("program.train.microbatch_size=64", "times the number of ranks now"),
        ("model.sequence_length=16", "model.sequence_length: 8 in the checkpoint, 16 now"),
    ],
)
def test_can_load_names_what_does_not_fit_and_exits_with_6(trained, override, problem):
    before = sorted(path.stat().st_mtime_ns for path in (trained / "run").rglob("*"))

    result = invoke("can-load", trained / "run", *DEMO, "-c", trained / "run.yaml", override)
    as_json = invoke("can-load", trained / "run", *DEMO, "-c", trained / "run.yaml", override, "--json")

    assert result.exit_code == as_json.exit_code == 6, result.output
    problems = json.loads(as_json.stdout)["problems"]
    assert any(problem in each for each in problems)
    assert result.stdout.splitlines()[0].endswith(f"{len(problems)} things do not fit")
    assert [each for each in problems if each.split()[0] not in result.stdout] == []
    assert sorted(path.stat().st_mtime_ns for path in (trained / "run").rglob("*")) == before


def test_can_load_says_that_a_checkpoint_is_not_of_this_program(trained):
    result = invoke("can-load", trained / "others", *DEMO, "-c", trained / "run.yaml")

    assert result.exit_code == 6
    assert "it was not saved by the demo" in result.stdout


@pytest.mark.parametrize("position", [{"!bytes": "zz"}, {"!number": ["float32", "x", 1]}])
def test_can_load_names_a_position_that_makes_no_sense(trained, position):
    path = open_checkpoint(trained / "run").path / "manifest.json"
    fields = json.loads(path.read_bytes())
    del fields["seal"]
    fields["values"]["data_position"] = position
    path.write_bytes(seal_body(json.dumps(fields)[:-1].encode()))

    result = invoke("can-load", path.parent, *DEMO, "-c", trained / "run.yaml")

    assert result.exit_code == 6, result.output
    assert "its values cannot be read" in result.stdout


def test_can_load_refuses_a_checkpoint_beyond_the_last_step(trained):
    arguments = ["can-load", trained / "later", *DEMO, "-c", trained / "run.yaml"]
    beyond, at_the_end = invoke(*arguments, "program.train.steps=2"), invoke(*arguments, "program.train.steps=3")

    assert (beyond.exit_code, at_the_end.exit_code) == (6, 0)
    assert beyond.stdout.splitlines()[1] == "it is of step 3, and train.steps=2 ends before"


def test_can_load_with_a_cast_takes_another_precision(trained):
    arguments = ["can-load", trained / "run", *DEMO, "-c", trained / "run.yaml", "model.dtype=bfloat16", "--cast"]

    assert invoke(*arguments).exit_code == 0


def test_can_load_with_a_config_that_cannot_be_trained_is_wrong_usage(trained):
    (trained / "none.yaml").write_text("{}")

    assert invoke("can-load", trained / "run", "-c", trained / "none.yaml").exit_code == 2


def test_weights_go_to_safetensors_and_back(trained):
    there = invoke("convert", trained / "run", trained / "hf", "--to", "safetensors")
    back = invoke("convert", trained / "hf", trained / "back", "--to", "megabucket", "--step", 7)

    assert (there.exit_code, there.stdout) == (0, f"{trained}/hf/model.safetensors\n")
    assert (back.exit_code, back.stdout) == (0, f"{trained}/back/step-00000007\n")
    first, second = open_checkpoint(trained / "run"), open_checkpoint(trained / "back")
    found = compare(first, second)
    assert found.num_equal_tensors == len(second.tensors) == sum(name.startswith("model.") for name in first.tensors)
    assert {difference.what for difference in found.tensors} == {"only in the first"}


@pytest.mark.parametrize("to", ["safetensors", "megabucket"])
def test_weights_that_are_there_are_replaced_only_if_allowed(root, tmp_path, to):
    invoke("convert", root, tmp_path / "hf", "--to", "safetensors", "--step", 1)
    source = root if to == "safetensors" else tmp_path / "hf"
    again = ["convert", source, tmp_path / "out", "--to", to]

    results = [invoke(*again), invoke(*again), invoke(*again, "--overwrite")]

    assert [result.exit_code for result in results] == [0, 6, 0]
    assert "overwrite" in results[1].stderr


def test_imported_weights_load_into_a_model_without_an_optimizer(trained):
    invoke("convert", trained / "run", trained / "hf", "--to", "safetensors")
    invoke("convert", trained / "hf" / "model.safetensors", trained / "back", "--to", "megabucket")
    config = load_demo_config(trained / "run.yaml", ["train.seed=5"])
    model = mb.DistributedDataParallel(initial_model(config, config.model, torch.device("cpu")), config.ddp)

    loaded = mb.load_checkpoint(trained / "back", model)

    assert loaded.step == 0
    saved = safetensors.torch.load_file(trained / "hf" / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in model.module.state_dict().items() if name in saved)
    model.detach()


def test_weights_are_exported_in_another_precision(trained):
    invoke("convert", trained / "run", trained / "hf", "--to", "safetensors", "--dtype", "bfloat16")

    saved = safetensors.torch.load_file(trained / "hf" / "model.safetensors")
    assert {str(value.dtype) for value in saved.values()} == {"torch.bfloat16"}


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "no safetensors file"),
        ({"model.safetensors": b""}, "no safetensors file"),
        ({"model.safetensors": b"12345678" * 4}, "no safetensors file: Error while deserializing header"),
        ({"model.safetensors.index.json": b"[]"}, "no index of safetensors files"),
        ({"model.safetensors.index.json": b'{"weight_map":{"a":"../b"}}'}, "'../b' is no name of a file beside it"),
    ],
)
def test_what_is_no_safetensors_file_is_wrong_usage(tmp_path, files, problem):
    (tmp_path / "hf").mkdir()
    for name, contents in files.items():
        (tmp_path / "hf" / name).write_bytes(contents)

    result = invoke("convert", tmp_path / "hf", tmp_path / "out", "--to", "megabucket")

    assert result.exit_code == 2
    assert problem in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_weight_that_is_not_where_the_index_says_is_wrong_usage(tmp_path):
    for name in ("a", "b"):
        safetensors.torch.save_file({"w": torch.zeros(3)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    result = invoke("convert", tmp_path, tmp_path / "out", "--to", "megabucket")

    assert result.exit_code == 2
    assert "b.safetensors: no safetensors file: File does not contain tensor v" in result.stderr


def test_a_dtype_for_a_checkpoint_is_wrong_usage(trained):
    result = invoke("convert", trained / "run", trained / "out", "--to", "megabucket", "--dtype", "float16")

    assert result.exit_code == 2
    assert "a checkpoint keeps its dtypes" in result.stderr


def test_the_command_line_starts_without_torch():
    code = "import sys, megabucket.cli.main; assert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True)
