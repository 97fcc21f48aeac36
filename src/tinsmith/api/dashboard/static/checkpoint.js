// The page of one checkpoint: what it is, its actions, and its merges and uploads with their progress.

import { ask, get, path, poll } from "./api.js";
import { followJobs, startMerge, startUpload } from "./checkpoint_jobs.js";
import { button, code, h, keep, page, question, section, snippet, state, tell } from "./dom.js";
import { bytes, count, number, shortId, when } from "./format.js";
import { playgroundOf } from "./playground.js";
import { facts } from "./table.js";

const DAY_S = 86400;
const METRICS = { loss_per_token: "loss per token", loss_per_datum: "loss per datum", grad_norm: "gradient norm", "ppo_kl:mean": "KL" };

export const partsOf = (row) => {
  const [run, kind, name] = row.tinker_path.replace("tinker://", "").split("/");
  return { run, kind, name };
};

export const pageOf = (tinkerPath) => `#/checkpoints/${tinkerPath.replace("tinker://", "").split("/").map(encodeURIComponent).join("/")}`;

const at = (row, rest = "") => {
  const { run, kind, name } = partsOf(row);
  return path`/training_runs/${run}/checkpoints/${kind}/${name}` + rest;
};

export async function download(row) {
  const { url } = await get(at(row, "/archive_link"));
  location.assign(url);
  tell("The download has started.");
}

async function setPublic(row, again) {
  const text = row.public
    ? "Other tenants will no longer be able to load it. Tenants that have loaded it keep it."
    : "Every tenant of this server will be able to load and sample it.";
  const sure = await question(`${row.public ? "Unpublish" : "Publish"} ${partsOf(row).name}?`, h("p", {}, text), row.public ? "Unpublish" : "Publish");
  if (!sure) return;
  await ask(row.public ? "DELETE" : "POST", at(row, "/publish"));
  tell(row.public ? "The checkpoint is private." : "The checkpoint is public.");
  await again();
}

async function setTtl(row, again) {
  const days = h("input", { id: "days", name: "days", type: "number", min: "0.05", max: "3650", step: "any", value: "7" });
  const forever = h("input", { id: "forever", name: "forever", type: "checkbox" });
  forever.addEventListener("change", () => {
    days.disabled = forever.checked;
  });
  const body = [
    h("p", {}, row.expires_at ? `It expires at ${when(row.expires_at)}.` : "It does not expire."),
    h("label", { for: "days" }, "Days from now"),
    days,
    h("label", { class: "check", for: "forever" }, forever, "Do not expire"),
  ];
  const read = () => ({ ttl_seconds: forever.checked ? null : Math.round(Number(days.value) * DAY_S) });
  const expiry = await question(`When does ${partsOf(row).name} expire?`, body, "Set", { read });
  if (!expiry) return;
  await ask("PUT", at(row, "/ttl"), expiry);
  tell("The expiry is set.");
  await again();
}

async function remove(row) {
  const body = [h("p", {}, "Its files are deleted. This cannot be undone."), h("p", {}, h("code", {}, row.tinker_path))];
  if (!(await question(`Delete ${partsOf(row).name}?`, body, "Delete", { danger: true }))) return;
  await ask("DELETE", at(row));
  tell("The checkpoint is deleted.");
  location.hash = "#/checkpoints";
}

// The lines that continue from a checkpoint or sample it, and the commands that export it.
function usesOf(row) {
  const target = `"${row.tinker_path}"`;
  const service = `import tinker\n\nservice = tinker.ServiceClient(base_url="${location.origin}", api_key="YOUR_KEY")`;
  const isTraining = row.checkpoint_type === "training";
  const server = `export TINKER_BASE_URL=${location.origin} TINKER_API_KEY=...`;
  return [
    isTraining && ["Continue training", `${service}\nclient = service.create_training_client_from_state_with_optimizer(${target})`],
    row.checkpoint_type !== "external" && ["Sample", `${service}\nclient = service.create_sampling_client(model_path=${target})`],
    ["Download as an adapter of PEFT", `${server}\ntinsmith checkpoints pull ${target} adapter`],
    ["Merge into the base model", `${server}\ntinsmith checkpoints merge ${target} merged --dtype bfloat16`],
    ["Put the merged model on the Hugging Face hub", "hf upload YOUR_NAME/YOUR_MODEL merged"],
  ].filter(Boolean);
}

function showUses(row) {
  const body = usesOf(row).map(([title, lines]) => [h("h3", {}, title), snippet(lines, `the lines: ${title}`)]);
  return question(`Use ${partsOf(row).name}`, body.flat(), "Close", { isNotice: true });
}

// The metrics at the step of the save.
export function metricsCell({ metrics }) {
  const entries = Object.entries(metrics || {});
  return entries.length ? h("span", {}, entries.map(([name, value]) => [h("span", { class: "metric", title: name }, `${METRICS[name] || name} ${number(value)}`), " "])) : "-";
}

function actions(row, look, lookAtJobs, jobs) {
  const { name } = partsOf(row);
  const isExternal = row.checkpoint_type === "external";
  const link = (text, label, ...models) => h("a", { class: "button", href: playgroundOf(...models), "aria-label": label }, text);
  const action = (text, act, attributes = {}) => button(text, act, { "aria-label": `${text} ${name}`, ...attributes });
  return [
    action("Merge into the base model", () => startMerge(row, at(row, "/merge"), lookAtJobs), { class: "primary" }),
    action("Upload to the hub", () => startUpload(row, at(row, "/upload"), jobs.hasServerToken, lookAtJobs)),
    isExternal ? null : link("Sample", `Sample ${name} in the playground`, row.tinker_path),
    isExternal ? null : link("Compare", `Compare ${name} with its base model`, row.base_model, row.tinker_path),
    action("Use", () => showUses(row)),
    action("Download", () => download(row)),
    action(row.public ? "Unpublish" : "Publish", () => setPublic(row, look)),
    action("Expiry", () => setTtl(row, look)),
    action("Delete", () => remove(row), { class: "danger" }),
  ];
}

function describe(row) {
  const { run } = partsOf(row);
  return facts([
    ["Path", code(row.tinker_path, "the path of the checkpoint")],
    ["Kind", row.checkpoint_type],
    ["Base model", row.base_model],
    ["Run", h("a", { href: `#${path`/runs/${run}`}`, title: run }, shortId(run))],
    ["Step", count(row.step)],
    ["Metrics at that step", metricsCell(row)],
    ["Size", bytes(row.size_bytes)],
    ["Saved", when(row.time)],
    ["Expires", row.expires_at ? when(row.expires_at) : "never"],
    ["Access", state(row.public ? "public" : "private")],
  ]);
}

export async function showCheckpoint(main, tinkerPath, signal) {
  const about = h("div");
  const buttons = h("div", { class: "actions" });
  const drawAbout = keep(about);
  const drawButtons = keep(buttons);
  const jobs = followJobs(tinkerPath, signal);
  const [run, kind, name] = tinkerPath.replace("tinker://", "").split("/");
  const look = async () => {
    const row = await get(path`/dashboard/checkpoints/${run}/${kind}/${name}`, signal);
    drawAbout(row, () => describe(row));
    drawButtons([row.public, row.expires_at], () => actions(row, look, jobs.look, jobs));
  };
  page(main, `Checkpoint ${name}`, about, buttons, section("Merges and uploads", jobs.place));
  await Promise.all([poll(signal, 5, look), poll(signal, 1, jobs.look)]);
}
