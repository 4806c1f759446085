"""The page in a real browser: slider, keyboard, widths, themes, names, requests."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading

import pytest
from report_cases import HOSTILE, book, model_run, report, small, tensors, zero

from megabucket.measure.profile_steps import WorkloadProfile
from megabucket.planning import RunConfig
from megabucket.planning.workload import TensorWork, Workload
from megabucket.report import Measured, render_page, write_report
from megabucket.report.measured import MeasuredPlan

pytestmark = pytest.mark.nightly

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NOT_INSTALLED = "run tests/browser/install.sh as root, or install"
MANY = 100_000


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip(f"no chromium on this machine: {NOT_INSTALLED} it")
    playwright = pytest.importorskip("playwright.sync_api", reason=f"playwright is missing: {NOT_INSTALLED} the dev extra")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


class Site:
    """Opens pages one after the other and notes every message, error and request."""

    def __init__(self, browser, folder):
        self._context = browser.new_context(viewport={"width": 1280, "height": 900})
        self._context.set_default_timeout(10_000)
        self._folder = folder
        self.page = self._context.new_page()
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.messages.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: self.messages.append(f"dialog: {dialog.message}"))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, figures, *, width=1280, scheme="light"):
        path = self._folder / "report.html"
        path.write_text(figures if isinstance(figures, str) else render_page(figures), encoding="utf-8")
        self.messages.clear()
        self.requests.clear()
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme)
        self.page.goto(path.as_uri())
        return self.page

    def settle(self):
        """Wait until what was asked for by the last event is drawn."""
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def close(self):
        self._context.close()


@pytest.fixture(scope="module")
def site(browser, tmp_path_factory):
    opened = Site(browser, tmp_path_factory.mktemp("site"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def many_report(tmp_path_factory):
    path = tmp_path_factory.mktemp("many") / "workload.json"
    works = (TensorWork(f"layers.{i}.<b>weight</b>", i * 7919 % 10_007, 1e-7 * (i % 13), 1e-7 * (i % 5)) for i in range(MANY))
    WorkloadProfile(Workload(tuple(works), optimizer_s=1e-3), {}).write(path)
    link = {"kind": "ring", "latency_s": 1e-5, "bytes_per_s": 1e10}
    return report(
        RunConfig.model_validate({"mode": "reduce_scatter", "link": link, "workload": {"path": str(path)}}), dp_size=64
    )


# Controls #


def bars(page):
    return page.eval_on_selector_all(
        "#timeline rect[data-part]", "all => all.map(r => [r.getAttribute('x'), r.getAttribute('width')])"
    )


def stats(page):
    return dict(
        page.eval_on_selector_all("#stats div", "all => all.map(d => [d.children[0].textContent, d.children[1].textContent])")
    )


def test_the_slider_moves_the_timeline_by_keyboard_and_by_mouse(site):
    page = site.open(report(book()))
    slider = page.get_by_role("slider", name="Bucket size")
    seen = [(bars(page), stats(page)["Step"])]

    slider.focus()
    page.keyboard.press("Home")  # 0.3 M elements: 142.9 ms in Output 15.5.2
    seen.append((bars(page), stats(page)["Step"]))
    assert seen[-1][1] == "142.9 ms"
    assert slider.get_attribute("aria-valuetext") == "300,000 elements, 50 buckets, step 142.9 ms"
    page.keyboard.press("End")  # one bucket: 165.7 ms
    seen.append((bars(page), stats(page)["Step"]))
    assert seen[-1][1] == "165.7 ms"
    box = slider.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    seen.append((bars(page), stats(page)["Step"]))

    assert seen[-1][1] == "121.6 ms"
    assert len({str(drawn) for drawn, _ in seen}) == len(seen)
    assert page.eval_on_selector_all("#sweep .now", "all => all.length") == 2
    assert site.messages == []


def test_the_slider_stops_at_the_sizes_of_the_sweep(site):
    figures = report(book(sweep={"bucket_numel": [25_000_000, 300_000, 4_000_000]}))
    page = site.open(figures)
    page.get_by_role("slider", name="Bucket size").focus()

    seen = []
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
        seen.append((stats(page)["Elements of a bucket"], stats(page)["Step"]))

    # Output 15.5.2
    assert seen == [("300,000", "142.9 ms"), ("4,000,000", "121.6 ms"), ("25,000,000", "141.4 ms"), ("25,000,000", "141.4 ms")]
    assert site.messages == []


def test_a_plan_is_offered_with_config_values_to_paste_and_one_percent_is_no_cliff(site):
    figures = report(book())
    page = site.open(figures)

    assert page.locator("#advice").inner_text() == figures.outlook.advice.sentence
    assert page.locator("#config").inner_text() == "\n".join(figures.outlook.advice.config_lines)
    assert "0" in page.locator("#sweep svg").first.locator("text").all_text_contents()
    assert site.messages == []


def test_the_named_plans_are_shown(site):
    figures = report(book())
    page = site.open(figures)

    button = page.get_by_role("button", name="optimal cuts")
    button.focus()
    page.keyboard.press("Enter")

    assert button.get_attribute("aria-pressed") == "true"
    assert stats(page)["Buckets"] == str(figures.plan("optimal").row.buckets)
    assert stats(page)["Elements of a bucket"] == "cut by name"
    assert page.evaluate("() => page.shown().step_s") == figures.plan("optimal").step_s
    assert site.messages == []


def test_the_small_collectives_of_a_model_s_step_are_in_the_timeline(site):
    page = site.open(report(model_run()))

    assert "a small collective of the step" in page.locator("#timeline-legend").inner_text()
    assert page.locator("#advice").inner_text().startswith("Keep the default buckets: ")
    assert not page.locator("#config").is_visible()
    assert site.messages == []


def test_arrow_keys_move_through_the_parts_of_the_step(site):
    page = site.open(report(zero()))
    page.get_by_role("group", name="Timeline of one step").focus()

    told = []
    for key in ("Home", "ArrowRight", "End", "ArrowLeft"):
        page.keyboard.press(key)
        told.append(page.locator("#part").text_content())

    assert told[0].startswith(("all-gather of bucket", "waiting for all-gather of bucket"))
    assert told[2].startswith("optimizer: ")
    assert len(set(told)) == 4
    assert page.locator("#timeline .chosen").count() == 1
    assert site.messages == []


FOCUSED = """() => {
  const node = document.activeElement;
  return node.id || node.tagName + " " + (node.getAttribute("aria-label") || node.textContent);
}"""
NAMES = """all => all.map(node => {
  const label = node.labels && node.labels.length ? node.labels[0].textContent : "";
  return node.getAttribute("aria-label") || label || node.textContent;
})"""


def test_everything_can_be_reached_by_tab(site):
    page = site.open(report(zero()))
    page.keyboard.press("Tab")

    reached = set()
    for _ in range(40):
        reached.add(page.evaluate(FOCUSED))
        page.keyboard.press("Tab")

    wanted = {"theme", "size", "timeline", "DIV Buckets in launch order", "SUMMARY The timeline as a table"}
    assert wanted <= reached
    assert any(name.startswith("BUTTON default") for name in reached)


def test_every_control_chart_and_table_has_a_name_and_every_chart_a_table(site):
    measured = Measured("steps.jsonl", (MeasuredPlan("now", 0.01, low_s=0.009, high_s=0.02, exposed_s=0.001),))
    page = site.open(report(zero(), measured=measured))

    for summary in page.locator("summary").all():
        summary.click()

    names = page.eval_on_selector_all("button, input, summary, [role=img], [role=region], [role=group]", NAMES)
    assert len(names) > 20
    assert all(name.strip() for name in names)
    assert page.locator("svg:not([aria-hidden]):not([role=img])").count() == 0
    assert page.locator("table").count() == page.locator("table caption").count() == 6
    assert page.locator("table thead th:not([scope=col])").count() == 0
    assert page.get_by_role("table", name="Bytes of rank 0").get_by_role("row").count() == 1 + 2 * 13
    assert page.get_by_role("table", name="From steps.jsonl").get_by_role("row").count() == 2
    assert site.messages == []


# Looks #

OVERLAPS = """() => [...document.querySelectorAll("svg")].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  const boxes = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
  const isOut = box => box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  const pairs = boxes.flatMap(([name, box], index) =>
    boxes.slice(index + 1).filter(([, other]) => meet(box, other)).map(([other]) => name + " | " + other));
  return [...boxes.filter(([, box]) => isOut(box)).map(([name]) => name + " is cut off"), ...pairs];
})"""


# Tables scroll where the window is narrow; on a usual screen every column is seen.
CLIPPED = """() => [...document.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth + 1)
  .map(box => box.getAttribute("aria-label"))"""


@pytest.mark.parametrize("width", [1280, 800, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_labels_do_not_overlap_and_nothing_is_wider_than_the_window(site, width, scheme, tmp_path):
    plans = (MeasuredPlan("default", 0.0131, bucket_numel=1000), MeasuredPlan("other", 0.0123, predicted_s=0.012))
    pages = [report(zero(), measured=Measured("x.json", plans)), report(book(), dp_size=4096), report(model_run())]

    for figures in pages:
        page = site.open(figures, width=width, scheme=scheme)
        site.settle()
        image = page.screenshot(full_page=True)

        assert len(image) > 20_000
        assert page.evaluate(OVERLAPS) == []
        for summary in page.locator("summary").all():
            summary.click()
        assert width < 1280 or page.evaluate(CLIPPED) == []
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert site.messages == []


# Pixels of a cell that nothing is in, padding included.
BLANK = """() => [...document.querySelectorAll("#buckets tbody tr > *")].map(cell => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  return cell.getBoundingClientRect().height - range.getBoundingClientRect().height;
})"""


def test_on_a_phone_buckets_need_no_scrolling_to_the_side_and_have_no_blank_rows(site):
    page = site.open(report(zero(), dp_size=64), width=400)

    assert page.locator("#buckets .owners").count() == page.locator("#buckets tbody tr").count() > 1
    assert page.evaluate(CLIPPED).count("Buckets in launch order") == 0
    assert max(page.evaluate(BLANK)) < 20
    assert page.get_by_role("table", name="Buckets in launch order").is_visible()
    assert site.messages == []


def test_colours_follow_the_system_and_the_button(site):
    background = "() => getComputedStyle(document.body).backgroundColor"
    light = site.open(report(), scheme="light").evaluate(background)

    page = site.open(report(), scheme="dark")
    dark = page.evaluate(background)
    page.get_by_role("button", name="Light colours").click()
    chosen = page.evaluate(background)
    page.get_by_role("button", name="Dark colours").click()

    assert light != dark
    assert chosen == light
    assert page.evaluate(background) == dark


def test_the_charts_follow_the_width_of_the_window(site):
    page = site.open(report(), width=1280)
    wide = page.locator("#sweep svg").get_attribute("width")

    page.set_viewport_size({"width": 500, "height": 900})
    page.wait_for_function("wide => document.querySelector('#sweep svg').getAttribute('width') !== wide", arg=wide)

    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert site.messages == []


# Inputs #


def _reports():
    flat = {"latency_s": 0.0, "seconds_per_byte": 0.0}
    table = {"kind": "table", "num_ranks": 4, "tables": [{"operation": "all_reduce", "points": [[1, 1e-5], [1000, 2e-5]]}]}
    long_names = {"workload": {"tensors": tensors(1, 2, 3, name="x" * 900 + "{}")}}
    return {
        "one parameter of one element": (small(1), {}),
        "nothing but empty tensors": (small(0, 0), {}),
        "no times at all": (small(link=flat, workload={"tensors": tensors(5, 6, backward_s=0.0, forward_s=0.0)}), {}),
        "one rank": (zero(), {"dp_size": 1}),
        "a measured link": (small(link=table), {}),
        "cuts by name": (small(ddp={"bucket_cuts": ["layer.1.weight"]}), {}),
        "very long names": (small(**long_names), {}),
        "4,096 ranks": (zero(), {"dp_size": 4096}),
        "every tensor its own bucket": (small(*range(100, 700), ddp={"bucket_size": 1}), {}),
    }


@pytest.mark.parametrize("name", _reports())
def test_the_page_works_for(site, name):
    run, arguments = _reports()[name]

    page = site.open(report(run, **arguments))
    page.get_by_role("slider", name="Bucket size").focus()
    for key in ("Home", "ArrowRight", "End", "PageDown"):
        page.keyboard.press(key)
    for summary in page.locator("summary").all():
        summary.click()

    assert site.messages == []
    assert "NaN" not in page.locator("body").inner_text()
    assert (
        page.eval_on_selector_all(
            "svg *", "all => all.filter(n => [...n.attributes].some(a => /NaN|Infinity|undefined/.test(a.value))).length"
        )
        == 0
    )


def test_a_hundred_thousand_tensors_fit(site, many_report):
    html = render_page(many_report)
    page = site.open(html)
    page.get_by_role("slider", name="Bucket size").focus()
    page.keyboard.press("Home")

    assert len(html.encode()) < 1_000_000
    assert "too many buckets to draw" in page.locator("#timeline").text_content()
    page.keyboard.press("End")
    assert stats(page)["Buckets"] == "1"
    named = "() => page.data.plans.filter(plan => plan.key !== 'size').map(plan => plan.step_s)"
    assert page.evaluate(named) == [plan.step_s for plan in many_report.plans]
    assert site.messages == []


def test_names_are_text_and_nothing_else(site):
    names = [f"{HOSTILE}{index}" for index in range(3)]
    entries = [{"name": name, "numel": 500, "backward_s": 1e-3} for name in names]
    run = small(mode="reduce_scatter", workload={"tensors": entries}, ddp={"bucket_cuts": [names[1]]})
    lone_surrogate = "\ud800"
    measured = Measured(HOSTILE, (MeasuredPlan(lone_surrogate + HOSTILE, 0.1),))

    page = site.open(report(run, measured=measured, title=HOSTILE))
    for summary in page.locator("summary").all():
        summary.click()
    page.locator("#timeline").focus()
    page.keyboard.press("End")
    page.get_by_role("button", name="best size").click()

    assert page.locator("img, iframe, object, embed, link[rel=stylesheet]").count() == 0
    assert page.locator("script").count() == 2
    assert page.evaluate("() => typeof pwned") == "undefined"
    text = page.locator("#buckets").inner_text()
    assert '</script><img src=x onerror="pwned=1">&amp;\'' in text
    assert "\\u2028" in text
    assert "\\u202e" in text
    assert page.locator("h1").inner_text().startswith("</script><img")
    assert "名前 🪣" in page.locator("#measured-table").inner_text()
    assert site.messages == []


def test_the_page_is_one_request(browser, tmp_path):
    write_report(report(zero()), tmp_path / "report.html")
    served = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            served.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        context = browser.new_context()
        page = context.new_page()
        asked, said = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.goto(f"http://127.0.0.1:{server.server_address[1]}/report.html")
        page.get_by_role("slider", name="Bucket size").focus()
        page.keyboard.press("ArrowLeft")
        page.get_by_role("button", name="Dark colours").click()
        page.wait_for_load_state("networkidle")
        context.close()
        server.shutdown()
        thread.join()

    assert served == ["/report.html"]
    assert len(asked) == 1
    assert said == []
