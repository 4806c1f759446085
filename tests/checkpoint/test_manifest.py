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
    TensorInfo,
    decode_manifest,
    encode_manifest,
    seal_body,
    seal_of,
)

DIGEST = "0" * 64
KEY = b"a key that is long enough"
INFO = TensorInfo("w", "float32", (2, 3), (0, 1))


def manifest_with(*, step=7, world_size=2, files=None, tensors=None, values=None):
    if files is None:
        files = (StoredFile("a.safetensors", 100, DIGEST), StoredFile("b.safetensors", 100, DIGEST))
    if tensors is None:
        tensors = {"w": (StoredBlock(INFO, (StoredRange(0, 0, 4), StoredRange(1, 4, 6))),)}
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
        ranges = tuple(StoredRange(len(file_bytes) + i, *part) for i, part in enumerate(parts))
        tensors[name] = (StoredBlock(info, ranges),)
        file_bytes += [100 + (stop - start) * ITEM_BYTES[info.dtype] for start, stop in parts]
    files = tuple(StoredFile(f"rank-{i}", size, f"{i:064x}") for i, size in enumerate(file_bytes))
    return Manifest(draw(st.integers(0, 10**9)), draw(st.integers(1, 4096)), files, tensors, {"v": draw(json_values)})


@given(manifest=manifests(), key=st.none() | st.just(KEY))
def test_what_is_written_is_read_again(manifest, key):
    raw = encode_manifest(manifest, key=key)

    assert decode_manifest(raw, key=key) == replace(manifest, seal=seal_of(raw), signed=key is not None)


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
    "other format": (lambda m: m.update(format="zip"), "it is 'zip' 2; this library reads 'megabucket-checkpoint' up to 2"),
    "later version": (lambda m: m.update(version=3), "it is 'megabucket-checkpoint' 3; this library reads"),
    "no values": (lambda m: m.pop("values"), "KeyError: 'values'"),
    "tensors a list": (lambda m: m.update(tensors=[]), "AttributeError"),
    "path as name": (lambda m: m["files"][0].update(name="../a"), "is no name for a data file"),
    "absolute path": (lambda m: m["files"][0].update(name="/a"), "is no name for a data file"),
    "dots as name": (lambda m: m["files"][0].update(name=".."), "is no name for a data file"),
}


def test_blocks_that_cover_a_tensor_are_read():
    def change(manifest):
        first = {"offset": [0, 0], "shape": [2, 2], "order": [0, 1], "pieces": [[0, 0, 4]]}
        second = {"offset": [0, 2], "shape": [2, 1], "order": [0, 1], "pieces": [[1, 0, 2]]}
        manifest["tensors"]["w"]["blocks"] = [first, second]

    raw = changed(change)

    infos = [block.info for block in decode_manifest(raw).tensors["w"]]

    assert [(info.key, info.box) for info in infos] == [("w@0,0", ((0, 2), (0, 2))), ("w@0,2", ((0, 2), (2, 3)))]


def test_version_1_had_whole_tensors_and_no_groups():
    def earlier(manifest):
        manifest["version"] = 1
        manifest["tensors"]["w"] = {"dtype": "float32", "shape": [2, 3], "order": [0, 1], "pieces": [[0, 0, 4], [1, 4, 6]]}

    assert decode_manifest(changed(earlier)).tensors == manifest_with().tensors


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
        ({"a": b"bytes"}, "bytes is nothing that JSON has"),
        ({"a": {"b": object()}}, "object is nothing that JSON has"),
    ],
)
def test_values_that_json_does_not_have_are_refused_before_they_are_written(values, problem):
    with pytest.raises((ValueError, TypeError), match=problem):
        encode_manifest(manifest_with(values=values))


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

    assert decode_manifest(forged).step == 8  # whole, as far as anybody without the key can tell
    with pytest.raises(ValueError, match="its signature was not made with the key"):
        decode_manifest(forged, key=KEY)


def test_a_signed_manifest_can_be_read_without_the_key():
    assert decode_manifest(encode_manifest(manifest_with(), key=KEY)).signed


def test_a_short_key_is_refused():
    with pytest.raises(ValueError, match="a key of 3 bytes; it takes 16 or more"):
        encode_manifest(manifest_with(), key=b"abc")
