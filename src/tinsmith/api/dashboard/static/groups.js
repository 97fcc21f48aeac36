// The list of stored answers by prompt: filters, a dense table whose rows open to the answers, and pages. All samples, or
// those of one run.

import { addressed } from "./address.js";
import { divergenceText, meanOf, rewardsOf, weightsOf } from "./answers.js";
import { get, path, poll } from "./api.js";
import { button, empty, h, keep, tell } from "./dom.js";
import { ago, count, counted, number, percent, shortId } from "./format.js";
import { isNumber } from "./scale.js";
import { drawMissingPage, pager, table } from "./table.js";
import { signed } from "./tokens.js";

const LIMIT = matchMedia("(max-width: 40rem)").matches ? 12 : 25;
const POLL_S = 8;
const TYPING_MS = 250; // filters wait until nothing was typed for so long
const REFUSED = 400; // the status of a filter with a wrong value
const HIDDEN_AFTER = 400; // characters of a question that is cut

const SORTS = { newest: "Newest", step: "Step", reward: "Reward", spread: "Reward spread", advantage: "Advantage", length: "Length", divergence: "KL" };

const FIELDS = {
  text: ["Text", { type: "search", placeholder: "in the prompt or the answer", maxlength: 200 }],
  run: ["Run", { type: "search", placeholder: "id", maxlength: 200 }],
  step: ["Step", { type: "number", min: 0, step: 1 }],
  least: ["Reward from", { type: "number", step: "any" }],
  most: ["to", { type: "number", step: "any" }],
};

const oneLine = (text) => text.replaceAll(/\s+/g, " ").trim();

const drawSigned = (value) => (isNumber(value) ? h("span", { class: value > 0 ? "good" : value < 0 ? "bad" : null }, signed(value)) : "-");

const sampleLink = (row, ...children) => h("a", { href: `#${path`/samples/${row.request_id}`}`, title: row.request_id }, children);

const ANSWERS = [
  { label: "Response", kind: "preview", cell: (row) => sampleLink(row, oneLine(row.begins ?? "") || shortId(row.request_id)) },
  { label: "Reward", number: true, cell: (row) => number(row.reward) },
  { label: "Advantage", number: true, cell: (row) => drawSigned(row.advantage) },
  { label: "Tokens", number: true, cell: (row) => count(row.tokens) },
  { label: "Ended by", cell: (row) => row.stop_reason || "-" },
  { label: "Mean logprob", number: true, cell: (row) => (isNumber(row.logprob) ? row.logprob.toFixed(3) : "-") },
  { label: "KL (k3)", number: true, cell: (row) => number(row.kl) },
  { label: "Trained in", number: true, cell: (row) => (row.run ? h("a", { href: `#${path`/runs/${row.run}`}`, title: row.run }, `step ${count(row.step)}`) : "-") },
];

const cutShare = (group) => group.answers.filter((row) => row.stop_reason === "length").length / group.answers.length;

export const promptAddress = (group, run) => `#${path`/runs/${run}/samples/${group.prompt_id}`}?${new URLSearchParams({ at: weightsOf(group) })}`;

const afterStep = (group) => (isNumber(group.weights_step) ? count(group.weights_step) : "-");

// The columns of groups, of which those without any value are left out. `hint` explains a label.
const GROUPS = [
  { label: "Answers", hint: "stored answers, of all that were sampled if some are not stored", cell: (group) => (group.num_sampled > group.answers.length ? `${count(group.answers.length)} of ${count(group.num_sampled)}` : count(group.answers.length)) },
  { label: "Reward", hint: "mean", isPresent: (group) => rewardsOf(group).length, cell: (group) => number(meanOf(rewardsOf(group))) },
  { label: "Min", hint: "smallest reward", isPresent: (group) => rewardsOf(group).length, cell: (group) => (rewardsOf(group).length ? number(Math.min(...rewardsOf(group))) : "-") },
  { label: "Max", hint: "largest reward", isPresent: (group) => rewardsOf(group).length, cell: (group) => (rewardsOf(group).length ? number(Math.max(...rewardsOf(group))) : "-") },
  { label: "Tokens", hint: "mean length of an answer", cell: (group) => count(Math.round(meanOf(group.answers.map((row) => row.tokens)))) },
  { label: "At limit", hint: "share of the answers that reached the limit of their tokens", cell: (group) => percent(cutShare(group)) },
  { label: "After step", hint: "optimizer steps that the weights had had", isPresent: (group) => isNumber(group.weights_step), cell: afterStep },
  { label: "Trained in", hint: "first optimizer step that trained on an answer", isPresent: (group) => isNumber(group.step), cell: (group) => (isNumber(group.step) ? `step ${count(group.step)}` : "-") },
  { label: "KL (k3)", hint: "of sampling and training per token: the mean of exp(d) - 1 - d, d being the training minus the sampling logprob", isPresent: (group) => isNumber(group.kl), cell: (group) => number(group.kl) },
  { label: "ESS", hint: "effective sample size as a share of the tokens", isPresent: (group) => isNumber(group.effective_share), cell: (group) => percent(group.effective_share) },
  { label: "Sampled", cell: (group) => ago(group.created_at) },
];

function drawOpened(group, index, run) {
  const isUsed = { Reward: rewardsOf(group).length, Advantage: group.answers.some((row) => isNumber(row.advantage)), "KL (k3)": isNumber(group.kl), "Trained in": isNumber(group.step) };
  const columns = ANSWERS.filter(({ label }) => isUsed[label] ?? true);
  const links = [sampleLink(group.answers[0], group.is_whole_prompt ? "First sample" : "Whole prompt")];
  if (run) links.push(h("a", { href: promptAddress(group, run) }, "This prompt over steps"));
  else if (group.run) links.push(h("a", { href: `#${path`/runs/${group.run}/samples`}` }, "Samples of the run"));
  return [
    h("p", { class: "prompt", tabindex: "0", role: "group", "aria-label": `Question ${index + 1}` }, group.question || "(prompt without text)"),
    h("p", { class: "quiet about" }, [counted(group.prompt_tokens, "prompt token"), divergenceText(group)].filter(Boolean).join(", "), ", ", h("span", { class: "mono", title: weightsOf(group) }, shortId(weightsOf(group).replace("tinker://", "")))),
    h("p", { class: "row-actions" }, links),
    table(`Responses to prompt ${index + 1}`, columns, group.answers),
  ];
}

const tellError = (error) => error.name === "AbortError" || tell(error.message, "error");

const keyOf = (group) => `${weightsOf(group)} ${group.prompt_id}`;

// `opened` are the keys of open groups, which stay open when the table is drawn again.
function drawGroups(groups, opened, run, again) {
  const columns = GROUPS.filter(({ isPresent }) => !isPresent || groups.some(isPresent));
  const rows = groups.flatMap((group, index) => {
    const isOpen = opened.has(keyOf(group));
    const toggle = button(oneLine(group.question).slice(0, HIDDEN_AFTER) || "(prompt without text)", () => {
      if (!opened.delete(keyOf(group))) opened.add(keyOf(group));
      again();
    }, { class: "opener", "aria-expanded": String(isOpen), title: group.question, "data-key": keyOf(group) });
    const row = h("tr", { class: isOpen ? "open" : null }, h("th", { scope: "row", class: "question" }, toggle), columns.map(({ label, cell }) => h("td", { class: "number", "data-label": label }, cell(group))));
    return isOpen ? [row, h("tr", { class: "opened" }, h("td", { colspan: columns.length + 1 }, drawOpened(group, index, run)))] : [row];
  });
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Answers by prompt" },
    h(
      "table",
      { class: "groups" },
      h("caption", { class: "hidden" }, "Answers by prompt"),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Question"), columns.map(({ label, hint }) => h("th", { scope: "col", class: "number", title: hint }, label)))),
      h("tbody", {}, rows),
    ),
  );
}

function describeLimits({ of_tenant: ofTenant, of_run: ofRun, days }) {
  if (!ofTenant) return "This server stores no samples (TINSMITH_STORED_SAMPLES is 0).";
  return `Showing a sample of requests: up to ${count(ofRun)} of each run and ${count(ofTenant)} in all, kept ${counted(days, "day")}. Other tenants cannot read them.`;
}

// Fills `place` with the list, of one run if `run` is its id, and follows it. `report` is told each answer of the server.
export async function showGroups(place, signal, { run = "", report = () => {} } = {}) {
  const { values, set } = addressed({ sort: "newest", order: "desc", offset: 0, text: "", run: "", step: "", least: "", most: "" });
  // An order that does not exist, from a mistyped link, is left out of the address.
  if (!Object.hasOwn(SORTS, values.sort)) set({ sort: "newest" });
  if (!["asc", "desc"].includes(values.order)) set({ order: "desc" });
  if (!Number.isInteger(values.offset) || values.offset < 0) set({ offset: 0 });
  const list = h("div");
  const pages = h("div");
  const about = h("p", { class: "quiet sample-limits" });
  const refusal = h("p", { class: "warning", role: "alert", hidden: true });
  const draw = keep(list);
  const drawPages = keep(pages);
  const opened = new Set();
  const names = Object.keys(FIELDS).filter((name) => name !== "run" || !run);
  let turn = 0;
  let answer = null;
  const redraw = () => {
    const focused = list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const none = names.some((name) => values[name]) ? "No stored response matches these filters." : "No samples yet. Recent samples appear here.";
    draw([answer.groups, answer.cursor, [...opened], Math.floor(Date.now() / 10000)], () => (answer.groups.length ? drawGroups(answer.groups, opened, run, redraw) : drawMissingPage(answer.cursor, (offset) => change({ offset })) || empty(none)));
    if (focused) [...list.querySelectorAll("button.opener")].find((one) => one.dataset.key === focused)?.focus();
  };
  const refuse = (text) => {
    if (refusal.textContent !== text) refusal.textContent = text; // which is announced only once
    refusal.hidden = !text;
  };
  const look = async () => {
    const current = ++turn;
    const query = { ...values, ...(run ? { run } : {}), limit: LIMIT };
    try {
      const content = await get(`/dashboard/groups?${new URLSearchParams(Object.entries(query).filter(([, value]) => value !== ""))}`, signal);
      if (current !== turn) return;
      answer = content;
    } catch (error) {
      if (error.status !== REFUSED) throw error;
      if (current === turn) refuse(error.message);
      return;
    }
    refuse("");
    about.textContent = describeLimits(answer.limits);
    redraw();
    drawPages(answer.cursor, () => pager(answer.cursor, (offset) => change({ offset })));
    report(answer);
  };
  const change = (changes) => {
    set(changes);
    return look();
  };
  let timer;
  let typed = {}; // the new values of all fields since the last search
  const search = () => {
    const changes = typed;
    typed = {};
    change({ ...changes, offset: 0 }).catch(tellError);
  };
  const field = (name) => {
    const [label, attributes] = FIELDS[name];
    const id = name === "text" ? "search" : `by-${name}`;
    const input = h("input", { id, ...attributes, value: values[name] ?? "" });
    input.addEventListener("input", () => {
      typed[name] = input.value.trim();
      clearTimeout(timer);
      timer = setTimeout(search, TYPING_MS);
    });
    return h("div", { class: `field ${name}` }, h("label", { for: id }, label), input);
  };
  const sort = h("select", { id: "sort", on: { change: () => change({ sort: sort.value, offset: 0 }).catch(tellError) } }, Object.entries(SORTS).map(([name, label]) => h("option", { value: name, selected: name === values.sort }, label)));
  const order = button(values.order === "desc" ? "Highest first" : "Lowest first", () => {
    const to = values.order === "desc" ? "asc" : "desc";
    order.textContent = to === "desc" ? "Highest first" : "Lowest first";
    return change({ order: to, offset: 0 });
  });
  place.append(h("div", { class: "filters" }, names.map(field), h("div", { class: "field" }, h("label", { for: "sort" }, "Sort by"), sort), order), refusal, about, list, pages);
  await poll(signal, POLL_S, look);
}
