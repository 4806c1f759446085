"""The thread of a rank that writes its beats into the store of the group, and keeps a view of those of the others.

Also the board: where ranks wait, and the findings of wrappers, in a part of the store that all wrappers of a program share.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megabucket.comm.communicator import Finding, LaunchCount, RankState
from megabucket.comm.liveness.observations import Beat, ProcessIdentity, View, identify_this_process, read_every_s
from megabucket.errors import PeerFailedError, PeerLostError, WrapperBrokenError

_START_S: Final = 5.0
_JOIN_S: Final = 1.0


# Values in the store #


class Block(NamedTuple):
    """A long wait of a rank. Ranks are global."""

    token: str  # of the wrapper; unique in the store, also across restarts
    wrapper: str
    label: str
    members: Sequence[int]  # ranks of the wrapper


class _Request(NamedTuple):
    """A request to the thread: renew the view of the store."""

    write: Callable[[Store], None] | None = None  # a write to the board, done first
    answered: threading.Event | None = None  # set when the view is there; beats are then read again, however new they are


def decode_beat(raw: bytes) -> Beat:
    """Return the beat in a value of the store."""
    process, *fields = json.loads(raw)
    return Beat(ProcessIdentity(*process), *fields)


def encode_finding(finding: Finding) -> str:
    """Return the JSON form."""
    return json.dumps([type(finding).__name__, finding.__dict__])


def decode_finding(raw: bytes) -> Finding:
    """Return the finding in a value of the store."""
    name, fields = json.loads(raw)
    kinds: tuple[type[Finding], ...] = (PeerFailedError, PeerLostError, WrapperBrokenError)
    return next(kind for kind in kinds if kind.__name__ == name)(**fields)


# The thread #

_LEAVE: Final = _Request()


def report_before_wrap(store: Store, finding: Finding, *, rank: int) -> None:
    """Write a finding for the wrapper that the ranks are about to make, over the given connection to the store."""
    *_, token = _begin_wrapper(store, rank)
    _board_of(store).compare_set(f"finding/{token}", "", encode_finding(finding))


def _begin_wrapper(store: Store, rank: int) -> tuple[str, Store, str]:
    """Return the name of the next wrapper, its part of the store, and its token. All ranks make wrappers in one order."""
    name = f"megabucket/{store.add(f'megabucket/instances/{rank}', 1)}"
    part = PrefixStore(name, store)
    return name, part, part.compare_set("token", "", secrets.token_hex(8)).decode()


def _board_of(store: Any) -> Store:
    return PrefixStore("megabucket/board", _bottom_of(store))


class Heartbeat:
    """Writes beats of this rank and keeps a view of the others.

    Args:
        store: of the process group. A TCP store is cloned, so requests of this thread never delay the caller's.
        members: global ranks of the wrapper; this one is ``members[rank]``.
        state: of this rank; its progress is read at each beat.
        launches: of the communicator; read at each beat.
        every_s: seconds between beats; ``None``: only the first one is written, which identifies this process.
        is_wanted: called at each beat; ``False`` ends the thread.
        group_name: of the process group, the same on all ranks; distinguishes wrappers of different groups on the board.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        members: Sequence[int],
        state: RankState,
        launches: LaunchCount,
        every_s: float | None,
        is_wanted: Callable[[], bool],
        group_name: str = "",
    ) -> None:
        self.rank, self.members, self.every_s = rank, tuple(members), every_s
        self.name = self._token = ""
        """Of the wrapper, the same on all ranks."""
        self.process = identify_this_process()
        bottom = _bottom_of(store)
        self.store_host = f" {bottom.host}" if isinstance(bottom, TCPStore) else ""
        """For error texts: a space and the host name or address of a TCP store, as it was given."""
        self.view = View(0.0, {})
        self.failure = ""
        """The error of the store that ended the thread."""
        self.is_stopped = False
        self.state, self.launches = state, launches
        self._is_wanted, self._group_name = is_wanted, group_name
        self._num_beats = 0
        self._block: Block | None = None  # of this rank, as written to the board
        self._cycle: dict[int, Block] = {}  # found by the last check
        # SimpleQueue, because the garbage collector may close a communicator at any moment, even in this thread: its put
        # must not need a lock that the interrupted code holds.
        self._mailbox: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._kept: list[object] = []
        self._has_left = threading.Event()
        is_ready = threading.Event()
        # In a list that the thread empties: a thread keeps its arguments alive, and a program that destroys the group of a
        # TCP store may want to listen on the same port again.
        arguments = ([store], is_ready)
        self._thread = threading.Thread(target=self._run, args=arguments, name=f"megabucket-heartbeat-{rank}", daemon=True)
        self._thread.start()
        # If the program ended now, the thread could be in a connect that is retried and cannot be interrupted: see stop().
        # Usually this takes a millisecond.
        is_ready.wait(_START_S)

    def request(self) -> None:
        """Ask the thread to renew ``view``, unless a request is pending."""
        if self._mailbox.empty():
            self._mailbox.put(_Request())

    def block(self, label: str | None) -> None:
        """Write to the board what this rank waits for; ``None``: it no longer waits."""
        self._mailbox.put(_Request(lambda board: self._write_block(board, label)))

    def post(self, finding: Finding) -> None:
        """Write a finding, unless there is one."""
        self._mailbox.put(_Request(lambda board: self._write_finding(board, finding)))

    def ask(self, timeout_s: float) -> View | None:
        """Return a view that is newer than all earlier requests, or ``None`` if the store does not answer in time."""
        answered, deadline_s = threading.Event(), time.monotonic() + timeout_s
        self._mailbox.put(_Request(answered=answered))
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            if answered.wait(0.01):
                return self.view
        return None

    def stop(self, *, kept: Sequence[object] = ()) -> None:
        """Write a final beat and stop the thread. Waits up to a second, in case the store does not answer.

        A daemon thread that returns from C++ after the interpreter has ended aborts the process, so this runs at exit.

        Args:
            kept: objects that the end of the program must not drop. The thread then sleeps for ever, with them in its frame.
        """
        self.is_stopped = True
        self._kept.extend(kept)
        self._mailbox.put(_LEAVE)
        # In a forked child, which has no such thread, join returns at once.
        if threading.current_thread() is not self._thread and not kept:
            self._thread.join(_JOIN_S)
        elif self._thread.is_alive():
            self._has_left.wait(_JOIN_S)

    # In the thread #

    def _run(self, stores: list[Store], is_ready: threading.Event) -> None:
        try:
            with contextlib.closing(_StoreConnection(stores.pop())) as connection:
                self._serve(connection, is_ready)
        except Exception as error:
            # Not reported here: at the end of a program the host of the store may simply exit first. A blocked rank notices
            # that there are no answers.
            self.failure = f"{type(error).__name__}: {error}"
            is_ready.set()
        kept = self._kept.copy()
        self._has_left.set()
        if kept:
            threading.Event().wait()

    def _serve(self, connection: _StoreConnection, is_ready: threading.Event) -> None:
        # Several wrappers may share a group. All ranks make them in the same order.
        self.name, store, own = _begin_wrapper(connection.store, self.rank)
        # A wrapper of several groups has one token for all of them: ranks that wait in two of its groups form no cycle, since
        # all ranks launch in one order, and a finding of one group reaches the others.
        self._token = self.state.ranks.token = self.state.ranks.token or own
        self._write_block(connection.board, None)
        next_beat_s = time.monotonic()
        while True:
            request: _Request | None = None
            with contextlib.suppress(queue.Empty):
                request = self._mailbox.get(timeout=max(0.0, next_beat_s - time.monotonic()))
            connection.check()
            if request is _LEAVE or not self._is_wanted():
                break  # the group was destroyed: this rank launches nothing more on it
            if request is not None:
                self._answer(store, connection.board, request)
                continue
            self._beat(store)
            if len(self.view.beats) < len(self.members) - 1:
                # Until all ranks have written: later the store may be out of reach. A process that is stopped while it holds
                # the lock of a file store, for instance, stops the store.
                self._read_beats(store)
            is_ready.set()
            next_beat_s = time.monotonic() + (self.every_s or threading.TIMEOUT_MAX)
        self._beat(store, has_left=True)

    def _beat(self, store: Store, *, has_left: bool = False) -> None:
        progress = self.state.progress
        self._num_beats += 1
        place = (progress.step, progress.phase, progress.bucket, self.launches.last)
        # A list, because a file store keeps every beat.
        beat = json.dumps(Beat(self.process, self._num_beats, self.every_s, *place, has_left), separators=(",", ":"))
        store.set(_rank_key(self.rank), beat)

    def _answer(self, store: Store, board: Store, request: _Request) -> None:
        if request.write is not None:
            request.write(board)
        if request.answered is not None or time.monotonic() - self.view.asked_at_s >= read_every_s(len(self.members)):
            self._read_beats(store)
            self._report_cycle(board)
        key = f"finding/{self._token}"
        # A new view even if nothing has changed: it shows that the store has answered.
        self.view = self.view._replace(finding=decode_finding(board.get(key)) if board.check([key]) else None)
        if request.answered is not None:
            request.answered.set()

    def _write_finding(self, board: Store, finding: Finding, tokens: Iterable[str] = ()) -> None:
        """Write a finding for this wrapper and others. If one of them has a finding already, all get that one."""
        text = encode_finding(finding)
        for token in sorted({self._token, *tokens}):
            text = board.compare_set(f"finding/{token}", "", text).decode()

    def _write_block(self, board: Store, label: str | None) -> None:
        wrapper = f"{self.name} over group {self._group_name!r} of ranks {list(self.members)}"
        self._block = None if label is None else Block(self._token, wrapper, label, self.members)
        board.set(_rank_key(self.members[self.rank]), json.dumps(self._block))

    def _read_beats(self, store: Store) -> None:
        asked_at_s, others = time.monotonic(), set(range(len(self.members))) - {self.rank}
        values = _read(store, others, known=set(self.view.beats))
        beats = {rank: decode_beat(value) for rank, value in values.items()}
        self.view = self.view._replace(asked_at_s=asked_at_s, beats=beats)

    def _report_cycle(self, board: Store) -> None:
        """Write a finding to all ranks of a cycle of waits. It must be seen twice, because the board may be out of date."""
        cycle, self._cycle = self._cycle, self._find_cycle(board)
        if cycle and cycle == self._cycle:
            places = [f"rank {rank} waits for {block.label} of {block.wrapper}" for rank, block in sorted(cycle.items())]
            cause = (
                f"ranks wait for one another: {'; '.join(places)}. Every rank must use its wrappers, and make collective "
                "calls, in the same order"
            )
            progress = self.state.progress
            error = WrapperBrokenError(step=progress.step, rank=None, phase=progress.phase, cause=cause)
            self._write_finding(board, error, [block.token for block in cycle.values()])

    def _find_cycle(self, board: Store) -> dict[int, Block]:
        """Return global ranks that wait for each other in a cycle of wrappers, this rank first; empty if there is none.

        Each rank waits for all members of its wrapper that wait in another one; a path back to this rank is a deadlock.
        """
        if self._block is None:
            return {}
        own = self.members[self.rank]
        # Blocks of ranks that have not written a beat yet are from before a restart.
        read = {member for rank, member in enumerate(self.members) if rank not in self.view.beats}
        blocks, ahead = {own: self._block}, deque([own])
        paths: dict[int, tuple[int, ...]] = {own: (own,)}
        while ahead:
            rank = ahead.popleft()
            blocks |= _read_blocks(board, set(blocks[rank].members) - read)
            read.update(blocks[rank].members)
            for other in blocks[rank].members:
                if other in blocks and blocks[other].token != blocks[rank].token:
                    if other == own:
                        return {member: blocks[member] for member in paths[rank]}
                    if other not in paths:
                        paths[other] = (*paths[rank], other)
                        ahead.append(other)
        return {}


def _read_blocks(board: Store, ranks: set[int]) -> dict[int, Block]:
    """Return the blocks of those of the ranks that have waited for long."""
    blocks = {rank: json.loads(value) for rank, value in _read(board, ranks, set()).items()}
    return {rank: Block(*block) for rank, block in blocks.items() if block is not None}


def _read(store: Store, ranks: set[int], known: set[int]) -> dict[int, bytes]:
    """Return the values of the ranks that have written one. Reading a key that does not exist would block.

    Args:
        known: ranks that are known to have written.
    """
    asked = ranks - known
    if asked and not store.check([_rank_key(rank) for rank in asked]):
        ranks = known | {rank for rank in asked if store.check([_rank_key(rank)])}
    values = store.multi_get([_rank_key(rank) for rank in sorted(ranks)]) if ranks else []
    return dict(zip(sorted(ranks), values, strict=True))


def _rank_key(rank: int) -> str:
    return f"rank/{rank}"


def _bottom_of(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


class _StoreConnection:
    """A store over its own connection, and the board, which all wrappers of the program share."""

    def __init__(self, store: Any) -> None:
        bottom = _bottom_of(store)
        self._probe: socket.socket | None = None
        self.store: Store = store
        if isinstance(bottom, TCPStore):
            self.store = store.clone()
            bottom = _bottom_of(self.store)
            # Sends nothing; the host closes it together with the clone. A request over a closed connection would make c10d
            # print a page of C++ frames at the end of every program whose rank 0 exits first.
            with contextlib.suppress(OSError):
                self._probe = socket.create_connection((bottom.host, bottom.port), timeout=_START_S)
        self.board = _board_of(bottom)

    def check(self) -> None:
        """Check that the connection is open.

        Raises:
            ConnectionResetError: the host of the store has closed it.
        """
        if self._probe is not None:
            poll = select.poll()
            poll.register(self._probe, select.POLLRDHUP)
            if poll.poll(0):
                raise ConnectionResetError("the host of the store has closed the connection")

    def close(self) -> None:
        """Close the connection."""
        if self._probe is not None:
            self._probe.close()
