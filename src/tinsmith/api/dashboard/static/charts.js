// Curves drawn by uPlot, and stacked bars. Each chart has a table of its numbers for accessibility.

import { h, put, svg } from "./dom.js";
import { count, counted, number, seconds } from "./format.js";
import { boundedRange, exponentOf, isNumber, labelsOf, scaled, stepRange, ticksOf, valueRange } from "./scale.js";
import { table } from "./table.js";

const HEIGHT = 170;
const MOST_ROWS = 200; // in a table of numbers
const MOST_TICKS = 5; // on the axis of values
const TICK_PX = 30; // between labels on the axis of steps
const LETTER_PX = 7;

const probe = h("span", { hidden: true });
document.body.append(probe);

// Resolves a colour variable of the current theme, since a canvas does not support CSS variables.
const colour = (name) => () => {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
};

const broken = (error) => h("p", { class: "warning", role: "alert" }, `This chart cannot be drawn: ${error.message}`);

const LINES = ["--l1", "--l2", "--l3", "--l4", "--l5", "--l6"];
export const MOST_LINES = LINES.length;

// Exponential moving average with bias correction; each earlier value weighs `share` times as much as the next.
export function smoothed(values, share) {
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    sum = share * sum + (1 - share) * value;
    weight = share * weight + (1 - share);
    return sum / weight;
  });
}

// Scales values for drawing: divided by a power of ten, or as logarithms.
const drawnAs = (values, exponent, log) => (log ? values.map((value) => (isNumber(value) && value > 0 ? Math.log10(value) : null)) : scaled(values, exponent));

// One curve over steps. `update(steps, values, band)` redraws it; errors are shown in place of the chart.
export function curve(title, note, signal, view = {}, extras = {}) {
  const curve = curves(title, note, signal, view, extras);
  return { ...curve, update: (steps, values, band = {}) => curve.update([{ name: "", xs: steps, values, ...band }]) };
}

// Several curves in one figure. `update` takes {name, xs, values, low?, high?} per curve. `view` may have `smooth` (0 to
// below 1), `log` and `time` (xs are seconds), or `clock` (xs are seconds since the epoch, and missing values are gaps):
// {label(x), tick(x), ticks(low, high, width)}; `most` is the largest possible value. Call `redraw` when it has changed.
// `heightOf` returns the height in pixels; `tools` are elements of the caption.
export function curves(title, note, signal, view = {}, { heightOf = () => HEIGHT, tools = null } = {}) {
  const latest = h("output", { class: "latest" });
  const place = h("div", { class: "plot", role: "img" });
  const numbers = h("div");
  const details = h("details", {}, h("summary", {}, "View as table", h("span", { class: "hidden" }, ` (${title})`)), numbers);
  const names = h("div", { class: "legend" });
  const figure = h(
    "figure",
    { class: "curve" },
    h("figcaption", {}, h("span", { class: "name" }, title), tools, latest, h("span", { class: "quiet" }, note), names),
    place,
    details,
  );
  const chart = { plot: null, lines: [], shape: "", exponent: 0, xs: [], raw: [] };
  const show = () => {
    if (details.open) put(numbers, rowsOf(title, chart, view));
  };
  details.addEventListener("toggle", show);
  const said = (index) => {
    latest.textContent = inFew(chart, index, view);
  };
  const width = () => Math.max(200, Math.floor(place.clientWidth));
  const guarded = (draw) => {
    try {
      draw();
    } catch (error) {
      chart.plot?.destroy();
      chart.plot = null;
      put(place, broken(error));
    }
  };
  // A batch draws before it returns, so that errors are caught here.
  const change = (act) => chart.plot && guarded(() => chart.plot.batch(act));
  const draw = (drawn, shape) => {
    const attach = (plot, init) => {
      chart.plot = plot;
      put(place, plot.root);
      plot.batch(init);
    };
    if (chart.plot && chart.shape !== shape) {
      chart.plot.destroy();
      chart.plot = null;
    }
    chart.shape = shape;
    if (chart.plot) chart.plot.batch(() => chart.plot.setData(drawn));
    else new uPlot(options(width(), heightOf(), said, chart, view), drawn, attach);
  };
  const sizes = new ResizeObserver(() => change(() => chart.plot.setSize({ width: width(), height: heightOf() })));
  sizes.observe(place);
  const recolour = () => change(() => chart.plot.redraw(false, true));
  addEventListener("themechange", recolour);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", recolour);
  signal.addEventListener("abort", () => {
    sizes.disconnect();
    removeEventListener("themechange", recolour);
    scheme.removeEventListener("change", recolour);
    chart.plot?.destroy();
    chart.plot = null;
  });
  const update = (lines) => {
    chart.lines = lines.slice(0, MOST_LINES);
    joined(chart);
    guarded(() => {
      place.setAttribute("aria-label", chart.lines.map((line) => inWords([title, line.name].filter(Boolean).join(", "), line, view)).join("; "));
      put(names, chart.lines.length > 1 ? chart.lines.map((line, index) => h("span", { class: `key l${index + 1}` }, line.name)) : null);
      draw([chart.xs, ...seriesOf(chart, view)], `${chart.lines.length} ${view.log} ${view.time}`);
      said(null);
      show();
    });
  };
  return { figure, update, redraw: () => update(chart.lines), lines: () => chart.lines, canvas: () => chart.plot?.ctx.canvas };
}

// Aligns all lines on one list of positions.
function joined(chart) {
  const all = [...new Set(chart.lines.flatMap((line) => line.xs))].sort((a, b) => a - b);
  const over = (xs, values) => {
    const valueByX = new Map(xs.map((x, index) => [x, values?.[index] ?? null]));
    return all.map((x) => valueByX.get(x) ?? null);
  };
  chart.xs = all;
  chart.raw = chart.lines.map((line) => ({ values: over(line.xs, line.values), low: over(line.xs, line.low), high: over(line.xs, line.high) }));
  chart.exponent = exponentOf(chart.raw.flatMap((line) => [...line.values, ...line.low, ...line.high]));
}

// Returns, per line, the values, the values before smoothing, and the bounds of its band.
function seriesOf(chart, view) {
  const none = chart.xs.map(() => null);
  return chart.raw.flatMap((line) => {
    const smooth = (values) => (view.smooth ? smoothed(values, view.smooth) : values);
    const series = [smooth(line.values), view.smooth ? line.values : none, smooth(line.low), smooth(line.high)];
    return series.map((values) => drawnAs(values, chart.exponent, view.log));
  });
}

// Returns the places of the values that no line reaches, or null without any. Lines over gaps reach all but a single one.
function isolatedIn(values, spanGaps) {
  const places = [...values.keys()].filter((index) => isNumber(values[index]));
  if (spanGaps) return places.length === 1 ? places : null;
  const isolated = places.filter((index) => !isNumber(values[index - 1]) && !isNumber(values[index + 1]));
  return isolated.length ? isolated : null;
}

function lineOptions(index, spanGaps) {
  const stroke = colour(LINES[index]);
  const base = { spanGaps, points: { show: false } };
  const filter = (plot, series, areAllDrawn) => (areAllDrawn ? null : isolatedIn(plot.data[series], spanGaps));
  return [
    { ...base, stroke, width: 1.75, points: { size: 5, fill: stroke, filter } },
    { ...base, stroke, width: 0.5, alpha: 0.5 },
    { ...base, stroke: "transparent", width: 0 },
    { ...base, stroke: "transparent", width: 0 },
  ];
}

// A band has a fainter tone of its line's colour. A canvas does not support color-mix().
const faint = (name) => () => colour(name)().replace("rgb(", "rgba(").replace(/\)$/, ", 0.16)");

// Ranges and ticks are computed here, since uPlot's ticks fail for nearly equal values.
function options(width, height, said, chart, view) {
  const axis = {
    stroke: colour("--quiet"),
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { show: false },
    font: "12px system-ui",
    space: 0,
    incrs: [5],
  };
  const widest = (_plot, labels) => 18 + LETTER_PX * Math.max(3, ...(labels || []).map((label) => label.length));
  const lines = chart.lines.map((_, index) => index);
  return {
    width,
    height,
    padding: [10, 18, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: view.clock ? "clock" : view.time ? "seconds" : "steps" }, y: false, drag: { x: true, y: false } },
    scales: { x: { time: false, range: (_plot, low, high) => stepRange(low, high) }, y: { range: (_plot, low, high) => (view.log ? powerRange(low, high) : boundedRange(valueRange(low, high), view.most / 10 ** chart.exponent, high)) } },
    axes: [
      {
        ...axis,
        size: 28,
        splits: (plot, _axis, low, high) => (view.clock ? view.clock.ticks(low, high, plot.width) : ticksOf(low, high, view.time ? 6 : mostSteps(plot.width, high), true)),
        values: (_plot, ticks) => ticks.map(view.clock ? view.clock.tick : view.time ? seconds : count),
      },
      {
        ...axis,
        size: widest,
        splits: (_plot, _axis, low, high) => ticksOf(low, high, MOST_TICKS),
        values: (_plot, ticks) => (view.log ? ticks.map((tick) => number(10 ** tick)) : labelsOf(ticks, chart.exponent)),
      },
    ],
    series: [{}, ...lines.flatMap((index) => lineOptions(index, !view.clock))],
    bands: lines.map((index) => ({ series: [4 * index + 4, 4 * index + 3], fill: faint(LINES[index]) })),
    hooks: { setCursor: [(plot) => said(plot.cursor.idx)] },
  };
}

// A single value gets half a power of ten on both sides.
function powerRange(low, high) {
  if (!isNumber(low) || !isNumber(high)) return [0, 1];
  const margin = Math.max(0.05 * (high - low), high - low < 1e-6 ? 0.5 : 0);
  return [low - margin, high + margin];
}

const mostSteps = (width, high) => Math.max(2, Math.floor(width / (TICK_PX + LETTER_PX * count(Math.ceil(high)).length)));

const lastOf = (values) => values.findLastIndex(isNumber);
const placeOf = (x, view) => (view.clock ? view.clock.label(x) : view.time ? `after ${seconds(x)}` : `step ${count(x)}`);

// Returns the values at the cursor, or the last ones.
function inFew(chart, index, view) {
  if (!chart.raw.length) return "-";
  if (chart.raw.length > 1) {
    return chart.raw.map(({ values }, line) => `${chart.lines[line].name}: ${number(values[index ?? lastOf(values)])}`).join(", ");
  }
  const [{ values, low, high }] = chart.raw;
  const at = index ?? lastOf(values);
  if (at < 0) return "-";
  const band = isNumber(low[at]) && isNumber(high[at]) ? ` (${number(low[at])} to ${number(high[at])})` : "";
  return `${number(values[at])}${band} ${view.time ? "" : "at "}${placeOf(chart.xs[at], view)}`;
}

function inWords(title, { xs, values }, view) {
  const finite = values.filter(isNumber);
  if (!finite.length) return `${title}: no values yet`;
  const low = finite.reduce((a, b) => Math.min(a, b));
  const high = finite.reduce((a, b) => Math.max(a, b));
  const last = finite[finite.length - 1];
  return `${title}: ${counted(finite.length, "value")} up to ${placeOf(xs[xs.length - 1], view)}, between ${number(low)} and ${number(high)}, the last ${number(last)}`;
}

function rowsOf(title, chart, view) {
  const stride = Math.max(1, Math.ceil(chart.xs.length / MOST_ROWS));
  const rows = chart.xs.map((x, index) => ({ x, index }));
  const thinned = rows.filter((_, index) => (chart.xs.length - 1 - index) % stride === 0);
  const columns = [
    { label: view.time || view.clock ? "Time" : "Step", number: true, cell: (row) => (view.clock ? view.clock.label(row.x) : view.time ? seconds(row.x) : count(row.x)) },
    ...chart.raw.flatMap(({ values, low, high }, line) => [
      { label: chart.lines[line].name || title, number: true, cell: (row) => number(values[row.index]) },
      ...(low.some(isNumber) ? [{ label: "10th to 90th percentile", number: true, cell: (row) => `${number(low[row.index])} to ${number(high[row.index])}` }] : []),
    ]),
  ];
  return table(`${title} by ${view.time || view.clock ? "time" : "step"}`, columns, thinned);
}

// Stacked bars. `bars` are {label, parts} with a value per kind; `kinds` are {name, style}. Kinds without values are
// omitted.
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
    { label: "Period", cell: (bar) => bar.label },
    ...used.map((kind) => ({ label: kinds[kind].name, number: true, cell: (bar) => number(bar.parts[kind]) })),
  ];
  const numbers = h("div");
  const details = h("details", {}, h("summary", {}, "View as table", h("span", { class: "hidden" }, ` (${title})`)), numbers);
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
