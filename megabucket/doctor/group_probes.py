"""Questions to the process group itself, which the port has no words for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from megabucket.comm.torch import FABRIC
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.doctor.group_answers import GroupProbes
from megabucket.doctor.probe import Bench, Fact, Judgement, Probe, by_rank, right_or, wrong_ranks
from megabucket.doctor.report import Verdict
from megabucket.errors import InvariantError

SECTION: Final = "process group"


def group_probes(config: DistributedDataParallelConfig) -> list[Probe]:
    """Return the questions in the order in which they are asked: the one that may harm its group comes last."""
    beats = config.heartbeat_s is not None

    def judge_store(facts: Sequence[Fact]) -> Judgement:
        return _judge_store(facts, beats=beats)

    return [
        _probe("store", GroupProbes.store, judge_store, refusal=_without_store(beats=beats)),
        _probe(
            "works call back",
            GroupProbes.future,
            right_or("traces show when communication ended", wrong="traces show no communication", otherwise=Verdict.NOTE),
            refusal="traces show no communication",
        ),
        _probe(
            "reduce-scatter in place, the back-end's own",
            GroupProbes.scatter_in_place,
            _judge_scatter,
            refusal="the library needs it except on gloo, where it all-reduces instead",
        ),
        _probe(
            "coalescing",
            GroupProbes.coalesced,
            _judge_coalesced,
            refusal="ddp.bucket_groups=single is not possible",
        ),
        _probe(
            "all-to-all",
            GroupProbes.all_to_all,
            right_or("sums in a fixed order are possible", wrong="all-to-all is broken; not used here", otherwise=Verdict.NOTE),
            refusal="sums in a fixed order are not possible; not used by default",
        ),
        _probe(
            "send and receive",
            GroupProbes.send_receive,
            right_or("pairwise exchanges are possible", wrong="send/receive is broken; not used here", otherwise=Verdict.NOTE),
            refusal="pairwise exchanges are not possible; not used by default",
            needs_peers=True,
        ),
        _probe("flight recorder", GroupProbes.flight_recorder, _judge_recorder, refusal="time-outs come without a record"),
        _probe(
            "a wait may be given up",
            _expired_wait,
            _judge_expired_wait,
            refusal="a wait that ends early spoils the group: lost peers are noticed by the group's own time limit only",
            needs_peers=True,
        ),
    ]


def _probe(
    name: str,
    question: Callable[[GroupProbes], Fact],
    judge: Callable[[Sequence[Fact]], Judgement],
    *,
    refusal: str,
    needs_peers: bool = False,
) -> Probe:
    def observe(bench: Bench) -> Fact:
        if bench.group is None:
            raise InvariantError(f"{name}: there is no process group to ask")
        return question(bench.group)

    return Probe(SECTION, name, observe, judge, refusal, is_required=False, needs_group=True, needs_peers=needs_peers)


def _without_store(*, beats: bool) -> str:
    ending = "" if beats else "; the config asks for none"
    return f"no heartbeats: a frozen rank is noticed only when the group times out{ending}"


def _judge_store(facts: Sequence[Fact], *, beats: bool) -> Judgement:
    kinds = by_rank([fact["kind"] for fact in facts])
    wrong = wrong_ranks(facts)
    if wrong:
        return Judgement(Verdict.FINDING, f"{kinds}: other ranks' values are wrong", _without_store(beats=beats), wrong)
    cannot_clone = wrong_ranks(facts, "can_clone")
    if cannot_clone:
        meaning = "heartbeats share one connection with everything else"
        return Judgement(Verdict.NOTE, f"{kinds}, cannot be cloned", meaning, cannot_clone)
    return Judgement(Verdict.HOLDS, f"{kinds}, can be cloned", "heartbeats have a connection of their own")


def _judge_scatter(facts: Sequence[Fact]) -> Judgement:
    wrong = wrong_ranks(facts)
    if wrong:
        return Judgement(Verdict.FINDING, "wrong result", "mode=reduce_scatter would be wrong, except on gloo", wrong)
    keeps = all(fact["keeps_input"] for fact in facts)
    return Judgement(Verdict.HOLDS, "yes", f"the rest of the input is {'kept' if keeps else 'overwritten'}; either will do")


def _judge_coalesced(facts: Sequence[Fact]) -> Judgement:
    wrong = wrong_ranks(facts)
    if wrong:
        return Judgement(Verdict.FINDING, "wrong result", "ddp.bucket_groups=single would be wrong", wrong)
    works = facts[0]["num_works"]
    answer = "3 calls become " + ", ".join(f"{count} {kind}" for kind, count in works.items())
    meaning = "a bucket group is one launch" if set(works.values()) == {1} else "a bucket group is several launches"
    return Judgement(Verdict.HOLDS, answer, meaning)


def _judge_recorder(facts: Sequence[Fact]) -> Judgement:
    if not all(fact["has"] for fact in facts):
        return Judgement(Verdict.NOTE, "not in this build of torch", "time-out errors come without a record", ())
    if any(fact["num_entries"] for fact in facts):
        return Judgement(Verdict.HOLDS, "records", "time-out errors can show the last collectives of each rank")
    meaning = "time-out errors come without a record; TORCH_FR_BUFFER_SIZE=2000 switches it on for NCCL"
    return Judgement(Verdict.NOTE, "present, records nothing", meaning)


def _expired_wait(group: GroupProbes) -> Fact:
    # NCCL's watchdog may end the process when a wait expires, and it is right: nothing here may do that.
    return {"tried": True, **group.expired_wait()} if group.backend in ("gloo", FABRIC) else {"tried": False}


def _judge_expired_wait(facts: Sequence[Fact]) -> Judgement:
    if not all(fact["tried"] for fact in facts):
        return Judgement(Verdict.NOT_TRIED, "not tried", "an expired wait may end the process on this back-end")
    wrong = wrong_ranks(facts)
    if wrong:
        return Judgement(Verdict.NOTE, "the result is wrong afterwards", "waits must not be given up", wrong)
    blocked = wrong_ranks(facts, "ended_early")
    if blocked:
        meaning = "lost peers are noticed by the group's own time limit only"
        return Judgement(Verdict.NOTE, "a wait ignores its time limit", meaning, blocked)
    return Judgement(Verdict.HOLDS, "yes, and waited for again", "waits are bounded: Ctrl-C and lost peers end them")
