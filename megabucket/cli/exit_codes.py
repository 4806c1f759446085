"""The exit codes, and the one place that turns errors into them."""

from __future__ import annotations

import enum
import functools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn, ParamSpec, TypeVar

import typer
from typing_extensions import Self

from megabucket import errors
from megabucket.errors import MegabucketError, printable

P = ParamSpec("P")
R = TypeVar("R")


class ExitCode(enum.IntEnum):
    """Exit codes of every command, each with its ``meaning``."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> Self:
        """Make a number with its meaning."""
        code = int.__new__(cls, value)
        code._value_, code.meaning = value, meaning
        return code

    OK = 0, "done"
    FAILED = 1, "a check did not hold, or an error without a code of its own"
    USAGE = 2, "wrong usage, config or model, or calls in a wrong order"
    MISMATCH = 3, "ranks disagree"
    NUMERICAL = 4, "a value that is not finite"
    PEER_LOST = 5, "a peer went away or froze"
    CHECKPOINT = 6, "a checkpoint cannot be written or read"
    INTERRUPTED = 130, "interrupted (SIGINT)"
    CLOSED_PIPE = 141, "the reader of the output has ended (SIGPIPE)"
    TERMINATED = 143, "terminated (SIGTERM)"


_CODES: Final[dict[type[Exception], ExitCode]] = {
    ValueError: ExitCode.USAGE,  # our ValueErrors are about the input
    errors.ProcessGroupMissingError: ExitCode.USAGE,
    errors.PhaseError: ExitCode.USAGE,
    errors.UnusedParameterError: ExitCode.USAGE,
    errors.ModelChangedError: ExitCode.USAGE,
    errors.PlainOptimizerError: ExitCode.USAGE,
    errors.RanksDisagreeError: ExitCode.MISMATCH,
    errors.NonFiniteGradientError: ExitCode.NUMERICAL,
    errors.PeerLostError: ExitCode.PEER_LOST,
    errors.CheckpointError: ExitCode.CHECKPOINT,
    errors.CheckpointUnavailableError: ExitCode.CHECKPOINT,
}


def exit_code_of(error: MegabucketError) -> ExitCode:
    """Return the exit code of a command that ended with ``error``."""
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), ExitCode.FAILED)


def exit_code_table() -> str:
    """Return one line per code, for ``--help``."""
    return "\n".join(f"  {code.value:>3}  {code.meaning}" for code in ExitCode)


def _terminate(*_: object) -> NoReturn:
    """Handle SIGTERM: leave through all ``finally`` blocks, which close files and destroy process groups."""
    sys.exit(ExitCode.TERMINATED)


def _record_for_torchrun(error: Exception, how: str) -> None:
    """Write what torchrun's report is to say of the error into torchrun's error file, if torchrun has started this process.

    In the form of ``torch.distributed.elastic.multiprocessing.errors.record``, which sees no exception here but an exit code,
    and would print a traceback for errors that name everything in their text.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": how, "timestamp": str(int(time.time()))}
        message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
        Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command: an error of ours becomes its text on stderr and its exit code, without a traceback.

    SIGINT and SIGTERM end a command in good order, with the exit codes that shells expect. Under torchrun every error is also
    written where torchrun's report takes the cause of a failure from.
    """

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        before = signal.signal(signal.SIGTERM, _terminate)
        try:
            return command(*args, **kwargs)
        except (MegabucketError, SystemExit) as raised:
            # SIGTERM, with which torchrun ends the other ranks of a host, may come while an error of ours is on its way out.
            error = raised if isinstance(raised, MegabucketError) else raised.__context__
            if not isinstance(error, MegabucketError):
                raise
            _record_for_torchrun(error, f"{type(error).__name__}: {error}")
            # Escapes control characters but keeps line breaks, which our own texts use.
            lines = [printable(line, sys.maxsize) for line in str(error).split("\n")]
            typer.echo("error: " + "\n".join(lines), err=True)
            raise typer.Exit(exit_code_of(error)) from None
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        except BrokenPipeError:
            # As of `| head`. Python flushes stdout again at its end, and would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(ExitCode.CLOSED_PIPE) from None
        except typer.Exit:
            raise  # the command has said why
        except Exception as error:
            _record_for_torchrun(error, traceback.format_exc())
            raise
        finally:
            signal.signal(signal.SIGTERM, before)

    return wrapper
