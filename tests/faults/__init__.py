"""The fault harness: real ranks, one fault each, and what became of every gradient, weight and error.

A kind of fault stands in one table (``kinds``), with what must come of it. A step is a list of acts, so what a rank does is
data: the ranks play it, and an independent oracle reads it and says which gradients and weights are right. Two runners play
the same kinds, forked processes over gloo and threads over the loopback world, and one judge turns reports into verdicts.
``make faults`` prints the table; ``python -m faults --help`` says what else there is.

::

    cells           cells, expectations, faults, kinds: the words of the table        data
    acts            acts of a step                                                    data
    model           what is trained: gradients and weights that are exact             torch
    oracle          the right answer of each step, by one process alone               torch
    kinds_*, kinds  the table
    systems         megabucket and torch DDP behind the few calls that differ         torch
    player          plays steps on one rank, checks and reports
    processes       forks ranks, watches them, signals them
    loopback        ranks as threads of one process
    judge           verdicts                                                          pure
    soak            thousands of steps with random faults in one set of ranks
    interrupts      an exception at every line of a step, and alarms at random times
    checkpoints/    checkpoints under crashes, kills, errors of the disk, damage, odd bytes
"""
