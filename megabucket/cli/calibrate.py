"""``megabucket calibrate``: measure what collectives cost on these ranks, and write it as a link for the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from megabucket.cli.workload import Overrides
from megabucket.trace import CollectiveKind

_OPERATIONS: Final = [CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER]


def calibrate(
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option("-c", "--config", help="YAML file; only its fabric section is read")] = None,
    out: Annotated[Path, typer.Option(help="where the link is written")] = Path("link.yaml"),
    max_bytes: Annotated[str, typer.Option(help="largest full buffer, for example 64M (decimal)")] = "64M",
    repetitions: Annotated[int, typer.Option(help="rounds over all sizes and operations")] = 9,
    operations: Annotated[
        list[CollectiveKind], typer.Option("--operation", help="measure this; may be repeated")
    ] = _OPERATIONS,
    dtypes: Annotated[list[str], typer.Option("--dtype", help="measure buffers of this dtype; may be repeated")] = ["float32"],  # noqa: B006
    json: Annotated[bool, typer.Option("--json", help="print every repetition as JSON on stdout")] = False,
) -> None:
    """Measure collectives over sizes; start the ranks with torchrun -m megabucket calibrate ..."""
    import os

    from megabucket.cli.output import print_json, print_lines, progress, text_table
    from megabucket.errors import ConfigError
    from megabucket.measure.calibrate import CalibrationPlan
    from megabucket.measure.calibrate import calibrate as run
    from megabucket.measure.ranks import read_launch
    from megabucket.planning.run_config import load_config
    from megabucket.units import parse_count

    settings = load_config(config, overrides or [])
    try:
        largest = parse_count(max_bytes)
    except ValueError as error:
        raise ConfigError(f"--max-bytes: {error}") from None
    plan = CalibrationPlan(tuple(operations), tuple(dtypes), max_bytes=largest, repetitions=repetitions)
    launch = read_launch(os.environ)
    calibration = run(plan, launch=launch, out=out, fabric=settings.fabric, note=progress())
    if launch.rank:
        return
    if json:
        print_json(calibration.to_dict())
        return
    print_lines([f"wrote {out}; use it with: link: {{path: {out}}}", *calibration.describe(), ""])
    print_lines(text_table(list(calibration.rows())))
