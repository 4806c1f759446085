"""Errors about checkpoints: not written, not whole, not there, not of this model."""

from __future__ import annotations

from collections.abc import Sequence

from megabucket.errors.base import MegabucketError, rank_list

_STEPS_SHOWN = 10
_PROBLEMS_SHOWN = 20


def step_list(steps: Sequence[int]) -> str:
    """Return the newest ten steps as words, the newest last.

    >>> step_list([100, 120]), step_list([])
    ('steps 100, 120', 'no step')
    >>> step_list(range(12))
    'steps 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 2 older ones'
    """
    if not steps:
        return "no step"
    shown = ", ".join(str(step) for step in steps[-_STEPS_SHOWN:])
    hidden = len(steps) - _STEPS_SHOWN
    return f"{'step' if len(steps) == 1 else 'steps'} {shown}" + (f" and {hidden} older ones" if hidden > 0 else "")


class CheckpointError(MegabucketError, RuntimeError):
    """A checkpoint that cannot be written or read."""


class CheckpointNotSavedError(CheckpointError):
    """A save failed on some rank, so nothing was committed, and every rank raises this.

    Args:
        last_good_step: the step that ``latest`` names; -1 when none is known.
    """

    def __init__(self, *, step: int, ranks: Sequence[int], path: str, reason: str, last_good_step: int) -> None:
        self.step, self.ranks, self.path, self.reason = step, tuple(ranks), path, reason
        self.last_good_step = last_good_step
        others = f" ({rank_list(self.ranks[1:])} failed, too)" if len(self.ranks) > 1 else ""
        good = f"the last good checkpoint is that of step {last_good_step}" if last_good_step >= 0 else "no good one is known"
        super().__init__(
            f"step {step}: the checkpoint was not saved: rank {self.ranks[0]}: {reason}: {path}{others}. Nothing was committed "
            f"on any rank; {good}. Training may go on; remove the cause and save again."
        )


class CheckpointInvalidError(CheckpointError):
    """A checkpoint's files are not what was written, so nothing of them is used.

    Args:
        file: the file that is wrong, within ``path``.
        steps: what else ``root`` holds that looks whole.
    """

    def __init__(self, *, path: str, file: str, problem: str, steps: Sequence[int] = ()) -> None:
        self.path, self.file, self.problem, self.steps = path, file, problem, tuple(steps)
        others = f"{step_list(self.steps)} can be tried: name one, or allow the fallback to an older step" if steps else ""
        super().__init__(
            f"{path}: {file}: {problem}. The file was damaged or changed after it was written, or is not a checkpoint of "
            f"this library; nothing of it was loaded. {others or 'Restore it from a copy'}."
        )


class CheckpointMissingError(CheckpointError):
    """There is no such checkpoint.

    Args:
        steps: what ``root`` holds that looks whole.
    """

    def __init__(self, *, root: str, wanted: str, steps: Sequence[int]) -> None:
        self.root, self.wanted, self.steps = root, wanted, tuple(steps)
        found = f"It holds {step_list(self.steps)}: name one." if steps else "It holds no checkpoint at all: check the path."
        super().__init__(f"{root}: no checkpoint for {wanted}. {found}")


class CheckpointMismatchError(CheckpointError):
    """A whole checkpoint, but not of what is to be restored; the text lists up to twenty problems."""

    def __init__(self, *, path: str, problems: Sequence[str]) -> None:
        self.path, self.problems = path, tuple(problems)
        shown = "\n".join(f"  - {problem}" for problem in self.problems[:_PROBLEMS_SHOWN])
        hidden = len(self.problems) - _PROBLEMS_SHOWN
        super().__init__(
            f"{path} does not fit, and nothing was changed:\n{shown}" + (f"\n  and {hidden} more" if hidden > 0 else "")
        )


class CheckpointUnavailableError(MegabucketError, RuntimeError):
    """Optimizer state was asked for in a form that one rank cannot give."""

    def __init__(self, *, optimizer: str, method: str, rank: int, num_shards: int) -> None:
        self.optimizer, self.method, self.rank, self.num_shards = optimizer, method, rank, num_shards
        super().__init__(
            f"[rank {rank}] {method} of the {optimizer} inside of a DistributedOptimizer: it holds flat shards, of which this "
            f"rank has 1 of {num_shards}, and shards must not pass for the state of the model. Call {method} of the "
            "DistributedOptimizer, on every rank: it speaks of whole parameters, in torch's format."
        )
