// The status bar above every page: the machine's current state.

import { get, poll } from "./api.js";
import { h, put, state } from "./dom.js";
import { bytes, count, percent, seconds, short } from "./format.js";
import { isNumber } from "./scale.js";

const EVERY_S = 3;

const item = (name, value, title) => h("span", { class: "item", title }, h("span", { class: "quiet" }, name), " ", h("span", {}, value));

function engine(one) {
  const memory = one.memory_bytes ? `, ${bytes(one.memory_bytes)}${one.memory_budget ? ` of ${bytes(one.memory_budget)}` : ""}` : "";
  const busy = isNumber(one.busy) ? `busy ${percent(one.busy)}` : "";
  return h("span", { class: "item engine", title: one.reason || "Busy: the share of the last minute spent in steps." }, h("span", { class: "quiet" }, one.base_model), " ", state(one.state), ` ${busy}${memory}`);
}

function utilisation({ gpus, cpu } = {}) {
  const title = "Utilisation of the server's machine";
  if (gpus) return item(gpus.length > 1 ? "GPUs" : "GPU", gpus.map(percent).join(", "), title);
  return isNumber(cpu) ? item("CPU", percent(cpu), title) : null;
}

function items({ rates, queue, engines, utilisation: used }) {
  const oldest = isNumber(queue?.oldest_s) ? `, oldest ${seconds(queue.oldest_s)}` : "";
  return [
    item("Training", `${short(rates?.training_tokens)} tokens/s`, "Tokens of all tenants' steps, over the last minute"),
    item("Sampling", `${short(rates?.sampling_tokens)} tokens/s`, "Your sampled tokens, over the last minute"),
    h("a", { class: "item", href: "#/queue" }, `${count(queue?.requests)} waiting${oldest}`),
    utilisation(used),
    (engines || []).map(engine),
  ];
}

// Updates the bar until `signal` is aborted. Its errors do not affect the page.
export function follow(place, signal) {
  poll(signal, EVERY_S, async () => {
    try {
      put(place, items((await get("/dashboard/machine", signal)) || {}));
      place.hidden = false;
    } catch (error) {
      place.hidden = true;
      if (error.status === 0) throw error;
    }
  });
}
