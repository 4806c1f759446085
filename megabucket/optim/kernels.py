"""Kernels that take gradient norms and scale gradients: torch's, or those of ``amp_C``, the extension of NVIDIA apex.

``amp_C`` is called as apex's ``multi_tensor_applier`` calls it. apex itself is never imported: the package of that name on
PyPI is another project. The calls follow apex's source and are tested with a stand-in, not yet on a GPU.
"""

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
    """The functions that take gradient norms and scale gradients."""

    l2_norm: Callable[[torch.Tensor], torch.Tensor]  # as the function of this name
    scale: Scale


TORCH: Final = Kernels(l2_norm, torch._foreach_mul_)
_AMP_C_DEVICES: Final = ("cuda",)
_AMP_C_CHUNK_NUMEL: Final = 1 << 16  # as in apex's own optimizers
_AMP_C_LARGEST_NUMEL: Final = 1 << 30
"""Most elements of one tensor given to ``amp_C``, which counts them in signed 32-bit integers."""


def find_kernels(name: str, device: torch.device) -> Kernels:
    """Return the kernels of ``"torch"``, or those of NVIDIA's ``"apex"`` from its extension ``amp_C``.

    The norm of apex is a float32 sum of squares: its last bits depend on how gradients are cut, and above 1.8e19 it is
    infinite.

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
    except (ImportError, OSError) as error:  # OSError: a library of CUDA is missing
        raise ConfigError(f"kernels='apex' needs amp_C, the extension of NVIDIA apex ({error}). {_remedy()}") from error
    return Kernels(partial(_amp_c_norm, amp_c), partial(_amp_c_scale, amp_c))


def about_apex(device: torch.device) -> str:
    """Return in words whether ``kernels="apex"`` works on a device; empty if no package of either name is installed."""
    if device.type not in _AMP_C_DEVICES or not (_is_installed("amp_C") or _is_installed("apex")):
        return ""
    try:
        find_kernels("apex", device)
    except ConfigError as error:
        return str(error)
    return "kernels='apex' works (amp_C is found)"


def _remedy() -> str:
    build = "with APEX_CPP_EXT=1 APEX_CUDA_EXT=1"
    if _is_installed("amp_C"):
        return f"It was built for another torch or CUDA: build NVIDIA apex again, {build}."
    if _is_installed("apex"):
        found = "The package apex that is installed is the project of that name on PyPI, or was built without extensions."
        return f"{found} Build NVIDIA's from source {build}."
    return f"Build NVIDIA apex from source {build}; `pip install apex` gets another project."


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:
        return True  # imported, but without a spec


def _amp_c_norm(amp_c: Any, grad: torch.Tensor) -> torch.Tensor:
    if grad.dtype == torch.float64:
        return l2_norm(grad)  # amp_C has kernels for 32 and 16 bits
    parts = list(grad.split(_AMP_C_LARGEST_NUMEL))
    norm: torch.Tensor = amp_c.multi_tensor_l2norm(_AMP_C_CHUNK_NUMEL, _unset_flag(grad), [parts], False)[0]  # 1D, float32
    return norm[0].double()


def _amp_c_scale(amp_c: Any, grads: list[torch.Tensor], factor: float) -> None:
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}  # a call has the kernel of the first tensor's dtype
    for grad in grads:
        by_dtype.setdefault(grad.dtype, []).extend(grad.split(_AMP_C_LARGEST_NUMEL))
    for dtype, parts in by_dtype.items():
        if dtype == torch.float64:
            torch._foreach_mul_(parts, factor)
        else:
            amp_c.multi_tensor_scale(_AMP_C_CHUNK_NUMEL, _unset_flag(parts[0]), [parts, parts], factor)


def _unset_flag(like: torch.Tensor) -> torch.Tensor:
    """Return an overflow flag that is not set. Kernels set it if a value is not finite; some do nothing while it is set."""
    return torch.zeros(1, dtype=torch.int32, device=like.device)
