// The columns of the table of runs: the usual ones, and any setting or metric by its name.

import { get } from "./api.js";
import { h, question, svg } from "./dom.js";
import { ago, count, number, seconds, shortId, when } from "./format.js";
import { statusOf } from "./overview.js";
import { isNumber } from "./scale.js";

export const CURVE = "curve";
export const USUAL = [CURVE, "base_model", "status", "duration", "step", "loss", "created"];

// Columns that are shown from a run's own description: {label, sort, cell, number?}. `sort` is the server's name.
const FACTS = {
  [CURVE]: { label: "Curve", cell: (row, { outlines }) => spark(outlines.get(row.model_id)) },
  base_model: { label: "Base model", kind: "long", sort: "base_model", cell: (row) => row.base_model },
  status: { label: "Status", sort: "status", cell: statusOf },
  duration: { label: "Duration", number: true, sort: "duration", cell: (row) => seconds(row.duration_s) },
  step: { label: "Step", number: true, sort: "step" },
  created: { label: "Created", number: true, sort: "created_at", cell: (row) => when(row.created_at) },
  last_request: { label: "Last request", number: true, sort: "last_request_at", cell: (row) => ago(row.last_request_at) },
  rank: { label: "Rank", number: true, sort: "lora_rank", cell: (row) => (row.lora_rank ? count(row.lora_rank) : "all weights") },
  project: { label: "Project", cell: (row) => row.project_id || "-" },
  optimizer: { label: "Optimizer" },
  state: { label: "Model", sort: "state" },
  session: { label: "Session", kind: "mono", cell: (row) => h("a", { href: `#/sessions/${encodeURIComponent(row.session_id)}` }, shortId(row.session_id)) },
  tag: { label: "Tags" },
  name: { label: "Name" },
  id: { label: "Id", kind: "mono", sort: "model_id", cell: (row) => shortId(row.model_id) },
  loss: { label: "Loss", number: true },
  lr: { label: "Learning rate", number: true, cell: (row) => settingText(row.values?.lr) },
  reward: { label: "Reward", number: true },
};

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

// The text of any value: a number, a text or a list.
export const valueText = (value) => (value === null || value === undefined ? "-" : isNumber(value) ? number(value) : Array.isArray(value) ? value.join(", ") : String(value));

// The text of a setting, with the digits that it was given.
export const settingText = (value) => (isNumber(value) ? String(Number(value.toPrecision(6))) : valueText(value));

// A column of a name. `context` has `outlines` by run.
export function columnOf(name, context, isNumeric) {
  const fact = Object.hasOwn(FACTS, name) ? FACTS[name] : { label: name, kind: "long" };
  const cell = fact.cell ? (row) => fact.cell(row, context) : (row) => valueText(row.values?.[name]);
  return { kind: fact.kind, label: fact.label, number: fact.number ?? isNumeric, sort: name === CURVE ? null : (fact.sort ?? name), cell };
}

// A column of groups: mean and deviation of numbers, or the common value.
export function groupColumnOf(name, groups) {
  const label = Object.hasOwn(FACTS, name) ? FACTS[name].label : name;
  return {
    label,
    number: groups.some((group) => isNumber(group.columns?.[name]?.mean)),
    sort: name,
    cell: ({ columns }) => {
      const summary = columns?.[name];
      if (!summary?.count) return "-";
      if (!isNumber(summary.mean)) return summary.different === 1 ? valueText(summary.value) : isNumber(summary.different) ? `${count(summary.different)} values` : "-";
      const format = (value) => (name === "duration" ? seconds(value) : number(value));
      return h("span", { title: `mean of ${count(summary.count)}${isNumber(summary.deviation) ? ", with the standard deviation" : ""}` }, format(summary.mean), isNumber(summary.deviation) ? h("span", { class: "quiet" }, ` \u00b1 ${format(summary.deviation)}`) : null);
    },
  };
}

export const labelOf = (name) => (Object.hasOwn(FACTS, name) ? FACTS[name].label : name);

export async function namesOfRuns(signal) {
  const { names } = await get("/dashboard/runs?names=true&limit=0", signal);
  return { facts: names?.facts || [], settings: names?.settings || [], metrics: names?.metrics || [] };
}

// Asks which columns are shown. Resolves to names in the order of choice, or null.
export async function chooseColumns(chosen, signal) {
  const { facts, settings, metrics } = await namesOfRuns(signal);
  const present = new Set([CURVE, ...facts, ...settings, ...metrics]);
  const parts = [["Chosen", chosen], ["Run", [CURVE, ...facts]], ["Settings", settings], ["Metrics", metrics]];
  const listed = new Set();
  const boxes = parts.flatMap(([title, names]) => {
    const rest = names.filter((name) => !listed.has(name));
    rest.forEach((name) => listed.add(name));
    if (!rest.length) return [];
    const box = (name) => h("label", { class: "check" }, h("input", { type: "checkbox", value: name, checked: chosen.includes(name) }), labelOf(name), present.has(name) ? null : h("span", { class: "quiet" }, " (no run has it)"));
    return [h("fieldset", {}, h("legend", {}, title), rest.map(box))];
  });
  const list = h("div", { class: "choices", tabindex: "0", role: "group", "aria-label": "Columns" }, boxes);
  const find = h("input", { id: "find-column", type: "search", placeholder: "name of a value", on: { input: () => {
    const words = find.value.trim().toLowerCase();
    for (const one of list.querySelectorAll("label")) one.hidden = !one.textContent.toLowerCase().includes(words);
    for (const one of list.querySelectorAll("fieldset")) one.hidden = !one.querySelector("label:not([hidden])");
  } } });
  const read = () => {
    const ticked = new Set([...list.querySelectorAll("input:checked")].map((one) => one.value));
    return [...chosen.filter((name) => ticked.has(name)), ...[...ticked].filter((name) => !chosen.includes(name))];
  };
  return question("Columns", [h("label", { for: "find-column" }, "Find"), find, list], "Show", { read });
}
