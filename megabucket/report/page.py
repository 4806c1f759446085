"""The page: one self-contained HTML file. No network, data inside, every name shown as plain text.

Its parts lie in ``assets``: ``simulate.js`` is the timing model, ``chart.js`` draws, ``page.js`` joins both to the data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Final

from megabucket.report.collect import Report
from megabucket.report.page_data import Limits, page_data

MAX_PAGE_BYTES: Final = 200_000
_FIRST_LIMITS: Final = Limits(tensors=4_000)
_SCRIPTS: Final = ("simulate.js", "chart.js", "page.js")


def render_page(report: Report) -> str:
    """Return the page, smaller than 200 kB: what grows with the model is cut until it fits, and the page says so.

    Raises:
        ConfigError: a link that the page cannot show.
    """
    frame, scripts = read_asset("page.html"), [read_asset(name) for name in _SCRIPTS]
    limits = _FIRST_LIMITS
    while True:
        page = assemble(frame, scripts, page_data(report, limits))
        if len(page.encode()) < MAX_PAGE_BYTES or limits.tensors == 1:
            return page
        limits = limits.tighter()


def assemble(frame: str, scripts: Sequence[str], data: Any) -> str:
    """Return a self-contained page: the frame with the report's style, its scripts, and its data as JSON.

    Args:
        frame: HTML with ``@STYLE@``, ``@SCRIPTS@`` and ``@DATA@`` where they belong.
    """
    page = frame.replace("@STYLE@", read_asset("page.css")).replace("@SCRIPTS@", "\n".join(scripts))
    return page.replace("@DATA@", as_script_data(data))  # last: a name in it may well be "@STYLE@"


def as_script_data(data: Any) -> str:
    r"""Return data as JSON that cannot end the script element it stands in.

    >>> as_script_data(["</script>"])
    '["\\u003c/script>"]'
    """
    text = json.dumps(data, separators=(",", ":"), default=list)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def read_asset(name: str) -> str:
    """Return a file of ``assets``."""
    return (files("megabucket.report") / "assets" / name).read_text(encoding="utf-8")
