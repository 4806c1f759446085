"""What Megatron's ``DistributedOptimizer`` saves in bucket space, and what a layout says of it. Pure: views and checks.

Per buffer and kind of value there is one flat float32 tensor: the buckets of the buffer one after the other, without their
padded tails. Gaps between parameters are there, and are zero::

    layout  |  head  gap  norm  | tail |  block  | tail |    a buffer of two buckets
    state   |  head  gap  norm  |  block  |

Nothing in it says which parameter lies where. The layout does, and is checked as far as the state allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from megabucket.buffer import dtype_name, dtype_named
from megabucket.checkpoint.canonical import canonical_name
from megabucket.errors import name_list
from megabucket.layout import BufferLayout, ModelLayout

PARAM: Final = "param"
MOMENTS: Final = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DpZeroState:
    """What one rank of Megatron's model-parallel group has saved of its optimizer, and what it takes to understand it.

    Args:
        param_state: what ``get_parameter_state_dp_zero()`` gave, or the list of those of dense parameters and of experts.
        layout: of Megatron's buffers: ``layout="megatron"``, its bucket settings, its data-parallel size. The buffers of
            several model chunks follow each other.
        step: how often the optimizer has stepped: ``"step"`` of the groups in Megatron's ``optimizer.state_dict()``.
        weights: what an optimizer's state does not hold: frozen parameters and module buffers. Weights that it does hold may
            be left out; those that are given are compared with their main parameters, which also proves the layout.
    """

    param_state: Any
    layout: ModelLayout
    step: float
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def buffers(self) -> list[BufferLayout]:
        """The buffers in Megatron's order: experts have an optimizer of their own, after that of the dense parameters."""
        return sorted(self.layout.buffers, key=lambda buffer: buffer.key.group != "dense")

    @property
    def params(self) -> list[str]:
        """The parameters in the order of their registration."""
        slots = [(slot.registration_index, name) for buffer in self.layout.buffers for name, slot in buffer.params.items()]
        return [canonical_name(name) for _, name in sorted(slots)]

    def values(self) -> Iterator[tuple[str, torch.dtype, dict[str, torch.Tensor]]]:
        """Return each parameter with its dtype, its main parameter and its moments, in its shape: views of the state.

        Only where ``problems`` has found none.
        """
        for held, buffer in zip(_held_in(self.param_state), self.buffers, strict=True):
            (flats,) = held.values()
            for name, start in _places(buffer):
                slot = buffer.params[name]
                stop = start + slot.numel
                of_param = {key: flats[key][start:stop].view(slot.shape) for key in (PARAM, *MOMENTS)}
                yield canonical_name(name), dtype_named(buffer.key.param_dtype), of_param

    def problems(self) -> list[str]:
        """Return everything in which state and layout differ, and whatever else cannot be used."""
        problems = []
        if type(self.step) not in (int, float) or not 0 <= self.step == self.step // 1:
            problems.append(f"the step is {self.step!r}, and must be a whole number of 0 or more")
        if len(set(self.params)) < len(self.params):
            problems.append("the layout has several parameters of one name")
        no_tensors = [name for name, weight in self.weights.items() if not isinstance(weight, torch.Tensor)]
        if no_tensors:
            problems.append(f"of the weights, {name_list(no_tensors)} are no tensors; leave them out")
        return problems + self._state_problems()

    def _state_problems(self) -> list[str]:
        parts = _parts_of(self.param_state)
        if not parts or not all(isinstance(part, Mapping) and part.get("buckets_coalesced") is True for part in parts):
            what = "a dict with 'buckets_coalesced', as it is since 2024, or a list of such dicts"
            return [f"it is not what get_parameter_state_dp_zero() gives: {what}"]
        held, buffers = _held_in(self.param_state), self.buffers
        if len(held) != len(buffers):
            keys = ", ".join(str(buffer.key) for buffer in buffers)
            return [f"it has {len(held)} buffers, and the layout has {len(buffers)}: {keys}"]
        return [
            f"buffer {index} ({buffer.key}): {problem}"
            for index, (of_buffer, buffer) in enumerate(zip(held, buffers, strict=True))
            for problem in _buffer_problems(of_buffer, buffer)
        ]


def _parts_of(param_state: Any) -> list[Any]:
    """Return the states of single optimizers."""
    return list(param_state) if isinstance(param_state, list | tuple) else [param_state]


def _held_in(param_state: Any) -> list[Any]:
    """Return what is held for each buffer."""
    parts = _parts_of(param_state)
    return [part[index] for part in parts for index in sorted(key for key in part if type(key) is int)]


def _places(buffer: BufferLayout) -> Iterator[tuple[str, int]]:
    """Return the parameters of a buffer and where in the state they begin, in this order."""
    offset = 0
    for bucket in buffer.buckets:
        for name in bucket.params:
            yield name, offset + buffer.params[name].start - bucket.start
        offset += bucket.numel_unpadded


def _gaps(buffer: BufferLayout) -> Iterator[tuple[int, int]]:
    """Return the ranges of the state that belong to no parameter. Behind the last one there is none."""
    stop = 0
    for name, start in _places(buffer):
        if stop < start:
            yield stop, start
        stop = start + buffer.params[name].numel


def _buffer_problems(held: Any, buffer: BufferLayout) -> list[str]:
    wanted = (dtype_named(buffer.key.param_dtype), dtype_named(buffer.key.grad_dtype))
    if not isinstance(held, Mapping) or list(held) != [wanted] or not isinstance(held[wanted], Mapping):
        found = ", ".join(map(str, held)) if isinstance(held, Mapping) else type(held).__name__
        return [f"the state has {found or 'nothing'} instead of {wanted}, the dtypes of parameters and gradients"]
    numels = [bucket.numel_unpadded for bucket in buffer.buckets]
    numel, flats, problems = sum(numels), held[wanted], []
    here = f"the layout has {numel}, in buckets of {', '.join(map(str, numels[:5]))}{', ...' if len(numels) > 5 else ''}"
    if flats.get("numel_unpadded", numel) != numel:
        problems.append(f"it has {flats['numel_unpadded']} elements without padding, and {here}")
    for key in (PARAM, *MOMENTS):
        flat = flats.get(key)
        if not isinstance(flat, torch.Tensor) or flat.dtype != torch.float32 or flat.dim() != 1:
            found = f"{dtype_name(flat.dtype)} {tuple(flat.shape)}" if isinstance(flat, torch.Tensor) else type(flat).__name__
            problems.append(f"{key!r} is {found}, and must be a flat float32 tensor")
        elif flat.numel() != numel:
            problems.append(f"{key!r} has {flat.numel()} elements, and {here}")
        else:
            full = [f"{start}:{stop}" for start, stop in _gaps(buffer) if flat[start:stop].any()]
            problems += [f"{key!r} is not zero in {name_list(full)}, where the layout has no parameter"] if full else []
    return problems
