// The query in the address of a page, after the hash: what is filtered, sorted and chosen, so that a link shows the same.

export { copyButton, copyText } from "./dom.js";

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
    const address = queryOf();
    for (const [name, value] of Object.entries(values)) {
      if (value === defaults[name] || (value === "" && !defaults[name])) address.delete(name);
      else address.set(name, String(value));
    }
    const page = location.hash.split("?")[0] || "#/overview";
    history.replaceState(null, "", address.size ? `${page}?${address}` : page);
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
