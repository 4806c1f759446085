"""Small fixed runs of the fault harness: one kind of fault over the loopback world, in one mode."""

from dataclasses import dataclass, field

from faults.cells import Cell, Combo, Mode
from faults.judge import judge
from faults.kinds import fault_of
from faults.loopback import run_in_threads
from faults.player import Play


@dataclass(frozen=True)
class Scenario:
    """One kind of fault at a place, on two ranks in each of some setups."""

    kind: str
    place: str = "step"
    is_sharded: bool = False
    is_explicit: bool = False
    overlaps: bool = True
    num_ranks: int = 2
    config: dict = field(default_factory=dict)

    def run(self):
        """Return the verdict if it is not good, and the kind of fault it is about; None if it is."""
        mode = Mode.REDUCE_SCATTER if self.is_sharded else Mode.ALL_REDUCE
        cell = Cell(self.kind, self.place, Combo(mode, self.overlaps, self.num_ranks, self.is_explicit))
        ((_, verdict),) = judge(run_in_threads(Play([cell], self.config)), fault_of)
        return None if verdict.name.is_good else (self.kind, verdict)
