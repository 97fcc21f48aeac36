// Tokens with what the model thought of each: coloured by probability, read with the arrow keys, or as a table.

import { h, put } from "./dom.js";
import { counted, percent } from "./format.js";
import { isNumber } from "./scale.js";
import { table } from "./table.js";

const STEPS = [0.9, 0.5, 0.2, 0.05, 0.01]; // a token is of the first class whose bound its probability reaches

const rank = (logprob) => {
  if (!isNumber(logprob)) return "p-none";
  const at = STEPS.findIndex((bound) => Math.exp(logprob) >= bound);
  return `p${at < 0 ? STEPS.length : at}`;
};

const spelled = (text) => (!text ? "(empty)" : text.replaceAll("\n", "\\n").replaceAll("\t", "\\t"));

// Why an answer ended, as the end of a sentence.
export const endedBy = (reason) => (reason ? `, ended by ${reason}` : "");

function inWords(token) {
  const parts = [`"${spelled(token.text)}"`];
  if (isNumber(token.id)) parts.push(`token ${token.id}`);
  if (!isNumber(token.logprob)) parts.push("no logprob");
  else parts.push(`logprob ${token.logprob.toFixed(3)} (${percent(Math.exp(token.logprob))})`);
  if (token.others?.length) {
    parts.push(`likeliest: ${token.others.map((one) => `"${spelled(one.text)}" ${percent(Math.exp(one.logprob))}`).join(", ")}`);
  }
  return parts.join("  ");
}

// `tokens` are {text, logprob, id?, others?}; `name` says whose they are.
export function tokens(name, list) {
  const said = h("p", { class: "said quiet", "aria-live": "polite" }, list.length ? "Point at a token, or use the arrow keys." : "No tokens.");
  let at = -1;
  const spans = list.map((token, index) =>
    h("span", { class: `token ${rank(token.logprob)}`, title: inWords(token), "data-at": index }, token.text || "\u2205"),
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
    { label: "Likeliest", cell: (row) => (row.others || []).map((one) => `${spelled(one.text)} ${percent(Math.exp(one.logprob))}`).join(", ") || "-" },
  ];
  const details = h("details", {}, h("summary", {}, "As a table", h("span", { class: "hidden" }, ` (${name})`)), numbers);
  details.addEventListener("toggle", () => {
    if (details.open) put(numbers, table(`Tokens of ${name}`, columns, list.map((token, index) => ({ ...token, index }))));
  });
  return details;
}

export function legend() {
  const names = ["90 % and more", "50 %", "20 %", "5 %", "1 %", "less"];
  return h("p", { class: "legend" }, h("span", { class: "quiet" }, "Probability: "), names.map((name, index) => h("span", { class: `token p${index}` }, name)));
}
