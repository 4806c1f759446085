// Elements, numbers and axes. Text goes in as text nodes only, whatever a name contains.
const chart = (() => {
  const put = (node, attributes, children) => {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children) if (child !== null && child !== undefined) node.append(child);
    return node;
  };
  const make = (tag, attributes, ...children) => put(document.createElement(tag), attributes, children);
  const draw = (tag, attributes, ...children) => put(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

  const rounded = (value, digits) => value.toLocaleString("en", {maximumFractionDigits: digits, minimumFractionDigits: digits});
  const unitOf = seconds => seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e3, "ms"] : seconds >= 1e-6 ? [1e6, "µs"] : [1e9, "ns"];
  const figures = value => {
    const size = Math.abs(value);
    return rounded(value, size >= 100 ? 1 : size >= 10 ? 2 : size === 0 ? 0 : 3);
  };
  const seconds = (value, like) => {
    const [factor, unit] = unitOf(like === undefined ? value : like);
    return value === 0 ? "0 s" : figures(value * factor) + " " + unit;
  };
  const scaled = (value, base, units) => {
    let index = 0;
    while (Math.abs(value) >= base && index < units.length - 1) {
      value /= base;
      index++;
    }
    return (index ? rounded(value, value >= 100 ? 0 : value >= 10 ? 1 : 2) : String(Math.round(value))) + (units[index] ? " " + units[index] : "");
  };
  const count = value => scaled(value, 1000, ["", "K", "M", "G", "T", "P"]);
  const bytes = value => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
  // Round values without trailing zeros; all of one axis in one unit.
  const secondsTick = top => value => {
    const [factor, unit] = unitOf(top);
    return value === 0 ? "0" : (value * factor).toLocaleString("en", {maximumFractionDigits: 3}) + " " + unit;
  };
  const shortCount = value => count(value).replace(/\.0+(?=\s|$)/, "");
  const shortBytes = value => bytes(value).replace(/\.0+(?=\s|$)/, "");
  const exact = value => Number(value).toLocaleString("en");
  const percent = value => value === null ? "–" : rounded(100 * value, 1) + " %";

  const change = value => (value > 0 ? "+" : value < 0 ? "−" : "") + figures(Math.abs(value) * 100) + " %";

  // Round values from low to high, about so many.
  const ticks = (low, high, about) => {
    const raw = (high - low) / Math.max(1, about), power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(factor => factor * power).find(each => each >= raw * 0.999);
    const found = [];
    for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) found.push(index * step);
    return found;
  };
  const powers = (low, high, base, most) => {
    const first = Math.ceil(Math.log(low) / Math.log(base) - 1e-9), last = Math.floor(Math.log(high) / Math.log(base) + 1e-9);
    const stride = Math.max(1, Math.ceil((last - first + 1) / most));
    const found = [];
    for (let power = first; power <= last; power += stride) found.push(base ** power);
    return found;
  };
  const scale = (low, high, from, to, isLog) => {
    const at = isLog ? Math.log : value => value;
    return value => from + (to - from) * (at(value) - at(low)) / (at(high) - at(low));
  };

  // Axes of a plot with room for labels; returns the drawing and both scales.
  const plot = ({width, height, label, x, y}) => {
    const longest = ({ticks, format}) => Math.max(0, ...ticks.map(tick => format(tick).length));
    const margin = {left: Math.max(44, 14 + 7 * longest(y)), right: Math.max(16, 4 + 4 * longest(x)), top: 12, bottom: 42};
    const svg = draw("svg", {width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label});
    const sx = scale(x.low, x.high, margin.left, width - margin.right, x.log), sy = scale(y.low, y.high, height - margin.bottom, margin.top);
    for (const tick of y.ticks) {
      svg.append(draw("line", {class: "grid", x1: margin.left, x2: width - margin.right, y1: sy(tick), y2: sy(tick)}),
        draw("text", {x: margin.left - 6, y: sy(tick) + 4, "text-anchor": "end"}, y.format(tick)));
    }
    for (const tick of x.ticks) {
      svg.append(draw("line", {class: "grid", x1: sx(tick), x2: sx(tick), y1: margin.top, y2: height - margin.bottom}),
        draw("text", {x: sx(tick), y: height - margin.bottom + 20, "text-anchor": "middle"}, x.format(tick)));
    }
    svg.append(draw("line", {class: "axis", x1: margin.left, x2: width - margin.right, y1: height - margin.bottom, y2: height - margin.bottom}),
      draw("text", {x: (margin.left + width - margin.right) / 2, y: height - 6, "text-anchor": "middle"}, x.label));
    return {svg, sx, sy, margin};
  };

  // A path through points; and marks of which each looks different without colour.
  const path = points => points.map(([x, y], index) => (index ? "L" : "M") + x.toFixed(2) + " " + y.toFixed(2)).join("");
  const mark = (kind, x, y) => {
    if (kind === "diamond") return draw("path", {class: "filled", d: `M${x} ${y - 7}L${x + 7} ${y}L${x} ${y + 7}L${x - 7} ${y}Z`});
    if (kind === "square") return draw("rect", {class: "hollow", x: x - 5, y: y - 5, width: 10, height: 10});
    if (kind === "circle") return draw("circle", {class: "hollow", cx: x, cy: y, r: 5.5});
    if (kind === "cross") return draw("path", {class: "cross", d: `M${x - 5} ${y - 5}L${x + 5} ${y + 5}M${x + 5} ${y - 5}L${x - 5} ${y + 5}`});
    return draw("circle", {class: "now", cx: x, cy: y, r: 5});
  };
  const swatch = content => draw("svg", {width: 22, height: 16, viewBox: "0 0 22 16", "aria-hidden": "true"}, content);
  const lineSwatch = look => swatch(draw("line", {class: look, x1: 0, x2: 22, y1: 8, y2: 8}));
  const boxSwatch = attributes => swatch(draw("rect", {x: 2, y: 1, width: 18, height: 14, ...attributes}));
  const legend = (host, entries) => host.replaceChildren(...entries.map(([glyph, text]) => make("li", {}, glyph, text)));

  // A dotted name that breaks after its dots.
  const nameNode = text => make("span", {}, ...text.split(".").flatMap((part, index) => index ? [".", make("wbr"), part] : [part]));

  // A table in a box that scrolls, also by keyboard. A column is a heading and whether it holds numbers.
  const table = (caption, columns, rows) => {
    const head = make("tr", {}, ...columns.map(([name, isNumber]) => make("th", {scope: "col", class: isNumber && "number"}, name)));
    const body = rows.map(cells => make("tr", {}, ...cells.map((cell, index) => index
      ? make("td", {class: columns[index][1] ? "number" : columns[index][2], "data-column": columns[index][0]}, cell)
      : make("th", {scope: "row", class: columns[0][1] && "number", "data-column": columns[0][0]}, cell))));
    return make("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": caption},
      make("table", {}, make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, ...body)));
  };

  // Draw again when there is another width.
  const responsive = (host, render) => {
    let last = 0;
    const again = () => {
      const width = Math.floor(host.clientWidth);
      if (width > 0) render(last = width);
    };
    const later = () => requestAnimationFrame(() => { if (Math.floor(host.clientWidth) !== last) again(); });
    new ResizeObserver(later).observe(host);
    again();
    return again;
  };

  // A button that changes between light and dark; before that the reader's system decides.
  const startTheme = button => {
    const dark = matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement;
    const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
    const label = () => {
      button.textContent = isDark() ? "Light" : "Dark";
      button.setAttribute("aria-label", button.textContent + " colours");
    };
    button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; label(); });
    dark.addEventListener("change", label);
    label();
  };

  return {make, draw, seconds, secondsTick, shortCount, shortBytes, unitOf, figures, count, bytes, exact, percent, change, ticks, powers, scale, plot, path, mark, swatch, lineSwatch,
    boxSwatch, legend, nameNode, table, responsive, startTheme};
})();
