"""The online figures of one wrapper: listens while it trains, and says at the start when communication will not be hidden."""

from __future__ import annotations

import logging

import torch

from megabucket.comm import Communicator
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.config.overlap import overlap_obstacle
from megabucket.layout import ModelLayout
from megabucket.trace import OnlineRecorder, StepTrace

_LOGGER = logging.getLogger("megabucket")


class StepTraces:
    """Traces of the last steps of one wrapper.

    Args:
        communicator: tells what it launches. Of several wrappers that share one, the last gets the figures.
        config: whether figures are wanted.
        device: of the buffers.
    """

    def __init__(self, communicator: Communicator, config: DistributedDataParallelConfig, *, device: torch.device) -> None:
        self._communicator = communicator
        self._recorder: OnlineRecorder | None = None
        if config.step_traces:
            self._recorder = OnlineRecorder(rank=communicator.rank, clock=communicator.clock_for(device))
            communicator.hear(self._recorder)

    @property
    def last(self) -> StepTrace | None:
        """The last step that has ended and whose times are known."""
        if self._recorder is None:
            return None
        self._communicator.collect_times()
        return self._recorder.last()

    def remove(self) -> None:
        """Listen no more; the last trace can still be had."""
        if self._communicator.step_listener is self._recorder:
            self._communicator.hear(None)


def warn_without_overlap(communicator: Communicator, config: DistributedDataParallelConfig, layout: ModelLayout) -> None:
    """Log, on the first rank, why the reduction of gradients will not overlap backward, if it will not.

    A log record and no Python warning: a model in one bucket is no reason to stop a program that makes errors of warnings. Who
    has switched overlap off, or runs alone, is told only when figures are wanted or the level is INFO.
    """
    why = overlap_obstacle(config, dp_size=communicator.size, is_one_bucket=layout.num_buckets == 1)
    if why is not None and communicator.rank == 0:
        is_surprising = config.step_traces or (config.overlap_grad_reduce and communicator.size > 1)
        level = logging.WARNING if is_surprising else logging.INFO
        _LOGGER.log(level, "megabucket: communication cannot overlap backward: %s", why)
