// The samples of one run: the list of its groups with its numbers and files, and one prompt over the steps.

import { addressed } from "./address.js";
import { divergenceText, drawPrompt, drawSequence, listKinds, meanOf, rewardsOf, weightsOf } from "./answers.js";
import { get, getFile, path, poll } from "./api.js";
import { button, empty, h, keep, page, put, section, svg } from "./dom.js";
import { ago, count, counted, number, percent, shortId } from "./format.js";
import { showGroups } from "./groups.js";
import { download } from "./metrics.js";
import { nameOf } from "./overview.js";
import { isNumber } from "./scale.js";
import { facts, table } from "./table.js";
import { colouring } from "./tokens.js";

const MOST_STEPS = 1000;
const POLL_S = 8;
const WIDTH = 600; // of the picture of rewards, in its own units
const HEIGHT = 48;

// The links between the parts of a run's page; `current` is the one that is shown.
export function runTabs(id, current) {
  const tab = (name, label, href) => h("a", { href, "aria-current": name === current ? "page" : null }, label);
  return h("nav", { class: "tabs", "aria-label": "Parts of the run" }, tab("curves", "Curves", `#${path`/runs/${id}`}`), tab("samples", "Samples", `#${path`/runs/${id}/samples`}`));
}

export async function showRunSamples(main, id, prompt, signal) {
  const run = await get(path`/dashboard/runs/${id}`, signal);
  if (prompt) return showPrompt(main, run, prompt, signal);
  const summary = h("div");
  const drawSummary = keep(summary);
  const place = h("div");
  page(main, `Samples of ${nameOf(run)}`, runTabs(id, "samples"), summary, place);
  await showGroups(place, signal, {
    run: id,
    report: ({ steps, selection, cursor }) => drawSummary([steps, selection, cursor.total_count], () => summarize(id, steps, selection, cursor.total_count)),
  });
}

const STEPS = [
  { label: "Step", number: true, cell: (row) => count(row.step) },
  { label: "Answers", number: true, cell: (row) => count(row.answers) },
  { label: "Mean reward", number: true, cell: (row) => number(row.reward) },
  { label: "KL (k3)", number: true, cell: (row) => number(row.kl) },
  { label: "Effective sample size", number: true, cell: (row) => percent(row.effective_share) },
  { label: "Trained tokens", number: true, cell: (row) => count(row.trained_tokens) },
];

// The numbers of the stored answers that pass the filters, their steps, and the files of all.
function summarize(id, steps, selection, numGroups) {
  const trained = isNumber(selection.kl);
  const save = (format) => button(format === "jsonl" ? "JSON lines" : "Parquet", async () => {
    const file = await getFile(`${path`/dashboard/runs/${id}/samples`}?format=${format}`);
    download(`samples-${shortId(id).replaceAll(":", "-")}.${format}`, "application/octet-stream", file);
  }, { class: "plain", "aria-label": `Download all samples of the run as ${format === "jsonl" ? "JSON lines" : "Parquet"}` });
  return [
    facts([
      ["Groups", count(numGroups)],
      ["Answers", count(selection.answers)],
      ["Mean reward", isNumber(selection.reward) ? number(selection.reward) : null],
      ["KL of sampling and training (k3)", trained ? number(selection.kl) : null],
      ["Effective sample size", trained ? percent(selection.effective_share) : null],
      ["Trained tokens", trained ? count(selection.trained_tokens) : null],
      ["Download", h("span", {}, save("jsonl"), save("parquet"))],
    ]),
    steps.length ? h("details", { class: "by-step" }, h("summary", {}, `By optimizer step (${count(steps.length)})`), table("Stored answers by optimizer step", STEPS, steps)) : null,
  ];
}

// One prompt over the steps.

// Groups in the order of the steps of their weights; those without one by their training, and at last by time.
function sortBySteps(groups) {
  const stepOf = (group) => group.weights_step ?? (isNumber(group.step) ? group.step - 1 : Infinity);
  return [...groups].sort((a, b) => stepOf(a) - stepOf(b) || Date.parse(a.created_at) - Date.parse(b.created_at));
}

function describeStep(group) {
  const parts = [isNumber(group.weights_step) ? `after ${counted(group.weights_step, "step")}` : shortId(weightsOf(group).replace("tinker://", ""))];
  if (isNumber(group.step)) parts.push(`trained on in step ${count(group.step)}`);
  return parts.join(", ");
}

// A picture of the rewards of each group: from the smallest to the largest, with the mean. Hidden from screen readers,
// which hear the numbers of the slider.
function drawRewards(groups, at) {
  const all = groups.flatMap(rewardsOf);
  if (!all.length) return null;
  const low = Math.min(...all);
  const size = Math.max(...all) - low || 1;
  const x = (index) => (groups.length > 1 ? 8 + ((WIDTH - 16) * index) / (groups.length - 1) : WIDTH / 2);
  const y = (value) => HEIGHT - 6 - ((HEIGHT - 12) * (value - low)) / size;
  const marks = groups.flatMap((group, index) => {
    const rewards = rewardsOf(group);
    if (!rewards.length) return [];
    const kind = index === at ? "chosen" : null;
    return [
      svg("line", { x1: x(index), x2: x(index), y1: y(Math.min(...rewards)), y2: y(Math.max(...rewards)), class: kind }),
      svg("line", { x1: x(index), x2: x(index), y1: y(meanOf(rewards)), y2: y(meanOf(rewards)), class: index === at ? "mean chosen" : "mean" }),
    ];
  });
  return svg("svg", { class: "rewards", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, ...marks);
}

function describeRewards(group) {
  const rewards = rewardsOf(group);
  return rewards.length ? `mean reward ${number(meanOf(rewards))} (${number(Math.min(...rewards))} to ${number(Math.max(...rewards))})` : "";
}

async function showPrompt(main, run, prompt, signal) {
  const id = run.model_id;
  const { values, set } = addressed({ at: "", colour: "" });
  const samples = new Map(); // the read samples by request, which never change but for their notes
  let groups = [];
  let at = 0;
  let turn = 0;
  const slider = h("input", { id: "at-step", type: "range", min: 0, step: 1, on: { input: () => move(Number(slider.value)) } });
  const earlier = button("Earlier", () => move(at - 1));
  const later = button("Later", () => move(at + 1));
  const label = h("p", { class: "quiet", "aria-live": "polite" });
  const picture = h("div");
  const question = h("div");
  const answers = h("div");
  const drawQuestion = keep(question);
  const drawAnswers = keep(answers);
  const drawPicture = keep(picture);
  const move = (to) => {
    at = Math.max(0, Math.min(groups.length - 1, to));
    set({ at: weightsOf(groups[at]) });
    return showStep();
  };
  const showStep = async () => {
    const current = ++turn;
    const group = groups[at];
    slider.max = String(groups.length - 1);
    slider.value = String(at);
    slider.disabled = groups.length < 2;
    earlier.disabled = at === 0;
    later.disabled = at === groups.length - 1;
    slider.setAttribute("aria-valuetext", [describeStep(group), describeRewards(group)].filter(Boolean).join(", "));
    label.textContent = [`${count(at + 1)} of ${count(groups.length)}: ${describeStep(group)}`, describeRewards(group), divergenceText(group), ago(group.created_at)].filter(Boolean).join(", ");
    drawPicture([groups.map(rewardsOf), at], () => drawRewards(groups, at) || []);
    const ids = [...new Set(group.answers.map((row) => row.request_id))];
    const notes = JSON.stringify(group.answers.map(({ reward, step, advantage }) => [reward, step, advantage]));
    const read = async (request) => {
      const stored = samples.get(request);
      if (stored?.notes === notes) return stored.sample;
      const sample = await get(path`/dashboard/samples/${request}`, signal);
      samples.set(request, { notes, sample });
      return sample;
    };
    const loaded = await Promise.all(ids.map(read));
    if (current !== turn) return;
    drawQuestion([prompt, group.question], () => [
      h("p", { class: "question-text", tabindex: "0", role: "group", "aria-label": "Question" }, group.question || "(prompt without text)"),
      h("details", { class: "whole-prompt" }, h("summary", {}, `Whole prompt, ${counted(group.prompt_tokens, "token")}`), h("div", { class: "turn" }, drawPrompt("Prompt", loaded[0]))),
    ]);
    drawAnswers([ids, notes], () => drawStep(loaded));
  };
  const drawStep = (loaded) => {
    const pairs = loaded.flatMap((sample) => sample.sequences.map((sequence) => ({ sample, sequence })));
    const link = ({ request_id: request }) => [", ", h("a", { href: `#${path`/samples/${request}`}`, title: request }, "sample")];
    return [
      colouring(main, listKinds(pairs.map(({ sequence }) => sequence)), values.colour, (colour) => set({ colour })),
      pairs.map(({ sample, sequence }, index) => drawSequence(`Response ${index + 1}`, sequence, link(sample))),
    ];
  };
  const look = async () => {
    const query = new URLSearchParams({ run: id, prompt, limit: MOST_STEPS });
    const content = await get(`/dashboard/groups?${query}`, signal);
    groups = sortBySteps(content.groups);
    if (!groups.length) return put(answers, empty("No answer to this prompt is stored any more."));
    const index = groups.findIndex((group) => weightsOf(group) === values.at);
    at = index < 0 ? groups.length - 1 : index;
    await showStep();
  };
  const tools = h("div", { class: "stepper" }, earlier, h("div", {}, h("label", { for: "at-step", class: "hidden" }, "Step"), picture, slider), later);
  page(main, `One prompt of ${nameOf(run)}`, runTabs(id, ""), tools, label, question, section("Answers", answers));
  await poll(signal, POLL_S, look);
}
