"""Checkpoints under every fault we could make: crashes at each call, random kills, damaged files, disks that fail.

``python -m faults checkpoints`` runs a campaign; ``--help`` lists them. Every campaign judges by loading: what
is loaded is the old or the new checkpoint bit for bit, or one of our errors. Anything else is a failure.

::

    sample         what is saved: tensors that follow from the step alone           torch
    faulty         a file system whose calls can be counted, refused, cut short
    threads        ranks as threads
    crash_points   SIGKILL at every call of a save
    kills          SIGKILL at random moments, in one directory
    io_errors      ENOSPC, EIO, EROFS, EDQUOT at every call on every rank
    damage         flips, truncations, swaps, deletions, copies of files
"""
