"""The page and the tables of a result: what is on them, and that nothing of a run can become markup or script."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from bench_cases import HOSTILE, result
from peers.page import page_data, render_page
from peers.tables import tables


def data_of(html: str):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


def test_the_page_loads_nothing_and_may_not():
    html = render_page(result())

    assert "default-src 'none'" in html
    namespace = "http://www.w3.org/2000/svg"  # a name, never fetched
    refers = r"https?://|//[a-z]|\bsrc=(?!x)|\bhref=\"(?!#main|data:,)|@import|url\(|fetch\(|XMLHttpRequest|innerHTML|eval\("
    assert re.findall(refers, html.replace(namespace, "")) == []


def test_nothing_of_a_run_can_end_its_script_element():
    html = render_page(result())

    assert html.count("</script>") == html.count("<script") == 2
    assert "<img" not in html
    assert data_of(html)["cells"][0]["absent"] == {"deepspeed-1": HOSTILE}


def test_the_page_says_what_is_missing_and_leaves_single_steps_to_the_file():
    data = page_data(result())

    assert data["problems"] == ["losses differ"]
    assert data["memory"][0]["rows"]["none"]["over_formula"] is None  # was nan
    assert "steps_s" not in data["cells"][0]["systems"]["mb-rs"]
    assert data["cells"][0]["systems"]["mb-rs"]["to_best"]["median"] == 2.0
    assert ["Versions", "torch 2.13.0, deepspeed absent"] in data["facts"]


def test_the_tables_hold_every_figure_and_no_cell_breaks_out():
    text = tables(result())

    assert "| megabucket reduce-scatter | 100.0 (100.0 to 100.0) | 100.0 | 2.00 (2.00 to 3.00) |" in text
    assert "| torch DDP (best peer) | 200.0 (200.0 to 300.0) |" in text
    assert "reduce-scatter: lower bound 80.0 ms, best plan 84.0 ms" in text
    # Of 0.1 / 0.08, 0.1 / 0.05 and 0.1 / 0.1; quiet 0.1 / 0.056, of which 0.05 + 0.2 * (0.08 - 0.05)
    assert "step over the bound: megabucket reduce-scatter 1.250 (1.125 to 1.625), quiet 1.786" in text
    assert "| megabucket reduce-scatter | 12.0 | 4.1 | 4.0 | +2.5% |" in text
    assert "1.50 (1.25 to 1.75), CPU 1.25" in text
    assert "absent: DeepSpeed ZeRO-1: " in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    widths = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert sorted(set(widths)) == [4, 6, 13]  # of hooks, memory and steps


def test_the_page_draws_itself_without_an_error(tmp_path):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on this machine: run tests/browser/install.sh as root, or install it")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: install the dev extra")
    path, messages = tmp_path / "page.html", []
    path.write_text(render_page(result()), encoding="utf-8")

    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 420, "height": 900})
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(path.as_uri())
        page.check("input[value=to_best]")
        bars, drawn = page.locator("#bars rect.backward").count(), page.locator("#ratios svg path").count()
        shown = page.locator("#absent").inner_text()
        width = page.evaluate("document.documentElement.scrollWidth")
        browser.close()

    assert messages == []
    assert (bars, drawn) == (3, 3)  # a bar and a mark for each system
    assert "absent: DeepSpeed ZeRO-1: </script><img src=x" in shown
    assert width <= 420
