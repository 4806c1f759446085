"""The tables of a result as Markdown: for the terminal, and to be put into docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peers.registry import SYSTEMS

MS = 1e3
MB = 1e-6


def tables(result: dict[str, Any]) -> str:
    """Return all tables of a result, with what they were measured with."""
    parts = [headline(result)]
    parts += [steps_table(cell) for cell in result["cells"]]
    parts += [memory_table(cell) for cell in result["memory"]]
    if result["hooks"]:
        parts.append(hooks_table(result["hooks"]))
    parts += [f"PROBLEM: {problem}" for problem in result["problems"]]
    return "\n\n".join(parts) + "\n"


def headline(result: dict[str, Any]) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{name} {version or 'absent'}" for name, version in result["versions"].items())
    setting = result["settings"]
    return (
        f"{result['date']}, {machine['processor']}, {machine['cores']} cores, load {machine['load_before']} before; "
        f"{versions}; {setting['turns']} turns of {setting['steps_per_turn']} steps, "
        f"buckets of {setting['bucket_bytes'] / 2**20:g} MiB\n\n"
        f"`{result['command']}`"
    )


def steps_table(cell: dict[str, Any]) -> str:
    """Return one model on one link. Ratios are their time over the row's: above 1, the row is faster."""
    title = (
        f"**{cell['model']}**, {cell['numel'] / 1e6:.2f} M parameters in {cell['tensors']:,} tensors, {cell['ranks']} ranks, "
        f"{cell['link']['name']}"
    )
    best = cell["best_peer"]
    columns = [
        *("system", "step ms (quartiles)", "quiet ms", "x torch DDP (quartiles)", "x best peer (quartiles)"),
        *("forward / backward / sync / optimizer ms", "CPU ms", "calls", "MB", "wire MB", "faults", "loss off by"),
    ]
    rows = [steps_row(name, figures, is_best=name == best) for name, figures in cell["systems"].items()]
    lines = [title, "", table(columns, rows)]
    if cell["bounds_s"]:
        lines += ["", *bound_lines(cell)]
    lines += [f"\nabsent: {SYSTEMS[name].title}: {reason}" for name, reason in cell["absent"].items()]
    return "\n".join(lines)


def steps_row(name: str, figures: dict[str, Any], *, is_best: bool) -> list[str]:
    step, wire = figures["step_s"], figures["wire_bytes"]
    counts = figures["counts"]["all"]
    difference = figures["loss_difference"]
    return [
        SYSTEMS[name].title + (" (best peer)" if is_best else ""),
        f"{step['median'] * MS:.1f} ({step['low'] * MS:.1f} to {step['high'] * MS:.1f})",
        f"{step['quiet'] * MS:.1f}",
        ratio(figures["to_ddp"]),
        ratio(figures["to_best"]),
        " / ".join(f"{seconds * MS:.1f}" for seconds in figures["parts_s"].values()),
        f"{figures['cpu_s']['median'] * MS:.1f}",
        f"{counts['calls']:g}",
        f"{counts['bytes'] * MB:.1f}",
        "-" if wire is None else f"{wire['median'] * MB:.1f}",
        f"{figures['faults']['median']:,.0f}",
        "not checked" if difference is None else f"{difference:.0e}",
    ]


def bound_lines(cell: dict[str, Any]) -> list[str]:
    """Return the planner's lower bound of each mode and its best plan, and how far above the bound each of our systems is."""
    lines = []
    for mode, bound_s in cell["bounds_s"].items():
        optimum_s, buckets = cell["optima_s"][mode], cell["planned_buckets"].get(mode)
        over = [
            f"{SYSTEMS[name].title} {figures['over_bound']['median']:.3f} ({figures['over_bound']['low']:.3f} to "
            f"{figures['over_bound']['high']:.3f}), quiet {figures['over_bound']['quiet']:.3f}"
            for name, figures in cell["systems"].items()
            if SYSTEMS[name].mode == mode
        ]
        plan = f", {buckets} buckets" if buckets else ""
        lines.append(
            f"{mode.replace('_', '-')}: lower bound {bound_s['median'] * MS:.1f} ms, best plan {optimum_s * MS:.1f} ms{plan}; "
            f"step over the bound: {', '.join(over) or '-'}"
        )
    return [line for joined in lines for line in (joined, "")][:-1]


def memory_table(cell: dict[str, Any]) -> str:
    """Return the peaks of one model."""
    rows = []
    for name, row in cell["rows"].items():
        held, over = row["held_bytes"], row["over_formula"]
        rows.append(
            [
                SYSTEMS[name].title,
                f"{row['peak_bytes'] * MB:.1f}",
                "-" if held is None else f"{held * MB:.1f}",
                f"{(row['formula_bytes'] or row['expected_bytes']) * MB:.1f}" + ("" if row["formula_bytes"] else " (B/param)"),
                "-" if over is None else f"{over:+.1%}",
            ]
        )
    columns = ["system", "peak MB", "held MB", "formula MB", "held over formula"]
    baseline = cell["baseline"]
    kept = "" if baseline is None else f"; bare training that keeps its gradients peaks at {baseline['peak_bytes'] * MB:.1f} MB"
    lines = [f"Memory of **{cell['model']}**, {cell['ranks']} ranks{kept}", "", table(columns, rows)]
    return "\n".join([*lines, *(f"\nabsent: {SYSTEMS[name].title}: {reason}" for name, reason in cell["absent"].items())])


def hooks_table(cells: Sequence[dict[str, Any]]) -> str:
    """Return microseconds that wrappers add to backward per parameter, on one rank."""
    names = list(dict.fromkeys(name for cell in cells for name in cell["extra_us"]))
    rows = []
    for cell in cells:
        row = [f"{cell['model']}, {cell['num_params']:,} tensors", f"{cell['bare_s']['median'] * MS:.1f}"]
        for name in names:
            extra = cell["extra_us"].get(name)
            row.append("-" if extra is None else f"{ratio(extra)}, CPU {extra['cpu']:.2f}")
        rows.append(row)
    lines = [
        "Extra backward, us per parameter, one rank",
        "",
        table(["model", "bare ms", *(SYSTEMS[name].title for name in names)], rows),
    ]
    absent = {name: reason for cell in cells for name, reason in cell["absent"].items()}
    return "\n".join([*lines, *(f"\nabsent: {SYSTEMS[name].title}: {reason}" for name, reason in absent.items())])


def ratio(figures: dict[str, float] | None) -> str:
    if figures is None:
        return "-"
    return f"{figures['median']:.2f} ({figures['low']:.2f} to {figures['high']:.2f})"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; what a row says cannot break out of its cell."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
