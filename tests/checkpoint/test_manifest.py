"""The manifest: what is written is read again; anything else is refused with a reason."""

import hashlib
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.checkpoint.dtypes import ITEM_BYTES
from megabucket.checkpoint.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    StoredFile,
    StoredTensor,
    decode_manifest,
    encode_manifest,
    seal_body,
    seal_of,
)
from megabucket.checkpoint.pieces import TensorInfo
from megabucket.checkpoint.plan import StoredRange
from megabucket.checkpoint.strict_json import MAX_MARKS

DIGEST = "0" * 64
KEY = b"a key that is long enough"
INFO = TensorInfo("w", "float32", (2, 3), (0, 1))


def manifest_with(*, step=7, world_size=2, files=None, tensors=None, values=None):
    if files is None:
        files = (StoredFile("a.safetensors", 100, DIGEST), StoredFile("b.safetensors", 100, DIGEST))
    if tensors is None:
        tensors = {"w": StoredTensor(INFO, (StoredRange(0, 0, 4), StoredRange(1, 4, 6)))}
    return Manifest(step, world_size, files, tensors, {} if values is None else values)


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
        tensors[name] = StoredTensor(info, tuple(StoredRange(len(file_bytes) + i, *part) for i, part in enumerate(parts)))
        file_bytes += [100 + (stop - start) * ITEM_BYTES[info.dtype] for start, stop in parts]
    files = tuple(StoredFile(f"rank-{i}", size, f"{i:064x}") for i, size in enumerate(file_bytes))
    return Manifest(draw(st.integers(0, 10**9)), draw(st.integers(1, 4096)), files, tensors, {"v": draw(json_values)})


@given(manifest=manifests(), key=st.none() | st.just(KEY))
def test_what_is_written_is_read_again(manifest, key):
    raw = encode_manifest(manifest, key=key)

    sealed = decode_manifest(raw, key=key)

    assert sealed.manifest == manifest
    assert sealed.seal == seal_of(raw)
    assert sealed.signed == (key is not None)


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


def one_tensor(**fields):
    return lambda manifest: manifest["tensors"]["w"].update(fields)


def one_file(**fields):
    return lambda manifest: manifest["files"][0].update(fields)


CHANGES = {
    "other format": (lambda m: m.update(format="zip"), "its format is 'zip'"),
    "later version": (lambda m: m.update(version=2), "this library reads version 1"),
    "version true": (lambda m: m.update(version=True), "its version is True"),
    "unknown field": (lambda m: m.update(more=1), "does not have the fields"),
    "no values": (lambda m: m.pop("values"), "does not have the fields"),
    "values a list": (lambda m: m.update(values=[]), "values is not an object"),
    "negative step": (lambda m: m.update(step=-1), "step is not of whole numbers"),
    "step true": (lambda m: m.update(step=True), "step is not of whole numbers"),
    "step 1.0": (lambda m: m.update(step=1.0), "step is not of whole numbers"),
    "no ranks": (lambda m: m.update(world_size=0), "world_size is 0"),
    "files an object": (lambda m: m.update(files={}), "files is no list"),
    "path as name": (one_file(name="../a"), "is no name for a data file"),
    "absolute path": (one_file(name="/a"), "is no name for a data file"),
    "dots as name": (one_file(name=".."), "is no name for a data file"),
    "long name": (one_file(name="a" * 201), "is no name for a data file"),
    "manifest as data": (one_file(name="Manifest.json"), "is no name for a data file"),
    "a name twice": (one_file(name="B.safetensors"), "a file is listed twice"),
    "short digest": (one_file(sha256="0" * 63), "a.safetensors: sha256 is not 64"),
    "upper case digest": (one_file(sha256="A" * 64), "a.safetensors: sha256 is not 64"),
    "negative size": (one_file(bytes=-1), "bytes of a.safetensors is not of whole numbers"),
    "size too small": (one_file(bytes=16), "a.safetensors has 16 bytes, and its pieces take 16"),
    "file with one more field": (one_file(more=1), "a file does not have name"),
    "file that holds nothing": (
        lambda m: m["files"].append({"name": "c", "bytes": 9, "sha256": DIGEST}),
        "c holds nothing",
    ),
    "tensors a list": (lambda m: m.update(tensors=[]), "tensors is no object"),
    "empty name": (lambda m: m["tensors"].update({"": m["tensors"]["w"]}), "'' is no name for a tensor"),
    "metadata as name": (lambda m: m["tensors"].update(__metadata__=m["tensors"]["w"]), "is no name for a tensor"),
    "unknown dtype": (one_tensor(dtype="float7"), "'w' has the dtype 'float7', which is none of"),
    "dtype a list": (one_tensor(dtype=["float32"]), "'w' has the dtype"),
    "other shape": (one_tensor(shape=[2, 4]), "elements 6:8 are in no file"),
    "shape that overflows": (one_tensor(shape=[2**48, 2**48]), "'w' is too large"),
    "hidden overflow": (one_tensor(shape=[0, 2**48, 2**48], order=[0, 1, 2], pieces=[[0, 0, 0]]), "'w' is too large"),
    "order of three": (one_tensor(order=[0, 1, 2]), "the order of 'w' is not one of its 2 dimensions"),
    "order twice": (one_tensor(order=[0, 0]), "the order of 'w' is not one of its 2 dimensions"),
    "no pieces": (one_tensor(pieces=[]), "elements 0:6 are in no file"),
    "gap": (one_tensor(pieces=[[0, 0, 3], [1, 4, 6]]), "elements 3:4 are in no file"),
    "overlap": (one_tensor(pieces=[[0, 0, 5], [1, 4, 6]]), "elements 4:5 are there twice"),
    "not in order": (one_tensor(pieces=[[1, 4, 6], [0, 0, 4]]), "they are not in order"),
    "no such file": (one_tensor(pieces=[[0, 0, 4], [2, 4, 6]]), "with one of 2 files"),
    "two numbers": (one_tensor(pieces=[[0, 6]]), "is not .file, start, stop."),
    "tensor with one more field": (one_tensor(more=1), "'w' does not have dtype"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_sealed_manifest_that_contradicts_itself_is_refused(case):
    change, problem = CHANGES[case]

    with pytest.raises(ValueError, match=problem):
        decode_manifest(changed(change))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "seal"),
        (b"{", "fields"),
        (b'{"a":1,"a":1', "the key 'a' is there twice"),
        (b'{"a":NaN', "NaN is not JSON"),
        (b'{"a":-Infinity', "-Infinity is not JSON"),
        (b'{"a":' + b"9" * 5_000, "4300"),
        (b'{"a":' + b'{"a":' * 30_000 + b"1" + b"}" * 30_000, "nested deeper than 20"),
        (b'{"a":[' + b"[]," * (MAX_MARKS // 2 + 1) + b"[]]", "more than 2000000 entries"),
        (b'{"\xff":1', "utf-8"),
    ],
)
def test_text_that_no_limit_allows_is_refused(body, problem):
    with pytest.raises(ValueError, match=problem):
        decode_manifest(seal_body(body) if body else b"")


def test_a_manifest_beyond_the_limit_is_not_even_hashed():
    with pytest.raises(ValueError, match=f"more than {MAX_MANIFEST_BYTES} bytes"):
        decode_manifest(bytes(MAX_MANIFEST_BYTES + 1))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"a": float("nan")}, "values: nan is not a number that JSON has"),
        ({"a": [float("inf")]}, "values: inf is not a number that JSON has"),
        ({"a": {1: 2}}, "values: the key 1 is int, and JSON has strings only"),
        ({"a": b"bytes"}, "values: bytes is nothing that JSON has"),
        ({"a": {"b": object()}}, "values: object is nothing that JSON has"),
        ({"a": "\ud800"}, "holds half a surrogate pair"),
        ({"\ud800": 1}, "holds half a surrogate pair"),
    ],
)
def test_values_that_would_come_back_otherwise_are_refused_before_they_are_written(values, problem):
    with pytest.raises(ValueError, match=problem):
        encode_manifest(manifest_with(values=values))


def test_tensors_that_no_reader_would_take_are_refused_before_they_are_written():
    tensors = {"w": StoredTensor(INFO, (StoredRange(0, 0, 4), StoredRange(1, 5, 6)))}

    with pytest.raises(ValueError, match="elements 4:5 are in no file"):
        encode_manifest(manifest_with(tensors=tensors))


def test_a_signature_made_with_another_key_is_refused():
    raw = encode_manifest(manifest_with(), key=KEY)

    with pytest.raises(ValueError, match="its signature was not made with the key that was given"):
        decode_manifest(raw, key=KEY + b"!")


def test_no_signature_is_refused_where_a_key_is_given():
    raw = encode_manifest(manifest_with())

    with pytest.raises(ValueError, match="it is not signed"):
        decode_manifest(raw, key=KEY)


def test_someone_without_the_key_can_seal_but_not_sign():
    fields = json.loads(encode_manifest(manifest_with(), key=KEY))
    signature = fields.pop("hmac")
    del fields["seal"]
    fields["step"] = 8
    forged = seal_body(json.dumps(fields, separators=(",", ":"))[:-1].encode())
    forged = forged.replace(b"}\n", f',"hmac":"{signature}"}}\n'.encode())

    assert decode_manifest(forged).manifest.step == 8  # whole, as far as anybody without the key can tell
    with pytest.raises(ValueError, match="its signature was not made with the key"):
        decode_manifest(forged, key=KEY)


def test_a_signed_manifest_can_be_read_without_the_key():
    assert decode_manifest(encode_manifest(manifest_with(), key=KEY)).signed


def test_a_short_key_is_refused():
    with pytest.raises(ValueError, match="a key of 3 bytes; it takes 16 or more"):
        encode_manifest(manifest_with(), key=b"abc")
