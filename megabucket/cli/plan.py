"""``megabucket plan``: print the layout a model would get, and the memory it would take, without torch."""

from __future__ import annotations

from dataclasses import asdict
from itertools import chain
from typing import Annotated, Any

import typer

from megabucket.cli.exit_codes import ExitCode
from megabucket.cli.output import notice_when_slow, print_answer
from megabucket.cli.workload import ConfigFile, Overrides
from megabucket.errors import ConfigError

_GIB = 1024**3
_NO_MODEL = (
    "model is required to plan; give a preset (-c gpt2-124m), a config.json of Hugging Face, module:callable, or a YAML file "
    "with a model section"
)


def plan(
    config: ConfigFile = None,
    overrides: Overrides = None,
    dp_size: Annotated[int, typer.Option(min=1, help="data-parallel ranks that buckets are cut for")] = 1,
    expert_dp_size: Annotated[int | None, typer.Option(min=1, help="ranks that expert buckets are cut for")] = None,
    max_padding: Annotated[float, typer.Option(min=0, max=1, help="exit with 1 above this fraction of padding")] = 1.0,
    activation_gib: Annotated[float, typer.Option(min=0, max=1e6, help="activations of a rank, for the memory table")] = 0.0,
    show_all: Annotated[bool, typer.Option("--all", help="print every bucket, not only the first and last few")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the plan as JSON on stdout")] = False,
) -> None:
    """Print the buckets a model would get, and the memory of a rank by category in both modes."""
    from megabucket.cli.plan_text import bucket_lines, memory_lines, owner_lines, total_lines
    from megabucket.layout import build_layout
    from megabucket.planning.architecture import param_specs
    from megabucket.planning.by_host import advise_run_by_host
    from megabucket.planning.describe import describe_rows, describe_totals
    from megabucket.planning.memory import memory_by_mode, offload_of_plan
    from megabucket.planning.owners import describe_owners
    from megabucket.planning.run_config import group_sizes_of, load_config, shard_counts
    from megabucket.planning.setting import advice_of

    run = load_config(config, overrides or [])
    if run.model is None:
        raise ConfigError(f"{config or 'command line'}: {_NO_MODEL}")
    num_instances = run.num_distributed_optimizer_instances
    with notice_when_slow("laying out the model"):
        specs = param_specs(run.model)
        group_sizes = group_sizes_of(run, specs, expert_dp_size=expert_dp_size)
        whole_params, moments = run.optimizer.whole_params(specs), run.optimizer.moments_per_element
        shards = shard_counts(dp_size, group_sizes, num_instances)
        layout = build_layout(specs, run.ddp, dp_size=shards["dense"], group_sizes=shards)
        totals = describe_totals(layout, rows := describe_rows(layout))
        ranks: dict[str, Any] = {"dp_size": dp_size, "group_sizes": group_sizes, "num_instances": num_instances}
        of_optimizer: dict[str, Any] = {"moments_per_element": moments, "whole_params": whole_params}
        memory = memory_by_mode(specs, run.ddp, **ranks, **of_optimizer, activation_bytes=int(activation_gib * _GIB))
        owners = describe_owners(layout, whole_params) if run.ddp.use_distributed_optimizer else ()
        by_host = advise_run_by_host(run, dp_size=dp_size, expert_dp_size=expert_dp_size)
        advice = advice_of(run, dp_size=dp_size, expert_dp_size=expert_dp_size)
    chosen = "reduce_scatter" if run.ddp.use_distributed_optimizer else "all_reduce"
    data = {
        "advice": advice.to_dict(),
        **ranks,
        "expert_dp_size": group_sizes.get("expert"),
        "mode": chosen,
        "fingerprint": layout.fingerprint,
        "totals": asdict(totals),
        "memory": {mode: {**asdict(each), "total_bytes": each.total_bytes} for mode, each in memory.items()},
        "offload": asdict(offload := offload_of_plan(layout, run.ddp, **of_optimizer)),
        "owners": [each.to_dict() for each in owners],
        "by_host": None if by_host is None else by_host.to_dict(),
        "buckets": [asdict(row) for row in rows],
    }
    of_memory = memory_lines(memory, offload, optimizer=run.optimizer.name, dp_size=dp_size, chosen=chosen)
    of_owners = owner_lines(owners, optimizer=run.optimizer.name)
    of_hosts = (*by_host.sentences, "") if by_host is not None else ()
    of_buckets = bucket_lines(rows, show_all=show_all)
    lines = chain([*advice.lines, ""], total_lines(totals, layout.fingerprint), of_memory, of_owners, of_hosts, of_buckets)
    print_answer(data, lines, as_json=json)
    _check_padding(totals.padding_fraction, max_padding)


def _check_padding(padding_fraction: float, max_padding: float) -> None:
    if padding_fraction > max_padding:
        text = f"error: padding is {padding_fraction:.4%} of the buffers, more than --max-padding {max_padding:.4%}"
        typer.echo(text, err=True)
        raise typer.Exit(ExitCode.FAILED)
