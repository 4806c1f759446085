// Joins the data to the page.
const page = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = id => document.getElementById(id);
  const {make, draw, seconds, count, bytes, exact, percent} = chart;

  const column = packed => packed.index ? packed.index.map(index => packed.values[index]) : packed.values;
  const decoded = packed => {
    const names = [];
    let before = "";
    for (let at = 0; at < packed.length; at += 2) names.push(before = before.slice(0, packed[at]) + packed[at + 1]);
    return names;
  };
  const names = decoded(data.work.names);
  const unpack = work => simulator.prepare({...work, numel: column(work.numel), backward_s: column(work.backward_s),
    forward_s: column(work.forward_s)});
  const ready = unpack(data.work);

  // The plan that is shown: a bucket size, or one of the named plans.
  const sizes = ready.numel.filter(numel => numel > 0);
  const smallest = sizes.length ? sizes.reduce((a, b) => Math.min(a, b)) : 1;
  const total = Math.max(smallest, sizes.reduce((a, b) => a + b, 0));
  const slider = byId("size"), numelInput = byId("numel"), steps = Number(slider.max);
  const numelAt = position => Math.round(smallest * (total / smallest) ** (position / steps));
  const positionOf = numel => total === smallest ? 0
    : Math.round(steps * Math.log(Math.min(Math.max(numel, smallest), total) / smallest) / Math.log(total / smallest));
  const planOf = key => data.plans.find(plan => plan.key === key);
  const configured = planOf("config") || planOf("default"), optimal = planOf("optimal");
  const reduceName = data.mode === "all_reduce" ? "all-reduce" : "reduce-scatter";

  const ofSize = numel => {
    const buckets = simulator.bucketsOf(ready, simulator.uniformPlan(ready, numel), data.costs)
      .map(bucket => ({...bucket, firstName: names[bucket.first], lastName: names[bucket.last]}));
    return {key: null, numel, buckets, result: simulator.trace(ready, buckets, data.costs, data.overlap)};
  };
  const ofPlan = plan => {
    const buckets = plan.drawn.map(([numel, gradBytes, paramBytes, readyS, needed, neededS, reduceS, gatherS, numTensors, firstName, lastName]) =>
      ({numel, gradBytes, paramBytes, readyS, needed, neededS, reduceS, gatherS, numTensors, firstName, lastName}));
    return {key: plan.key, numel: plan.bucket_numel, buckets, result: simulator.trace(ready, buckets, data.costs, data.overlap)};
  };
  let shown = null, parts = [], chosen = -1;

  // One step #
  const colours = {forward: "forward", backward: "backward", optimizer: "optimizer"};
  const isWait = part => part.lane === "wait";
  const nameOf = part => part.lane === "compute" ? part.kind : (isWait(part) ? "waiting for " : "")
    + (part.kind === "step" ? "a small collective of the step" : (part.kind === "reduce" ? reduceName : "all-gather") + " of bucket " + part.bucket);
  const spanOf = part => seconds(part.start, shown.result.stopS) + " to " + seconds(part.stop, shown.result.stopS) + " ("
    + seconds(part.stop - part.start) + ")";
  const detailsOf = part => {
    if (part.bucket === null) return nameOf(part) + ": " + spanOf(part);
    const bucket = shown.buckets[part.bucket];
    const range = bucket.numTensors === 1 ? bucket.lastName : bucket.firstName + " to " + bucket.lastName;
    const size = part.kind === "gather" ? bucket.paramBytes : bucket.gradBytes;
    return nameOf(part) + ": " + spanOf(part) + ". " + exact(bucket.numTensors) + (bucket.numTensors === 1 ? " tensor, " : " tensors, ")
      + count(bucket.numel) + " elements, " + bytes(size) + ": " + range;
  };
  const scaleEnd = () => Math.max(configured.step_s, planOf("uniform").step_s, optimal.step_s, shown.result.stopS) || 1;

  // Neighbours too narrow to see are drawn as one.
  const visible = (list, sx) => {
    const drawn = [];
    for (const part of list) {
      const last = drawn[drawn.length - 1];
      if (last && last.kind === part.kind && sx(part.stop) - sx(last.start) < 1.5 && sx(part.start) - sx(last.stop) < 0.5) last.stop = part.stop;
      else drawn.push({...part, part});
    }
    return drawn;
  };
  let timeScale = null;
  const laneTops = {compute: 44, wait: 44, comm: 116};
  const laneHeight = 40;
  const drawTimeline = width => {
    const end = scaleEnd(), sx = timeScale = chart.scale(0, end, 1, width - 1);
    const svg = draw("svg", {width, height: 196, viewBox: `0 0 ${width} 196`, "aria-hidden": "true"},
      draw("defs", {}, draw("pattern", {id: "hatch", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"},
        draw("rect", {class: "wait-back", width: 7, height: 7}), draw("line", {class: "hatch", x1: 1, x2: 1, y1: 0, y2: 7}))));
    for (const [lane, text] of [["compute", "compute"], ["comm", "communication"]]) {
      svg.append(draw("text", {x: 1, y: laneTops[lane] - 7}, text),
        draw("rect", {class: "lane", x: 1, y: laneTops[lane], width: width - 2, height: laneHeight}));
    }
    for (const tick of chart.ticks(0, end, width / 80)) {
      const anchor = sx(tick) < 20 ? "start" : sx(tick) > width - 30 ? "end" : "middle";
      svg.append(draw("line", {class: "axis", x1: sx(tick), x2: sx(tick), y1: 160, y2: 166}),
        draw("text", {x: sx(tick), y: 181, "text-anchor": anchor}, chart.secondsTick(end)(tick)));
    }
    for (const lane of ["compute", "wait", "comm"]) {
      for (const item of visible(parts.filter(part => part.lane === lane), sx)) {
        const x = sx(item.start), wide = Math.max(0.75, sx(item.stop) - x);
        const look = isWait(item) ? {fill: "url(#hatch)"} : {class: (colours[item.kind] || item.kind) + (item.bucket % 2 ? " alt" : "")};
        const gap = wide > 3 && lane === "comm" ? 0.75 : 0;
        svg.append(draw("rect", {...look, x, y: laneTops[lane], width: wide - gap, height: laneHeight, "data-part": parts.indexOf(item.part)}));
        if (lane === "comm" && item.bucket !== null && wide > 9 + 7 * String(item.bucket).length) {
          svg.append(draw("text", {class: "on", x: x + wide / 2, y: laneTops[lane] + 25, "text-anchor": "middle"}, item.bucket));
        }
      }
    }
    const stop = sx(shown.result.stopS), best = sx(optimal.step_s), isLeft = best > width / 2;
    svg.append(draw("line", {class: "mark", x1: stop, x2: stop, y1: 30, y2: 162}));
    svg.append(draw("line", {class: "mark dashed", x1: best, x2: best, y1: 18, y2: 162}),
      draw("text", {x: best + (isLeft ? 1 : -1), y: 13, "text-anchor": isLeft ? "end" : "start"}, "optimal cuts end at " + seconds(optimal.step_s)));
    if (parts[chosen]) {
      const part = parts[chosen], x = sx(part.start);
      svg.append(draw("rect", {class: "chosen", x, y: laneTops[part.lane] - 1, width: Math.max(2, sx(part.stop) - x), height: laneHeight + 2}));
    }
    byId("timeline").replaceChildren(svg);
  };
  const choose = index => {
    chosen = index;
    byId("part").textContent = parts[index] ? detailsOf(parts[index]) : "";
    redrawTimeline();
  };
  const fillTimelineTable = () => {
    if (!byId("timeline-details").open) return;
    const most = 400, caption = "Parts of the step in order of their start"
      + (parts.length > most ? `: the first ${most} of ${exact(parts.length)}` : "");
    const rows = parts.slice(0, most).map(part => [part.lane === "comm" ? "communication" : "compute", nameOf(part),
      seconds(part.start, shown.result.stopS), seconds(part.stop, shown.result.stopS), seconds(part.stop - part.start)]);
    byId("timeline-table").replaceChildren(chart.table(caption, [["Lane"], ["Part"], ["From", true], ["To", true], ["Takes", true]], rows));
  };
  const show = next => {
    shown = next;
    const result = shown.result;
    parts = [...result.intervals].sort((a, b) => a.start - b.start || a.stop - b.stop);
    chosen = -1;
    byId("part").textContent = "";
    const sending = shown.buckets.filter(bucket => bucket.reduceS !== null).length;
    const change = configured.step_s > 0 ? result.stepS / configured.step_s - 1 : 0;
    const reference = configured.key === "config" ? "Against this config" : "Against the default";
    byId("stats").replaceChildren(...[["Step", seconds(result.stepS)], ["Exposed communication", seconds(result.exposedS)],
      ["Communication hidden", result.commS > 0 ? percent(Math.max(0, 1 - result.exposedS / result.commS)) : "none to hide"],
      ["Buckets", exact(sending)], [reference, (change > 0 ? "+" : change < 0 ? "−" : "") + chart.figures(Math.abs(change) * 100) + " %"],
    ].map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
    for (const button of byId("plans").children) button.setAttribute("aria-pressed", String(button.dataset.key === shown.key));
    if (shown.numel !== null) {
      slider.value = positionOf(shown.numel);
      numelInput.value = shown.numel;
    } else {
      numelInput.value = "";
    }
    const size = shown.numel === null ? shown.key : `${exact(shown.numel)} elements`;
    slider.setAttribute("aria-valuetext", `${size}, ${exact(sending)} buckets, step ${seconds(result.stepS)}`);
    byId("timeline").setAttribute("aria-label",
      `Timeline of one step of ${seconds(result.stepS)}: compute and communication, ${exact(parts.length)} parts`);
    redrawTimeline();
    redrawSweep();
    fillTimelineTable();
  };
  let redrawTimeline = () => {}, redrawSweep = () => {};

  const startTimeline = () => {
    byId("plans").replaceChildren(...data.plans.map(plan => {
      const button = make("button", {type: "button", "data-key": plan.key, "aria-pressed": "false", disabled: !plan.drawn,
        title: plan.drawn ? null : "too many buckets to carry in this page"}, plan.name + ", " + seconds(plan.step_s));
      button.addEventListener("click", () => show(ofPlan(plan)));
      return button;
    }));
    slider.addEventListener("input", () => show(ofSize(numelAt(Number(slider.value)))));
    numelInput.addEventListener("change", () => {
      const numel = Math.floor(Number(numelInput.value));
      if (numel >= 1 && Number.isFinite(numel)) show(ofSize(numel)); else numelInput.value = shown.numel || "";
    });
    const figure = byId("timeline");
    figure.addEventListener("keydown", event => {
      const target = {ArrowRight: chosen + 1, ArrowDown: chosen + 1, ArrowLeft: Math.max(0, chosen - 1), ArrowUp: Math.max(0, chosen - 1),
        Home: 0, End: parts.length - 1}[event.key];
      if (target === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      choose(Math.min(target, parts.length - 1));
    });
    const at = event => event.target.dataset && event.target.dataset.part !== undefined ? Number(event.target.dataset.part) : -1;
    figure.addEventListener("pointermove", event => { if (at(event) >= 0 && at(event) !== chosen) choose(at(event)); });
    figure.addEventListener("pointerdown", event => { if (at(event) >= 0) choose(at(event)); });
    byId("timeline-details").addEventListener("toggle", fillTimelineTable);
    const box = look => chart.boxSwatch({class: look});
    const entries = [[box("forward"), "forward"], [box("backward"), "backward"], [box("optimizer"), "optimizer"],
      [chart.boxSwatch({fill: "url(#hatch)"}), "waiting for communication"], [box("reduce"), reduceName + " of a bucket"], [box("gather"), "all-gather of a bucket"],
      [box("step"), "a small collective of the step"]];
    const kinds = new Set(["wait", "reduce"]);
    if (ready.forwardS > 0) kinds.add("forward");
    if (ready.backwardS > 0) kinds.add("backward");
    if (ready.optimizer_s > 0) kinds.add("optimizer");
    if (data.costs.gather) kinds.add("gather");
    if (data.costs.extra_s.length) kinds.add("step");
    const order = ["forward", "backward", "optimizer", "wait", "reduce", "gather", "step"];
    chart.legend(byId("timeline-legend"), entries.filter((_, index) => kinds.has(order[index])));
  };

  // Step over bucket size #
  const markOf = {default: "diamond", config: "square", uniform: "circle"};
  const startSweep = () => {
    const rows = data.sweep, measured = data.measured ? data.measured.plans.filter(plan => plan.x_numel !== null) : [];
    // A size beyond everything is everything in one bucket.
    const largest = Math.max(...rows.map(row => row[0]), total), xOf = numel => Math.min(numel, largest);
    const placed = data.plans.filter(plan => plan.bucket_numel !== null && markOf[plan.key]);
    const cutByName = data.plans.filter(plan => plan.key === "config" && plan.bucket_numel === null);
    const xs = [...rows.map(row => row[0]), ...measured.map(plan => xOf(plan.x_numel)), ...placed.map(plan => xOf(plan.bucket_numel))];
    const ys = [...rows.map(row => row[2]), ...data.plans.map(plan => plan.step_s), data.totals.lower_bound_s, ...measured.map(plan => plan.measured_s)];
    let [low, high] = [Math.min(...xs), Math.max(...xs)];
    if (low === high) [low, high] = [low / 2, high * 2];
    let [bottom, top] = [Math.min(...ys), Math.max(...ys)];
    if (top - bottom < 1e-3 * top || top === 0) [bottom, top] = [0, top * 1.2 || 1];
    const slack = (top - bottom) * 0.06;
    [bottom, top] = [Math.max(0, bottom - slack), top + slack];
    redrawSweep = chart.responsive(byId("sweep"), width => {
      const y = {low: bottom, high: top, ticks: chart.ticks(bottom, top, 5), format: chart.secondsTick(top)};
      const x = {low, high, log: true, ticks: chart.powers(low, high, 10, width / 60), format: chart.shortCount, label: "elements of a bucket, logarithmic"};
      if (x.ticks.length < 2) x.ticks = [low, high];
      const {svg, sx, sy, margin} = chart.plot({width, height: 300, x, y, label: "Step time over bucket size; the table below has the figures"});
      const across = (value, look) => svg.append(draw("line", {class: look, x1: margin.left, x2: width - margin.right, y1: sy(value), y2: sy(value)}));
      across(data.totals.lower_bound_s, "quiet dotted");
      across(optimal.step_s, "mark dashed");
      for (const plan of cutByName) across(plan.step_s, "quiet dashed");
      svg.append(draw("path", {class: "curve", d: chart.path(rows.map(row => [sx(row[0]), sy(row[2])]))}));
      for (const row of rows) svg.append(draw("circle", {class: "dot", cx: sx(row[0]), cy: sy(row[2]), r: 2.5}));
      if (shown && shown.key === null) {
        const xNow = Math.min(Math.max(shown.numel, low), high), yNow = Math.min(Math.max(shown.result.stepS, bottom), top);
        svg.append(draw("line", {class: "now", x1: sx(xNow), x2: sx(xNow), y1: margin.top, y2: 300 - margin.bottom}), chart.mark("now", sx(xNow), sy(yNow)));
      }
      for (const plan of placed) svg.append(chart.mark(markOf[plan.key], sx(xOf(plan.bucket_numel)), sy(plan.step_s)));
      for (const plan of measured) svg.append(chart.mark("cross", sx(xOf(plan.x_numel)), sy(plan.measured_s)));
      byId("sweep").replaceChildren(svg);
    });
    const glyph = kind => chart.swatch(chart.mark(kind, 11, 8));
    const bucketsText = number => exact(number) + (number === 1 ? " bucket" : " buckets");
    chart.legend(byId("sweep-legend"), [
      ...placed.map(plan => [glyph(markOf[plan.key]), `${plan.name}, ${count(plan.bucket_numel)} elements: ${seconds(plan.step_s)}, ${bucketsText(plan.buckets)}`]),
      ...cutByName.map(plan => [chart.lineSwatch("quiet dashed"), `${plan.name}, cut by name: ${seconds(plan.step_s)}, ${bucketsText(plan.buckets)}`]),
      [chart.lineSwatch("mark dashed"), `optimal cuts: ${seconds(optimal.step_s)}, ${bucketsText(optimal.buckets)}`],
      [chart.lineSwatch("quiet dotted"), `lower bound of any plan in this order: ${seconds(data.totals.lower_bound_s)}`],
      ...(measured.length ? [[glyph("cross"), "measured"]] : []),
      [glyph("now"), "the bucket size chosen above"],
    ]);
    const tableRows = rows.map(row => [exact(row[0]), exact(row[1]), seconds(row[2]), seconds(row[3])]);
    const marks = data.plans.map(plan => [plan.name + (plan.bucket_numel === null ? "" : ` (${exact(plan.bucket_numel)})`), exact(plan.buckets), seconds(plan.step_s), seconds(plan.exposed_s)]);
    byId("sweep-table").replaceChildren(chart.table("Simulated step for uniform sizes without padding, then the named plans",
      [["Elements", true], ["Buckets", true], ["Step", true], ["Exposed", true]], [...tableRows, ...marks]));
  };

  // Buckets #
  const nameRange = (first, last, number) => number === 1 || first === last ? [chart.nameNode(first)]
    : [chart.nameNode(first), make("span", {class: "of"}, " to "), chart.nameNode(last)];
  const muted = text => make("span", {class: "of"}, text);
  const ownersOf = entry => {
    if (!entry.owners.length) return muted("all ranks");
    const owners = make("div", {});
    let next = 0;
    for (const [first, last, firstName, lastName, number] of entry.owners) {
      if (first > next) owners.append(make("div", {class: "of"}, `… ${exact(first - next)} ranks more`));
      next = last + 1;
      owners.append(make("div", {}, muted(first === last ? `rank ${first}: ` : `ranks ${first}–${last}: `),
        ...(firstName ? nameRange(firstName, lastName, number) : [muted("padding only")])));
    }
    return owners;
  };
  const startBuckets = () => {
    const all = data.bucket_count, isSharded = data.buckets.some(([, entry]) => entry.owners.length);
    byId("buckets-text").textContent = "The layout that the config gives, in launch order, padding included."
      + (data.buckets.length < all ? ` The first and the last of ${exact(all)} buckets; the JSON file beside this page has all.` : "")
      + (data.mode === "all_reduce" ? " With all-reduce every rank owns, that is updates, all elements." : "");
    const rows = data.buckets.map(([index, entry]) => [
      exact(index), make("div", {}, ...nameRange(entry.first, entry.last, entry.params), entry.params > 1 ? muted(` (${exact(entry.params)})`) : null),
      exact(entry.numel), make("span", {}, exact(entry.padding), make("br"), muted(percent(entry.numel ? entry.padding / entry.numel : 0))),
      bytes(entry.grad_bytes), exact(entry.owners.length ? entry.shard_numel : entry.numel), ownersOf(entry), entry.closed_by]);
    byId("buckets").replaceChildren(chart.table("Buckets in launch order", [["Bucket", true], ["Parameters", false, "names"], ["Elements", true],
      ["Padding", true], ["Gradients", true], ["Per rank", true], ["Owners", false, isSharded ? "names owners" : ""], ["Closed by"]], rows));
  };

  // Memory and scaling #
  const palette = ["#4c86c6", "#e59b2f", "#35a88a", "#8ec7ea", "#c07fb0", "#9aa1a9", "#d2603a", "#d9c545"];
  const startMemory = () => {
    const categories = [...new Set(data.memory.flatMap(row => [...Object.keys(row.all_reduce), ...Object.keys(row.reduce_scatter)]))]
      .filter(name => data.memory.some(row => row.all_reduce[name] || row.reduce_scatter[name]));
    const label = name => name.replace(/_/g, " ") + (name.endsWith("s") || name.endsWith("padding") || name.endsWith("scratch") ? "" : "s");
    const sum = values => categories.reduce((all, name) => all + (values[name] || 0), 0);
    const top = Math.max(1, ...data.memory.map(row => Math.max(sum(row.all_reduce), sum(row.reduce_scatter)))) * 1.05;
    let mode = data.mode;
    const redraw = chart.responsive(byId("memory"), width => {
      const unit = 2 ** (10 * Math.floor(Math.log2(top) / 10)), y = {low: 0, high: top, ticks: chart.ticks(0, top / unit, 5).map(tick => tick * unit), format: chart.shortBytes};
      const x = {low: 0, high: data.memory.length, ticks: [], format: exact, label: "data-parallel ranks"};
      const {svg, sx, sy, margin} = chart.plot({width, height: 300, x, y, label: "Bytes of a rank by category over the number of ranks; the table below has the figures"});
      const each = sx(1) - sx(0), wide = each * 0.72, skip = Math.ceil(34 / each);
      data.memory.forEach((row, index) => {
        let filled = 0;
        categories.forEach((name, position) => {
          const value = row[mode][name] || 0;
          svg.append(draw("rect", {x: sx(index) + (each - wide) / 2, width: wide, y: sy(filled + value), height: Math.max(0, sy(filled) - sy(filled + value)),
            fill: palette[position % palette.length]}, draw("title", {}, `${row.dp_size} ranks, ${label(name)}: ${bytes(value)}`)));
          filled += value;
        });
        if (index % skip === 0) svg.append(draw("text", {x: sx(index + 0.5), y: 300 - margin.bottom + 16, "text-anchor": "middle"}, row.dp_size));
      });
      byId("memory").replaceChildren(svg);
    });
    for (const radio of document.querySelectorAll("input[name=memory]")) {
      radio.checked = radio.value === mode;
      radio.addEventListener("change", () => { mode = radio.value; redraw(); });
    }
    chart.legend(byId("memory-legend"), categories.map((name, index) => [chart.boxSwatch({fill: palette[index % palette.length]}), label(name)]));
    const rows = [["all_reduce", "all-reduce"], ["reduce_scatter", "reduce-scatter"]].flatMap(([key, name]) =>
      data.memory.map(row => [exact(row.dp_size), name, ...categories.map(category => bytes(row[key][category] || 0)), bytes(sum(row[key]))]));
    byId("memory-table").replaceChildren(chart.table("Bytes of rank 0", [["Ranks", true], ["Mode"], ...categories.map(name => [label(name), true]), ["Total", true]], rows));
  };

  const startScaling = () => {
    const rows = data.scaling, name = configured.name;
    byId("scaling-gaps").replaceChildren(...data.scaling_gaps.map(gap => make("p", {class: "note"}, "Points are missing: " + gap)));
    if (!rows.length) return;
    const values = rows.flatMap(row => [row.config_efficiency, row.optimal_efficiency]).filter(value => value !== null);
    let [low, high] = [rows[0].num_ranks, rows[rows.length - 1].num_ranks];
    if (low === high) [low, high] = [low / 2, high * 2];
    const bottom = Math.min(0.9, Math.floor(10 * Math.min(1, ...values)) / 10);
    chart.responsive(byId("scaling"), width => {
      const y = {low: bottom, high: 1.02, ticks: chart.ticks(bottom, 1, 5), format: tick => Math.round(100 * tick) + " %"};
      const x = {low, high, log: true, ticks: chart.powers(low, high, 2, width / 55), format: exact, label: "ranks, logarithmic"};
      const {svg, sx, sy, margin} = chart.plot({width, height: 280, x, y, label: "Scaling efficiency over the number of ranks; the table below has the figures"});
      for (const [key, look] of [["config_efficiency", ""], ["optimal_efficiency", " two"]]) {
        const points = rows.filter(row => row[key] !== null).map(row => [sx(row.num_ranks), sy(row[key])]);
        svg.append(draw("path", {class: "curve" + look, d: chart.path(points)}), ...points.map(([cx, cy]) => draw("circle", {class: "dot" + look, cx, cy, r: 3})));
      }
      const here = sx(data.ranks);
      svg.append(draw("line", {class: "mark dotted", x1: here, x2: here, y1: margin.top, y2: 280 - margin.bottom}));
      byId("scaling").replaceChildren(svg);
    });
    chart.legend(byId("scaling-legend"), [[chart.lineSwatch("curve"), name], [chart.lineSwatch("curve two"), "optimal cuts"],
      [chart.lineSwatch("mark dotted"), `${exact(data.ranks)} ranks, of which the rest of the page speaks`]]);
    byId("scaling-table").replaceChildren(chart.table("Step and efficiency over the number of ranks",
      [["Ranks", true], [`Step, ${name}`, true], ["Efficiency", true], ["Step, optimal cuts", true], ["Efficiency", true]],
      rows.map(row => [exact(row.num_ranks), seconds(row.config_s), percent(row.config_efficiency), seconds(row.optimal_s), percent(row.optimal_efficiency)])));
  };

  // Predicted against measured #
  const startMeasured = () => {
    if (!data.measured) return;
    byId("measured-section").hidden = false;
    const plans = data.measured.plans, rowHeight = 26, height = 54 + rowHeight * plans.length;
    const values = plans.flatMap(plan => [plan.predicted_s, plan.measured_s, plan.low_s, plan.high_s]).filter(value => value !== null);
    const reach = Math.max(...values) - Math.min(...values) || 0.1 * Math.max(...values) || 1;
    const bottom = Math.max(0, Math.min(...values) - 0.15 * reach), top = Math.max(...values) + 0.1 * reach;
    chart.responsive(byId("measured"), width => {
      const x = {low: bottom, high: top, ticks: chart.ticks(bottom, top, width / 90), format: chart.secondsTick(top), label: "step time; rows as in the table"};
      const {svg, sx, margin} = chart.plot({width, height, x, y: {low: 0, high: 1, ticks: [0], format: () => ""}, label: "Predicted and measured step times; the table below has the figures"});
      plans.forEach((plan, index) => {
        const at = margin.top + rowHeight * (index + 0.5);
        svg.append(draw("text", {x: margin.left - 10, y: at + 4, "text-anchor": "end"}, index + 1),
          draw("line", {class: "quiet", x1: sx(plan.predicted_s), x2: sx(plan.measured_s), y1: at, y2: at}));
        if (plan.low_s !== null && plan.high_s !== null) {
          svg.append(draw("path", {class: "mark", d: `M${sx(plan.low_s)} ${at - 5}V${at + 5}M${sx(plan.high_s)} ${at - 5}V${at + 5}M${sx(plan.low_s)} ${at}H${sx(plan.high_s)}`}));
        }
        svg.append(chart.mark("circle", sx(plan.predicted_s), at), chart.mark("cross", sx(plan.measured_s), at));
      });
      byId("measured").replaceChildren(svg);
    });
    chart.legend(byId("measured-legend"), [[chart.swatch(chart.mark("circle", 11, 8)), "predicted"], [chart.swatch(chart.mark("cross", 11, 8)), "measured"],
      [chart.lineSwatch("mark"), "from the lower to the upper quartile, or what the file gives"]]);
    const orDash = value => value === null ? "–" : seconds(value);
    const more = data.measured.count > plans.length ? `; the first ${plans.length} of ${exact(data.measured.count)}` : "";
    byId("measured-table").replaceChildren(chart.table("From " + data.measured.source + more, [["Row", true], ["Plan", false, "names"], ["Predicted", true], ["Measured", true],
      ["Error", true], ["Low", true], ["High", true], ["Exposed", true]], plans.map((plan, index) => [index + 1, plan.name,
      seconds(plan.predicted_s), seconds(plan.measured_s), plan.measured_s > 0 ? (plan.predicted_s >= plan.measured_s ? "+" : "−")
        + chart.figures(100 * Math.abs(plan.predicted_s / plan.measured_s - 1)) + " %" : "–", orDash(plan.low_s), orDash(plan.high_s), orDash(plan.exposed_s)])));
  };

  // The head of the page #
  const startHead = () => {
    byId("title").textContent = data.title;
    document.title = data.title + ": megabucket report";
    const gain = configured.step_s > 0 ? 1 - optimal.step_s / configured.step_s : 0;
    const reference = configured.key === "config" ? "the buckets of this config" : "the default buckets";
    byId("lead").textContent = `A step takes ${seconds(configured.step_s)} with ${reference}, ${seconds(planOf("uniform").step_s)} with the best size and `
      + `${seconds(optimal.step_s)} with optimal cuts` + (gain > 0.0005 ? `, ${chart.figures(100 * gain)} % less` : "") + `. It computes for `
      + `${seconds(data.totals.compute_s)}; one collective per tensor after backward would make it ${seconds(data.totals.no_overlap_s)}. All of this is simulated.`;
    byId("facts").replaceChildren(...data.facts.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
    byId("notes").replaceChildren(...data.notes.map(text => make("p", {class: "note"}, text)));
    chart.startTheme(byId("theme"));
  };

  startHead();
  startTimeline();
  startSweep();
  const first = configured.drawn ? ofPlan(configured) : ofSize(configured.bucket_numel || total);
  shown = first;
  redrawTimeline = chart.responsive(byId("timeline"), width => { if (parts.length || shown) drawTimeline(width); });
  show(first);
  startBuckets();
  startMemory();
  startScaling();
  startMeasured();
  return {data, names, unpack, ofSize, ofPlan, shown: () => shown};
})();
