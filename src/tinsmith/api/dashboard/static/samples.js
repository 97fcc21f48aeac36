// The pages of recent answers by prompt, and of one sample within its conversation.

import { drawPrompt, drawSequence, listKinds, weightsOf } from "./answers.js";
import { get, path } from "./api.js";
import { h, page, section } from "./dom.js";
import { count, shortId, when } from "./format.js";
import { showGroups } from "./groups.js";
import { isNumber } from "./scale.js";
import { facts } from "./table.js";
import { colouring } from "./tokens.js";

async function showList(main, signal) {
  const place = h("div");
  page(main, "Samples", place);
  await showGroups(place, signal);
}

function drawAnswers(sample) {
  return sample.sequences.map((sequence, index) => drawSequence(sample.sequences.length > 1 ? `Response ${index + 1}` : "Response", sequence));
}

// Returns how many tokens of a turn's prompt repeat the previous turn. The answer's end token may be missing.
function countRepeated(sample, before) {
  if (!before) return 0;
  const start = before.prompt.tokens.length;
  const lengths = before.sequences.map(({ tokens: answer }) => {
    let length = 0;
    while (length < answer.length && sample.prompt.tokens[start + length] === answer[length]) length += 1;
    return length;
  });
  return start + Math.max(0, ...lengths);
}

// Draws the tokens that a turn's prompt adds to the conversation.
function drawAdded(sample, before) {
  const start = countRepeated(sample, before);
  const name = start ? "Added tokens" : "Prompt";
  return h("article", { class: "turn" }, h("h3", {}, name), drawPrompt(name, sample, start));
}

const PARAMS = { max_tokens: "Max tokens", seed: "Seed", temperature: "Temperature", top_k: "Top-k", top_p: "Top-p" };

// A top-k below 1 has no effect.
const paramText = (name, value) => (!isNumber(value) || (name === "top_k" && value < 1) ? null : String(value));

// The sample; null if it is not stored.
async function readSample(id, signal) {
  try {
    return await get(path`/dashboard/samples/${id}`, signal);
  } catch (error) {
    if (error.status === 404) return null;
    throw error;
  }
}

function showMissing(main, id) {
  page(
    main,
    "No such sample",
    h("p", {}, "No sample has the id ", h("code", {}, id), ". The server stores a part of all requests for some days, and those of other tenants are not shown."),
    h("p", {}, h("a", { href: "#/samples" }, "All stored samples")),
  );
}

async function showSample(main, id, signal) {
  const last = await readSample(id, signal);
  if (!last) return showMissing(main, id);
  const before = await Promise.all(last.turns_before.map((one) => get(path`/dashboard/samples/${one}`, signal)));
  const turns = [...before, last];
  const run = last.model_id;
  page(
    main,
    `Sample ${shortId(id)}`,
    facts([
      ["Weights", h("code", {}, weightsOf(last))],
      ["Run", run ? h("a", { href: `#${path`/runs/${run}/samples`}`, title: run }, `Samples of ${shortId(run)}`) : null],
      ["When", when(last.created_at)],
      ["Tokens", `${count(last.prompt_tokens)} prompt, ${count(last.sampled_tokens)} sampled`],
      ...Object.entries(PARAMS).map(([name, label]) => [label, paramText(name, last.params[name])]),
    ]),
    colouring(main, listKinds(turns.flatMap((turn) => turn.sequences))),
    turns.map((turn, index) =>
      section(turns.length > 1 ? `Turn ${index + 1} of ${turns.length}` : "Conversation", drawAdded(turn, turns[index - 1]), drawAnswers(turn)),
    ),
  );
}

export default {
  title: "Samples",
  show: (main, [id], signal) => (id ? showSample(main, id, signal) : showList(main, signal)),
};
