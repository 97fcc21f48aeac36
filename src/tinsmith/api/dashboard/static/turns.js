// Splits a conversation's tokens into turns by the special tokens of chat templates, which are shown folded.

import { h } from "./dom.js";
import { counted } from "./format.js";
import { tokens } from "./tokens.js";

// The tokens that begin a turn, and those that end the name of its role.
const OPENS = { "<|im_start|>": "\n", "<|start_header_id|>": "<|end_header_id|>", "<start_of_turn>": "\n", "<|turn>": "\n", "<|start|>": "<|message|>" };
const CLOSES = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>", "<|call|>"];
const TOOL_CALL = /<tool_call>|<\|tool_call|<\|python_tag\|>/;
const TOOL_ANSWER = /<tool_response>|<\|tool_response/;
const NO_THOUGHT = /^\s*(<think>\s*<\/think>)?\s*$/;

// Returns turns {role, frame, body}; `frame` are the template's tokens. Without special tokens there is one turn.
export function turnsOf(list) {
  const turns = [];
  let turn = { role: "", frame: [], body: [] };
  let until = null; // the end of the role's name, while it is read
  for (const token of list) {
    const text = token.text || "";
    if (until !== null) {
      turn.frame.push(token);
      const end = text.indexOf(until);
      turn.role += end < 0 ? text : text.slice(0, end);
      if (end >= 0) until = null;
    } else if (Object.hasOwn(OPENS, text)) {
      if (turn.frame.length || turn.body.length) turns.push(turn);
      turn = { role: "", frame: [token], body: [] };
      until = OPENS[text];
    } else if (CLOSES.includes(text)) turn.frame.push(token);
    else turn.body.push(token);
  }
  turns.push(turn);
  return mergeTurns(turns.map(foldBlank));
}

// Blank tokens and empty reasoning belong to the template.
function foldBlank({ role, frame, body }) {
  const blank = NO_THOUGHT.test(body.map((token) => token.text).join(""));
  return { role: role.trim(), frame: blank ? [...frame, ...body] : frame, body: blank ? [] : body };
}

// A turn without a body is merged into the previous one, except the last, which the answer continues.
function mergeTurns(turns) {
  return turns.filter((turn, index) => turn.role || turn.body.length || (index === 0 && turns.length === 1));
}

// Draws an answer. All of its tokens were sampled, so nothing is folded.
export function drawAnswer(name, list) {
  const calls = TOOL_CALL.test(list.map((token) => token.text).join(""));
  return h("div", { class: `part ${calls ? "tool" : ""}` }, calls ? h("p", { class: "quiet role" }, "calls a tool") : null, tokens(name, list));
}

function kindOf({ role, body }) {
  const text = body.map((token) => token.text).join("");
  if (role === "tool" || role === "ipython" || TOOL_ANSWER.test(text)) return ["tool", "tool result"];
  if (TOOL_CALL.test(text)) return ["tool", `${role || "text"}, calls a tool`];
  return ["", role || "text"];
}

// Draws the turns of a list of tokens. `images` are {start, num_tokens, format, width, height, data} by position.
export function drawTurns(name, list, images = []) {
  const placed = list.map((token, index) => ({ ...token, image: images.find((image) => index >= image.start && index < image.start + image.num_tokens), first: images.some((image) => image.start === index) }));
  return turnsOf(placed).map((turn) => {
    const [kind, title] = kindOf(turn);
    const pictures = turn.body.filter((token) => token.first).map((token) => pictureOf(token.image));
    const body = turn.body.filter((token) => !token.image);
    const frame = turn.frame.length
      ? h("details", { class: "frame" }, h("summary", {}, `Template: ${counted(turn.frame.length, "token")}`), h("p", { class: "mono" }, turn.frame.map((token) => token.text).join("")))
      : null;
    return h("div", { class: `part ${kind}` }, h("p", { class: "quiet role" }, title), pictures, body.length ? tokens(`${name}, ${title}`, body) : null, frame);
  });
}

function pictureOf({ format, width, height, data }) {
  const about = `Image, ${format}, ${width} x ${height}`;
  if (!data) return h("p", { class: "empty" }, `${about}: too large to store`);
  return h("img", { src: `data:image/${format};base64,${data}`, alt: about });
}
