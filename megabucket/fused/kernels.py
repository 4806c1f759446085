"""The product of a linear layer's weight gradient, added to the gradient buffer without rounding in between.

Tried in this order: a product in the gradient's own dtype; torch's product of 16-bit factors with a float32 result, where the
device has one; NVIDIA apex's extension, known by its module alone. Elsewhere (a CPU) the factors are widened first, which gives
the same result and costs memory.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from megabucket.comm import Accelerator

_APEX_MODULE = "fused_weight_gradient_mlp_cuda"


def add_weight_grad(main_grad: torch.Tensor, inputs: torch.Tensor, grad_out: torch.Tensor, *, keep: float) -> None:
    """Set ``main_grad`` to ``keep * main_grad + grad_out.T @ inputs``, in place.

    Args:
        main_grad: 2D, out features x in features.
        inputs: 2D, rows x in features, the dtype of ``grad_out``.
        grad_out: 2D, rows x out features.
        keep: 0 or 1. With 0 the old values are not read, so nan goes as well.
    """
    can_widen = main_grad.dtype == torch.float32 and Accelerator.of(main_grad.device) is not None
    if inputs.dtype == main_grad.dtype:
        main_grad.addmm_(grad_out.t(), inputs, beta=keep)
    elif can_widen and _has_wide_product(main_grad.device, inputs.dtype):
        torch.ops.aten.addmm.dtype_out(
            main_grad, grad_out.t(), inputs, torch.float32, beta=keep, out=main_grad
        )  # the sum is in float32 and nothing is written in between
    elif can_widen and main_grad.is_cuda and (extension := _apex_extension()) is not None:
        if keep == 0:
            main_grad.zero_()
        extension.wgrad_gemm_accum_fp32(inputs.contiguous(), grad_out.contiguous(), main_grad)
    else:
        main_grad.addmm_(grad_out.t().to(main_grad.dtype), inputs.to(main_grad.dtype), beta=keep)


@functools.cache
def _has_wide_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch adds a product of 16-bit matrices to a float32 one. Tried, because some versions have it and refuse."""
    wide, narrow = torch.zeros(16, 16, dtype=torch.float32, device=device), torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(wide, narrow, narrow, torch.float32, beta=1.0, out=wide)
    except (AttributeError, RuntimeError):
        return False
    return True


@functools.cache
def _apex_extension() -> Any:
    """Return the extension, or ``None``. By its own module: the package called apex on PyPI is something else."""
    try:
        return importlib.import_module(_APEX_MODULE)
    except ImportError:
        return None
