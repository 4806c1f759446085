"""One self-contained HTML page of results: no network, data inside, everything that comes from a run shown as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from megabucket.chaos.outcome import CellOutcome
from megabucket.chaos.verdict import FAILING, VerdictName
from megabucket.report.page import as_script_data

_GOOD: Final = frozenset({VerdictName.RIGHT, VerdictName.NAMED})
_NEUTRAL: Final = frozenset({VerdictName.SKIPPED})


def render_page(outcomes: Sequence[CellOutcome], *, facts: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        outcomes: of one system or of several.
        facts: shown at the top: versions, seed, time.
    """
    data = {
        "facts": dict(facts),
        "verdicts": {name.value: {"meaning": name.meaning, "look": _look(name)} for name in VerdictName},
        "cells": [one.to_dict() for one in outcomes],
    }
    return _PAGE.replace("@DATA@", as_script_data(data))


def _look(name: VerdictName) -> str:
    if name in _GOOD:
        return "good"
    if name in _NEUTRAL:
        return "neutral"
    return "bad" if name in FAILING else "poor"


_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>megabucket chaos</title>
<style>
:root { color-scheme: light dark; --line: #8886; --good: #2e7d3233; --poor: #f9a82544; --bad: #c6282877; --neutral: #8882; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 84rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { border: 1px solid var(--line); padding: .15rem .45rem; text-align: left; }
thead th { position: sticky; top: 0; background: Canvas; font-weight: 600; }
td.count { text-align: right; font-variant-numeric: tabular-nums; }
.good { background: var(--good); } .poor { background: var(--poor); }
.bad { background: var(--bad); font-weight: 600; } .neutral { background: var(--neutral); }
td button { all: unset; cursor: pointer; } td button:focus-visible { outline: 2px solid; }
.scroll { overflow: auto; max-height: 75vh; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); padding: .7rem; }
pre { max-height: 60vh; overflow: auto; }
label { margin-right: 1.2rem; } dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; } dd { margin: 0; }
</style>
</head>
<body>
<h1>megabucket chaos</h1>
<p>Each cell is one fault on real processes. Every gradient and weight of every step on every rank was compared with a
single process that trained alone.</p>
<noscript>This page draws itself with the script it carries.</noscript>
<dl id="facts"></dl>
<h2>Counts</h2>
<div id="counts"></div>
<dl id="meanings"></dl>
<h2>Matrix</h2>
<p><label>System <select id="system"></select></label><label>Kind <input id="filter" type="search" placeholder="any"></label>
<label><input id="faults" type="checkbox"> only what is not RIGHT or NAMED</label></p>
<div class="scroll"><table id="matrix"></table></div>
<h2 id="chosen">Details</h2>
<pre id="details">Choose a cell.</pre>
<script type="application/json" id="data">@DATA@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const make = (tag, text, look) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (look) node.className = look;
  return node;
};
const byId = id => document.getElementById(id);
const systems = [...new Set(data.cells.map(cell => cell.system))];
const pairs = (list, entries) => {
  for (const [name, text] of entries) list.append(make("dt", name), make("dd", text));
};
pairs(byId("facts"), Object.entries(data.facts));
const used = Object.keys(data.verdicts).filter(name => data.cells.some(cell => cell.verdict === name));
pairs(byId("meanings"), used.map(name => [name, data.verdicts[name].meaning]));

const counts = make("table"), head = make("tr");
for (const text of ["system", "cells", ...Object.keys(data.verdicts)]) head.append(make("th", text));
counts.append(head);
for (const system of systems) {
  const cells = data.cells.filter(cell => cell.system === system), row = make("tr");
  row.append(make("td", system), make("td", cells.length, "count"));
  for (const name of Object.keys(data.verdicts)) {
    const count = cells.filter(cell => cell.verdict === name).length;
    row.append(make("td", count, "count " + (count ? data.verdicts[name].look : "")));
  }
  counts.append(row);
}
byId("counts").append(counts);

const setup = cell => cell.combo.num_ranks + " " + cell.combo.mode + (cell.combo.overlaps ? " overlap" : "");
const key = name => name.slice(2) + name.slice(0, 2);
const setups = [...new Set(data.cells.map(setup))].sort((a, b) => key(a) < key(b) ? -1 : 1);
const show = cell => {
  byId("chosen").textContent = cell.cell + ": " + cell.verdict;
  byId("details").textContent = cell.says + "\\n\\n" + (cell.reason ? cell.reason + "\\n\\n" : "")
    + (cell.text ? cell.error + ": " + cell.text + "\\n\\n" : "") + JSON.stringify(cell, null, 1);
};
const draw = () => {
  const system = byId("system").value, filter = byId("filter").value.toLowerCase(), onlyFaults = byId("faults").checked;
  const wanted = data.cells.filter(cell => cell.system === system
    && (cell.kind + "/" + cell.place).toLowerCase().includes(filter)
    && !(onlyFaults && data.verdicts[cell.verdict].look === "good"));
  const rows = new Map();
  for (const cell of wanted) {
    const name = cell.kind + " / " + cell.place;
    if (!rows.has(name)) rows.set(name, new Map());
    rows.get(name).set(setup(cell), cell);
  }
  const table = byId("matrix"), top = make("thead"), titles = make("tr");
  titles.append(make("th", "kind / place"));
  for (const name of setups) titles.append(make("th", name));
  top.append(titles);
  table.replaceChildren(top);
  for (const [name, cells] of [...rows].sort()) {
    const row = make("tr"), title = make("td", name);
    title.title = [...cells.values()][0].says;
    row.append(title);
    for (const column of setups) {
      const cell = cells.get(column), box = make("td", undefined, cell ? data.verdicts[cell.verdict].look : "");
      if (cell) {
        const seconds = cell.detected_s === null ? "" : " " + cell.detected_s.toFixed(2) + " s";
        const button = make("button", cell.verdict + seconds);
        button.title = (cell.reason || cell.error || cell.says).slice(0, 400);
        button.addEventListener("click", () => show(cell));
        box.append(button);
      }
      row.append(box);
    }
    table.append(row);
  }
};
for (const system of systems) byId("system").append(make("option", system));
for (const id of ["system", "filter", "faults"]) byId(id).addEventListener("input", draw);
draw();
</script>
</body>
</html>
"""
