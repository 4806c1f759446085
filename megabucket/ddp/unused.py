"""``SkippingSchedule``: the schedule of ``unused_parameters="skip"``, which also finds the parameters that no rank has used.

When the last bucket is launched, each rank knows what it has of each parameter. This is one byte per parameter. The maximum
over the ranks of a reduction group decides, as in torch DDP with ``find_unused_parameters=True``::

    launches    |-- bucket 0 --|-- bucket 1 --|-- unused parameters --| fence

    USED      a gradient of this step, on some rank: it is reduced, with zeros of the ranks without one
    LEFT      on all ranks at most a gradient that an earlier step has left, perhaps zeroed: it stays, and optimizers step on it
    NOTHING   on no rank any gradient: ``param.grad`` stays ``None``, and no optimizer may touch the parameter

The bytes are sent on the channel of the buckets, whenever these are sent, so in dropped steps as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from megabucket.buffer import _ParamAndGradBucketGroup
from megabucket.buffer.grad_slot import GradSlot, GradState
from megabucket.comm import AllReduce, Handle, ReduceOp
from megabucket.ddp.groups import RankGroups, Reduction
from megabucket.ddp.report import StepCounters
from megabucket.ddp.schedule import Schedule

_NOTHING, _LEFT, _USED = range(3)


class _UseInGroup:
    """The bytes of one reduction group.

    Args:
        groups: its bucket groups, in launch order.
    """

    def __init__(self, name: str, reduction: Reduction, groups: Sequence[_ParamAndGradBucketGroup]) -> None:
        self.groups = groups
        self.slots = [slot for group in groups for slot in group.slots]
        self._places = {slot.name: place for place, slot in enumerate(self.slots)}
        self._reduction, self._label = reduction, f"unused parameters of {name}"
        self._bytes = torch.zeros(len(self.slots), dtype=torch.uint8, device=groups[0].buckets[0].grad_data.device)
        # Inside each replica, then over the replicas: a maximum of maxima.
        self._batches = [one.prepare([AllReduce(self._bytes, ReduceOp.MAX)]) for one in reduction.communicators]
        self._handle: Handle | None = None

    def start(self, unused: Sequence[tuple[str, int]] = ()) -> None:
        """Send the bytes of this rank without waiting, unless they were sent before. May be called again after an interrupt.

        Args:
            unused: names of parameters without a gradient of this step, with their bytes.
        """
        if self._handle is None:
            own = bytearray([_USED]) * len(self.slots)
            for name, byte in unused:
                own[self._places[name]] = byte
            self._bytes.copy_(torch.frombuffer(own, dtype=torch.uint8))
            handle = self._reduction.communicator.handle(self._batches[0], label=self._label)
            if self._reduction.replicas is not None:
                handle = self._reduction.replicas.behind(handle, self._batches[1], label=f"{self._label} over replicas")
            self._handle = handle
        self._handle.start()

    def finish(self) -> None:
        """Wait for the other ranks, if the bytes were sent."""
        if self._handle is not None and self._handle.is_started:
            self._handle.wait()
        self._handle = None

    def take(self) -> Iterator[tuple[GradSlot, int]]:
        """Wait for the other ranks, and return each parameter with what the ranks have of it."""
        self.finish()
        return zip(self.slots, self._reduction.communicator.read(self._bytes, label=self._label).tolist(), strict=True)


class SkippingSchedule(Schedule):
    """The launches of a wrapper with reduction groups that leave a parameter alone if no rank has used it.

    Args:
        partial: names of parameters with copies on ranks of other reduction groups, over which their gradients are summed. They
            count as used: only those ranks know whether the copies are.
    """

    def __init__(
        self,
        groups: Sequence[_ParamAndGradBucketGroup],
        ranks: RankGroups,
        counters: StepCounters,
        *,
        partial: Collection[str],
    ) -> None:
        super().__init__(groups, ranks.step, counters)
        by_name: dict[str, list[_ParamAndGradBucketGroup]] = {}
        for group in groups:
            if group.policy.skips_unused:
                by_name.setdefault(group.buckets[0].buffer.layout.key.group, []).append(group)
        self._uses = [_UseInGroup(name, ranks.by_name[name], of_name) for name, of_name in by_name.items()]
        self._partial = partial
        self._left: dict[str, torch.Tensor | None] = {}
        """Gradients that an earlier step has left, by name: their values before the launch, to be restored."""

    def find_zeroed(self, *, includes_all: bool) -> frozenset[str]:
        """Return the names of the parameters that will have a gradient if all gradients are cleared to zeros now."""
        slots = (slot for use in self._uses for slot in use.slots)
        return self.zeroed.union(slot.name for slot in slots if includes_all or slot.has_grad)

    def _launch_next(self) -> None:
        group = self._groups[self._num_launched]
        if group.policy.skips_unused:
            # The mean of equal values may differ from them in the last bit. In a clean view the values may be the caller's.
            for slot in group.slots:
                if (grad := slot.old_grad) is not None:
                    self._left[slot.name] = None if slot.state is GradState.CLEAN else grad.clone()
        super()._launch_next()

    def launch_rest(self) -> None:
        """Launch all groups that were not launched yet, complete or not, and the bytes."""
        super().launch_rest()
        for use in self._uses:
            use.start([(name, self._byte_of(name)) for group in use.groups for name in self._unused_of(group)])

    def _unused_of(self, group: _ParamAndGradBucketGroup) -> Sequence[str]:
        return group.missing if self._counters.num_microbatches else group.cleared  # as in check_launched()

    def _byte_of(self, name: str) -> int:
        """Return the byte of a parameter that has no gradient of this step on this rank."""
        if name in self._partial:
            return _USED
        return _LEFT if name in self._left or name in self.zeroed else _NOTHING

    def send_dropped(self) -> None:
        """Send what was not launched yet, with any values, without waiting. May be called again."""
        super().send_dropped()
        for use in self._uses:
            use.start()

    def finish_dropped(self, *, takes_part: bool) -> None:
        """Wait for what a step that is dropped has launched. Arguments: as for all schedules."""
        super().finish_dropped(takes_part=takes_part)
        for use in self._uses:
            if takes_part:
                use.start()
            use.finish()

    def publish(self, *, is_withdrawn: bool) -> None:
        """Show the reduced gradients of a whole step, except of parameters that no rank has used: these are as before it."""
        found = [one for use in self._uses for one in use.take()]
        super().publish(is_withdrawn=is_withdrawn)
        self.skipped = frozenset(slot.name for slot, byte in found if byte == _NOTHING)
        for slot, byte in found:
            if byte == _NOTHING:
                slot.param.grad = None
            elif slot.param.grad is None and not is_withdrawn:  # one shard of it is here
                slot.withhold(is_sent=True)
            if byte == _LEFT and (values := self._left.get(slot.name)) is not None:
                slot.view.copy_(values)
                slot.in_buffer.copy_(values)
        self._forget()

    def reset(self) -> None:
        """Forget the gradients, none of which a collective owns."""
        super().reset()
        self._forget()
        self.skipped = frozenset()

    def _forget(self) -> None:
        self._left.clear()
        self.zeroed = frozenset()
