"""The page as text: its size, what it refers to, and that nothing of a model can become markup or script."""

from __future__ import annotations

import json
import re

import pytest
from report_cases import HOSTILE, book, report, small, tensors, zero

from megabucket.report import Measured, render_page
from megabucket.report.measured import MeasuredPlan
from megabucket.report.page import MAX_PAGE_BYTES
from megabucket.report.page_data import page_costs


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


def test_the_page_loads_nothing_and_may_not():
    html = render_page(report(zero()))

    assert "default-src 'none'" in html
    namespace = "http://www.w3.org/2000/svg"  # a name, never fetched
    refers = (
        r"https?://|//[a-z]|\bsrc=|\bhref=\"(?!#main|data:,)|@import|url\((?!#hatch)|fetch\(|XMLHttpRequest|innerHTML|eval\("
    )
    assert re.findall(refers, html.replace(namespace, "")) == []


def test_nothing_of_a_model_can_end_its_script_element():
    run = small(mode="reduce_scatter", workload={"tensors": [{"name": HOSTILE, "numel": 5}]}, ddp={"bucket_cuts": [HOSTILE]})

    html = render_page(report(run, measured=Measured(HOSTILE, (MeasuredPlan(HOSTILE, 1.0),)), title=HOSTILE))

    assert html.count("</script>") == html.count("<script") == 2
    assert "<img" not in html
    assert not {"\u2028", "\u2029", "\u202e", "\x00"} & set(html)
    data = data_of(html)
    assert data["title"].startswith('</script><img src=x onerror="pwned=1">&amp;\'\\u2028')
    assert data["work"]["names"][1].startswith("</script><img")


def test_placeholders_in_names_stay_names():
    html = render_page(report(small(workload={"tensors": [{"name": "@DATA@@STYLE@@SCRIPTS@", "numel": 5}]})))

    assert data_of(html)["work"]["names"] == [0, "@DATA@@STYLE@@SCRIPTS@"]


@pytest.mark.parametrize("count", [1, 3_000])
@pytest.mark.parametrize("name", ["p{}", "{}" + "名" * 900])
def test_the_page_stays_small_and_says_when_it_merged(count, name):
    run = small(
        workload={
            "tensors": [
                {
                    "name": name.format(i),
                    "numel": 1000 + i * 7919 % 5003,
                    "backward_s": 1e-6 / (i + 3),
                    "forward_s": 1e-6 / (i + 7),
                }
                for i in range(count)
            ]
        },
        mode="reduce_scatter",
        ddp={"bucket_size": 2_000},
    )

    html = render_page(report(run, dp_size=8))

    assert len(html.encode()) < MAX_PAGE_BYTES
    data = data_of(html)
    is_merged = len(data["work"]["names"]) < 2 * count
    assert is_merged == any("neighbours merged" in note for note in data["notes"])
    assert data["sweep"][0][0] == 1000  # the sweep is of all tensors


def test_a_usual_model_is_carried_whole():
    blocks = [
        f"model.layers.{layer}.{part}.weight"
        for layer in range(160)
        for part in ("attention.query_key_value", "mlp.up", "mlp.down", "norm")
    ]
    entries = [
        {"name": name, "numel": 4096 * (3 + len(name) % 5), "backward_s": 1e-3 * (len(name) % 7), "forward_s": 1e-4}
        for name in blocks
    ]

    html = render_page(report(small(workload={"tensors": entries})))

    assert len(html.encode()) < 100_000
    assert len(data_of(html)["work"]["names"]) == 2 * len(blocks)


def test_long_tables_of_a_link_are_thinned_at_both_ends_kept():
    points = [[size, 1e-5 + size * 1e-9] for size in range(1, 9_001)]
    table = {"kind": "table", "num_ranks": 4, "tables": [{"operation": "all_reduce", "points": points}]}
    figures = report(small(link=table), dp_size=4)

    kept = page_costs(figures.setting)["reduce"]["points"]

    assert len(kept) <= 402
    assert [kept[0], *kept[-2:]] == [points[0], *points[-2:]]
    assert any("some of the measured points" in note for note in data_of(render_page(figures))["notes"])


def test_short_tables_of_a_link_are_carried_whole():
    points = [[size, 1e-5 + size * 1e-9] for size in range(1, 300)]
    table = {"kind": "table", "num_ranks": 4, "tables": [{"operation": "all_reduce", "points": points}]}
    figures = report(small(link=table), dp_size=4)

    assert page_costs(figures.setting)["reduce"]["points"] == points
    assert data_of(render_page(figures))["notes"] == []


def test_what_does_not_hide_anything_is_said():
    figures = report(small(workload={"tensors": tensors(5, backward_s=0.0)}))

    assert any("nothing about when gradients become ready" in note for note in data_of(render_page(figures))["notes"])


def test_plans_of_many_buckets_are_not_drawn():
    run = book(ddp={"bucket_size": 1}, workload={"tensors": tensors(*range(1, 400))})

    plans = {plan["key"]: plan for plan in data_of(render_page(report(run)))["plans"]}

    assert plans["config"]["buckets"] == 399
    assert plans["config"]["drawn"] is None
    assert plans["default"]["drawn"] is not None
