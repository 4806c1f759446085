"""Read whole data files and verify them in the same pass, a few at a time.

What a file holds is given on only after its size and its SHA-256 were found right, and from the same bytes: the file is
not read again, so nothing can be exchanged in between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch

from megabucket.checkpoint.file_system import FileSystem, num_file_threads, reason_of
from megabucket.checkpoint.manifest import StoredFile
from megabucket.units import MIB

_CHUNK_BYTES = MIB


class DamagedFileError(Exception):
    """Which file is not as it must be, and why; the reader makes an error for users of it."""

    def __init__(self, file: str, problem: str) -> None:
        self.file, self.problem = file, problem
        super().__init__(f"{file}: {problem}")


def verified_bytes(file_system: FileSystem, directory: Path, file: StoredFile, memory: torch.Tensor) -> torch.Tensor:
    """Return the contents of a file as uint8, in ``memory`` if that is large enough.

    Raises:
        DamagedFileError: it is missing, cannot be read, is no regular file, or has another size or SHA-256.
    """
    try:
        descriptor = file_system.open_file(directory / file.name)
    except FileNotFoundError:
        raise DamagedFileError(file.name, "it is missing") from None
    except OSError as error:
        raise DamagedFileError(file.name, f"it cannot be opened: {reason_of(error)}") from None
    try:
        num_bytes = file_system.file_bytes(descriptor)
        if num_bytes != file.num_bytes:
            raise DamagedFileError(file.name, f"it has {num_bytes} bytes, and the manifest says {file.num_bytes}")
        # numpy asks the kernel for large pages; without them the faults of new memory cost as much as the hash.
        contents = memory[:num_bytes] if num_bytes <= memory.numel() else torch.from_numpy(np.empty(num_bytes, np.uint8))
        digest = _read_and_hash(file_system, descriptor, contents.numpy().data)
    except OSError as error:
        raise DamagedFileError(file.name, f"it cannot be read: {reason_of(error)}") from None
    finally:
        file_system.close(descriptor)
    if digest != file.sha256:
        raise DamagedFileError(file.name, f"its SHA-256 is {digest}, and the manifest says {file.sha256}")
    return contents


def _read_and_hash(file_system: FileSystem, descriptor: int, view: memoryview) -> str:
    digest = hashlib.sha256()
    position = 0
    while position < len(view):
        count = file_system.read_into(descriptor, view[position : position + _CHUNK_BYTES])
        if count == 0:
            break  # it became shorter since its size was asked: the digest will tell
        digest.update(view[position : position + count])
        position += count
    return digest.hexdigest()


def for_each_verified(
    file_system: FileSystem,
    directory: Path,
    files: Iterable[tuple[int, StoredFile]],
    use: Callable[[int, torch.Tensor], None],
) -> None:
    """Verify each file and hand its contents to ``use``, a few files at a time in threads.

    Raises:
        DamagedFileError: of the first file, in the order given, that is not right.
    """
    todo = list(files)
    num_threads = min(num_file_threads(), len(todo))
    if num_threads == 0:
        return
    spare: SimpleQueue[torch.Tensor] = SimpleQueue()
    for _ in range(num_threads):
        spare.put(torch.empty(0, dtype=torch.uint8))

    def act(item: tuple[int, StoredFile]) -> None:
        index, file = item
        memory = spare.get()
        try:
            contents = verified_bytes(file_system, directory, file, memory)
            if memory.numel() < contents.numel():
                memory = contents
            use(index, contents)
        finally:
            spare.put(memory)

    if num_threads == 1:
        for item in todo:
            act(item)
        return
    with ThreadPoolExecutor(num_threads, "megabucket-load") as pool:
        results = [pool.submit(act, item) for item in todo]
        try:
            for result in results:
                result.result()
        except BaseException:
            for result in results:
                result.cancel()
            raise
