// The page that compares runs: properties that differ, and metrics in shared figures.

import { get, path, poll } from "./api.js";
import { curves } from "./charts.js";
import { empty, h, keep, page, put, section } from "./dom.js";
import { count, seconds, when } from "./format.js";
import { figuresIn } from "./figures.js";
import { lineOf, metricsOf } from "./metrics.js";
import { nameOf } from "./overview.js";
import { pointsOf } from "./run.js";
import { table } from "./table.js";

const factsOf = (run) => ({
  "Base model": run.base_model,
  "LoRA rank": run.lora_rank ? count(run.lora_rank) : "all weights",
  Optimizer: run.optimizer_type,
  Status: run.status,
  Duration: seconds(run.duration_s),
  Step: count(run.step),
  Project: run.project_id || "-",
  Created: when(run.created_at),
  "Last learning rate": run.metrics?.learning_rate ?? "-",
  ...run.user_metadata,
  tags: run.tags.join(", ") || "-",
});

// Returns a row for each property that differs between runs.
function differences(runs) {
  const facts = runs.map(factsOf);
  const names = [...new Set(facts.flatMap(Object.keys))];
  const rows = names.map((name) => ({ name, values: facts.map((run) => String(run[name] ?? "-")) }));
  const different = rows.filter(({ values }) => new Set(values).size > 1);
  const columns = [
    { label: "Setting", cell: (row) => row.name },
    ...runs.map((run, index) => ({ label: nameOf(run), cell: (row) => row.values[index] })),
  ];
  return table("Differences", columns, different, { none: "These runs have the same settings." });
}

export async function showComparison(main, ids, signal) {
  const runs = await Promise.all(ids.map((id) => get(path`/dashboard/runs/${id}`, signal)));
  const points = ids.map((id) => pointsOf(id, signal));
  const groups = h("div");
  const settings = h("div");
  put(groups, section("Curves", empty("None of these runs has metrics yet.")));
  const names = runs.map((run, index) => (runs.filter((other) => nameOf(other) === nameOf(run)).length > 1 ? `${nameOf(run)} (${index + 1})` : nameOf(run)));
  function drawCurves() {
    const pointsByRun = points.map((one) => one.all());
    figures.draw(metricsOf(pointsByRun.flat()).map((metric) => {
      const lines = pointsByRun.map((all, index) => lineOf(all, metric, view.time && all.length ? Math.min(...all.map((point) => point.time)) : null, names[index]));
      return { metric, args: [lines] };
    }));
  }
  const figures = figuresIn(groups, (metric, view, extras) => curves(metric.title, metric.source === "client" ? "logged by the client" : metric.name, extras.signal || signal, view, extras), signal, drawCurves);
  const { view, controls } = figures;
  const links = h("ul", { class: "run-links" }, runs.map((run, index) => h("li", {}, h("span", { class: `key dot l${index + 1}` }), h("a", { href: `#${path`/runs/${run.model_id}`}`, title: run.model_id }, names[index]))));
  page(main, `Comparison of ${count(runs.length)} runs`, links, section("Differences", settings), controls, groups);
  keep(settings)(runs, () => differences(runs));
  await poll(signal, 3, async () => {
    const news = await Promise.all(points.map((one) => one.look()));
    if (news.some(Boolean)) drawCurves();
  });
}
