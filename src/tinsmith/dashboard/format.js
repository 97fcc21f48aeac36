// Numbers, sizes and moments as people read them.

const COUNT = new Intl.NumberFormat("en-GB");
const SHORT = new Intl.NumberFormat("en-GB", { notation: "compact", maximumFractionDigits: 1 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export const count = (value) => (value === null || value === undefined ? "-" : COUNT.format(value));
export const short = (value) => (value === null || value === undefined ? "-" : SHORT.format(value));

export function number(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(2);
  if (Number.isInteger(value)) return COUNT.format(value);
  return value.toFixed(size < 1 ? 4 : size < 100 ? 3 : 1);
}

// The same without zeros at its end, for scales.
export function plain(value) {
  const text = number(value);
  return text.includes(".") ? text.replace(/\.?0+(?=e|$)/, "") : text;
}

export function bytes(value) {
  if (value === null || value === undefined) return "-";
  let unit = 0;
  let rest = value;
  while (rest >= 1024 && unit < UNITS.length - 1) {
    rest /= 1024;
    unit += 1;
  }
  return `${unit && rest < 100 ? rest.toFixed(1) : Math.round(rest)} ${UNITS[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "-";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 90) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return value < 129600 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} d`;
}

export function ago(moment, now = Date.now()) {
  const since = (now - Date.parse(moment)) / 1000;
  if (Number.isNaN(since)) return "-";
  if (since < 0) return `in ${seconds(-since)}`;
  return since < 2 ? "now" : `${seconds(since)} ago`;
}

export const when = (moment) => (moment ? new Date(moment).toLocaleString("sv-SE").slice(0, 16) : "-");

export const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

// An id without most of its session's, and without digests.
export function shortId(id) {
  const [session, ...rest] = id.split(":");
  const shown = rest.map((part) => (part.length > 16 ? `${part.slice(0, 14)}\u2026` : part));
  return [session.length > 16 ? session.slice(0, 8) : session, ...shown].join(":");
}
