"""``megabucket simulate``: what a step would take with each bucket size, and with the optimal cuts, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from megabucket.planning.run_config import RunConfig


def simulate(
    config: Annotated[
        Path | None, typer.Option("-c", "--config", help="YAML file with a link, and a workload or a model at a rate")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example link.latency_s=6e-3")] = None,
    dp_size: Annotated[int | None, typer.Option(min=1, help="data-parallel ranks; needed for ring and two_level links")] = None,
    expert_dp_size: Annotated[int | None, typer.Option(min=1, help="ranks that expert buckets are reduced over")] = None,
    trace: Annotated[Path | None, typer.Option(help="write two steps of the best plan as a Chrome trace (Perfetto)")] = None,
    show_cuts: Annotated[bool, typer.Option("--cuts", help="print the optimal cuts, ready for a config")] = False,
    ladder: Annotated[bool, typer.Option("--ladder", help="count the collectives of six strategies instead")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the figures as JSON on stdout")] = False,
) -> None:
    """Print the simulated step for each bucket size and for the optimal cuts, and how it scales."""
    from megabucket.planning.run_config import load_config

    run = load_config(config, overrides or [])
    if ladder:
        _ladder(run, json=json)
        return
    from megabucket.planning.outlook import outlook_of
    from megabucket.planning.setting import setting_of

    setting = setting_of(run, dp_size=dp_size, expert_dp_size=expert_dp_size)
    outlook = outlook_of(setting, run.sweep.bucket_numel)
    if trace is not None:
        from megabucket.report import write_chrome_trace

        write_chrome_trace(trace, setting.traces(setting.optimal_plan))
        typer.echo(f"wrote {trace}", err=True)
    if json:
        _print_json(outlook.to_dict())
    else:
        from megabucket.cli.simulate_text import outlook_lines

        for line in outlook_lines(outlook, show_cuts=show_cuts):
            typer.echo(line)


def _ladder(run: RunConfig, *, json: bool) -> None:
    from dataclasses import asdict

    from megabucket.planning.ladder import ladder
    from megabucket.planning.setting import ladder_input

    numels, sizes = ladder_input(run)
    rungs = ladder(numels, **sizes)
    if json:
        rows = [{**asdict(rung), "collectives_per_step": rung.collectives_per_step} for rung in rungs]
        _print_json({"num_tensors": len(numels), "numel": sum(numels), **sizes, "ladder": rows})
        return
    from megabucket.cli.simulate_text import ladder_lines

    for line in ladder_lines(rungs, num_tensors=len(numels), **sizes):
        typer.echo(line)


def _print_json(data: dict[str, Any]) -> None:
    import json

    typer.echo(json.dumps(data, indent=2, allow_nan=False))
