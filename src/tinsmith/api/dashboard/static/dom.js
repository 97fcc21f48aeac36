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

export function empty(text) {
  return h("p", { class: "empty" }, text);
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

// Replaces the children only if their data has changed, which preserves focus and selection.
export function keep(element) {
  let shown;
  return (data, make) => {
    const text = JSON.stringify(data);
    if (text === shown) return;
    shown = text;
    put(element, make(data));
  };
}

// Asks a question in a dialog. Resolves to the result of `read` when confirmed, otherwise to null.
export function question(title, body, confirm, { danger = false, read = () => true } = {}) {
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
        h("button", { value: "no", type: "button", class: "plain", on: { click: () => dialog.close("no") } }, "Cancel"),
        h("button", { value: "yes", class: danger ? "danger" : "primary" }, confirm),
      ),
    );
    const dialog = h("dialog", { "aria-labelledby": id }, form);
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
