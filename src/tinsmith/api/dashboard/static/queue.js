// The page of waiting requests and recent steps.

import { get, poll } from "./api.js";
import { stacked } from "./charts.js";
import { h, keep, page, section, state } from "./dom.js";
import { ago, clock, count, counted, percent, seconds, shortId, some } from "./format.js";
import { table } from "./table.js";
import { timeline } from "./timeline.js";

const KINDS = [{ name: "your tokens", style: "s1" }, { name: "other tenants' tokens", style: "s3" }];
const MOST_STEPS = 20;

const WAITING = [
  { label: "Run or sampler", kind: "mono", cell: (row) => h("span", { title: row.lane }, shortId(row.lane)), copy: (row) => row.lane },
  { label: "Operation", cell: (row) => row.kind?.replaceAll("_", " ") },
  { label: "Base model", cell: (row) => row.base_model },
  { label: "Requests", number: true, cell: (row) => count(row.requests) },
  { label: "Tokens", number: true, cell: (row) => count(row.tokens) },
  { label: "Oldest", number: true, cell: (row) => ago(row.oldest_at) },
  { label: "Reason", cell: (row) => row.why || "-" },
];

const STEPS = [
  { label: "Ended", number: true, cell: (row) => clock(row.ended_at) },
  { label: "Duration", number: true, cell: (row) => seconds(row.duration_s) },
  { label: "Passes", number: true, cell: (row) => some(row.num_passes) },
  { label: "Optimizer steps", number: true, cell: (row) => some(row.num_optim_steps) },
  { label: "Other operations", number: true, cell: (row) => some(row.num_singles) },
  { label: "Tokens", number: true, cell: (row) => some(row.num_tokens) },
  { label: "Your tokens", shared: true, number: true, cell: (row) => some(row.own_tokens) },
  { label: "Tenants", shared: true, number: true, cell: (row) => count(row.num_tenants) },
  { label: "Your runs", kind: "mono", cell: runsOf },
];

// Lists the runs, with their tokens if there are several.
function runsOf({ own_runs: runs }) {
  if (!runs?.length) return "-";
  return runs.map((run) => (runs.length > 1 ? `${shortId(run.model_id)} (${count(run.tokens)})` : shortId(run.model_id))).join(", ");
}

const ofOthers = (step) => Math.max(0, step.num_tokens - step.own_tokens);

function inWords(passes, budget) {
  const total = passes.reduce((sum, step) => sum + step.num_tokens, 0);
  const yourTokens = passes.reduce((sum, step) => sum + step.own_tokens, 0);
  const fair = passes.reduce((sum, step) => sum + step.num_tokens / Math.max(1, step.num_tenants), 0);
  const size = total / passes.length;
  const last = passes.length > 1 ? `The last ${passes.length} steps with passes had ${count(Math.round(size))} tokens on average` : `The last step with passes had ${counted(total, "token")}`;
  const yours = passes.some(ofOthers) ? ` ${percent(yourTokens / total)} of them were yours. An equal share would be ${percent(fair / total)}.` : "";
  return `${last}, ${percent(size / budget)} of the ${count(budget)} that fit.${yours}`;
}

function engine(base, budget) {
  const passes = base.steps.filter((step) => step.num_tokens).reverse();
  const bars = passes.map((step) => ({ label: clock(step.ended_at), parts: [step.own_tokens, ofOthers(step)] }));
  const alone = base.steps.every((step) => step.num_tenants === 1 && !ofOthers(step));
  return section(
    base.base_model,
    h("p", {}, state(base.state), base.reason ? ` ${base.reason}` : ""),
    passes.length ? [stacked("Tokens of the last steps with passes", KINDS, bars), h("p", {}, inWords(passes, budget))] : null,
    table(`Last steps of ${base.base_model}`, STEPS.filter((column) => !(alone && column.shared)), base.steps.slice(0, MOST_STEPS), { none: "This engine has not run a step yet." }),
  );
}

export default {
  title: "Queue",
  async show(main, _parts, signal) {
    const waiting = h("div");
    const engines = h("div");
    const drawWaiting = keep(waiting);
    const drawEngines = keep(engines);
    const times = timeline(signal);
    page(main, "Queue and packing", section("Waiting requests", waiting), section("Timeline", times.figure), engines);
    const lookAtTimes = poll(signal, 5, times.look);
    await poll(signal, 2, async () => {
      const answer = await get("/dashboard/queue", signal);
      drawWaiting([answer.waiting, answer.waiting.length ? answer.now : 0], () => table("Waiting requests", WAITING, answer.waiting, { none: "You have no waiting requests." }));
      drawEngines(answer.engines, () => answer.engines.map((one) => engine(one, answer.step_token_budget)));
    });
    await lookAtTimes;
  },
};
