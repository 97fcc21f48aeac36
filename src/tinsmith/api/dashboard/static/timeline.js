// The last minutes as bars: a row per run and sampler with its requests and snapshots, and a row for other tenants.

import { get } from "./api.js";
import { button, empty, h, put, svg } from "./dom.js";
import { count, seconds, shortId } from "./format.js";
import { isNumber } from "./scale.js";
import { table } from "./table.js";

const KINDS = [
  { name: "waiting", style: "s4" },
  { name: "training", style: "s1" },
  { name: "sampling", style: "s2" },
  { name: "publishing", style: "s3" },
  { name: "saving", style: "s7" },
  { name: "snapshots", style: "s8" },
  { name: "other", style: "s5" },
  { name: "other tenants", style: "s6" },
];
const SNAPSHOTS = 5;
const OTHER = 6;
const OTHERS = 7;
const ROW = 22;
const LEFT = 130; // for the names of rows, where there is room
const MOST_ROWS = 24;
const SHORTEST_S = 1;

function kindOf(kind) {
  if (/^(forward|optim|custom)/.test(kind)) return 1;
  if (/^sample/.test(kind)) return 2;
  if (/for_sampler|publish|sampling_session/.test(kind)) return 3;
  if (/save|export|weights|checkpoint/.test(kind)) return 4;
  return OTHER;
}

// All samplers of a session share a row, since a training loop makes one per step.
const rowOf = (lane) => (lane || "").replace(/:sample:\d+$/, ":samples");

// Makes bars {lane, kind, from, to, title}. A request has a bar for waiting and one for work.
export function barsOf({ requests = [], waiting = [], steps = [], snapshots = [], others_sampling = [], now }) {
  const bars = [];
  const bar = (lane, kind, from, to, title) => isNumber(from) && isNumber(to) && to >= from && bars.push({ lane: rowOf(lane), kind, from, to, title });
  for (const one of requests) {
    const name = (one.kind || "").replaceAll("_", " ");
    const worked = one.started_at ?? one.settled_at;
    bar(one.lane, 0, one.created_at, worked, `${name}: waited ${seconds(worked - one.created_at)}`);
    bar(one.lane, kindOf(one.kind || ""), one.started_at, one.ran_at ?? one.settled_at, `${name}: ${seconds((one.ran_at ?? one.settled_at) - one.started_at)}, ${count(one.num_tokens)} tokens${one.state === "failed" ? ", failed" : ""}`);
  }
  for (const one of waiting) bar(one.lane, 0, one.oldest_at, now, `${count(one.requests)} ${(one.kind || "").replaceAll("_", " ")}: waiting for ${seconds(now - one.oldest_at)}`);
  for (const one of snapshots) bar(one.lane, SNAPSHOTS, one.began, one.ended, `snapshot written in the background: ${seconds(one.ended - one.began)}`);
  for (const step of steps) bar("other tenants", OTHERS, step.began, step.ended, `${count(step.others_tokens)} tokens of other tenants in a training step`);
  for (const one of others_sampling) bar("other tenants", OTHERS, one.began, one.ended, `other tenants sampled: ${seconds(one.ended - one.began)}`);
  return bars;
}

function drawn(bars, view, lanes, width) {
  const left = Math.min(LEFT, 0.3 * width);
  const scale = (width - left) / (view.to - view.from);
  const x = (moment) => left + Math.max(0, Math.min(view.to, moment) - view.from) * scale;
  const rects = bars
    .filter((bar) => bar.to >= view.from && bar.from <= view.to && lanes.includes(bar.lane))
    .map((bar) => {
      const y = lanes.indexOf(bar.lane) * ROW;
      const thin = bar.kind === 0;
      const size = { x: x(bar.from), y: y + (thin ? 8 : 4), width: Math.max(1, x(bar.to) - x(bar.from)), height: thin ? 6 : 14 };
      return svg("rect", { class: KINDS[bar.kind].style, ...size }, svg("title", {}, bar.title));
    });
  const names = lanes.map((lane, index) => svg("text", { x: 4, y: index * ROW + 15 }, shortId(lane), svg("title", {}, lane)));
  const lines = lanes.map((_, index) => svg("line", { x1: 0, x2: width, y1: (index + 1) * ROW, y2: (index + 1) * ROW }));
  return svg("svg", { class: "lanes", viewBox: `0 0 ${width} ${lanes.length * ROW}`, role: "img", "aria-label": "Requests of the last minutes by run and sampler" }, lines, rects, names);
}

// A figure of the last minutes, or of a selected range. `look` fetches new data.
export function timeline(signal) {
  const place = h("div");
  const words = h("span", { class: "quiet" });
  const numbers = h("div");
  const details = h("details", {}, h("summary", {}, "View as table", h("span", { class: "hidden" }, " (timeline)")), numbers);
  const legend = h("span", { class: "legend" });
  const whole = { from: 0, to: 1 };
  let view = null; // null follows the present
  let bars = [];
  const visibleRange = () => view || whole;
  const widthOf = () => Math.max(200, place.clientWidth || 1000);
  const set = (from, to) => {
    const size = Math.max(SHORTEST_S, Math.min(to - from, whole.to - whole.from));
    const start = Math.max(whole.from, Math.min(from, whole.to - size));
    view = size >= whole.to - whole.from ? null : { from: start, to: start + size };
    draw();
  };
  const zoom = (times, at = 0.5) => {
    const { from, to } = visibleRange();
    const middle = from + at * (to - from);
    set(middle - (middle - from) * times, middle + (to - middle) * times);
  };
  const move = (share) => {
    const { from, to } = visibleRange();
    set(from + share * (to - from), to + share * (to - from));
  };
  const draw = () => {
    const range = visibleRange();
    const lanes = [...new Set(bars.filter((bar) => bar.to >= range.from && bar.from <= range.to).map((bar) => bar.lane))].slice(0, MOST_ROWS);
    words.textContent = `${seconds(whole.to - range.from)} ago to ${whole.to - range.to < 0.5 ? "now" : `${seconds(whole.to - range.to)} ago`}`;
    put(place, lanes.length ? drawn(bars, range, lanes, widthOf()) : empty("You had no requests in these minutes."));
    if (details.open) list();
  };
  const list = () => {
    const columns = [
      { label: "Run or sampler", kind: "mono", cell: (row) => shortId(row.lane) },
      { label: "Activity", cell: (row) => KINDS[row.kind].name },
      { label: "Started", number: true, cell: (row) => `${seconds(whole.to - row.from)} ago` },
      { label: "Details", cell: (row) => row.title },
    ];
    put(numbers, table("Requests of the last minutes", columns, bars.slice(0, 200)));
  };
  details.addEventListener("toggle", () => details.open && list());
  place.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    const box = place.getBoundingClientRect();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, Math.max(0, Math.min(1, (event.clientX - box.left - Math.min(LEFT, 0.3 * box.width)) / (box.width - Math.min(LEFT, 0.3 * box.width)))));
  });
  const keys = { "+": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25), 0: () => set(whole.from, whole.to) };
  const tools = h(
    "div",
    { class: "actions" },
    button("Zoom in", () => zoom(0.5)),
    button("Zoom out", () => zoom(2)),
    button("Earlier", () => move(-0.5)),
    button("Later", () => move(0.5)),
    button("All", () => set(whole.from, whole.to)),
    words,
  );
  const figure = h(
    "figure",
    { class: "timeline" },
    h("figcaption", {}, legend),
    h("div", { class: "lanes-place", tabindex: "0", role: "group", "aria-label": "Timeline; plus and minus zoom, arrows move, 0 shows all", on: { keydown: (event) => keys[event.key] && (event.preventDefault(), keys[event.key]()) } }, place),
    tools,
    details,
  );
  return {
    figure,
    async look() {
      const answer = (await get("/dashboard/timeline?minutes=10", signal)) || {};
      if (!isNumber(answer.now) || !isNumber(answer.since)) return;
      bars = barsOf(answer);
      whole.to = answer.now;
      whole.from = bars.length ? Math.max(answer.since, Math.min(...bars.map((bar) => bar.from))) : answer.since;
      put(legend, KINDS.map((kind, index) => (bars.some((bar) => bar.kind === index) ? h("span", { class: `key ${kind.style}` }, kind.name) : null)));
      draw();
    },
  };
}
