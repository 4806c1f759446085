"""Contiguous buffers, buckets and bucket groups: memory and its phases."""

from megabucket.buffer.bucket_group import GradSyncPolicy, _ParamAndGradBucketGroup
from megabucket.buffer.buffer import ParamAndGradBuffer, _ParamAndGradBucket
from megabucket.buffer.phases import GradPhase, ParamPhase
from megabucket.buffer.withheld_grad import WithheldGrad

__all__ = [
    "GradPhase",
    "GradSyncPolicy",
    "ParamAndGradBuffer",
    "ParamPhase",
    "WithheldGrad",
    "_ParamAndGradBucket",
    "_ParamAndGradBucketGroup",
]
