// The page of sessions, and the page of one session with its runs and timeline.

import { addressed } from "./address.js";
import { ask, get, path, poll } from "./api.js";
import { button, code, h, keep, page, section, state, tell } from "./dom.js";
import { bytes, count, number, shortId, when } from "./format.js";
import { RUN_LINK, statusOf as runStatus } from "./overview.js";
import { firstRun } from "./starts.js";
import { facts, table } from "./table.js";

const LIMIT = 50;

const statusOf = (row) => {
  if (!row.status) return "expired";
  return row.status.type === "active" ? "active" : row.status.reason?.type;
};

const COLUMNS = [
  {
    label: "Session",
    kind: "mono",
    cell: (row) => h("a", { href: `#${path`/sessions/${row.session_id}`}`, title: row.session_id }, row.display_name || shortId(row.session_id)),
    copy: (row) => row.session_id,
  },
  { label: "State", cell: (row) => state(statusOf(row)) },
  { label: "Project", cell: (row) => row.project_id || "-" },
  { label: "Opened", number: true, cell: (row) => when(row.created_at) },
  { label: "Checkpoints", number: true, cell: (row) => count(row.checkpoints_count) },
  { label: "Stored", number: true, cell: (row) => bytes(row.checkpoint_storage_bytes) },
];

const RUNS = [
  RUN_LINK,
  { label: "Base model", cell: (row) => row.base_model },
  { label: "Status", cell: runStatus },
  { label: "Step", number: true, cell: (row) => count(row.step) },
  { label: "Loss per token", number: true, cell: (row) => number(row.metrics?.loss_per_token) },
  { label: "Last request", number: true, cell: (row) => when(row.last_request_at) },
];

async function showList(main, signal) {
  const { values, set } = addressed({ search: "" });
  let cursors = [null]; // cursors of the pages up to this one
  const list = h("div");
  const pages = h("div");
  const draw = keep(list);
  const drawPages = keep(pages);
  const look = async () => {
    const asked = { limit: LIMIT };
    if (values.search) asked.display_name = values.search;
    const cursor = cursors[cursors.length - 1];
    if (cursor) asked.cursor = cursor;
    const answer = await ask("POST", "/sessions/search", asked, signal);
    const none = values.search ? "No session's name matches all of these words." : "No sessions yet. A client opens one. In a terminal:";
    draw(answer.sessions, () => table("Sessions", COLUMNS, answer.sessions, { none, next: values.search ? "" : firstRun() }));
    drawPages([cursors.length, answer.next_cursor], () => buttons(answer.next_cursor));
  };
  const buttons = (next) =>
    h(
      "nav",
      { class: "pager", "aria-label": "Pages of this list" },
      button("Previous", () => turn(cursors.slice(0, -1)), { disabled: cursors.length < 2 }),
      h("span", {}, `Page ${cursors.length}`),
      button("Next", () => turn([...cursors, next]), { disabled: !next }),
    );
  const turn = (to) => {
    cursors = to;
    return look();
  };
  let timer;
  const search = h("input", {
    id: "search",
    type: "search",
    value: values.search,
    placeholder: "words of a session's name",
    maxlength: 200,
    on: {
      input: () => {
        clearTimeout(timer);
        timer = setTimeout(() => {
          set({ search: search.value.trim() });
          turn([null]);
        }, 200);
      },
    },
  });
  page(main, "Sessions", h("div", { class: "tools" }, h("label", { for: "search" }, "Search"), search), list, pages);
  await poll(signal, 4, look);
}

async function showSession(main, id, signal) {
  const runs = h("div");
  const about = h("div");
  const draw = keep(runs);
  const drawAbout = keep(about);
  const timeline = async () => {
    const { url } = await get(path`/sessions/${id}/trace_export`);
    location.assign(url);
    tell("The timeline is downloaded. It opens in ui.perfetto.dev and chrome://tracing.");
  };
  page(main, `Session ${shortId(id)}`, about, h("div", { class: "actions" }, button("Download the timeline", timeline)), section("Runs", runs));
  await poll(signal, 4, async () => {
    const session = await get(path`/sessions/${id}`, signal);
    drawAbout(session, () =>
      facts([
        ["Name", session.display_name],
        ["Runs", count(session.training_run_ids?.length)],
        ["Samplers", count(session.sampler_ids?.length)],
        ...Object.entries(session.user_metadata || {}),
        ["Id", code(id, "the id of the session")],
      ]),
    );
    const answer = await get(`/dashboard/runs?${new URLSearchParams({ search: id, limit: LIMIT })}`, signal);
    draw(answer.runs, () => table("Runs of this session", RUNS, answer.runs, { none: "This session has no training runs." }));
  });
}

export default {
  title: "Sessions",
  show: (main, [id], signal) => (id ? showSession(main, id, signal) : showList(main, signal)),
};
