// Helpers for elements. All content is inserted as text, so tenants' data is never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

// Makes an element with attributes and children. `on` has listeners; null, undefined and false are skipped.
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...present(children));
  return element;
}

// Skips missing children, for which the browser would write "null".
const present = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);

// Replaces the children of an element. All content is inserted here or by `h`.
export function put(element, ...children) {
  element.replaceChildren(...present(children));
}

// Shows a temporary notice, which screen readers announce.
export function tell(text, kind = "info") {
  const note = h("p", { class: `note ${kind}` }, text);
  put(document.getElementById("news"), note);
  setTimeout(() => note.remove(), kind === "error" ? 12000 : 5000);
}

export function page(main, title, ...children) {
  const heading = h("h1", { tabindex: "-1" }, title);
  put(main, heading, children);
  document.title = `${title} - Tinsmith`;
  return heading;
}

export function section(title, ...children) {
  return h("section", {}, h("h2", {}, title), ...children);
}

// What a list without rows says. `next` are the lines that make the first row, `what` names them.
export function empty(text, next = "", what = "the lines") {
  return next ? h("div", { class: "empty" }, h("p", {}, text), snippet(next, what)) : h("p", { class: "empty" }, text);
}

export function state(text) {
  const name = text ? text.toLowerCase() : "unknown";
  return h("span", { class: `state ${name.replaceAll("_", "-")}` }, name.replaceAll("_", " "));
}

// Makes a button. Errors of its action are shown; an abort because the user left the page is not an error.
export function button(text, act, attributes = {}) {
  const click = async () => {
    try {
      await act();
    } catch (error) {
      if (error.name !== "AbortError") tell(error.message, "error");
    }
  };
  return h("button", { type: "button", ...attributes, on: { click } }, text);
}

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

// A button that copies a text, or the text that `read` returns.
export const copyButton = (what, read, label = "Copy") => button(label, () => copyText(typeof read === "function" ? read() : read), { class: "plain copy", "aria-label": `Copy ${what}`, title: `Copy ${what}` });

// A text of one line, such as an id, a path or a command, with its button.
export const code = (text, what) => h("span", { class: "code-line" }, h("code", {}, text), copyButton(what, text));

// Lines of code with their button.
export const snippet = (text, what) => h("div", { class: "snippet-box" }, h("pre", { class: "snippet" }, text), copyButton(what, text));

// Replaces the children only if their data has changed, which preserves focus and selection.
export function keep(element) {
  let drawn;
  return (data, make) => {
    const text = JSON.stringify(data);
    if (text === drawn) return;
    drawn = text;
    put(element, make(data));
  };
}

// Asks a question in a dialog. Resolves to the result of `read` when confirmed, otherwise to null. A notice has only one
// button.
export function question(title, body, confirm, { danger = false, isNotice = false, read = () => true } = {}) {
  return new Promise((resolve) => {
    const before = document.activeElement;
    const id = `q${Date.now()}`;
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", { id }, title),
      ...[body].flat(),
      h(
        "div",
        { class: "actions" },
        isNotice ? null : h("button", { value: "no", type: "button", class: "plain", on: { click: () => dialog.close("no") } }, "Cancel"),
        h("button", { value: "yes", class: danger ? "danger" : "primary" }, confirm),
      ),
    );
    const dialog = h("dialog", { "aria-labelledby": id, class: isNotice ? "wide" : null }, form);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      dialog.close("yes");
    });
    dialog.addEventListener("close", () => {
      resolve(dialog.returnValue === "yes" ? read(form) : null);
      dialog.remove();
      if (before?.isConnected) before.focus();
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
