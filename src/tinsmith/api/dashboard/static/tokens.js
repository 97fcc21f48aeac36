// Tokens with their probabilities: coloured, readable with the arrow keys, or as a table.

import { h, put } from "./dom.js";
import { counted, percent } from "./format.js";
import { isNumber } from "./scale.js";
import { table } from "./table.js";

const STEPS = [0.9, 0.5, 0.2, 0.05, 0.01]; // a token belongs to the first class whose bound its probability reaches

const GAPS = [-0.5, -0.1, -0.02, 0.02, 0.1, 0.5]; // bounds of the training logprob minus the sampling logprob

const RATIOS = [0.5, 0.8, 0.95, 1.05, 1.25, 2]; // bounds of the training probability over the sampling probability

// Returns the index of a number among bounds; 0 is below the first.
const among = (value, bounds) => bounds.filter((bound) => value >= bound).length;

const gapOf = (token) => (isNumber(token.trained) && isNumber(token.logprob) ? token.trained - token.logprob : null);

function classes(token) {
  const gap = gapOf(token);
  const advantage = isNumber(token.advantage) ? `a${among(token.advantage, [-1, -0.3, -1e-9, 1e-9, 0.3, 1])}` : "";
  const divergence = gap === null ? [] : [`g${among(gap, GAPS)}`, `r${among(Math.exp(gap), RATIOS)}`];
  return ["token", rank(token.logprob), ...divergence, advantage].filter(Boolean).join(" ");
}

const rank = (logprob) => {
  if (!isNumber(logprob)) return "p-none";
  const at = STEPS.findIndex((bound) => Math.exp(logprob) >= bound);
  return `p${at < 0 ? STEPS.length : at}`;
};

const ratioOf = (token) => (gapOf(token) === null ? "-" : Math.exp(gapOf(token)).toFixed(3));

const spelled = (text) => (!text ? "(empty)" : text.replaceAll("\n", "\\n").replaceAll("\t", "\\t"));

// Returns the reason why an answer ended, as the end of a sentence.
export const endedBy = (reason) => (reason ? `, ended by ${reason}` : "");

export const signed = (value) => (isNumber(value) ? `${value > 0 ? "+" : ""}${value.toFixed(3)}` : "-");

function inWords(token) {
  const parts = [`"${spelled(token.text)}"`];
  if (isNumber(token.id)) parts.push(`token ${token.id}`);
  if (!isNumber(token.logprob)) parts.push("no logprob");
  else parts.push(`logprob ${token.logprob.toFixed(3)} (${percent(Math.exp(token.logprob))})`);
  if (gapOf(token) !== null) parts.push(`in training ${token.trained.toFixed(3)} (${signed(gapOf(token))}, ratio ${ratioOf(token)})`);
  if (isNumber(token.advantage)) parts.push(`advantage ${signed(token.advantage)}`);
  if (token.others?.length) {
    parts.push(`most likely: ${token.others.map((one) => `"${spelled(one.text)}" ${percent(Math.exp(one.logprob))}`).join(", ")}`);
  }
  return parts.join("  ");
}

// `tokens` are {text, logprob, id?, others?}; `name` describes them.
export function tokens(name, list) {
  const said = h("p", { class: "said quiet", "aria-live": "polite" }, list.length ? "Point at a token, or use the arrow keys." : "No tokens.");
  let at = -1;
  const spans = list.map((token, index) =>
    h("span", { class: classes(token), title: inWords(token), "data-at": index }, token.text || "\u2205"),
  );
  const choose = (index) => {
    spans[at]?.classList.remove("chosen");
    at = Math.max(0, Math.min(list.length - 1, index));
    spans[at]?.classList.add("chosen");
    if (list[at]) said.textContent = inWords(list[at]);
  };
  const place = h(
    "div",
    {
      class: "tokens",
      tabindex: "0",
      role: "group",
      "aria-label": `${name}, ${counted(list.length, "token")}; left and right arrows read them one by one`,
      on: {
        keydown: (event) => {
          const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
          if (!step || !list.length) return;
          event.preventDefault();
          choose(at + step);
        },
        pointerover: (event) => {
          const index = event.target.dataset?.at;
          if (index !== undefined) choose(Number(index));
        },
      },
    },
    spans,
  );
  return h("div", { class: "answer" }, place, said, asTable(name, list));
}

function asTable(name, list) {
  const numbers = h("div");
  const columns = [
    { label: "No.", number: true, cell: (row) => String(row.index + 1) },
    { label: "Token", kind: "mono", cell: (row) => spelled(row.text) },
    { label: "Logprob", number: true, cell: (row) => (isNumber(row.logprob) ? row.logprob.toFixed(4) : "-") },
    { label: "Probability", number: true, cell: (row) => (isNumber(row.logprob) ? percent(Math.exp(row.logprob)) : "-") },
    { label: "In training", number: true, cell: (row) => (isNumber(row.trained) ? row.trained.toFixed(4) : "-") },
    { label: "Difference", number: true, cell: (row) => signed(gapOf(row)) },
    { label: "Ratio", number: true, cell: ratioOf },
    { label: "Advantage", number: true, cell: (row) => signed(row.advantage) },
    { label: "Most likely", cell: (row) => (row.others || []).map((one) => `${spelled(one.text)} ${percent(Math.exp(one.logprob))}`).join(", ") || "-" },
  ];
  const isTrained = list.some((token) => isNumber(token.trained));
  const visible = columns.filter(({ label }) => isTrained || !["In training", "Difference", "Ratio", "Advantage"].includes(label));
  const details = h("details", {}, h("summary", {}, "View as table", h("span", { class: "hidden" }, ` (${name})`)), numbers);
  details.addEventListener("toggle", () => {
    if (details.open) put(numbers, table(`Tokens of ${name}`, visible, list.map((token, index) => ({ ...token, index }))));
  });
  return details;
}

const LEGENDS = {
  probability: ["Probability", "p", ["90 % and more", "50 %", "20 %", "5 %", "1 %", "less"]],
  ratio: ["Ratio", "r", ["below 0.5", "0.5", "0.8", "about 1", "1.05", "1.25", "2 and more"]],
  gap: ["Training minus sampling logprob", "g", ["below -0.5", "-0.1", "-0.02", "about equal", "0.02", "0.1", "0.5 and more"]],
  advantage: ["Advantage", "a", ["below -1", "-0.3", "negative", "0", "positive", "0.3", "1 and more"]],
};

export function legend(kind = "probability") {
  const [title, letter, names] = LEGENDS[kind];
  return h("p", { class: "legend" }, h("span", { class: "quiet" }, `${title}: `), names.map((name, index) => h("span", { class: `token ${letter}${index}` }, name)));
}

// Chooses what the colours of a page's tokens show, among the available numbers; at first `first`, if it is one of them.
// `changed` is told the choice.
export function colouring(place, kinds, first = "", changed = () => {}) {
  const legendPlace = h("div");
  const choose = (kind) => {
    place.dataset.colour = kind;
    put(legendPlace, legend(kind));
  };
  const initial = kinds.includes(first) ? first : kinds[0];
  const change = (kind) => () => {
    choose(kind);
    changed(kind);
  };
  const choice = (kind) => h("label", { for: `colour-${kind}` }, h("input", { id: `colour-${kind}`, type: "radio", name: "colour", checked: kind === initial, on: { change: change(kind) } }), LEGENDS[kind][0]);
  choose(initial);
  return h("div", { class: "colouring" }, kinds.length > 1 ? h("div", { class: "view", role: "radiogroup", "aria-label": "Colours of tokens" }, kinds.map(choice)) : null, legendPlace);
}
