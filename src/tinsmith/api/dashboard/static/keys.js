// Keyboard shortcuts: g and a letter open a page, / the search, and ? the list. They are inactive in fields.

import { h, question } from "./dom.js";

const PAGES = { o: "overview", r: "runs", e: "sessions", q: "queue", m: "machine", c: "checkpoints", p: "playground", s: "samples", j: "jobs", k: "account" };
const WAIT_MS = 1500;

const OTHERS = [
  ["/", "Search on this page"],
  ["Arrows", "Read tokens one by one, or move the timeline"],
  ["+ and -", "Zoom the timeline; 0 shows all of it"],
  ["?", "Show this list"],
];

const row = (keys, text) => h("div", {}, h("dt", {}, keys), h("dd", {}, text));

function help(titles) {
  const pages = Object.entries(PAGES).map(([letter, name]) => row(`g ${letter}`, titles[name] || name));
  return question("Keyboard shortcuts", h("dl", { class: "facts keys" }, pages, OTHERS.map(([keys, text]) => row(keys, text))), "Close", { isNotice: true });
}

// `titles` are the pages' titles by name.
export function listen(titles) {
  document.getElementById("shortcuts").addEventListener("click", () => help(titles));
  let begun = 0;
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, textarea, select, dialog")) return;
    const going = Date.now() - begun < WAIT_MS;
    begun = 0;
    if (going && PAGES[event.key]) location.hash = `#/${PAGES[event.key]}`;
    else if (event.key === "g") begun = Date.now();
    else if (event.key === "?") help(titles);
    else if (event.key === "/") {
      const search = document.getElementById("search");
      if (!search) return;
      event.preventDefault();
      search.focus();
    }
  });
}
