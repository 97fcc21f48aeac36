// The page of one run: properties, curves in groups, and checkpoints.

import { ask, get, path, poll } from "./api.js";
import { curve } from "./charts.js";
import { listed } from "./checkpoints.js";
import { button, code, empty, h, keep, page, put, question, section, state, tell } from "./dom.js";
import { count, seconds, shortId, when } from "./format.js";
import { figuresIn } from "./figures.js";
import { lineage } from "./lineage.js";
import { csvOf, download, lineOf, metricsOf, rewardless } from "./metrics.js";
import { nameOf, statusOf } from "./overview.js";
import { playgroundOf } from "./playground.js";
import { runTabs } from "./run_samples.js";
import { facts } from "./table.js";

const HINT = `from tinsmith.exchange.metrics import RunMetrics
run = RunMetrics(training_client.model_id)
run.log({"reward": rewards}, step)`;

// The points of a run. `look` fetches new ones and returns whether there were any.
export function pointsOf(id, signal) {
  const points = new Map();
  let cursor = 0;
  return {
    async look() {
      const content = await get(`${path`/training_runs/${id}/metrics`}?after=${cursor}`, signal);
      cursor = content.cursor;
      for (const point of content.points) points.set(`${point.source} ${point.step}`, point);
      return content.points.length > 0;
    },
    all: () => [...points.values()].sort((a, b) => a.step - b.step),
  };
}

export async function showRun(main, id, signal) {
  const about = h("div");
  const stored = h("div");
  const groups = h("div");
  const drawAbout = keep(about);
  const drawStored = keep(stored);
  const related = h("div");
  const drawLinks = keep(related);
  const points = pointsOf(id, signal);
  const nothing = empty("No optimizer step yet. Curves appear after the first.");
  const hint = h("div");
  put(groups, section("Curves", nothing));

  function drawCurves() {
    const all = points.all();
    const metrics = metricsOf(all);
    if (!metrics.length) return;
    const start = view.time ? Math.min(...all.map((point) => point.time)) : null;
    figures.draw(metrics.map((metric) => {
      const line = lineOf(all, metric, start);
      return { metric, args: [line.xs, line.values, line] };
    }));
    if (rewardless(metrics)) keepHint(true, () => empty("This run logs no reward. Three lines in the training loop show it here:", HINT, "the lines that log a reward"));
    else put(hint);
  }
  const keepHint = keep(hint);
  const figures = figuresIn(groups, (metric, view, extras) => curve(metric.title, metric.source === "client" ? "logged by the client" : metric.name, extras.signal || signal, view, extras), signal, drawCurves);
  const { view, controls } = figures;
  const lookAtCurves = async () => {
    if (await points.look()) drawCurves();
  };
  const lookAtRun = async () => {
    const run = await get(path`/dashboard/runs/${id}`, signal);
    drawCompare(run.base_model, (base) => h("a", { href: playgroundOf(base, `tinker://${id}`) }, "Compare with its base model"));
    drawAbout(run, () => describe(run, () => edit(run, lookAtRun)));
    heading.textContent = `Run ${nameOf(run)}`;
  };
  const lookAtLinks = async () => {
    const { links } = await get(path`/dashboard/runs/${id}/lineage`, signal);
    drawLinks(links, () => lineage(id, links));
  };
  const lookAtCheckpoints = async () => {
    const { checkpoints } = await get(`/dashboard/checkpoints?${new URLSearchParams({ run_id: id, limit: 500 })}`, signal);
    drawStored(checkpoints, () => listed(checkpoints));
  };
  const name = `run-${shortId(id).replaceAll(":", "-")}`;
  const files = [
    button("CSV", () => download(`${name}.csv`, "text/csv", csvOf(points.all())), { class: "plain", "aria-label": "Download all metrics as CSV" }),
    button("JSON", () => download(`${name}.json`, "application/json", JSON.stringify(points.all(), null, 1)), { class: "plain", "aria-label": "Download all metrics as JSON" }),
  ];
  controls.append(h("span", {}, "Download", files));
  const compare = h("div", { class: "uses" });
  const drawCompare = keep(compare);
  controls.append(compare);
  const heading = page(main, `Run ${shortId(id)}`, runTabs(id, "curves"), about, controls, hint, groups, section("Checkpoints", stored), section("Lineage", related));
  await Promise.all([poll(signal, 2, lookAtRun), poll(signal, 2, lookAtCurves), poll(signal, 10, lookAtCheckpoints), poll(signal, 30, lookAtLinks)]);
}

async function edit(run, again) {
  const name = h("input", { id: "name", maxlength: 128, value: run.user_metadata?.name || "" });
  const tags = h("input", { id: "tags", maxlength: 300, value: run.tags.join(", "), placeholder: "separated by commas" });
  const notes = h("textarea", { id: "notes", rows: 6, maxlength: 4000, value: run.user_metadata?.notes || "" });
  const body = [h("label", { for: "name" }, "Name"), name, h("label", { for: "tags" }, "Tags"), tags, h("label", { for: "notes" }, "Notes"), notes];
  const read = () => ({ name: name.value.trim(), notes: notes.value.trim(), tags: tags.value.split(",").map((tag) => tag.trim()).filter(Boolean) });
  const asked = await question("Name, tags and notes", body, "Save", { read });
  if (!asked) return;
  await ask("PUT", path`/dashboard/runs/${run.model_id}`, asked);
  tell("Saved.");
  await again();
}

function describe(run, change) {
  const { name: _name, tags: _tags, notes, ...metadata } = run.user_metadata || {};
  return facts([
    ["Name", h("span", {}, nameOf(run), " ", run.tags.map((tag) => h("span", { class: "tag" }, tag)), button("Edit", change, { class: "plain", "aria-label": "Edit the name, the tags and the notes" }))],
    ["Status", h("span", {}, statusOf(run), run.status_reason ? ` ${run.status_reason}` : "")],
    ["Duration", seconds(run.duration_s)],
    ["Model", h("span", {}, state(run.state), run.reason ? ` ${run.reason}` : "")],
    ["Step", count(run.step)],
    ["Base model", run.base_model],
    ["LoRA rank", run.lora_rank ? count(run.lora_rank) : "none (all weights are trained)"],
    ["Optimizer", run.optimizer_type],
    ["Owner", run.owner],
    ["Session", h("a", { href: `#${path`/sessions/${run.session_id}`}` }, run.display_name || shortId(run.session_id))],
    ["Project", run.project_id],
    ["Created", when(run.created_at)],
    ["Last request", when(run.last_request_at)],
    ["Path", code(`tinker://${run.model_id}`, "the path of the run")],
    ["Notes", notes ? h("pre", { class: "notes" }, notes) : null],
    ...Object.entries(metadata).map(([name, value]) => [name, value]),
  ]);
}
