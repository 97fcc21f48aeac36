// Ranges, ticks and labels of charts for any numbers: nearly equal, huge, tiny, negative or missing.
//
// Values are first divided by a power of ten (`exponentOf`), so that ranges and ticks are computed near 1 without
// overflow or loss of precision.

const FLAT = 1e-6; // smaller relative differences are rounding errors: single precision has seven digits
const MOST_EXPONENT = 300;
const LONG = 1e9; // labels have exponents from here on, and below SHORT
const SHORT = 1e-4;

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// Returns the power of ten of the largest value, or 0 without values.
export function exponentOf(values) {
  const most = values.filter(isNumber).reduce((largest, value) => Math.max(largest, Math.abs(value)), 0);
  if (most === 0) return 0;
  return Math.max(-MOST_EXPONENT, Math.min(MOST_EXPONENT, Math.floor(Math.log10(most))));
}

// Divides values by the power of ten; other values than numbers become missing.
export const scaled = (values, exponent) => values.map((value) => (isNumber(value) ? value / 10 ** exponent : null));

// Returns the range of an axis of values: their extent with a margin, including zero if they are nearly equal.
export function valueRange(low, high) {
  if (!isNumber(low) || !isNumber(high)) return [0, 1];
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (size === 0) return [0, 1];
  if (high - low <= FLAT * size) return low > 0 ? [0, 2 * size] : [-2 * size, 0];
  const margin = 0.1 * (high - low);
  return [low >= 0 ? Math.max(0, low - margin) : low - margin, high <= 0 ? Math.min(0, high + margin) : high + margin];
}

// Ends a range at the largest possible value, unless some value is larger.
export const boundedRange = ([low, high], most, largest) => [low, isNumber(most) && isNumber(largest) ? Math.min(high, Math.max(most, largest)) : high];

// Returns the range of an axis of steps: their extent, with a margin for a single one.
export function stepRange(low, high) {
  if (!isNumber(low) || !isNumber(high)) return [0, 1];
  const margin = Math.max(0.5, 1e-9 * Math.abs(high));
  return high - low >= margin ? [low, high] : [low - margin, high + margin];
}

// Returns at most `most` + 1 round numbers from `low` to `high`, integers for steps.
export function ticksOf(low, high, most, whole = false) {
  const raw = (high - low) / most;
  if (!(raw > 0)) return [];
  const power = 10 ** Math.floor(Math.log10(raw));
  const round = power * ([1, 2, 5].find((times) => times * power >= raw * (1 - 1e-9)) ?? 10);
  const step = whole ? Math.max(1, round) : round;
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: Math.max(0, count) }, (_, index) => (first + index) * step);
}

// Returns the labels of ticks, with the fewest digits that distinguish them.
export function labelsOf(ticks, exponent = 0) {
  const size = ticks.reduce((largest, tick) => Math.max(largest, Math.abs(tick)), 0);
  const step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : size;
  if (size === 0) return ticks.map(() => "0");
  const place = Math.floor(Math.log10(step) + 1e-9); // of the last digit that differs
  const largest = Math.floor(Math.log10(size) + 1e-9);
  const whole = size * 10 ** exponent;
  const text = (tick, format) => (Math.abs(tick) < step / 2 ? "0" : format(tick));
  if (whole < LONG && whole >= SHORT) {
    const digits = Math.min(20, Math.max(0, -(place + exponent)));
    const format = new Intl.NumberFormat("en-GB", { minimumFractionDigits: digits, maximumFractionDigits: digits });
    return ticks.map((tick) => text(tick, (value) => format.format(value * 10 ** exponent)));
  }
  const digits = Math.min(15, Math.max(0, largest - place));
  return ticks.map((tick) => text(tick, (value) => `${(value / 10 ** largest).toFixed(digits)}e${largest + exponent}`));
}
