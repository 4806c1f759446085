"""Ranks as threads over the loopback world, which notices at once when nobody will come, and every write in flight."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from megabucket.testing import LoopbackWorld

from .judge import Run
from .kinds import fault_of
from .player import FaultOf, Play, Player, prepare
from .systems import Ours, make_groups


def run_in_threads(play: Play, *, time_limit_s: float = 60.0, fault_of: FaultOf = fault_of) -> Run:
    """Play on ranks in threads; return what was seen."""
    world = LoopbackWorld(play.combo.num_ranks, timeout_s=time_limit_s)
    groups = make_groups(play.combo, world.subgroup)
    events: list[dict[str, Any]] = []
    started_s = time.monotonic()

    def run_rank(rank: int) -> None:
        def send(kind: str, **values: Any) -> None:
            events.append({"kind": kind, "rank": rank, **values})

        send("joined")
        on_collective: dict[str, Callable[[], None]] = {}
        system = Ours(play.combo, tripping(on_collective), groups[rank])
        communicator = world.communicator(rank, system.recorder)
        here = prepare(play, rank, fault_of(play.cells[0]), system, send, on_collective, communicator)
        if here is not None:
            Player(here, system, play, fault_of).run()

    try:
        world.run(run_rank)
    except Exception as error:
        events.append({"kind": "broken", "rank": 0, "text": f"{type(error).__name__}: {error}"})
    return Run(play, events, wall_s=time.monotonic() - started_s)


def tripping(on_collective: dict[str, Callable[[], None]]) -> Callable[[str], None]:
    """Return what is told the label of each collective and does what was armed for it, once."""

    def trip(label: str) -> None:
        for prefix in [prefix for prefix in on_collective if label.startswith(prefix)]:
            on_collective.pop(prefix)()

    return trip
