// Curves by uPlot, stacked bars by hand; each with its numbers as a table, for those who cannot see it.

import { h, put, svg } from "./dom.js";
import { count, counted, number } from "./format.js";
import { exponentOf, isNumber, labelsOf, scaled, stepRange, ticksOf, valueRange } from "./scale.js";
import { table } from "./table.js";

const HEIGHT = 170;
const MOST_ROWS = 200; // of a table of numbers
const MOST_TICKS = 5; // of the axis of values
const TICK_PX = 30; // between the labels of the axis of steps
const LETTER_PX = 7;

const probe = h("span", { hidden: true });
document.body.append(probe);

// A canvas knows no names of colours: what one stands for in the theme of the moment.
const colour = (name) => () => {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
};

const broken = (error) => h("p", { class: "warning", role: "alert" }, `This chart cannot be drawn: ${error.message}`);

// One curve over steps. `update(steps, values)` draws it anew; what goes wrong is shown in its own place.
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
  let exponent = 0;
  const show = () => {
    if (details.open) put(numbers, rowsOf(title, data));
  };
  details.addEventListener("toggle", show);
  const said = (index) => {
    const at = index ?? lastOf(data[1]);
    latest.textContent = at < 0 ? "-" : `${number(data[1][at])} at step ${count(data[0][at])}`;
  };
  const width = () => Math.max(200, Math.floor(place.clientWidth));
  const guarded = (draw) => {
    try {
      draw();
    } catch (error) {
      plot?.destroy();
      plot = null;
      put(place, broken(error));
    }
  };
  // A batch draws before it returns, so that what goes wrong is caught here and not left to the page.
  const change = (act) => plot && guarded(() => plot.batch(act));
  const draw = (drawn) => {
    const made = (chart, init) => {
      plot = chart;
      put(place, chart.root);
      chart.batch(init);
    };
    if (plot) plot.batch(() => plot.setData(drawn));
    else new uPlot(options(width(), said, () => exponent), drawn, made);
  };
  const sizes = new ResizeObserver(() => change(() => plot.setSize({ width: width(), height: HEIGHT })));
  sizes.observe(place);
  const redraw = () => change(() => plot.redraw(false, true));
  addEventListener("themechange", redraw);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", redraw);
  signal.addEventListener("abort", () => {
    sizes.disconnect();
    removeEventListener("themechange", redraw);
    scheme.removeEventListener("change", redraw);
    plot?.destroy();
    plot = null;
  });
  return {
    figure,
    update(steps, values) {
      data = [steps, values];
      exponent = exponentOf(values);
      guarded(() => {
        place.setAttribute("aria-label", inWords(title, data));
        draw([steps, scaled(values, exponent)]);
        said(null);
        show();
      });
    },
  };
}

// uPlot chooses nothing of the axes: its own choice of ticks fails on values that are nearly equal.
function options(width, said, exponent) {
  const axis = {
    stroke: colour("--quiet"),
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { show: false },
    font: "12px system-ui",
    space: 0,
    incrs: [5],
  };
  const widest = (_plot, labels) => 18 + LETTER_PX * Math.max(3, ...(labels || []).map((label) => label.length));
  return {
    width,
    height: HEIGHT,
    padding: [10, 18, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: "steps" }, y: false, drag: { x: true, y: false } },
    scales: { x: { time: false, range: (_plot, low, high) => stepRange(low, high) }, y: { range: (_plot, low, high) => valueRange(low, high) } },
    axes: [
      {
        ...axis,
        size: 28,
        splits: (plot, _axis, low, high) => ticksOf(low, high, mostSteps(plot.width, high), true),
        values: (_plot, ticks) => ticks.map(count),
      },
      {
        ...axis,
        size: widest,
        splits: (_plot, _axis, low, high) => ticksOf(low, high, MOST_TICKS),
        values: (_plot, ticks) => labelsOf(ticks, exponent()),
      },
    ],
    series: [
      {},
      { stroke: colour("--accent"), width: 1.75, spanGaps: true, points: { size: 5, fill: colour("--accent") } },
    ],
    hooks: { setCursor: [(plot) => said(plot.cursor.idx)] },
  };
}

const mostSteps = (width, high) => Math.max(2, Math.floor(width / (TICK_PX + LETTER_PX * count(Math.ceil(high)).length)));

function lastOf(values) {
  let at = values.length - 1;
  while (at >= 0 && !isNumber(values[at])) at -= 1;
  return at;
}

function inWords(title, [steps, values]) {
  const finite = values.filter(isNumber);
  if (!finite.length) return `${title}: no values yet`;
  const low = finite.reduce((a, b) => Math.min(a, b));
  const high = finite.reduce((a, b) => Math.max(a, b));
  const last = finite[finite.length - 1];
  return `${title}: ${counted(finite.length, "value")} up to step ${count(steps[steps.length - 1])}, between ${number(low)} and ${number(high)}, the last ${number(last)}`;
}

function rowsOf(title, [steps, values]) {
  const stride = Math.max(1, Math.ceil(steps.length / MOST_ROWS));
  const rows = steps.map((step, index) => ({ step, value: values[index] }));
  const shown = rows.filter((_, index) => (steps.length - 1 - index) % stride === 0);
  const columns = [
    { label: "Step", number: true, cell: (row) => count(row.step) },
    { label: title, number: true, cell: (row) => number(row.value) },
  ];
  return table(`${title} by step`, columns, shown);
}

// Stacked bars. `bars` are {label, parts}, parts the values of the kinds in order; `kinds` are {name, style}. Kinds that
// no bar has are left out.
export function stacked(title, kinds, bars) {
  try {
    return drawnBars(title, kinds, bars);
  } catch (error) {
    return h("figure", { class: "stacked" }, h("figcaption", {}, h("span", { class: "name" }, title)), broken(error));
  }
}

function drawnBars(title, kinds, bars) {
  const sizeOf = (bar, kind) => (isNumber(bar.parts[kind]) ? Math.max(0, bar.parts[kind]) : 0);
  const used = kinds.map((_, kind) => kind).filter((kind) => bars.some((bar) => sizeOf(bar, kind)));
  const totals = bars.map((bar) => used.reduce((sum, kind) => sum + sizeOf(bar, kind), 0));
  const high = Math.max(1, ...totals);
  const step = 100 / Math.max(1, bars.length);
  const drawn = bars.map((bar, index) => {
    let top = 100;
    const rects = used.map((kind) => {
      const size = (100 * sizeOf(bar, kind)) / high;
      top -= size;
      return svg("rect", { class: kinds[kind].style, x: index * step + step * 0.12, y: top, width: step * 0.76, height: size });
    });
    const lines = used.map((kind) => `${kinds[kind].name}: ${number(bar.parts[kind])}`);
    return svg("g", {}, svg("title", {}, `${bar.label}\n${lines.join("\n")}`), svg("rect", { class: "hit", x: index * step, y: 0, width: step, height: 100 }), rects);
  });
  const picture = svg("svg", { class: "bars", viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": title }, drawn);
  const columns = [
    { label: "When", cell: (bar) => bar.label },
    ...used.map((kind) => ({ label: kinds[kind].name, number: true, cell: (bar) => number(bar.parts[kind]) })),
  ];
  const numbers = h("div");
  const details = h("details", {}, h("summary", {}, "As a table", h("span", { class: "hidden" }, ` (${title})`)), numbers);
  details.addEventListener("toggle", () => put(numbers, table(title, columns, bars)));
  const ends = bars.length > 1 ? [bars[0].label, bars[bars.length - 1].label] : bars.map((bar) => bar.label);
  return h(
    "figure",
    { class: "stacked" },
    h("figcaption", {}, h("span", { class: "name" }, title), h("span", { class: "legend" }, used.map((kind) => h("span", { class: `key ${kinds[kind].style}` }, kinds[kind].name)))),
    h("div", { class: "plot bars-plot" }, h("span", { class: "top quiet" }, number(high)), picture, h("div", { class: "ends quiet" }, ends.map((label) => h("span", {}, label)))),
    details,
  );
}
