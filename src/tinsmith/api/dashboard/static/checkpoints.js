// The pages of checkpoints: a list with the results of merges below it, and one checkpoint.

import { addressed } from "./address.js";
import { get, path, poll } from "./api.js";
import { download, metricsCell, pageOf, partsOf, showCheckpoint } from "./checkpoint.js";
import { drawJobs } from "./checkpoint_jobs.js";
import { button, copyButton, h, keep, page, tell } from "./dom.js";
import { bytes, count, shortId, when } from "./format.js";
import { playgroundOf } from "./playground.js";
import { drawMissingPage, pager, table } from "./table.js";

const LIMIT = 50;
const TYPING_MS = 250; // a search waits until nothing was typed for so long

function actions(row) {
  const { name } = partsOf(row);
  const link = (text, label, ...models) => h("a", { href: playgroundOf(...models), "aria-label": label, title: label }, text);
  const samples = [
    link("Sample", `Sample ${name} in the playground`, row.tinker_path),
    link("Compare", `Compare ${name} with its base model`, row.base_model, row.tinker_path),
  ];
  return h(
    "div",
    { class: "row-actions" },
    row.checkpoint_type === "external" ? null : samples,
    button("Download", () => download(row), { class: "plain", "aria-label": `Download ${name}` }),
    h("a", { href: pageOf(row.tinker_path), "aria-label": `More of ${name}`, title: "Merge, upload, publish, expire, delete" }, "More"),
  );
}

function nameCell(row) {
  const { name } = partsOf(row);
  return h("span", { title: row.tinker_path }, h("a", { href: pageOf(row.tinker_path) }, name), " ", copyButton(`the path of ${name}`, row.tinker_path), h("span", { class: "under" }, `${row.checkpoint_type}, ${row.public ? "public" : "private"}`));
}

function runCell(row) {
  const { run } = partsOf(row);
  return h("a", { href: `#${path`/runs/${run}`}`, title: run }, shortId(run));
}

const NONE = "No checkpoints yet. The first line saves one to continue from, the second one to sample:";
const NEXT = 'training_client.save_state("NAME")\ntraining_client.save_weights_for_sampler("NAME")';

export function listed(checkpoints, none = [NONE, NEXT]) {
  const columns = [
    { label: "Name", cell: nameCell },
    { label: "Run", kind: "mono", cell: runCell },
    { label: "Step", number: true, cell: (row) => count(row.step) },
    { label: "Metrics at that step", kind: "metrics", cell: metricsCell },
    { label: "Size", number: true, cell: (row) => bytes(row.size_bytes) },
    { label: "Saved", number: true, cell: (row) => [when(row.time), row.expires_at ? h("span", { class: "under" }, `expires ${when(row.expires_at)}`) : null] },
    { label: "Actions", cell: actions },
  ];
  return table("Checkpoints", columns, checkpoints, { none: none[0], next: none[1] });
}

async function showList(main, signal) {
  const { values, set } = addressed({ search: "", offset: 0 });
  const list = h("div");
  const pages = h("div");
  const merged = h("div");
  const drawMerged = keep(merged);
  const draw = keep(list);
  const drawPages = keep(pages);
  const look = async () => {
    const { search, offset } = values;
    const answer = await get(`/dashboard/checkpoints?${new URLSearchParams({ search, limit: LIMIT, offset })}`, signal);
    if (search !== values.search || offset !== values.offset) return;
    const none = search ? [`No checkpoint has all of these words: ${search}`] : undefined;
    const move = (to) => {
      set({ offset: to });
      return look();
    };
    draw([answer.checkpoints, search, answer.cursor], () => drawMissingPage(answer.cursor, move) || listed(answer.checkpoints, none));
    drawPages(answer.cursor, () => pager(answer.cursor, move));
    const jobs = await get(`/checkpoint_jobs?limit=${LIMIT}`, signal);
    drawMerged(jobs, () => drawJobs(jobs));
  };
  let timer;
  const typed = () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      set({ search: input.value.trim(), offset: 0 });
      look().catch((error) => error.name === "AbortError" || tell(error.message, "error"));
    }, TYPING_MS);
  };
  const input = h("input", { id: "search", type: "search", maxlength: 200, placeholder: "name, run, path, base model or metadata", value: values.search, on: { input: typed } });
  const search = h("div", { class: "tools" }, h("label", { for: "search" }, "Search"), input);
  page(main, "Checkpoints", search, list, pages, merged);
  await poll(signal, 5, look);
}

export default {
  title: "Checkpoints",
  show: (main, [run, kind, name], signal) => (name ? showCheckpoint(main, `tinker://${run}/${kind}/${name}`, signal) : showList(main, signal)),
};
