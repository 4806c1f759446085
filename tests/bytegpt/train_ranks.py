"""The demo on real ranks."""

import os
import signal

from launched import Launched

from examples.bytegpt.__main__ import app
from examples.bytegpt.steps import StepLoop


def start_training(arguments, said, *, acts=None, **options):
    """Return ranks that train.

    Args:
        said: a directory for what the ranks print.
        acts: signal, rank, step: that rank gives itself that signal when the step begins.
    """
    return Launched(train, (arguments, acts), said, **options)


def train(arguments, acts=None):
    """Be ``python -m examples.bytegpt arguments``; a ``main`` for ranks."""
    if acts is not None and acts[1] == int(os.environ["RANK"]):
        _act(signal.Signals[acts[0]], at=acts[2])
    app(arguments)


def _act(number, *, at):
    run_step = StepLoop._run_step

    def act_and_run(loop, step):
        if step == at:
            os.kill(os.getpid(), number)
        return run_step(loop, step)

    StepLoop._run_step = act_and_run
