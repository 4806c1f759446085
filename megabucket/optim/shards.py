"""The flat tensors an optimizer steps on: this rank's shards, cut where the optimizer's parameter groups change.

A run is a range of one bucket that this rank owns and whose parameters all belong to one group. Neighbouring parameters of a
group share a run, alignment gaps between them included (zeros that stay zeros), so most models step on one tensor per bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megabucket.buffer import ParamAndGradBuffer
from megabucket.layout import BufferLayout, Span, shard_slices


@dataclass(frozen=True, slots=True)
class ShardRun:
    """A range of one buffer, owned by this rank, of one optimizer group."""

    group: int
    span: Span  # in buffer coordinates
    params: tuple[str, ...]


def plan_runs(layout: BufferLayout, group_of: Mapping[str, int], *, rank: int, is_sharded: bool) -> tuple[ShardRun, ...]:
    """Return the runs of one buffer, in buffer order. Parameters outside ``group_of`` are left out.

    Args:
        group_of: index of the optimizer group by parameter name.
        is_sharded: whether ``rank`` owns its shard of each bucket, or everything.
    """
    runs: list[ShardRun] = []
    for bucket in layout.buckets:
        pieces = _owned(layout, bucket.index, rank) if is_sharded else _whole(layout, bucket.index)
        open_run: ShardRun | None = None
        for name, span in pieces:
            group = group_of.get(name)
            if open_run is not None and group == open_run.group:
                open_run = ShardRun(open_run.group, Span(open_run.span.start, span.stop), (*open_run.params, name))
                runs[-1] = open_run
            elif group is not None:
                open_run = ShardRun(group, span, (name,))
                runs.append(open_run)
            else:
                open_run = None
    return tuple(runs)


def _owned(layout: BufferLayout, bucket: int, rank: int) -> Iterator[tuple[str, Span]]:
    for piece in shard_slices(layout, bucket=bucket, rank=rank):
        yield piece.param, piece.in_buffer


def _whole(layout: BufferLayout, bucket: int) -> Iterator[tuple[str, Span]]:
    for name in layout.buckets[bucket].params:
        slot = layout.params[name]
        if slot.stop > slot.start:
            yield name, Span(slot.start, slot.stop)


class MainShard:
    """One run as the optimizer sees it: a flat main parameter with a flat gradient.

    A float32 (or float64) run steps in place on the parameter buffer. A 16-bit run steps on a float32 copy, the main
    parameter, which is rounded into the buffer after each step; a 16-bit gradient is widened before.
    """

    def __init__(self, run: ShardRun, buffer: ParamAndGradBuffer) -> None:
        self.run = run
        self._model_values = buffer.param_data[run.span.start : run.span.stop]  # 1D, parameter dtype
        self._buffer_grads = buffer.grad_data[run.span.start : run.span.stop]  # 1D, gradient dtype
        self.has_own_values = self._model_values.dtype.itemsize < torch.float32.itemsize
        values = self._model_values.float() if self.has_own_values else self._model_values
        self.main = torch.nn.Parameter(values)  # 1D, float32 or float64
        same_dtype = self._buffer_grads.dtype == self.main.dtype
        self.grad = self._buffer_grads if same_dtype else torch.zeros_like(self.main)  # 1D, dtype of main
        self._widens_grad = not same_dtype

    def load_grad(self) -> None:
        """Make ``main.grad`` the reduced gradient of this step."""
        if self._widens_grad:
            self.grad.copy_(self._buffer_grads)
        self.main.grad = self.grad

    @torch.no_grad()
    def store_values(self) -> None:
        """Write the stepped values into the parameter buffer."""
        if self.has_own_values:
            self._model_values.copy_(self.main)

    @torch.no_grad()
    def reload_values(self) -> None:
        """Take the values over from the parameter buffer, after somebody else wrote there.

        A main parameter that still rounds to what the buffer holds keeps its precision: nobody wrote there.
        """
        if self.has_own_values:
            is_written = self.main.to(self._model_values.dtype) != self._model_values
            self.main.copy_(torch.where(is_written, self._model_values.to(self.main.dtype), self.main))

    def params_with_nonfinite_grad(self, layout: BufferLayout) -> Sequence[str]:
        """Return the names of the parameters whose gradient piece in this run is not finite. Slow; for reports."""
        found = []
        for name in self.run.params:
            slot = layout.params[name]
            start, stop = max(slot.start, self.run.span.start), min(slot.stop, self.run.span.stop)
            piece = self.grad[start - self.run.span.start : stop - self.run.span.start]
            if not bool(torch.isfinite(piece).all()):
                found.append(name)
        return found
