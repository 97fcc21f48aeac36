// A graph of the runs that load each other's checkpoints: parents on the left, children on the right.

import { path } from "./api.js";
import { empty, h, svg } from "./dom.js";
import { shortId, when } from "./format.js";
import { table } from "./table.js";

const WIDTH = 190;
const HEIGHT = 46;
const BOX = { width: 130, height: 30 };

// Returns each run's distance in loads from the central run; parents have negative distances.
function depthsOf(id, links) {
  const depths = new Map([[id, 0]]);
  for (const [near, far, step] of [["child", "parent", -1], ["parent", "child", 1]]) {
    let level = [id];
    while (level.length) {
      const next = links.filter((link) => level.includes(link[near]) && !depths.has(link[far])).map((link) => link[far]);
      for (const one of next) depths.set(one, depths.get(links.find((link) => link[far] === one && depths.has(link[near]))[near]) + step);
      level = [...new Set(next)];
    }
  }
  return depths;
}

export function lineage(id, links) {
  if (!links.length) return empty("This run started from the base model, and no run has loaded its checkpoints.");
  const depths = depthsOf(id, links);
  const first = Math.min(...depths.values());
  const rows = new Map();
  const at = new Map();
  for (const [run, depth] of [...depths].sort((a, b) => a[1] - b[1])) {
    const row = rows.get(depth) || 0;
    rows.set(depth, row + 1);
    at.set(run, { x: (depth - first) * WIDTH + 4, y: row * HEIGHT + 8 });
  }
  const width = rows.size * WIDTH;
  const height = Math.max(...rows.values()) * HEIGHT + 10;
  const drawn = links.filter((link) => link.parent !== link.child && at.has(link.parent) && at.has(link.child));
  const lines = drawn.map((link) => {
    const [from, to] = [at.get(link.parent), at.get(link.child)];
    const [x1, y1, x2, y2] = [from.x + BOX.width, from.y + BOX.height / 2, to.x, to.y + BOX.height / 2];
    return svg("path", { class: "link", d: `M${x1},${y1} C${x1 + 30},${y1} ${x2 - 30},${y2} ${x2},${y2}` }, svg("title", {}, link.path));
  });
  const boxes = [...at].map(([run, { x, y }]) =>
    svg(
      "a",
      { href: `#${path`/runs/${run}`}`, class: run === id ? "here" : null },
      svg("title", {}, run),
      svg("rect", { x, y, width: BOX.width, height: BOX.height, rx: 6 }),
      svg("text", { x: x + BOX.width / 2, y: y + 20, "text-anchor": "middle" }, shortId(run)),
    ),
  );
  const columns = [
    { label: "From", kind: "mono", cell: (row) => shortId(row.parent) },
    { label: "Checkpoint", kind: "mono", cell: (row) => row.path.split("/").slice(3).join("/") },
    { label: "Into", kind: "mono", cell: (row) => shortId(row.child) },
    { label: "Last loaded", cell: (row) => when(row.time) },
  ];
  return h(
    "figure",
    { class: "lineage" },
    h("div", { class: "across", tabindex: "0", role: "group", "aria-label": "Checkpoints between runs" }, svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, lines, boxes)),
    h("details", {}, h("summary", {}, "View as table"), table("Checkpoints between runs", columns, links)),
  );
}
