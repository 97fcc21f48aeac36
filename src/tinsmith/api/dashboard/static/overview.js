// The overview page.

import { get, path, poll } from "./api.js";
import { stacked } from "./charts.js";
import { empty, h, keep, page, put, section, state } from "./dom.js";
import { ago, bytes, count, number, short, when } from "./format.js";
import { isNumber } from "./scale.js";
import { firstRun } from "./starts.js";
import { table } from "./table.js";

const HOUR_MS = 3600e3;
export const KINDS = [
  { name: "training", style: "s1" },
  { name: "sampled", style: "s2" },
  { name: "prompts", style: "s3" },
  { name: "prompts, cached", style: "s4" },
];

const kindOf = (info) => {
  if (info.type === "training") return 0;
  if (info.type === "sampling_sample") return 1;
  if (info.type === "sampling_prefill") return info.cached ? 3 : 2;
  return -1;
};

// Sums tokens per period from usage events: {label, parts} in the order of KINDS.
export function tokenBars(events, startMs, stepMs, bars, label) {
  const periods = Array.from({ length: bars }, (_, index) => ({ label: label(new Date(startMs + index * stepMs)), parts: [0, 0, 0, 0] }));
  for (const event of events) {
    const kind = kindOf(event.event_info);
    const index = Math.floor((Date.parse(event.bucket_start) - startMs) / stepMs);
    if (kind >= 0 && periods[index] && isNumber(event.event_info.token_count)) periods[index].parts[kind] += event.event_info.token_count;
  }
  return periods;
}

function card(name, value, note, href) {
  return h("a", { class: "card", href }, h("span", { class: "name" }, name), h("span", { class: "value" }, value), h("span", { class: "quiet" }, note));
}

function cards({ counts }) {
  return [
    card("Runs loaded", count(counts.loaded_runs), `of ${count(counts.runs)}`, "#/runs"),
    card("Active sessions", count(counts.active_sessions), `of ${count(counts.sessions)}`, "#/sessions"),
    card("Waiting requests", count(counts.waiting_requests), counts.waiting_requests ? bytes(counts.waiting_bytes) : "none", "#/queue"),
    card("Checkpoints", count(counts.checkpoints), counts.checkpoints ? bytes(counts.checkpoint_bytes) : "none", "#/checkpoints"),
    card("Unfinished jobs", count(counts.unfinished_jobs), `of ${count(counts.jobs)}`, "#/jobs"),
  ];
}

// Shows the used memory, with the budget if there is one; a tooltip lists the holders.
function memory({ budget, ...holders }) {
  const held = Object.values(holders).filter(isNumber).reduce((sum, value) => sum + value, 0);
  const who = Object.entries(holders).map(([name, value]) => `${name} ${bytes(value)}`);
  return held ? h("span", { title: who.join(", ") }, budget ? `${bytes(held)} of ${bytes(budget)}` : bytes(held)) : "-";
}

const BASES = [
  { label: "Base model", cell: (row) => row.base_model },
  { label: "State", cell: (row) => state(row.state) },
  { label: "Context (tokens)", number: true, cell: (row) => count(row.max_context_length) },
  { label: "Vocabulary", number: true, cell: (row) => count(row.vocab_size) },
  { label: "Memory", number: true, cell: (row) => memory(row.memory) },
];
const REASON = { label: "Reason", cell: (row) => row.reason || "-" };

// Adds the column of reasons only if a row has one.
const reasoned = (columns, rows) => (rows.some((row) => row.reason) ? [...columns, REASON] : columns);

const SEATS = [
  { label: "Process", kind: "mono", cell: (row) => row.name },
  { label: "Kind", cell: (row) => row.kind },
  { label: "Base model", cell: (row) => row.base_model },
  { label: "State", cell: (row) => state(row.state) },
  { label: "Your runs", number: true, cell: (row) => count(row.runs) },
  { label: "Your waiting requests", number: true, cell: (row) => count(row.waiting_requests) },
  { label: "Started", number: true, cell: (row) => ago(row.started_at) },
];

// The name of a run; without one, its base model and when it began.
export const nameOf = (row) => row.name || `${row.base_model.split("/").at(-1)} ${when(row.created_at)}`;

// The status of a run, with the reason as a tooltip.
export function statusOf(row) {
  const label = state(row.status);
  if (row.status_reason) label.title = row.status_reason;
  return label;
}

export const RUN_LINK = { label: "Run", kind: "mono", cell: (row) => h("a", { href: `#${path`/runs/${row.model_id}`}`, title: row.model_id }, nameOf(row)), copy: (row) => row.model_id };

const NEWEST = [
  RUN_LINK,
  { label: "Base model", cell: (row) => row.base_model },
  { label: "Status", cell: statusOf },
  { label: "Step", number: true, cell: (row) => count(row.step) },
  { label: "Loss per token", number: true, cell: (row) => number(row.metrics?.loss_per_token) },
  { label: "Last request", number: true, cell: (row) => ago(row.last_request_at) },
];

// The section of a server without runs.
const startSection = () => section("First run", empty("No training runs yet. In a terminal:", firstRun(), "the lines of a first run"));

export default {
  title: "Overview",
  async show(main, _parts, signal) {
    const counts = h("div", { class: "cards" });
    const engines = h("div");
    const usage = h("div");
    const runs = h("div");
    const drawCounts = keep(counts);
    const seats = h("div");
    const drawEngines = keep(engines);
    const drawSeats = keep(seats);
    const drawRuns = keep(runs);
    const first = h("div");
    const drawFirst = keep(first);
    const look = async () => {
      const answer = await get("/dashboard/overview", signal);
      drawFirst(answer.counts?.runs === 0, (none) => (none ? startSection() : null));
      drawCounts(answer.counts, () => cards(answer));
      drawEngines(answer.engines, () => table("Base models", reasoned(BASES, answer.engines), answer.engines));
      drawSeats([answer.seats, Math.floor(Date.now() / 10000)], () => table("Engines and samplers", reasoned(SEATS, answer.seats), answer.seats, { none: "No engine is running." }));
      const newest = await get("/dashboard/runs?limit=6&sort=last_request_at", signal);
      drawRuns([newest.runs, Math.floor(Date.now() / 10000)], () => table("Recent runs", NEWEST, newest.runs, { none: "No runs yet. A training client creates one." }));
    };
    const tokens = async () => {
      const end = (Math.floor(Date.now() / HOUR_MS) + 1) * HOUR_MS;
      const start = end - 24 * HOUR_MS;
      const answer = await get(`/billing/usage/events?starting_on=${iso(start)}&ending_before=${iso(end)}`, signal);
      const bars = tokenBars(answer.data, start, HOUR_MS, 24, (at) => at.toLocaleString("sv-SE").slice(11, 16));
      const total = bars.flatMap((bar) => bar.parts).reduce((sum, part) => sum + part, 0);
      const sum = () => [stacked("Tokens per hour", KINDS, bars), h("p", { class: "quiet" }, `${short(total)} tokens in 24 hours.`)];
      put(usage, total ? sum() : empty("No tokens were trained or sampled in the last 24 hours."));
    };
    page(main, "Overview", counts, first, section("Tokens in the last 24 hours", usage), section("Recent runs", runs), section("Base models", engines), section("Engines and samplers", seats));
    await Promise.all([poll(signal, 2, look), poll(signal, 60, tokens)]);
  },
};

export const iso = (ms) => new Date(ms).toISOString().replace(".000Z", "Z");
