// The page of checkpoints: a list, with actions.

import { addressed } from "./address.js";
import { ask, get, path, poll } from "./api.js";
import { button, copyButton, h, keep, page, question, snippet, state, tell } from "./dom.js";
import { bytes, count, number, shortId, when } from "./format.js";
import { playgroundOf } from "./playground.js";
import { pager, table } from "./table.js";

const LIMIT = 50;
const DAY_S = 86400;
const TYPING_MS = 250; // a search waits until nothing was typed for so long
const METRICS = { loss_per_token: "loss per token", loss_per_datum: "loss per datum", grad_norm: "gradient norm", "ppo_kl:mean": "KL" };

const partsOf = (row) => {
  const [run, kind, name] = row.tinker_path.replace("tinker://", "").split("/");
  return { run, kind, name };
};
const at = (row, rest = "") => {
  const { run, kind, name } = partsOf(row);
  return path`/training_runs/${run}/checkpoints/${kind}/${name}` + rest;
};

async function download(row) {
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

async function remove(row, again) {
  const body = [h("p", {}, "Its files are deleted. This cannot be undone."), h("p", {}, h("code", {}, row.tinker_path))];
  if (!(await question(`Delete ${partsOf(row).name}?`, body, "Delete", { danger: true }))) return;
  await ask("DELETE", at(row));
  tell("The checkpoint is deleted.");
  await again();
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

function actions(row, again) {
  const { name } = partsOf(row);
  const action = (text, act, attributes = {}) => button(text, act, { class: "plain", "aria-label": `${text} ${name}`, ...attributes });
  const link = (text, label, ...models) => h("a", { href: playgroundOf(...models), "aria-label": label, title: label }, text);
  const samples = [
    link("Sample", `Sample ${name} in the playground`, row.tinker_path),
    link("Compare", `Compare ${name} with its base model`, row.base_model, row.tinker_path),
  ];
  return h(
    "div",
    { class: "row-actions" },
    row.checkpoint_type === "external" ? null : samples,
    action("Use", () => showUses(row)),
    action("Download", () => download(row)),
    action(row.public ? "Unpublish" : "Publish", () => setPublic(row, again)),
    action("Expiry", () => setTtl(row, again)),
    action("Delete", () => remove(row, again), { class: "plain danger" }),
  );
}

function nameCell(row) {
  const { name } = partsOf(row);
  return h("span", { title: row.tinker_path }, name, " ", copyButton(`the path of ${name}`, row.tinker_path));
}

function runCell(row) {
  const { run } = partsOf(row);
  return h("a", { href: `#${path`/runs/${run}`}`, title: run }, shortId(run));
}

// The metrics at the step of the save.
function metricsCell({ metrics }) {
  const entries = Object.entries(metrics || {});
  return entries.length ? h("span", {}, entries.map(([name, value]) => [h("span", { class: "metric", title: name }, `${METRICS[name] || name} ${number(value)}`), " "])) : "-";
}

const NONE = "No checkpoints yet. The first line saves one to continue from, the second one to sample:";
const NEXT = 'training_client.save_state("NAME")\ntraining_client.save_weights_for_sampler("NAME")';

export function listed(checkpoints, again, none = [NONE, NEXT]) {
  const columns = [
    { label: "Name", cell: nameCell },
    { label: "Kind", cell: (row) => row.checkpoint_type },
    { label: "Run", kind: "mono", cell: runCell },
    { label: "Step", number: true, cell: (row) => count(row.step) },
    { label: "Metrics at that step", kind: "metrics", cell: metricsCell },
    { label: "Size", number: true, cell: (row) => bytes(row.size_bytes) },
    { label: "Saved", number: true, cell: (row) => when(row.time) },
    { label: "Expires", number: true, cell: (row) => (row.expires_at ? when(row.expires_at) : "never") },
    { label: "Access", cell: (row) => state(row.public ? "public" : "private") },
    { label: "Actions", cell: (row) => actions(row, again) },
  ];
  return table("Checkpoints", columns, checkpoints, { none: none[0], next: none[1] });
}

export default {
  title: "Checkpoints",
  async show(main, _parts, signal) {
    const { values, set } = addressed({ search: "", offset: 0 });
    const list = h("div");
    const pages = h("div");
    const draw = keep(list);
    const drawPages = keep(pages);
    const look = async () => {
      const { search, offset } = values;
      const answer = await get(`/dashboard/checkpoints?${new URLSearchParams({ search, limit: LIMIT, offset })}`, signal);
      if (search !== values.search || offset !== values.offset) return;
      const none = search ? [`No checkpoint has all of these words: ${search}`] : undefined;
      draw([answer.checkpoints, search], () => listed(answer.checkpoints, look, none));
      const move = (to) => {
        set({ offset: to });
        return look();
      };
      drawPages(answer.cursor, () => pager(answer.cursor, move));
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
    page(main, "Checkpoints", search, list, pages);
    await poll(signal, 5, look);
  },
};
