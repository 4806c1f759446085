"""Arguments of several commands: a config with overrides, and the training program to measure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megabucket.measure.program import WorkloadFunction
    from megabucket.planning.run_config import RunConfig

WorkloadName = Annotated[
    str | None, typer.Option("-w", "--workload", help="package.module:function, which returns a TrainingProgram")
]
ConfigFile = Annotated[Path | None, typer.Option("-c", "--config", help="YAML file, preset, config.json or module:callable")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, for example mode=reduce_scatter")]


def open_workload(name: str | None, config: Path | None, overrides: list[str] | None) -> tuple[WorkloadFunction, RunConfig]:
    """Return the function of a workload and its config."""
    from megabucket.measure.program import load_workload, load_workload_config

    workload = load_workload(name)
    return workload, load_workload_config(workload, config, overrides or [])
