// The page that converses with several models side by side, token by token.

import { addressed, joinNames, splitNames } from "./address.js";
import { get } from "./api.js";
import { Column, compact, indented } from "./conversation.js";
import { button, h, page, tell } from "./dom.js";
import { legend } from "./tokens.js";

const MOST_COLUMNS = 4;
const SHORT = 500; // characters of a text that is in the address
const PARAMS = ["temperature", "top_p", "max_tokens", "seed"];
const DEFAULTS = { models: "", system: "", prompt: "", tools: "", tool_choice: "auto", temperature: "0.7", top_p: "1", max_tokens: "256", seed: "", stop: "", chat: "on" };
const FIRST_PROMPT = "Say hello.";
const EXAMPLE = [{ type: "function", function: { name: "weather", description: "The weather of a city.", parameters: { type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"], additionalProperties: false } } }];

// The address of the playground with these models.
export const playgroundOf = (...models) => `#/playground?${new URLSearchParams({ models: joinNames(models) })}`;

function field(id, label, input) {
  return { input, place: h("div", { class: "field" }, h("label", { for: id }, label), input) };
}

const inputs = (values) => ({
  temperature: h("input", { id: "temperature", type: "number", min: 0, max: 2, step: "any", value: values.temperature }),
  top_p: h("input", { id: "top_p", type: "number", min: 0.01, max: 1, step: "any", value: values.top_p }),
  max_tokens: h("input", { id: "max_tokens", type: "number", min: 1, step: 1, value: values.max_tokens }),
  seed: h("input", { id: "seed", type: "number", step: 1, placeholder: "random", value: values.seed }),
  stop: h("input", { id: "stop", type: "text", placeholder: "text, or \\n", value: values.stop }),
});
const LABELS = { temperature: "Temperature", top_p: "Top-p", max_tokens: "Max tokens", seed: "Seed", stop: "Stop sequence" };

// Reads definitions of tools. An error says what is wrong.
function toolsOf(text) {
  if (!text.trim()) return [];
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are not JSON: ${error.message}`);
  }
  const isTool = (tool) => tool?.type === "function" && typeof tool.function?.name === "string";
  if (!Array.isArray(tools) || !tools.every(isTool)) throw new Error('The tools must be a list of {"type": "function", "function": {"name": ...}}.');
  return tools;
}

// The fields of all columns. `read` returns their values, `address` those that fit into the address.
function settings(values) {
  const system = h("textarea", { id: "system", rows: 2, value: values.system });
  const tools = h("textarea", { id: "tools", rows: 5, value: indented(values.tools), spellcheck: "false", placeholder: "a JSON list of OpenAI's function tools" });
  const choices = ["auto", "required", "none"].map((name) => h("option", { value: name, selected: name === values.tool_choice }, name));
  const choice = h("select", { id: "tool_choice" }, choices);
  const params = inputs(values);
  const chat = h("input", { id: "chat", type: "checkbox", checked: values.chat === "on" });
  const example = () => {
    tools.value = JSON.stringify(EXAMPLE, null, 1);
  };
  const definitions = h(
    "details",
    { class: "definitions", open: Boolean(values.tools) },
    h("summary", {}, "Tools"),
    h("div", { class: "params" }, field("tools", "Definitions", tools).place, field("tool_choice", "Tool choice", choice).place),
    button("Insert an example", example, { class: "plain" }),
  );
  const chatFields = h("div", { class: "chat-fields", hidden: !chat.checked }, field("system", "System prompt", system).place, definitions);
  chat.addEventListener("change", () => {
    chatFields.hidden = !chat.checked;
  });
  const read = () => {
    const numbers = PARAMS.filter((name) => params[name].value !== "").map((name) => [name, Number(params[name].value)]);
    const stop = params.stop.value.replaceAll("\\n", "\n");
    return { params: { ...Object.fromEntries(numbers), ...(stop ? { stop: [stop] } : {}) }, system: system.value, tools: toolsOf(tools.value), toolChoice: choice.value };
  };
  const short = (text) => (text.length <= SHORT ? text : "");
  const address = () => ({
    ...Object.fromEntries(Object.entries(params).map(([name, input]) => [name, input.value])),
    system: short(system.value),
    tools: short(compact(tools.value)),
    tool_choice: choice.value,
    chat: chat.checked ? "on" : "off",
  });
  const paramFields = h("div", { class: "params" }, Object.entries(params).map(([name, input]) => field(name, LABELS[name], input).place));
  return { read, address, isChat: () => chat.checked, chatFields, paramFields, chatField: h("label", { class: "check", for: "chat" }, chat, "With the model's chat template") };
}

// The columns, with the buttons that depend on how many there are.
class Columns {
  constructor(signal, read, change) {
    this.all = [];
    this.numbered = 0;
    this.context = { signal, read, change };
    this.place = h("div", { class: "columns" });
    this.more = button("Add a model", () => this.add(this.all[0].model));
  }

  add(model) {
    const { signal, read, change } = this.context;
    this.numbered += 1;
    const column = new Column(this.numbered, model, signal, read, (dropped) => this.remove(dropped), change);
    this.all.push(column);
    this.place.append(column.place);
    this.tidy();
  }

  remove(column) {
    column.stop();
    this.all.splice(this.all.indexOf(column), 1);
    column.place.remove();
    this.tidy();
    this.more.focus();
  }

  // Ends all conversations, or none.
  clear() {
    if (this.all.some((column) => column.stopper)) throw new Error("Stop the answers first.");
    for (const column of this.all) column.clear();
  }

  tidy() {
    for (const column of this.all) column.drop.hidden = this.all.length < 2;
    this.more.disabled = this.all.length >= MOST_COLUMNS;
    this.place.dataset.columns = this.all.length;
    this.context.change();
  }
}

// Sends the message to every column that waits for neither an answer nor the results of its calls. Returns for each of
// these columns whether it was answered. Throws before anything is sent.
async function sendTo(columns, fields, prompt) {
  const { value } = prompt;
  if (!fields.isChat()) {
    fields.read();
    const idle = columns.filter((column) => !column.stopper);
    if (!idle.length) throw new Error("Every column waits for its answer.");
    return Promise.all(idle.map((column) => column.complete(value)));
  }
  const ready = columns.filter((column) => !column.calls.length && !column.stopper);
  if (!ready.length) throw new Error("Every conversation waits for the results of its calls, or for its answer.");
  for (const column of ready) column.settings();
  prompt.value = ""; // at once, since the next message may be written during the answers
  const answered = await Promise.all(ready.map((column) => column.send(value)));
  if (!answered.some(Boolean) && !prompt.value) prompt.value = value;
  return answered;
}

function tellOutcome(answered) {
  const good = answered.filter(Boolean).length;
  if (good === answered.length) return tell("Done");
  tell(good ? `${good} of ${answered.length} models answered.` : "No model answered.", "error");
}

export default {
  title: "Playground",
  async show(main, _parts, signal) {
    const { data: models } = await get("/oai/api/v1/models", signal);
    if (!models.length) throw new Error("the server has no base model");
    const { values, set } = addressed(DEFAULTS);
    const fields = settings(values);
    const prompt = h("textarea", { id: "prompt", rows: 3, value: values.prompt || FIRST_PROMPT });
    const checkpoint = models.find((model) => model.id.startsWith("tinker://"));
    const first = values.models ? splitNames(values.models).slice(0, MOST_COLUMNS) : [models[0].id, (checkpoint || models[0]).id];
    let isReady = false;
    const remember = () => isReady && set({ ...fields.address(), models: joinNames(columns.all.map((column) => column.model)) });
    const columns = new Columns(signal, fields.read, remember);
    const run = async () => {
      if (go.disabled) return; // a form is also submitted without its button
      if (!prompt.value) return tell("Write a message first.", "error");
      if (columns.all.every((column) => !column.turns.length)) set({ prompt: prompt.value.length <= SHORT ? prompt.value : "" });
      remember();
      go.disabled = true;
      try {
        const answered = await sendTo(columns.all, fields, prompt);
        if (!signal.aborted) tellOutcome(answered);
      } catch (error) {
        tell(error.message, "error");
      } finally {
        go.disabled = false;
      }
    };
    const go = h("button", { class: "primary" }, "Send");
    const restart = button("New conversation", () => {
      columns.clear();
      prompt.focus();
    });
    const submit = (event) => {
      event.preventDefault();
      run();
    };
    const keydown = (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    };
    const message = h("div", { class: "field" }, h("label", { for: "prompt" }, "Message"), prompt);
    const actions = h("div", { class: "actions" }, go, columns.more, restart);
    const form = h("form", { class: "ask", on: { submit, keydown } }, fields.chatFields, message, fields.paramFields, fields.chatField, actions);
    const names = h("datalist", { id: "models" }, models.map((model) => h("option", { value: model.id })));
    page(main, "Playground", form, names, legend(), columns.place);
    for (const model of first) columns.add(model);
    isReady = true;
  },
};
