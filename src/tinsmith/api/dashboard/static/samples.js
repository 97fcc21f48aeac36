// Some recent samples with their prompts, and one of them as the conversation that it belongs to.

import { get, path, poll } from "./api.js";
import { h, keep, page, section } from "./dom.js";
import { ago, count, counted, shortId, when } from "./format.js";
import { isNumber } from "./scale.js";
import { facts, pager, table } from "./table.js";
import { endedBy, legend, tokens } from "./tokens.js";

const LIMIT = 25;

const weightsOf = (row) => row.weights || row.base_model || "-";

const oneLine = (text) => text.replaceAll(/\s+/g, " ").trim();

const COLUMNS = [
  {
    label: "Answer",
    kind: "preview",
    cell: (row) => h("a", { href: `#${path`/samples/${row.request_id}`}`, title: row.request_id }, oneLine(row.answer_begins ?? "") || shortId(row.request_id)),
  },
  { label: "End of the prompt", kind: "preview", cell: (row) => oneLine(row.prompt_ends ?? "") || "-" },
  { label: "Weights", kind: "mono", cell: (row) => h("span", { title: weightsOf(row) }, shortId(weightsOf(row).replace("tinker://", ""))) },
  { label: "Prompt tokens", number: true, cell: (row) => count(row.prompt_tokens) },
  { label: "Sampled tokens", number: true, cell: (row) => count(row.sampled_tokens) },
  { label: "Answers", number: true, cell: (row) => count(row.num_sequences) },
  { label: "When", number: true, cell: (row) => ago(row.created_at) },
];

async function showList(main, signal) {
  const asked = { search: "", offset: 0 };
  const list = h("div");
  const pages = h("div");
  const about = h("p", { class: "quiet" });
  const draw = keep(list);
  const drawPages = keep(pages);
  const look = async () => {
    const found = await get(`/dashboard/samples?${new URLSearchParams({ ...asked, limit: LIMIT })}`, signal);
    about.textContent = found.kept
      ? `The server keeps up to ${counted(found.kept, "sample")} for a day, and only some of many at once. Other tenants cannot read them.`
      : "This server keeps no samples (TINSMITH_KEPT_SAMPLES is 0).";
    draw([found.samples, Math.floor(Date.now() / 10000)], () => table("Samples", COLUMNS, found.samples, { none: "No sample is kept." }));
    const move = (offset) => {
      asked.offset = offset;
      return look();
    };
    drawPages(found.cursor, () => pager(found.cursor, move));
  };
  let timer;
  const search = h("input", {
    id: "search",
    type: "search",
    placeholder: "id, model or checkpoint",
    maxlength: 200,
    on: {
      input: () => {
        clearTimeout(timer);
        timer = setTimeout(() => {
          Object.assign(asked, { search: search.value.trim(), offset: 0 });
          look();
        }, 200);
      },
    },
  });
  page(main, "Samples", h("div", { class: "tools" }, h("label", { for: "search" }, "Search"), search), about, list, pages);
  await poll(signal, 4, look);
}

function list(found, logprobs = null) {
  return found.tokens.map((id, index) => ({ id, text: found.pieces ? found.pieces[index] : `<${id}>`, logprob: logprobs?.[index] ?? null }));
}

function answers(sample) {
  return sample.sequences.map((sequence, index) => {
    const name = sample.sequences.length > 1 ? `Answer ${index + 1}` : "Answer";
    const finite = sequence.logprobs.filter(isNumber);
    const mean = finite.length ? finite.reduce((sum, value) => sum + value, 0) / finite.length : null;
    const about = `${counted(sequence.tokens.length, "token")}${endedBy(sequence.stop_reason)}${mean === null ? "" : `, mean logprob ${mean.toFixed(3)}`}`;
    return h("article", { class: "turn sampled" }, h("h3", {}, name), h("p", { class: "quiet about" }, about), tokens(name.toLowerCase(), list(sequence, sequence.logprobs)));
  });
}

// How much of a turn's prompt is the turn before it. The token that ended its answer may have been left out.
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

// What a turn's prompt adds to the conversation so far.
function asked(sample, before) {
  const known = repeated(sample, before);
  const cut = sample.prompt_cut ? h("p", { class: "quiet" }, `The server did not keep the ${counted(sample.prompt_cut, "token")} before this.`) : null;
  const all = list(sample.prompt);
  const shown = known ? all.slice(known) : all;
  const name = known ? "What was added" : "Prompt";
  return h("article", { class: "turn" }, h("h3", {}, name), cut, tokens(name.toLowerCase(), shown));
}

const PARAMS = { max_tokens: "Max tokens", seed: "Seed", temperature: "Temperature", top_k: "Top-k", top_p: "Top-p" };

// A top-k below 1 limits nothing.
const paramOf = (name, value) => (!isNumber(value) || (name === "top_k" && value < 1) ? null : String(value));

async function showSample(main, id, signal) {
  const last = await get(path`/dashboard/samples/${id}`, signal);
  const before = await Promise.all(last.turns_before.map((one) => get(path`/dashboard/samples/${one}`, signal)));
  const turns = [...before, last];
  page(
    main,
    `Sample ${shortId(id)}`,
    facts([
      ["Weights", h("code", {}, weightsOf(last))],
      ["When", when(last.created_at)],
      ["Tokens", `${count(last.prompt_tokens)} prompt, ${count(last.sampled_tokens)} sampled`],
      ...Object.entries(PARAMS).map(([name, label]) => [label, paramOf(name, last.params[name])]),
    ]),
    legend(),
    turns.map((turn, index) =>
      section(turns.length > 1 ? `Turn ${index + 1} of ${turns.length}` : "Conversation", asked(turn, turns[index - 1]), answers(turn)),
    ),
  );
}

export default {
  title: "Samples",
  show: (main, [id], signal) => (id ? showSample(main, id, signal) : showList(main, signal)),
};
