"""Weights as safetensors files, checked with the library that others read them with."""

import json
import os
import re

import pytest
import torch
from kept_in_memory import KeptInMemory
from safetensors import safe_open
from safetensors.torch import load_file
from test_capture_and_restore import SHAPES, captured

from megabucket.checkpoint.convert.huggingface import FILE_NAME, INDEX_NAME, export_weights, import_weights
from megabucket.errors import ConfigError


@pytest.fixture(scope="module")
def kept():
    return captured(3, range(3), mode="reduce_scatter", dtype=torch.bfloat16)


def test_one_file_holds_all_weights_in_their_shapes(kept, tmp_path):
    (path,) = export_weights(kept, tmp_path / "new")

    found = load_file(path)

    assert path.name == "model.safetensors"
    assert set(found) == {*SHAPES, "count"}  # a tied weight once, and no buffer that is not persistent
    for name, tensor in found.items():
        assert torch.equal(tensor, kept.whole(f"model.{name}")), name
        assert tensor.dtype == kept.whole(f"model.{name}").dtype
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_several_files_have_an_index(kept, tmp_path):
    paths = export_weights(kept, tmp_path, max_file_bytes=200)

    # 100, 63, 1, 0, 24 and 5 elements of 2 bytes, and one of 8: in the order of names, at most 200 bytes in a file.
    assert [path.name for path in paths] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX_NAME,
    ]
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert index["metadata"] == {"total_size": 2 * (100 + 63 + 1 + 0 + 24 + 5) + 8}
    assert index["weight_map"] == {"a": paths[0].name} | dict.fromkeys(["b", "c", "count", "d", "e", "f"], paths[1].name)
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], kept.whole(f"model.{name}"))


def test_an_export_leaves_nothing_of_another_one(kept, tmp_path):
    export_weights(kept, tmp_path, max_file_bytes=200)
    export_weights(kept, tmp_path)
    (tmp_path / "config.json").write_text("{}")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    export_weights(kept, tmp_path, max_file_bytes=200)
    assert not (tmp_path / "model.safetensors").exists()


def test_a_wider_export_takes_the_main_parameters(kept, tmp_path):
    (path,) = export_weights(kept, tmp_path, dtype=torch.float32)

    found = load_file(path)

    assert torch.equal(found["a"], kept.whole("optim.main.a"))
    assert torch.equal(found["f"], kept.whole("model.f").float())  # frozen: it has none
    assert found["count"].dtype == torch.int64


def test_a_model_without_tensors_is_an_empty_file(tmp_path):
    class Nothing(KeptInMemory):
        def __init__(self):
            self.tensors = {}

        def read(self, wanted, *, cast=False):
            assert not wanted

    (path,) = export_weights(Nothing(), tmp_path)

    assert load_file(path) == {}


def test_a_name_that_the_index_has_and_no_file_is_an_error(kept, tmp_path):
    export_weights(kept, tmp_path / "weights", max_file_bytes=200)
    index = tmp_path / "weights" / INDEX_NAME
    fields = json.loads(index.read_text())
    fields["weight_map"]["gone.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(fields))

    with pytest.raises(ConfigError, match=r"model-00002-of-00002.safetensors: .* does not contain tensor gone.weight"):
        import_weights(tmp_path / "weights", tmp_path / "run")


@pytest.mark.parametrize("name", [FILE_NAME, INDEX_NAME])
def test_a_pipe_in_the_place_of_a_file_is_an_error_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)

    with pytest.raises(ConfigError, match=f"not a regular file: .*{name}"):
        import_weights(tmp_path, tmp_path / "run")


@pytest.mark.parametrize(
    ("weight_map", "problem"),
    [
        ({"a": "sub/../../elsewhere/x.safetensors"}, "'sub/../../elsewhere/x.safetensors' is no name of a file beside it"),
        ({}, "it names no tensor"),
    ],
)
def test_an_index_that_leads_elsewhere_or_nowhere_is_an_error(kept, tmp_path, weight_map, problem):
    (path,) = export_weights(kept, tmp_path)
    path.rename(tmp_path / "x.safetensors")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))

    with pytest.raises(ConfigError, match=re.escape(problem)):
        import_weights(tmp_path, tmp_path / "run")

    assert not (tmp_path / "run").exists()
