"""Contiguous buffers, buckets and bucket groups: memory and its phases."""

from megabucket.buffer.bucket_group import _ParamAndGradBucketGroup
from megabucket.buffer.grad_slot import CHECK_AND_UNSCALE, Unscale, WithheldGrad
from megabucket.buffer.param_and_grad_buffer import (
    ParamAndGradBuffer,
    dtype_name,
    dtype_named,
    refuse_pickles,
    view_like,
)
from megabucket.buffer.phases import GradPhase, ParamPhase

__all__ = [
    "CHECK_AND_UNSCALE",
    "GradPhase",
    "ParamAndGradBuffer",
    "ParamPhase",
    "Unscale",
    "WithheldGrad",
    "_ParamAndGradBucketGroup",
    "dtype_name",
    "dtype_named",
    "refuse_pickles",
    "view_like",
]
