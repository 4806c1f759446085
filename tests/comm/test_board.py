"""Ranks that wait for one another in different wrappers find out together. Threads stand for ranks, over one store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megabucket.comm import Liveness
from megabucket.comm.communicator import LaunchCount, RankState
from megabucket.comm.liveness.heartbeat import Heartbeat, _Request
from megabucket.comm.liveness.watch import PeerWatch
from megabucket.errors import MegabucketError, PeerLostError, WrapperBrokenError

PATIENT = Liveness(heartbeat_s=0.2, dead_after_s=20.0, straggler_warning_s=None)
QUICK = Liveness(heartbeat_s=0.2, dead_after_s=2.0, straggler_warning_s=None)
NOTICED_S = 3.0  # a second until a wait is written to the board, and a few looks


class Work:
    """A collective that is done when the test says so."""

    def __init__(self) -> None:
        self.is_done = threading.Event()

    def wait(self, timeout: Any = None) -> bool:
        if not self.is_done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")  # gloo's text
        return True

    def is_completed(self) -> bool:
        return self.is_done.is_set()


def in_step_3(phase: str) -> RankState:
    state = RankState()
    state.progress.enter(3, phase)
    return state


class Wrapper:
    """What the ranks of one wrapper have of it: a heartbeat and a watch each."""

    def __init__(
        self,
        store: dist.Store,
        members: tuple[int, ...],
        group: str,
        state_of: dict[int, RankState] | None = None,
        liveness: Liveness = PATIENT,
    ) -> None:
        self.heartbeats, self.watches = {}, {}
        for rank, member in enumerate(members):
            state = state_of[member] if state_of else in_step_3("backward")
            heartbeat = Heartbeat(
                dist.PrefixStore(group, store),
                rank=rank,
                members=members,
                state=state,
                launches=LaunchCount(),
                every_s=liveness.heartbeat_s,
                is_wanted=lambda: True,
                group_name=group,
            )
            self.heartbeats[member] = heartbeat
            self.watches[member] = PeerWatch(
                heartbeat,
                liveness,
                group_timeout_s=60.0,
                on_loss=lambda: None,
            )

    def wait(self, member: int, work: Work, label: str = "fence", *, after_s: float = 0.0) -> MegabucketError | None:
        """Wait on one rank, and return the error, if there is one."""
        time.sleep(after_s)
        try:
            self.watches[member].wait([work], label=label, number=1)
        except MegabucketError as error:
            return error
        return None


@pytest.fixture
def wrappers() -> Iterator[Callable[..., Wrapper]]:
    """Make wrappers over one store. Those over one group follow each other on all ranks; each group has its prefix."""
    made: list[Wrapper] = []
    store = dist.HashStore()

    def make(*members: int, group: str = "dp", **settings: Any) -> Wrapper:
        made.append(Wrapper(store, members, group, **settings))
        return made[-1]

    yield make
    for wrapper in made:
        for heartbeat in wrapper.heartbeats.values():
            heartbeat.stop()


def wait_together(*waits: tuple[Any, ...], after_s: float = 0.0) -> list[MegabucketError | None]:
    """Do waits at once, the last one a little later."""
    works = [Work() for _ in waits]
    with ThreadPoolExecutor(len(waits)) as pool:
        futures = [
            pool.submit(wrapper.wait, member, work, label, after_s=after_s * (work is works[-1]))
            for (wrapper, member, label), work in zip(waits, works, strict=True)
        ]
        wait_for(futures, 10.0)
        for work in works:
            work.is_done.set()
        return [future.result() for future in futures]


@pytest.mark.parametrize("after_s", [0.0, 1.3])
def test_two_ranks_in_two_wrappers_of_one_group_hear_the_same_wherever_the_second_one_comes_in(wrappers, after_s):
    first, second = wrappers(0, 1), wrappers(0, 1)
    started_s = time.monotonic()

    errors = wait_together((first, 0, "fence"), (second, 1, "grad norm"), after_s=after_s)

    assert time.monotonic() - started_s < NOTICED_S + after_s
    assert [type(error) for error in errors] == [WrapperBrokenError] * 2
    assert str(errors[0]) == str(errors[1])
    assert errors[0].cause == (
        "ranks wait for one another: rank 0 waits for fence of megabucket/1 over group 'dp' of ranks [0, 1]; rank 1 waits "
        "for grad norm of megabucket/2 over group 'dp' of ranks [0, 1]. Every rank must use its wrappers, and make collective "
        "calls, in the same order"
    )
    for wrapper, rank in ((first, 0), (second, 1)):
        assert wrapper.watches[rank].finding is not None  # nothing can be launched any more


def test_wrappers_of_two_groups_of_the_same_ranks_are_told_apart(wrappers):
    first, second = wrappers(0, 1, group="a"), wrappers(0, 1, group="b")

    errors = wait_together((first, 0, "fence"), (second, 1, "fence"))

    assert [type(error) for error in errors] == [WrapperBrokenError] * 2


def test_ranks_that_wait_in_two_groups_of_one_wrapper_are_in_no_circle_and_hear_what_either_finds(wrappers):
    state_of = {rank: in_step_3("backward") for rank in (0, 1)}
    dense, expert = (wrappers(0, 1, group=group, state_of=state_of) for group in ("dense", "expert"))
    slow, works = time.monotonic() + 3.0, (Work(), Work())
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(dense.wait, 0, works[0]), pool.submit(expert.wait, 1, works[1])]
        wait_for(futures, slow - time.monotonic())
        assert not any(future.done() for future in futures)  # slow transfers end
        works[1].is_done.set()
        assert futures[1].result(5.0) is None
        lost = PeerLostError(ranks=(1,), states=("died",), during="a test")
        expert.watches[1].break_off(lost)
        assert str(futures[0].result(NOTICED_S)) == str(lost)


def test_a_circle_through_three_groups_is_found(wrappers):
    groups = [wrappers(rank, (rank + 1) % 3, group=f"group {rank}") for rank in range(3)]

    errors = wait_together(*((groups[rank], rank, "fence") for rank in range(3)))  # each waits for the next one

    assert [type(error) for error in errors] == [WrapperBrokenError] * 3
    assert len({str(error) for error in errors}) == 1


def test_a_rank_outside_of_the_circle_that_waits_for_one_inside_hears_it_too(wrappers):
    first, second = wrappers(0, 1, 2), wrappers(0, 1, 2)

    errors = wait_together((first, 2, "fence"), (first, 0, "fence"), (second, 1, "fence"))

    assert [type(error) for error in errors] == [WrapperBrokenError] * 3


def test_a_chain_that_ends_at_a_rank_at_work_is_no_circle(wrappers):
    first, second, works = wrappers(0, 1, group="a"), wrappers(1, 2, group="b"), [Work(), Work()]

    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(first.wait, 0, works[0]), pool.submit(second.wait, 1, works[1])]
        time.sleep(2.0)
        assert not any(wait.done() for wait in waits)
        for work in works:  # the last rank comes at last
            work.is_done.set()

        assert [wait.result(5.0) for wait in waits] == [None, None]


def test_a_wait_that_is_over_leaves_nothing_on_the_board(wrappers):
    first, second, work = wrappers(0, 1), wrappers(0, 1), Work()

    with ThreadPoolExecutor(2) as pool:
        before = pool.submit(first.wait, 0, work)
        time.sleep(1.5)
        work.is_done.set()
        assert before.result(5.0) is None
        late = Work()
        waiting = pool.submit(second.wait, 1, late)
        time.sleep(1.7)
        assert not waiting.done()
        late.is_done.set()

        assert waiting.result(5.0) is None


def first_of_two(store):
    """The heartbeat of the first of two ranks, of which the other does not come."""
    state, launches = RankState(), LaunchCount()
    return Heartbeat(store, rank=0, members=(0, 1), state=state, launches=launches, every_s=0.2, is_wanted=lambda: True)


def test_what_a_rank_left_on_the_board_before_a_restart_is_no_circle_with_one_that_has_come_again():
    store = dist.HashStore()
    before = Wrapper(dist.PrefixStore("attempt 0", store), (0, 1), "dp")
    before.heartbeats[1].block("fence")
    assert before.heartbeats[1].ask(5.0) is not None
    early = first_of_two(dist.PrefixStore("attempt 1", store))
    watch = PeerWatch(early, PATIENT, group_timeout_s=2.5, on_loss=lambda: None)

    with pytest.raises(PeerLostError, match="has not wrapped its module yet"):  # and not that ranks wait for one another
        watch.wait_for_all_ranks("wrap")
    for heartbeat in (*before.heartbeats.values(), early):
        heartbeat.stop()


def test_an_interrupted_rank_ends_the_waits_of_the_others_in_its_words(wrappers):
    wrapper, work = wrappers(0, 1, 2), Work()
    error = WrapperBrokenError(step=3, rank=1, phase="update", cause="KeyboardInterrupt")

    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(wrapper.wait, member, work) for member in (0, 2)]
        time.sleep(0.3)
        at_s = time.monotonic()
        wrapper.watches[1].break_off(error)
        errors = [wait.result(5.0) for wait in waits]

    assert time.monotonic() - at_s < 2.0
    assert [str(found) for found in errors] == [str(error)] * 2


def test_a_rank_that_never_wraps_is_named_when_the_time_of_the_group_is_over():
    heartbeat = first_of_two(dist.HashStore())
    watch = PeerWatch(heartbeat, PATIENT, group_timeout_s=0.5, on_loss=lambda: None)
    started_s = time.monotonic()

    with pytest.raises(PeerLostError) as caught:
        watch.wait_for_all_ranks("wrap")
    heartbeat.stop()

    assert time.monotonic() - started_s < 2.0
    assert caught.value.ranks == (1,)
    assert caught.value.states == ("did not come in time: it has given no sign of life: it has not wrapped its module yet",)
    assert "while waiting for wrap" in caught.value.during


@pytest.mark.parametrize(("phase", "text"), [("fence", "fence of step 3:"), ("update", "fence of step 3 (update):")])
def test_a_phase_that_is_named_like_what_it_waits_for_is_said_once(phase, text):
    state = in_step_3(phase)
    heartbeat = Heartbeat(
        dist.HashStore(),
        rank=0,
        members=(0, 1),
        state=state,
        launches=LaunchCount(),
        every_s=0.2,
        is_wanted=lambda: True,
    )
    watch = PeerWatch(heartbeat, PATIENT, group_timeout_s=0.1, on_loss=lambda: None)

    with pytest.raises(PeerLostError) as caught:
        watch.wait_for_all_ranks("fence")
    heartbeat.stop()

    assert caught.value.during.startswith(f"noticed while waiting for {text}")


class BrokenWork(Work):
    """A work of gloo whose connection breaks."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        raise RuntimeError("[pair.cc:1] Connection closed by peer [10.0.0.2]:1. This may be caused by a crash.")


def test_of_a_broken_connection_a_rank_that_left_after_it_had_launched_is_named(wrappers):
    wrapper = wrappers(0, 1)
    wrapper.heartbeats[1].launches.last = 9
    wrapper.heartbeats[1].stop()  # its process lives: on another host nobody could see that it has ended

    error = wrapper.wait(0, BrokenWork())

    assert isinstance(error, PeerLostError)
    assert error.ranks == (1,)
    assert error.states[0].startswith("left: its program ended")
    assert "Connection closed by peer" in error.during


def test_a_watcher_that_freezes_is_named_by_those_that_wait_with_it(wrappers):
    """A lost rank may be the one that reads all beats: another one follows, and its silence counts from the start."""
    wrapper, work, goes_on = wrappers(0, 1, 2, liveness=QUICK), Work(), threading.Event()

    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(wrapper.wait, member, work) for member in range(3)]
        time.sleep(1.0)
        (watcher,) = (rank for rank, one in wrapper.heartbeats.items() if one.view.watcher_since_s is not None)
        wrapper.heartbeats[watcher]._mailbox.put(_Request(lambda _: goes_on.wait()))  # neither beats nor answers
        at_s = time.monotonic()
        errors = [wait.result(20.0) for rank, wait in enumerate(waits) if rank != watcher]
        noticed_s = time.monotonic() - at_s
        goes_on.set()

    assert [error.ranks for error in errors] == [(watcher,)] * 2
    assert str(errors[0]) == str(errors[1])
    assert errors[0].states[0].startswith("froze: no sign of life for 2 s")
    assert QUICK.dead_after_s - 0.5 <= noticed_s <= QUICK.dead_after_s + 1
