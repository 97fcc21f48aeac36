// All runs, and one of them with its curves.

import { get, path, poll } from "./api.js";
import { curve } from "./charts.js";
import { empty, h, keep, page, section, state } from "./dom.js";
import { ago, count, number, shortId, when } from "./format.js";
import { RUN_LINK } from "./overview.js";
import { facts, pager, table } from "./table.js";
import { listed } from "./checkpoints.js";

const LIMIT = 50;

// What the metrics are called, in the order in which they are shown; what is not here comes after them.
const TITLES = new Map([
  ["loss_per_token", "Loss per token"],
  ["loss_per_datum", "Loss per datum"],
  ["ppo_kl:mean", "KL (sampled minus current logprobs)"],
  ["ratio:mean", "Importance ratio"],
  ["pg_clipfrac:mean", "Clipped share"],
  ["grad_norm", "Gradient norm"],
  ["learning_rate", "Learning rate"],
  ["tokens_per_second", "Tokens per second"],
  ["step_seconds", "Seconds per step"],
  ["forward/loss_per_token", "Loss per token, forward only"],
  ["forward/loss_per_datum", "Loss per datum, forward only"],
  ["loss:sum", "Loss, summed"],
  ["tokens:sum", "Tokens of the step"],
]);

const columns = [
  RUN_LINK,
  { label: "Base model", sort: "base_model", cell: (row) => row.base_model },
  { label: "Rank", sort: "lora_rank", number: true, cell: (row) => (row.lora_rank ? count(row.lora_rank) : "all weights") },
  { label: "State", sort: "state", cell: (row) => state(row.state) },
  { label: "Step", number: true, cell: (row) => count(row.step) },
  { label: "Loss per token", number: true, cell: (row) => number(row.metrics?.loss_per_token) },
  { label: "Owner", cell: (row) => row.owner },
  { label: "Project", cell: (row) => row.project_id || "-" },
  { label: "Created", sort: "created_at", number: true, cell: (row) => when(row.created_at) },
  { label: "Last request", sort: "last_request_at", number: true, cell: (row) => ago(row.last_request_at) },
];

async function showList(main, signal) {
  const asked = { search: "", sort: "created_at", order: "desc", offset: 0 };
  const list = h("div");
  const pages = h("div");
  const draw = keep(list);
  const drawPages = keep(pages);
  let turn = 0;
  const look = async () => {
    const mine = ++turn;
    const query = new URLSearchParams({ ...asked, limit: LIMIT });
    const found = await get(`/dashboard/runs?${query}`, signal);
    if (mine !== turn) return;
    const sorted = { by: asked.sort, order: asked.order, change: (sort, order) => again({ sort, order, offset: 0 }) };
    const none = asked.search ? "No run has all of these words." : "No run yet. A training client makes one.";
    draw([found.runs, asked.sort, asked.order, Math.floor(Date.now() / 10000)], () => table("Runs", columns, found.runs, { sorted, none }));
    drawPages(found.cursor, () => pager(found.cursor, (offset) => again({ offset })));
  };
  const again = async (changes) => {
    const focused = list.contains(document.activeElement) ? document.activeElement.textContent : null;
    Object.assign(asked, changes);
    await look();
    if (focused) [...list.querySelectorAll("button.sort")].find((one) => one.textContent === focused)?.focus();
  };
  let timer;
  const search = h("input", {
    id: "search",
    type: "search",
    placeholder: "id, base model, session's name, project, state",
    maxlength: 200,
    on: {
      input: () => {
        clearTimeout(timer);
        timer = setTimeout(() => again({ search: search.value.trim(), offset: 0 }), 200);
      },
    },
  });
  page(main, "Runs", h("div", { class: "tools" }, h("label", { for: "search" }, "Search"), search), list, pages);
  await poll(signal, 4, look);
}

async function showRun(main, id, signal) {
  const about = h("div");
  const curves = h("div", { class: "curves" });
  const stored = h("div");
  const drawAbout = keep(about);
  const drawStored = keep(stored);
  const points = new Map();
  const drawn = new Map();
  let cursor = 0;
  const nothing = empty("No optimizer step yet. The curves begin with the first.");
  curves.append(nothing);

  const lookAtCurves = async () => {
    const found = await get(`${path`/training_runs/${id}/metrics`}?after=${cursor}`, signal);
    cursor = found.cursor;
    if (!found.points.length) return;
    for (const point of found.points) points.set(`${point.source} ${point.step}`, point);
    const all = [...points.values()].sort((a, b) => a.step - b.step);
    nothing.remove();
    for (const source of ["client", "server"]) {
      drawAll(all.filter((point) => point.source === source), source, curves, drawn, signal);
    }
  };
  const lookAtRun = async () => {
    const run = await get(path`/dashboard/runs/${id}`, signal);
    drawAbout(run, () => describe(run));
  };
  const lookAtCheckpoints = async () => {
    const found = await get(path`/training_runs/${id}/checkpoints`, signal);
    drawStored(found.checkpoints, () => listed(found.checkpoints, lookAtCheckpoints));
  };
  page(main, `Run ${shortId(id)}`, about, section("Curves", curves), section("Checkpoints", stored));
  await Promise.all([poll(signal, 2, lookAtRun), poll(signal, 2, lookAtCurves), poll(signal, 10, lookAtCheckpoints)]);
}

function describe(run) {
  return facts([
    ["State", h("span", {}, state(run.state), run.reason ? ` ${run.reason}` : "")],
    ["Step", count(run.step)],
    ["Base model", run.base_model],
    ["LoRA rank", run.lora_rank ? count(run.lora_rank) : "none: all weights are trained"],
    ["Optimizer", run.optimizer_type],
    ["Owner", run.owner],
    ["Session", h("a", { href: `#${path`/sessions/${run.session_id}`}` }, run.display_name || shortId(run.session_id))],
    ["Project", run.project_id],
    ["Created", when(run.created_at)],
    ["Last request", when(run.last_request_at)],
    ["Path", h("code", {}, `tinker://${run.model_id}`)],
    ...Object.entries(run.user_metadata || {}).map(([name, value]) => [name, value]),
  ]);
}

function drawAll(points, source, place, drawn, signal) {
  const names = new Set(points.flatMap((point) => Object.keys(point.metrics)));
  const known = [...TITLES.keys()].filter((name) => names.has(name));
  const others = [...names].filter((name) => !TITLES.has(name)).sort();
  for (const name of [...known, ...others]) {
    const mine = points.filter((point) => name in point.metrics);
    const at = `${source} ${name}`;
    if (!drawn.has(at)) {
      const note = source === "client" ? "logged by the client" : name;
      const made = curve(source === "server" && TITLES.has(name) ? TITLES.get(name) : name, note, signal);
      drawn.set(at, made);
      place.append(made.figure);
    }
    drawn.get(at).update(mine.map((point) => point.step), mine.map((point) => point.metrics[name]));
  }
}

export default {
  title: "Runs",
  show: (main, [id], signal) => (id ? showRun(main, id, signal) : showList(main, signal)),
};
