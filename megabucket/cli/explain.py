"""``megabucket explain``: print every derived value with its reason, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megabucket.config.resolve import ResolvedConfig
    from megabucket.planning.run_config import RunConfig


def explain(
    config: Annotated[Path, typer.Option("-c", "--config", help="YAML file; a model section makes the answer complete")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example mode=reduce_scatter")] = None,
    dp_size: Annotated[int, typer.Option(min=1, help="data-parallel ranks")] = 1,
    json: Annotated[bool, typer.Option("--json", help="print the values as JSON on stdout")] = False,
) -> None:
    """Print what the config leaves to the model and the group: each value and its reason."""
    from megabucket.planning.run_config import load_config

    answers = _resolve_all(load_config(config, overrides or []), dp_size)
    if json:
        _print_json(answers)
        return
    for answer in answers:
        for line in _lines(answer):
            typer.echo(line)


def _lines(answer: ResolvedConfig) -> Iterator[str]:
    """Yield a value on a line with its reason, or the reason below where the terminal is narrow."""
    from megabucket.cli.text_table import output_width, text_table, wrapped

    yield f"{answer.param_dtype} parameters on {answer.dp_size} {'rank' if answer.dp_size == 1 else 'ranks'}"
    values = [(entry.name, _value_text(entry.value)) for entry in answer.entries]
    width, starts = output_width(), list(text_table(values, num_left=2))
    column = max(map(len, starts))
    for start, entry in zip(starts, answer.entries, strict=True):
        line = f"  {start.ljust(column)}  {entry.reason}"
        if len(line) <= width:
            yield line
        else:
            yield f"  {start}"
            yield from wrapped(entry.reason, width=width, indent=" " * 6)


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


def _print_json(answers: list[ResolvedConfig]) -> None:
    import json

    data = [{"param_dtype": answer.param_dtype, "values": answer.to_dict()} for answer in answers]
    typer.echo(json.dumps({"dp_size": answers[0].dp_size, "answers": data}, indent=2))
