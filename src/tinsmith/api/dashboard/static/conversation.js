// One column of the playground: a model and its conversation. A turn is {message, tokens, about}; its message has OpenAI's
// form, which is also that of a line for training.

import { stream } from "./api.js";
import { button, copyButton, h, put, snippet, tell } from "./dom.js";
import { count, counted, seconds } from "./format.js";
import { download } from "./metrics.js";
import { endedBy, tokens } from "./tokens.js";

export const TOP = 5; // alternatives per token

// Reads the tokens of a chunk in the format of either endpoint.
function tokensIn(choice) {
  const chat = choice.logprobs?.content;
  if (chat) {
    return chat.map((entry) => ({
      text: entry.token,
      logprob: entry.logprob,
      others: entry.top_logprobs.map((other) => ({ text: other.token, logprob: other.logprob })),
    }));
  }
  const { tokens: texts = [], token_logprobs: logprobs = [], top_logprobs: tops = [] } = choice.logprobs || {};
  return texts.map((text, index) => ({
    text,
    logprob: logprobs[index],
    others: Object.entries(tops[index] || {})
      .map(([other, logprob]) => ({ text: other, logprob }))
      .sort((a, b) => b.logprob - a.logprob)
      .slice(0, TOP),
  }));
}

// Rewrites JSON; another text stays as it is.
function rewritten(text, ...space) {
  try {
    return JSON.stringify(JSON.parse(text), ...space);
  } catch {
    return text;
  }
}
export const compact = (text) => rewritten(text);
export const indented = (text) => rewritten(text, null, 1);

// Samples an answer and returns its turn. `see` is called with the turn so far.
async function sampleTurn(where, body, signal, see) {
  const started = performance.now();
  const turn = { message: { role: "assistant", content: "" }, tokens: [], about: "" };
  const { message } = turn;
  let reason = null;
  let usage = null;
  try {
    for await (const chunk of stream(where, { ...body, stream: true, stream_options: { include_usage: true } }, signal)) {
      usage = chunk.usage || usage;
      const [choice] = chunk.choices;
      if (!choice) continue;
      const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta || { content: choice.text };
      message.content += content || "";
      if (reasoning) message.reasoning_content = (message.reasoning_content || "") + reasoning;
      for (const { id, type, function: call } of calls || []) (message.tool_calls ??= []).push({ id, type, function: call });
      turn.tokens.push(...tokensIn(choice));
      reason = choice.finish_reason || reason;
      see(turn);
    }
  } catch (error) {
    if (error.name !== "AbortError" || !turn.tokens.length) throw error;
    reason = "you";
  }
  const counts = usage ? `${count(usage.prompt_tokens)} prompt + ${counted(usage.completion_tokens, "sampled token")}` : counted(turn.tokens.length, "sampled token");
  turn.about = `${counts}, ${seconds((performance.now() - started) / 1000)}${endedBy(reason)}`;
  return turn;
}

function drawCall(call) {
  return h(
    "div",
    { class: "part tool" },
    h("p", { class: "quiet" }, `calls ${call.function.name}`),
    snippet(indented(call.function.arguments), `the arguments of ${call.function.name}`),
  );
}

function drawAnswer({ message, tokens: list, about }, name, isOpen) {
  const silent = message.tool_calls ? null : "(no text)";
  return [
    message.reasoning_content ? h("details", {}, h("summary", {}, "Reasoning"), h("div", { class: "text" }, message.reasoning_content)) : null,
    message.content || silent ? h("p", { class: "text" }, message.content || silent) : null,
    (message.tool_calls || []).map(drawCall),
    about ? h("p", { class: "quiet about" }, about) : null,
    about ? h("details", { open: isOpen }, h("summary", {}, "Tokens"), tokens(`answer of ${name}`, list)) : null,
  ];
}

const TITLES = { user: () => "user", assistant: () => "assistant", tool: ({ name }) => `result of ${name}` };

function drawTurn(turn, name, isLast) {
  const { message } = turn;
  const title = TITLES[message.role](message);
  const copy = message.content ? copyButton(`the text of the ${title}`, message.content) : null;
  const body = message.role === "assistant" ? drawAnswer(turn, name, isLast) : h("p", { class: "text" }, message.content);
  return h("div", { class: `message ${message.role === "tool" ? "returned" : message.role}` }, h("p", { class: "quiet" }, title, " ", copy), body);
}

// Makes a column. `read` returns {params, system, tools, toolChoice}; it may throw. `remove` is called with the column.
export class Column {
  constructor(number, model, signal, read, remove, change) {
    this.number = number;
    this.signal = signal;
    this.read = read;
    this.turns = [];
    this.unanswered = [];
    this.completion = null; // a list of the turn without the template, if that was asked for last
    this.start = null; // the system prompt and the tools of the conversation's first request
    this.stopper = null;
    this.input = h("input", { id: `model${number}`, list: "models", value: model, spellcheck: "false", autocomplete: "off", on: { change } });
    this.thread = h("div", { class: "thread", tabindex: "-1", role: "group", "aria-label": `Conversation ${number}` });
    const attributes = (what) => ({ class: "plain", "aria-label": `${what} ${number}` });
    this.drop = button("Remove", () => remove(this), attributes("Remove column"));
    this.halt = button("Stop", () => this.stop(), { ...attributes("Stop column"), hidden: true });
    this.uses = h(
      "div",
      { class: "uses", hidden: true },
      copyButton(`conversation ${number} as a JSON line`, () => this.line(), "Copy JSON line"),
      button("Download", () => download("conversation.jsonl", "application/jsonl", `${this.line()}\n`), attributes("Download conversation")),
      button("Undo", () => this.undo(), attributes("Undo the last exchange of column")),
    );
    this.place = h(
      "section",
      { class: "column", "aria-label": `Column ${number}` },
      h("div", { class: "field" }, h("label", { for: `model${number}` }, `Model ${number}`), this.input),
      this.thread,
      this.halt,
      this.uses,
      this.drop,
    );
  }

  get model() {
    return this.input.value.trim();
  }

  // The calls of the last answer, whose results come next.
  get calls() {
    return this.turns.at(-1)?.message.tool_calls || [];
  }

  // Draws the conversation, and gives its place the focus that a removed or hidden button had.
  draw(...more) {
    const focused = [this.thread, this.uses, this.halt].some((place) => place.contains(document.activeElement)) ? document.activeElement : null;
    const turns = this.completion || this.turns;
    put(this.thread, turns.map((turn, index) => drawTurn(turn, this.model, index === turns.length - 1)), more);
    this.uses.hidden = !this.turns.length || Boolean(this.completion) || Boolean(this.stopper);
    this.halt.hidden = !this.stopper;
    if (focused && !focused.checkVisibility()) (this.thread.childElementCount ? this.thread : this.input).focus();
  }

  // Sends a message of the user. Returns whether it was answered.
  send(text) {
    return this.extend([{ message: { role: "user", content: text }, tokens: [] }]);
  }

  // Returns the settings of the next request. Throws if a running conversation began with another system prompt or
  // other tools: its saved line has one of each.
  settings() {
    const settings = this.read();
    if (!this.turns.length) return settings;
    const isSame = (name) => JSON.stringify(settings[name]) === JSON.stringify(this.start[name]);
    const other = [["system", "system prompt"], ["tools", "tools"]].filter(([name]) => !isSame(name)).map(([, label]) => label);
    if (other.length) throw new Error(`Conversation ${this.number} began with another ${other.join(" and other ")}. Restore the old text, or start a new conversation.`);
    return settings;
  }

  // Adds turns, and the answer to them. If there is none, the conversation stays as it was.
  async extend(turns) {
    const { params, system, tools, toolChoice } = this.settings();
    this.completion = null;
    this.start = { system, tools };
    this.turns.push(...turns);
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.turns.map(({ message }) => message)];
    const extras = tools.length ? { tools, tool_choice: toolChoice } : {};
    const body = { model: this.model, ...params, messages, ...extras, logprobs: true, top_logprobs: TOP };
    const isAnswered = await this.sample("/oai/api/v1/chat/completions", body);
    if (isAnswered) return true;
    this.turns.splice(-turns.length);
    this.unanswered = turns;
    return false;
  }

  // Continues a prompt without the template, which ends the conversation. Returns whether it was answered.
  complete(prompt) {
    const { params } = this.read();
    this.completion = [];
    this.turns = [];
    return this.sample("/oai/api/v1/completions", { model: this.model, ...params, prompt, logprobs: TOP });
  }

  async sample(where, body) {
    this.unanswered = [];
    this.stopper = new AbortController();
    const live = h("p", { class: "text" });
    this.draw(h("div", { class: "message assistant" }, h("p", { class: "quiet" }, "Sampling"), live));
    this.thread.setAttribute("aria-busy", "true");
    let after;
    let isAnswered = false;
    try {
      const signal = AbortSignal.any([this.signal, this.stopper.signal]);
      const turn = await sampleTurn(where, body, signal, ({ message }) => {
        live.textContent = message.content || message.reasoning_content || "";
      });
      (this.completion || this.turns).push(turn);
      after = [this.calls.length ? this.resultsForm() : null];
      isAnswered = true;
    } catch (error) {
      const text = error.name === "AbortError" ? "The answer was stopped before its first token." : error.message;
      const again = button("Try again", () => this.extend(this.unanswered), { class: "plain", "aria-label": `Try again in column ${this.number}` });
      after = [h("p", { class: "warning", role: "alert" }, text), this.completion ? null : again];
    }
    this.stopper = null;
    this.thread.removeAttribute("aria-busy");
    this.draw(after);
    return isAnswered;
  }

  stop() {
    this.stopper?.abort();
  }

  // Fields for the results of the last answer's calls.
  resultsForm() {
    const { calls } = this;
    const fields = calls.map((call, index) => {
      const id = `result${this.number}-${index}`;
      return { call, id, area: h("textarea", { id, rows: 2, value: "" }) };
    });
    const submit = async (event) => {
      event.preventDefault();
      const turns = fields.map(({ call, area }) => ({
        message: { role: "tool", tool_call_id: call.id, name: call.function.name, content: area.value },
        tokens: [],
      }));
      try {
        await this.extend(turns);
      } catch (error) {
        tell(error.message, "error");
      }
    };
    return h(
      "form",
      { class: "results", on: { submit } },
      fields.map(({ call, id, area }) => h("div", { class: "field" }, h("label", { for: id }, `Result of ${call.function.name}`), area)),
      h("button", { class: "primary" }, fields.length > 1 ? "Send the results" : "Send the result"),
    );
  }

  // Removes the last message of the user and all after it.
  undo() {
    const last = this.turns.findLastIndex(({ message }) => message.role === "user");
    this.turns.splice(Math.max(0, last));
    this.unanswered = [];
    this.draw();
  }

  clear() {
    this.completion = null;
    this.turns = [];
    this.unanswered = [];
    this.draw();
  }

  // The conversation up to its last answer, as a line of a file for training, with the system prompt and the tools that
  // its answers had.
  line() {
    const end = this.turns.findLastIndex(({ message }) => message.role === "assistant") + 1;
    const messages = this.turns.slice(0, end).map(({ message }) => message);
    if (!messages.length) throw new Error("The conversation has no answer yet.");
    const { system, tools } = this.start;
    if (system) messages.unshift({ role: "system", content: system });
    return JSON.stringify(tools.length ? { messages, tools } : { messages });
  }
}
