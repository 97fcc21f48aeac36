// The figures of a page's metrics: sections that open and close, pinned figures, one figure on the whole screen, and the
// drawing options of all and of each, which are part of the address.

import { addressed, joinNames, splitNames } from "./address.js";
import { button, h, put } from "./dom.js";
import { count } from "./format.js";
import { KEY_GROUP, download } from "./metrics.js";

const MOST_OPEN = 24; // metrics of a page whose sections all begin open
const PINNED = "Pinned";
const STORED = "tinsmith.view";
const DEFAULTS = { metrics: "", smooth: 0, log: "", time: "", pins: "", charts: "", open: "", closed: "" };
const SHARED = ["smooth", "log", "time"];

// The options of one chart are written as name:scale:smoothing; an empty part means that of the page.
function readCharts(text) {
  const charts = new Map();
  for (const one of text.split(",").filter(Boolean)) {
    const [name, scale = "", smooth = ""] = one.split(":");
    charts.set(splitNames(name)[0] || "", { scale, smooth: smooth === "" || !Number.isFinite(Number(smooth)) ? null : Math.min(0.98, Math.max(0, Number(smooth))) });
  }
  return charts;
}
const writeCharts = (charts) => [...charts].filter(([, { scale, smooth }]) => scale || smooth !== null).map(([key, { scale, smooth }]) => `${encodeURIComponent(key)}:${scale}:${smooth ?? ""}`).join(",");

// The options of a page's figures. Those of all figures also apply to the next page of this tab that has none in its
// address. `changed` is called after each change.
function optionsOf(changed) {
  const { values, set } = addressed(DEFAULTS);
  if (SHARED.every((name) => values[name] === DEFAULTS[name])) {
    try {
      const stored = JSON.parse(sessionStorage.getItem(STORED) || "{}");
      set(Object.fromEntries(SHARED.filter((name) => typeof stored[name] === typeof DEFAULTS[name]).map((name) => [name, stored[name]])));
    } catch {
      // The defaults apply.
    }
  }
  const charts = readCharts(values.charts);
  const change = (changes) => {
    set(changes);
    try {
      sessionStorage.setItem(STORED, JSON.stringify(Object.fromEntries(SHARED.map((name) => [name, values[name]]))));
    } catch {
      // Without storage the options are in the address only.
    }
    changed();
  };
  const of = (key) => charts.get(key) || { scale: "", smooth: null };
  return {
    values,
    change,
    of,
    changeChart(key, changes) {
      charts.set(key, { ...of(key), ...changes });
      change({ charts: writeCharts(charts) });
    },
    // The view of one chart, which follows both.
    viewOf: (key) => ({
      get smooth() {
        return of(key).smooth ?? values.smooth;
      },
      get log() {
        return of(key).scale ? of(key).scale === "log" : values.log === "1";
      },
      get time() {
        return values.time === "1";
      },
    }),
  };
}

function controlsOf({ values, change }, search) {
  const box = (id, text) => h("label", { for: id }, h("input", { id, type: "checkbox", checked: values[id] === "1", on: { change: (event) => change({ [id]: event.target.checked ? "1" : "" }) } }), text);
  return h(
    "div",
    { class: "view", role: "group", "aria-label": "Chart options" },
    h("label", { for: "search" }, "Metrics", search),
    h("label", { for: "smooth" }, "Smoothing", slider("smooth", values.smooth, (smooth) => change({ smooth }))),
    box("log", "Log scale"),
    box("time", "Wall-clock time"),
  );
}

const slider = (id, value, changed) => h("input", { id, type: "range", min: 0, max: 0.98, step: 0.02, value: String(value), on: { input: (event) => changed(Number(event.target.value)) } });

// The figures of metrics. `make(metric, view, extras)` makes one, which is drawn while its section is open. `draw(lines)`
// takes {metric, args}, the arguments of each figure's `update`; beyond `MOST_OPEN` metrics only the pinned and the key
// metrics begin open. Sections that match the search are open while it has text. `redraw` is called after each change of
// an option, and draws again.
export function figuresIn(groups, make, signal, redraw) {
  const figures = new Map(); // by key of the metric, in the order of the last drawing
  const places = new Map();
  const options = optionsOf(() => redraw());
  const pins = new Set(splitNames(options.values.pins));
  const chosen = new Map([...splitNames(options.values.closed).map((name) => [name, false]), ...splitNames(options.values.open).map((name) => [name, true])]);
  let enlarged = null;
  const update = (one) => {
    one.chart.update(...one.args);
    one.due = false;
  };
  const groupOf = ({ metric }) => (pins.has(metric.key) ? PINNED : metric.group);
  const isOpen = (name) => chosen.get(name) ?? (figures.size <= MOST_OPEN || name === PINNED || name === KEY_GROUP);
  const show = () => {
    const words = search.value.trim().toLowerCase();
    for (const [name, group] of places) {
      const matching = group.members.filter((one) => one.text.includes(words));
      for (const one of group.members) one.chart.figure.hidden = !matching.includes(one);
      group.part.hidden = !matching.length;
      group.part.open = words ? true : isOpen(name);
      group.size.textContent = ` (${count(matching.length)})`;
      if (group.part.open) matching.filter(({ due }) => due).forEach(update);
    }
  };
  const choose = (name, open) => {
    chosen.set(name, open);
    const names = (yes) => joinNames([...chosen].filter(([, one]) => one === yes).map(([one]) => one));
    options.change({ open: names(true), closed: names(false) });
  };
  const search = h("input", {
    id: "search",
    type: "search",
    placeholder: "name of a metric",
    maxlength: 100,
    value: options.values.metrics,
    on: { input: () => options.change({ metrics: search.value.trim() }) },
  });
  const placeOf = (name) => {
    if (!places.has(name)) {
      const place = h("div", { class: "curves" });
      const size = h("span", { class: "quiet" });
      const title = h("summary", { on: { click: (event) => (event.preventDefault(), search.value.trim() || choose(name, !part.open)) } }, h("h2", {}, name, size));
      const part = h("details", { class: "metric-group" }, title, place);
      places.set(name, { place, part, size, members: [] });
    }
    return places.get(name);
  };
  // Puts each figure into its section, in order. Figures that are in place are not touched.
  const arrange = () => {
    const members = new Map([...pins].length ? [[PINNED, []]] : []);
    for (const one of figures.values()) members.set(groupOf(one), [...(members.get(groupOf(one)) || []), one]);
    const filled = [...members].filter(([, all]) => all.length);
    for (const [name, all] of filled) {
      const group = placeOf(name);
      if (all.length !== group.members.length || all.some((one, index) => one !== group.members[index])) put(group.place, all.map((one) => one.chart.figure));
      group.members = all;
    }
    for (const name of [...places.keys()]) if (!filled.some(([one]) => one === name)) places.delete(name);
    const parts = filled.map(([name]) => placeOf(name).part);
    if (parts.length !== groups.children.length || parts.some((part, index) => part !== groups.children[index])) put(groups, parts);
  };
  const pin = (key) => {
    if (!pins.delete(key)) pins.add(key);
    options.change({ pins: joinNames([...pins]) });
    figures.get(key)?.pin.focus();
  };
  const add = (metric) => {
    const pinned = button("Pin", () => pin(metric.key), { class: "plain", "aria-label": `Pin ${metric.title}` });
    const open = button("Enlarge", () => enlarge(figures.get(metric.key)), { class: "plain", "aria-label": `Enlarge ${metric.title}` });
    const chart = make(metric, options.viewOf(metric.key), { tools: h("span", { class: "chart-tools" }, pinned, open) });
    figures.set(metric.key, { chart, metric, pin: pinned, text: `${metric.title} ${metric.name}`.toLowerCase() });
  };
  const enlarge = (one) => {
    enlarged = enlargedOf(one, make, options, signal, () => {
      enlarged = null;
    });
    enlarged.update(...one.args);
  };
  const draw = (lines) => {
    for (const { metric, args } of lines) {
      if (!figures.has(metric.key)) add(metric);
      const one = figures.get(metric.key);
      figures.delete(metric.key); // so that the order is that of the lines
      figures.set(metric.key, Object.assign(one, { args, metric, due: true }));
      one.pin.setAttribute("aria-pressed", String(pins.has(metric.key)));
      one.pin.textContent = pins.has(metric.key) ? "Unpin" : "Pin";
    }
    arrange();
    show();
    if (enlarged) enlarged.update(...figures.get(enlarged.key).args);
  };
  return { draw, view: options.viewOf(""), controls: controlsOf(options, search) };
}

// One figure on the whole screen, with its own scale and smoothing, and its files.
function enlargedOf({ metric, chart: small }, make, options, signal, closed) {
  const { key, title } = metric;
  const chosen = options.of(key);
  const heightOf = () => Math.max(200, window.innerHeight - 300);
  const ended = new AbortController();
  const chart = make(metric, options.viewOf(key), { heightOf, signal: AbortSignal.any([signal, ended.signal]) });
  const name = title.replaceAll(/[^\w.-]+/g, "-");
  const scale = h("select", { id: "chart-scale", on: { change: () => options.changeChart(key, { scale: scale.value }) } }, [["", "as on the page"], ["linear", "linear"], ["log", "logarithmic"]].map(([value, text]) => h("option", { value, selected: value === chosen.scale }, text)));
  const smoothing = slider("chart-smooth", chosen.smooth ?? options.values.smooth, (smooth) => options.changeChart(key, { smooth }));
  const before = document.activeElement;
  const dialog = h(
    "dialog",
    { class: "enlarged", "aria-label": title },
    h(
      "div",
      { class: "view" },
      h("label", { for: "chart-scale" }, "Scale", scale),
      h("label", { for: "chart-smooth" }, "Smoothing", smoothing),
      button("As on the page", () => {
        options.changeChart(key, { scale: "", smooth: null });
        scale.value = "";
        smoothing.value = String(options.values.smooth);
      }, { class: "plain" }),
      button("PNG", () => savePicture(`${name}.png`, title, chart.canvas()), { "aria-label": `Download ${title} as PNG` }),
      button("CSV", () => download(`${name}.csv`, "text/csv", csvOf(small.lines(), options.viewOf(key).time, title)), { "aria-label": `Download ${title} as CSV` }),
      button("Close", () => dialog.close(), { class: "primary" }),
    ),
    chart.figure,
  );
  const end = () => dialog.close();
  signal.addEventListener("abort", end);
  dialog.addEventListener("close", () => {
    signal.removeEventListener("abort", end);
    ended.abort();
    dialog.remove();
    closed();
    if (before?.isConnected) before.focus();
  });
  document.body.append(dialog);
  dialog.showModal();
  return { key, update: chart.update };
}

// Writes the lines of one chart as CSV: a row for each position.
function csvOf(lines, isTime, title) {
  const quoted = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const columns = lines.flatMap((line) => [["", line.values], [":p10", line.low], [":p90", line.high]].filter(([, values]) => values).map(([suffix, values]) => ({ label: `${line.name || title}${suffix}`, at: new Map(line.xs.map((x, index) => [x, values[index]])) })));
  const xs = [...new Set(lines.flatMap((line) => line.xs))].sort((a, b) => a - b);
  const rows = xs.map((x) => [x, ...columns.map(({ at }) => at.get(x) ?? "")]);
  return [[isTime ? "seconds" : "step", ...columns.map(({ label }) => quoted(label))], ...rows].map((row) => row.join(",")).join("\n") + "\n";
}

// Saves a chart's picture on the page's background, with its title.
function savePicture(name, title, canvas) {
  if (!canvas) throw new Error("This chart has no picture.");
  const ratio = window.devicePixelRatio || 1;
  const head = Math.round(30 * ratio);
  const picture = h("canvas", { width: canvas.width, height: canvas.height + head });
  const pen = picture.getContext("2d");
  const style = getComputedStyle(document.querySelector("dialog.enlarged"));
  pen.fillStyle = style.backgroundColor;
  pen.fillRect(0, 0, picture.width, picture.height);
  pen.fillStyle = style.color;
  pen.font = `600 ${Math.round(15 * ratio)}px system-ui, sans-serif`;
  pen.fillText(title, Math.round(10 * ratio), Math.round(20 * ratio));
  pen.drawImage(canvas, 0, head);
  picture.toBlob((blob) => download(name, "image/png", blob), "image/png");
}
