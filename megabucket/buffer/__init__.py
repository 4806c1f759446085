"""Contiguous buffers, buckets and bucket groups: memory and its phases."""

from megabucket.buffer.bucket_group import _ParamAndGradBucketGroup
from megabucket.buffer.grad_slot import WithheldGrad
from megabucket.buffer.param_and_grad_buffer import (
    ParamAndGradBuffer,
    dtype_name,
    dtype_named,
    refuse_pickles,
    view_like,
)
from megabucket.buffer.phases import GradPhase, ParamPhase

__all__ = [
    "GradPhase",
    "ParamAndGradBuffer",
    "ParamPhase",
    "WithheldGrad",
    "_ParamAndGradBucketGroup",
    "dtype_name",
    "dtype_named",
    "refuse_pickles",
    "view_like",
]
