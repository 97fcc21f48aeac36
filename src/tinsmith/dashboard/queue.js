// Who waits for what, and what the last steps were made of.

import { get, poll } from "./api.js";
import { stacked } from "./charts.js";
import { h, keep, page, section, state } from "./dom.js";
import { ago, count, percent, seconds, shortId } from "./format.js";
import { table } from "./table.js";

const KINDS = [{ name: "your tokens", style: "s1" }, { name: "other tenants'", style: "s3" }];
const SHOWN = 20;

const WAITING = [
  { label: "Waits", kind: "mono", cell: (row) => h("span", { title: row.lane }, shortId(row.lane)) },
  { label: "For", cell: (row) => row.kind.replaceAll("_", " ") },
  { label: "Of", cell: (row) => row.base_model },
  { label: "Requests", number: true, cell: (row) => count(row.requests) },
  { label: "Tokens", number: true, cell: (row) => count(row.tokens) },
  { label: "The oldest", number: true, cell: (row) => ago(row.oldest_at) },
];

const STEPS = [
  { label: "Ended", number: true, cell: (row) => new Date(row.ended_at).toLocaleTimeString("en-GB") },
  { label: "Took", number: true, cell: (row) => seconds(row.duration_s) },
  { label: "Passes", number: true, cell: (row) => count(row.num_passes) },
  { label: "Optimizer steps", number: true, cell: (row) => count(row.num_optim_steps) },
  { label: "Others", number: true, cell: (row) => count(row.num_singles) },
  { label: "Tokens", number: true, cell: (row) => count(row.num_tokens) },
  { label: "Yours", number: true, cell: (row) => count(row.own_tokens) },
  { label: "Tenants", number: true, cell: (row) => count(row.num_tenants) },
  { label: "Your runs", kind: "mono", cell: (row) => row.own_runs.map((run) => `${shortId(run.model_id)} ${count(run.tokens)}`).join(", ") || "-" },
];

function inWords(steps, budget) {
  const passes = steps.filter((step) => step.num_tokens);
  if (!passes.length) return "No passes in the last steps.";
  const total = passes.reduce((sum, step) => sum + step.num_tokens, 0);
  const own = passes.reduce((sum, step) => sum + step.own_tokens, 0);
  const fair = passes.reduce((sum, step) => sum + step.num_tokens / Math.max(1, step.num_tenants), 0);
  const size = total / passes.length;
  return `The last ${passes.length} steps with passes had ${count(Math.round(size))} tokens on average, ${percent(size / budget)} of the ${count(budget)} that fit. ${percent(own / total)} of them were yours; an equal share would be ${percent(fair / total)}.`;
}

function engine(found, budget) {
  const steps = [...found.steps].reverse();
  const bars = steps.filter((step) => step.num_tokens).map((step) => ({
    label: new Date(step.ended_at).toLocaleTimeString("en-GB"),
    parts: [step.own_tokens, Math.max(0, step.num_tokens - step.own_tokens)],
  }));
  return section(
    found.base_model,
    h("p", {}, state(found.state), found.reason ? ` ${found.reason}` : ""),
    bars.length ? [stacked("Tokens of the last steps with passes", KINDS, bars), h("p", {}, inWords(steps, budget))] : null,
    table(`Last steps of ${found.base_model}`, STEPS, found.steps.slice(0, SHOWN), { none: "This engine has run nothing yet." }),
  );
}

export default {
  title: "Queue",
  async show(main, _parts, signal) {
    const waiting = h("div");
    const engines = h("div");
    const drawWaiting = keep(waiting);
    const drawEngines = keep(engines);
    page(main, "Queue and packing", section("Waiting", waiting), engines);
    await poll(signal, 2, async () => {
      const found = await get("/dashboard/queue", signal);
      drawWaiting([found.waiting, found.waiting.length ? found.now : 0], () => table("Waiting requests", WAITING, found.waiting, { none: "Nothing of yours waits." }));
      drawEngines(found.engines, () => found.engines.map((one) => engine(one, found.step_token_budget)));
    });
  },
};
