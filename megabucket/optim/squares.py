"""The squares of one step's gradients, taken bucket by bucket as they come, while others are on their way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from megabucket.buffer import _ParamAndGradBucketGroup
from megabucket.optim.norm import sum_of_squares
from megabucket.optim.shards import MainShard

NoteReduced = Callable[[_ParamAndGradBucketGroup], object]


class Squares:
    """Of one step: what was taken must not outlive a change of the gradients.

    Args:
        shards_of_group: this rank's shards in the buckets of each bucket group, by its index.
    """

    def __init__(self, shards_of_group: Mapping[int, Sequence[MainShard]]) -> None:
        self._shards_of_group = shards_of_group
        self._squares: dict[MainShard, torch.Tensor] = {}  # 0D, float64
        self.failure: BaseException | None = None
        """What has kept ``take_during`` from its work, an interrupt of the user perhaps. Somebody has to raise it."""

    def _take_early(self, group: _ParamAndGradBucketGroup) -> None:
        # Never raises: the other ranks could not be told at this point.
        try:
            self._take(group.index)
        except BaseException as failure:
            self.failure = self.failure or failure

    def take_during(self, commit: Callable[[NoteReduced], BaseException | None]) -> BaseException | None:
        """Return what ``commit`` does, which calls back with each group as soon as it is reduced.

        Raises:
            BaseException: of ``commit``; or ``failure``, where that is to end the program.
        """
        try:
            return commit(self._take_early)
        except Exception as error:
            if self.failure is None or isinstance(self.failure, Exception):
                raise
            raise self.failure from error  # what ends the program is not for those who catch errors of a step

    def all(self) -> list[torch.Tensor]:
        """Return those of all shards; the gradients of groups that were not taken early are what counts now.

        Raises:
            BaseException: ``failure``.
        """
        if self.failure is not None:
            raise self.failure
        for index in self._shards_of_group:
            self._take(index)
        return list(self._squares.values())

    def _take(self, index: int) -> None:
        for shard in self._shards_of_group[index]:
            if shard not in self._squares:
                self._squares[shard] = sum_of_squares(shard.buffer_grads)
