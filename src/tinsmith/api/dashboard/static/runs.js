// The list of runs, which also routes to the pages of one run and of several.

import { get, poll } from "./api.js";
import { MOST_LINES } from "./charts.js";
import { showComparison } from "./compare.js";
import { button, h, keep, page, svg } from "./dom.js";
import { ago, count, counted, number, seconds, when } from "./format.js";
import { isNumber } from "./scale.js";
import { RUN_LINK, nameOf, statusOf } from "./overview.js";
import { showRun } from "./run.js";
import { pager, table } from "./table.js";

const LIMIT = 50;
const OUTLINE_S = 30;

// Draws a sparkline of the whole run.
function spark(outline) {
  const values = (outline?.values || []).filter(isNumber);
  if (!values.length) return "-";
  const low = Math.min(...values);
  const size = Math.max(...values) - low || 1;
  const points = values.map((value, index) => `${(values.length > 1 ? (94 * index) / (values.length - 1) : 47) + 3},${21 - (18 * (value - low)) / size}`);
  const title = `${outline.name}: from ${number(values[0])} to ${number(values[values.length - 1])}`;
  return h("span", { class: "spark", title }, svg("svg", { viewBox: "0 0 100 24", role: "img", "aria-label": title }, svg("polyline", { points: points.join(" ") })), h("span", {}, number(values[values.length - 1])));
}

const columns = (chosen, outlines, choose) => [
  { ...RUN_LINK, cell: (row) => [RUN_LINK.cell(row), row.tags.map((tag) => h("span", { class: "tag" }, tag))] },
  {
    label: "Compare",
    cell: (row) => h("input", { type: "checkbox", "aria-label": `Compare ${nameOf(row)}`, checked: chosen.has(row.model_id), on: { change: (event) => choose(row.model_id, event.target.checked) } }),
  },
  { label: "Curve", cell: (row) => spark(outlines.get(row.model_id)) },
  { label: "Base model", sort: "base_model", cell: (row) => row.base_model },
  { label: "Rank", sort: "lora_rank", number: true, cell: (row) => (row.lora_rank ? count(row.lora_rank) : "all weights") },
  { label: "Status", cell: statusOf },
  { label: "Duration", number: true, cell: (row) => seconds(row.duration_s) },
  { label: "Step", number: true, cell: (row) => count(row.step) },
  { label: "Loss per token", number: true, cell: (row) => number(row.metrics?.loss_per_token) },
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
  const chosen = new Set();
  const outlines = new Map();
  let outlinedAt = 0;
  let turn = 0;
  const compare = button("Compare", () => {
    location.hash = `#/runs/compare/${[...chosen].map(encodeURIComponent).join("/")}`;
  }, { disabled: true });
  const choose = (id, yes) => {
    if (yes) chosen.add(id);
    else chosen.delete(id);
    compare.disabled = chosen.size < 2 || chosen.size > MOST_LINES;
    compare.textContent = chosen.size ? `Compare ${counted(chosen.size, "run")}${chosen.size > MOST_LINES ? ` (at most ${MOST_LINES})` : ""}` : "Compare";
  };
  const look = async () => {
    const mine = ++turn;
    const whole = Date.now() - outlinedAt > OUTLINE_S * 1000;
    const query = new URLSearchParams({ ...asked, limit: LIMIT, outlines: whole });
    const found = await get(`/dashboard/runs?${query}`, signal);
    if (mine !== turn) return;
    if (whole) outlinedAt = Date.now();
    if (whole) for (const run of found.runs) outlines.set(run.model_id, run.outline);
    const sorted = { by: asked.sort, order: asked.order, change: (sort, order) => again({ sort, order, offset: 0 }) };
    const none = asked.search ? "No run matches all of these words." : "No runs yet. A training client creates one.";
    draw([found.runs, outlinedAt, asked.sort, asked.order, Math.floor(Date.now() / 10000)], () => table("Runs", columns(chosen, outlines, choose), found.runs, { sorted, none }));
    drawPages(found.cursor, () => pager(found.cursor, (offset) => again({ offset })));
  };
  const again = async (changes) => {
    const focused = list.contains(document.activeElement) ? document.activeElement.textContent : null;
    Object.assign(asked, changes);
    outlinedAt = 0;
    await look();
    if (focused) [...list.querySelectorAll("button.sort")].find((one) => one.textContent === focused)?.focus();
  };
  let timer;
  const search = h("input", {
    id: "search",
    type: "search",
    placeholder: "id, name, tag, base model, project, state",
    maxlength: 200,
    on: {
      input: () => {
        clearTimeout(timer);
        timer = setTimeout(() => again({ search: search.value.trim(), offset: 0 }), 200);
      },
    },
  });
  page(main, "Runs", h("div", { class: "tools" }, h("label", { for: "search" }, "Search"), search, compare), list, pages);
  await poll(signal, 4, look);
}

function show(main, [id, ...others], signal) {
  if (id === "compare") return showComparison(main, others.slice(0, MOST_LINES), signal);
  return id ? showRun(main, id, signal) : showList(main, signal);
}

export default { title: "Runs", show };
