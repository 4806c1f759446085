"""``megabucket chaos``: real ranks, one fault each, and what became of every gradient, weight and error text.

A cell is a kind of fault at a place of the step, in one mode, on some ranks. Supervisors fork the ranks of a cell from a
process that has imported torch already, watch them under a time limit, and send back what they reported; a pure function
turns that into a verdict. Nothing in the library proper imports this package.

::

    kinds, matrix        which faults there are, what each must give, which combinations are run        data
    model, oracle        what is trained, and the independent single-process answer                     torch
    systems, loop, rank  a plain training loop over megabucket or torch DDP, inside a rank's process    torch
    supervisor, farm     forks, time limits, signals; several cells at a time
    verdict              what the reports of all ranks mean                                             pure
    summary, page        how it is shown
    soak                 thousands of steps with random faults in one set of ranks
"""
