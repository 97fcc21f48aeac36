// The page of the tenant's keys, quotas and usage.

import { get, poll } from "./api.js";
import { stacked } from "./charts.js";
import { code, empty, h, keep, page, put, section, state } from "./dom.js";
import { bytes, count, percent, when } from "./format.js";
import { isNumber } from "./scale.js";
import { KINDS, iso, tokenBars } from "./overview.js";
import { table } from "./table.js";

const DAY_MS = 86400e3;
const DAYS = 14;
const QUOTAS = {
  queued_requests: "Requests waiting",
  queued_bytes: "Bytes waiting",
  models: "Models loaded",
  checkpoint_bytes: "Checkpoints",
  file_bytes: "Files",
  response_bytes: "Stored responses",
  tokens_per_minute: "Tokens per minute",
};

const KEYS = [
  { label: "Key", number: true, cell: (row) => String(row.key_id) },
  { label: "Name", cell: (row) => row.name || "-" },
  { label: "Created", number: true, cell: (row) => when(row.created_at) },
  { label: "State", cell: (row) => state(row.revoked_at ? "revoked" : row.current ? "current" : "active") },
];

const sized = (name, value) => (name.endsWith("_bytes") ? bytes(value) : count(value));

const LIMITS = [
  { label: "Quota", cell: (row) => QUOTAS[row.name] || row.name },
  { label: "Used", number: true, cell: (row) => sized(row.name, row.used) },
  { label: "Limit", number: true, cell: (row) => (row.limit ? sized(row.name, row.limit) : "none") },
  {
    label: "Share",
    cell: (row) =>
      row.limit && isNumber(row.used)
        ? h("span", { class: "progress" }, h("meter", { min: 0, max: row.limit, high: 0.8 * row.limit, value: Math.min(row.used, row.limit), "aria-label": `${QUOTAS[row.name] || row.name} used` }), ` ${percent(row.used / row.limit)}`)
        : "-",
  },
];

export default {
  title: "Keys and usage",
  async show(main, _parts, signal) {
    const keys = h("div");
    const quotas = h("div");
    const usage = h("div");
    const drawKeys = keep(keys);
    const drawQuotas = keep(quotas);
    page(main, "Keys and usage", section(`Tokens in the last ${DAYS} days`, usage), section("Quotas", quotas), section("Keys", keys));
    const look = async () => {
      const answer = await get("/dashboard/tenant", signal);
      drawQuotas(answer.quotas, () => table("Quotas", LIMITS, answer.quotas));
      drawKeys([answer.keys, answer.takes_any_key], () => [
        answer.takes_any_key
          ? h("p", {}, "This server has no keys. It listens only on this machine, and all clients belong to the tenant ", h("code", {}, answer.tenant_id), ".")
          : table(`Keys of ${answer.tenant_id}`, KEYS, answer.keys),
        h("p", { class: "quiet" }, "The server's operator creates and revokes keys: ", code("tinsmith keys create TENANT", "the command that creates a key"), " ", code("tinsmith keys revoke KEY_ID", "the command that revokes a key")),
      ]);
    };
    const tokens = async () => {
      const end = (Math.floor(Date.now() / DAY_MS) + 1) * DAY_MS;
      const start = end - DAYS * DAY_MS;
      const answer = await get(`/billing/usage/events?starting_on=${iso(start)}&ending_before=${iso(end)}`, signal);
      const bars = tokenBars(answer.data, start, DAY_MS, DAYS, (at) => at.toISOString().slice(0, 10));
      const any = bars.some((bar) => bar.parts.some(Boolean));
      put(usage, any ? stacked("Tokens per day (UTC)", KINDS, bars) : empty(`No tokens were trained or sampled in the last ${DAYS} days.`));
    };
    await Promise.all([poll(signal, 5, look), poll(signal, 60, tokens)]);
  },
};
