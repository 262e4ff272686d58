// Charts in SVG and HTML, drawn at the size they are shown at. Colours come from the style sheet.

import { el, figure, percent, svg } from "./dom.js";

const MARGIN = { left: 44, right: 12, top: 26, bottom: 30 };

/** A round number at or above `value`, for the end of an axis. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= value);
}

/** Clears a chart; returns scales from the unit square to its plot. */
function frame(node, height, label) {
  const width = node.clientWidth || 320;
  node.setAttribute("viewBox", `0 0 ${width} ${height}`);
  node.setAttribute("height", height);
  node.setAttribute("aria-label", label);
  node.replaceChildren();
  const right = width - MARGIN.right;
  const bottom = height - MARGIN.bottom;
  return {
    x: (share) => MARGIN.left + share * (right - MARGIN.left),
    y: (share) => bottom - share * (bottom - MARGIN.top),
    right,
    bottom,
  };
}

function grid(node, scale, top, unit) {
  for (const share of [0, 0.5, 1]) {
    const y = scale.y(share);
    node.append(svg("line", { class: "rule", x1: MARGIN.left, x2: scale.right, y1: y, y2: y }));
    node.append(svg("text", { x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }, figure(top * share)));
  }
  node.append(svg("text", { x: 0, y: 10 }, unit));
}

/** A line over the last `seconds`, from [seconds ago, value] pairs. */
export function rateChart(node, points, seconds, unit) {
  const peak = Math.max(0, ...points.map(([, value]) => value));
  const top = roundUp(Math.max(peak, 10));
  const scale = frame(node, 180, `Now ${figure(points.at(-1)?.[1] ?? 0)} ${unit}, peak ${figure(peak)}`);
  grid(node, scale, top, unit);
  const x = (ago) => scale.x(1 + ago / seconds);
  for (let ago = -seconds; ago <= 0; ago += 60) {
    const anchor = ago ? "middle" : "end";
    const text = ago ? `${ago / 60} min` : "now";
    node.append(svg("text", { x: x(ago), y: scale.bottom + 18, "text-anchor": anchor }, text));
  }
  if (points.length < 2) return;
  const line = points.map(([ago, value]) => `${x(ago)},${scale.y(value / top)}`);
  const [first, last] = [x(points[0][0]), x(points.at(-1)[0])];
  node.append(svg("polygon", { class: "area", points: `${first},${scale.bottom} ${line.join(" ")} ${last},${scale.bottom}` }));
  node.append(svg("polyline", { class: "line", points: line.join(" ") }));
}

/** Milliseconds of a step over its rows (on a logarithmic axis), above bars for the widths chosen. */
export function costChart(node, curve, widths) {
  const used = widths.at(-1)?.[0] ?? 1;
  const end = curve.findIndex(([rows]) => rows >= Math.max(2 * used, 16));
  const shown = end < 0 ? curve : curve.slice(0, end + 1);
  const most = Math.max(...shown.map(([rows]) => rows), ...widths.map(([rows]) => rows), 2);
  const top = roundUp(Math.max(...shown.map(([, ms]) => ms), 0.001));
  const chosen = widths.map(([rows, share]) => `${rows} rows ${percent(share)}`).join(", ");
  const scale = frame(node, 220, `Widths chosen: ${chosen || "none yet"}`);
  const x = (rows) => scale.x(0.03 + 0.94 * (Math.log2(rows) / Math.log2(most)));
  grid(node, scale, top, "ms");
  for (let rows = 1; rows <= most; rows *= 2) {
    node.append(svg("text", { x: x(rows), y: scale.bottom + 18, "text-anchor": "middle" }, rows));
  }
  for (const [rows, share] of widths) {
    const y = scale.y(share);
    const bar = svg("rect", { class: "bar", x: x(rows) - 4, y, width: 8, height: scale.bottom - y, rx: 2 });
    bar.append(svg("title", {}, `${rows} rows in ${percent(share)} of steps`));
    node.append(bar);
  }
  const line = shown.map(([rows, ms]) => `${x(rows)},${scale.y(ms / top)}`);
  node.append(svg("polyline", { class: "line", points: line.join(" ") }));
  for (const [rows, ms] of shown) {
    const dot = svg("circle", { class: "dot", cx: x(rows), cy: scale.y(ms / top), r: 2.5 });
    dot.append(svg("title", {}, `${rows} rows: ${figure(ms)} ms`));
    node.append(dot);
  }
}

/** Rows of [label, share, text, class]: a table whose middle column is a bar. */
export function bars(node, rows, nothing) {
  if (!rows.length) return node.replaceChildren(el("p", { className: "hint" }, nothing));
  const lines = rows.map(([label, share, text, mark = ""]) => {
    const fill = el("div", { className: `${mark} fill` });
    fill.style.width = `${100 * (share ?? 0)}%`;
    return el("tr", {},
      el("th", { scope: "row" }, el("span", { className: mark && `mark ${mark}` }, label)),
      el("td", { className: "track" }, el("div", { "aria-hidden": "true" }, fill)),
      el("td", { className: "value" }, text),
    );
  });
  node.replaceChildren(el("table", { className: "bars" }, ...lines));
}

/** One stacked bar of [name, milliseconds, share] and its key; `names` gives the colours. */
export function stack(node, parts, names) {
  if (!parts.length) return node.replaceChildren(el("p", { className: "hint" }, "No steps yet."));
  const bar = el("div", { className: "stack", "aria-hidden": "true" });
  const key = el("dl", { className: "key" });
  parts.forEach(([name, ms, share]) => {
    const className = `p${names.indexOf(name) + 1}`;
    const piece = el("div", { className, title: `${name}: ${figure(ms)} ms` });
    piece.style.flexGrow = share;
    bar.append(piece);
    key.append(el("div", {},
      el("dt", { className }, name),
      el("dd", {}, `${figure(ms)} ms`, el("small", {}, ` ${percent(share)}`)),
    ));
  });
  node.replaceChildren(bar, key);
}
