"""The samples of a run in a browser, of a run that was trained with the SDK: its groups, one prompt over the steps,
colours of tokens, searches, and files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from axe_core_python.selenium import Axe
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select
from tinker import types

from support.browser import Browser
from support.dashboard_data import BASE, Site
from tinsmith.exchange.metrics import RunMetrics

STEPS = 3
ANSWERS = 4
QUESTIONS = ("What is 12 + 7?", "What is 30 - 4?", "Name a colour of the sky.")


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """`rewards` are those of each question and step."""

    model_id: str
    rewards: Mapping[tuple[str, int], Sequence[float]]


@pytest.fixture(scope="module")
def rl_run(alice: Site) -> TrainedRun:
    return train_run(alice)


def train_run(alice: Site) -> TrainedRun:
    """A run of reinforcement learning that asks for each answer in a request of its own."""
    model = alice.service.create_lora_training_client(BASE, rank=4).result()
    tokenizer = model.get_tokenizer()
    metrics = RunMetrics(model.model_id, alice.server.url, alice.key)
    params = types.SamplingParams(max_tokens=6, temperature=2.0)
    rewards_of: dict[tuple[str, int], list[float]] = {}
    with metrics:
        for step in range(STEPS):
            sampler = model.save_weights_and_get_sampling_client().result()
            data = []
            for question in QUESTIONS:
                prompt = tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
                prompt_input = types.ModelInput.from_ints(prompt)
                pending = [sampler.sample(prompt_input, 1, params) for _ in range(ANSWERS)]
                sequences = [request.result().sequences[0] for request in pending]
                answers = [list(sequence.tokens) for sequence in sequences]
                rewards = [float(sum(answer) % 2) for answer in answers]  # equal answers have equal rewards
                rewards_of[question, step] = rewards
                assert metrics.reward(prompt, answers, rewards) >= 1
                for sequence, answer, reward in zip(sequences, answers, rewards, strict=True):
                    data.append(make_policy_datum(prompt, answer, list(sequence.logprobs or ()), 2 * reward - 1))
            passed = model.forward_backward(data, "importance_sampling")
            stepped = model.optim_step(types.AdamParams(learning_rate=1e-2))
            passed.result()
            stepped.result()
    deadline = time.monotonic() + 60
    while True:  # the engine records training about once a second
        listed = alice.http.get("dashboard/groups", params={"run": model.model_id}).raise_for_status().json()
        if len(listed["steps"]) == STEPS:
            break
        assert time.monotonic() < deadline, listed["steps"]
        time.sleep(0.2)
    return TrainedRun(model.model_id, rewards_of)


def make_policy_datum(prompt: list[int], answer: list[int], logprobs: list[float], advantage: float) -> types.Datum:
    tokens = [*prompt, *answer]
    before = np.zeros(len(prompt) - 1, np.float32)
    inputs = {
        "target_tokens": np.array(tokens[1:]),
        "logprobs": np.concatenate([before, np.array(logprobs, np.float32)]),
        "advantages": np.concatenate([before, np.full(len(answer), advantage, np.float32)]),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def open_samples(browser: Browser, run: TrainedRun, query: str = "") -> None:
    browser.open(f"runs/{run.model_id}/samples{query}", "Samples of ")
    browser.until(lambda: browser.all("table.groups tbody tr"), "the groups")


LINES = "table.groups > tbody > tr"


def read_line(row: WebElement) -> list[str]:
    """The question, the steps of the weights, and the numbers of the answers and rewards of a line."""
    labels = ("After step", "Answers", "Reward", "Min", "Max")
    cells = [row.find_element(By.CSS_SELECTOR, f"td[data-label='{label}']").text for label in labels]
    return [row.find_element(By.CSS_SELECTOR, ".opener").text, *cells]


def read_questions(browser: Browser) -> list[str]:
    return browser.texts(".opener")


def test_a_runs_page_leads_to_its_samples_by_prompt(rl_run: TrainedRun, browser: Browser) -> None:
    browser.open(f"runs/{rl_run.model_id}", "Run ")
    browser.click(".tabs a", "Samples")
    browser.until(lambda: len(browser.all(".opener")) == STEPS * len(QUESTIONS), "a line for each prompt and step")
    assert browser.text(".tabs a[aria-current]") == "Samples"
    questions = read_questions(browser)
    assert set(questions) == set(QUESTIONS), "without the template that all prompts share"
    rows = browser.read(lambda: [read_line(row) for row in browser.all(LINES)])
    lines = {(row[0], int(row[1])): [float(value) for value in row[2:]] for row in rows}
    assert lines == {
        group: [ANSWERS, sum(rewards) / ANSWERS, min(rewards), max(rewards)]
        for group, rewards in rl_run.rewards.items()
    }
    for words in ("KL OF SAMPLING AND TRAINING (K3)", "EFFECTIVE SAMPLE SIZE"):
        assert words in browser.text("main .facts").upper()
    browser.click(".by-step summary")
    steps = [row.split()[:2] for row in browser.texts(".by-step tbody tr")]
    assert steps == [[str(step), str(ANSWERS * len(QUESTIONS))] for step in range(1, STEPS + 1)]


def test_a_group_opens_to_its_answers_and_stays_open(rl_run: TrainedRun, browser: Browser) -> None:
    open_samples(browser, rl_run, "?sort=step&order=asc")
    browser.type(".opener", Keys.ENTER)
    browser.until(lambda: browser.all("tr.opened tbody tr"), "the answers")
    assert len(browser.all("tr.opened tbody tr")) == ANSWERS, "one group, although each was asked for alone"
    assert browser.driver.switch_to.active_element.get_attribute("aria-expanded") == "true", "the focus stays"
    assert set(browser.texts("tr.opened td[data-label=Advantage]")) <= {"-1.000", "+1.000"}
    assert set(browser.texts("tr.opened td[data-label='Trained in']")) == {"step 1"}
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    browser.until(lambda: not browser.all("tr.opened"), "the end")


def test_samples_are_searched_filtered_and_sorted_by_the_address(rl_run: TrainedRun, browser: Browser) -> None:
    open_samples(browser, rl_run)
    assert not browser.all("#by-run"), "the run is chosen"
    browser.type("#search", "SKY")
    browser.until(lambda: read_questions(browser) == [QUESTIONS[2]] * STEPS, "those with the word")
    browser.type("#by-step", "2")
    browser.until(lambda: len(browser.all(".opener")) == 1, "those of a step")
    assert "text=SKY" in browser.driver.current_url and "step=2" in browser.driver.current_url
    browser.driver.refresh()
    browser.until(lambda: read_questions(browser) == [QUESTIONS[2]], "the same by the address")
    browser.open(f"runs/{rl_run.model_id}/samples?least=2", "Samples of ")
    browser.until(lambda: "No stored response matches" in browser.text("main"), "none with such a reward")
    open_samples(browser, rl_run, "?sort=step&order=asc")
    cells = "table.groups td[data-label='Trained in']"
    assert browser.texts(cells) == [f"step {step}" for step in (1, 1, 1, 2, 2, 2, 3, 3, 3)]
    Select(browser.one("#sort")).select_by_value("divergence")
    browser.until(lambda: "sort=divergence" in browser.driver.current_url, "the address")


def test_filters_that_change_together_count_and_a_wrong_one_is_refused_beside_them(
    rl_run: TrainedRun, browser: Browser
) -> None:
    open_samples(browser, rl_run)

    def fill_in(**filters: str) -> None:
        fill = (
            "for (const [name, value] of Object.entries(arguments[0])) {"
            "const input = document.getElementById(`by-${name}`); input.value = value;"
            "input.dispatchEvent(new Event('input')); }"
        )
        browser.driver.execute_script(fill, filters)

    fill_in(step="2", least="-1")
    browser.until(lambda: len(browser.all(".opener")) == len(QUESTIONS), "those of the step")
    assert "step=2" in browser.driver.current_url and "least=-1" in browser.driver.current_url
    fill_in(step="-3")
    browser.until(lambda: "step" in browser.text("main .warning"), "the reason")
    assert browser.text("#news") == ""
    fill_in(step="")
    browser.until(lambda: len(browser.all(".opener")) == STEPS * len(QUESTIONS), "all steps")
    assert not browser.is_displayed("main .warning")
    complaints = browser.complaints()
    assert complaints and all(" 400 " in complaint for complaint in complaints), complaints


def test_an_address_with_a_wrong_order_page_or_id_says_so(rl_run: TrainedRun, browser: Browser) -> None:
    browser.driver.get("about:blank")
    browser.open("samples?sort=bogus&order=sideways", "Samples")
    browser.until(lambda: browser.all(".opener"), "the samples")
    assert "bogus" not in browser.driver.current_url and "sideways" not in browser.driver.current_url
    browser.driver.get("about:blank")
    browser.open("samples?offset=1000", "Samples")
    browser.until(lambda: "There is no such page" in browser.text("main"), "what is wrong")
    assert "No samples yet" not in browser.text("main")
    browser.click("button", "Go to the last page")
    browser.until(lambda: browser.all(".opener"), "the last page")
    assert "offset=1000" not in browser.driver.current_url
    browser.open("samples/zzz", "No such sample")
    assert "No sample has the id zzz" in browser.text("main") and browser.all("main a[href='#/samples']")
    assert all("404" in complaint for complaint in browser.complaints())


def test_a_prompt_is_followed_over_the_steps_with_the_keyboard(rl_run: TrainedRun, browser: Browser) -> None:
    open_samples(browser, rl_run, "?sort=step&order=desc&text=30")
    browser.click(".opener")
    browser.click("tr.opened a", "This prompt over steps")
    browser.until(lambda: len(browser.all(".turn.sampled")) == ANSWERS, "the answers")
    label = "main > p[aria-live]"
    assert browser.text(label).startswith("3 of 3: after 2 steps, trained on in step 3"), browser.text(label)
    rewards = rl_run.rewards["What is 30 - 4?", 2]
    assert f"({min(rewards):g} to {max(rewards):g})" in browser.text(label)
    assert browser.text(".question-text") == "What is 30 - 4?"
    browser.click(".whole-prompt summary")
    browser.until(lambda: "assistant" in browser.text(".whole-prompt"), "the whole prompt")
    first_answers = browser.texts(".turn.sampled .tokens")
    slider = browser.one("#at-step")
    slider.send_keys(Keys.ARROW_LEFT)
    browser.until(lambda: browser.text(label).startswith("2 of 3: after 1 step, "), "the step before")
    assert "after 1 step" in (slider.get_attribute("aria-valuetext") or "")
    browser.until(lambda: "step 2" in browser.text(".turn.sampled .about"), "its answers")
    assert browser.texts(".turn.sampled .tokens") != first_answers
    address = browser.driver.current_url
    assert "at=" in address
    browser.driver.refresh()
    browser.until(lambda: browser.text(label).startswith("2 of 3"), "the same step by the address")
    browser.click(".stepper button", "Earlier")
    browser.until(lambda: browser.text(label).startswith("1 of 3: after 0 steps"), "the first step")
    assert not browser.is_enabled(".stepper button")
    assert len(browser.all("svg.rewards .mean")) == STEPS


BOUNDS = {
    "advantage": [-1, -0.3, -1e-9, 1e-9, 0.3, 1],
    "ratio": [0.5, 0.8, 0.95, 1.05, 1.25, 2],
    "gap": [-0.5, -0.1, -0.02, 0.02, 0.1, 0.5],
}
"""The bounds of each colouring's bands."""


def list_bands(sequence: Mapping[str, Sequence[float]], kind: str) -> list[str]:
    """The class of each token of an answer: the letter of the colouring and how many bounds its value reaches."""
    gaps = np.subtract(sequence["training_logprobs"], sequence["logprobs"])
    values = {"advantage": sequence["advantages"], "ratio": np.exp(gaps), "gap": gaps}[kind]
    return [f"{kind[0]}{sum(value >= bound for bound in BOUNDS[kind])}" for value in values]


def test_tokens_are_coloured_by_advantage_ratio_and_gap(alice: Site, rl_run: TrainedRun, browser: Browser) -> None:
    open_samples(browser, rl_run)
    browser.click(".opener")
    browser.click("tr.opened a", "This prompt over steps")
    browser.until(lambda: browser.all("#colour-ratio"), "the colours")
    turns = browser.all(".turn.sampled")
    assert len(turns) == ANSWERS
    for kind in BOUNDS:
        browser.click(f"label[for=colour-{kind}]")
        assert browser.attribute("#main", "data-colour") == kind
        for turn in turns:
            request_id = turn.find_element(By.CSS_SELECTOR, "a[href*='/samples/'][title]:last-of-type").get_attribute(
                "title"
            )
            (sequence,) = alice.http.get(f"dashboard/samples/{request_id}").raise_for_status().json()["sequences"]
            tokens = turn.find_elements(By.CSS_SELECTOR, ".token")
            classes = [(token.get_attribute("class") or "").split() for token in tokens]
            assert len(classes) == len(sequence["tokens"])
            for band, names in zip(list_bands(sequence, kind), classes, strict=True):
                assert band in names, (kind, band, names)
    assert "colour=gap" in browser.driver.current_url
    assert ", ratio " in (browser.attribute(".turn.sampled .token", "title") or "")


def test_the_samples_of_a_run_are_downloaded(rl_run: TrainedRun, browser: Browser) -> None:
    open_samples(browser, rl_run)
    read = """
        const done = arguments[0];
        const create = URL.createObjectURL;
        URL.createObjectURL = (blob) => {
          URL.createObjectURL = create;
          blob.arrayBuffer().then((bytes) => done([...new Uint8Array(bytes)]));
          return create(new Blob([]));
        };
        document.querySelector('button[aria-label$="as %s"]').click();
    """
    lines = bytes(browser.driver.execute_async_script(read % "JSON lines")).decode().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == STEPS * ANSWERS * len(QUESTIONS)
    assert {row["weights_step"] for row in rows} == {0, 1, 2} and {row["step"] for row in rows} == {1, 2, 3}
    assert all(len(row["training_logprobs"]) == len(row["answer_tokens"]) == len(row["advantages"]) for row in rows)
    assert bytes(browser.driver.execute_async_script(read % "Parquet"))[:4] == b"PAR1"


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
def test_the_pages_fit_wide_and_narrow_screens_in_both_themes(
    rl_run: TrainedRun, browser: Browser, width: int, height: int
) -> None:
    emulated = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", emulated)
    try:
        open_samples(browser, rl_run)
        browser.click(".opener")
        browser.until(lambda: browser.all("tr.opened tbody tr"), "the answers")
        browser.click(".by-step summary")
        check_fit(browser)
        browser.click("tr.opened a", "This prompt over steps")
        browser.until(lambda: browser.all(".turn.sampled .token"), "the tokens")
        check_fit(browser)
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.driver.execute_script("tinsmithTheme.set('system')")


def check_fit(browser: Browser) -> None:
    wide = "return document.documentElement.scrollWidth - innerWidth"
    assert browser.driver.execute_script(wide) <= 0
    for theme in ("light", "dark"):
        browser.driver.execute_script("tinsmithTheme.set(arguments[0])", theme)
        violations = Axe().run(browser.driver)["violations"]
        assert not [(one["id"], [node["html"][:200] for node in one["nodes"]][:5]) for one in violations], theme
