"""Nothing that a checkpoint holds is ever run: no pickle in the code, none while saving and loading."""

import ast
import io
import os
import pickle
from pathlib import Path

import pytest
import torch

import megabucket.checkpoint
from faults.checkpoints import sample
from faults.checkpoints.threads import in_threads
from megabucket.checkpoint.save import SaveSettings
from megabucket.checkpoint.stored import open_checkpoint
from megabucket.errors import CheckpointError

PACKAGE = Path(megabucket.checkpoint.__file__).parent
CONVERTER = PACKAGE / "convert" / "dcp.py"  # torch's own format, for files one trusts


class _Payload:
    def __reduce__(self):
        return os.system, ("echo this must never run",)


@pytest.fixture
def poisoned(monkeypatch):
    """Every way into a pickle raises; so does what an attack would call."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("something was unpickled")

    class Poisoned(pickle.Unpickler):
        find_class = refuse
        load = refuse

    for name in ("load", "loads"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", Poisoned)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(os, "system", refuse)


def test_the_poison_works(poisoned):
    with pytest.raises(AssertionError, match="something was unpickled"):
        torch.load(io.BytesIO())
    with pytest.raises(AssertionError, match="something was unpickled"):
        pickle.loads(b"")  # noqa: S301


def test_saving_and_loading_unpickle_nothing(tmp_path, poisoned):
    in_threads(2, lambda ranks: sample.save(tmp_path, 1, ranks, SaveSettings()))

    assert sample.loaded_step(tmp_path) == 1


@pytest.mark.parametrize("name", ["latest", "step-00000001/manifest.json", "step-00000001/rank-00000-00000.safetensors"])
def test_a_pickle_in_place_of_a_file_is_refused_unread(tmp_path, name, request):
    in_threads(2, lambda ranks: sample.save(tmp_path, 1, ranks, SaveSettings()))
    (tmp_path / name).write_bytes(pickle.dumps(_Payload()))
    request.getfixturevalue("poisoned")

    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path).verify()


BANNED = {"pickle", "marshal", "shelve", "dill", "eval", "exec", "load", "Unpickler"}


def names_used(node):
    """Modules that a node imports, the builtin it calls, or what it takes from torch."""
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {(node.module or "").split(".")[0], *(alias.name for alias in node.names)}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return {node.func.id} - {"load"}  # a variable, or imported, which is found there
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        return {node.attr}
    return set()


def test_no_module_of_the_package_knows_pickle_eval_or_torch_load():
    found = [
        f"{path.name}:{node.lineno} {name}"
        for path in PACKAGE.rglob("*.py")
        if path != CONVERTER
        for node in ast.walk(ast.parse(path.read_text()))
        for name in names_used(node) & BANNED
    ]

    assert found == []
