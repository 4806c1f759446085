"""When gradients become ready, guessed from a list of parameters and a rate. Pure arithmetic, no torch.

The rule of Kaplan et al. ("Scaling Laws for Neural Language Models", 2020, section 2.1): a parameter takes 2 operations per
token in forward and 4 in backward. Attention's own products and all memory-bound work are left out, so ``flops_per_s`` is the
rate a step reaches as a whole. A look-up in an embedding multiplies nothing: embeddings take no time, and a tied one takes its
time where it serves as the output projection, at the end of forward and the beginning of backward. An expert computes its share
of the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.config.resolve import resolve_grad_dtype
from megabucket.errors import ConfigError
from megabucket.layout import ParamSpec
from megabucket.planning.architecture import decoder_of
from megabucket.planning.model_config import ArchitectureConfig, MoeConfig
from megabucket.planning.workload import TensorWork, Workload
from megabucket.units import dtype_bytes

FORWARD_FLOPS: Final = 2
"""Operations per parameter and token in forward: a multiplication and an addition."""

BACKWARD_FLOPS: Final = 4
"""Operations per parameter and token in backward: the same for the input's gradient and for the weight's."""


def is_lookup(name: str) -> bool:
    """Return whether a parameter is an embedding table by its name: a part contains ``embed``, or is ``wte`` or ``wpe``.

    Output projections called ``unembed`` or ``embed_out`` are none.

    >>> [is_lookup(name) for name in ("model.embed_tokens.weight", "wpe.weight", "lm_head.weight", "embed_out.weight")]
    [True, True, False, False]
    """
    parts = name.lower().split(".")
    return any(
        part in {"wte", "wpe"} or ("embed" in part and "unembed" not in part and "out" not in part.split("_")) for part in parts
    )


def workload_of_specs(
    specs: Sequence[ParamSpec],
    ddp: DistributedDataParallelConfig,
    *,
    tokens: int,
    flops_per_s: float,
    model: ArchitectureConfig | None = None,
) -> Workload:
    """Return the workload of a model that computes ``tokens`` per microbatch at ``flops_per_s``.

    Args:
        specs: trainable parameters in registration order, tied ones once.
        ddp: decides the gradients' dtype, and the ready order if it has one.
        model: says whether the token embedding is also the output projection, and how many of the experts a token passes.

    Raises:
        ConfigError: no parameters, ``ddp.bucket_order`` names others, or the model's ``config.json`` cannot be read.
    """
    second = tokens / flops_per_s  # of one operation on each token
    decoder = decoder_of(model) if model is not None else None
    routed = decoder.num_experts_per_token / decoder.num_experts if isinstance(decoder, MoeConfig) else 1.0
    tensors = []
    for spec in specs:
        numel = 0.0 if is_lookup(spec.name) else spec.numel * (routed if spec.group == "expert" else 1.0)
        tensors.append(TensorWork(spec.name, spec.numel, BACKWARD_FLOPS * numel * second, FORWARD_FLOPS * numel * second))
    if decoder is not None and decoder.tied_embeddings:
        # The output projection comes last: the gradient of the last parameter has to wait until it was passed.
        numel, last = max(spec.numel for spec in specs if is_lookup(spec.name)), tensors[-1]
        backward_s = last.backward_s + BACKWARD_FLOPS * numel * second
        tensors[-1] = replace(last, backward_s=backward_s, forward_s=last.forward_s + FORWARD_FLOPS * numel * second)
    wire = wire_bytes(specs, ddp)
    return Workload(
        tuple(tensors),
        bytes_per_element=wire.gradient,
        param_bytes_per_element=wire.parameter,
        ready_order=_ready_order(specs, ddp),
    )


class WireBytes(NamedTuple):
    """Bytes of an element on the wire."""

    parameter: int
    gradient: int


def wire_bytes(specs: Sequence[ParamSpec], ddp: DistributedDataParallelConfig) -> WireBytes:
    """Return the bytes of a parameter and of a gradient element, in the dtype most elements have."""
    numel_of: Counter[str] = Counter()
    for spec in specs:
        numel_of[spec.dtype] += spec.numel
    dtype = numel_of.most_common(1)[0][0] if numel_of else "float32"
    return WireBytes(dtype_bytes(dtype), dtype_bytes(resolve_grad_dtype(ddp, dtype)))


def _ready_order(specs: Sequence[ParamSpec], ddp: DistributedDataParallelConfig) -> tuple[int, ...] | None:
    if ddp.bucket_order is None:
        return None
    index_of = {spec.name: index for index, spec in enumerate(specs)}
    if set(ddp.bucket_order) != set(index_of):
        raise ConfigError("ddp.bucket_order does not name exactly the trainable parameters of the model; record it anew")
    return tuple(index_of[name] for name in ddp.bucket_order)
