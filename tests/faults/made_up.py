"""Made-up reports of ranks, for the tests of the judge."""

from faults.cells import HEALTHY_STEPS, Cell, Combo, Fault, Mode
from faults.judge import Run, judge
from faults.player import Play

CELL = Cell("none", "step", Combo(Mode.ALL_REDUCE, True, 2))
NUM_STEPS = Play([CELL]).num_steps
TEXT = "step 2: 'w' got no gradient"


def error(text=TEXT, kind="UnusedParameterError", **fields):
    return {"class": kind, "text": text, "fields": {"step": HEALTHY_STEPS, **fields}}


def step(rank, attempt, *, raised=None, cleanup=None, last=None, wrong_grads="", at_s=None, counter=None, trained=None):
    return {
        "kind": "step",
        "rank": rank,
        "attempt": attempt,
        "counter": attempt if counter is None else counter,
        "error": raised,
        "cleanup_error": cleanup,
        "last_error": last,
        "at_s": 10.0 + attempt if at_s is None else at_s,
        "wrong_grads": wrong_grads,
        "trained": [] if raised else [attempt] if trained is None else trained,
    }


def weights(rank, attempt, *, wrong="", digest=None, is_finite=True):
    digest = f"after {attempt}" if digest is None else digest
    return {"kind": "weights", "rank": rank, "attempt": attempt, "wrong": wrong, "digest": digest, "is_finite": is_finite}


def healthy_events(num_ranks=2):
    events = []
    for rank in range(num_ranks):
        events += [{"kind": "joined", "rank": rank}, {"kind": "fault", "rank": rank, "at_s": 1.0, "phase": "wrap"}]
        events.append({"kind": "wrap", "rank": rank, "error": None, "at_s": 1.1})
        for attempt in range(NUM_STEPS):
            events += [step(rank, attempt), weights(rank, attempt)]
    return events


def with_error(raised=None, *, on=(0, 1), attempt=HEALTHY_STEPS, **changes):
    """A run in which ranks raise in one step and all is well afterwards."""
    raised = raised or error()
    events = [{"kind": "fault", "rank": 1, "at_s": 11.9}]
    for event in healthy_events():
        if event["kind"] == "step" and event["rank"] in on and event["attempt"] == attempt:
            events.append(step(event["rank"], attempt, raised=raised, last=raised, **changes))
        else:
            events.append(event)
    return events


def apart_from(events, attempt, *, rank=1):
    """The same reports where a rank is one batch ahead from an agreed step on, and says itself that all is right."""
    ahead = []
    for event in events:
        if event["rank"] == rank and event.get("attempt", -1) >= attempt:
            moved = {**event, "attempt": event["attempt"] + 1}
            if event["kind"] == "step" and event["trained"]:
                moved["trained"] = [batch + 1 for batch in event["trained"]]
            ahead.append({**moved, "digest": "like the others"} if event["kind"] == "weights" else moved)
        else:
            ahead.append({**event, "digest": "like the others"} if event["kind"] == "weights" else event)
    return ahead


def replaced(events, rank, attempt, new):
    """The same reports with one of them exchanged for another of its kind."""
    return [
        new if (event["kind"], event["rank"], event.get("attempt")) == (new["kind"], rank, attempt) else event
        for event in events
    ]


def run_of(events, *, cell=CELL, exits=None, killed=(), timed_out=False, logs=None):
    exits = exits or dict.fromkeys(range(cell.combo.num_ranks), 0)
    return Run(Play([cell]), events, exits=exits, killed=killed, timed_out=timed_out, logs=logs or {}, wall_s=1.0)


def verdict_on(events, expected, **details):
    ((_, verdict),) = judge(run_of(events, **details), lambda _: Fault(expected))
    return verdict
