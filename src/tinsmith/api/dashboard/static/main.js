// Routing, the key and the theme. A page is {title, show(main, parts, signal)}; its address is in the hash.

import { ApiError, forgetKey, get, key, shareKey } from "./api.js";
import { button, copyText, h, page, put, tell } from "./dom.js";
import account from "./account.js";
import checkpoints from "./checkpoints.js";
import jobs from "./jobs.js";
import { listen } from "./keys.js";
import machine from "./machine.js";
import overview from "./overview.js";
import playground from "./playground.js";
import queue from "./queue.js";
import runs from "./runs.js";
import samples from "./samples.js";
import sessions from "./sessions.js";
import { follow } from "./strip.js";
import { drawNotify, watch } from "./warnings.js";

const PAGES = { overview, runs, sessions, queue, machine, checkpoints, playground, samples, jobs, account };
const main = document.getElementById("main");
let current = null;
let hasKey = false;
let following = null;

function followMachine(yes) {
  const strip = document.getElementById("strip");
  const warnings = document.getElementById("warnings");
  following?.abort();
  following = yes ? new AbortController() : null;
  strip.hidden = true;
  warnings.hidden = true;
  if (!following) return;
  follow(strip, following.signal);
  watch(warnings, following.signal);
}

function parts() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("?")[0].split("/").map(decodeURIComponent);
  return [Object.hasOwn(PAGES, name) ? name : "overview", ...rest.filter(Boolean)];
}

function drawNav(current) {
  const items = Object.entries(PAGES).map(([name, { title }]) =>
    h("li", {}, h("a", { href: `#/${name}`, "aria-current": name === current ? "page" : null }, title)),
  );
  put(document.getElementById("nav"), h("ul", {}, items));
}

// On a narrow screen a button opens the menu.
const menu = document.getElementById("menu");
function openMenu(yes) {
  menu.setAttribute("aria-expanded", String(yes));
  document.querySelector(".side").classList.toggle("open", yes);
}
menu.addEventListener("click", () => openMenu(menu.getAttribute("aria-expanded") !== "true"));
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || menu.getAttribute("aria-expanded") !== "true") return;
  openMenu(false);
  menu.focus();
});

async function route({ focus = true } = {}) {
  if (!hasKey) return;
  current?.abort();
  current = new AbortController();
  const { signal } = current;
  const [name, ...rest] = parts();
  drawNav(name);
  delete main.dataset.colour;
  openMenu(false);
  put(main, h("div", { class: "loading", role: "status" }, h("p", { class: "hidden" }, "Loading"), h("div"), h("div"), h("div")));
  try {
    await PAGES[name].show(main, rest, signal);
  } catch (error) {
    if (signal.aborted || error.name === "AbortError") return;
    current.abort();
    showFailure(error);
  }
  if (focus) main.querySelector("h1")?.focus({ preventScroll: true });
  if (focus) scrollTo(0, 0);
}

function showFailure(error) {
  if (error.status === 401) return;
  const text = error instanceof ApiError ? error.message : `The dashboard failed: ${error.message}`;
  page(main, error.status === 404 ? "Not found" : "Something went wrong", h("p", {}, text), button("Try again", () => route()));
}

async function begin() {
  try {
    const me = await get("/auth/apikey/me");
    hasKey = true;
    document.getElementById("tenant").textContent = me.details?.org_details?.name || me.name || "";
    document.getElementById("sign-out").hidden = me.key_id === 0;
    followMachine(true);
    await route({ focus: false });
  } catch (error) {
    if (error.status === 401) return;
    hasKey = true;
    showFailure(error);
  }
}

// Asks for a key, which is sent only to this server.
function askForKey(reason) {
  current?.abort();
  followMachine(false);
  const ended = hasKey && key.get();
  hasKey = false;
  document.getElementById("sign-out").hidden = true;
  document.getElementById("tenant").textContent = "";
  put(document.getElementById("nav"));
  const input = h("input", {
    id: "key",
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
    "aria-describedby": "keyhelp",
    placeholder: "tml-...",
  });
  const form = h(
    "form",
    {
      class: "enter",
      on: {
        submit: (event) => {
          event.preventDefault();
          key.set(input.value.trim());
          begin();
        },
      },
    },
    h("label", { for: "key" }, "API key"),
    input,
    h("p", { id: "keyhelp", class: "quiet" }, "Only the open tabs of this browser keep the key. The server's operator creates keys: tinsmith keys create TENANT."),
    h("button", { class: "primary" }, "Sign in"),
  );
  const refused = ended ? "The server accepted this key before and rejects it now. It may have expired or been revoked" : "The server rejected the key";
  page(main, ended ? "The key is no longer valid" : "Sign in", key.get() ? h("p", { class: "warning", role: "alert" }, `${refused}: ${reason}`) : null, form);
  input.focus();
}

function drawTheme() {
  const names = { system: "Theme: system", light: "Theme: light", dark: "Theme: dark" };
  const next = { system: "light", light: "dark", dark: "system" };
  const at = document.getElementById("theme");
  at.textContent = names[window.tinsmithTheme.get()];
  at.onclick = () => {
    window.tinsmithTheme.set(next[window.tinsmithTheme.get()]);
    drawTheme();
  };
}

addEventListener("hashchange", () => route());
addEventListener("keyneeded", (event) => askForKey(event.detail || "the key is unknown"));
addEventListener("unhandledrejection", (event) => {
  if (event.reason?.name === "AbortError") return;
  tell(event.reason?.message || "Something went wrong", "error");
});
document.getElementById("sign-out").addEventListener("click", () => {
  forgetKey();
  askForKey("");
});
addEventListener("signedout", () => askForKey(""));
document.querySelector("a.skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
listen(Object.fromEntries(Object.entries(PAGES).map(([name, { title }]) => [name, title])));
drawTheme();
document.getElementById("link").addEventListener("click", () => copyText(location.href));
drawNotify(document.getElementById("notify"), tell);
shareKey().then(begin);
