// Curves by uPlot, stacked bars by hand; each with its numbers as a table, for those who cannot see it.

import { h, svg } from "./dom.js";
import { number, plain } from "./format.js";
import { table } from "./table.js";

const HEIGHT = 170;
const MOST_ROWS = 200; // of a table of numbers
const STEPS = [1, 2, 5].flatMap((unit) => Array.from({ length: 12 }, (_, power) => unit * 10 ** power)).sort((a, b) => a - b);

const probe = h("span", { hidden: true });
document.body.append(probe);

// A canvas knows no names of colours: what one stands for in the theme of the moment.
const colour = (name) => () => {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
};

// One curve over steps. `update(steps, values)` draws it anew.
export function curve(title, note, signal) {
  const latest = h("output", { class: "latest" });
  const place = h("div", { class: "plot", role: "img" });
  const numbers = h("div");
  const details = h("details", {}, h("summary", {}, "As a table", h("span", { class: "hidden" }, ` (${title})`)), numbers);
  const figure = h(
    "figure",
    { class: "curve" },
    h("figcaption", {}, h("span", { class: "name" }, title), latest, h("span", { class: "quiet" }, note)),
    place,
    details,
  );
  let plot = null;
  let data = [[], []];
  const show = () => {
    if (details.open) numbers.replaceChildren(rowsOf(title, data));
  };
  details.addEventListener("toggle", show);
  const said = (index) => {
    const at = index ?? lastOf(data[1]);
    latest.textContent = at < 0 ? "-" : `${number(data[1][at])} at step ${data[0][at]}`;
  };
  const width = () => Math.max(200, Math.floor(place.clientWidth));
  const sizes = new ResizeObserver(() => plot?.setSize({ width: width(), height: HEIGHT }));
  sizes.observe(place);
  const redraw = () => plot?.redraw(false, true);
  addEventListener("themechange", redraw);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", redraw);
  signal.addEventListener("abort", () => {
    sizes.disconnect();
    removeEventListener("themechange", redraw);
    scheme.removeEventListener("change", redraw);
    plot?.destroy();
  });
  return {
    figure,
    update(steps, values) {
      data = [steps, values];
      place.setAttribute("aria-label", inWords(title, data));
      if (plot) plot.setData(data);
      else plot = new uPlot(options(width(), (index) => said(index)), data, place);
      said(null);
      show();
    },
  };
}

function options(width, said) {
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
  return {
    width,
    height: HEIGHT,
    padding: [8, 12, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: "steps" }, y: false, drag: { x: true, y: false } },
    scales: { x: { time: false } },
    axes: [
      { ...axis, size: 28, incrs: STEPS, values: (_plot, ticks) => ticks.map(plain) },
      { ...axis, size: 58, values: (_plot, ticks) => ticks.map((tick) => (tick === null ? "" : plain(tick))) },
    ],
    series: [
      {},
      { stroke: colour("--accent"), width: 1.75, spanGaps: true, points: { size: 5, fill: colour("--accent") } },
    ],
    hooks: { setCursor: [(plot) => said(plot.cursor.idx)] },
  };
}

function lastOf(values) {
  let at = values.length - 1;
  while (at >= 0 && values[at] === null) at -= 1;
  return at;
}

function inWords(title, [steps, values]) {
  const finite = values.filter((value) => value !== null);
  if (!finite.length) return `${title}: no values yet`;
  const low = finite.reduce((a, b) => Math.min(a, b));
  const high = finite.reduce((a, b) => Math.max(a, b));
  const last = finite[finite.length - 1];
  return `${title}: ${finite.length} values up to step ${steps[steps.length - 1]}, between ${number(low)} and ${number(high)}, the last ${number(last)}`;
}

function rowsOf(title, [steps, values]) {
  const stride = Math.max(1, Math.ceil(steps.length / MOST_ROWS));
  const rows = steps.map((step, index) => ({ step, value: values[index] }));
  const shown = rows.filter((_, index) => (steps.length - 1 - index) % stride === 0);
  const columns = [
    { label: "Step", number: true, cell: (row) => number(row.step) },
    { label: title, number: true, cell: (row) => number(row.value) },
  ];
  return table(`${title} by step`, columns, shown);
}

// Stacked bars. `bars` are {label, parts}, parts the values of the kinds in order; `kinds` are {name, style}.
export function stacked(title, kinds, bars, most = 0) {
  const totals = bars.map((bar) => bar.parts.reduce((sum, part) => sum + part, 0));
  const high = Math.max(1, most, ...totals);
  const step = 100 / Math.max(1, bars.length);
  const drawn = bars.map((bar, index) => {
    let top = 100;
    const rects = bar.parts.map((part, kind) => {
      const size = (100 * part) / high;
      top -= size;
      return svg("rect", { class: kinds[kind].style, x: index * step + step * 0.12, y: top, width: step * 0.76, height: size });
    });
    const lines = bar.parts.map((part, kind) => `${kinds[kind].name}: ${number(part)}`);
    return svg("g", {}, svg("title", {}, `${bar.label}\n${lines.join("\n")}`), svg("rect", { class: "hit", x: index * step, y: 0, width: step, height: 100 }), rects);
  });
  const picture = svg("svg", { class: "bars", viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": title }, drawn);
  const columns = [
    { label: "When", cell: (bar) => bar.label },
    ...kinds.map((kind, index) => ({ label: kind.name, number: true, cell: (bar) => number(bar.parts[index]) })),
  ];
  const numbers = h("div");
  const details = h("details", {}, h("summary", {}, "As a table", h("span", { class: "hidden" }, ` (${title})`)), numbers);
  details.addEventListener("toggle", () => numbers.replaceChildren(table(title, columns, bars)));
  return h(
    "figure",
    { class: "stacked" },
    h("figcaption", {}, h("span", { class: "name" }, title), h("span", { class: "legend" }, kinds.map((kind) => h("span", { class: `key ${kind.style}` }, kind.name)))),
    h("div", { class: "plot bars-plot" }, h("span", { class: "top quiet" }, number(high)), picture),
    details,
  );
}
