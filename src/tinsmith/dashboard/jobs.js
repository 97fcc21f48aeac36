// Bulk jobs: how far they are, what failed, what is there already.

import { ask, get, path, poll } from "./api.js";
import { button, empty, h, keep, page, question, section, state, tell } from "./dom.js";
import { bytes, count, percent, seconds, when } from "./format.js";
import { facts, pager, table } from "./table.js";

const LIMIT = 50;
const MOST_ERRORS = 100;
const MOST_PARTS = 100;
const ENDED = ["SUCCEEDED", "FAILED", "CANCELLED"];

const moment = (at) => (at === null ? "-" : when(new Date(at * 1000).toISOString()));

function progress(job) {
  const total = job.batch_total_batches || 0;
  const done = job.batch_completed_batches || 0;
  const text = total ? `${count(done)} of ${count(total)} batches (${percent(done / total)})` : "not counted yet";
  return h("span", { class: "progress" }, h("progress", { max: total || 1, value: total ? done : 0, "aria-label": `Progress of job ${job.job_id}` }), ` ${text}`);
}

const COLUMNS = [
  { label: "Job", number: true, cell: (row) => h("a", { href: `#/jobs/${row.job_id}` }, String(row.job_id)) },
  { label: "Name", cell: (row) => row.name || "-" },
  { label: "Status", cell: (row) => state(row.status) },
  { label: "Progress", cell: progress },
  { label: "Rows", number: true, cell: (row) => count(row.rows_ok) },
  { label: "Failed rows", number: true, cell: (row) => count(row.rows_failed) },
  { label: "Pool", cell: (row) => row.pool },
  { label: "Submitted", number: true, cell: (row) => moment(row.created_at) },
];

async function showList(main, signal) {
  let offset = 0;
  const list = h("div");
  const pages = h("div");
  const draw = keep(list);
  const drawPages = keep(pages);
  const look = async () => {
    const found = await get(`/batch/jobs?limit=${LIMIT}&offset=${offset}`, signal);
    draw(found.jobs, () => table("Bulk jobs", COLUMNS, found.jobs, { none: "No bulk job yet. tinsmith batch submit makes one." }));
    const move = (to) => {
      offset = to;
      return look();
    };
    drawPages({ offset, limit: LIMIT, total_count: found.total_count }, (cursor) => pager(cursor, move));
  };
  page(main, "Bulk jobs", list, pages);
  await poll(signal, 2, look);
}

function describe(job) {
  const took = job.started_at === null ? null : (job.ended_at ?? Date.now() / 1000) - job.started_at;
  return facts([
    ["Status", state(job.status)],
    ["Progress", progress(job)],
    ["Rows", `${count(job.rows_ok)} done, ${count(job.rows_failed)} failed of ${count(job.total_rows)}`],
    ["Tokens", job.tokens_in || job.tokens_out ? `${count(job.tokens_in)} in, ${count(job.tokens_out)} out` : null],
    ["Pool", job.pool],
    ["Weight", String(job.weight)],
    ["Submitted", moment(job.created_at)],
    ["Took", took === null ? null : seconds(took)],
    ["Resumes", job.resume_from === null ? null : h("a", { href: `#/jobs/${job.resume_from}` }, `job ${job.resume_from}`)],
    ["Error", job.error],
  ]);
}

const ERRORS = [
  { label: "Row", number: true, cell: (row) => count(row.idx) },
  { label: "Error", cell: (row) => row.error_type },
  { label: "Message", cell: (row) => row.message },
  { label: "Tries", number: true, cell: (row) => count(row.attempts) },
];
const OUTPUTS = [
  { label: "Path", kind: "mono", cell: (row) => row.path },
  { label: "Rows", number: true, cell: (row) => count(row.rows) },
  { label: "Size", number: true, cell: (row) => bytes(row.bytes) },
];
const PARTS = [
  { label: "Rows", number: true, cell: (row) => `${count(row.start_idx)} to ${count(row.end_idx - 1)}` },
  { label: "Parts", kind: "mono", cell: (row) => row.parts.map((part) => part.path).join(", ") },
];
const WORKERS = [
  { label: "Worker", kind: "mono", cell: (row) => row.worker_id },
  { label: "Kind", cell: (row) => row.kind },
  { label: "State", cell: (row) => state(row.state) },
];

async function cancel(job) {
  const text = "Batches that run now are given up. What is done stays, and the job can be resumed.";
  if (!(await question(`Cancel job ${job.job_id}?`, h("p", {}, text), "Cancel the job", { danger: true }))) return;
  await ask("POST", path`/batch/jobs/${job.job_id}/cancel`);
  tell("The job is being cancelled.");
}

async function resume(job) {
  const text = "A new job does what this one has left.";
  if (!(await question(`Resume job ${job.job_id}?`, h("p", {}, text), "Resume"))) return;
  const made = await ask("POST", path`/batch/jobs/${job.job_id}/resume`);
  location.hash = `#/jobs/${made.job_id}`;
}

function actions(job, look) {
  const found = [];
  if (!ENDED.includes(job.status)) found.push(button("Cancel the job", () => cancel(job).then(look), { class: "danger" }));
  if (["FAILED", "CANCELLED"].includes(job.status)) found.push(button("Resume", () => resume(job), { class: "primary" }));
  return found;
}

async function showJob(main, id, signal) {
  const names = ["about", "actions", "outputs", "errors", "parts", "workers"];
  const places = Object.fromEntries(names.map((name) => [name, h("div")]));
  const draw = Object.fromEntries(names.map((name) => [name, keep(places[name])]));
  const look = async () => {
    const job = await get(path`/batch/jobs/${id}`, signal);
    draw.about(job, () => describe(job));
    draw.actions(job.status, () => actions(job, look));
    draw.outputs([job.outputs, job.status], () => table("Outputs", OUTPUTS, job.outputs, { none: ENDED.includes(job.status) ? "It has published no output." : "They are published when all batches are done." }));
    draw.workers(job.workers, () => table("Workers", WORKERS, job.workers, { none: "None at the moment." }));
    const { errors } = await get(path`/batch/jobs/${id}/errors` + `?limit=${MOST_ERRORS}`, signal);
    draw.errors(errors, () => table("Failed rows", ERRORS, errors, { none: "No row has failed." }));
    const { batches } = await get(path`/batch/jobs/${id}/partial` + `?limit=${MOST_PARTS}`, signal);
    draw.parts([batches, job.status], () => (job.status === "SUCCEEDED" ? empty("The outputs are complete.") : table("Committed batches", PARTS, batches, { none: "Nothing is committed yet." })));
  };
  page(
    main,
    `Job ${id}`,
    places.about,
    h("div", { class: "actions" }, places.actions),
    section("Outputs", places.outputs),
    section("Failed rows", places.errors),
    section("Partial results", places.parts),
    section("Workers", places.workers),
  );
  await poll(signal, 2, look);
}

export default {
  title: "Bulk jobs",
  show: (main, [id], signal) => (id ? showJob(main, id, signal) : showList(main, signal)),
};
