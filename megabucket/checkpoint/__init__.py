"""Checkpoints that survive crashes and load anywhere: state by parameter name, in sealed files.

From the disk up: ``file_system`` -> ``format`` and ``catalog`` (one root) -> ``data_files``, ``save`` and ``stored`` (written,
read) -> ``canonical`` and ``values`` (names, tensors and plain values of a run) -> ``capture`` and ``restore`` ->
``checkpointer`` (what users call). ``convert`` is to and from the formats of others; ``compare`` and ``reshard`` need no model.
"""
