"""megabucket beside its peers: the same models, batches, optimizer kernel and link, interleaved in one run.

``make bench`` runs ``python -m peers`` in an environment of its own; docs/benchmarks.md says what is measured and how.

* ``__main__``, ``options``: the command line. ``launch``: starts ranks. ``rank``: what they do.
* ``models``; ``system``, ``systems_*``: how each peer is set up; ``links``: loopback and the emulated fabric.
* ``interleave``: steps in turn. ``counting``: collectives. ``resident``: memory. ``hooks``: backward per parameter.
* ``bound``: what the planner says about a link.
* ``figures``, ``tables``: from measured steps to medians and text. No torch.
"""
