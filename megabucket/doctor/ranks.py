"""Questions about the ranks themselves and about the process group below the port, which the library could do without."""

from __future__ import annotations

import hashlib
import json
import platform
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeAlias, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from megabucket import __version__
from megabucket.comm import Accelerator, AllReduce
from megabucket.comm.torch import FABRIC, backend_of, store_of
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.doctor.question import NO_GROUP, NO_PEERS, Answer, Asking, Bench, Question, by_rank, check, odd_ones_out
from megabucket.doctor.report import Verdict
from megabucket.errors import CollectiveError
from megabucket.units import format_seconds

# torch 2.13 renamed these functions; 2.11 has only the old names, about which newer ones warn.
_all_gather: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Final = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_CLOCKS_AGREE_S: Final = 1.0
_NUMEL: Final = 8
"""Elements of each rank's part in a question to the process group."""
_LATE_S: Final = 0.5
_EXPIRES_S: Final = 0.05
_CALLBACK_S: Final = 2.0
_WITHOUT_STORE: Final = "no heartbeats: a frozen rank is noticed only when the group times out"

_GroupQuestion: TypeAlias = Callable[[Bench, dist.ProcessGroup], Answer]


def rank_questions() -> Iterator[Question]:
    """Return the questions about the ranks in the order in which they are asked."""
    for name, ask in {"hosts": hosts, "versions": versions, "config": config_digest, "clocks": clocks}.items():
        yield Question("ranks", name, ask, refusal="this rank cannot say what it is", is_required=ask is not clocks)


def group_questions(config: DistributedDataParallelConfig) -> Iterator[Question]:
    """Return the questions to the process group in the order in which they are asked: the one that may harm it comes last."""
    unwanted = "" if config.heartbeat_s is not None else "; the config asks for none"
    needed = "the library needs it except on gloo, where it all-reduces instead"
    spoils = "a wait that ends early spoils the group: lost peers are noticed by the group's own time limit only"
    asked: dict[str, tuple[_GroupQuestion, str]] = {
        "store": (store, _WITHOUT_STORE + unwanted),
        "works call back": (callback, "traces show no communication"),
        "reduce-scatter in place, the back-end's own": (scatter_in_place, needed),
        "coalescing": (coalescing, "ddp.bucket_groups=single is not possible"),
        "all-to-all": (all_to_all, "sums in a fixed order are not possible; not used by default"),
        "send and receive": (send_receive, "pairwise exchanges are not possible; not used by default"),
        "flight recorder": (flight_recorder, "time-outs come without a record"),
        "a wait may be given up": (expired_wait, spoils),
    }
    for name, (ask, refusal) in asked.items():
        yield Question("process group", name, partial(_ask_group, ask=ask), refusal, is_required=False)


def _ask_group(bench: Bench, ask: _GroupQuestion) -> Answer:
    return NO_GROUP if bench.group is None else ask(bench, bench.group)


# The ranks #


def hosts(bench: Bench) -> Asking:
    """Ask how many ranks are on how many hosts, and on which devices."""
    accelerator = Accelerator.of(bench.device)
    device = bench.device.type if accelerator is None else accelerator.name
    facts = yield {"host": socket.gethostname(), "device": device}
    num_hosts, devices = len({fact["host"] for fact in facts}), [fact["device"] for fact in facts]
    hosts_text = "1 host" if num_hosts == 1 else f"{num_hosts} hosts"
    ranks_text = "1 rank" if len(facts) == 1 else f"{len(facts)} ranks"
    answer = f"{ranks_text} on {hosts_text}: {by_rank(devices)}"
    if len(set(devices)) > 1:
        meaning = "the slowest rank sets the pace, and results may depend on the rank"
        return Answer(Verdict.NOTE, answer, meaning, odd_ones_out(devices))
    if len(facts) == 1:
        return Answer(Verdict.HOLDS, answer, "nobody to talk to: gradients are not reduced")
    return Answer(Verdict.HOLDS, answer, "every rank computes on the same kind of device")


def versions(_: Bench) -> Asking:
    """Ask whether megabucket, torch and Python are the same."""
    facts = yield {"libraries": f"megabucket {__version__}, torch {torch.__version__}", "python": platform.python_version()}
    pythons = [f"{fact['libraries']}, Python {fact['python']}" for fact in facts]
    compared = [text.rpartition(".")[0] for text in pythons]  # as wrapping compares them
    if len(set(compared)) > 1:
        meaning = "wrapping would raise LayoutMismatchError: ranks may launch different collectives"
        return Answer(Verdict.FINDING, by_rank(compared), meaning, odd_ones_out(compared))
    if len(set(pythons)) > 1:
        return Answer(Verdict.NOTE, by_rank(pythons), "harmless: Python differs in its last number", odd_ones_out(pythons))
    return Answer(Verdict.HOLDS, pythons[0], "the same on every rank")


def config_digest(bench: Bench) -> Asking:
    """Ask whether the ``ddp`` section is the same."""
    facts = yield {"digest": hashlib.sha256(bench.config.model_dump_json().encode()).hexdigest()[:12]}
    digests = [fact["digest"] for fact in facts]
    if len(set(digests)) == 1:
        return Answer(Verdict.HOLDS, digests[0], "the same on every rank")
    meaning = "wrapping would raise LayoutMismatchError; give every rank the same file and overrides"
    return Answer(Verdict.FINDING, by_rank(digests), meaning, odd_ones_out(digests))


def clocks(bench: Bench) -> Asking:
    """Ask how far apart the clocks are at the end of a collective."""
    for _ in range(2):  # the first one makes the connections
        tensor = torch.zeros(1, device=bench.device)
        bench.launch(AllReduce(tensor))
        tensor.item()  # on CUDA the wait alone does not wait for the data
    facts = yield {"now_s": time.time()}
    times_s = sorted(fact["now_s"] for fact in facts)
    answer = f"within {format_seconds(times_s[-1] - times_s[0])}"
    if times_s[-1] - times_s[0] <= _CLOCKS_AGREE_S:
        return Answer(Verdict.HOLDS, answer, "logs and traces of the ranks can be laid side by side")
    middle_s = times_s[len(times_s) // 2]
    odd = tuple(rank for rank, fact in enumerate(facts) if abs(fact["now_s"] - middle_s) > _CLOCKS_AGREE_S)
    meaning = "times in logs and traces of different ranks cannot be compared; nothing else uses them"
    return Answer(Verdict.NOTE, answer, meaning, odd)


# The process group #


def store(bench: Bench, group: dist.ProcessGroup) -> Answer:
    """Ask whether other ranks' values arrive through the group's store, and also through a clone of it."""
    found = innermost = store_of(group)
    if found is None:
        raise CollectiveError("torch does not tell the store of the group")
    while isinstance(innermost, PrefixStore):
        innermost = innermost.underlying_store
    kind, other = type(innermost).__name__, (bench.rank + 1) % bench.size
    found.set(f"doctor/{bench.rank}", str(bench.rank))
    found.wait([f"doctor/{other}"], timedelta(seconds=10))
    if found.get(f"doctor/{other}") != str(other).encode():
        return Answer(Verdict.FINDING, f"{kind}: other ranks' values are wrong", _WITHOUT_STORE)
    with suppress(Exception):  # a store without connections of its own refuses in ways of its own
        if cast("Any", found).clone().get(f"doctor/{other}") == str(other).encode():
            return Answer(Verdict.HOLDS, f"{kind}, can be cloned", "heartbeats have a connection of their own")
    return Answer(Verdict.NOTE, f"{kind}, cannot be cloned", "heartbeats share one connection with everything else")


def callback(bench: Bench, group: dist.ProcessGroup) -> Answer:
    """Ask whether an asynchronous work calls back when it is done, which is how communication is timed."""
    calls: list[float] = []
    work = cast("dist.Work", dist.all_reduce(_own(bench), group=group, async_op=True))
    work.get_future().add_done_callback(lambda _: calls.append(time.perf_counter()))
    work.wait()
    end_s = time.perf_counter() + _CALLBACK_S
    while not calls and time.perf_counter() < end_s:
        time.sleep(0.001)
    is_right, silent = len(calls) == 1, "traces show no communication"
    return check("traces show when communication ended", is_right=is_right, wrong=silent, verdict=Verdict.NOTE)


def scatter_in_place(bench: Bench, group: dist.ProcessGroup) -> Answer:
    """Ask whether the back-end's own reduce-scatter works into this rank's part of the input."""
    parts = _own(bench).repeat(bench.size, 1)
    own = parts[bench.rank]
    _wait(_reduce_scatter(own, parts.view(-1), op=dist.ReduceOp.SUM, group=group, async_op=True))
    is_right = _holds_sum(own, bench)
    own.fill_(bench.rank + 1)
    rest = "kept" if bool((parts == bench.rank + 1).all()) else "overwritten"
    wrong = "mode=reduce_scatter would be wrong, except on gloo"
    return check(f"the rest of the input is {rest}; either will do", is_right=is_right, wrong=wrong)


def coalescing(bench: Bench, group: dist.ProcessGroup) -> Answer:
    """Ask how many works three collectives of a kind become that are launched as one batch.

    Gathers are left out on gloo, where torch may crash; see docs/decisions/gloo-coalesced-gather.md.
    """
    sums, shards = [_own(bench) for _ in range(3)], [_own(bench) for _ in range(3)]
    fulls = [_own(bench).repeat(bench.size) for _ in range(3)]
    scatter = partial(_reduce_scatter, op=dist.ReduceOp.SUM)
    works = {
        "all-reduce": _batch(group, [partial(dist.all_reduce, part) for part in sums]),
        "reduce-scatter": _batch(group, [partial(scatter, *pair) for pair in zip(shards, fulls, strict=True)]),
    }
    is_right = all(_holds_sum(part, bench) for part in (*sums, *shards))
    if backend_of(group, bench.device) != "gloo":
        works["all-gather"] = _batch(group, [partial(_all_gather, full, _own(bench)) for full in fulls])
        expected = torch.arange(1.0, bench.size + 1, device=bench.device).repeat_interleave(_NUMEL)
        is_right = is_right and all(torch.equal(full, expected) for full in fulls)
    answer = "3 calls become " + ", ".join(f"{count} {kind}" for kind, count in works.items())
    meaning = f"a bucket group is {'one launch' if set(works.values()) == {1} else 'several launches'}"
    return check(meaning, is_right=is_right, wrong="ddp.bucket_groups=single would be wrong", answer=answer)


def all_to_all(bench: Bench, group: dist.ProcessGroup) -> Answer:
    """Ask whether a piece of its own reaches every rank."""
    places = torch.arange(float(bench.size), device=bench.device)
    received = torch.empty_like(places)
    _wait(dist.all_to_all_single(received, places + 100 * bench.rank, group=group, async_op=True))
    is_right, broken = torch.equal(received, 100 * places + bench.rank), "all-to-all is broken; not used here"
    return check("sums in a fixed order are possible", is_right=is_right, wrong=broken, verdict=Verdict.NOTE)


def send_receive(bench: Bench, group: dist.ProcessGroup) -> Answer:
    """Ask whether a rank can send to the next one and receive from the one before, both at once."""
    if bench.size == 1:
        return NO_PEERS
    after, before = (bench.rank + 1) % bench.size, (bench.rank - 1) % bench.size
    received = torch.zeros(_NUMEL, device=bench.device)
    sending = dist.P2POp(dist.isend, _own(bench), group=group, group_peer=after)
    receiving = dist.P2POp(dist.irecv, received, group=group, group_peer=before)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()
    is_right, broken = bool((received == before + 1).all()), "send/receive is broken; not used here"
    return check("pairwise exchanges are possible", is_right=is_right, wrong=broken, verdict=Verdict.NOTE)


def flight_recorder(bench: Bench, group: dist.ProcessGroup) -> Answer:
    """Ask whether torch records the collectives that were launched."""
    _wait(dist.all_reduce(_own(bench), group=group, async_op=True))
    c10d = torch._C._distributed_c10d
    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return Answer(Verdict.NOTE, "not in this build of torch", "time-out errors come without a record")
    if json.loads(dump()).get("entries"):
        return Answer(Verdict.HOLDS, "records", "time-out errors can show the last collectives of each rank")
    meaning = "time-out errors come without a record; TORCH_FR_BUFFER_SIZE=2000 switches it on for NCCL"
    return Answer(Verdict.NOTE, "present, records nothing", meaning)


def expired_wait(bench: Bench, group: dist.ProcessGroup) -> Answer:
    """Ask whether a wait for the last rank, which is late, can be given up and then repeated without harm.

    Leaves the group unusable where an expired wait does.
    """
    if bench.size == 1:
        return NO_PEERS
    # NCCL's watchdog may end the process when a wait expires, and it is right: nothing here may do that.
    if backend_of(group, bench.device) not in ("gloo", FABRIC):
        return Answer(Verdict.NOT_TRIED, "not tried", "an expired wait may end the process on this back-end")
    tensor, has_raised = _own(bench), False
    is_late = bench.rank == bench.size - 1
    if is_late:
        time.sleep(_LATE_S)
    work = cast("dist.Work", dist.all_reduce(tensor, group=group, async_op=True))
    start_s = time.perf_counter()
    if not is_late:
        try:
            work.wait(timedelta(seconds=_EXPIRES_S))
        except RuntimeError:
            has_raised = True
    waited_s = time.perf_counter() - start_s
    work.wait()
    if not _holds_sum(tensor, bench):
        return Answer(Verdict.NOTE, "the result is wrong afterwards", "waits must not be given up")
    # 0.5 s late, 0.05 s asked for: anything below half of the delay was the wait giving up.
    if not is_late and not (has_raised and waited_s < _LATE_S / 2):
        return Answer(
            Verdict.NOTE, "a wait ignores its time limit", "lost peers are noticed by the group's own time limit only"
        )
    return Answer(Verdict.HOLDS, "yes, and waited for again", "waits are bounded: Ctrl-C and lost peers end them")


def _own(bench: Bench) -> torch.Tensor:
    return torch.full((_NUMEL,), bench.rank + 1.0, device=bench.device)


def _holds_sum(tensor: torch.Tensor, bench: Bench) -> bool:
    return bool((tensor == bench.size * (bench.size + 1) // 2).all())  # of rank + 1 over all ranks


def _batch(group: dist.ProcessGroup, calls: list[Callable[..., Any]]) -> int:
    """Launch a batch, wait for it and return the number of its works."""
    with distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        for call in calls:
            call(group=group, async_op=True)
    for work in manager.works:
        work.wait()
    return len(manager.works)


def _wait(work: dist.Work | None) -> None:
    cast("dist.Work", work).wait()
