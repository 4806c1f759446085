"""The page as text: its size, what it refers to, and that nothing of a model can become markup or script."""

from __future__ import annotations

import json
import re

import pytest
from report_cases import HOSTILE, report, small, tensors, zero

from megabucket.report import Measured, render_page
from megabucket.report.measured import MeasuredPlan
from megabucket.report.page import timeline
from megabucket.trace import Interval, Lane, StepTrace


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
    assert data["buckets"][0]["first_param"].startswith("</script><img")


def test_placeholders_in_names_stay_names():
    html = render_page(report(small(workload={"tensors": [{"name": "@DATA@@STYLE@@SCRIPTS@", "numel": 5}]})))

    assert data_of(html)["buckets"][0]["last_param"] == "@DATA@@STYLE@@SCRIPTS@"


def test_the_link_is_in_words_and_whole():
    fields = {"inside": {"latency_s": 1e-6, "bytes_per_s": 1e11}, "between": {"latency_s": 1e-5, "bytes_per_s": 5e10}}
    link = {"kind": "two_level", **fields, "ranks_per_node": 8}
    measured = {"kind": "table", "num_ranks": 4, "facts": {f"fact {i}": "x" * 30 for i in range(9)}}
    measured["tables"] = [{"operation": "all_reduce", "points": [[1, 1e-3], [2, 2e-3]]}]

    in_words, of_table = (data_of(render_page(report(small(link=each))))["facts"]["Link"] for each in (link, measured))

    assert in_words == (
        "kind two_level, inside (kind ring, latency_s 1e-06, bytes_per_s 100000000000.0), "
        "between (kind ring, latency_s 1e-05, bytes_per_s 50000000000.0), ranks_per_node 8"
    )
    assert of_table.startswith("kind table, num_ranks 4, facts (fact 0 xxx")
    assert of_table.endswith(f"fact 8 {'x' * 30})")


def test_the_link_of_a_name_or_a_file_is_called_so(tmp_path):
    path = tmp_path / "link.yaml"
    path.write_text("{kind: ring, latency_s: 1.0e-5, bytes_per_s: 2.0e+10}")

    shipped, of_file = (
        data_of(render_page(report(small(link=name), dp_size=8)))["facts"]["Link"] for name in ("infiniband-400g", str(path))
    )

    assert shipped == "infiniband-400g (kind ring, latency_s 1.4e-05, bytes_per_s 48000000000.0)"
    assert of_file == f"{path} (kind ring, latency_s 1e-05, bytes_per_s 20000000000.0)"


@pytest.mark.parametrize("count", [1, 3_000])
@pytest.mark.parametrize("name", ["p{}", "{}" + "名" * 900])
def test_the_page_stays_small(count, name):
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
    figures = report(run, dp_size=8)

    html = render_page(figures)

    assert len(html.encode()) < 1_000_000
    plans = data_of(html)["plans"]
    assert [plan["step_s"] for plan in plans if plan["key"] == "size"] == [row.step_s for row in figures.outlook.rows]
    assert all(plan["parts"] for plan in plans)


def test_every_plan_has_the_timeline_that_python_simulates():
    figures = report(zero(), dp_size=4)

    data = data_of(render_page(figures))

    for plan, drawn in zip((*figures.sized(), *figures.plans), data["plans"], strict=True):
        last = figures.setting.traces(plan.plan)[-1]
        assert drawn["step_s"] == plan.step_s == pytest.approx(last.duration_s)
        assert drawn["hidden"] == last.overlap_fraction
        assert max(stop for *_, stop in drawn["parts"]) == 1
        compute = sum(stop - start for lane, _, start, stop in drawn["parts"] if lane == "compute")
        assert compute * plan.step_s == pytest.approx(last.compute_s, rel=1e-4)


def test_parts_too_narrow_to_see_become_one():
    intervals = [Interval(Lane.COMM, f"bucket {i}", i / 8, (i + 1) / 8) for i in range(4)]
    trace = StepTrace(0, 0, 0.0, 1.0, (Interval(Lane.COMPUTE, "backward", 0.0, 1.0), *intervals))

    backward = ["compute", "backward", 0, 1]
    assert timeline(trace, 0.01)[1:] == [backward, *(["comm", f"bucket {i}", i / 8, (i + 1) / 8] for i in range(1, 4))]
    assert timeline(trace, 0.26) == [["comm", "bucket", 0, 0.25], backward, ["comm", "bucket", 0.25, 0.5]]


def test_the_summary_says_when_nothing_can_be_hidden():
    figures = report(small(workload={"tensors": tensors(5, backward_s=0.0)}))

    assert any("does not say when gradients become ready" in text for text in data_of(render_page(figures))["summary"])
