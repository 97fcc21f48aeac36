// The query in the address of a page, after the hash: what is filtered, sorted and chosen, so that a link shows the same.

import { button, tell } from "./dom.js";

export const queryOf = () => new URLSearchParams(location.hash.split("?")[1] || "");

// Returns the values of a page's address over its defaults. `set` changes some and rewrites the address, without a new
// page; defaults and empty values are left out. Values are text, and numbers if the default is one.
export function addressed(defaults) {
  const query = queryOf();
  const values = { ...defaults };
  for (const [name, initial] of Object.entries(defaults)) {
    if (!query.has(name)) continue;
    const text = query.get(name);
    const number = Number(text);
    if (typeof initial !== "number") values[name] = text;
    else if (text !== "" && Number.isFinite(number)) values[name] = number;
  }
  const set = (changes) => {
    Object.assign(values, changes);
    const kept = queryOf();
    for (const [name, value] of Object.entries(values)) {
      if (value === defaults[name] || (value === "" && !defaults[name])) kept.delete(name);
      else kept.set(name, String(value));
    }
    const page = location.hash.split("?")[0] || "#/overview";
    history.replaceState(null, "", kept.size ? `${page}?${kept}` : page);
  };
  return { values, set };
}

// Names within one value, separated by commas.
export const joinNames = (names) => names.map((name) => encodeURIComponent(name)).join(",");
export const splitNames = (text) => text.split(",").filter(Boolean).map((name) => {
  try {
    return decodeURIComponent(name);
  } catch {
    return name;
  }
});

// Copies a text; a page without a secure context has no clipboard, where the text is selected instead.
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    (document.querySelector("dialog[open]") || document.body).append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (!done) return tell("The browser does not allow copying.", "error");
  }
  tell("Copied.");
}

// A button that copies the text that `read` returns.
export const copyButton = (what, read, label = "Copy") => button(label, () => copyText(typeof read === "function" ? read() : read), { class: "plain copy", "aria-label": `Copy ${what}`, title: `Copy ${what}` });
