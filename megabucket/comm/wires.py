"""Sockets between the processes of one machine, for a few words from each to each. A thread that waits for words sleeps.

Gloo would do; but there a word passes through threads of two processes that have to find a core, and takes a millisecond.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

_TOKEN_BYTES: Final = 16
_WORD_BYTES: Final = 8
_GREETING_S: Final = 5.0


TellAll = Callable[[bytes], list[bytes]]
"""Sends a short message to all ranks and returns what each has sent, by rank."""


def can_meet(tell_all: TellAll) -> bool:
    """Whether names of sockets mean the same to all ranks: in one network namespace. All of them call it."""
    try:
        own = str(Path("/proc/self/ns/net").readlink())
    except OSError:
        own = ""
    return bool(own) and set(tell_all(own.encode())) == {own.encode()}


class Wires:
    """What connects a rank with all others. All ranks make it together; Linux only.

    Args:
        tell_all: of ranks that ``can_meet``.
        timeout_s: after which a rank that says nothing is an error.

    Raises:
        OSError: another rank did not come.
    """

    def __init__(self, tell_all: TellAll, *, rank: int, size: int, timeout_s: float) -> None:
        self._rank = rank
        self._pid = os.getpid()
        self._bell = os.eventfd(0)
        self._wires: dict[int, socket.socket] = {}
        # A name without a file, which goes with the socket. Whoever finds it out does not know the token.
        name, token = f"\0megabucket-{secrets.token_hex(8)}", secrets.token_hex(_TOKEN_BYTES)
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(name)
            door.listen(size)
            door.settimeout(timeout_s)
            doors = [told.decode().split(" ") for told in tell_all(f"{name} {token}".encode())]
            for other, (name_of_other, token_of_other) in enumerate(doors[:rank]):
                wire = socket.socket(socket.AF_UNIX)
                wire.connect(name_of_other)
                wire.sendall(bytes.fromhex(token_of_other) + rank.to_bytes(_WORD_BYTES, "little"))
                self._wires[other] = wire
            while len(self._wires) < size - 1:
                wire, _ = door.accept()
                known = _rank_of(wire, bytes.fromhex(token))
                if known is None:
                    wire.close()
                else:
                    self._wires[known] = wire
        for wire in self._wires.values():
            wire.settimeout(timeout_s)

    def __del__(self) -> None:
        """Let go of the bell, which anybody may have rung until now."""
        os.close(self._bell)

    def exchange(self, words: Sequence[int]) -> list[list[int]]:
        """Return the words of all ranks, by rank: integers of 64 bits, a few thousand of each rank at most.

        Raises:
            OSError: another rank is gone, or says nothing.
        """
        message = array("q", [len(words), *words])
        for wire in self._wires.values():
            wire.sendall(message)
        said = {rank: _words(wire) for rank, wire in self._wires.items()}
        said[self._rank] = list(words)
        return [said[rank] for rank in range(len(said))]

    def listen(self) -> bool:
        """Return when another rank has said something or is gone, ``True``, or after a ring, ``False``."""
        poll = select.poll()
        for file in (self._bell, *(wire.fileno() for wire in self._wires.values())):
            poll.register(file, select.POLLIN)
        heard = [file for file, _ in poll.poll()]
        if self._bell in heard:
            os.eventfd_read(self._bell)
        return heard != [self._bell]

    def ring(self) -> None:
        """Wake up who listens, or listens next. From any thread."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Part from the others, also where a thread waits for their words. Idempotent."""
        for wire in self._wires.values():
            if os.getpid() == self._pid:  # a forked child must not end what is its parent's
                with suppress(OSError):
                    wire.shutdown(socket.SHUT_RDWR)
            wire.close()


def _rank_of(wire: socket.socket, token: bytes) -> int | None:
    """Return the rank that has come, or ``None`` for a stranger."""
    wire.settimeout(_GREETING_S)
    try:
        said = _receive(wire, _TOKEN_BYTES + _WORD_BYTES)
    except OSError:
        return None
    is_known = secrets.compare_digest(said[:_TOKEN_BYTES], token)
    return int.from_bytes(said[_TOKEN_BYTES:], "little") if is_known else None


def _words(wire: socket.socket) -> list[int]:
    length = int.from_bytes(_receive(wire, _WORD_BYTES), "little")
    return list(array("q", _receive(wire, _WORD_BYTES * length)))


def _receive(wire: socket.socket, nbytes: int) -> bytes:
    parts = []
    while nbytes:
        part = wire.recv(nbytes)
        if not part:
            raise ConnectionError("the other rank is gone")
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)
