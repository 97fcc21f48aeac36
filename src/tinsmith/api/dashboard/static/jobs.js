// The pages of bulk jobs: progress, stages, outputs with their first rows, errors by kind and committed parts.

import { addressed } from "./address.js";
import { ask, get, getFile, path, poll } from "./api.js";
import { button, code, h, keep, page, put, question, section, state, tell } from "./dom.js";
import { bytes, count, counted, number, percent, seconds, some, when } from "./format.js";
import { download } from "./metrics.js";
import { isNumber } from "./scale.js";
import { firstJob } from "./starts.js";
import { drawMissingPage, facts, pager, table } from "./table.js";

const LIMIT = 50;
const MOST_ERRORS = 100;
const MOST_PARTS = 100;
const PREVIEW_ROWS = 10;
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
    const listed = await get(`/batch/jobs?limit=${LIMIT}&offset=${values.offset}`, signal);
    if (!listed.jobs.length) model ||= (await get("/dashboard/overview", signal)).engines[0]?.base_model;
    const move = (to) => {
      set({ offset: to });
      return look();
    };
    const cursor = { offset: values.offset, limit: LIMIT, total_count: listed.total_count };
    draw([listed.jobs, cursor], () => drawMissingPage(cursor, move) || table("Bulk jobs", COLUMNS, listed.jobs, { none: "No bulk jobs yet. In a terminal:", next: firstJob(model || "BASE_MODEL") }));
    drawPages(cursor, () => pager(cursor, move));
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

function errorText(error) {
  const row = error.row === undefined ? "" : `row ${count(error.idx)} is ${JSON.stringify(error.row)}\n`;
  return row + (error.traceback || [error.error_type, error.message].filter(Boolean).join(": "));
}

const firstError = (error) => h("details", { open: "" }, h("summary", {}, `Row ${count(error.idx)}, the first to fail`), h("pre", { class: "trace" }, errorText(error)));

const OUTPUTS = [
  { label: "Path", kind: "mono", cell: (row) => row.path, copy: (row) => row.path },
  { label: "Rows", number: true, cell: (row) => count(row.rows) },
  { label: "Size", number: true, cell: (row) => bytes(row.bytes) },
];
const KINDS = [
  { label: "Rows", number: true, cell: (row) => count(row.rows) },
  { label: "Error", cell: (row) => row.error_type },
  { label: "Message", cell: (row) => row.head },
  { label: "Example", cell: example },
];
const STAGES = [
  { label: "Stage", cell: (row) => row.name },
  { label: "Runs on", cell: (row) => (row.device === "service" ? "the service" : [row.device, resources(row)].filter(Boolean).join(", ")) },
  { label: "Batches", number: true, cell: (row) => count(row.batches) },
  { label: "Rows in", number: true, cell: (row) => count(row.rows_in) },
  { label: "Rows out", number: true, cell: (row) => count(row.rows_out) },
  { label: "Failed rows", number: true, cell: (row) => some(row.rows_failed) },
  { label: "Time", number: true, cell: (row) => (row.batches ? seconds(row.work_s) : "-") },
  { label: "Rows/s", number: true, cell: (row) => (row.batches ? number(row.rows_per_s) : "-") },
  { label: "Busy", number: true, cell: (row) => (row.batches && isNumber(row.busy) ? row.busy.toFixed(2) : "-") },
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
  const resumed = await ask("POST", path`/batch/jobs/${job.job_id}/resume`, {});
  location.hash = `#/jobs/${resumed.job_id}`;
}

function actions(job, look) {
  const buttons = [];
  if (!ended(job)) buttons.push(button("Cancel the job", () => cancel(job).then(look), { class: "danger" }));
  if (["FAILED", "CANCELLED"].includes(job.status)) buttons.push(button("Resume", () => resume(job), { class: "primary" }));
  return buttons;
}

const NAMES = { num_cpus: "CPUs", num_gpus: "GPUs", memory: "memory" };
const resources = (stage) => Object.entries(stage.resources).map(([name, amount]) => (name === "memory" ? bytes(amount) : `${amount} ${NAMES[name] || name}`)).join(", ");

function example({ example: error }) {
  if (!error) return "-";
  return h("details", {}, h("summary", {}, `Row ${count(error.idx)}`), h("pre", { class: "trace" }, errorText(error)));
}

// The sections of a job. Empty sections are omitted, and an ended job has no workers.

function stages(job) {
  if (!job.stages?.length) return null;
  const note = "Busy is the mean number of batches that a stage worked on, and time is that of all its batches together.";
  return section("Stages", table("Stages", STAGES, job.stages), h("p", { class: "quiet" }, note));
}

const asText = (value) => (value === null || value === undefined ? "-" : typeof value === "string" ? value : JSON.stringify(value));

// Reads the first rows of an output into a place, or says why they cannot be read.
async function preview(job, index, place) {
  put(place, h("p", { class: "quiet", role: "status" }, "Reading the first rows."));
  try {
    const { columns, rows } = await get(path`/batch/jobs/${job.job_id}/preview` + `?output=${index}&rows=${PREVIEW_ROWS}`);
    const cells = columns.map((name) => ({ label: name, cell: (row) => asText(row[name]) }));
    put(place, rows.length ? table(`First rows of output ${index}`, cells, rows) : h("p", { class: "quiet" }, "The output has no rows."));
  } catch (error) {
    put(place, h("p", { class: "quiet" }, error.message));
  }
}

async function downloadOutput(job, index, name) {
  const file = await getFile(path`/batch/jobs/${job.job_id}/download` + `?output=${index}`);
  download(name, "application/octet-stream", file);
}

function outputFiles(job) {
  return job.outputs.map((output, index) => {
    const place = h("div");
    const details = h("details", {}, h("summary", {}, `First rows of ${output.path.split("/").filter(Boolean).at(-1) || output.path}`), place);
    details.addEventListener("toggle", () => details.open && preview(job, index, place));
    const name = output.path.split("/").at(-1);
    return h("div", {}, name ? h("div", { class: "actions" }, button(`Download ${name}`, () => downloadOutput(job, index, name))) : null, details);
  });
}

function outputs(job) {
  if (job.outputs.length) return section("Outputs", table("Outputs", OUTPUTS, job.outputs), outputFiles(job));
  return h("p", { class: "quiet" }, ended(job) ? "The job has ended without output." : "The outputs are published when all batches are done.");
}

const first = (most, all) => (all > most ? h("p", { class: "quiet" }, `The first ${count(most)} are shown.`) : null);

function failedRows(job, errors, kinds) {
  const byKind = kinds.length ? [h("h3", {}, "By kind"), table("Errors by kind", KINDS, kinds), h("h3", {}, "By row")] : null;
  return errors.length ? section("Failed rows", byKind, table("Failed rows", ERRORS, errors), first(MOST_ERRORS, job.rows_failed), job.first_error && firstError(job.first_error)) : null;
}

function partialResults(job, batches) {
  if (!batches.length || job.status === "SUCCEEDED") return null;
  return section("Partial results", table("Committed batches", PARTS, batches), first(MOST_PARTS, job.batch_completed_batches));
}

const workers = (job) => (job.workers.length && !ended(job) ? section("Workers", table("Workers", WORKERS, job.workers)) : null);

async function showJob(main, id, signal) {
  const places = Array.from({ length: 7 }, () => h("div"));
  const [drawAbout, drawActions, drawStages, drawOutputs, drawErrors, drawParts, drawWorkers] = places.map(keep);
  let failures = { key: "0", kinds: [] };
  places[1].className = "actions";
  const look = async () => {
    const job = await get(path`/batch/jobs/${id}`, signal);
    drawActions(job.status, () => actions(job, look));
    drawStages([job.stages, job.status], () => stages(job));
    drawOutputs([job.outputs, job.status], () => outputs(job));
    drawWorkers([job.workers, job.status], () => workers(job));
    const { errors } = await get(path`/batch/jobs/${id}/errors` + `?limit=${MOST_ERRORS}`, signal);
    if (String(job.rows_failed) !== failures.key) failures = { key: String(job.rows_failed), ...(await get(path`/batch/jobs/${id}/error_kinds`, signal)) };
    drawErrors([errors, job.rows_failed, job.first_error, failures.kinds], () => failedRows(job, errors, failures.kinds));
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
