"""When the reduction of gradients cannot overlap backward, and why: one answer for ``explain`` and the wrapper. No torch."""

from __future__ import annotations

from megabucket.config.ddp import DistributedDataParallelConfig


def overlap_obstacle(config: DistributedDataParallelConfig, *, dp_size: int, is_one_bucket: bool) -> str | None:
    """Return why no bucket is sent before backward ends, or ``None`` when buckets are.

    Args:
        dp_size: ranks of the data-parallel group.
        is_one_bucket: whether one bucket holds everything.
    """
    if not config.overlap_grad_reduce:
        return "overlap_grad_reduce=False: buckets go out after backward"
    if dp_size == 1:
        return "dp_size=1: there is nothing to send"
    if config.bucket_groups == "single":
        return "bucket_groups='single': all buckets wait for the last gradient"
    if is_one_bucket:
        return "everything fits into one bucket, complete only when backward ends; a smaller bucket_size would overlap"
    return None
