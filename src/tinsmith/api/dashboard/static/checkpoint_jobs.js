// Merges and uploads of a checkpoint: the questions that start them, their progress, and the files of results.

import { ask, get, path } from "./api.js";
import { button, code, empty, h, keep, put, question, section, state, tell } from "./dom.js";
import { bytes, count, counted, percent, seconds, shortId, when } from "./format.js";
import { facts, table } from "./table.js";

const DTYPES = { auto: "that of the base model", float32: "float32", bfloat16: "bfloat16", float16: "float16" };
const FORMS = { model: "The merged model", adapter: "The adapter, for PEFT" };
const PHASES = { waiting: "It waits for other merges and uploads.", reading: "The files are read and checked.", merging: "tensor", uploading: "file" };
const UNFINISHED = ["queued", "running", "cancelling"];
const REPEATABLE = ["failed", "cancelled", "interrupted"];
const MOST_JOBS = 100;

const isUnfinished = (job) => UNFINISHED.includes(job.state);
const options = (choices) => Object.entries(choices).map(([value, label]) => h("option", { value }, label));
const field = (id, label, input) => [h("label", { for: id }, label), input];

// A field for a token, which is required unless the server has one.
const tokenInput = (hasServerToken) =>
  h("input", { id: "token", type: "password", autocomplete: "off", spellcheck: "false", maxlength: 512, required: !hasServerToken, placeholder: hasServerToken ? "empty: the server's HF_TOKEN" : "hf_..." });
const tokenNote = h("p", { class: "quiet" }, "The token needs write access. It is used for this upload alone and never stored.");

export async function startMerge(row, where, again) {
  const dtype = h("select", { id: "dtype" }, options(DTYPES));
  const body = [
    h("p", {}, `The server adds the adapter to the weights of ${row.base_model} and keeps the model, which transformers and vLLM load, until you delete it.`),
    ...field("dtype", "Number format", dtype),
  ];
  const choice = await question("Merge into the base model", body, "Merge", { read: () => ({ dtype: dtype.value }) });
  if (!choice) return;
  await ask("POST", where, choice);
  tell("The merge is queued.");
  await again();
}

export async function startUpload(row, where, hasServerToken, again) {
  const repository = h("input", { id: "repository", required: true, maxlength: 193, placeholder: "OWNER/NAME", pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]*/[A-Za-z0-9][A-Za-z0-9._\\-]*", title: "OWNER/NAME: letters, digits, dots, hyphens and underscores" });
  const form = h("select", { id: "form" }, options(FORMS));
  const dtype = h("select", { id: "dtype" }, options(DTYPES));
  const isPrivate = h("input", { id: "private", type: "checkbox" });
  isPrivate.checked = true;
  const token = tokenInput(hasServerToken);
  form.addEventListener("change", () => {
    dtype.disabled = form.value === "adapter";
  });
  const body = [
    ...field("repository", "Repository", repository),
    ...field("form", "What is uploaded", form),
    ...field("dtype", "Number format", dtype),
    h("label", { class: "check", for: "private" }, isPrivate, "Private repository"),
    ...field("token", "Token of the hub", token),
    tokenNote,
  ];
  const read = () => ({ repository: repository.value.trim(), form: form.value, dtype: dtype.value, private: isPrivate.checked, ...(token.value ? { token: token.value.trim() } : {}) });
  const choice = await question("Upload to the hub", body, "Upload", { read });
  if (!choice) return;
  await ask("POST", where, choice);
  tell("The upload is queued.");
  await again();
}

const titleOf = (job) => {
  const format = job.dtype === "auto" ? "the base model's format" : job.dtype;
  if (job.kind === "merge") return `Merge in ${format}`;
  return `Upload of the ${job.form === "adapter" ? "adapter" : `merged model in ${format}`} to ${job.repository}`;
};

// "12 of 40 tensors (30 %), 1.0 GiB of 3.4 GiB, 210.0 MiB/s, about 12 s left".
function progressText(job) {
  if (!job.total) return PHASES[job.phase] || "";
  const noun = PHASES[job.phase];
  const share = job.total_bytes ? ` (${percent(job.done_bytes / job.total_bytes)})` : "";
  const parts = [`${count(job.done)} of ${counted(job.total, noun)}${share}`, `${bytes(job.done_bytes)} of ${bytes(job.total_bytes)}`];
  if (job.bytes_per_s) parts.push(`${bytes(job.bytes_per_s)}/s`, `about ${seconds(job.remaining_s)} left`);
  return parts.join(", ");
}

const drawProgress = (job) =>
  h("p", { class: "progress" }, h("progress", { max: job.total_bytes || 1, value: job.total_bytes ? job.done_bytes : null, "aria-label": `Progress: ${titleOf(job)}` }), " ", progressText(job));

async function cancel(job) {
  if (!(await question("Cancel it?", h("p", {}, `${titleOf(job)} ends, and nothing of it stays.`), "Cancel the job", { danger: true }))) return;
  await ask("POST", path`/checkpoint_jobs/${job.job_id}/cancel`);
  tell("The job is being cancelled.");
}

async function restart(job, hasServerToken) {
  const token = tokenInput(hasServerToken && !job.needs_token);
  const body = job.kind === "upload" ? [...field("token", "Token of the hub", token), tokenNote] : h("p", {}, "It starts from the beginning.");
  const choice = await question("Start it again?", body, "Start again", { read: () => (token.value ? { token: token.value.trim() } : {}) });
  if (!choice) return;
  await ask("POST", path`/checkpoint_jobs/${job.job_id}/restart`, choice);
  tell("The job is queued again.");
}

async function remove(job) {
  const text = job.directory ? `The merged model in ${job.directory} is deleted (${bytes(job.size_bytes)}). The checkpoint stays.` : "It is removed from this list.";
  if (!(await question("Delete it?", h("p", {}, text), "Delete", { danger: true }))) return;
  await ask("DELETE", path`/checkpoint_jobs/${job.job_id}`);
  tell("Deleted.");
}

async function fetchFile(job, name = "") {
  const links = await get(path`/checkpoint_jobs/${job.job_id}/links`);
  location.assign(name ? links.files[name] : links.archive);
  tell("The download has started.");
}

function files(job) {
  if (!job.files) return null;
  const columns = [
    { label: "File", kind: "mono", cell: (file) => file.name },
    { label: "Size", number: true, cell: (file) => bytes(file.size_bytes) },
    { label: "Download", cell: (file) => button("Download", () => fetchFile(job, file.name), { class: "plain", "aria-label": `Download ${file.name}` }) },
  ];
  return h("details", {}, h("summary", {}, `${counted(job.files.length, "file")}, ${bytes(job.size_bytes)}`), table("Files of the merged model", columns, job.files));
}

function drawCard(job, hasServerToken, again) {
  const act = (text, work, attributes = {}) => button(text, async () => {
    await work();
    await again();
  }, { "aria-label": `${text}: ${titleOf(job)}`, ...attributes });
  return h(
    "article",
    { class: "job-card" },
    h("h3", {}, titleOf(job), " ", state(job.state)),
    isUnfinished(job) ? drawProgress(job) : null,
    job.reason ? h("p", { class: "warning" }, job.reason) : null,
    facts([
      ["Started", when(job.started_at || job.created_at)],
      ["Took", job.ended_at && job.started_at ? seconds((Date.parse(job.ended_at) - Date.parse(job.started_at)) / 1000) : null],
      ["Repository", job.url ? h("a", { href: job.url, rel: "noreferrer" }, job.url) : null],
      ["Directory", job.directory ? code(job.directory, "the directory") : null],
    ]),
    files(job),
    h(
      "div",
      { class: "actions" },
      isUnfinished(job) ? act("Cancel", () => cancel(job), { class: "danger", disabled: job.state === "cancelling" }) : null,
      job.directory ? act("Download", () => fetchFile(job), { class: "primary" }) : null,
      REPEATABLE.includes(job.state) ? act("Start again", () => restart(job, hasServerToken), { class: "primary" }) : null,
      isUnfinished(job) ? null : act("Delete", () => remove(job), { class: "plain danger" }),
    ),
  );
}

// The jobs of a checkpoint, each drawn again only when it changes, so that an open list of files stays open.
export function followJobs(tinkerPath, signal) {
  const place = h("div");
  const cards = new Map();
  const followed = { place, hasServerToken: false };
  followed.look = async () => {
    const query = new URLSearchParams({ tinker_path: tinkerPath, limit: MOST_JOBS });
    const { checkpoint_jobs: jobs, has_server_token: hasServerToken } = await get(`/checkpoint_jobs?${query}`, signal);
    followed.hasServerToken = hasServerToken;
    const ids = jobs.map(({ job_id: id }) => id);
    if (!ids.length) put(place, empty("None yet. A merged model, or the adapter alone, can be uploaded."));
    else if (ids.join() !== [...cards.keys()].join() || !place.querySelector(".job-card")) {
      for (const id of cards.keys()) if (!ids.includes(id)) cards.delete(id);
      const ordered = ids.map((id) => [id, cards.get(id) || newCard()]);
      cards.clear();
      for (const [id, card] of ordered) cards.set(id, card);
      put(place, ordered.map(([, card]) => card.element));
    }
    if (!ids.length) cards.clear();
    for (const job of jobs) cards.get(job.job_id).draw(job, () => drawCard(job, hasServerToken, followed.look));
  };
  return followed;
}

function newCard() {
  const element = h("div");
  return { element, draw: keep(element) };
}

// The merges and uploads of all checkpoints, with the sizes of results.
export function drawJobs({ checkpoint_jobs: jobs, result_bytes: resultBytes }) {
  if (!jobs.length) return [];
  const address = (job) => `#/checkpoints/${job.tinker_path.replace("tinker://", "").split("/").map(encodeURIComponent).join("/")}`;
  const nameOf = (job) => {
    const [run, , name] = job.tinker_path.replace("tinker://", "").split("/");
    return `${name} of ${shortId(run)}`;
  };
  const columns = [
    { label: "Checkpoint", cell: (job) => h("a", { href: address(job), title: job.tinker_path }, nameOf(job)) },
    { label: "Job", cell: titleOf },
    { label: "State", cell: (job) => state(job.state) },
    { label: "Progress", cell: (job) => (isUnfinished(job) ? progressText(job) : "-") },
    { label: "Size", number: true, cell: (job) => bytes(job.size_bytes) },
    { label: "Ended", number: true, cell: (job) => when(job.ended_at) },
  ];
  const total = h("p", { class: "quiet" }, `Merged models take ${bytes(resultBytes)} of the server's disk until they are deleted.`);
  return section("Merges and uploads", table("Merges and uploads", columns, jobs), resultBytes ? total : null);
}
