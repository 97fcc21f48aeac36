// Tables with a caption, headers that sort, and pages.

import { button, copyButton, empty, h } from "./dom.js";
import { count } from "./format.js";

// A column is {label, cell, number?, sort?, copy?}; `copy` returns the text of its button. `sorted` is {by, order, change}
// if the server sorts. Without rows, `none` is the text, and `next` the lines that make the first row.
export function table(caption, columns, rows, { sorted = null, none = "Nothing here yet.", next = "" } = {}) {
  if (!rows.length) return empty(none, next);
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h(
      "table",
      {},
      h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, columns.map((column) => head(column, sorted)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, columns.map((column, index) => cell(column, row, index))))),
    ),
  );
}

function cell(column, row, index) {
  const text = column.copy?.(row);
  const inside = text ? h("span", {}, column.cell(row), " ", copyButton(`${column.label.toLowerCase()} ${text}`, text)) : column.cell(row);
  const attributes = { class: column.number ? "number" : column.kind, "data-label": column.label };
  return index === 0 ? h("th", { scope: "row", ...attributes }, inside) : h("td", attributes, inside);
}

function head(column, sorted) {
  const attributes = { scope: "col", class: column.number ? "number" : null };
  if (!column.sort || !sorted) return h("th", attributes, column.label);
  const isSorted = sorted.by === column.sort;
  const order = isSorted && sorted.order === "desc" ? "asc" : "desc";
  attributes["aria-sort"] = isSorted ? (sorted.order === "desc" ? "descending" : "ascending") : "none";
  return h("th", attributes, button(column.label, () => sorted.change(column.sort, order), { class: "sort" }));
}

// Shows the range of rows and buttons for the neighbouring pages.
export function pager({ offset, limit, total_count: total }, move) {
  const last = Math.min(offset + limit, total);
  return h(
    "nav",
    { class: "pager", "aria-label": "Pages of this list" },
    button("Previous", () => move(Math.max(0, Math.min(offset - limit, lastOffset({ limit, total_count: total })))), { disabled: offset === 0 }),
    h("span", {}, total > offset ? `${count(offset + 1)} to ${count(last)} of ${count(total)}` : `0 of ${count(total)}`),
    button("Next", () => move(offset + limit), { disabled: last >= total }),
  );
}

// The offset of the last page of a list, for a message about a page beyond it.
export const lastOffset = ({ limit, total_count: total }) => Math.max(0, Math.ceil(total / limit) - 1) * limit;

// What a page beyond the end of a list shows; `move` goes to another offset. Null on a page that exists.
export function drawMissingPage(cursor, move) {
  if (!cursor.total_count || cursor.offset < cursor.total_count) return null;
  const text = `There is no such page: the list has ${count(cursor.total_count)} entries, and this one begins after ${count(cursor.offset)}.`;
  return h("div", { class: "empty" }, h("p", {}, text), button("Go to the last page", () => move(lastOffset(cursor))));
}

export function facts(pairs) {
  const present = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "facts" }, present.map(([name, value]) => h("div", { class: ["CODE", "PRE"].includes(value.tagName) || value.className === "code-line" ? "wide" : null }, h("dt", {}, name), h("dd", {}, value))));
}
