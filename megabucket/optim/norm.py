"""The global gradient norm over shards, and clipping by it.

Squares are summed in float64 and the norm is rounded to float32, so it does not depend on how the gradients are cut into
shards, buckets or modes: float32 sums over different cuts differ in the last bit in most cases, and clipping would carry the
difference into the weights.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from megabucket.comm import Accelerator, AllReduce, Communicator
from megabucket.errors import ConfigError

_FLOAT32: Final = struct.Struct("f")
_LARGEST: Final = torch.finfo(torch.float32).max

_CHUNK_NUMEL: Final = 1 << 17
"""Elements summed at a time on CPU: the float64 copy torch makes of them (1 MiB) stays in the core's own cache."""


class GlobalNorm:
    """The L2 norm over the gradients of all ranks' shards, step after step.

    Args:
        communicator: the ranks that hold parts of the gradients (one all-reduce of 8 bytes), or the same ones.
        is_whole: whether each rank holds all of them.
        device: where the gradients of all ranks live, and the collective runs.
    """

    def __init__(self, communicator: Communicator, *, device: torch.device, is_whole: bool = False) -> None:
        self.accelerator = Accelerator.of(device)
        self._communicator, self._is_whole = communicator, is_whole
        self._total = torch.zeros(1, dtype=torch.float64, device=device)
        self._calls = communicator.prepare([AllReduce(self._total)])

    def of(self, norms: Iterable[torch.Tensor]) -> float:
        """Return the norm over this rank's gradients and those of the other ranks.

        Args:
            norms: the ``l2_norm`` of each of this rank's gradients; alignment gaps and padding in them are zero and count
                nothing. May be empty: a rank can own nothing but padding.
        """
        if found := list(norms):
            self._total.copy_(torch.stack(found).square_().sum())
        else:
            self._total.zero_()
        if self._is_whole:
            total = self._communicator.read(self._total, label="grad norm")
        else:
            total = self._communicator.launch(self._calls, label="grad norm").read(self._total)
        norm = math.sqrt(float(total))
        # Float64 sums over different cuts still differ in their last bits; rounded to float32 they do not.
        return _FLOAT32.unpack(_FLOAT32.pack(norm))[0] if norm <= _LARGEST else norm


def l2_norm(grad: torch.Tensor) -> torch.Tensor:
    """Return the L2 norm of all elements: float64, 0D, on the device of the gradient. One operation there."""
    if grad.device.type != "cpu":
        # The kernel for many tensors widens each element as it reads it; that of vector_norm makes a float64 copy of all.
        norms: list[torch.Tensor] = list(torch._foreach_norm([grad], dtype=torch.float64))
    else:
        norms = list(map(partial(torch.linalg.vector_norm, dtype=torch.float64), grad.split(_CHUNK_NUMEL)))
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


class Kernels(NamedTuple):
    """What measures gradients and scales them."""

    l2_norm: Callable[[torch.Tensor], torch.Tensor]  # as the function of this name
    scale: Callable[[list[torch.Tensor], float], object]  # in place


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


def clip_by_norm(grads: Sequence[torch.Tensor], *, norm: float, max_norm: float, kernels: Kernels = TORCH) -> None:
    """Scale gradients in place so that their global norm is at most ``max_norm``; leave smaller ones untouched.

    The factor is ``max_norm / (norm + 1e-6)``, as in ``torch.nn.utils.clip_grad_norm_`` and in Megatron.
    """
    factor = max_norm / (norm + 1e-6)
    if factor < 1 and grads:
        kernels.scale(list(grads), factor)


def check_clip_grad(clip_grad: float) -> None:
    """Refuse what is no norm to clip to.

    Raises:
        ConfigError: it is negative or not finite.
    """
    if isinstance(clip_grad, bool) or not math.isfinite(clip_grad) or clip_grad < 0:
        raise ConfigError(f"clip_grad must be a finite number >= 0 (0 switches clipping off), got {clip_grad!r}")
