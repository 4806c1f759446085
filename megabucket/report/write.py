"""Writes a report: the page, its figures as JSON, and Chrome traces beside it."""

from __future__ import annotations

import json
from pathlib import Path

from megabucket.errors import ConfigError
from megabucket.report.chrome import write_chrome_trace
from megabucket.report.collect import Report
from megabucket.report.page import render_page


def write_report(report: Report, path: Path) -> tuple[Path, ...]:
    """Write ``report.html``, ``report.json``, ``report.trace.json`` and, of measured steps, ``report.measured.trace.json``.

    Returns:
        the files that were written, the page first.

    Raises:
        ConfigError: the page is not called ``.html``, or a file cannot be written.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {path}: the page is called something.html; the other files lie beside it")
    page = render_page(report)
    figures, trace = path.with_suffix(".json"), path.with_suffix(".trace.json")
    written = [path, figures, trace]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
        figures.write_text(json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        write_chrome_trace(trace, report.traces())
        if report.measured is not None and report.measured.traces:
            written.append(path.with_suffix(".measured.trace.json"))
            write_chrome_trace(written[-1], report.measured.traces)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or path}: cannot be written: {error.strerror}; name a file in a directory of yours"
        ) from None
    return tuple(written)
