"""The dashboard in headless Chromium, on a live server with keys and real data: every page, what can be done on it, and
whether those can use it who see little or have no mouse.

One browser and one server for all; a test opens the page that it looks at.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import sqlalchemy as sa
from axe_core_python.selenium import Axe
from selenium.webdriver.common.keys import Keys

from browser import Browser, browsing
from dashboard_data import BASE, STRANGE_NAME, Site, site
from databases import database_url
from tinsmith.db import Database
from tinsmith.tables import MODELS

PAGES = {
    "overview": "Overview",
    "runs": "Runs",
    "sessions": "Sessions",
    "queue": "Queue and packing",
    "checkpoints": "Checkpoints",
    "playground": "Playground",
    "samples": "Samples",
    "jobs": "Bulk jobs",
    "account": "Keys and usage",
}


@pytest.fixture(scope="module")
def alice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("dashboard") / "data") as found:
        yield found


@pytest.fixture(scope="module")
def chromium(alice: Site) -> Iterator[Browser]:
    with browsing(alice.server.url) as browser:
        yield browser


@pytest.fixture
def browser(alice: Site, chromium: Browser) -> Iterator[Browser]:
    """With alice's key entered. A test that leaves a complaint in the console has failed."""
    if not chromium.driver.current_url.startswith(alice.server.url):
        chromium.driver.get(alice.server.url)
    chromium.driver.execute_script("sessionStorage.setItem('tinsmith.key', arguments[0])", alice.key)
    chromium.driver.get("about:blank")
    chromium.complaints()
    yield chromium
    assert chromium.complaints() == []


def details_of(alice: Site) -> dict[str, str]:
    """The pages of one thing, and how their headings begin."""
    session_id = alice.run.partition(":")[0]
    return {
        f"sessions/{session_id}": "Session ",
        f"runs/{alice.run}": "Run ",
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
    browser.open("runs", "Enter a key")
    assert browser.driver.switch_to.active_element.get_attribute("id") == "key"
    browser.one("#key").send_keys("tml-wrong", Keys.ENTER)
    browser.until(lambda: "did not take the key" in browser.text("main"), "a refusal")
    browser.one("#key").send_keys(alice.key, Keys.ENTER)
    browser.until(lambda: browser.text("h1") == "Runs", "the page that was asked for")
    assert browser.text("#tenant") == "alice"
    browser.driver.refresh()
    browser.until(lambda: browser.text("h1") == "Runs", "the same without a question")
    kept = browser.driver.execute_script("return [document.cookie, JSON.stringify(localStorage)]")
    assert kept[0] == "" and alice.key not in kept[1]
    browser.click("#forget")
    browser.until(lambda: browser.text("h1") == "Enter a key", "the question")
    assert browser.driver.execute_script("return sessionStorage.getItem('tinsmith.key')") is None
    assert all("401" in complaint for complaint in browser.complaints())


# Every page.


@pytest.mark.parametrize("name", [*PAGES, "runs/", "sessions/", "samples/", "jobs/"])
def test_a_page_is_usable_by_everybody_in_both_themes(alice: Site, browser: Browser, name: str) -> None:
    page, heading = name, PAGES.get(name, "")
    if not heading:
        page, heading = next((p, h) for p, h in details_of(alice).items() if p.startswith(name))
    browser.open(page, heading)
    browser.until(lambda: browser.all("main table, main form, main figure, main .tokens"), "content")
    for theme, options in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
        browser.driver.execute_script("tinsmithTheme.set(arguments[0])", theme)
        found = Axe().run(browser.driver, options=options)["violations"]
        assert not [(one["id"], [node["html"][:200] for node in one["nodes"]][:5]) for one in found], theme
    browser.driver.execute_script("tinsmithTheme.set('system')")
    assert len(browser.all("h1")) == 1 and browser.all("main")
    assert browser.driver.title.endswith("- Tinsmith")


def test_the_theme_is_kept_and_follows_the_system_otherwise(browser: Browser) -> None:
    def ground() -> str:
        return browser.driver.execute_script("return getComputedStyle(document.body).backgroundColor")

    browser.open("overview", "Overview")
    light = ground()
    browser.click("#theme", "as the system")
    browser.click("#theme", "light")
    dark = ground()
    assert dark != light
    browser.driver.refresh()
    browser.until(lambda: browser.text("#theme") == "Theme: dark", "the theme")
    assert ground() == dark
    browser.click("#theme", "dark")
    emulated = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", emulated)
    assert ground() == dark
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert ground() == light


def test_everything_is_reached_with_the_keyboard(browser: Browser) -> None:
    browser.open("overview", "Overview")
    browser.until(lambda: browser.all("main table"), "the tables")
    browser.driver.execute_script("document.activeElement.blur()")
    seen: list[str] = []
    for _ in range(12):
        browser.driver.switch_to.active_element.send_keys(Keys.TAB)
        seen.append(browser.driver.switch_to.active_element.text)
    assert seen[0] == "Skip to content"
    assert seen[1:10] == [*list(PAGES.values())[:3], "Queue", *list(PAGES.values())[4:]]
    links = browser.all("nav#nav a")
    links[1].send_keys(Keys.ENTER)
    browser.until(lambda: browser.text("h1") == "Runs", "the page")
    # The heading is there before what is below it; it has the focus once both are.
    browser.until(lambda: browser.driver.switch_to.active_element.text == "Runs", "focus at the new page's heading")
    assert browser.one("nav#nav a[aria-current=page]").text == "Runs"


def test_a_narrow_screen_shows_it_all(browser: Browser) -> None:
    browser.driver.set_window_size(420, 800)
    try:
        for page in ("overview", "checkpoints"):
            browser.open(page, PAGES[page])
            browser.until(lambda: browser.all("main table"), "the tables")
            wide = browser.driver.execute_script("return document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, "only tables scroll sideways"
    finally:
        browser.driver.set_window_size(1280, 900)


# Runs.


def test_curves_grow_while_somebody_looks(alice: Site, browser: Browser) -> None:
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


def test_what_a_tenant_wrote_is_shown_as_text(alice: Site, browser: Browser) -> None:
    browser.open("runs", "Runs")
    link = browser.until(lambda: [one for one in browser.all("tbody a") if one.text == STRANGE_NAME], "the name")
    link[0].click()
    browser.until(lambda: STRANGE_NAME in browser.text("main dl"), "the name")
    assert browser.all("main img") == []


def test_a_thousand_runs_are_searched_sorted_and_paged(alice: Site, browser: Browser) -> None:
    data_dir = alice.server.data_dir
    database = Database(database_url(data_dir) or f"sqlite:///{data_dir / 'tinsmith.db'}")
    with database.write() as connection:
        row = dict(connection.execute(sa.select(MODELS).where(MODELS.c.model_id == alice.run)).one()._mapping)
        row |= {"state": "unloaded", "reason": "made for a test"}
        many = [
            row | {"model_id": f"many:train:{number}", "created_at": float(number), "lora_rank": 1 + number % 200}
            for number in range(1, 1001)
        ]
        connection.execute(MODELS.insert(), many)
    try:
        browser.open("runs", "Runs")
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
        assert "many:train:777" in rows(browser)[0] and "unloaded" in rows(browser)[0]
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


def test_the_overview_counts(alice: Site, browser: Browser) -> None:
    browser.open("overview", "Overview")
    browser.until(lambda: "2" in browser.text(".cards .card .value"), "the runs")
    browser.until(lambda: BASE in browser.text("main"), "the engine")
    browser.until(lambda: browser.all("svg.bars rect.s1"), "the tokens of the day")
    browser.click(".cards .card", "Checkpoints")
    browser.until(lambda: browser.text("h1") == "Checkpoints", "the page")


def test_the_queue_shows_what_was_packed(browser: Browser) -> None:
    browser.open("queue", "Queue and packing")
    browser.until(lambda: "of them were yours" in browser.text("main"), "the shares")
    assert browser.all("svg.bars rect.s1")
    assert "Optimizer steps" in browser.text("main thead") or "Optimizer steps" in browser.text("main")


def test_a_checkpoint_is_published_kept_for_a_time_and_deleted(alice: Site, browser: Browser) -> None:
    path = alice.model.save_state("doomed").result().path
    route = f"training_runs/{alice.run}/checkpoints"

    def stored() -> dict[str, dict[str, object]]:
        found = alice.http.get(route).json()["checkpoints"]
        return {str(one["tinker_path"]): one for one in found}

    def row() -> str:
        return next((row for row in rows(browser) if row.startswith("doomed")), "")

    browser.open("checkpoints", "Checkpoints")
    browser.until(lambda: "private" in row(), "the checkpoint")
    browser.click("button", "Publish doomed")
    browser.click("dialog button", "Publish")
    browser.until(lambda: "public" in row(), "its being public")
    assert stored()[path]["public"] is True
    browser.click("button", "Unpublish doomed")
    browser.click("dialog button", "Unpublish")
    browser.until(lambda: "private" in row(), "its being private")
    browser.click("button", "Expiry doomed")
    browser.until(lambda: browser.all("dialog[open]"), "the question")
    browser.driver.execute_script("document.querySelector('dialog #days').value = 2")
    browser.click("dialog button", "Set")
    browser.until(lambda: "never" not in row(), "the time")
    assert stored()[path]["expires_at"]
    browser.click("button", "Delete doomed")
    browser.click("dialog button", "Cancel")
    browser.until(lambda: not browser.all("dialog"), "the end of the question")
    assert browser.driver.switch_to.active_element.get_attribute("aria-label") == "Delete doomed"
    assert path in stored()
    browser.click("button", "Delete doomed")
    browser.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    browser.until(lambda: not browser.all("dialog"), "the end of the question")
    assert path in stored()
    browser.click("button", "Delete doomed")
    browser.click("dialog button.danger", "Delete")
    browser.until(lambda: rows(browser) and not row(), "its end")
    assert path not in stored()


def test_a_checkpoint_is_downloaded_by_a_link_without_the_key(alice: Site, browser: Browser) -> None:
    browser.open("checkpoints", "Checkpoints")
    browser.until(lambda: rows(browser), "the checkpoints")
    # A download leaves the page where it is; what the browser asks for is noted instead of written to a disk.
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "deny"})
    name = alice.checkpoints[0].rpartition("/")[2]
    browser.click("button", f"Download {name}")
    browser.until(lambda: "The download begins" in browser.text("#news"), "the news")
    run, kind, _ = alice.checkpoints[0].removeprefix("tinker://").split("/")
    link = alice.http.get(f"training_runs/{run}/checkpoints/{kind}/{name}/archive_link").json()["url"]
    assert httpx.get(link).headers["content-type"] == "application/x-tar"


def test_models_are_asked_side_by_side_token_by_token(alice: Site, browser: Browser) -> None:
    browser.open("playground", "Playground")
    fields = browser.until(lambda: browser.all("input[id^=model]"), "the models")
    models = [field.get_attribute("value") for field in fields]
    assert models[0] == BASE and str(models[1]).startswith("tinker://")
    browser.driver.execute_script("document.getElementById('max_tokens').value = 5")
    browser.driver.execute_script("document.getElementById('temperature').value = 0")
    browser.click("button.primary", "Sample")
    browser.until(lambda: len(browser.all(".column .tokens")) == 2, "both answers")
    assert "hello" in browser.text(".column:nth-child(2) .text"), "the second model was trained to say it"
    tokens = browser.one(".column:nth-child(2) .tokens")
    tokens.send_keys(Keys.ARROW_RIGHT)
    said = browser.until(lambda: browser.text(".column:nth-child(2) .said"), "words")
    assert "logprob" in said and "likeliest" in said
    browser.click(".column:nth-child(2) summary")
    browser.until(lambda: browser.all(".column:nth-child(2) tbody tr"), "the numbers")
    browser.click("button", "Add a model")
    browser.click("button", "Add a model")
    assert len(browser.all(".column")) == 4
    assert not browser.one(".actions button:not(.primary)").is_enabled(), "no more than four"
    browser.click("button", "Remove column 1")
    assert len(browser.all(".column")) == 3


def test_what_cannot_be_sampled_says_why(browser: Browser) -> None:
    browser.open("playground", "Playground")
    field = browser.until(lambda: browser.one("#model1"), "the field")
    field.clear()
    field.send_keys("no/such-model")
    browser.click("button.primary", "Sample")
    browser.until(lambda: "no/such-model" in browser.text(".column .warning"), "the reason")
    assert all("404" in complaint for complaint in browser.complaints())


def test_a_sample_is_shown_as_the_conversation_that_it_ended(alice: Site, browser: Browser) -> None:
    browser.open("samples", "Samples")
    browser.until(lambda: [row for row in rows(browser) if row.startswith("hello user Say hello. assistant")], "words")
    browser.open(f"samples/{alice.sample}", "Sample ")
    browser.until(lambda: "Turn 2 of 2" in browser.text("main"), "both turns")
    assert len(browser.all(".turn.sampled")) == 2
    first = browser.one("section:nth-of-type(1)").text
    assert "Say hello." in first and "hello" in first
    second = browser.one("section:nth-of-type(2)").text
    assert "Once more." in second and "hello" not in second.partition("Once more.")[0]
    assert browser.all(".turn.sampled .token.p0, .turn.sampled .token.p1")


def test_bulk_jobs_show_how_far_they_are_what_failed_and_end_when_told(alice: Site, browser: Browser) -> None:
    running = alice.long_job()
    browser.open("jobs", "Bulk jobs")
    browser.until(lambda: len(rows(browser)) == 2, "the jobs")
    assert browser.all("progress")
    browser.open(f"jobs/{alice.job_id}", "Job ")
    browser.until(lambda: "succeeded" in browser.text("main dl"), "the end")
    assert "greetings.jsonl" in browser.text("main")
    browser.until(lambda: [row for row in rows(browser) if row.startswith("4 ")], "the failed row")
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


def test_keys_and_quotas_are_shown(browser: Browser) -> None:
    browser.open("account", "Keys and usage")
    browser.until(lambda: "laptop" in browser.text("main"), "the key")
    assert "in use here" in browser.text("main")
    assert [row for row in rows(browser) if row.startswith("Models loaded 2 8")]


def test_a_server_that_is_away_is_waited_for(browser: Browser) -> None:
    browser.open("overview", "Overview")
    browser.until(lambda: browser.all(".cards .card"), "the page")
    gone = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    browser.driver.execute_cdp_cmd("Network.enable", {})
    browser.driver.execute_cdp_cmd("Network.emulateNetworkConditions", gone)
    browser.until(lambda: browser.all("body.offline"), "the notice")
    assert browser.all(".cards .card"), "what was there stays"
    browser.driver.execute_cdp_cmd("Network.emulateNetworkConditions", {**gone, "offline": False})
    browser.until(lambda: not browser.all("body.offline"), "the end of the notice")
    assert all("ERR_INTERNET_DISCONNECTED" in complaint for complaint in browser.complaints())


def test_what_is_not_there_is_said(browser: Browser) -> None:
    browser.open("runs/no:train:0", "Not found")
    assert "unknown" in browser.text("main")
    browser.open("nothing", "Overview")
    assert all("404" in complaint for complaint in browser.complaints())
