"""``megabucket doctor``: what this back-end really does, and whether gradients through the config are right."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from megabucket.cli.exit_codes import ExitCode
from megabucket.cli.output import counted, print_answer, progress, text_table
from megabucket.cli.workload import ConfigFile, Overrides
from megabucket.errors import printable, rank_list

if TYPE_CHECKING:
    from megabucket.comm import Place
    from megabucket.doctor import DoctorReport


def doctor(
    config: ConfigFile = None,
    overrides: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="print the report as JSON on stdout")] = False,
) -> None:
    """Check the ranks, their back-end and the gradients; start the ranks with torchrun -m megabucket doctor ..."""
    import torch

    from megabucket.doctor import run_doctor
    from megabucket.doctor.run import unreachable_report
    from megabucket.measure.ranks import joined_ranks
    from megabucket.planning.run_config import load_config

    def check_places(rank: int, places: Sequence[Place]) -> None:
        unreachable = unreachable_report(places, torch.device("cpu"))
        if unreachable is not None:
            if rank == 0:
                print_answer(unreachable.to_dict(), _lines(unreachable), as_json=json)
            raise typer.Exit(ExitCode.FAILED)

    run = load_config(config, overrides or [])
    with joined_ranks(os.environ, run.fabric, note=progress(), check_places=check_places) as ranks:
        place = ranks.places[ranks.rank] if ranks.places else None
        report = run_doctor(run.ddp, device=ranks.device, place=place, note=ranks.note)
        if ranks.rank == 0:
            print_answer(report.to_dict(), _lines(report), as_json=json)
        # torchrun ends all ranks once one has failed, so all wait here until the report is printed.
        ranks.gather("printed")
    if not report.is_healthy:
        raise typer.Exit(ExitCode.FAILED)


def _lines(report: DoctorReport) -> Iterator[str]:
    if report.backend == "none":
        yield f"one process without a process group, on {report.device}"
    else:
        hosts = f" on {counted(len(set(report.hosts)), 'host')}" if report.hosts else ""
        yield f"{report.backend} on {report.device}, {counted(report.num_ranks, 'rank')}{hosts}"
    yield report.outcome
    yield ""
    rows = [[line.status.value, line.question, printable(line.answer, 500), line.meaning] for line in report.lines]
    yield from text_table([["", "question", "answer", "what it means"], *rows], num_folded=3)
    for line in report.findings:
        if line.advice:
            yield ""
            about = f" ({line.hosts})" if line.hosts else f" ({rank_list(line.ranks)})" if line.ranks else ""
            yield f"what to do about {line.question}{about}: {line.advice}"
