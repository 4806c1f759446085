"""``megabucket explain``: print every derived value with its reason, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabucket.cli.output import counted, notice_when_slow, print_answer, text_table
from megabucket.cli.workload import Overrides

if TYPE_CHECKING:
    from megabucket.cli.explain_text import ResolvedConfig
    from megabucket.planning.owners import GroupOwners
    from megabucket.planning.run_config import RunConfig


def explain(
    config: Annotated[Path, typer.Option("-c", "--config", help="YAML file, preset, config.json or module:callable")],
    overrides: Overrides = None,
    dp_size: Annotated[int, typer.Option(min=1, help="data-parallel ranks")] = 1,
    json: Annotated[bool, typer.Option("--json", help="print the values as JSON on stdout")] = False,
) -> None:
    """Print every value that the config leaves open, with its reason."""
    from megabucket.cli.plan_text import owner_lines
    from megabucket.planning.run_config import load_config

    run = load_config(config, overrides or [])
    with notice_when_slow("laying out the model"):
        answers, groups, owners = _resolve_all(run, dp_size), _reduction_groups(run, dp_size), _owners(run, dp_size)
    values = [{"param_dtype": answer.param_dtype, "values": answer.to_dict()} for answer in answers]
    data = {"dp_size": dp_size, "answers": values, "groups": groups, "owners": [each.to_dict() for each in owners]}
    of_owners = owner_lines(owners, optimizer=run.optimizer.name)
    print_answer(data, chain(_lines(answers, groups, dp_size), of_owners), as_json=json)


def _lines(answers: list[ResolvedConfig], groups: list[dict[str, object]], dp_size: int) -> Iterator[str]:
    for answer in answers:
        yield f"{answer.param_dtype} parameters on {counted(dp_size, 'rank')}"
        rows = [(entry.name, _value_text(entry.value), entry.reason) for entry in answer.entries]
        yield from text_table([("field", "value", "reason"), *rows], num_left=2, num_folded=1, indent=2)
    if groups:
        yield "reduction groups"
        lines = [list(map(_value_text, group.values())) for group in groups]
        yield from text_table([["name", "ranks", "divided by", "reason"], *lines], num_folded=1, indent=2)


def _reduction_groups(run: RunConfig, dp_size: int) -> list[dict[str, object]]:
    """Return the reduction groups, where the parameters of the model are of several ones."""
    from megabucket.planning.architecture import param_specs
    from megabucket.planning.run_config import group_sizes_of

    specs = param_specs(run.model) if run.model is not None else []
    sizes = group_sizes_of(run, specs)
    names = sorted({"dense", *(spec.group for spec in specs)}, key=lambda name: (name != "dense", name))
    dense = sizes.get("dense", dp_size)
    divisor, reason = 1, "grad_reduction='sum': nothing is divided"
    if run.ddp.grad_reduction == "mean":
        divisor, reason = dense, f"grad_reduction='mean': ranks of dense={dense}, for every group without a divisor of its own"
    groups = [{"name": name, "num_ranks": sizes.get(name, dp_size), "divisor": divisor, "reason": reason} for name in names]
    return groups if len(groups) > 1 else []


def _owners(run: RunConfig, dp_size: int) -> tuple[GroupOwners, ...]:
    """Return the owners of whole tensors, where the optimizer of the config has them."""
    from megabucket.layout import build_layout
    from megabucket.planning.architecture import param_specs
    from megabucket.planning.owners import describe_owners
    from megabucket.planning.run_config import group_sizes_of, shard_counts

    specs = param_specs(run.model) if run.model is not None and run.ddp.use_distributed_optimizer else []
    whole_params = run.optimizer.whole_params(specs)
    if not whole_params:
        return ()
    shards = shard_counts(dp_size, group_sizes_of(run, specs), run.num_distributed_optimizer_instances)
    layout = build_layout(specs, run.ddp, dp_size=shards["dense"], group_sizes=shards)
    return describe_owners(layout, whole_params)


def _value_text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _resolve_all(run: RunConfig, dp_size: int) -> list[ResolvedConfig]:
    """Return one answer per parameter dtype of the model, or one for float32 without a model."""
    from megabucket.cli.explain_text import resolve
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
