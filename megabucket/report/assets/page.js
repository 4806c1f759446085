// Joins the data to the page. Computes no times: every plan comes with its timeline.
const page = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = id => document.getElementById(id);
  const {make, draw, seconds, count, bytes, exact, percent} = chart;

  // The plans of the sweep, which the slider moves over, and the named ones.
  const sized = data.plans.filter(plan => plan.key === "size"), named = data.plans.filter(plan => plan.key !== "size");
  const planOf = key => named.find(plan => plan.key === key);
  const configured = planOf("config") || planOf("default"), optimal = planOf("optimal");
  const reduceName = data.mode === "all_reduce" ? "all-reduce" : "reduce-scatter";
  const kindOf = {bucket: "reduce", "param gather": "gather", "step collective": "step"};
  const slider = byId("size");
  let shown = null, parts = [], chosen = -1;
  let redrawTimeline = () => {}, redrawSweep = () => {};

  // One step #
  const partsOf = plan => (plan.parts || []).map(([lane, label, start, stop]) => {
    const [, name, number] = label.match(/^(.*?) ?(\d*)$/);
    return {lane, kind: kindOf[name] || name, bucket: number === "" ? -1 : Number(number), start: start * plan.step_s, stop: stop * plan.step_s};
  });
  const isWait = part => part.lane === "wait";
  const ofBucket = part => (part.kind === "reduce" ? reduceName : "all-gather") + (part.bucket < 0 ? " of several buckets" : " of bucket " + part.bucket);
  const nameOf = part => part.lane === "compute" ? part.kind
    : (isWait(part) ? "waiting for " : "") + (part.kind === "step" ? "a small collective of the step" : ofBucket(part));
  const spanOf = part => seconds(part.start, shown.step_s) + " to " + seconds(part.stop, shown.step_s) + " (" + seconds(part.stop - part.start) + ")";
  const detailsOf = part => {
    const told = nameOf(part) + ": " + spanOf(part);
    if (part.bucket < 0 || !shown.sizes) return told;
    const [tensors, gradBytes, paramBytes] = shown.sizes[part.bucket];
    return told + ". " + exact(tensors) + (tensors === 1 ? " tensor, " : " tensors, ") + bytes(part.kind === "gather" ? paramBytes : gradBytes);
  };
  const changeOf = plan => chart.change(configured.step_s > 0 ? plan.step_s / configured.step_s - 1 : 0);
  const scaleEnd = () => Math.max(...named.map(plan => plan.step_s), shown.step_s) || 1;
  const laneTops = {compute: 44, wait: 44, comm: 116};
  const laneHeight = 40;
  const drawTimeline = width => {
    const end = scaleEnd(), sx = chart.scale(0, end, 1, width - 1);
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
    parts.forEach((part, index) => {
      const x = sx(part.start), wide = Math.max(0.75, sx(part.stop) - x);
      const look = isWait(part) ? {fill: "url(#hatch)"} : {class: part.kind + (part.bucket > 0 && part.bucket % 2 ? " alt" : "")};
      const gap = wide > 3 && part.lane === "comm" ? 0.75 : 0;
      svg.append(draw("rect", {...look, x, y: laneTops[part.lane], width: wide - gap, height: laneHeight, "data-part": index}));
      if (part.lane === "comm" && part.bucket >= 0 && wide > 9 + 7 * String(part.bucket).length) {
        svg.append(draw("text", {class: "on", x: x + wide / 2, y: laneTops.comm + 25, "text-anchor": "middle"}, part.bucket));
      }
    });
    if (!shown.parts) svg.append(draw("text", {x: width / 2, y: laneTops.comm + 25, "text-anchor": "middle"}, "too many buckets to draw"));
    const stop = sx(shown.step_s), best = sx(optimal.step_s), isLeft = best > width / 2;
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
      seconds(part.start, shown.step_s), seconds(part.stop, shown.step_s), seconds(part.stop - part.start)]);
    byId("timeline-table").replaceChildren(chart.table(caption, [["Lane"], ["Part"], ["From", true], ["To", true], ["Takes", true]], rows));
  };
  const show = plan => {
    shown = plan;
    parts = partsOf(plan);
    chosen = -1;
    byId("part").textContent = "";
    const reference = configured.key === "config" ? "Against this config" : "Against the default";
    const size = plan.bucket_numel === null ? "cut by name" : exact(plan.bucket_numel);
    byId("stats").replaceChildren(...[["Step", seconds(plan.step_s)], [reference, changeOf(plan)], ["Exposed communication", seconds(plan.exposed_s)],
      ["Communication hidden", plan.hidden === null ? "–" : percent(plan.hidden)], ["Buckets", exact(plan.buckets)], ["Elements of a bucket", size],
    ].map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
    for (const button of byId("plans").children) button.setAttribute("aria-pressed", String(button.dataset.key === plan.key));
    if (plan.key === "size") slider.value = sized.indexOf(plan);
    slider.setAttribute("aria-valuetext", `${plan.name}, ${exact(plan.buckets)} buckets, step ${seconds(plan.step_s)}`);
    byId("timeline").setAttribute("aria-label",
      `Timeline of one step of ${seconds(plan.step_s)}: compute and communication, ${exact(parts.length)} parts`);
    redrawTimeline();
    redrawSweep();
    fillTimelineTable();
  };

  const startTimeline = () => {
    byId("plans").replaceChildren(...named.map(plan => {
      const button = make("button", {type: "button", "data-key": plan.key, "aria-pressed": "false"},
        `${plan.name}, ${seconds(plan.step_s)}` + (plan === configured ? "" : ` (${changeOf(plan)})`));
      button.addEventListener("click", () => show(plan));
      return button;
    }));
    slider.max = sized.length - 1;
    const above = sized.findIndex(plan => plan.bucket_numel >= (configured.bucket_numel || 0));
    slider.value = above < 0 ? sized.length - 1 : above;
    slider.addEventListener("input", () => show(sized[Number(slider.value)]));
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
    const texts = {forward: "forward", backward: "backward", optimizer: "optimizer", wait: "waiting for communication", reduce: reduceName + " of a bucket",
      gather: "all-gather of a bucket", step: "a small collective of the step"};
    const seen = new Set(data.plans.flatMap(plan => partsOf(plan).map(part => isWait(part) ? "wait" : part.kind)));
    chart.legend(byId("timeline-legend"), Object.entries(texts).filter(([kind]) => seen.has(kind))
      .map(([kind, text]) => [chart.boxSwatch(kind === "wait" ? {fill: "url(#hatch)"} : {class: kind}), text]));
  };

  // Step over bucket size #
  const markOf = {default: "diamond", config: "square", uniform: "circle"};
  const startSweep = () => {
    const measured = data.measured ? data.measured.plans.filter(plan => plan.bucket_numel !== null) : [];
    // A size beyond everything is everything in one bucket.
    const largest = Math.max(...sized.map(plan => plan.bucket_numel)), xOf = numel => Math.min(numel, largest);
    const placed = named.filter(plan => plan.bucket_numel !== null && markOf[plan.key]);
    const cutByName = named.filter(plan => plan.key === "config" && plan.bucket_numel === null);
    const xs = [...sized.map(plan => plan.bucket_numel), ...measured.map(plan => xOf(plan.bucket_numel)), ...placed.map(plan => xOf(plan.bucket_numel))];
    const ys = [...data.plans.map(plan => plan.step_s), data.lower_bound_s, ...measured.map(plan => plan.measured_s)];
    let [low, high] = [Math.min(...xs), Math.max(...xs)];
    if (low === high) [low, high] = [low / 2, high * 2];
    const top = Math.max(...ys) * 1.06 || 1;  // from zero, so that one percent looks like one percent
    redrawSweep = chart.responsive(byId("sweep"), width => {
      const y = {low: 0, high: top, ticks: chart.ticks(0, top, 5), format: chart.secondsTick(top)};
      const x = {low, high, log: true, ticks: chart.powers(low, high, 10, width / 60), format: chart.shortCount, label: "elements of a bucket, logarithmic"};
      if (x.ticks.length < 2) x.ticks = [low, high];
      const {svg, sx, sy, margin} = chart.plot({width, height: 300, x, y, label: "Step time over bucket size; the table below has the figures"});
      const across = (value, look) => svg.append(draw("line", {class: look, x1: margin.left, x2: width - margin.right, y1: sy(value), y2: sy(value)}));
      across(data.lower_bound_s, "quiet dotted");
      across(optimal.step_s, "mark dashed");
      for (const plan of cutByName) across(plan.step_s, "quiet dashed");
      svg.append(draw("path", {class: "curve", d: chart.path(sized.map(plan => [sx(plan.bucket_numel), sy(plan.step_s)]))}));
      for (const plan of sized) svg.append(draw("circle", {class: "dot", cx: sx(plan.bucket_numel), cy: sy(plan.step_s), r: 2.5}));
      if (shown && shown.key === "size") {
        const [xNow, yNow] = [sx(shown.bucket_numel), sy(shown.step_s)];
        svg.append(draw("line", {class: "now", x1: xNow, x2: xNow, y1: margin.top, y2: 300 - margin.bottom}), chart.mark("now", xNow, yNow));
      }
      for (const plan of placed) svg.append(chart.mark(markOf[plan.key], sx(xOf(plan.bucket_numel)), sy(plan.step_s)));
      for (const plan of measured) svg.append(chart.mark("cross", sx(xOf(plan.bucket_numel)), sy(plan.measured_s)));
      byId("sweep").replaceChildren(svg);
    });
    const glyph = kind => chart.swatch(chart.mark(kind, 11, 8));
    const bucketsText = number => exact(number) + (number === 1 ? " bucket" : " buckets");
    chart.legend(byId("sweep-legend"), [
      ...placed.map(plan => [glyph(markOf[plan.key]), `${plan.name}, ${count(plan.bucket_numel)} elements: ${seconds(plan.step_s)}, ${bucketsText(plan.buckets)}`]),
      ...cutByName.map(plan => [chart.lineSwatch("quiet dashed"), `${plan.name}, cut by name: ${seconds(plan.step_s)}, ${bucketsText(plan.buckets)}`]),
      [chart.lineSwatch("mark dashed"), `optimal cuts: ${seconds(optimal.step_s)}, ${bucketsText(optimal.buckets)}`],
      [chart.lineSwatch("quiet dotted"), `lower bound of any plan in this order: ${seconds(data.lower_bound_s)}`],
      ...(measured.length ? [[glyph("cross"), "measured"]] : []),
      [glyph("now"), "the bucket size chosen above"],
    ]);
    const rowOf = plan => [plan.key === "size" ? plan.name : plan.name + (plan.bucket_numel === null ? "" : ` (${exact(plan.bucket_numel)} elements)`),
      exact(plan.buckets), seconds(plan.step_s), seconds(plan.exposed_s), plan.hidden === null ? "–" : percent(plan.hidden)];
    byId("sweep-table").replaceChildren(chart.table("Simulated step for each bucket size, then for the named plans",
      [["Plan"], ["Buckets", true], ["Step", true], ["Exposed", true], ["Hidden", true]], data.plans.map(rowOf)));
  };

  // Buckets #
  const nameRange = (first, last, number) => number === 1 || first === last ? [chart.nameNode(first)]
    : [chart.nameNode(first), make("span", {class: "of"}, " to "), chart.nameNode(last)];
  const muted = text => make("span", {class: "of"}, text);
  const ownersOf = entry => {
    if (!entry.owners.length) return muted("all ranks");
    const owners = make("div", {});
    let next = 0;
    for (const owner of entry.owners) {
      const {first_rank: first, last_rank: last} = owner;
      if (first > next) owners.append(make("div", {class: "of"}, `… ${exact(first - next)} ranks more`));
      next = last + 1;
      owners.append(make("div", {}, muted(first === last ? `rank ${first}: ` : `ranks ${first}–${last}: `),
        ...(owner.num_params ? nameRange(owner.first_param, owner.last_param, owner.num_params) : [muted("padding only")])));
    }
    return owners;
  };
  const startBuckets = () => {
    const all = data.bucket_count, isSharded = data.buckets.some(entry => entry.owners.length);
    byId("buckets-text").textContent = "The layout that the config gives, in launch order, in elements, padding included."
      + (data.buckets.length < all ? ` The first and the last of ${exact(all)} buckets; the JSON file beside this page has all.` : "")
      + (data.mode === "all_reduce" ? " With all-reduce every rank owns, that is updates, all elements." : "");
    const rows = data.buckets.map(entry => [
      exact(entry.index), make("div", {}, ...nameRange(entry.first_param, entry.last_param, entry.num_params), entry.num_params > 1 ? muted(` (${exact(entry.num_params)})`) : null),
      make("span", {}, exact(entry.numel), make("br"), muted(bytes(entry.grad_bytes))),
      make("span", {}, exact(entry.padding_numel), make("br"), muted(percent(entry.numel ? entry.padding_numel / entry.numel : 0))),
      ...(isSharded ? [exact(entry.owners.length ? entry.shard_numel : entry.numel), ownersOf(entry)] : []), entry.closed_by]);
    byId("buckets").replaceChildren(chart.table("Buckets in launch order", [["Bucket", true], ["Parameters", false, "names"], ["Elements", true],
      ["Padding", true], ...(isSharded ? [["Per rank", true], ["Owners", false, "names owners"]] : []), ["Closed by"]], rows));
  };

  // Memory and scaling #
  const palette = ["#4c86c6", "#e59b2f", "#35a88a", "#8ec7ea", "#c07fb0", "#9aa1a9", "#d2603a", "#d9c545"];
  const startMemory = () => {
    const categories = Object.keys(data.memory[0].all_reduce)
      .filter(name => data.memory.some(row => row.all_reduce[name] || row.reduce_scatter[name]));
    const label = name => name.replace(/_bytes$/, "").replace(/_/g, " ");
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
    let [low, high] = [rows[0].num_ranks, rows[rows.length - 1].num_ranks];
    if (low === high) [low, high] = [low / 2, high * 2];
    chart.responsive(byId("scaling"), width => {
      const y = {low: 0, high: 1.02, ticks: chart.ticks(0, 1, 5), format: tick => Math.round(100 * tick) + " %"};
      const x = {low, high, log: true, ticks: chart.powers(low, high, 2, width / 55), format: exact, label: "ranks, logarithmic"};
      const {svg, sx, sy, margin} = chart.plot({width, height: 280, x, y, label: "Scaling efficiency over the number of ranks; the table below has the figures"});
      for (const [key, look] of [["config", ""], ["optimal", " two"]]) {
        const points = rows.map(row => [sx(row.num_ranks), sy(row[key].efficiency)]);
        svg.append(draw("path", {class: "curve" + look, d: chart.path(points)}), ...points.map(([cx, cy]) => draw("circle", {class: "dot" + look, cx, cy, r: 3})));
      }
      const here = sx(data.dp_size);
      svg.append(draw("line", {class: "mark dotted", x1: here, x2: here, y1: margin.top, y2: 280 - margin.bottom}));
      byId("scaling").replaceChildren(svg);
    });
    chart.legend(byId("scaling-legend"), [[chart.lineSwatch("curve"), name], [chart.lineSwatch("curve two"), "optimal cuts"],
      [chart.lineSwatch("mark dotted"), `${exact(data.dp_size)} ranks, as in the other sections`]]);
    byId("scaling-table").replaceChildren(chart.table("Step and efficiency over the number of ranks",
      [["Ranks", true], [`Step, ${name}`, true], ["Efficiency", true], ["Step, optimal cuts", true], ["Efficiency", true]],
      rows.map(row => [exact(row.num_ranks), seconds(row.config.step_s), percent(row.config.efficiency), seconds(row.optimal.step_s), percent(row.optimal.efficiency)])));
  };

  // Predicted against measured #
  const startMeasured = () => {
    if (!data.measured) return;
    byId("measured-section").hidden = false;
    const plans = data.measured.plans, rowHeight = 26, height = 54 + rowHeight * plans.length;
    const values = plans.flatMap(plan => [plan.predicted_s, plan.measured_s, plan.low_s, plan.high_s]).filter(value => value !== null);
    const top = Math.max(...values) * 1.06 || 1;
    chart.responsive(byId("measured"), width => {
      const x = {low: 0, high: top, ticks: chart.ticks(0, top, width / 90), format: chart.secondsTick(top), label: "step time; rows as in the table"};
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
    byId("measured-table").replaceChildren(chart.table("From " + data.measured.source, [["Row", true], ["Plan", false, "names"], ["Predicted", true], ["Measured", true],
      ["Error", true], ["Low", true], ["High", true], ["Exposed", true]], plans.map((plan, index) => [index + 1, plan.name,
      seconds(plan.predicted_s), seconds(plan.measured_s), plan.measured_s > 0 ? chart.change(plan.predicted_s / plan.measured_s - 1) : "–", orDash(plan.low_s), orDash(plan.high_s), orDash(plan.exposed_s)])));
  };

  // The head of the page #
  const startHead = () => {
    byId("title").textContent = data.title;
    document.title = data.title + ": megabucket report";
    byId("advice").textContent = data.summary[0];
    byId("config").textContent = data.config_lines.join("\n");
    byId("config").hidden = !data.config_lines.length;
    byId("summary").textContent = data.summary.slice(1).join(" ");
    byId("facts").replaceChildren(...Object.entries(data.facts).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
    chart.startTheme(byId("theme"));
  };

  startHead();
  startTimeline();
  startSweep();
  redrawTimeline = chart.responsive(byId("timeline"), width => { if (shown) drawTimeline(width); });
  show(configured);
  startBuckets();
  startMemory();
  startScaling();
  startMeasured();
  return {data, show, shown: () => shown};
})();
