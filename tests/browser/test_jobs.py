"""The page of a bulk job: its stages, the first rows and the file of an output, and its errors by kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.browser import Browser
from support.dashboard_data import Site


@pytest.fixture
def any_width(browser: Browser) -> Iterator[None]:
    yield
    browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def open_job(alice: Site, browser: Browser) -> None:
    browser.open(f"jobs/{alice.job_id}", f"Job {alice.job_id}: greetings")
    browser.until(lambda: "SUCCEEDED" in browser.text("main").upper(), "the end of the job")


@pytest.mark.usefixtures("any_width")
@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
def test_a_job_shows_stages_first_rows_and_kinds_of_errors(
    alice: Site, browser: Browser, width: int, height: int
) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    open_job(alice, browser)
    headings = browser.texts("main h2")
    assert headings[:3] == ["Stages", "Outputs", "Failed rows"]
    stage = browser.text("[aria-label='Stages'] tbody tr")
    assert "the service" in stage and "5" in stage and "4" in stage
    browser.click("summary", "First rows of greetings.jsonl")
    browser.until(lambda: browser.all("[aria-label='First rows of output 0'] tbody tr"), "the first rows")
    rows = browser.texts("[aria-label='First rows of output 0'] tbody tr")
    assert len(rows) == 4 and "Say hello." in rows[0]
    kind = browser.text("[aria-label='Errors by kind'] tbody tr")
    assert kind.startswith("1") and "Row 4" in kind
    wide = browser.driver.execute_script(
        "return [...document.querySelectorAll('main *')].filter((element) => !element.closest('.scroll') && "
        "element.getBoundingClientRect().right > innerWidth + 1).map((element) => element.outerHTML.slice(0, 80))"
    )
    assert wide == []


def test_an_output_is_downloaded_with_the_key(alice: Site, browser: Browser) -> None:
    open_job(alice, browser)
    browser.driver.execute_script(
        """
        window.saved = [];
        const make = URL.createObjectURL;
        URL.createObjectURL = (blob) => { blob.text().then((text) => window.saved.push(text)); return make(blob); };
        HTMLAnchorElement.prototype.click = function () { window.savedAs = this.download; };
        """
    )
    browser.click("button", "Download greetings.jsonl")
    (text,) = browser.until(lambda: browser.driver.execute_script("return window.saved"), "the file")
    path = alice.server.data_dir / "batch" / "alice" / "greetings.jsonl"
    assert text == path.read_text() and browser.driver.execute_script("return window.savedAs") == "greetings.jsonl"


def test_what_cannot_be_read_says_why(alice: Site, browser: Browser) -> None:
    path = alice.server.data_dir / "batch" / "alice" / "greetings.jsonl"
    content = path.read_bytes()
    path.unlink()
    try:
        open_job(alice, browser)
        browser.click("summary", "First rows of greetings.jsonl")
        browser.until(lambda: "is not there any more" in browser.text("main"), "the reason")
    finally:
        path.write_bytes(content)
    browser.complaints()  # the browser notes the refused request
