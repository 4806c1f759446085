"""The thread of a rank that writes its beats into the store of the group, and keeps a view of those of the others.

Of all waiting ranks of a group one at a time, the watcher, reads the beats of all ranks, so that reading costs N values and not
N x N (``docs/scale.md``). It renews its claim whenever it looks; if it does not, another waiting rank takes over. The others
read the finding and the claim, and know the processes of their own host, which they check in ``/proc``.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megabucket.comm.communicator import Finding, LaunchCount, RankState
from megabucket.comm.liveness.observations import (
    LONGEST_GAP_S,
    Beat,
    ProcessIdentity,
    View,
    identify_this_process,
    look_every_s,
    read_every_s,
)
from megabucket.errors import PeerFailedError, PeerLostError, WrapperBrokenError

_START_S: Final = 5.0
_JOIN_S: Final = 1.0
_CLAIM_S: Final = 1.0  # a watcher that has not renewed its claim for this long is replaced
_CLAIM_LOOKS: Final = 5  # or for so many looks, where there are many ranks
_RANKS_SHOWN: Final = 5
_KEYS_PER_REQUEST: Final = 1_024  # the host of a TCP store takes ten times as long for each key of a request for 16,384


# Values in the store #


class Block(NamedTuple):
    """A long wait of a rank."""

    token: str  # of the wrapper; unique in the store, also across restarts
    group: str  # the token of the wrapper's group of ranks that it waits for
    label: str


class _Claim(NamedTuple):
    """The rank that reads the beats of all ranks."""

    rank: int
    number: int  # another one at each renewal
    is_urgent: bool  # it looks for the rank that broke a connection


class _Request(NamedTuple):
    """A request to the thread: renew the view of the store."""

    write: Callable[[Store], None] | None = None  # a write to the board, done first
    answered: threading.Event | None = None  # set when the view is there; beats are then read again, however new they are
    takes_watch: bool = False  # also from another rank, unless that has taken it in this way


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
        self._num_beats = self._num_claims = 0
        self._next_beat_s = 0.0
        self._block: Block | None = None  # of this rank, as written to the board
        self._cycle: dict[int, Block] = {}  # found by the last check
        self._group = self._host = ""  # the token of this group, and the key under which its ranks of this host are listed
        self._neighbours: list[int] = []  # the ranks of this host
        self._all_present = False
        self._claim, self._claim_silent_s, self._looked_at_s = b"", 0.0, 0.0  # as last read
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

    def leave_watch(self) -> None:
        """Let another waiting rank be the watcher."""
        self._mailbox.put(_Request(self._drop_claim))

    def ask(self, timeout_s: float, *, takes_watch: bool = False) -> View | None:
        """Return a view that is newer than all earlier requests, or ``None`` if the store does not answer in time.

        Args:
            takes_watch: be the watcher even if another rank is, unless that one became it in this way.
        """
        answered, deadline_s = threading.Event(), time.monotonic() + timeout_s
        self._mailbox.put(_Request(answered=answered, takes_watch=takes_watch))
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
        board = connection.board
        self.name, store, self._group = _begin_wrapper(connection.store, self.rank)
        # A wrapper of several groups has one token for all of them: ranks that wait in two of its groups form no cycle, since
        # all ranks launch in one order, and a finding of one group reaches the others.
        self._token = self.state.ranks.token = self.state.ranks.token or self._group
        self._come(store, board)
        is_ready.set()
        while True:
            request: _Request | None = None
            with contextlib.suppress(queue.Empty):
                request = self._mailbox.get(timeout=max(0.0, self._next_beat_s - time.monotonic()))
            connection.check()
            if request is _LEAVE or not self._is_wanted():
                break  # the group was destroyed: this rank launches nothing more on it
            if request is not None:
                self._answer(store, board, request)
                continue
            self._beat(store)
            if not self._all_present:
                # Later the store may be out of reach. A process that is stopped while it holds the lock of a file store, for
                # instance, stops the store.
                self._look(store, board, None)
        self._drop_claim(board)
        self._beat(store, has_left=True)

    def _come(self, store: Store, board: Store) -> None:
        """Write what the other ranks will read. A read of a key that does not exist blocks, so this rank is counted last."""
        self._write_block(board, None)
        for key in (f"finding/{self._token}", f"watch/{self._group}"):
            board.compare_set(key, "", "")
        self._beat(store)
        if self.process.pid_space:
            self._host = f"host/{self._group}/{self.process.pid_space}"
            board.set(f"{self._host}/{board.add(self._host, 1) - 1}", str(self.rank))
        if board.add(f"present/{self._group}", 1) == 1:
            board.set(f"group/{self._group}", json.dumps([self._wrapper, self.members]))

    @property
    def _wrapper(self) -> str:
        shown = ", ".join(map(str, self.members[:_RANKS_SHOWN]))
        more = f", ... ({len(self.members)} ranks)" if len(self.members) > _RANKS_SHOWN else ""
        return f"{self.name} over group {self._group_name!r} of ranks [{shown}{more}]"

    def _beat(self, store: Store, *, has_left: bool = False) -> None:
        progress = self.state.progress
        self._num_beats += 1
        # From the beginning of this one on: with a slow store what follows it must not come on top.
        self._next_beat_s = time.monotonic() + (self.every_s or threading.TIMEOUT_MAX)
        place = (progress.step, progress.phase, progress.bucket, self.launches.last)
        # A list, because a file store keeps every beat.
        beat = json.dumps(Beat(self.process, self._num_beats, self.every_s, *place, has_left), separators=(",", ":"))
        store.set(_rank_key(self.rank), beat)

    def _answer(self, store: Store, board: Store, request: _Request) -> None:
        if request.write is not None:
            request.write(board)
        elif request.answered is not None or time.monotonic() - self._looked_at_s >= look_every_s(len(self.members)):
            self._look(store, board, request)
        if request.answered is not None:
            request.answered.set()

    def _look(self, store: Store, board: Store, request: _Request | None) -> None:
        """Renew the view: read the finding and the claim. A watcher also reads the beats of all ranks now and then.

        Args:
            request: ``None``: this rank does not wait, so it does not become the watcher.
        """
        keys = [f"finding/{self._token}", f"watch/{self._group}"]
        counts = [] if self._all_present else [f"present/{self._group}"] + [self._host] * bool(self._host)
        finding, claim, *counted = board.multi_get([*keys, *counts])
        # A new view even if nothing has changed: it shows that the store has answered.
        self.view = self.view._replace(finding=decode_finding(finding) if finding else None)
        if counted:
            self._note_arrivals(store, board, *map(int, counted))
        if request is not None:
            must_read = request.answered is not None
            lost = self._renew_claim(board, claim, takes_watch=request.takes_watch)
            is_due = time.monotonic() - self.view.asked_at_s >= read_every_s(len(self.members))
            if self.view.watcher_since_s is not None and (must_read or is_due):
                self._read_beats(store, lost)
                self._report_cycle(board)
            elif self.view.watcher_since_s is None and must_read:
                beats = _read_beats_of(store, self._neighbours)
                self.view = self.view._replace(beats={**self.view.beats, **beats})

    def _note_arrivals(self, store: Store, board: Store, num_present: int, num_on_host: int = 0) -> None:
        """Note how many ranks have come, and read the first beats of those of this host."""
        keys = [f"{self._host}/{index}" for index in range(num_on_host)]
        is_listed = len(self._neighbours) == max(0, num_on_host - 1)
        if not is_listed and board.check(keys):  # a rank is counted a moment before it is listed
            self._neighbours = sorted({int(rank) for rank in board.multi_get(keys)} - {self.rank})
            self.view = self.view._replace(beats=_read_beats_of(store, self._neighbours))
            is_listed = True
        self._all_present = is_listed and num_present == len(self.members)
        self.view = self.view._replace(num_present=num_present)

    def _renew_claim(self, board: Store, claim: bytes, *, takes_watch: bool) -> _Claim | None:
        """Become or remain the watcher if no other rank is; return the claim of a watcher that this one replaces."""
        now_s, longest_gap_s = time.monotonic(), max(LONGEST_GAP_S, 2 * look_every_s(len(self.members)))
        gap_s, self._looked_at_s = min(now_s - self._looked_at_s, longest_gap_s), now_s
        self._claim_silent_s = self._claim_silent_s + gap_s if claim == self._claim else 0.0
        self._claim = claim
        known, since_s = _Claim(*json.loads(claim)) if claim else None, self.view.watcher_since_s
        is_own = known is not None and known.rank == self.rank
        has_lapsed = self._claim_silent_s > max(_CLAIM_S, _CLAIM_LOOKS * look_every_s(len(self.members)))
        if known is None or is_own or has_lapsed or (takes_watch and not known.is_urgent):
            self._num_claims += 1
            is_urgent = takes_watch or (is_own and known is not None and known.is_urgent)
            wanted = json.dumps(_Claim(self.rank, self._num_claims, is_urgent))
            self._claim = board.compare_set(f"watch/{self._group}", claim.decode(), wanted)
            is_watcher = self._claim.decode() == wanted
        else:
            is_watcher = False
        self.view = self.view._replace(watcher_since_s=(since_s or now_s) if is_watcher else None)
        return known if is_watcher and has_lapsed and not is_own else None

    def _drop_claim(self, board: Store) -> None:
        if self.view.watcher_since_s is not None:
            self._claim = board.compare_set(f"watch/{self._group}", self._claim.decode(), "")
            self.view = self.view._replace(watcher_since_s=None)

    def _write_finding(self, board: Store, finding: Finding, tokens: Iterable[str] = ()) -> None:
        """Write a finding for this wrapper and others. If one of them has a finding already, all get that one."""
        text = encode_finding(finding)
        for token in sorted({self._token, *tokens}):
            text = board.compare_set(f"finding/{token}", "", text).decode()

    def _write_block(self, board: Store, label: str | None) -> None:
        self._block = None if label is None else Block(self._token, self._group, label)
        board.set(_rank_key(self.members[self.rank]), json.dumps(self._block))

    def _read_beats(self, store: Store, lost: _Claim | None) -> None:
        """Read the beats of all ranks.

        Args:
            lost: the claim of a watcher that has not renewed it. Where that was another host, its ranks may be lost with it.
        """
        asked_at_s, others = time.monotonic(), set(range(len(self.members))) - {self.rank}
        values = _read(store, others, known=others if self._all_present else set(self.view.beats))
        beats = {rank: decode_beat(value) for rank, value in values.items()}
        silent_before_s = dict[int, float]()
        if lost is not None and lost.rank in beats:
            host, silent_s = beats[lost.rank].process.host, self._claim_silent_s
            with_it = {rank for rank, beat in beats.items() if beat.process.host == host != self.process.host}
            silent_before_s = dict.fromkeys({lost.rank} | with_it, silent_s)
        self.view = self.view._replace(asked_at_s=asked_at_s, beats=beats, silent_before_s=silent_before_s)

    def _report_cycle(self, board: Store) -> None:
        """Write a finding to all ranks of a cycle of waits. It must be seen twice, because the board may be out of date."""
        cycle, self._cycle = self._cycle, self._find_cycle(board)
        if cycle and cycle == self._cycle:
            texts = {block.group: _read_group(board, block.group)[0] for block in cycle.values()}
            places = [f"rank {rank} waits for {block.label} of {texts[block.group]}" for rank, block in sorted(cycle.items())]
            cause = (
                f"ranks wait for one another: {'; '.join(places)}. Every rank must use its wrappers, and make collective "
                "calls, in the same order"
            )
            progress = self.state.progress
            error = WrapperBrokenError(step=progress.step, rank=None, phase=progress.phase, cause=cause)
            self._write_finding(board, error, [block.token for block in cycle.values()])

    def _find_cycle(self, board: Store) -> dict[int, Block]:
        """Return global ranks that wait for each other in a cycle of wrappers; empty if this rank waits for none.

        Each rank waits for all members of its group that wait in another wrapper, so a cycle of groups is one of ranks.
        """
        if self._block is None:
            return {}
        # Blocks of ranks that have not written a beat yet are from before a restart.
        read = {member for rank, member in enumerate(self.members) if rank not in self.view.beats and rank != self.rank}
        blocks: dict[int, Block] = {}
        waits_for: dict[str, dict[str, int]] = {}  # by group: other groups, and a member that waits in each
        ahead = [self._block]
        while ahead:
            token, group, _ = ahead.pop()
            members = self.members if group == self._group else _read_group(board, group)[1]
            blocks |= _read_blocks(board, set(members) - read)
            read.update(members)
            waits_for[group] = {}
            for member in members:
                block = blocks.get(member)
                if block is not None and block.token != token:
                    waits_for[group].setdefault(block.group, member)
                    if block.group not in waits_for and block not in ahead:
                        ahead.append(block)
        return {rank: blocks[rank] for rank in _ranks_of_cycle(waits_for)}


def _ranks_of_cycle(waits_for: Mapping[str, Mapping[str, int]]) -> list[int]:
    """Return a rank for each edge of a cycle of groups; none if there is no cycle.

    >>> _ranks_of_cycle({"a": {"b": 1}, "b": {"c": 2, "a": 0}, "c": {}})
    [0, 1]
    """
    waits_for = dict(waits_for)
    while ends := [group for group, others in waits_for.items() if not others.keys() & waits_for.keys()]:
        for group in ends:
            del waits_for[group]
    path, group = dict[str, int](), min(waits_for, default="")
    while waits_for and group not in path:
        other = min(waits_for[group].keys() & waits_for.keys())
        path[group] = waits_for[group][other]
        group = other
    return sorted(set(list(path.values())[list(path).index(group) :])) if path else []


def _read_group(board: Store, group: str) -> tuple[str, Sequence[int]]:
    """Return how a group of ranks is called in errors, and its global ranks."""
    key = f"group/{group}"
    name, members = json.loads(board.get(key)) if board.check([key]) else ("", [])
    return name, members


def _read_beats_of(store: Store, ranks: Sequence[int]) -> dict[int, Beat]:
    """Return the beats of ranks that have written one."""
    return {rank: decode_beat(value) for rank, value in _read(store, set(ranks), known=set(ranks)).items()}


def _read_blocks(board: Store, ranks: set[int]) -> dict[int, Block]:
    """Return the blocks of those of the ranks that have waited for long."""
    blocks = {rank: json.loads(value) for rank, value in _read(board, ranks, set()).items()}
    return {rank: Block(*block) for rank, block in blocks.items() if block is not None}


def _read(store: Store, ranks: set[int], known: set[int]) -> dict[int, bytes]:
    """Return the values of the ranks that have written one. Reading a key that does not exist would block.

    Args:
        known: ranks that are known to have written.
    """
    asked = [_rank_key(rank) for rank in ranks - known]
    if not all(store.check(keys) for keys in _requests(asked)):
        ranks = known | {rank for rank in ranks - known if store.check([_rank_key(rank)])}
    in_order = sorted(ranks)
    values = [value for keys in _requests([_rank_key(rank) for rank in in_order]) for value in store.multi_get(keys)]
    return dict(zip(in_order, values, strict=True))


def _requests(keys: list[str]) -> Iterator[list[str]]:
    """Cut a long list of keys."""
    return (keys[start : start + _KEYS_PER_REQUEST] for start in range(0, len(keys), _KEYS_PER_REQUEST))


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
