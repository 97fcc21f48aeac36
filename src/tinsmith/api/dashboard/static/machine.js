// The page of the machine: its work over an hour, a day or 30 days. The span is in the address.

import { addressed } from "./address.js";
import { get, poll } from "./api.js";
import { MOST_LINES, curves, stacked } from "./charts.js";
import { empty, h, keep, page, put, section } from "./dom.js";
import { count, percent, short } from "./format.js";
import { isNumber } from "./scale.js";
import { table } from "./table.js";

const SPANS = { hour: "Last hour", day: "Last day", month: "Last 30 days" };
const EVERY_S = { hour: 10, day: 60, month: 300 };
const KINDS = [
  { key: "training", name: "training", style: "s1" },
  { key: "sampling", name: "sampling", style: "s2" },
  { key: "loading", name: "loading and saving", style: "s7" },
  { key: "idle", name: "idle", style: "s4" },
];
const MOST_BARS = 60;
const GIB = 2 ** 30;
const DAY_S = 86400;
const TICK_PX = 90;
const TICKS_S = [60, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, DAY_S, 2 * DAY_S, 5 * DAY_S, 10 * DAY_S];

const local = (at) => new Date(at * 1000).toLocaleString("sv-SE");
const timeOf = (at) => local(at).slice(11, 16);
const dateOf = (at) => local(at).slice(5, 10);

// The axis of the time of day, or of dates, in the browser's time zone.
function clockOf(span) {
  return {
    label: (at) => (span === "hour" ? local(at).slice(11, 19) : local(at).slice(5, 16)),
    tick: (at) => (span === "month" ? dateOf(at) : timeOf(at)),
    ticks: (low, high, width) => {
      const least = span === "month" ? DAY_S : 60;
      const step = TICKS_S.find((size) => size >= least && ((high - low) / size) * TICK_PX <= width) ?? TICKS_S.at(-1);
      const zone = 60 * new Date(low * 1000).getTimezoneOffset();
      const first = Math.ceil((low - zone) / step) * step + zone;
      return Array.from({ length: Math.max(0, Math.floor((high - first) / step) + 1) }, (_, index) => first + index * step);
    },
  };
}

// Returns a value for each period of the span; null without an observation.
function seriesOf({ since, now, step_s: step }, points, valueOf) {
  const start = Math.floor(since / step) * step;
  const valueAt = new Map(points.map((point) => [Math.round(point.began_at), valueOf(point)]));
  const xs = Array.from({ length: Math.floor((now - start) / step) + 1 }, (_, index) => start + index * step);
  return { xs, values: xs.map((x) => valueAt.get(x) ?? null) };
}

const scaledTo = (size, name) => (point) => (isNumber(point[name]) ? point[name] / size : null);

const FIGURES = [
  { title: "Trained tokens per second", note: () => "of all tenants", valueOf: scaledTo(1, "trained_tokens") },
  { title: "Sampled tokens per second", note: (history) => (history.is_operator ? "of all tenants" : "yours"), valueOf: scaledTo(1, "sampled_tokens") },
  { title: "Memory of the engines (GiB)", note: () => "planned or allocated, by base model", valueOf: scaledTo(GIB, "memory_bytes") },
];

// Combines the periods of a base model into few bars, each with the mean share of time by kind, in percent.
function barsOf(history, points, clock) {
  const { since, now, step_s: step } = history;
  const periods = Math.max(1, Math.ceil((now - since) / step / MOST_BARS));
  const width = periods * step;
  const start = Math.floor(since / width) * width;
  return Array.from({ length: Math.floor((now - start) / width) + 1 }, (_, index) => {
    const from = start + index * width;
    const inside = points.filter((point) => point.began_at >= from && point.began_at < from + width);
    const mean = (name) => (inside.length ? (100 * inside.reduce((sum, point) => sum + point[name], 0)) / inside.length : null);
    return { label: clock.label(from), parts: KINDS.map(({ key }) => mean(key)) };
  });
}

const TENANTS = [
  { label: "Tenant", cell: (row) => row.tenant_id },
  { label: "Trained tokens", number: true, cell: (row) => count(Math.round(row.trained_tokens)) },
  { label: "Share", number: true, cell: (row) => percent(row.trained_share) },
  { label: "Sampled tokens", number: true, cell: (row) => count(Math.round(row.sampled_tokens)) },
  { label: "Share", number: true, cell: (row) => percent(row.sampled_share) },
];

function sharesOfTime(history, clock) {
  return history.base_models.slice(0, MOST_LINES).map(({ base_model: name, points }) => stacked(`Time of ${name} (%)`, KINDS, barsOf(history, points, clock)));
}

function summary(history) {
  const totalOf = (name) => history.base_models.reduce((sum, model) => sum + model[name], 0);
  const trained = `About ${short(totalOf("trained_tokens"))} tokens were trained`;
  // Sampled tokens that are counted together with those of other tenants are unknown.
  if (!history.base_models.every((model) => isNumber(model.sampled_tokens))) return `${trained}.`;
  return `${trained}, and ${short(totalOf("sampled_tokens"))} sampled${history.is_operator ? "" : " by you"}.`;
}

function chooser(values, change) {
  const select = h("select", { id: "span", on: { change: () => change(select.value) } }, Object.entries(SPANS).map(([value, label]) => h("option", { value, selected: value === values.span }, label)));
  return h("div", { class: "tools" }, h("label", { for: "span", class: "hidden" }, "Time"), select);
}

export default {
  title: "Machine",
  async show(main, _parts, signal) {
    const { values, set } = addressed({ span: "hour" });
    if (!Object.hasOwn(SPANS, values.span)) values.span = "hour";
    let view = { clock: clockOf(values.span) };
    let charts = [];
    let drawing = null;
    const grid = h("div", { class: "curves" });
    const times = h("div", { class: "curves" });
    const tenants = h("div");
    const words = h("p", { class: "quiet" });
    const drawTimes = keep(times);
    const drawTenants = keep(tenants);
    let drawn = "";
    const place = (history) => {
      const shape = `${values.span} ${history.is_operator} ${history.device.length > 0}`;
      if (shape === drawn) return;
      drawn = shape;
      drawing?.abort();
      drawing = new AbortController();
      const chartSignal = AbortSignal.any([signal, drawing.signal]);
      charts = FIGURES.map(({ title, note }) => curves(title, note(history), chartSignal, view));
      if (history.device.length) charts.push(curves("Utilisation (%)", "of the servers' GPUs, or else of their CPUs", chartSignal, { ...view, most: 100 }));
      put(grid, charts.map(({ figure }) => figure));
    };
    const draw = (history) => {
      words.textContent = history.base_models.length ? summary(history) : "";
      if (!history.base_models.length && !history.device.length) {
        drawn = "";
        return put(grid, empty("Nothing has been recorded yet. The first figures appear after ten seconds."));
      }
      place(history);
      FIGURES.forEach(({ valueOf }, index) => charts[index].update(history.base_models.map(({ base_model: name, points }) => ({ name, ...seriesOf(history, points, valueOf) }))));
      charts[FIGURES.length]?.update([{ name: "", ...seriesOf(history, history.device, (point) => 100 * point.utilisation) }]);
      drawTimes([history.base_models, values.span], () => sharesOfTime(history, view.clock));
      drawTenants(history.tenants, () => (history.is_operator ? section("Tenants", table("Tokens of each tenant", TENANTS, history.tenants, { none: "No tenant had tokens." })) : null));
    };
    let polling = null;
    const follow = () => {
      polling?.abort();
      polling = new AbortController();
      const turn = polling.signal;
      return poll(AbortSignal.any([signal, turn]), EVERY_S[values.span], async () => {
        const history = await get(`/dashboard/machine/history?span=${values.span}`, signal);
        if (!turn.aborted) draw(history);
      });
    };
    const change = (span) => {
      set({ span });
      view = { clock: clockOf(span) };
      return follow();
    };
    page(main, "Machine", chooser(values, change), words, grid, section("Time by kind of work", times), tenants);
    await follow();
  },
};
