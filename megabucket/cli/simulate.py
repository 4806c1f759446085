"""``megabucket simulate``: the predicted step of each bucket size and of the optimal cuts, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megabucket.cli.output import notice_when_slow, print_answer
from megabucket.cli.workload import ConfigFile, Overrides


def simulate(
    config: ConfigFile = None,
    overrides: Overrides = None,
    dp_size: Annotated[int | None, typer.Option(min=1, help="data-parallel ranks; needed for ring and two_level links")] = None,
    expert_dp_size: Annotated[int | None, typer.Option(min=1, help="ranks that expert buckets are reduced over")] = None,
    trace: Annotated[Path | None, typer.Option(help="write two steps of the best plan as a Chrome trace (Perfetto)")] = None,
    show_cuts: Annotated[bool, typer.Option("--cuts", help="print the optimal cuts, ready for a config")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the figures as JSON on stdout")] = False,
) -> None:
    """Print the simulated step for each bucket size and for the optimal cuts, and how it scales."""
    from megabucket.cli.simulate_text import assumed_line, outlook_lines
    from megabucket.planning.run_config import load_config
    from megabucket.planning.setting import outlook_of, setting_of

    run = load_config(config, overrides or [])
    setting = setting_of(run, dp_size=dp_size, expert_dp_size=expert_dp_size)
    with notice_when_slow(f"simulating {len(setting.workload.tensors):,} tensors in many sizes"):
        outlook = outlook_of(setting, run.sweep.bucket_numel)
    if trace is not None:
        from megabucket.report import write_chrome_trace

        write_chrome_trace(trace, setting.traces(outlook.optimal.plan))
        typer.echo(f"wrote {trace}", err=True)
    lines = outlook_lines(outlook, assumed_line(run, setting.workload, config, overrides or []), show_cuts=show_cuts)
    print_answer(outlook.to_dict(), lines, as_json=json)
