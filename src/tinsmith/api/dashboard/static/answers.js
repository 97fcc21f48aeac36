// The tokens of a stored sample: its prompt by turns and its answers, with what training made of them.

import { path } from "./api.js";
import { h } from "./dom.js";
import { count, counted, number, percent } from "./format.js";
import { isNumber } from "./scale.js";
import { endedBy, signed } from "./tokens.js";
import { drawAnswer, drawTurns } from "./turns.js";

export const weightsOf = (row) => row.weights || row.base_model || "-";

export const meanOf = (values) => {
  const numbers = values.filter(isNumber);
  return numbers.length ? numbers.reduce((sum, value) => sum + value, 0) / numbers.length : null;
};

// The rewards of a group's answers that have one.
export const rewardsOf = (group) => group.answers.map((row) => row.reward).filter(isNumber);

// A share of 1 is "100 %"; the divergence of answers in words, or nothing if none was trained on.
export function divergenceText({ kl, effective_share: share }) {
  if (!isNumber(kl)) return "";
  return `KL (k3) ${number(kl)}, effective sample size ${percent(share)}`;
}

// Lists tokens for `tokens.js`. The numbers of an answer's tokens are those of the sampler and of training.
export function listTokens({ tokens, pieces, logprobs, training_logprobs: trained, advantages, advantage }) {
  return tokens.map((id, index) => ({
    id,
    text: pieces ? pieces[index] : `<${id}>`,
    logprob: logprobs?.[index] ?? null,
    trained: trained?.[index] ?? null,
    advantage: (advantages ? advantages[index] : advantage) ?? null,
  }));
}

// The colours that the numbers of these answers allow.
export function listKinds(sequences) {
  const isTrained = sequences.some((sequence) => sequence.training_logprobs);
  const hasAdvantage = sequences.some((sequence) => isNumber(sequence.advantage));
  return ["probability", hasAdvantage && "advantage", isTrained && "ratio", isTrained && "gap"].filter(Boolean);
}

// Describes an answer's reward and training.
function describeTraining({ reward, advantage, run, step }) {
  const parts = [isNumber(reward) ? `, reward ${number(reward)}` : "", isNumber(advantage) ? `, advantage ${signed(advantage)}` : ""];
  return [parts.join(""), run ? [", trained on in ", h("a", { href: `#${path`/runs/${run}`}`, title: run }, `step ${count(step)}`)] : null];
}

export function drawSequence(name, sequence, extra = null) {
  const mean = meanOf(sequence.logprobs);
  const about = `${counted(sequence.tokens.length, "token")}${endedBy(sequence.stop_reason)}${mean === null ? "" : `, mean logprob ${mean.toFixed(3)}`}`;
  return h("article", { class: "turn sampled" }, h("h3", {}, name), h("p", { class: "quiet about" }, about, describeTraining(sequence), extra), drawAnswer(name.toLowerCase(), listTokens(sequence)));
}

// Draws the tokens of a sample's prompt from `start` on.
export function drawPrompt(name, sample, start = 0) {
  const cut = sample.prompt_cut ? h("p", { class: "quiet" }, `The server did not keep the ${counted(sample.prompt_cut, "token")} before this.`) : null;
  const images = (sample.images || []).map((image) => ({ ...image, start: image.start - start }));
  return [cut, drawTurns(name.toLowerCase(), listTokens(sample.prompt).slice(start), images)];
}
