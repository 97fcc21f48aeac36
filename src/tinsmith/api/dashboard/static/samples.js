// The pages of recent answers by prompt, and of one sample within its conversation.

import { addressed } from "./address.js";
import { get, path, poll } from "./api.js";
import { button, empty, h, keep, page, section } from "./dom.js";
import { ago, count, counted, number, shortId, when } from "./format.js";
import { isNumber } from "./scale.js";
import { facts, pager, table } from "./table.js";
import { colouring, endedBy, signed } from "./tokens.js";
import { shownAnswer, shownTurns } from "./turns.js";

const LIMIT = matchMedia("(max-width: 40rem)").matches ? 8 : 25;

const weightsOf = (row) => row.weights || row.base_model || "-";

const oneLine = (text) => text.replaceAll(/\s+/g, " ").trim();

const SORTS = { newest: "Newest", reward: "Reward", spread: "Reward spread", advantage: "Advantage", length: "Length", step: "Step" };

const toned = (value) => (isNumber(value) ? h("span", { class: value > 0 ? "good" : value < 0 ? "bad" : null }, signed(value)) : "-");

const ANSWERS = [
  { label: "Response", kind: "preview", cell: (row) => h("a", { href: `#${path`/samples/${row.request_id}`}`, title: row.request_id }, oneLine(row.begins ?? "") || shortId(row.request_id)) },
  { label: "Reward", number: true, cell: (row) => number(row.reward) },
  { label: "Advantage", number: true, cell: (row) => toned(row.advantage) },
  { label: "Tokens", number: true, cell: (row) => count(row.tokens) },
  { label: "Stop reason", cell: (row) => row.stop_reason || "-" },
  { label: "Mean logprob", number: true, cell: (row) => (isNumber(row.logprob) ? row.logprob.toFixed(3) : "-") },
  { label: "Step", number: true, cell: (row) => (row.run ? h("a", { href: `#${path`/runs/${row.run}`}`, title: row.run }, count(row.step)) : "-") },
];

function groupOf(group, index) {
  const rewards = group.answers.map((row) => row.reward).filter(isNumber);
  const mean = rewards.length ? rewards.reduce((sum, value) => sum + value, 0) / rewards.length : null;
  const trained = group.answers.some((row) => isNumber(row.advantage));
  const unused = mean === null ? ["Reward"] : [];
  if (!trained) unused.push("Advantage", "Step");
  const facts = [counted(group.answers.length, "answer"), mean === null ? null : `mean reward ${number(mean)}`, counted(group.prompt_tokens, "prompt token"), ago(group.created_at)];
  return h(
    "article",
    { class: "group" },
    h("p", { class: "prompt", tabindex: "0" }, (group.prompt_ends ?? "").trim() || "(prompt without text)"),
    h("p", { class: "quiet about" }, facts.filter(Boolean).join(", "), ", ", h("span", { class: "mono", title: weightsOf(group) }, shortId(weightsOf(group).replace("tinker://", "")))),
    table(`Responses to prompt ${index + 1}`, ANSWERS.filter(({ label }) => !unused.includes(label)), group.answers),
  );
}

const FIELDS = {
  text: ["Text", { type: "search", placeholder: "in the prompt or the answer", maxlength: 200 }],
  run: ["Run", { type: "search", placeholder: "id", maxlength: 200 }],
  step: ["Step", { type: "number", min: 0, step: 1 }],
  least: ["Reward from", { type: "number", step: "any" }],
  most: ["to", { type: "number", step: "any" }],
};

async function showList(main, signal) {
  const { values: asked, set } = addressed({ sort: "newest", order: "desc", offset: 0, text: "", run: "", step: "", least: "", most: "" });
  const list = h("div");
  const pages = h("div");
  const about = h("p", { class: "quiet kept" });
  const draw = keep(list);
  const drawPages = keep(pages);
  let turn = 0;
  const look = async () => {
    const mine = ++turn;
    const found = await get(`/dashboard/groups?${new URLSearchParams(Object.entries({ ...asked, limit: LIMIT }).filter(([, value]) => value !== ""))}`, signal);
    if (mine !== turn) return;
    about.textContent = found.kept
      ? `Showing a sample of recent requests (up to ${count(found.kept)}, kept 24 hours). Other tenants cannot read them.`
      : "This server stores no samples (TINSMITH_KEPT_SAMPLES is 0).";
    const none = Object.keys(FIELDS).some((name) => asked[name]) ? "No stored response matches these filters." : "No samples yet. Recent samples appear here.";
    draw([found.groups, Math.floor(Date.now() / 10000)], () => (found.groups.length ? found.groups.map(groupOf) : empty(none)));
    drawPages(found.cursor, () => pager(found.cursor, (offset) => change({ offset })));
  };
  const change = (changes) => {
    set(changes);
    return look();
  };
  let timer;
  const field = ([name, [label, attributes]]) => {
    const id = name === "text" ? "search" : `by-${name}`;
    const input = h("input", { id, ...attributes, value: asked[name] ?? "" });
    input.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => change({ [name]: input.value.trim(), offset: 0 }), 250);
    });
    return h("div", { class: `field ${name}` }, h("label", { for: id }, label), input);
  };
  const sort = h("select", { id: "sort", on: { change: () => change({ sort: sort.value, offset: 0 }) } }, Object.entries(SORTS).map(([name, label]) => h("option", { value: name, selected: name === asked.sort }, label)));
  const order = button(asked.order === "desc" ? "Highest first" : "Lowest first", () => {
    const to = asked.order === "desc" ? "asc" : "desc";
    order.textContent = to === "desc" ? "Highest first" : "Lowest first";
    return change({ order: to, offset: 0 });
  });
  const sorting = h("div", { class: "field" }, h("label", { for: "sort" }, "Sort by"), sort);
  page(main, "Samples", h("div", { class: "filters" }, Object.entries(FIELDS).map(field), sorting, order), about, list, pages);
  await poll(signal, 4, look);
}

function list(found) {
  return found.tokens.map((id, index) => ({
    id,
    text: found.pieces ? found.pieces[index] : `<${id}>`,
    logprob: found.logprobs?.[index] ?? null,
    trained: found.training_logprobs?.[index] ?? null,
    advantage: found.advantage ?? null,
  }));
}

// Describes an answer's reward and training.
function known(sequence) {
  const { reward, advantage, run, step } = sequence;
  const parts = [isNumber(reward) ? `, reward ${number(reward)}` : "", isNumber(advantage) ? `, advantage ${signed(advantage)}` : ""];
  return [parts.join(""), run ? [", trained on in ", h("a", { href: `#${path`/runs/${run}`}`, title: run }, `step ${count(step)}`)] : null];
}

function answers(sample) {
  return sample.sequences.map((sequence, index) => {
    const name = sample.sequences.length > 1 ? `Response ${index + 1}` : "Response";
    const finite = sequence.logprobs.filter(isNumber);
    const mean = finite.length ? finite.reduce((sum, value) => sum + value, 0) / finite.length : null;
    const about = `${counted(sequence.tokens.length, "token")}${endedBy(sequence.stop_reason)}${mean === null ? "" : `, mean logprob ${mean.toFixed(3)}`}`;
    return h("article", { class: "turn sampled" }, h("h3", {}, name), h("p", { class: "quiet about" }, about, known(sequence)), shownAnswer(name.toLowerCase(), list(sequence)));
  });
}

// Returns how many tokens of a turn's prompt repeat the previous turn. The answer's end token may be missing.
function repeated(sample, before) {
  if (!before) return 0;
  const start = before.prompt.tokens.length;
  const same = before.sequences.map(({ tokens: answer }) => {
    let length = 0;
    while (length < answer.length && sample.prompt.tokens[start + length] === answer[length]) length += 1;
    return length;
  });
  return start + Math.max(0, ...same);
}

// Shows the tokens that a turn's prompt adds to the conversation.
function asked(sample, before) {
  const known = repeated(sample, before);
  const cut = sample.prompt_cut ? h("p", { class: "quiet" }, `The server did not keep the ${counted(sample.prompt_cut, "token")} before this.`) : null;
  const all = list(sample.prompt);
  const shown = known ? all.slice(known) : all;
  const name = known ? "Added tokens" : "Prompt";
  const images = (sample.images || []).map((image) => ({ ...image, start: image.start - (all.length - shown.length) }));
  return h("article", { class: "turn" }, h("h3", {}, name), cut, shownTurns(name.toLowerCase(), shown, images));
}

const PARAMS = { max_tokens: "Max tokens", seed: "Seed", temperature: "Temperature", top_k: "Top-k", top_p: "Top-p" };

// A top-k below 1 has no effect.
const paramOf = (name, value) => (!isNumber(value) || (name === "top_k" && value < 1) ? null : String(value));

async function showSample(main, id, signal) {
  const last = await get(path`/dashboard/samples/${id}`, signal);
  const before = await Promise.all(last.turns_before.map((one) => get(path`/dashboard/samples/${one}`, signal)));
  const turns = [...before, last];
  const all = turns.flatMap((turn) => turn.sequences);
  const kinds = ["probability", all.some((one) => one.training_logprobs) && "gap", all.some((one) => isNumber(one.advantage)) && "advantage"].filter(Boolean);
  page(
    main,
    `Sample ${shortId(id)}`,
    facts([
      ["Weights", h("code", {}, weightsOf(last))],
      ["When", when(last.created_at)],
      ["Tokens", `${count(last.prompt_tokens)} prompt, ${count(last.sampled_tokens)} sampled`],
      ...Object.entries(PARAMS).map(([name, label]) => [label, paramOf(name, last.params[name])]),
    ]),
    colouring(main, kinds),
    turns.map((turn, index) =>
      section(turns.length > 1 ? `Turn ${index + 1} of ${turns.length}` : "Conversation", asked(turn, turns[index - 1]), answers(turn)),
    ),
  );
}

export default {
  title: "Samples",
  show: (main, [id], signal) => (id ? showSample(main, id, signal) : showList(main, signal)),
};
