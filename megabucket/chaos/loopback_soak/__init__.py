"""A soak of the step protocol in one process: thousands of steps with random faults, each judged against whole numbers.

Ranks are threads of a ``LoopbackWorld``, which checksums each buffer at launch and at completion of a collective: a write in
flight is found with certainty. Modules, hooks, backwards and optimizers are the real ones. A world, with its config, module,
habits and faults, is a function of one seed, and so is the order in which its ranks run: what went wrong can be replayed.

::

    program, acts, model_changes     what each rank does: blocks of calls                          data
    worlds, drafts                   draw a world, draw healthy steps                              pure
    slips*, kinds*                   spoil steps; say what must come of it                         pure
    model, player, turns, seen       the ranks, and what they see                                  torch
    oracle, judge                    the right numbers; RIGHT, NAMED, SILENT, WRONG or HUNG        pure
    soak, counts, replay             worlds until enough steps are done; what came of them         torch
"""

from megabucket.chaos.loopback_soak.counts import SoakCounts, describe_counts
from megabucket.chaos.loopback_soak.soak import run_loopback_soak

__all__ = ["SoakCounts", "describe_counts", "run_loopback_soak"]
