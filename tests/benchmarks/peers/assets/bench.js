"use strict";
// Joins the data of a benchmark run to the drawings of chart.js. Everything computed here is a choice of what to show.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const {make, draw} = chart, byId = id => document.getElementById(id);
  const fixed = (value, digits) => value === null || value === undefined ? "–" : (value || 0).toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
  const ms = seconds => fixed(seconds === null ? null : seconds * 1e3, 1);
  const mb = bytes => fixed(bytes === null ? null : bytes / 1e6, 1);
  const span = (spread, digits, factor = 1) => spread ? `${fixed(spread.median * factor, digits)} (${fixed(spread.low * factor, digits)} to ${fixed(spread.high * factor, digits)})` : "–";
  const titleOf = name => data.systems[name].title, isOurs = name => data.systems[name].role === "ours";
  const PARTS = ["forward", "backward", "sync", "optimizer"], ROW = 26;

  // Horizontal rows with a name each; returns the drawing, the scale and where a row begins.
  const rows = (width, names, {low, high, ticks, format, label}) => {
    const left = Math.min(430, Math.max(120, width * 0.36)), right = 20, height = names.length * ROW + 44;
    const svg = draw("svg", {width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label + "; the table below has the figures"});
    const sx = chart.scale(low, high, left, width - right), top = index => 6 + index * ROW;
    for (const tick of ticks) {
      svg.append(draw("line", {class: "grid", x1: sx(tick), x2: sx(tick), y1: 0, y2: height - 36}),
        draw("text", {x: sx(tick), y: height - 20, "text-anchor": "middle"}, format(tick)));
    }
    svg.append(draw("text", {x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle"}, label));
    const most = Math.floor((left - 10) / 8.2);
    names.forEach((name, index) => {
      const title = titleOf(name), shown = title.length > most ? title.slice(0, most - 1) + "…" : title;
      svg.append(draw("text", {class: "row" + (isOurs(name) ? " ours" : ""), x: left - 8, y: top(index) + 15, "text-anchor": "end"}, draw("title", {}, title), shown));
    });
    return {svg, sx, top, height};
  };
  const whiskers = (svg, sx, y, spread, factor = 1) => svg.append(
    draw("line", {class: "whisker", x1: sx(spread.low * factor), x2: sx(spread.high * factor), y1: y, y2: y}), chart.mark("diamond", sx(spread.median * factor), y));

  const fill = (select, values, textOf) => select.replaceChildren(...values.map((value, index) => make("option", {value: index}, textOf(value))));
  const distinct = values => [...new Set(values)];

  // Steps and ratios of one cell #
  const linkOf = cell => `${cell.link.name}, ${cell.ranks} rank${cell.ranks === 1 ? "" : "s"}`;
  const models = distinct(data.cells.map(cell => cell.model)), links = distinct(data.cells.map(linkOf));
  const chosen = () => data.cells.find(cell => cell.model === models[byId("model").value] && linkOf(cell) === links[byId("link").value]);
  const nothing = text => make("p", {class: "hint"}, text);
  const drawBars = width => {
    const cell = chosen();
    if (!cell) return byId("bars").replaceChildren(nothing("This model was not measured on this link."));
    const names = Object.keys(cell.systems), bounds = Object.entries(cell.bounds_s || {});
    const high = 1e3 * 1.05 * Math.max(...names.map(name => Math.max(cell.systems[name].step_s.high, PARTS.reduce((all, part) => all + cell.systems[name].parts_s[part], 0))), ...bounds.map(([, bound]) => bound.median));
    const {svg, sx, top, height} = rows(width, names, {low: 0, high, ticks: chart.ticks(0, high, width / 130), format: value => fixed(value, high < 10 ? 1 : 0), label: "milliseconds"});
    names.forEach((name, index) => {
      const figures = cell.systems[name];
      let at = 0;
      for (const part of PARTS) {
        const next = at + figures.parts_s[part] * 1e3;
        svg.append(draw("rect", {class: part, x: sx(at), width: Math.max(0, sx(next) - sx(at)), y: top(index), height: ROW - 8}, draw("title", {}, `${titleOf(name)}: ${part} ${ms(figures.parts_s[part])} ms`)));
        at = next;
      }
      whiskers(svg, sx, top(index) + (ROW - 8) / 2, figures.step_s, 1e3);
    });
    bounds.forEach(([, bound], index) => svg.append(draw("line", {class: "mark " + (index ? "dotted" : "dashed"), x1: sx(bound.median * 1e3), x2: sx(bound.median * 1e3), y1: 0, y2: height - 36})));
    byId("bars").replaceChildren(svg);
    chart.legend(byId("bars-legend"), [...PARTS.map(part => [chart.boxSwatch({class: part}), part === "sync" ? "sync called by the program" : part]),
      [chart.swatch(chart.mark("diamond", 11, 8)), "median step, quartiles"],
      ...bounds.map(([mode, bound], index) => [chart.lineSwatch("mark " + (index ? "dotted" : "dashed")), `planner's lower bound, ${mode.replace("_", "-")}: ${ms(bound.median)} ms`])]);
  };
  const drawRatios = width => {
    const cell = chosen(), to = document.querySelector("input[name=ratio]:checked").value;
    const names = cell ? Object.keys(cell.systems).filter(name => cell.systems[name][to]) : [];
    if (!names.length) return byId("ratios").replaceChildren(nothing("Nothing to compare with."));
    const spreads = names.map(name => cell.systems[name][to]);
    const low = Math.min(0.9, ...spreads.map(one => one.low)) - 0.05, high = Math.max(1.1, ...spreads.map(one => one.high)) + 0.05;
    const other = to === "to_ddp" ? "torch DDP" : "the best peer, " + titleOf(cell.best_peer);
    const {svg, sx, top, height} = rows(width, names, {low, high, ticks: chart.ticks(low, high, width / 130), format: value => fixed(value, 2), label: `times as fast as ${other}`});
    svg.append(draw("line", {class: "one", x1: sx(1), x2: sx(1), y1: 0, y2: height - 36}));
    spreads.forEach((spread, index) => whiskers(svg, sx, top(index) + (ROW - 8) / 2, spread));
    byId("ratios").replaceChildren(svg);
  };
  const fillTable = () => {
    const cell = chosen();
    byId("absent").replaceChildren(...Object.entries(cell ? cell.absent : {}).map(([name, reason]) => make("p", {class: "note"}, `absent: ${titleOf(name)}: ${reason}`)));
    if (!cell) return byId("steps-table").replaceChildren();
    const body = Object.entries(cell.systems).map(([name, figures]) => [titleOf(name) + (name === cell.best_peer ? " (best peer)" : ""), span(figures.step_s, 1, 1e3), ms(figures.step_s.quiet),
      span(figures.to_ddp, 2), span(figures.to_best, 2), PARTS.map(part => ms(figures.parts_s[part])).join(" / "), ms(figures.cpu_s.median), fixed(figures.counts.all.calls, figures.counts.all.calls % 1 ? 1 : 0),
      mb(figures.counts.all.bytes), figures.wire_bytes ? mb(figures.wire_bytes.median) : "–", fixed(figures.faults.median, 0), figures.loss_difference === null ? "not checked" : figures.loss_difference.toExponential(0)]);
    const about = `${cell.model}, ${fixed(cell.numel / 1e6, 2)} M parameters in ${fixed(cell.tensors, 0)} tensors, ${linkOf(cell)}`;
    byId("steps-table").replaceChildren(chart.table(about, [["System"], ["Step, ms", true], ["Quiet, ms", true], ["× torch DDP", true], ["× best peer", true],
      ["Forward / backward / sync / optimizer, ms", true], ["CPU, ms", true], ["Calls", true], ["MB", true], ["MB on the wire", true], ["Page faults", true], ["Loss off by", true]], body));
  };

  // Our best of each mode over all links #
  const fillLinks = () => {
    const modes = ["all_reduce", "reduce_scatter"];
    const body = data.cells.filter(cell => cell.model === models[byId("model").value]).flatMap(cell => modes.flatMap(mode => {
      const ours = Object.keys(cell.systems).filter(name => data.systems[name].mode === mode && cell.systems[name].to_best);
      if (!ours.length) return [];
      const name = ours.reduce((best, one) => cell.systems[one].step_s.median < cell.systems[best].step_s.median ? one : best);
      const figures = cell.systems[name], bound = cell.bounds_s ? cell.bounds_s[mode] : null, won = figures.to_best.median >= 1;
      return [[linkOf(cell), titleOf(name), titleOf(cell.best_peer), make("span", {class: won ? "won" : "lost"}, span(figures.to_best, 2) + (won ? " faster" : " slower")),
        ms(figures.step_s.median), bound === null ? "–" : ms(bound.median), bound === null ? "–" : `${fixed(figures.over_bound.median, 3)} (${fixed(figures.over_bound.quiet, 3)})`]];
    }));
    byId("links-table").replaceChildren(chart.table("Ours against the best peer, and against the lower bound", [["Link"], ["Ours"], ["Best peer"],
      ["Its time over ours", true], ["Step, ms", true], ["Lower bound, ms", true], ["Step over it (quiet)", true]], body));
  };
  const startSteps = () => {
    fill(byId("model"), models, model => model);
    fill(byId("link"), links, link => link);
    for (const id of ["steps-section", "ratios-section", "links-section"]) byId(id).hidden = false;
    const redraws = [chart.responsive(byId("bars"), drawBars), chart.responsive(byId("ratios"), drawRatios)];
    const again = () => {
      for (const redraw of redraws) redraw();
      fillTable();
      fillLinks();
    };
    for (const id of ["model", "link"]) byId(id).addEventListener("change", again);
    byId("ratio-to").addEventListener("change", redraws[1]);
    fillTable();
    fillLinks();
  };

  // Memory and hooks #
  const startMemory = () => {
    byId("memory-section").hidden = false;
    fill(byId("memory-model"), data.memory, cell => `${cell.model}, ${cell.ranks} rank${cell.ranks === 1 ? "" : "s"}`);
    const cellOf = () => data.memory[byId("memory-model").value], formulaOf = row => row.formula_bytes || row.expected_bytes;
    const redraw = chart.responsive(byId("memory"), width => {
      const held = Object.entries(cellOf().rows).filter(([, row]) => row.held_bytes !== null);
      if (!held.length) return byId("memory").replaceChildren(nothing("The bare model did not run, so there is nothing to subtract."));
      const high = 1.05 * Math.max(...held.map(([, row]) => Math.max(row.held_bytes, formulaOf(row)))) / 1e6;
      const {svg, sx, top} = rows(width, held.map(([name]) => name), {low: 0, high, ticks: chart.ticks(0, high, width / 130), format: value => fixed(value, high < 5 ? 1 : 0), label: "MB"});
      held.forEach(([name, row], index) => svg.append(
        draw("rect", {class: "backward", x: sx(0), width: Math.max(0, sx(row.held_bytes / 1e6) - sx(0)), y: top(index), height: ROW - 8}, draw("title", {}, `${titleOf(name)}: ${mb(row.held_bytes)} MB`)),
        chart.mark("diamond", sx(formulaOf(row) / 1e6), top(index) + (ROW - 8) / 2)));
      byId("memory").replaceChildren(svg);
    });
    const fillMemory = () => byId("memory-table").replaceChildren(
      chart.table("Peak of the largest rank above what it had before the model", [["System"], ["Peak, MB", true], ["Held, MB", true], ["Formula, MB", true], ["Held over formula", true]],
        Object.entries(cellOf().rows).map(([name, row]) => [titleOf(name), mb(row.peak_bytes), mb(row.held_bytes), mb(formulaOf(row)) + (row.formula_bytes ? "" : " by B/parameter"), row.over_formula === null ? "–" : chart.percent(row.over_formula)])),
      ...Object.entries(cellOf().absent).map(([name, reason]) => make("p", {class: "note"}, `absent: ${titleOf(name)}: ${reason}`)));
    byId("memory-model").addEventListener("change", () => { redraw(); fillMemory(); });
    fillMemory();
  };
  const startHooks = () => {
    byId("hooks-section").hidden = false;
    const names = distinct(data.hooks.flatMap(cell => Object.keys(cell.extra_us)));
    byId("hooks-table").replaceChildren(chart.table("Microseconds per parameter by the clock, and of CPU time", [["Model"], ["Bare backward, ms", true], ...names.map(name => [titleOf(name), true])],
      data.hooks.map(cell => [`${cell.model}, ${fixed(cell.num_params, 0)} tensors`, ms(cell.bare_s.median),
        ...names.map(name => cell.extra_us[name] ? `${span(cell.extra_us[name], 2)}, CPU ${fixed(cell.extra_us[name].cpu, 2)}` : "–")])),
      ...data.hooks.flatMap(cell => Object.entries(cell.absent).map(([name, reason]) => make("p", {class: "note"}, `absent: ${titleOf(name)}: ${reason}`))));
  };

  byId("title").textContent = data.title;
  document.title = data.title;
  byId("facts").replaceChildren(...data.facts.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
  byId("problems").replaceChildren(...data.problems.map(text => make("p", {class: "note lost"}, "Problem: " + text)));
  chart.startTheme(byId("theme"));
  if (data.cells.length) startSteps();
  if (data.memory.length) startMemory();
  if (data.hooks.length) startHooks();
})();
