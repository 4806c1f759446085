"""The page: nothing from outside, and nothing of a run that could become markup or script."""

import json
import re

import pytest

from megabucket.chaos.cell import Cell, Combo, Mode
from megabucket.chaos.outcome import CellOutcome
from megabucket.chaos.page import as_script_data, render_page
from megabucket.chaos.verdict import Verdict, VerdictName

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028\u2029<!--"
CELL = Cell("nan", "bucket-0-error", Combo(Mode.ALL_REDUCE, True, 2))


def page(text=HOSTILE):
    outcome = CellOutcome(CELL, Verdict(VerdictName.WRONG, reason=text, error=text, text=text))
    return render_page([outcome], facts={"torch": text})


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


def test_data_comes_back_as_it_was():
    data = data_of(page())

    assert data["facts"] == {"torch": HOSTILE}
    assert data["cells"][0]["reason"] == HOSTILE
    assert data["cells"][0]["cell"] == "nan/bucket-0-error/all-reduce/overlap/2"


def test_nothing_of_a_run_can_end_its_script_element():
    html = page()

    assert HOSTILE not in html
    assert html.count("</script>") == 2
    assert html.count("<script") == 2
    assert not {"\u2028", "\u2029"} & set(html)
    assert "<img" not in html


@pytest.mark.parametrize("text", ["</script>", "<!--", "\u2028", "\u2029", "<"])
def test_script_data_is_json_without_what_html_or_javascript_would_read_otherwise(text):
    written = as_script_data({"name": text})

    assert json.loads(written) == {"name": text}
    assert not {"<", "\u2028", "\u2029"} & set(written)


def test_the_page_loads_nothing_and_may_not():
    html = page("plain")

    assert "default-src 'none'" in html
    assert re.findall(r"https?://|//[a-z]|\bsrc=|\bhref=|@import|url\(|fetch\(|XMLHttpRequest|innerHTML|eval\(", html) == []


def test_outcomes_survive_their_line_of_json():
    outcome = CellOutcome(CELL, Verdict(VerdictName.NAMED, detected_s=0.5, goes_on=True), [{"kind": "step"}], 12, 1.5, 2)

    again = CellOutcome.from_dict(json.loads(json.dumps(outcome.to_dict())))

    assert again == outcome
