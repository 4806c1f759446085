"""Contiguous buffers, buckets and bucket groups: memory and its phases."""

from megabucket.buffer.bucket_group import GradSyncPolicy, _ParamAndGradBucketGroup
from megabucket.buffer.buffer import ParamAndGradBuffer, _ParamAndGradBucket
from megabucket.buffer.phases import GradPhase, ParamPhase

__all__ = [
    "GradPhase",
    "GradSyncPolicy",
    "ParamAndGradBuffer",
    "ParamPhase",
    "_ParamAndGradBucket",
    "_ParamAndGradBucketGroup",
]
