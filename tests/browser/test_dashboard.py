"""The dashboard in headless Chromium, on a live server with keys and real data: every page, its actions, and its
accessibility to screen readers and the keyboard. All tests share one browser and one server; each opens the page that
it checks.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from decimal import Decimal

import httpx
import pytest
import sqlalchemy as sa
from axe_core_python.selenium import Axe
from selenium.webdriver.common.keys import Keys

from support.browser import Browser
from support.dashboard_data import BASE, STRANGE_NAME, Site
from support.databases import database_url
from tinsmith.db.factory import open_database
from tinsmith.db.schema import MODELS, RECENT_STEPS
from tinsmith.runtime.sizes import format_bytes
from tinsmith.store.recent_steps import RecentStep, RecentSteps

PAGES = {
    "overview": "Overview",
    "runs": "Runs",
    "sessions": "Sessions",
    "queue": "Queue and packing",
    "machine": "Machine",
    "checkpoints": "Checkpoints",
    "playground": "Playground",
    "samples": "Samples",
    "jobs": "Bulk jobs",
    "account": "Keys and usage",
}


def details_of(alice: Site) -> dict[str, str]:
    """The detail pages, and how their headings begin."""
    session_id = alice.run.partition(":")[0]
    return {
        f"sessions/{session_id}": "Session ",
        f"runs/{alice.run}": "Run ",
        f"runs/compare/{alice.run}/{alice.strange_run}": "Comparison of 2 runs",
        f"samples/{alice.sample}": "Sample ",
        f"jobs/{alice.job_id}": "Job ",
    }


def rows(browser: Browser) -> list[str]:
    return [row.text for row in browser.all("tbody tr")]


# The key.


def test_a_key_is_asked_for_once_and_kept_in_the_tab_only(alice: Site, chromium: Browser) -> None:
    browser = chromium
    browser.driver.get(alice.server.url)
    browser.driver.execute_script("sessionStorage.clear()")
    browser.driver.get("about:blank")
    browser.open("runs", "Sign in")
    assert browser.driver.switch_to.active_element.get_attribute("id") == "key"
    browser.one("#key").send_keys("tml-wrong", Keys.ENTER)
    browser.until(lambda: "rejected the key" in browser.text("main"), "a refusal")
    browser.one("#key").send_keys(alice.key, Keys.ENTER)
    browser.until(lambda: browser.text("h1") == "Runs", "the page that was asked for")
    assert browser.text("#tenant") == "alice"
    browser.driver.refresh()
    browser.until(lambda: browser.text("h1") == "Runs", "the same without a question")
    stored_state = browser.driver.execute_script("return [document.cookie, JSON.stringify(localStorage)]")
    assert stored_state[0] == "" and alice.key not in stored_state[1]
    browser.click("#sign-out")
    browser.until(lambda: browser.text("h1") == "Sign in", "the question")
    assert browser.driver.execute_script("return sessionStorage.getItem('tinsmith.key')") is None
    assert all("401" in complaint for complaint in browser.complaints())


def test_tabs_share_a_key_while_one_of_them_is_open(alice: Site, browser: Browser) -> None:
    driver, first = browser.driver, browser.driver.current_window_handle
    browser.open("runs", "Runs")
    driver.switch_to.new_window("tab")
    second = driver.current_window_handle
    try:
        browser.open(f"runs/{alice.run}", "Run ")
        assert not browser.all("#key"), "a link in another tab asks for nothing"
        browser.click("#sign-out")
        browser.until(lambda: browser.text("h1") == "Sign in", "the question")
        driver.switch_to.window(first)
        browser.until(lambda: browser.text("h1") == "Sign in", "the end of both")
        driver.switch_to.window(second)
        driver.refresh()
        browser.until(lambda: browser.text("h1") == "Sign in", "no tab has the key")
    finally:
        driver.close()
        driver.switch_to.window(first)
    driver.execute_script("sessionStorage.setItem('tinsmith.key', arguments[0])", alice.key)
    assert all("401" in complaint for complaint in browser.complaints())


# Every page.


@pytest.mark.parametrize("name", [*PAGES, "runs/", "runs/compare/", "sessions/", "samples/", "jobs/"])
def test_a_page_is_usable_by_everybody_in_both_themes(alice: Site, browser: Browser, name: str) -> None:
    page, heading = name, PAGES.get(name, "")
    if not heading:
        page, heading = next((p, h) for p, h in details_of(alice).items() if p.startswith(name))
    browser.open(page, heading)
    browser.until(lambda: browser.all("main table, main form, main figure, main .tokens"), "content")
    for theme, options in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
        browser.driver.execute_script("tinsmithTheme.set(arguments[0])", theme)
        violations = Axe().run(browser.driver, options=options)["violations"]
        assert not [
            (violation["id"], [node["html"][:200] for node in violation["nodes"]][:5]) for violation in violations
        ], theme
    browser.driver.execute_script("tinsmithTheme.set('system')")
    assert len(browser.all("h1")) == 1 and browser.all("main")
    assert browser.driver.title.endswith("- Tinsmith")


def test_the_theme_is_kept_and_follows_the_system_otherwise(browser: Browser) -> None:
    def background_color() -> str:
        return browser.driver.execute_script("return getComputedStyle(document.body).backgroundColor")

    browser.open("overview", "Overview")
    light = background_color()
    browser.click("#theme", "system")
    browser.click("#theme", "light")
    dark = background_color()
    assert dark != light
    browser.driver.refresh()
    browser.until(lambda: browser.text("#theme") == "Theme: dark", "the theme")
    assert background_color() == dark
    browser.click("#theme", "dark")
    emulated = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", emulated)
    assert background_color() == dark
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert background_color() == light


def test_everything_is_reached_with_the_keyboard(browser: Browser) -> None:
    browser.open("overview", "Overview")
    browser.until(lambda: browser.all("main table"), "the tables")
    browser.driver.execute_script("document.activeElement.blur()")
    focused_texts: list[str] = []
    for _ in range(12):
        browser.driver.switch_to.active_element.send_keys(Keys.TAB)
        focused_texts.append(browser.driver.switch_to.active_element.text)
    assert focused_texts[0] == "Skip to content"
    assert focused_texts[1 : len(PAGES) + 1] == [*list(PAGES.values())[:3], "Queue", *list(PAGES.values())[4:]]
    links = browser.all("nav#nav a")
    links[1].send_keys(Keys.ENTER)
    browser.until(lambda: browser.text("h1") == "Runs", "the page")
    # The heading appears before the content; it has the focus once both are shown.
    browser.until(lambda: browser.driver.switch_to.active_element.text == "Runs", "focus at the new page's heading")
    assert browser.one("nav#nav a[aria-current=page]").text == "Runs"


def test_keys_lead_to_pages_and_to_the_search(browser: Browser) -> None:
    browser.open("overview", "Overview")
    body = browser.one("body")
    body.send_keys("g", "r")
    browser.until(lambda: browser.text("h1") == "Runs" and browser.all("#search"), "the runs")
    browser.one("h1").send_keys("/")
    browser.one("#search").send_keys("gs/?")
    assert browser.one("#search").get_attribute("value") == "gs/?", "a field keeps its keys"
    browser.driver.execute_script("document.activeElement.blur()")
    browser.one("body").send_keys("?")
    browser.until(lambda: "Search on this page" in browser.text("dialog"), "the list of keys")
    browser.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    browser.until(lambda: not browser.all("dialog"), "its end")


def test_a_key_that_ends_says_so(alice: Site, browser: Browser) -> None:
    browser.open("overview", "Overview")
    browser.until(lambda: browser.all(".cards .card"), "the page")
    browser.driver.execute_script("sessionStorage.setItem('tinsmith.key', 'tml-revoked')")
    browser.driver.execute_script("location.hash = '#/runs'")
    browser.until(lambda: browser.text("h1") == "The key is no longer valid", "the question")
    assert "expired or been revoked" in browser.text("main .warning") and not browser.one("#strip").is_displayed()
    browser.one("#key").send_keys(alice.key, Keys.ENTER)
    browser.until(lambda: browser.text("h1") == "Runs", "the page")
    assert all("401" in complaint for complaint in browser.complaints())


def test_a_server_without_runs_shows_how_the_first_is_made(browser: Browser) -> None:
    canned_answers = {
        "/me": {"name": "a", "key_id": 1},
        "/overview": {"counts": {"runs": 0}, "engines": [], "seats": []},
    }
    canned_answers |= {"/runs": {"runs": []}, "/events": {"data": []}, "/machine": {}}
    script = {"source": GIVEN % json.dumps(canned_answers)}
    added = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", script)["identifier"]
    try:
        browser.driver.get("about:blank")
        browser.open("overview", "Overview")
        browser.until(lambda: "export TINKER_BASE_URL=http://127.0.0.1" in browser.text("main"), "the lines")
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", {"identifier": added})


def test_a_narrow_screen_has_a_menu_and_cards_and_no_barriers(browser: Browser) -> None:
    emulated = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", emulated)
    try:
        browser.open("checkpoints", "Checkpoints")
        browser.until(lambda: rows(browser), "the checkpoints")
        assert not browser.one("#nav").is_displayed()
        assert not Axe().run(browser.driver)["violations"]
        browser.click("#menu")
        assert browser.one("#nav").is_displayed()
        browser.one("#menu").send_keys(Keys.ESCAPE)
        assert not browser.one("#nav").is_displayed()
        browser.click("#menu")
        browser.click("nav#nav a", "Runs")
        browser.until(lambda: browser.text("h1") == "Runs", "the page")
        assert not browser.one("#nav").is_displayed()
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


# Missing objects and values.

MISSING = r"\b(null|undefined|NaN|Infinity|Invalid Date)\b|\[object "
# Answers of another version of the server: each number is replaced, or each optional value left out.
SPOILED = """
const changed = {
  "null": (value) => (typeof value === "number" ? null : value),
  "missing": (value) => (typeof value === "number" || value === null || value === "" ? undefined : value),
  "empty": (value) => (Array.isArray(value) ? [] : value),
}["%s"];
// A row is a tenant's own: its null is shown as it is.
const kept = new Set(
  ["row", "job_id", "key_id", "kept", "cursor", "limit", "offset", "total_count", "step_token_budget"],
);
const spoil = (value) => {
  if (Array.isArray(value)) return value.map(spoil);
  if (value === null || typeof value !== "object") return value;
  const spoiled = ([name, one]) => [name, kept.has(name) ? one : changed(spoil(one))];
  return Object.fromEntries(Object.entries(value).map(spoiled));
};
const asked = window.fetch;
window.answers = { due: 0, had: 0 };
window.fetch = async (...given) => {
  window.answers.due += 1;
  const answer = await asked(...given);
  const content = await answer.json();
  setTimeout(() => (window.answers.had += 1), 50);
  return { ok: answer.ok, status: answer.status, json: async () => (answer.ok ? spoil(content) : content) };
};
"""
# A page's text and its accessible names.
SAID = """
const words = [...document.querySelectorAll("body *")].flatMap((one) => [
  ...[...one.childNodes].filter((child) => child.nodeType === Node.TEXT_NODE).map((child) => child.textContent),
  ...["title", "aria-label", "placeholder", "alt"].map((name) => one.getAttribute(name) || ""),
]);
return words.filter((text) => new RegExp(arguments[0]).test(text));
"""


def said_of_nothing(browser: Browser) -> list[str]:
    return list(browser.driver.execute_script(SAID, MISSING))


def test_the_question_for_a_key_has_no_word_that_is_not_meant(alice: Site, browser: Browser) -> None:
    browser.driver.get(alice.server.url)
    browser.driver.execute_script("sessionStorage.clear()")
    browser.driver.get("about:blank")
    browser.open("runs", "Sign in")
    assert [element.text for element in browser.all("main > *")][1].startswith("API key")
    assert said_of_nothing(browser) == []
    assert all("401" in complaint for complaint in browser.complaints())


@pytest.mark.parametrize("how", ["null", "missing", "empty"])
def test_missing_values_are_shown_as_a_dash(alice: Site, browser: Browser, how: str) -> None:
    script = {"source": SPOILED % how}
    added = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", script)["identifier"]
    try:
        for page, heading in {**PAGES, **details_of(alice)}.items():
            browser.driver.get("about:blank")
            browser.open(page)
            drawn = "return answers.had > 1 && answers.had === answers.due"
            browser.until(lambda drawn=drawn: browser.driver.execute_script(drawn), f"the content of {page}")
            if not (page == "playground" and how == "empty"):  # it says that there is no model
                assert browser.text("h1").startswith(heading), f"{page}: {browser.text('main')[:500]}"
            assert said_of_nothing(browser) == [], page
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", {"identifier": added})


# Charts.


def numbers_of_all_kinds() -> list[list[float]]:
    """Values of curves, in the hundreds of thousands and near 1e-300, equal, nearly equal, missing, not finite."""
    rng = random.Random(0)
    noise = [1.0, 1.0000001, 0.9999999, 1.0000002]
    series = [
        [],
        [0.0],
        [-0.0, 0.0],
        [3.0],
        [-3.0],
        [1.0] * 9,
        noise,
        [-noise_value for noise_value in noise],
        [math.nan],
        [math.inf],
    ]
    series += [[math.nan, 1.0, math.inf, -math.inf, 2.0], [1e308, -1e308], [1e308], [5e-324], [5e-324, 0.0], [0, 1e300]]
    series += [[0.1 + 0.2, 0.3], [1e15, 1e15 + 1], [2e9, 2e9 + 7], [-5.0, -4.0], [0.0, 1.0], [0.001] * 3, [1e-4, 2e-4]]
    for _ in range(300):
        size, width = 10.0 ** rng.randint(-300, 300), 10.0 ** rng.randint(-18, 2)
        middle = rng.choice((0.0, -1.0, 1.0)) * size
        series.append([middle + size * width * rng.uniform(-1, 1) for _ in range(rng.randint(1, 8))])
    return series


def modules(browser: Browser, names: str, body: str, *arguments: object) -> object:
    """Return the result of a function of the dashboard's modules; `done` receives it."""
    loads = ", ".join(f'import("/dashboard/{name}.js")' for name in names.split())
    head = f"const done = arguments[arguments.length - 1]; Promise.all([{loads}]).then(([{names.replace(' ', ', ')}])"
    script = head + " => {" + body + "}).catch((error) => done(String(error.stack)))"
    return browser.driver.execute_async_script(script, *arguments)


def test_an_axis_has_a_range_and_round_numbers_for_any_values(browser: Browser) -> None:
    browser.open("overview", "Overview")
    series = numbers_of_all_kinds()
    body = """
    done(arguments[0].map((texts) => {
      const exponent = scale.exponentOf(texts.map(Number));
      const values = scale.scaled(texts.map(Number), exponent);
      const found = values.filter((value) => value !== null);
      const range = scale.valueRange(...(found.length ? [Math.min(...found), Math.max(...found)] : [null, null]));
      const ticks = scale.ticksOf(...range, 5);
      return { exponent, values, range, ticks, labels: scale.labelsOf(ticks, exponent) };
    }))"""
    axes = modules(browser, "scale", body, [[repr(text) for text in row] for row in _to_literals(series)])
    assert isinstance(axes, list), axes
    for series_values, axis in zip(series, axes, strict=True):
        (low, high), ticks, labels = axis["range"], axis["ticks"], axis["labels"]
        finite = [value for value in axis["values"] if value is not None]
        assert len(finite) == sum(map(math.isfinite, series_values)), series_values
        assert math.isfinite(low) and low < high, series_values
        assert all(low <= value <= high for value in finite), series_values
        assert 2 <= len(ticks) <= 6 and all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks), series_values
        assert all(after > before for before, after in itertools.pairwise(ticks)), series_values
        assert len(set(labels)) == len(labels), (series_values, labels)
        step = Decimal(ticks[1]) - Decimal(ticks[0])
        for tick, label in zip(ticks, labels, strict=True):
            read = Decimal(label.replace(",", "")).scaleb(-axis["exponent"])
            assert abs(read - Decimal(tick)) < step / 100, (series_values, labels)


def _to_literals(series: list[list[float]]) -> list[list[object]]:
    """JavaScript literals of numbers, including infinities and NaN, which JSON lacks."""

    class Spelled(float):
        def __repr__(self) -> str:
            name = {math.inf: "Infinity", -math.inf: "-Infinity"}.get(float(self), float.__repr__(self))
            return "NaN" if math.isnan(self) else name

    return [[Spelled(value) for value in row] for row in series]


def test_steps_have_whole_numbers_wherever_a_run_begins(browser: Browser) -> None:
    browser.open("overview", "Overview")
    ends = [[0, 0], [7, 7], [1, 2], [0, 9], [3, 1000], [2**53 - 1, 2**53 - 1], [0, 2**53 - 1], [1795350324, 1795350400]]
    body = """
    const ranges = arguments[0].map((ends) => scale.stepRange(...ends));
    done(ranges.map((range) => [range, scale.ticksOf(...range, 8, true)]))"""
    axes = modules(browser, "scale", body, ends)
    assert isinstance(axes, list), axes
    for (first, last), ((low, high), ticks) in zip(ends, axes, strict=True):
        assert low <= first <= last <= high and low < high
        assert 1 <= len(ticks) <= 9 and all(float(tick).is_integer() for tick in ticks)
        assert ticks == sorted(set(ticks))


def test_curves_of_any_values_are_drawn(browser: Browser) -> None:
    browser.open("overview", "Overview")
    series = [[0.0], *numbers_of_all_kinds()[:40]]
    body = """
    const signal = new AbortController().signal;
    const main = document.getElementById("main");
    done(arguments[0].map((texts) => {
      const values = texts.map(Number).map((value) => (Number.isFinite(value) ? value : null));
      const made = charts.curve("a curve", "", signal);
      main.append(made.figure);
      made.update(values.map((_, index) => index + 1), values);
      made.update(values.map((_, index) => index + 1), values);
      const canvas = made.figure.querySelector("canvas");
      const pixels = canvas?.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      const drawn = pixels ? pixels.some((part, index) => index % 4 === 3 && part > 0) : made.figure.textContent;
      made.figure.remove();
      return drawn;
    }))"""
    drawn = modules(browser, "charts", body, [[repr(text) for text in row] for row in _to_literals(series)])
    assert isinstance(drawn, list), drawn
    assert [(curve, outcome) for curve, outcome in zip(series, drawn, strict=True) if outcome is not True] == []


def test_equal_values_have_a_curve_and_bars_of_strange_sizes_are_drawn(alice: Site, browser: Browser) -> None:
    noise = [1.0, 1.0000001192092896, 0.9999998807907104]
    for step, value in enumerate(noise, 1):
        body = {"model_id": alice.strange_run, "step": step, "metrics": {"ratio": value, "share": 0.0}}
        alice.http.post("log_metrics", json=body).raise_for_status()
    browser.open(f"runs/{alice.strange_run}", "Run ")
    browser.until(lambda: len(browser.all("figure.curve canvas")) == 2, "both curves")
    assert browser.all("main .warning") == []
    body = """
    const kinds = [{ name: "one", style: "s1" }, { name: "none", style: "s2" }];
    const bars = [null, NaN, -4, 0, 5].map((part) => ({ label: "at", parts: [part, 0] }));
    const figure = charts.stacked("bars", kinds, bars);
    done([figure.textContent, [...figure.querySelectorAll("rect.s1")].map((rect) => rect.getAttribute("height"))])"""
    text, heights = modules(browser, "charts", body)  # type: ignore[misc]
    assert heights == ["0", "0", "0", "0", "100"]
    assert "none" not in text, "a kind that no bar has"


def test_a_chart_that_fails_fails_alone(alice: Site, browser: Browser) -> None:
    browser.open("overview", "Overview")
    browser.until(lambda: browser.all(".cards .card"), "the page")
    browser.driver.execute_script("""
    const real = window.uPlot;
    let made = 0;
    window.uPlot = function (options, ...rest) {
      made += 1;
      if (made === 2) options.axes[1].splits = () => new Array(-1);
      if (made === 4) throw new Error("no room");
      return new real(options, ...rest);
    };
    """)
    browser.driver.execute_script("location.hash = arguments[0]", f"#/runs/{alice.run}")
    browser.until(lambda: len(browser.all("figure.curve")) > 5, "the curves")
    warnings = browser.until(lambda: [element.text for element in browser.all("figure.curve .warning")], "what failed")
    reasons = ["This chart cannot be drawn: Invalid array length", "This chart cannot be drawn: no room"]
    assert warnings == reasons
    assert len(browser.all("figure.curve canvas")) == len(browser.all("figure.curve")) - 2
    browser.until(lambda: browser.all("section tbody tr"), "the checkpoints")
    assert browser.text("h1").startswith("Run ")


def test_numbers_are_written_as_they_are_read(browser: Browser) -> None:
    browser.open("overview", "Overview")
    written = {
        "count": {0: "0", 1234: "1,234"},
        "number": {0: "0", 0.5: "0.5000", 2296.7: "2,296.7", 12345678: "12,345,678", 1e-7: "1.00e-7", 2e12: "2.00e12"},
        "percent": {0: "0 %", 1: "100 %", 0.0001: "under 0.1 %", 0.9999: "over 99.9 %", 0.5: "50 %", 0.025: "2.5 %"},
        "seconds": {0: "0 ms", 0.0001: "under 1 ms", 0.9996: "1.0 s", 45: "45 s", 90: "2 min", 7200: "2 h"},
        "bytes": {size: format_bytes(size) for size in (0, 1023, 1024, 1048575, 131 * 2**30 + 2**29, 2**52)},
    }
    calls = [[name, value, text] for name, texts in written.items() for value, text in texts.items()]
    body = """
    const written = arguments[0].map(([name, value, text]) => [name, value, text, format[name](value)]);
    const wrong = written.filter(([, , text, got]) => text !== got);
    const unknown = [null, undefined, NaN, Infinity, -Infinity];
    const dashes = arguments[1]
      .flatMap((name) => unknown.map((value) => [name, String(value), format[name](value)]))
      .filter(([, , got]) => got !== "-");
    const plurals = [format.counted(1, "token"), format.counted(0, "token"), format.counted(2, "batch", "batches")];
    done([wrong, dashes, plurals, format.number(-0)])"""
    plurals = ["1 token", "0 tokens", "2 batches"]
    names = ["count", "short", "some", "number", "percent", "seconds", "bytes", "ago", "when", "clock", "shortId"]
    assert modules(browser, "format", body, calls, names) == [[], [], plurals, "0"]


# Runs.


def test_curves_grow_on_an_open_page(alice: Site, browser: Browser) -> None:
    browser.open(f"runs/{alice.run}", "Run ")

    def latest(title: str) -> str:
        for figure in browser.all("figure.curve"):
            if figure.find_element("css selector", ".name").text == title:
                return figure.find_element("css selector", ".latest").text
        return ""

    steps = alice.steps
    for title in ("reward", "Loss per token", "Gradient norm", "Learning rate", "Tokens per second"):
        browser.until(lambda title=title: latest(title).endswith(f"at step {steps}"), title)
    before = latest("Loss per token")
    alice.train(2)
    browser.until(lambda: latest("Loss per token").endswith(f"at step {steps + 2}"), "the new step")
    browser.until(lambda: latest("reward").endswith(f"at step {steps + 2}"), "the new reward")
    assert latest("Loss per token") != before
    figure = browser.one("figure.curve")
    assert "values up to step" in (figure.find_element("css selector", "[role=img]").get_attribute("aria-label") or "")
    figure.find_element("css selector", "summary").click()
    browser.until(lambda: len(figure.find_elements("css selector", "tbody tr")) == steps + 2, "the numbers")


def test_a_band_smoothing_a_log_scale_and_files_of_the_curves(alice: Site, browser: Browser) -> None:
    points = [{"step": step, "metrics": {"spread": [0.0, float(step), 9.0]}} for step in range(1, 21)]
    alice.http.post("log_metrics", json={"model_id": alice.strange_run, "points": points}).raise_for_status()
    browser.open(f"runs/{alice.strange_run}", "Run ")
    names_script = "[...document.querySelectorAll('figure.curve .name')].map((one) => one.textContent)"
    browser.until(lambda: "spread" in browser.driver.execute_script(f"return {names_script}"), "the curve")
    assert not [name for name in browser.driver.execute_script(f"return {names_script}") if ":p" in name], "in its band"
    for selector in ("#log", "#time"):
        browser.one(selector).click()
        browser.until(lambda: browser.all("figure.curve canvas") and not browser.all("main .warning"), "the curves")
        browser.one(selector).click()
    browser.driver.execute_script(
        "const smooth = document.getElementById('smooth'); smooth.value = 0.9; smooth.dispatchEvent(new Event('input'))"
    )
    body = """
    const even = metrics.csvOf([
      { step: 1, source: "client", time: 0, metrics: { "a,b": 1, c: null } },
      { step: 1, source: "server", time: 2, metrics: { c: 3 } },
    ]);
    const hints = [["ppo_kl:mean"], ["ppo_kl:mean", "reward"], ["loss_per_token"]].map((names) =>
      metrics.rewardless(names.map((name) => ({ name }))));
    done([charts.smoothed([1, 1, null, 1], 0.9), charts.smoothed([0, 1], 0.5), even, hints])"""
    flat, half, text, hints = modules(browser, "charts metrics", body)  # type: ignore[misc]
    assert flat[2] is None and [share for share in flat if share] == pytest.approx([1, 1, 1])
    assert half == pytest.approx([0, 2 / 3])
    assert hints == [True, False, False], "only a run that learns from advantages is asked for its reward"
    assert text == 'step,time,"a,b",c (client),c (server)\n1,1970-01-01T00:00:02.000Z,1,,3\n', "a row for each step"


def test_runs_are_named_and_stand_side_by_side(alice: Site, browser: Browser) -> None:
    browser.open(f"runs/{alice.run}", "Run ")
    browser.click("button", "Edit the name")
    browser.one("#name").send_keys("lesson")
    browser.one("#tags").send_keys("hello, short")
    browser.click("dialog button", "Save")
    browser.until(lambda: browser.text("h1") == "Run lesson", "the name")
    try:
        browser.open("runs", "Runs")
        browser.until(lambda: [row for row in rows(browser) if re.match(r"lesson\s*hello\s*short", row)], "the tags")
        browser.until(lambda: browser.all(".spark polyline"), "outlines")
        for box in browser.all("tbody input[type=checkbox]")[:2]:
            box.click()
        browser.click("button", "Compare 2 runs")
        browser.until(lambda: browser.text("h1") == "Comparison of 2 runs", "both")
        browser.until(lambda: "LoRA rank" in browser.text("table"), "what differs")
        browser.until(lambda: browser.all("figure.curve canvas"), "the curves")
        assert "lesson" in browser.text("figure.curve .legend") and not browser.all("main .warning")
    finally:
        alice.http.put(f"dashboard/runs/{alice.run}", json={"name": "", "tags": []}).raise_for_status()


def test_a_tenants_strings_are_shown_as_text(alice: Site, browser: Browser) -> None:
    browser.open("runs", "Runs")
    link = browser.until(
        lambda: [link_element for link_element in browser.all("tbody a") if link_element.text == STRANGE_NAME],
        "the name",
    )
    link[0].click()
    browser.until(lambda: STRANGE_NAME in browser.text("main dl"), "the name")
    assert browser.all("main img") == []


def test_a_thousand_runs_are_searched_sorted_and_paged(alice: Site, browser: Browser) -> None:
    data_dir = alice.server.data_dir
    database = open_database(database_url(data_dir) or f"sqlite:///{data_dir / 'tinsmith.db'}")
    with database.write() as connection:
        row = dict(connection.execute(sa.select(MODELS).where(MODELS.c.model_id == alice.run)).one()._mapping)
        row |= {"state": "unloaded", "reason": "made for a test"}
        run_rows = [
            row | {"model_id": f"many:train:{index}", "created_at": float(index), "lora_rank": 1 + index % 200}
            for index in range(1, 1001)
        ]
        connection.execute(MODELS.insert(), run_rows)
    try:
        browser.open("runs?columns=rank,status", "Runs")
        browser.until(lambda: "1 to 50 of 1,002" in browser.text(".pager"), "the first page")
        browser.click(".pager button", "Next")
        browser.until(lambda: "51 to 100 of 1,002" in browser.text(".pager"), "the second page")
        browser.click("button.sort", "Rank")
        browser.until(lambda: browser.one("th[aria-sort=descending]").text.startswith("Rank"), "the order")
        browser.until(lambda: "200" in rows(browser)[0], "the highest rank")
        assert "1 to 50" in browser.text(".pager")
        browser.click("button.sort", "Rank")
        browser.until(lambda: browser.one("th[aria-sort=ascending]").text.startswith("Rank"), "the other order")
        browser.one("#search").send_keys("many:train:777")
        browser.until(lambda: "1 to 1 of 1" in browser.text(".pager"), "the one run")
        assert browser.one("tbody a").get_attribute("title") == "many:train:777" and "finished" in rows(browser)[0]
    finally:
        with database.write() as connection:
            connection.execute(MODELS.delete().where(MODELS.c.model_id.startswith("many:")))
        database.close()


def test_a_session_leads_to_its_runs(alice: Site, browser: Browser) -> None:
    browser.open("sessions", "Sessions")
    browser.until(lambda: len(rows(browser)) >= 2 and STRANGE_NAME in browser.text("tbody"), "the sessions")
    browser.one("#search").send_keys("quotes img")
    browser.until(lambda: len(rows(browser)) == 1, "the one that has these words")
    browser.click("tbody a")
    browser.until(lambda: browser.text("h1").startswith("Session "), "the session")
    browser.until(lambda: [link for link in browser.all("tbody a") if link.text == STRANGE_NAME], "its run")
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "deny"})
    browser.click("button", "Download the timeline")
    browser.until(lambda: "The timeline is downloaded" in browser.text("#news"), "the news")
    browser.click("tbody a")
    browser.until(lambda: browser.text("h1").startswith("Run "), "the run")


# The other pages.


@pytest.mark.smoke
def test_the_overview_counts(alice: Site, browser: Browser) -> None:
    browser.open("overview", "Overview")
    browser.until(lambda: "2" in browser.text(".cards .card .value"), "the runs")
    browser.until(lambda: BASE in browser.text("main"), "the engine")
    browser.until(lambda: browser.all("svg.bars rect.s1"), "the tokens of the day")
    browser.click(".cards .card", "Checkpoints")
    browser.until(lambda: browser.text("h1") == "Checkpoints", "the page")


def test_the_queue_shows_packed_steps(browser: Browser) -> None:
    browser.open("queue", "Queue and packing")
    browser.until(lambda: "tokens on average" in browser.text("main"), "the sizes")
    assert browser.all("svg.bars rect.s1")
    assert "Optimizer steps" in browser.text("main")
    # The only active tenant sees no shares.
    for word in ("of them were yours", "Tenants", "Your tokens", "other tenants"):
        assert word not in browser.text("main")


def test_the_timeline_shows_snapshots_and_other_tenants_without_names(alice: Site, browser: Browser) -> None:
    data_dir, now = alice.server.data_dir, time.time()
    database = open_database(database_url(data_dir) or f"sqlite:///{data_dir / 'tinsmith.db'}")
    steps = RecentSteps(database)
    steps.add(BASE, [RecentStep(now - 9, 3.0, 0, 0, 0, 0, {"alice": {alice.run: 0}})])
    steps.add(BASE, [RecentStep(now - 3, 2.0, 1, 0, 0, 600, {"carol": {"secret:train:0": 600}})])
    try:
        browser.open("queue", "Queue and packing")
        bars = "figure.timeline svg.lanes rect"
        browser.until(lambda: browser.all(f"{bars}.s8") and browser.all(f"{bars}.s6"), "a snapshot and other tenants")
        legend = browser.text("figure.timeline .legend")
        assert "snapshots" in legend and "other tenants" in legend and "publishing" in legend
        assert "carol" not in browser.text("main") and "secret" not in browser.text("main")
        browser.click("figure.timeline summary")
        browser.until(lambda: "snapshot written in the background: 3" in browser.text("figure.timeline"), "the words")
        assert "600 tokens of other tenants" in browser.text("figure.timeline")
    finally:
        with database.write() as connection:
            theirs = RECENT_STEPS.c.ended_at.in_((now - 9, now - 3))
            connection.execute(RECENT_STEPS.delete().where(theirs))
        database.close()


def test_the_machine_is_above_every_page_and_its_last_minutes_are_zoomed(alice: Site, browser: Browser) -> None:
    alice.train(1)
    browser.open("queue", "Queue and packing")
    browser.until(lambda: "tokens/s" in browser.text("#strip") and BASE in browser.text("#strip"), "the strip")
    bars = "figure.timeline svg.lanes rect"
    browser.until(lambda: browser.all(f"{bars}.s1") and browser.all(f"{bars}.s2"), "training and sampling")
    browser.until(lambda: re.search(r"CPU \d+ %|GPU", browser.text("#strip")), "the devices' utilisation")
    everything = browser.text("figure.timeline .actions .quiet")
    browser.click("figure.timeline button", "Zoom in")
    browser.until(lambda: browser.text("figure.timeline .actions .quiet") != everything, "a part")
    lanes = browser.one(".lanes-place")
    lanes.send_keys(Keys.ARROW_LEFT, "+", "-", "0")
    browser.until(lambda: browser.text("figure.timeline .actions .quiet").endswith("now"), "all")
    browser.click("figure.timeline summary")
    browser.until(lambda: browser.all("figure.timeline tbody tr"), "the numbers")
    browser.open("overview", "Overview")
    assert "waiting" in browser.text("#strip")
    browser.click("#strip a")
    browser.until(lambda: browser.text("h1") == "Queue and packing", "the queue")


def test_a_checkpoint_is_published_kept_for_a_time_and_deleted(alice: Site, browser: Browser) -> None:
    path = alice.model.save_state("doomed").result().path
    route = f"training_runs/{alice.run}/checkpoints"

    def stored_checkpoints() -> dict[str, dict[str, object]]:
        rows_found = alice.http.get(route).json()["checkpoints"]
        return {str(listed["tinker_path"]): listed for listed in rows_found}

    def row() -> str:
        return next((row for row in rows(browser) if row.startswith("doomed")), "")

    browser.open("checkpoints", "Checkpoints")
    browser.until(lambda: "private" in row(), "the checkpoint")
    browser.click("button", "Publish doomed")
    browser.click("dialog button", "Publish")
    browser.until(lambda: "public" in row(), "its being public")
    assert stored_checkpoints()[path]["public"] is True
    browser.click("button", "Unpublish doomed")
    browser.click("dialog button", "Unpublish")
    browser.until(lambda: "private" in row(), "its being private")
    browser.click("button", "Expiry doomed")
    browser.until(lambda: browser.all("dialog[open]"), "the question")
    browser.driver.execute_script("document.querySelector('dialog #days').value = 2")
    browser.click("dialog button", "Set")
    browser.until(lambda: "never" not in row(), "the time")
    assert stored_checkpoints()[path]["expires_at"]
    browser.click("button", "Delete doomed")
    browser.click("dialog button", "Cancel")
    browser.until(lambda: not browser.all("dialog"), "the end of the question")
    assert browser.driver.switch_to.active_element.get_attribute("aria-label") == "Delete doomed"
    assert path in stored_checkpoints()
    browser.click("button", "Delete doomed")
    browser.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    browser.until(lambda: not browser.all("dialog"), "the end of the question")
    assert path in stored_checkpoints()
    browser.click("button", "Delete doomed")
    browser.click("dialog button.danger", "Delete")
    browser.until(lambda: rows(browser) and not row(), "its end")
    assert path not in stored_checkpoints()


def test_a_checkpoint_shows_the_lines_that_continue_from_it_and_its_path_is_copied(
    alice: Site, browser: Browser
) -> None:
    browser.open("checkpoints", "Checkpoints")
    training, sampling = alice.checkpoints
    browser.click("button", "Use first")
    browser.until(lambda: training in browser.text("dialog pre"), "the path")
    assert "create_training_client_from_state_with_optimizer" in browser.text("dialog pre")
    browser.click("dialog button", "Close")
    browser.until(lambda: not browser.all("dialog"), "its end")
    browser.click("button", "Use answers")
    browser.until(lambda: f'create_sampling_client(model_path="{sampling}")' in browser.text("dialog pre"), "the lines")
    assert f'tinsmith checkpoints merge "{sampling}" merged' in browser.text("dialog")
    browser.click("dialog button", "Close")
    browser.driver.execute_script("navigator.clipboard.writeText = async (text) => (window.copied = text)")
    browser.click("button", "Copy the path of first")
    browser.until(lambda: browser.driver.execute_script("return window.copied") == training, "the path")


def test_a_checkpoint_is_downloaded_by_a_link_without_the_key(alice: Site, browser: Browser) -> None:
    browser.open("checkpoints", "Checkpoints")
    browser.until(lambda: rows(browser), "the checkpoints")
    # A download keeps the page open. The test records the requested address; no file is written.
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "deny"})
    name = alice.checkpoints[0].rpartition("/")[2]
    browser.click("button", f"Download {name}")
    browser.until(lambda: "The download has started" in browser.text("#news"), "the news")
    run, kind, _ = alice.checkpoints[0].removeprefix("tinker://").split("/")
    link = alice.http.get(f"training_runs/{run}/checkpoints/{kind}/{name}/archive_link").json()["url"]
    assert httpx.get(link).headers["content-type"] == "application/x-tar"


def test_a_sample_is_shown_as_the_conversation_that_it_ended(alice: Site, browser: Browser) -> None:
    browser.open("samples", "Samples")
    openers = ".opener"
    browser.until(lambda: [one for one in browser.all(openers) if "Say hello." in one.text], "the prompt")
    browser.driver.execute_script("document.querySelectorAll('.opener').forEach((opener) => opener.click())")
    browser.until(lambda: [row for row in rows(browser) if row.startswith("hello")], "the answer")
    browser.open(f"samples/{alice.sample}", "Sample ")
    browser.until(lambda: "Turn 2 of 2" in browser.text("main"), "both turns")
    assert len(browser.all(".turn.sampled")) == 2
    first = browser.one("section:nth-of-type(1)").text
    assert "Say hello." in first and "hello" in first
    second = browser.one("section:nth-of-type(2)").text
    assert "Once more." in second and "hello" not in second.partition("Once more.")[0]
    assert browser.all(".turn.sampled .token.p0, .turn.sampled .token.p1")


@pytest.fixture
def running(alice: Site) -> Iterator[int]:
    job_id = alice.long_job()
    yield job_id
    alice.http.post(f"batch/jobs/{job_id}/cancel")  # a job that stays would slow down all later tests


def test_bulk_jobs_show_progress_and_failures_and_can_be_cancelled(alice: Site, browser: Browser, running: int) -> None:
    browser.open("jobs", "Bulk jobs")
    browser.until(lambda: len(rows(browser)) == 2, "the jobs")
    assert browser.all("progress")
    browser.open(f"jobs/{alice.job_id}", "Job ")
    browser.until(lambda: "succeeded" in browser.text("main dl"), "the end")
    assert "greetings.jsonl" in browser.text("main")
    browser.until(lambda: [row for row in rows(browser) if row.startswith("4 ")], "the failed row")
    trace = browser.text("main details[open] pre")
    assert trace.startswith("row 4 is {") and "Traceback" in trace
    browser.open(f"jobs/{running}", "Job ")
    browser.until(lambda: [row for row in rows(browser) if " to " in row], "committed batches")
    browser.click("button.danger", "Cancel the job")
    browser.click("dialog button.danger", "Cancel the job")
    browser.until(lambda: "cancelled" in browser.text("main dl"), "the end")
    browser.click("button.primary", "Resume")
    browser.click("dialog button.primary", "Resume")
    browser.until(lambda: f"job {running}" in browser.text("main dl"), "the new job")
    new_id = browser.driver.current_url.rpartition("/")[2]
    alice.http.post(f"batch/jobs/{new_id}/cancel").raise_for_status()


JOB = {
    "job_id": 9, "name": "", "pool": "local", "weight": 1.0, "status": "FAILED", "total_rows": 100, "rows_ok": 61,
    "rows_failed": 3, "tokens_in": 0, "tokens_out": 0, "resume_from": None, "error": "Traceback:\n  File\nValueError",
    "created_at": 1.0, "started_at": 2.0, "ended_at": 3.0, "batch_total_batches": 4, "batch_completed_batches": 2,
    "outputs": [], "workers": [{"worker_id": "2-c1a0658c", "kind": "local", "state": "starting"}],
}  # fmt: skip
PARTS = [{"start_idx": start, "end_idx": start + 31, "parts": [{"path": f"part-{start}"}]} for start in (0, 32)]
GIVEN = """
const given = %s;
window.fetch = async (where) => {
  const path = Object.keys(given).find((one) => where.split("?")[0].endsWith(one));
  (window.asked ??= []).push(path);
  return { ok: true, status: 200, json: async () => given[path] };
};
"""


def job_page_text(browser: Browser, job: dict[str, object], errors: Sequence[object], batches: Sequence[object]) -> str:
    """Return the text of a job's page for these answers of the server."""
    me = {"name": "alice", "key_id": 1}
    failures = {"/9/errors": {"errors": errors}, "/9/error_kinds": {"kinds": []}}
    answers = {"/me": me, "/jobs/9": job, "/9/partial": {"batches": batches}, **failures}
    script = {"source": GIVEN % json.dumps(answers)}
    added = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", script)["identifier"]
    try:
        browser.driver.get("about:blank")
        browser.open("jobs/9", "Job 9")
        browser.until(lambda: "Submitted" in browser.text("main"), "the job")
        # The answer for the parts arrives last and is drawn before the next timer.
        browser.until(lambda: browser.driver.execute_script("return window.asked.includes('/9/partial')"), "the parts")
        browser.driver.execute_async_script("setTimeout(arguments[0], 100)")
        return browser.text("main")
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", {"identifier": added})


def test_a_job_that_failed_has_its_rows_as_they_are_numbered_and_no_worker(browser: Browser) -> None:
    text = job_page_text(browser, JOB, [], PARTS)
    assert [row.split()[:3] for row in rows(browser)] == [["0", "to", "31"], ["32", "to", "63"]]
    assert "starting" not in text and "Workers" not in text, "it has ended"
    assert "Failed rows" not in text, "there is nothing to list"
    assert "61 of 100 done, 3 failed" in text and "The job has ended without output." in text
    assert "Traceback:\n  File\nValueError" in text, "on lines of its own"


def test_a_job_without_rows_has_no_sections_of_zeros(browser: Browser) -> None:
    counts = {"total_rows": 0, "rows_ok": 0, "rows_failed": 0, "batch_total_batches": 0, "batch_completed_batches": 0}
    outputs = [{"path": "none.jsonl", "rows": 0, "bytes": 0}]
    text = job_page_text(browser, JOB | counts | {"status": "SUCCEEDED", "error": None, "outputs": outputs}, [], [])
    assert browser.all("h2") and [element.text for element in browser.all("h2")] == ["Outputs"]
    assert "no batches" in text and "not counted" not in text and "0 done" not in text


def test_a_job_that_runs_has_its_workers(browser: Browser) -> None:
    text = job_page_text(browser, JOB | {"status": "RUNNING", "error": None, "ended_at": None}, [], PARTS[:1])
    assert "2-c1a0658c" in text and "starting" in text
    assert "The outputs are published when all batches are done." in text


def test_keys_and_quotas_are_shown(alice: Site, browser: Browser) -> None:
    browser.open("account", "Keys and usage")
    browser.until(lambda: "laptop" in browser.text("main"), "the key")
    assert "current" in browser.text("main")

    def is_quota_of_models_right() -> bool:
        # Other tests load models, and sessions without heartbeats lose theirs.
        quotas = alice.http.get("dashboard/tenant").raise_for_status().json()["quotas"]
        (used,) = (quota["used"] for quota in quotas if quota["name"] == "models")
        return used >= 1 and any(row.startswith(f"Models loaded {used} 8") for row in rows(browser))

    browser.until(is_quota_of_models_right, "the quota of models")


def test_a_server_that_is_away_is_waited_for(browser: Browser) -> None:
    browser.open("overview", "Overview")
    browser.until(lambda: browser.all(".cards .card"), "the page")
    offline = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    browser.driver.execute_cdp_cmd("Network.enable", {})
    browser.driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    browser.until(lambda: browser.all("body.offline"), "the notice")
    assert browser.all(".cards .card"), "what was there stays"
    browser.driver.execute_cdp_cmd("Network.emulateNetworkConditions", {**offline, "offline": False})
    browser.until(lambda: not browser.all("body.offline"), "the end of the notice")
    assert all("ERR_INTERNET_DISCONNECTED" in complaint for complaint in browser.complaints())


def test_missing_objects_are_reported(browser: Browser) -> None:
    browser.open("runs/no:train:0", "Not found")
    assert "unknown" in browser.text("main")
    browser.open("nothing", "Overview")
    assert all("404" in complaint for complaint in browser.complaints())


def test_many_metrics_stand_in_groups_that_open_and_a_search_finds_one(alice: Site, browser: Browser) -> None:
    """As many as a cookbook's run logs: the page stays short until a group is opened."""
    for prefix in ("time/part", "env/all/score"):
        metrics = {"reward": 1.0} | {f"{prefix}{index}": float(index) for index in range(40)}
        points = [{"step": step, "metrics": metrics} for step in (1, 2)]
        alice.http.post("log_metrics", json={"model_id": alice.strange_run, "points": points}).raise_for_status()
    browser.open(f"runs/{alice.strange_run}", "Run ")

    def titles() -> list[str]:
        return [title.text for title in browser.all("figure.curve .name") if title.is_displayed()]

    browser.until(lambda: "reward" in titles(), "the key metrics")
    key_titles = titles()
    assert not [title for title in key_titles if "part" in title or "score" in title]
    assert browser.driver.execute_script("return document.documentElement.scrollHeight") < 2500
    browser.click(".metric-group > summary", "time (")
    browser.until(lambda: len(titles()) == len(key_titles) + 40, "the group")
    assert len(browser.all("figure.curve canvas")) == len(titles()), "only these are drawn"
    browser.one("#search").send_keys("score7")
    browser.until(lambda: titles() == ["env/all/score7"], "the match")
    browser.one("#search").send_keys(Keys.CONTROL, "a")
    browser.one("#search").send_keys(Keys.DELETE)
    browser.until(lambda: len(titles()) == len(key_titles) + 40, "the groups as they were")
