"""``megabucket calibrate``: measure what collectives cost on these ranks, and write it as a link for the planner."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megabucket.measure.calibrate import Calibration


class Operation(str, Enum):
    """What ``--operations`` may name."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"


_DEFAULT_OPERATIONS = [Operation.ALL_REDUCE, Operation.REDUCE_SCATTER, Operation.ALL_GATHER]


def calibrate(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example fabric.latency_s=1e-4")] = None,
    config: Annotated[Path | None, typer.Option("-c", "--config", help="YAML file; only its fabric section is read")] = None,
    out: Annotated[Path, typer.Option(help="where the link is written")] = Path("link.yaml"),
    max_bytes: Annotated[str, typer.Option(help="largest full buffer, for example 64M (decimal)")] = "64M",
    repetitions: Annotated[int, typer.Option(help="rounds over all sizes and operations")] = 9,
    operations: Annotated[
        list[Operation], typer.Option("--operation", help="measure this; may be repeated")
    ] = _DEFAULT_OPERATIONS,
    dtypes: Annotated[list[str], typer.Option("--dtype", help="measure buffers of this dtype; may be repeated")] = ["float32"],  # noqa: B006
    json: Annotated[bool, typer.Option("--json", help="print every repetition as JSON on stdout")] = False,
) -> None:
    """Measure collectives over sizes; start the ranks with torchrun -m megabucket calibrate ..."""
    import os

    from megabucket.errors import ConfigError
    from megabucket.measure.calibrate import CalibrationPlan
    from megabucket.measure.calibrate import calibrate as run
    from megabucket.measure.ranks import read_launch
    from megabucket.planning.run_config import load_config
    from megabucket.trace import CollectiveKind
    from megabucket.units import parse_count

    settings = load_config(config, overrides or [])
    try:
        largest = parse_count(max_bytes)
    except ValueError as error:
        raise ConfigError(f"--max-bytes: {error}") from None
    plan = CalibrationPlan(
        kinds=tuple(CollectiveKind(operation.value) for operation in operations),
        dtypes=tuple(dtypes),
        max_bytes=largest,
        repetitions=repetitions,
    )
    launch = read_launch(os.environ)
    calibration = run(plan, launch=launch, out=out, fabric=settings.fabric)
    if launch.rank == 0:
        _print(calibration, out, as_json=json)


def _print(calibration: Calibration, out: Path, *, as_json: bool) -> None:
    if as_json:
        import json

        typer.echo(json.dumps(calibration.to_dict(), indent=2))
        return
    for line in calibration.describe():
        typer.echo(line)
    typer.echo(f"use it with: link: {{path: {out}}}")
