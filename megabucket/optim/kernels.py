"""What measures gradients and scales them: torch, or ``amp_C``, the extension of NVIDIA apex."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from megabucket.errors import ConfigError
from megabucket.optim.norm import Scale, l2_norm


class Kernels(NamedTuple):
    """What measures gradients and scales them."""

    l2_norm: Callable[[torch.Tensor], torch.Tensor]  # as the function of this name
    scale: Scale


TORCH: Final = Kernels(l2_norm, torch._foreach_mul_)
_AMP_C_DEVICES: Final = ("cuda",)
_AMP_C_CHUNK_NUMEL: Final = 1 << 16  # what apex's own multi_tensor_applier asks for


def find_kernels(name: str, device: torch.device) -> Kernels:
    """Return ``"torch"``'s kernels, or those of NVIDIA's ``"apex"``, by its extension ``amp_C``.

    apex itself is not imported: the package of that name on PyPI is another project. Its norm is a float32 sum, so the last
    bits depend on how gradients are cut, and a norm beyond the square root of float32's largest number is infinite.

    Raises:
        ConfigError: there is no such name, the gradients are not on a GPU, or the extension cannot be imported.
    """
    if name == "torch":
        return TORCH
    if name != "apex":
        raise ConfigError(f"kernels must be 'torch' or 'apex', got {name!r}")
    if device.type not in _AMP_C_DEVICES:
        raise ConfigError(f"kernels='apex' works on CUDA devices, and the gradients are on {device}; use kernels='torch'")
    try:
        amp_c = importlib.import_module("amp_C")
    except ImportError as error:
        raise ConfigError(f"kernels='apex' needs amp_C, the extension of NVIDIA apex: {error}. {about_apex()}") from error
    flag = torch.zeros(1, dtype=torch.int32, device=device)  # set by a kernel that meets what is not finite
    return Kernels(partial(_amp_c_norm, amp_c, flag), partial(_amp_c_scale, amp_c, flag))


def about_apex() -> str:
    """Return what to do about the extension of NVIDIA apex that is missing; nothing where it is there."""
    if importlib.util.find_spec("amp_C") is not None:
        return ""
    if importlib.util.find_spec("apex") is not None:
        found = "The package apex that is installed has none: it is the project of that name on PyPI, or was built without."
        return f"{found} Build NVIDIA's from source with APEX_CPP_EXT=1 APEX_CUDA_EXT=1."
    return "Build NVIDIA apex from source with APEX_CPP_EXT=1 APEX_CUDA_EXT=1; `pip install apex` gets another project."


def _amp_c_norm(amp_c: Any, flag: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    if grad.dtype == torch.float64:
        return l2_norm(grad)  # amp_C has kernels for 32 and 16 bits
    norm: torch.Tensor = amp_c.multi_tensor_l2norm(_AMP_C_CHUNK_NUMEL, flag, [[grad]], False)[0]  # 1D, float32
    return norm[0].double()


def _amp_c_scale(amp_c: Any, flag: torch.Tensor, grads: list[torch.Tensor], factor: float) -> None:
    narrow = [grad for grad in grads if grad.dtype != torch.float64]
    if len(narrow) < len(grads):
        torch._foreach_mul_([grad for grad in grads if grad.dtype == torch.float64], factor)
    if narrow:
        amp_c.multi_tensor_scale(_AMP_C_CHUNK_NUMEL, flag, [narrow, narrow], factor)
