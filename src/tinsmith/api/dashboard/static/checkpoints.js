// The page of checkpoints: a list, with actions.

import { addressed, copyButton, copyText } from "./address.js";
import { ask, get, path, poll } from "./api.js";
import { button, h, keep, page, question, state, tell } from "./dom.js";
import { bytes, shortId, when } from "./format.js";
import { pager, table } from "./table.js";

const LIMIT = 50;
const DAY_S = 86400;

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
  const asked = await question(`When does ${partsOf(row).name} expire?`, body, "Set", { read });
  if (!asked) return;
  await ask("PUT", at(row, "/ttl"), asked);
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

// The lines that continue from a checkpoint, or sample it.
function snippetOf(row) {
  const use = row.checkpoint_type === "training"
    ? `client = service.create_training_client_from_state_with_optimizer("${row.tinker_path}")`
    : `client = service.create_sampling_client(model_path="${row.tinker_path}")`;
  return `import tinker\n\nservice = tinker.ServiceClient(base_url="${location.origin}")\n${use}`;
}

async function showUse(row) {
  const lines = snippetOf(row);
  if (await question(`Use ${partsOf(row).name}`, h("pre", { class: "snippet" }, lines), "Copy")) await copyText(lines);
}

function actions(row, again) {
  const { name } = partsOf(row);
  const one = (text, what, attributes = {}) => button(text, what, { class: "plain", "aria-label": `${text} ${name}`, ...attributes });
  return h(
    "div",
    { class: "row-actions" },
    one("Use", () => showUse(row)),
    one("Download", () => download(row)),
    one(row.public ? "Unpublish" : "Publish", () => setPublic(row, again)),
    one("Expiry", () => setTtl(row, again)),
    one("Delete", () => remove(row, again), { class: "plain danger" }),
  );
}

export function listed(checkpoints, again) {
  const columns = [
    { label: "Name", cell: (row) => [h("span", { title: row.tinker_path }, partsOf(row).name), copyButton(`the path of ${partsOf(row).name}`, row.tinker_path)] },
    { label: "Kind", cell: (row) => row.checkpoint_type },
    { label: "Run", kind: "mono", cell: (row) => h("a", { href: `#${path`/runs/${partsOf(row).run}`}`, title: partsOf(row).run }, shortId(partsOf(row).run)) },
    { label: "Size", number: true, cell: (row) => bytes(row.size_bytes) },
    { label: "Saved", number: true, cell: (row) => when(row.time) },
    { label: "Expires", number: true, cell: (row) => (row.expires_at ? when(row.expires_at) : "never") },
    { label: "Access", cell: (row) => state(row.public ? "public" : "private") },
    { label: "Actions", cell: (row) => actions(row, again) },
  ];
  return table("Checkpoints", columns, checkpoints, { none: "No checkpoints yet. training_client.save_state(name) creates one to continue from, save_weights_for_sampler(name) one to sample." });
}

export default {
  title: "Checkpoints",
  async show(main, _parts, signal) {
    const { values, set } = addressed({ offset: 0 });
    const list = h("div");
    const pages = h("div");
    const draw = keep(list);
    const drawPages = keep(pages);
    const look = async () => {
      const found = await get(`/checkpoints?limit=${LIMIT}&offset=${values.offset}`, signal);
      draw(found.checkpoints, () => listed(found.checkpoints, look));
      const move = (to) => {
        set({ offset: to });
        return look();
      };
      drawPages(found.cursor, () => pager(found.cursor, move));
    };
    page(main, "Checkpoints", list, pages);
    await poll(signal, 5, look);
  },
};
