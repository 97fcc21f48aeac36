// The list of runs, which also routes to the pages of one run and of several.

import { addressed, copyText, joinNames, splitNames } from "./address.js";
import { get, poll } from "./api.js";
import { MOST_LINES } from "./charts.js";
import { CURVE, USUAL, chooseColumns, columnOf, groupColumnOf, labelOf, namesOfRuns, settingText } from "./columns.js";
import { showComparison } from "./compare.js";
import { button, h, keep, page, put } from "./dom.js";
import { count, counted } from "./format.js";
import { isNumber } from "./scale.js";
import { RUN_LINK, nameOf } from "./overview.js";
import { showRun } from "./run.js";
import { firstRun } from "./starts.js";
import { showRunSamples } from "./run_samples.js";
import { pager, table } from "./table.js";

const LIMIT = 50;
const OUTLINE_S = 30;
const TYPING_MS = 250;
const DEFAULTS = { search: "", filter: "", sort: "created_at", order: "desc", columns: joinNames(USUAL), group: "", offset: 0 };
const EMPTY = "No runs yet. A training client creates one. In a terminal:";

// The first column: a box for comparisons, and the name as a link.
const first = (chosen, choose) => ({
  ...RUN_LINK,
  sort: "name",
  cell: (row) => h(
    "span",
    { class: "run-name" },
    h("input", { type: "checkbox", "aria-label": `Compare ${nameOf(row)}`, checked: chosen.has(row.model_id), on: { change: (event) => choose(row.model_id, event.target.checked) } }),
    RUN_LINK.cell(row),
    row.tags.map((tag) => h("span", { class: "tag" }, tag)),
    row.user_metadata?.notes ? h("span", { class: "tag", title: row.user_metadata.notes }, "notes") : null,
  ),
});

// Links to the runs of a group: their comparison, or the only one.
function groupLink(group, names) {
  const ids = group.run_ids.slice(0, MOST_LINES).map(encodeURIComponent);
  const title = names.map((name) => (names.length > 1 ? `${labelOf(name)} ${settingText(group.values[name])}` : settingText(group.values[name]))).join(", ");
  const note = group.run_ids.length > MOST_LINES ? `Compare the first ${MOST_LINES}` : "Compare these runs";
  return h("a", { href: ids.length > 1 ? `#/runs/compare/${ids.join("/")}` : `#/runs/${ids[0]}`, title: ids.length > 1 ? note : null }, title);
}

const isNumeric = (rows, name) => rows.some((row) => isNumber(row.values?.[name]));

function tableOf(answer, values, context, sorted) {
  const names = splitNames(values.columns);
  const none = values.search || values.filter ? "No run fits the search and the filter." : EMPTY;
  if (values.group) {
    const keys = splitNames(values.group);
    const columns = [
      { label: keys.map(labelOf).join(", "), sort: keys[0], cell: (row) => groupLink(row, keys) },
      { label: "Runs", number: true, cell: (row) => count(row.run_ids?.length) },
      ...names.filter((name) => name !== CURVE && !keys.includes(name)).map((name) => groupColumnOf(name, answer.groups || [])),
    ];
    return table("Groups of runs", columns, answer.groups || [], { sorted, none });
  }
  const columns = [first(context.chosen, context.choose), ...names.map((name) => columnOf(name, context, isNumeric(answer.runs, name)))];
  return table("Runs", columns, answer.runs, { sorted, none, next: none === EMPTY ? firstRun() : "" });
}

// What the server says about a choice: unknown names, and runs that it did not consider.
function remarks(answer) {
  const unknown = answer.unknown || [];
  return [
    unknown.length ? h("p", { class: "quiet" }, `No run has ${unknown.map((name) => `"${name}"`).join(" or ")}; "Columns" lists the names.`) : null,
    answer.considered < answer.of ? h("p", { class: "quiet" }, `The newest ${count(answer.considered)} of ${count(answer.of)} runs are considered.`) : null,
  ];
}

function fieldOf(id, label, attributes, changed) {
  let timer;
  const input = h("input", {
    id,
    type: "search",
    spellcheck: "false",
    autocomplete: "off",
    ...attributes,
    on: {
      input: () => {
        clearTimeout(timer);
        timer = setTimeout(() => changed(input.value.trim()), TYPING_MS);
      },
    },
  });
  return h("div", { class: "field" }, h("label", { for: id }, label), input);
}

// A choice of the setting by which runs are grouped. The names come once the list has the focus.
function groupChoice(value, changed, signal) {
  const option = (name, text = labelOf(name)) => h("option", { value: name, selected: name === value }, text);
  const chosen = splitNames(value);
  const select = h("select", { id: "group", on: { change: () => changed(select.value) } });
  const fill = (names) => put(select, h("option", { value: "" }, "not grouped"), value && !names.includes(value) ? option(value, chosen.map(labelOf).join(", ")) : null, names.map((name) => option(name)));
  fill([]);
  namesOfRuns(signal).then(({ facts, settings }) => {
    fill([...settings.map((name) => joinNames([name])), ...facts.filter((name) => ["base_model", "status", "project", "rank", "optimizer", "session", "tag"].includes(name))]);
    select.value = value;
  }, () => null);
  return h("div", { class: "field" }, h("label", { for: "group" }, "Group by"), select);
}

async function showList(main, signal) {
  const { values, set } = addressed(DEFAULTS);
  const list = h("div");
  const pages = h("div");
  const said = h("div");
  const mistake = h("p", { class: "warning", role: "alert", hidden: true });
  const draw = keep(list);
  const drawPages = keep(pages);
  const drawSaid = keep(said);
  const chosen = new Set();
  const outlines = new Map();
  let outlinedAt = 0;
  let turn = 0;
  let refused = null; // the address whose filter has a mistake, which is not asked again
  const compare = button("Compare", () => {
    location.hash = `#/runs/compare/${[...chosen].map(encodeURIComponent).join("/")}`;
  }, { disabled: true });
  const choose = (id, yes) => {
    if (yes) chosen.add(id);
    else chosen.delete(id);
    compare.disabled = chosen.size < 2 || chosen.size > MOST_LINES;
    compare.textContent = chosen.size ? `Compare ${counted(chosen.size, "run")}${chosen.size > MOST_LINES ? ` (at most ${MOST_LINES})` : ""}` : "Compare";
  };
  const ask = (whole) => {
    const columns = joinNames(splitNames(values.columns).filter((name) => name !== CURVE));
    return get(`/dashboard/runs?${new URLSearchParams({ ...values, columns, limit: LIMIT, outlines: whole })}`, signal);
  };
  const look = async () => {
    if (refused === location.hash) return;
    const current = ++turn;
    const whole = Date.now() - outlinedAt > OUTLINE_S * 1000 && splitNames(values.columns).includes(CURVE);
    let answer;
    try {
      answer = await ask(whole);
      mistake.hidden = true;
    } catch (error) {
      if (error.status !== 400 || current !== turn) throw error;
      refused = location.hash;
      mistake.textContent = error.message;
      mistake.hidden = false;
      return;
    }
    if (current !== turn) return;
    if (whole) outlinedAt = Date.now();
    if (whole) for (const run of answer.runs) outlines.set(run.model_id, run.outline);
    const sorted = { by: values.sort, order: values.order, change: (sort, order) => again({ sort, order, offset: 0 }) };
    const { outlines: _outlines, ...drawn } = answer;
    draw([drawn, outlinedAt, values, Math.floor(Date.now() / 10000)], () => tableOf(answer, values, { chosen, choose, outlines }, sorted));
    drawPages(answer.cursor, () => pager(answer.cursor, (offset) => again({ offset })));
    drawSaid([answer.unknown, answer.considered, answer.of], () => remarks(answer));
  };
  const again = async (changes) => {
    const focused = list.contains(document.activeElement) ? document.activeElement.textContent : null;
    set(changes);
    outlinedAt = 0;
    await look();
    if (focused) [...list.querySelectorAll("button.sort")].find((one) => one.textContent === focused)?.focus();
  };
  const columns = button("Columns", async () => {
    const names = await chooseColumns(splitNames(values.columns), signal);
    if (names) await again({ columns: joinNames(names) });
  });
  const link = button("Copy link", () => copyText(location.href), { title: "The address has the search, filter, order, columns and group" });
  const tools = h(
    "div",
    { class: "filters runs-tools" },
    fieldOf("search", "Search", { value: values.search, placeholder: "id, name, tag, notes, base model, project", maxlength: 200 }, (search) => again({ search, offset: 0 })),
    fieldOf("filter", "Filter", { value: values.filter, placeholder: 'lr > 1e-4 and loss < 2, name ~ "math"', maxlength: 1000 }, (filter) => again({ filter, offset: 0 })),
    groupChoice(values.group, (group) => again({ group, offset: 0 }), signal),
    h("div", { class: "row-actions" }, columns, compare, link),
  );
  page(main, "Runs", tools, mistake, said, list, pages);
  await poll(signal, 4, look);
}

function show(main, [id, ...others], signal) {
  if (id === "compare") return showComparison(main, others.slice(0, MOST_LINES), signal);
  if (id && others[0] === "samples") return showRunSamples(main, id, others[1], signal);
  return id ? showRun(main, id, signal) : showList(main, signal);
}

export default { title: "Runs", show };
