"""``megabucket explain``: print every derived value with its reason, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabucket.cli.workload import Overrides

if TYPE_CHECKING:
    from megabucket.config.resolve import ResolvedConfig
    from megabucket.planning.run_config import RunConfig


def explain(
    config: Annotated[Path, typer.Option("-c", "--config", help="YAML file; a model section makes the answer complete")],
    overrides: Overrides = None,
    dp_size: Annotated[int, typer.Option(min=1, help="data-parallel ranks")] = 1,
    json: Annotated[bool, typer.Option("--json", help="print the values as JSON on stdout")] = False,
) -> None:
    """Print what the config leaves to the model and the group: each value and its reason."""
    from megabucket.cli.output import notice_when_slow, print_json, print_lines, text_table
    from megabucket.planning.run_config import load_config

    run = load_config(config, overrides or [])
    with notice_when_slow("laying out the model"):
        answers = _resolve_all(run, dp_size)
    if json:
        data = [{"param_dtype": answer.param_dtype, "values": answer.to_dict()} for answer in answers]
        print_json({"dp_size": dp_size, "answers": data})
        return
    for answer in answers:
        typer.echo(f"{answer.param_dtype} parameters on {dp_size} {'rank' if dp_size == 1 else 'ranks'}")
        rows = [(entry.name, _value_text(entry.value), entry.reason) for entry in answer.entries]
        print_lines(text_table([("field", "value", "reason"), *rows], num_left=2, num_folded=1, indent=2))


def _value_text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _resolve_all(run: RunConfig, dp_size: int) -> list[ResolvedConfig]:
    """Return one answer per parameter dtype of the model, or one for float32 without a model."""
    from megabucket.config.resolve import resolve
    from megabucket.planning.architecture import param_specs

    if run.model is None:
        return [resolve(run.ddp, dp_size=dp_size, param_dtype="float32")]
    specs = param_specs(run.model)
    total_numel = sum(spec.numel for spec in specs)
    num_buffers = len({(spec.dtype, spec.group) for spec in specs})
    return [
        resolve(run.ddp, dp_size=dp_size, total_numel=total_numel, param_dtype=dtype, num_buffers=num_buffers)
        for dtype in dict.fromkeys(spec.dtype for spec in specs)
    ]
