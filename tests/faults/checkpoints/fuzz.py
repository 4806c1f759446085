"""Odd bytes for the readers of manifest and header: they give our errors, quickly and in little memory, or what is right.

Mutations start from real files. Most keep the seal right, so that what is behind it is reached. What is accepted must be
written again as the same, and a header that is accepted must be accepted by the safetensors library.

``python -m faults checkpoints fuzz`` runs them, and ``... atheris`` lets atheris choose, guided by coverage. No
torch.
"""

from __future__ import annotations

import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import safetensors

from megabucket.checkpoint.header import LENGTH_BYTES, decode_header, encode_header
from megabucket.checkpoint.manifest import (
    Manifest,
    StoredFile,
    StoredTensor,
    decode_manifest,
    encode_manifest,
    seal_body,
)
from megabucket.checkpoint.pieces import TensorInfo
from megabucket.checkpoint.plan import StoredRange
from megabucket.units import MIB

_MEMORY_BYTES: Final = 256 * MIB
_TAIL = b',"seal":'
_TOKENS: Final = tuple(
    b'0|-1|-0|1|2|9223372036854775807|9223372036854775808|18446744073709551616|1e999|1.0|NaN|Infinity|null|true|[]|{}|""'
    b'|"F32"|"float32"|"U8"|[0,0]|[[0,0,1]]|"__metadata__"|"\\ud800"|"\\u0000"|,|:|[|]|{|}|"|"seal":|[[[[|{"a":|\xff|\xef\xbb\xbf'
    b'|"dtype"|"shape"|"order"|"pieces"|"files"|"tensors"|"values"|"data_offsets"|"../x"|"latest"|281474976710657'.split(b"|")
)


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """What became of the inputs.

    Args:
        counts: by target, how many were refused and accepted.
        slowest_s: the most CPU time that one input took.
    """

    counts: Counter[str]
    slowest_s: float
    failures: tuple[str, ...]


def seeds() -> tuple[bytes, bytes]:
    """Return a manifest and a file that are right."""
    info = TensorInfo("model.w", "float32", (2, 3), (1, 0))
    tensors = {
        "model.w": StoredTensor(info, (StoredRange(0, 0, 4), StoredRange(1, 4, 6))),
        "e": StoredTensor(TensorInfo("e", "bool", (0,), (0,)), (StoredRange(0, 0, 0),)),
        "s": StoredTensor(TensorInfo("s", "int64", (), ()), (StoredRange(1, 0, 1),)),
    }
    files = (StoredFile("rank-00000-00000.safetensors", 200, "0" * 64), StoredFile("b", 300, "f" * 64))
    manifest = encode_manifest(Manifest(7, 2, files, tensors, {"lr": 0.1, "list": [1, None, {"a": "é"}]}))
    header = encode_header([("w[0:4]", "float32", (4,)), ("x", "bfloat16", (2, 1)), ("e", "bool", (0, 3)), ("s", "int8", ())])
    return manifest, header + bytes(16 + 4 + 1)


def fuzz_one(data: bytes) -> str:
    """Give bytes to the readers, and return what they made of them.

    Raises:
        AssertionError: something was accepted that is not right.
        Exception: an error that is none of ours.
    """
    return f"manifest {_read_manifest(data)}, header {_read_header(data)}"


def structured(data: bytes) -> bytes:
    """Return a manifest with a right seal, or a file with a right length, whose text a fuzzer chooses."""
    if not data or data[0] % 2 == 0:
        return seal_body(data[1:])
    return len(data[2:]).to_bytes(LENGTH_BYTES, "little") + data[2:] + bytes(data[1] if len(data) > 1 else 0)


def _read_manifest(raw: bytes) -> str:
    try:
        sealed = decode_manifest(raw)
    except ValueError:
        return "refused"
    again = decode_manifest(encode_manifest(sealed.manifest))
    if again.manifest != sealed.manifest:
        raise AssertionError(f"not the same when written again: {sealed.manifest}")
    return "accepted"


def _read_header(data: bytes) -> str:
    try:
        entries = decode_header(data, len(data))
    except ValueError:
        return "refused"
    try:
        found = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise AssertionError(f"safetensors refuses it: {error}") from None
    if {key: list(entry.shape) for key, entry in entries.items()} != {key: value["shape"] for key, value in found.items()}:
        raise AssertionError(f"safetensors reads {found}")
    return "accepted"


def mutate(draw: random.Random, data: bytes) -> bytes:
    """Return ``data`` with one to four random changes."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed) + 1)
        how = draw.randrange(7)
        if how == 0 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif how == 1 and at < len(changed):
            changed[at] = draw.randrange(256)
        elif how == 2:
            del changed[at : at + draw.randint(1, 20)]
        elif how == 3:
            changed[at:at] = draw.choice(_TOKENS)
        elif how == 4:
            changed[at : at + draw.randint(1, 12)] = draw.choice(_TOKENS)
        elif how == 5:
            start = draw.randrange(len(changed) + 1)
            changed[at:at] = changed[start : start + draw.randint(1, 60)]
        else:
            changed[at:at] = draw.choice((b"[", b'{"a":', b" ", b"9")) * draw.choice((2, 30, 3_000))
    return bytes(changed)


def _mutated_manifest(draw: random.Random, seed: bytes) -> bytes:
    body = mutate(draw, seed[: seed.rindex(_TAIL)])
    return mutate(draw, seed) if draw.random() < 0.1 else seal_body(body)


def _mutated_file(draw: random.Random, seed: bytes) -> bytes:
    if draw.random() < 0.1:
        return mutate(draw, seed)
    begin = LENGTH_BYTES + int.from_bytes(seed[:LENGTH_BYTES], "little")
    header = mutate(draw, seed[LENGTH_BYTES:begin])
    values = seed[begin:] if draw.random() < 0.8 else draw.randbytes(draw.randint(0, 64))
    return len(header).to_bytes(LENGTH_BYTES, "little") + header + values


def limit_memory() -> None:
    """Let this process have no more than 256 MiB beyond what it has."""
    pages = int(_proc_statm().split()[0])
    limit = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _proc_statm() -> str:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - no path of a user
        return file.read()


def run_fuzz(num_inputs: int, seed: int, *, report: Callable[[str], None]) -> Fuzzed:
    """Give ``num_inputs`` mutated manifests and files to the readers, as many of each."""
    draw = random.Random(f"fuzz {seed}")
    pools: Sequence[list[bytes]] = tuple([one] for one in seeds())
    counts: Counter[str] = Counter()
    failures: list[str] = []
    slowest_s = 0.0
    for index in range(num_inputs):
        pool = pools[index % 2]
        base = draw.choice(pool)
        data = _mutated_manifest(draw, base) if index % 2 == 0 else _mutated_file(draw, base)
        start_s = time.thread_time()  # of this thread alone: the machine may be busy with other things
        try:
            outcome = _read_manifest(data) if index % 2 == 0 else _read_header(data)
        except Exception as error:  # whatever it is, it is what must not be
            outcome = "failed"
            failures.append(f"input {index}: {type(error).__name__}: {error}: {data!r:.2000}")
        slowest_s = max(slowest_s, time.thread_time() - start_s)
        counts[f"{('manifest', 'header')[index % 2]} {outcome}"] += 1
        if outcome == "accepted" and len(data) < 5_000:
            _remember(pool, data, draw)
        if (index + 1) % 100_000 == 0:
            report(f"{index + 1} inputs, {len(failures)} failures, slowest {slowest_s * 1e3:.1f} ms")
    report(f"{num_inputs} inputs: {dict(counts)}, slowest {slowest_s * 1e3:.1f} ms, {len(failures)} failures")
    return Fuzzed(counts, slowest_s, tuple(failures))


def _remember(pool: list[bytes], data: bytes, draw: random.Random) -> None:
    """Keep what was accepted as a start for more, next to the first."""
    if len(pool) < 50:
        pool.append(data)
    else:
        pool[draw.randrange(1, len(pool))] = data
