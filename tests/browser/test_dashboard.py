"""The dashboard in headless Chromium, on a live server with keys and real data: every page, its actions, and its
accessibility to screen readers and the keyboard. All tests share one browser and one server; each opens the page that
it checks.
"""

from __future__ import annotations

import json
import re
import time

import pytest
import sqlalchemy as sa
from axe_core_python.selenium import Axe
from selenium.webdriver.common.keys import Keys

from support.browser import Browser
from support.dashboard_data import BASE, STRANGE_NAME, Site
from support.dashboard_pages import CANNED_ANSWERS, PAGES, details_of, rows
from support.databases import database_url
from tinsmith.db.factory import open_database
from tinsmith.db.schema import MODELS, RECENT_STEPS
from tinsmith.store.recent_steps import RecentStep, RecentSteps


def test_a_key_is_asked_for_once_and_kept_in_the_tab_only(alice: Site, chromium: Browser) -> None:
    browser = chromium
    browser.driver.get(alice.server.url)
    browser.driver.execute_script("sessionStorage.clear()")
    browser.driver.get("about:blank")
    browser.open("runs", "Sign in")
    assert browser.driver.switch_to.active_element.get_attribute("id") == "key"
    browser.type("#key", "tml-wrong", Keys.ENTER)
    browser.until(lambda: "rejected the key" in browser.text("main"), "a refusal")
    browser.type("#key", alice.key, Keys.ENTER)
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


@pytest.mark.parametrize("name", [*PAGES, "runs/", "runs/compare/", "sessions/", "samples/", "jobs/", "checkpoints/"])
def test_a_page_is_usable_by_everybody_in_both_themes(alice: Site, browser: Browser, name: str) -> None:
    page, heading = name, PAGES.get(name, "")
    if not heading:
        page, heading = next((p, h) for p, h in details_of(alice).items() if p.startswith(name))
    browser.open(page, heading)
    browser.until(lambda: browser.all("main table, main form, main figure, main .tokens, main .facts"), "content")
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
    assert browser.text("nav#nav a[aria-current=page]") == "Runs"


def test_keys_lead_to_pages_and_to_the_search(browser: Browser) -> None:
    browser.open("overview", "Overview")
    body = browser.one("body")
    body.send_keys("g", "r")
    browser.until(lambda: browser.text("h1") == "Runs" and browser.all("#search"), "the runs")
    browser.type("h1", "/")
    browser.type("#search", "gs/?")
    assert browser.attribute("#search", "value") == "gs/?", "a field keeps its keys"
    browser.driver.execute_script("document.activeElement.blur()")
    browser.type("body", "?")
    browser.until(lambda: "Search on this page" in browser.text("dialog"), "the list of keys")
    browser.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    browser.until(lambda: not browser.all("dialog"), "its end")


def test_a_key_that_ends_says_so(alice: Site, browser: Browser) -> None:
    browser.open("overview", "Overview")
    browser.until(lambda: browser.all(".cards .card"), "the page")
    browser.driver.execute_script("sessionStorage.setItem('tinsmith.key', 'tml-revoked')")
    browser.driver.execute_script("location.hash = '#/runs'")
    browser.until(lambda: browser.text("h1") == "The key is no longer valid", "the question")
    assert "expired or been revoked" in browser.text("main .warning") and not browser.is_displayed("#strip")
    browser.type("#key", alice.key, Keys.ENTER)
    browser.until(lambda: browser.text("h1") == "Runs", "the page")
    assert all("401" in complaint for complaint in browser.complaints())


def test_a_server_without_runs_shows_how_the_first_is_made(browser: Browser) -> None:
    canned_answers = {
        "/me": {"name": "a", "key_id": 1},
        "/overview": {"counts": {"runs": 0}, "engines": [], "seats": []},
    }
    canned_answers |= {"/runs": {"runs": []}, "/events": {"data": []}, "/machine": {}}
    script = {"source": CANNED_ANSWERS % json.dumps(canned_answers)}
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
        assert not browser.is_displayed("#nav")
        assert not Axe().run(browser.driver)["violations"]
        browser.click("#menu")
        assert browser.is_displayed("#nav")
        browser.type("#menu", Keys.ESCAPE)
        assert not browser.is_displayed("#nav")
        browser.click("#menu")
        browser.click("nav#nav a", "Runs")
        browser.until(lambda: browser.text("h1") == "Runs", "the page")
        assert not browser.is_displayed("#nav")
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


MISSING = r"\b(null|undefined|NaN|Infinity|Invalid Date)\b|\[object "


# Answers of another version of the server: each number is replaced, or each optional value left out.
SPOILED = """
const changed = {
  "null": (value) => (typeof value === "number" ? null : value),
  "missing": (value) => (typeof value === "number" || value === null || value === "" ? undefined : value),
  "empty": (value) => (Array.isArray(value) ? [] : value),
}["%s"];
// A row is a tenant's own: its null is shown as it is.
const fixedNames = new Set(
  ["row", "job_id", "key_id", "cursor", "limit", "offset", "total_count", "step_token_budget"],
);
const spoil = (value) => {
  if (Array.isArray(value)) return value.map(spoil);
  if (value === null || typeof value !== "object") return value;
  const spoiled = ([name, one]) => [name, fixedNames.has(name) ? one : changed(spoil(one))];
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
    assert browser.texts("main > *")[1].startswith("API key")
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


def test_runs_are_named_and_stand_side_by_side(alice: Site, browser: Browser) -> None:
    browser.open(f"runs/{alice.run}", "Run ")
    browser.click("button", "Edit the name")
    browser.type("#name", "lesson")
    browser.type("#tags", "hello, short")
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
        browser.until(lambda: browser.text("th[aria-sort=descending]").startswith("Rank"), "the order")
        browser.until(lambda: "200" in rows(browser)[0], "the highest rank")
        assert "1 to 50" in browser.text(".pager")
        browser.click("button.sort", "Rank")
        browser.until(lambda: browser.text("th[aria-sort=ascending]").startswith("Rank"), "the other order")
        browser.type("#search", "many:train:777")
        browser.until(lambda: "1 to 1 of 1" in browser.text(".pager"), "the one run")
        assert browser.attribute("tbody a", "title") == "many:train:777" and "finished" in rows(browser)[0]
    finally:
        with database.write() as connection:
            connection.execute(MODELS.delete().where(MODELS.c.model_id.startswith("many:")))
        database.close()


def test_a_session_leads_to_its_runs(alice: Site, browser: Browser) -> None:
    browser.open("sessions", "Sessions")
    browser.until(lambda: len(rows(browser)) >= 2 and STRANGE_NAME in browser.text("tbody"), "the sessions")
    browser.type("#search", "quotes img")
    browser.until(lambda: len(rows(browser)) == 1, "the one that has these words")
    browser.click("tbody a")
    browser.until(lambda: browser.text("h1").startswith("Session "), "the session")
    browser.until(lambda: [link for link in browser.all("tbody a") if link.text == STRANGE_NAME], "its run")
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "deny"})
    browser.click("button", "Download the timeline")
    browser.until(lambda: "The timeline is downloaded" in browser.text("#news"), "the news")
    browser.click("tbody a")
    browser.until(lambda: browser.text("h1").startswith("Run "), "the run")


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


def test_a_sample_is_shown_as_the_conversation_that_it_ended(alice: Site, browser: Browser) -> None:
    browser.open("samples", "Samples")
    openers = ".opener"
    browser.until(lambda: [one for one in browser.all(openers) if "Say hello." in one.text], "the prompt")
    browser.driver.execute_script("document.querySelectorAll('.opener').forEach((opener) => opener.click())")
    browser.until(lambda: [row for row in rows(browser) if row.startswith("hello")], "the answer")
    browser.open(f"samples/{alice.sample}", "Sample ")
    browser.until(lambda: "Turn 2 of 2" in browser.text("main"), "both turns")
    assert len(browser.all(".turn.sampled")) == 2
    first = browser.text("section:nth-of-type(1)")
    assert "Say hello." in first and "hello" in first
    second = browser.text("section:nth-of-type(2)")
    assert "Once more." in second and "hello" not in second.partition("Once more.")[0]
    assert browser.all(".turn.sampled .token.p0, .turn.sampled .token.p1")


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
