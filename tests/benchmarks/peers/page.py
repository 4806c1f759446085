"""The page of a result: one self-contained HTML file in the style of ``megabucket report``. No network, data inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megabucket.errors import printable
from megabucket.report.page import assemble, read_asset
from peers.registry import SYSTEMS
from peers.result import plain

ASSETS = Path(__file__).parent / "assets"


def render_page(result: dict[str, Any]) -> str:
    """Return the page. Single steps are in the JSON file only."""
    scripts = [read_asset("chart.js"), (ASSETS / "bench.js").read_text(encoding="utf-8")]
    return assemble((ASSETS / "bench.html").read_text(encoding="utf-8"), scripts, page_data(result))


def page_data(result: dict[str, Any]) -> dict[str, Any]:
    """Return what the page shows, ready for JSON."""
    data = {
        "title": f"megabucket beside its peers: {printable(result['name'])}",
        "facts": _facts(result),
        "problems": [printable(problem.splitlines()[0], 400) for problem in result["problems"]],
        "systems": {name: {"title": case.title, "role": case.role.value, "mode": case.mode} for name, case in SYSTEMS.items()},
        "cells": [_without_steps(cell) for cell in result["cells"]],
        "memory": result["memory"],
        "hooks": result["hooks"],
    }
    return plain(data)


def _without_steps(cell: dict[str, Any]) -> dict[str, Any]:
    systems = {
        name: {field: value for field, value in figures.items() if field != "steps_s"}
        for name, figures in cell["systems"].items()
    }
    return {**cell, "systems": systems}


def _facts(result: dict[str, Any]) -> list[list[str]]:
    machine, setting = result["machine"], result["settings"]
    versions = ", ".join(f"{name} {version or 'absent'}" for name, version in result["versions"].items())
    interleaved = (
        f"{setting['turns']} turns of {setting['steps_per_turn']} steps of each system, buckets of "
        f"{setting['bucket_bytes'] / 2**20:g} MiB; losses within {setting['tolerance']:g}"
    )
    return [
        ["Date", f"{result['date']}, commit {result['commit'] or 'unknown'}"],
        ["Machine", f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, {machine['system']}"],
        ["Load before", f"{machine['load_before']:g}: with more than a little of it, ratios mean something and times do not"],
        ["Versions", versions],
        ["Interleaved", interleaved],
        ["Command", printable(result["command"], 400)],
    ]
