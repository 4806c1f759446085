"""Checkpoints that survive crashes and load anywhere: state by parameter name, in sealed files.

``plan``, ``manifest`` and ``header`` are pure and load without torch.
"""
