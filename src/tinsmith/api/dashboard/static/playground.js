// The page that samples one prompt from several models side by side, token by token.

import { ask, get } from "./api.js";
import { button, h, page, put, tell } from "./dom.js";
import { count, counted, seconds } from "./format.js";
import { endedBy, legend, tokens } from "./tokens.js";

const MOST_COLUMNS = 4;
const TOP = 5; // alternatives per token

function field(id, label, attributes) {
  const input = h("input", { id, ...attributes });
  return { input, place: h("div", { class: "field" }, h("label", { for: id }, label), input) };
}

const settings = () => ({
  temperature: field("temperature", "Temperature", { type: "number", min: 0, max: 10, step: "any", value: "0.7" }),
  top_p: field("top_p", "Top-p", { type: "number", min: 0.01, max: 1, step: "any", value: "1" }),
  max_tokens: field("max_tokens", "Max tokens", { type: "number", min: 1, step: 1, value: "48" }),
  seed: field("seed", "Seed", { type: "number", step: 1, placeholder: "random" }),
  stop: field("stop", "Stop sequences", { type: "text", placeholder: "text, or \\n" }),
});

function paramsOf(fields) {
  const params = {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (fields[name].input.value !== "") params[name] = Number(fields[name].input.value);
  }
  const stop = fields.stop.input.value.replaceAll("\\n", "\n");
  if (stop) params.stop = [stop];
  return params;
}

function column(number, first, removed) {
  const input = h("input", { id: `model${number}`, list: "models", value: first, spellcheck: "false", autocomplete: "off" });
  const answer = h("div", { class: "result" });
  const drop = button("Remove", () => removed(made), { class: "plain", "aria-label": `Remove column ${number}` });
  const made = {
    input,
    answer,
    drop,
    place: h(
      "section",
      { class: "column", "aria-label": `Column ${number}` },
      h("div", { class: "field" }, h("label", { for: `model${number}` }, `Model ${number}`), input),
      answer,
      drop,
    ),
  };
  return made;
}

// Reads the tokens of a choice in the format of either endpoint.
function tokensOf(choice) {
  const chat = choice.logprobs?.content;
  if (chat) {
    return chat.map((one) => ({
      text: one.token,
      logprob: one.logprob,
      others: one.top_logprobs.map((other) => ({ text: other.token, logprob: other.logprob })),
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

async function sample(one, body, chat, signal) {
  const model = one.input.value.trim();
  const started = performance.now();
  put(one.answer, h("p", { class: "quiet" }, "Sampling"));
  one.answer.setAttribute("aria-busy", "true");
  try {
    const asked = { model, ...body, ...(chat ? { logprobs: true, top_logprobs: TOP, separate_reasoning: false } : { logprobs: TOP }) };
    const found = await ask("POST", chat ? "/oai/api/v1/chat/completions" : "/oai/api/v1/completions", asked, signal);
    const [choice] = found.choices;
    const took = (performance.now() - started) / 1000;
    const about = `${count(found.usage?.prompt_tokens)} prompt + ${counted(found.usage?.completion_tokens, "sampled token")}, ${seconds(took)}${endedBy(choice.finish_reason)}`;
    const text = chat ? choice.message.content : choice.text;
    put(
      one.answer,
      h("p", { class: "text" }, text || "(no text)"),
      h("p", { class: "quiet about" }, about),
      tokens(`response of ${model}`, tokensOf(choice)),
    );
  } catch (error) {
    if (error.name !== "AbortError") put(one.answer, h("p", { class: "warning", role: "alert" }, error.message));
  } finally {
    one.answer.removeAttribute("aria-busy");
  }
}

export default {
  title: "Playground",
  async show(main, _parts, signal) {
    const { data: models } = await get("/oai/api/v1/models", signal);
    if (!models.length) throw new Error("the server has no base model");
    const fields = settings();
    const system = h("textarea", { id: "system", rows: 2 });
    const prompt = h("textarea", { id: "prompt", rows: 4, value: "Say hello." });
    const chat = h("input", { id: "chat", type: "checkbox", checked: true });
    const systemField = h("div", { class: "field" }, h("label", { for: "system" }, "System"), system);
    chat.addEventListener("change", () => {
      systemField.hidden = !chat.checked;
    });
    const columns = [];
    const place = h("div", { class: "columns" });
    const tidy = () => {
      for (const one of columns) one.drop.hidden = columns.length < 2;
      more.disabled = columns.length >= MOST_COLUMNS;
      place.dataset.columns = columns.length;
    };
    let made = 0;
    const add = (model) => {
      made += 1;
      const one = column(made, model, (gone) => {
        columns.splice(columns.indexOf(gone), 1);
        gone.place.remove();
        tidy();
        more.focus();
      });
      columns.push(one);
      place.append(one.place);
      tidy();
    };
    const more = button("Add a model", () => add(models[0].id));
    const run = async () => {
      if (!prompt.value) return tell("Write a prompt first.", "error");
      const params = paramsOf(fields);
      const messages = [{ role: "user", content: prompt.value }];
      if (system.value) messages.unshift({ role: "system", content: system.value });
      const body = chat.checked ? { ...params, messages } : { ...params, prompt: prompt.value };
      go.disabled = true;
      await Promise.all(columns.map((one) => sample(one, body, chat.checked, signal)));
      go.disabled = false;
      if (!signal.aborted) tell("Done");
    };
    const go = h("button", { class: "primary" }, "Sample");
    const form = h(
      "form",
      {
        class: "ask",
        on: {
          submit: (event) => {
            event.preventDefault();
            run();
          },
          keydown: (event) => {
            if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
          },
        },
      },
      systemField,
      h("div", { class: "field" }, h("label", { for: "prompt" }, "Prompt"), prompt),
      h("div", { class: "params" }, Object.values(fields).map((one) => one.place)),
      h("label", { class: "check", for: "chat" }, chat, "With the model's chat template"),
      h("div", { class: "actions" }, go, more),
    );
    const known = h("datalist", { id: "models" }, models.map((one) => h("option", { value: one.id })));
    page(main, "Playground", form, known, legend(), place);
    const checkpoint = models.find((one) => one.id.startsWith("tinker://"));
    add(models[0].id);
    add((checkpoint || models[0]).id);
  },
};
