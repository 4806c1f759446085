"""Leave the loops of all ranks after the same step, although only some of them were asked to stop."""

from __future__ import annotations

from typing import Final

from megabucket.comm import Exchange
from megabucket.ddp.step_sync import raise_if_any
from megabucket.ddp.wrapper import DistributedDataParallel

_LABEL: Final = "stop"


class AgreedStop:
    """Whether the run is to end: asked of any rank, at any time; answered alike on all ranks, after each step.

    The fence of each step carries the wish, so agreeing costs nothing. Where there is no fence (``fence=False``) the ranks ask
    each other with a collective of their own, every so many steps.

    Args:
        ddp: the wrapper whose steps are meant.
        ask_every_steps: of how many calls of ``poll`` one asks, where there is no fence.

    Raises:
        ValueError: ``ask_every_steps`` is less than 1.
    """

    def __init__(self, ddp: DistributedDataParallel, *, ask_every_steps: int = 10) -> None:
        if ask_every_steps < 1:
            raise ValueError(f"ask_every_steps is {ask_every_steps}, and must be 1 or more")
        self._ddp, self._ask_every_steps = ddp, ask_every_steps
        self._num_polls = 0
        self._is_requested = False

    def request(self) -> None:
        """Ask for the end. Notes it and does nothing else, so a signal handler may call it."""
        self._is_requested = True
        self._ddp.sync.tally.wants_stop = True

    def poll(self) -> bool:
        """Return whether some rank was asked to stop: the same on every rank. A collective call, once after each step.

        Who was asked after its side of the step was sent is heard after the next one.

        Raises:
            MegabucketError: the step is not whole on some rank.
        """
        raise_if_any(self._ddp.sync.settle())
        communicator = self._ddp.communicator
        if self._ddp.ddp_config.fence or communicator.size == 1:
            return self._ddp.sync.stop_is_wanted
        self._num_polls += 1
        if self._num_polls % self._ask_every_steps:
            return False
        device = self._ddp.param_and_grad_buffers[0].grad_data.device
        said = bytes([self._is_requested])
        return any(
            heard != b"\0" for heard in Exchange(communicator, said, capacity_bytes=1, device=device, label=_LABEL).wait()
        )
