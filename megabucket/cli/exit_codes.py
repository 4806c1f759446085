"""What a command's exit code means, and the one place that turns errors into exit codes."""

from __future__ import annotations

import enum
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn, ParamSpec, TypeVar

import typer

from megabucket import errors
from megabucket.errors import MegabucketError

P = ParamSpec("P")
R = TypeVar("R")


class ExitCode(enum.IntEnum):
    """Exit codes of every command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    MISMATCH = 3
    NUMERICAL = 4
    PEER_LOST = 5
    CHECKPOINT = 6
    INTERRUPTED = 130
    TERMINATED = 143

    @property
    def meaning(self) -> str:
        """What the code says, for the table in ``--help``."""
        return _MEANINGS[self]


_MEANINGS: Final = {
    ExitCode.OK: "done",
    ExitCode.FAILED: "a check did not hold, or an error without a code of its own",
    ExitCode.USAGE: "wrong usage, config or model, or calls in a wrong order",
    ExitCode.MISMATCH: "ranks disagree",
    ExitCode.NUMERICAL: "a value that is not finite",
    ExitCode.PEER_LOST: "a peer went away or froze",
    ExitCode.CHECKPOINT: "a checkpoint cannot be written or read",
    ExitCode.INTERRUPTED: "interrupted (SIGINT)",
    ExitCode.TERMINATED: "terminated (SIGTERM)",
}

_CODES: Final = {
    # A ValueError of ours is about what was given.
    ExitCode.USAGE: (
        ValueError,
        errors.ProcessGroupMissingError,
        errors.PhaseError,
        errors.UnusedParameterError,
        errors.ModelChangedError,
        errors.PlainOptimizerError,
    ),
    ExitCode.MISMATCH: (errors.RanksDisagreeError,),
    ExitCode.NUMERICAL: (errors.NonFiniteGradientError,),
    ExitCode.PEER_LOST: (errors.PeerLostError,),
    ExitCode.CHECKPOINT: (errors.CheckpointError, errors.CheckpointUnavailableError),
}


def exit_code_of(error: MegabucketError) -> ExitCode:
    """Return the exit code of a command that ended with ``error``."""
    return next((code for code, kinds in _CODES.items() if isinstance(error, kinds)), ExitCode.FAILED)


def exit_code_table() -> str:
    """Return one line per code, for ``--help``."""
    return "\n".join(f"  {code.value:>3}  {code.meaning}" for code in ExitCode)


class _Terminated(BaseException):
    """SIGTERM, as an exception: open files are closed and process groups destroyed on the way out."""


@contextmanager
def _sigterm_raised() -> Iterator[None]:
    def terminate(*_: object) -> NoReturn:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command: an error of ours becomes its text on stderr and its exit code, without a traceback.

    SIGINT and SIGTERM end a command in good order, with the exit codes shells expect.
    """

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with _sigterm_raised():
                return command(*args, **kwargs)
        except MegabucketError as error:
            typer.echo(f"error: {_printable_lines(str(error))}", err=True)
            raise typer.Exit(exit_code_of(error)) from None
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        except _Terminated:
            raise typer.Exit(ExitCode.TERMINATED) from None

    return wrapper


def _printable_lines(text: str) -> str:
    """Escape what would control the terminal, but keep line breaks, which our own texts use."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode("ascii") for char in text
    )
