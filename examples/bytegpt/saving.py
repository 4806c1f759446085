"""What happens between two steps of a run that is saved: checkpoints when they are due, and the end when somebody asks for it.

All ranks call everything here alike; the first one writes the lines.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import megabucket as mb
from examples.bytegpt.metrics import MetricsLog
from examples.bytegpt.progress import SilentView
from examples.bytegpt.resume import Start, data_position
from examples.bytegpt.task import Task
from megabucket.errors import CheckpointNotSavedError


class RunSaver:
    """Saves one run.

    Args:
        start: where the run begins.
        view: what is shown.
        log: what is written.
        key: what checkpoints are signed with.
    """

    def __init__(
        self,
        task: Task,
        model: mb.DistributedDataParallel,
        optimizer: mb.DistributedOptimizer,
        *,
        start: Start,
        view: SilentView,
        log: MetricsLog,
        key: bytes | None = None,
    ) -> None:
        config = task.config.program.checkpoint
        self.folder = Path(config.folder or "")
        self.stop = mb.AgreedStop(model, ask_every_steps=config.ask_every_steps)
        """Whoever asks it for the end has the step that runs now finished and saved."""
        self._config, self._task, self._view, self._log = config, task, view, log
        choices = {"keep_last": config.keep_last, "asynchronous": config.asynchronous, "when_busy": config.when_busy}
        self._checkpointer = mb.Checkpointer(self.folder, model, optimizer, key=key, **choices)
        self._goes_back = bool(start.later_steps)
        self._saved_step = start.step
        self._step_under_way: int | None = None

    def ends_after(self, num_steps: int, *, is_last: bool) -> bool:
        """Save after a step if that is due; return whether the run ends here, alike on all ranks.

        Raises:
            CheckpointNotSavedError: a save has failed that must not.
        """
        wants_stop, every = self.stop.poll(), self._config.every_steps
        if wants_stop or is_last:
            self._try(self._finish)
            if self._saved_step != num_steps:
                self._save(num_steps)
                self._finish()
        elif every is not None and num_steps % every == 0:
            if self._config.when_busy == "wait":
                self._try(self._finish)  # if that has failed, it is no reason to leave this one out
            self._try(lambda: self._save(num_steps))
        elif self._step_under_way is not None:
            self._try(lambda: self._note_under_way() if self._checkpointer.poll() is not None else None)
        return wants_stop

    def _save(self, num_steps: int) -> None:
        position = data_position(self._task, num_steps)
        before, self._step_under_way = self._step_under_way, None
        # After going back ``latest`` names a later step, and this one may be there: the first save takes its place.
        try:
            is_begun = self._checkpointer.save(num_steps, data_position=position, overwrite=self._goes_back)
        except CheckpointNotSavedError as error:
            if before is not None and error.step != before:
                self._note_saved(before)  # it was committed, and then this one could not begin
            raise
        if not is_begun:
            self._step_under_way = before
            self._view.note(f"step {num_steps} is not saved: step {before} is still being written (checkpoint.when_busy=skip)")
            return
        self._goes_back = False
        if before is not None:
            self._note_saved(before)
        if self._config.asynchronous:
            self._step_under_way = num_steps
        else:
            self._note_saved(num_steps)

    def _finish(self) -> None:
        if self._step_under_way is not None:
            self._checkpointer.close()
            self._note_under_way()

    def _note_under_way(self) -> None:
        step, self._step_under_way = self._step_under_way, None
        if step is not None:
            self._note_saved(step)

    def _note_saved(self, num_steps: int) -> None:
        self._saved_step = num_steps
        self._log.write("checkpoint", {"step": num_steps, "folder": str(self.folder), "error": None})

    def _try(self, act: Callable[[], None]) -> None:
        """Do something that may fail without the end of the run, if the config says so."""
        try:
            act()
        except CheckpointNotSavedError as error:
            self._step_under_way = None
            self._log.write("checkpoint", {"step": error.step, "folder": str(self.folder), "error": str(error)})
            if self._config.failed_saves == "end":
                raise
            self._view.note(f"warning: {error}")
