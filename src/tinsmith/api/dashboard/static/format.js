// Formats numbers, sizes and times. Missing and non-finite values become a dash.

import { isNumber } from "./scale.js";

const COUNT = new Intl.NumberFormat("en-GB");
const SHORT = new Intl.NumberFormat("en-GB", { notation: "compact", maximumFractionDigits: 1 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const NONE = "-";

const formatNumber = (format) => (value) => (isNumber(value) ? format(value) : NONE);
const fixed = (value, digits) => value.toLocaleString("en-GB", { minimumFractionDigits: digits, maximumFractionDigits: digits });

export const count = formatNumber((value) => COUNT.format(value || 0)); // no minus sign for zero
export const short = formatNumber((value) => SHORT.format(value || 0));

// Formats a count, but nothing for zero, for tables with mostly zeros.
export const some = (value) => (value ? count(value) : NONE);

// "1 token", "2 tokens".
export const counted = (value, noun, nouns = `${noun}s`) => `${count(value)} ${value === 1 ? noun : nouns}`;

export const number = formatNumber((value) => {
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e9)) return value.toExponential(2).replace("e+", "e");
  if (Number.isInteger(value)) return count(value);
  return fixed(value, size < 1 ? 4 : size < 100 ? 3 : 1);
});

// The form of sizes.py, for the same sizes in the CLI and in messages.
export const bytes = formatNumber((value) => {
  let unit = 0;
  let rest = value;
  while (rest >= 1023.95 && unit < UNITS.length - 1) {
    rest /= 1024;
    unit += 1;
  }
  return `${unit ? rest.toFixed(1) : Math.round(rest)} ${UNITS[unit]}`;
});

export const seconds = formatNumber((value) => {
  if (value > 0 && value < 0.0005) return "under 1 ms";
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 89.5) return `${value.toFixed(value < 9.95 ? 1 : 0)} s`;
  if (value < 5370) return `${Math.round(value / 60)} min`;
  return value < 127800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} d`;
});

export function ago(moment, now = Date.now()) {
  const since = (now - Date.parse(moment)) / 1000;
  if (Number.isNaN(since)) return NONE;
  if (since < 0) return `in ${seconds(-since)}`;
  return since < 2 ? "now" : `${seconds(since)} ago`;
}

const dated = (show) => (moment) => {
  const at = new Date(moment ?? NaN);
  return Number.isNaN(at.getTime()) ? NONE : show(at);
};

export const when = dated((at) => at.toLocaleString("sv-SE").slice(0, 16));
export const clock = dated((at) => at.toLocaleTimeString("en-GB"));

// Shows 0 % and 100 % only for exactly these shares.
export const percent = formatNumber((share) => {
  if (share > 0 && share < 0.0005) return "under 0.1 %";
  if (share > 0.9995 && share < 1) return "over 99.9 %";
  const digits = (share > 0 && share < 0.0995) || (share > 0.99 && share < 1) ? 1 : 0;
  return `${(100 * share).toFixed(digits)} %`;
});

// Shortens an id: most of the session's id and digests are removed.
export function shortId(id) {
  if (!id || typeof id !== "string") return NONE;
  const [session, ...rest] = id.split(":");
  const parts = rest.map((part) => (part.length > 16 ? `${part.slice(0, 14)}\u2026` : part));
  return [session.length > 16 ? session.slice(0, 8) : session, ...parts].join(":");
}
