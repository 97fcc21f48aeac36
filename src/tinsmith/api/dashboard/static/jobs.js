// The pages of bulk jobs: progress, failed rows and committed parts.

import { addressed } from "./address.js";
import { ask, get, path, poll } from "./api.js";
import { button, code, h, keep, page, question, section, state, tell } from "./dom.js";
import { bytes, count, counted, percent, seconds, some, when } from "./format.js";
import { isNumber } from "./scale.js";
import { firstJob } from "./starts.js";
import { facts, pager, table } from "./table.js";

const LIMIT = 50;
const MOST_ERRORS = 100;
const MOST_PARTS = 100;
const ENDED = ["SUCCEEDED", "FAILED", "CANCELLED"];

const ended = (job) => ENDED.includes(job.status);
const moment = (at) => (isNumber(at) ? when(at * 1000) : "-");

function progress(job) {
  const total = job.batch_total_batches || 0;
  const done = job.batch_completed_batches || 0;
  if (!total) return ended(job) ? "no batches" : "not yet counted";
  const text = `${count(done)} of ${counted(total, "batch", "batches")} (${percent(done / total)})`;
  return h("span", { class: "progress" }, h("progress", { max: total, value: done, "aria-label": `Progress of job ${job.job_id}` }), ` ${text}`);
}

// The seconds that a job has run.
const took = (job) => (isNumber(job.started_at) ? (job.ended_at ?? Date.now() / 1000) - job.started_at : null);

const COLUMNS = [
  { label: "Job", number: true, cell: (row) => h("a", { href: `#/jobs/${row.job_id}` }, String(row.job_id)) },
  { label: "Name", cell: (row) => row.name || "-" },
  { label: "Status", cell: (row) => state(row.status) },
  { label: "Progress", cell: progress },
  { label: "Rows", number: true, cell: (row) => count(row.rows_ok) },
  { label: "Failed rows", number: true, cell: (row) => some(row.rows_failed) },
  { label: "Duration", number: true, cell: (row) => (isNumber(took(row)) ? seconds(took(row)) : "-") },
  { label: "Output", kind: "mono", cell: (row) => row.outputs?.map(({ path: where }) => where).join(", ") || "-" },
  { label: "Pool", cell: (row) => row.pool },
  { label: "Submitted", number: true, cell: (row) => moment(row.created_at) },
];

async function showList(main, signal) {
  const { values, set } = addressed({ offset: 0 });
  const list = h("div");
  const pages = h("div");
  const draw = keep(list);
  const drawPages = keep(pages);
  let model = null;
  const look = async () => {
    const found = await get(`/batch/jobs?limit=${LIMIT}&offset=${values.offset}`, signal);
    if (!found.jobs.length) model ||= (await get("/dashboard/overview", signal)).engines[0]?.base_model;
    draw(found.jobs, () => table("Bulk jobs", COLUMNS, found.jobs, { none: "No bulk jobs yet. In a terminal:", next: firstJob(model || "BASE_MODEL") }));
    const move = (to) => {
      set({ offset: to });
      return look();
    };
    drawPages({ offset: values.offset, limit: LIMIT, total_count: found.total_count }, (cursor) => pager(cursor, move));
  };
  page(main, "Bulk jobs", list, pages);
  await poll(signal, 2, look);
}

function speed(job) {
  const done = job.batch_completed_batches;
  const elapsed = took(job);
  if (!elapsed || !done) return null;
  const left = ended(job) ? "" : `, about ${seconds((elapsed / done) * (job.batch_total_batches - done))} left`;
  return `${count(Math.round((job.rows_ok + job.rows_failed) / elapsed))} rows/s${left}`;
}

function describe(job, writers) {
  const failed = job.rows_failed ? `, ${count(job.rows_failed)} failed` : "";
  return facts([
    ["Name", job.name || null],
    ["Status", state(job.status)],
    ["Progress", progress(job)],
    ["Rows", job.batch_total_batches ? `${count(job.rows_ok)} of ${count(job.total_rows)} done${failed}` : null],
    ["Tokens", job.tokens_in || job.tokens_out ? `${count(job.tokens_in)} in, ${count(job.tokens_out)} out` : null],
    ["Pool", job.pool],
    ["Waiting", job.waiting || null],
    ["Weight", job.weight === 1 ? null : count(job.weight)],
    ["Submitted", moment(job.created_at)],
    ["Duration", isNumber(took(job)) ? seconds(took(job)) : null],
    ["Speed", speed(job)],
    ["Writes to", writers.length ? writers.map((writer) => h("div", {}, code(writer.path, "the path of the output"))) : "-"],
    ["Resumes", !job.resume_from ? null : h("a", { href: `#/jobs/${job.resume_from}` }, `job ${job.resume_from}`)],
    ["Error", job.error ? h("pre", { class: "trace" }, job.error.trim()) : null],
  ]);
}

const ERRORS = [
  { label: "Row", number: true, cell: (row) => count(row.idx) },
  { label: "Error", cell: (row) => row.error_type },
  { label: "Message", cell: (row) => row.message },
  { label: "Attempts", number: true, cell: (row) => count(row.attempts) },
];

function firstError(error) {
  const row = error.row === undefined ? "" : `row ${count(error.idx)} is ${JSON.stringify(error.row)}\n`;
  const trace = error.traceback || [error.error_type, error.message].filter(Boolean).join(": ");
  return h("details", { open: "" }, h("summary", {}, `Row ${count(error.idx)}, the first to fail`), h("pre", { class: "trace" }, row + trace));
}

const OUTPUTS = [
  { label: "Path", kind: "mono", cell: (row) => row.path, copy: (row) => row.path },
  { label: "Rows", number: true, cell: (row) => count(row.rows) },
  { label: "Size", number: true, cell: (row) => bytes(row.bytes) },
];
const PARTS = [
  { label: "Rows", number: true, cell: (row) => `${count(row.start_idx)} to ${count(row.end_idx)}` },
  { label: "Parts", kind: "mono", cell: (row) => (row.parts || []).map((part) => part.path).join(", ") },
];
const WORKERS = [
  { label: "Worker", kind: "mono", cell: (row) => row.worker_id },
  { label: "Kind", cell: (row) => row.kind },
  { label: "State", cell: (row) => state(row.state) },
  { label: "Current batch", cell: (row) => (row.batches ? `${counted(row.rows, "row", "rows")} from ${count(row.first_row)}` : "-") },
  { label: "Retries", number: true, cell: (row) => some(row.retried) },
];

async function cancel(job) {
  const text = "Running batches are stopped. Finished batches stay, and the job can be resumed.";
  if (!(await question(`Cancel job ${job.job_id}?`, h("p", {}, text), "Cancel the job", { danger: true }))) return;
  await ask("POST", path`/batch/jobs/${job.job_id}/cancel`);
  tell("The job is being cancelled.");
}

async function resume(job) {
  const text = "A new job processes the remaining rows.";
  if (!(await question(`Resume job ${job.job_id}?`, h("p", {}, text), "Resume"))) return;
  const made = await ask("POST", path`/batch/jobs/${job.job_id}/resume`, {});
  location.hash = `#/jobs/${made.job_id}`;
}

function actions(job, look) {
  const found = [];
  if (!ended(job)) found.push(button("Cancel the job", () => cancel(job).then(look), { class: "danger" }));
  if (["FAILED", "CANCELLED"].includes(job.status)) found.push(button("Resume", () => resume(job), { class: "primary" }));
  return found;
}

// Returns the sections of a job. Empty sections are omitted, and an ended job has no workers.

function outputs(job) {
  if (job.outputs.length) return section("Outputs", table("Outputs", OUTPUTS, job.outputs));
  return h("p", { class: "quiet" }, ended(job) ? "The job has ended without output." : "The outputs are published when all batches are done.");
}

const first = (most, all) => (all > most ? h("p", { class: "quiet" }, `The first ${count(most)} are shown.`) : null);

function failedRows(job, errors) {
  return errors.length ? section("Failed rows", table("Failed rows", ERRORS, errors), first(MOST_ERRORS, job.rows_failed), job.first_error && firstError(job.first_error)) : null;
}

function partialResults(job, batches) {
  if (!batches.length || job.status === "SUCCEEDED") return null;
  return section("Partial results", table("Committed batches", PARTS, batches), first(MOST_PARTS, job.batch_completed_batches));
}

const workers = (job) => (job.workers.length && !ended(job) ? section("Workers", table("Workers", WORKERS, job.workers)) : null);

async function showJob(main, id, signal) {
  const places = Array.from({ length: 6 }, () => h("div"));
  const [drawAbout, drawActions, drawOutputs, drawErrors, drawParts, drawWorkers] = places.map(keep);
  places[1].className = "actions";
  const look = async () => {
    const job = await get(path`/batch/jobs/${id}`, signal);
    drawActions(job.status, () => actions(job, look));
    drawOutputs([job.outputs, job.status], () => outputs(job));
    drawWorkers([job.workers, job.status], () => workers(job));
    const { errors } = await get(path`/batch/jobs/${id}/errors` + `?limit=${MOST_ERRORS}`, signal);
    drawErrors([errors, job.rows_failed, job.first_error], () => failedRows(job, errors));
    const { batches, outputs: writers } = await get(path`/batch/jobs/${id}/partial` + `?limit=${MOST_PARTS}`, signal);
    heading.textContent = job.name ? `Job ${id}: ${job.name}` : `Job ${id}`;
    drawAbout([job, writers], () => describe(job, writers || []));
    drawParts([batches, job.status], () => partialResults(job, batches));
  };
  const heading = page(main, `Job ${id}`, places);
  await poll(signal, 2, look);
}

export default {
  title: "Bulk jobs",
  show: (main, [id], signal) => (id ? showJob(main, id, signal) : showList(main, signal)),
};
