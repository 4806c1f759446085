"""The manifest: what is written is read again; what is damaged or no manifest is refused with a reason."""

import hashlib
import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.checkpoint.format import (
    ITEM_BYTES,
    Manifest,
    StoredBlock,
    StoredFile,
    StoredRange,
    StoredTensor,
    TensorInfo,
    decode_manifest,
    encode_manifest,
    seal_body,
    seal_of,
)

DIGEST = "0" * 64
INFO = TensorInfo("w", "float32", (2, 3), (0, 1))


def manifest_with(*, step=7, world_size=2, files=None, tensors=None, values=None):
    if files is None:
        files = (StoredFile("a.safetensors", 100, DIGEST), StoredFile("b.safetensors", 100, DIGEST))
    if tensors is None:
        tensors = {"w": stored(INFO, StoredRange(0, 0, 4), StoredRange(1, 4, 6))}
    return Manifest(step=step, world_size=world_size, files=files, tensors=tensors, values={} if values is None else values)


def stored(info, *ranges):
    """A tensor in one block."""
    return StoredTensor(info.dtype, info.shape, (StoredBlock(info.offset, info.shape, info.order, ranges),), info.group)


def changed(change):
    """A manifest with something changed, and sealed again."""
    fields = json.loads(encode_manifest(manifest_with()))
    del fields["seal"]
    change(fields)
    return seal_body(json.dumps(fields)[:-1].encode())


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def manifests(draw):
    """Manifests of anything that can be stored; shrinks towards one empty checkpoint."""
    tensors, file_bytes = {}, []
    for name in draw(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=6), unique=True, max_size=4)):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        info = TensorInfo(
            name, draw(st.sampled_from(sorted(ITEM_BYTES))), shape, tuple(draw(st.permutations(range(len(shape)))))
        )
        edges = sorted({0, info.numel, *draw(st.lists(st.integers(0, info.numel), max_size=2))})
        parts = list(itertools.pairwise(edges)) or [(0, 0)]
        tensors[name] = stored(info, *(StoredRange(len(file_bytes) + i, *part) for i, part in enumerate(parts)))
        file_bytes += [100 + (stop - start) * ITEM_BYTES[info.dtype] for start, stop in parts]
    files = tuple(StoredFile(f"rank-{i}", size, f"{i:064x}") for i, size in enumerate(file_bytes))
    step, world_size = draw(st.integers(0, 10**9)), draw(st.integers(1, 4096))
    return manifest_with(step=step, world_size=world_size, files=files, tensors=tensors, values={"v": draw(json_values)})


@given(manifest=manifests())
def test_what_is_written_is_read_again(manifest):
    raw = encode_manifest(manifest)

    assert decode_manifest(raw) == replace(manifest, seal=seal_of(raw))


@given(data=st.data(), manifest=manifests())
def test_no_change_of_one_byte_is_read(data, manifest):
    raw = bytearray(encode_manifest(manifest))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255).filter(lambda byte: byte != raw[at]))

    with pytest.raises(ValueError, match="seal"):
        decode_manifest(bytes(raw))


@pytest.mark.parametrize("cut", [0, 1, 2, 70, 200])
def test_a_manifest_that_was_cut_off_is_refused(cut):
    raw = encode_manifest(manifest_with())

    with pytest.raises(ValueError, match="does not end with a seal"):
        decode_manifest(raw[: len(raw) - 1 - cut])


def test_the_seal_is_the_sha_256_of_the_text_before_it():
    raw = encode_manifest(manifest_with())
    body, tail = raw.split(b',"seal":')

    assert tail == b'"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'
    assert json.loads(raw)["format"] == "megabucket-checkpoint"


CHANGES = {
    "other format": (lambda m: m.update(format="zip"), "format: Input should be 'megabucket-checkpoint', got 'zip'"),
    "later version": (lambda m: m.update(version=2), "it is of version 2 of the format"),
    "no version": (lambda m: m.pop("version"), "it is of version None of the format"),
    "version and format of another": (lambda m: m.update(version=2, format="zip"), "format: Input should be"),
    "no values": (lambda m: m.pop("values"), "values: Field required"),
    "tensors a list": (lambda m: m.update(tensors=[]), "tensors: Input should be a valid dictionary"),
    "path as name": (lambda m: m["files"][0].update(name="../a"), "files.0.name: String should match pattern"),
    "absolute path": (lambda m: m["files"][0].update(name="/a"), "files.0.name: String should match pattern"),
    "dots as name": (lambda m: m["files"][0].update(name=".."), "files.0.name: String should match pattern"),
    "line break in a name": (lambda m: m["files"][0].update(name="a\n"), "files.0.name: String should match pattern"),
}


def in_tensor(**fields):
    return lambda m: m["tensors"]["w"].update(fields)


def in_block(**fields):
    return lambda m: m["tensors"]["w"]["blocks"][0].update(fields)


WHOLE = {"offset": [0, 0], "shape": [2, 3], "order": [0, 1], "pieces": [[0, 0, 6]]}
CHANGES |= {
    "dtype of nothing": (in_tensor(dtype="nn"), "tensor 'w': its dtype is 'nn'"),
    "no blocks": (in_tensor(blocks=[]), "tensor 'w': its blocks are none"),
    "a block twice": (in_tensor(blocks=[WHOLE, WHOLE]), "tensor 'w': its blocks hold elements twice"),
    "half a block": (in_block(shape=[2, 1], pieces=[[0, 0, 2]]), "tensor 'w': its blocks hold 2 of its 6 elements"),
    "no offset": (in_block(offset=[]), r"a block has offset \(\), shape \(2, 3\)"),
    "an offset too far": (in_block(offset=[0, 1]), r"a block has offset \(0, 1\) and shape \(2, 3\) in shape \(2, 3\)"),
    "an offset below": (in_block(offset=[0, -1]), r"a block has offset \(0, -1\) and shape"),
    "a negative shape": (
        lambda m: m["tensors"]["w"].update(shape=[-2, -3], blocks=[{**WHOLE, "shape": [-2, -3]}]),
        r"a block has offset \(0, 0\) and shape \(-2, -3\)",
    ),
    "a shape of other dimensions": (in_block(shape=[6]), r"a block has offset \(0, 0\), shape \(6,\)"),
    "an order of other dimensions": (in_block(order=[0, 0]), r"and order \(0, 0\)"),
    "no pieces": (in_block(pieces=[]), "the pieces of a block do not cover its 6 elements"),
    "a hole between pieces": (in_block(pieces=[[0, 0, 2], [1, 4, 6]]), "the pieces of a block do not cover"),
    "a piece too short": (in_block(pieces=[[0, 0, 4]]), "the pieces of a block do not cover"),
    "a piece backwards": (in_block(pieces=[[0, 0, 8], [0, 8, 2], [0, 2, 6]]), "the pieces of a block do not cover"),
    "a file that is not listed": (in_block(pieces=[[2, 0, 6]]), "a piece is in none of the 2 files"),
    "a file before the first": (in_block(pieces=[[-1, 0, 6]]), "a piece is in none of the 2 files"),
    "a number as order": (in_block(order=5), "tensors.w.blocks.0.order: Input should be a valid tuple"),
    "a number as shape": (in_tensor(shape=5), "tensors.w.shape: Input should be a valid tuple"),
}


def test_blocks_that_cover_a_tensor_are_read():
    def change(manifest):
        first = {"offset": [0, 0], "shape": [2, 2], "order": [0, 1], "pieces": [[0, 0, 4]]}
        second = {"offset": [0, 2], "shape": [2, 1], "order": [0, 1], "pieces": [[1, 0, 2]]}
        manifest["tensors"]["w"]["blocks"] = [first, second]

    raw = changed(change)

    infos = decode_manifest(raw).tensors["w"].infos("w")

    assert [(info.key, info.box) for info in infos] == [("w@0,0", ((0, 2), (0, 2))), ("w@0,2", ((0, 2), (2, 3)))]


@pytest.mark.parametrize("case", CHANGES)
def test_a_sealed_manifest_that_makes_no_sense_or_leads_outside_is_refused(case):
    change, problem = CHANGES[case]

    with pytest.raises(ValueError, match=problem):
        decode_manifest(changed(change))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"a": float("nan")}, "Out of range float values are not JSON compliant"),
        ({"a": [float("inf")]}, "Out of range float values are not JSON compliant"),
        ({"a": b"bytes"}, "Object of type bytes is not JSON serializable"),
        ({"a": {"b": object()}}, "Object of type object is not JSON serializable"),
    ],
)
def test_values_that_json_does_not_have_are_refused_before_they_are_written(values, problem):
    with pytest.raises((ValueError, TypeError), match=problem):
        encode_manifest(manifest_with(values=values))
