"""Checkpoints that survive crashes and load anywhere: state by parameter name, in sealed files.

From the disk up: ``file_system`` -> ``format`` and ``catalog`` (one root) -> ``save`` and ``stored`` (written, read) ->
``canonical`` and ``values`` (names, tensors and plain values of a run) -> ``capture`` and ``restore`` -> ``checkpointer`` (the
calls that users make). ``convert`` is to and from other formats; ``offline`` compares and reshards without a model.
"""
