// The metrics of a run: names, groups, order, bands, and files for download.

const TITLES = new Map([
  ["loss_per_token", "Loss per token"],
  ["loss_per_datum", "Loss per datum"],
  ["entropy", "Entropy (estimated)"],
  ["response_tokens", "Trained tokens per response"],
  ["advantage", "Advantage"],
  ["ppo_kl:mean", "KL (sampled minus current logprobs)"],
  ["kl_sample_train_v1", "KL of sampling and training policy, k1"],
  ["kl_sample_train_v2", "KL of sampling and training policy, k2"],
  ["kl_sample_train_v3", "KL of sampling and training policy, k3"],
  ["effective_sample_share", "Effective sample share"],
  ["sample_train_ratio:max", "Largest ratio of training and sampling policy"],
  ["sample_train_nonfinite:sum", "Tokens without a finite ratio"],
  ["ratio:mean", "Importance ratio"],
  ["pg_clipfrac:mean", "Clipped share"],
  ["grad_norm", "Gradient norm"],
  ["learning_rate", "Learning rate"],
  ["tokens_per_second", "Tokens per second"],
  ["step_seconds", "Seconds per step"],
  ["forward/loss_per_token", "Loss per token, forward only"],
  ["forward/loss_per_datum", "Loss per datum, forward only"],
  ["loss:sum", "Loss, summed"],
  ["tokens:sum", "Tokens of the step"],
  ["rows:sum", "Tokens through the model, shared ones once"],
]);

// The first figures of a run's page, by the kind of its losses: from each row, the first name that the run has.
const REWARDS = ["reward", "reward/mean", "mean_reward", "env/all/reward/total", "reward/total"];
const LOSSES = ["loss_per_token", "loss_per_datum", "train_mean_nll", "loss"];
const REINFORCED = [
  REWARDS,
  ["response_tokens", "env/all/ac_tokens_per_turn"],
  ["env/all/by_group/frac_mixed", "env/all/by_group/frac_all_good"], // groups of equal rewards teach nothing
  ["entropy", "optim/entropy"],
  ["ppo_kl:mean", "optim/kl_sample_train_v2", "optim/kl_sample_train_v1", "kl_sample_train_v2"], // of sampling and training
  ["pg_clipfrac:mean"],
  LOSSES,
  ["grad_norm"],
];
const SUPERVISED = [LOSSES, ["test/nll", "eval/loss", "val_loss", "forward/loss_per_token", "forward/loss_per_datum"], ["grad_norm"], ["learning_rate", "optim/lr"], ["tokens_per_second"]];
const ADVANTAGED = new Set([...REWARDS, "advantage", "ppo_kl:mean"]);

export const KEY_GROUP = "Key metrics";
const GROUPS = ["Reward", "Policy", "Optimizer", "Speed", "Other"];
const BELONGS = [
  ["Speed", /second|tokens:sum|rows:sum|_s$|\btime\b/],
  ["Reward", /reward|advantage|correct|accuracy|score|success|format/],
  ["Policy", /kl|entropy|clip|ratio|logprob|response|length|turn|effective_sample|sample_train/],
  ["Optimizer", /loss|grad|norm|learning_rate|\blr\b|nll|weight|progress/],
];
const LARGE = 24; // a section of more metrics is divided by the next part of their names

const PARTS = /:(min|p10|p50|p90|max)$/;

// A metric's key includes its source, since client and server may use the same name.
export const keyOf = (source, name) => `${source} ${name}`;

// Returns every metric of the points, {key, source, name, title, group, band}, in display order.
export function metricsOf(points) {
  const names = { client: new Set(), server: new Set() };
  for (const point of points) for (const name of Object.keys(point.metrics)) names[point.source]?.add(name);
  const metrics = [];
  for (const source of ["client", "server"]) {
    for (const name of names[source]) {
      const base = name.replace(PARTS, "");
      if (base !== name && names[source].has(base)) continue;
      const band = names[source].has(`${name}:p10`) && names[source].has(`${name}:p90`);
      const title = (source === "server" && TITLES.get(name)) || name;
      metrics.push({ key: keyOf(source, name), source, name, title, group: "", band });
    }
  }
  divide(metrics);
  const isReinforced = metrics.some(({ name }) => ADVANTAGED.has(name));
  const keys = isReinforced ? REINFORCED : SUPERVISED;
  for (const choices of keys) {
    const first = choices.map((name) => metrics.find((metric) => metric.name === name)).find(Boolean);
    if (first) first.group = KEY_GROUP;
  }
  const order = [...keys.flat(), ...TITLES.keys()];
  const place = ({ name }) => (order.includes(name) ? order.indexOf(name) : order.length);
  const groups = [KEY_GROUP, ...GROUPS];
  const groupPlace = ({ group }) => (groups.includes(group) ? groups.indexOf(group) : groups.length);
  const byName = (a, b) => a.localeCompare(b, "en", { numeric: true });
  return metrics.sort((a, b) => groupPlace(a) - groupPlace(b) || byName(a.group, b.group) || place(a) - place(b) || byName(a.name, b.name));
}

// Puts metrics with a prefix, such as env/all/reward, into a section of the prefix; a large section is divided once more.
function divide(metrics) {
  const prefixOf = ({ name }, parts) => name.split("/").slice(0, -1).slice(0, parts).join("/");
  const sizes = new Map();
  for (const metric of metrics) sizes.set(prefixOf(metric, 1), (sizes.get(prefixOf(metric, 1)) || 0) + 1);
  for (const metric of metrics) {
    const prefix = prefixOf(metric, 1);
    metric.group = prefix ? prefixOf(metric, sizes.get(prefix) > LARGE ? 2 : 1) : groupOf(metric.name);
  }
}

const groupOf = (name) => (BELONGS.find(([, words]) => words.test(name)) || ["Other"])[0];

// Makes a line of one metric. `start` is the origin of wall-clock positions in seconds; null means steps.
export function lineOf(points, metric, start = null, name = "") {
  const pointsOfMetric = points.filter((point) => point.source === metric.source && metric.name in point.metrics);
  const values = (suffix) => pointsOfMetric.map((point) => point.metrics[metric.name + suffix] ?? null);
  const line = { name, xs: pointsOfMetric.map((point) => (start === null ? point.step : point.time - start)), values: values("") };
  return metric.band ? { ...line, low: values(":p10"), high: values(":p90") } : line;
}

// Whether a run trains on advantages but logs no reward.
export function rewardless(metrics) {
  const has = (words) => metrics.some(({ name }) => words.test(name));
  return has(/^advantage$|^ppo_kl:mean$/) && !has(/reward|score|correct|accuracy/);
}

// Writes all points as CSV: a row for each step, with its last time and a column for each name. A name that both sources
// use has two columns, each with its source.
export function csvOf(points) {
  const sources = new Map();
  const rows = new Map();
  for (const point of points) {
    const row = rows.get(point.step) || { time: 0, values: new Map() };
    row.time = Math.max(row.time, point.time);
    for (const [name, value] of Object.entries(point.metrics)) {
      row.values.set(keyOf(point.source, name), value);
      sources.set(name, (sources.get(name) || new Set()).add(point.source));
    }
    rows.set(point.step, row);
  }
  const columns = [...sources].sort().flatMap(([name, all]) => [...all].sort().map((source) => ({ key: keyOf(source, name), label: all.size > 1 ? `${name} (${source})` : name })));
  const quoted = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const lines = [...rows].sort(([a], [b]) => a - b).map(([step, row]) => [step, new Date(row.time * 1000).toISOString(), ...columns.map(({ key }) => row.values.get(key) ?? "")]);
  return [["step", "time", ...columns.map(({ label }) => quoted(label))], ...lines].map((line) => line.join(",")).join("\n") + "\n";
}

export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
