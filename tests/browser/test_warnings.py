"""Warnings above the pages, and the browser's notifications of new ones."""

from __future__ import annotations

import json

from support.browser import Browser
from support.dashboard_data import Site

ANSWERS = """
window.warnings = %s;
window.notes = [];
window.Notification = class {
  static permission = "default";
  static async requestPermission() { return (Notification.permission = "granted"); }
  constructor(title, { body }) { window.notes.push(`${title} | ${body}`); }
};
const asked = window.fetch;
window.fetch = async (where, ...rest) => where.endsWith("/dashboard/warnings")
  ? { ok: true, status: 200, json: async () => ({ warnings: window.warnings }) } : asked(where, ...rest);
const wait = window.setTimeout;
window.setTimeout = (work, ms, ...rest) => wait(work, ms === 15000 ? 100 : ms, ...rest);
"""


def test_warnings_are_shown_dismissed_and_notified(alice: Site, browser: Browser) -> None:
    lost = {"key": "stalled r", "kind": "stalled", "run": alice.run, "name": "<b>mine", "text": "nothing for 12 min"}
    full = {"key": "disk nearly full", "kind": "disk nearly full", "run": None, "name": None, "text": "1 of 9 GiB"}
    added = browser.driver.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument", {"source": ANSWERS % json.dumps([lost])}
    )["identifier"]
    try:
        browser.driver.get("about:blank")
        browser.open("overview", "Overview")
        browser.until(lambda: browser.text("#warnings li span") == "<b>mine: stalled: nothing for 12 min.", "a warning")
        browser.click("#notify", "off")
        browser.until(lambda: browser.text("#notify") == "Notifications: on", "the permission")
        browser.driver.execute_script("window.warnings.push(arguments[0])", full)
        browser.until(lambda: len(browser.all("#warnings li")) == 2, "both")
        assert browser.driver.execute_script("return window.notes") == ["disk nearly full | 1 of 9 GiB"], "only the new"
        browser.click("#warnings button", "Dismiss <b>mine: stalled")
        browser.until(lambda: len(browser.all("#warnings li")) == 1, "one is left")
        browser.click("#warnings button")
        browser.until(lambda: not browser.is_displayed("#warnings"), "none is left")
        browser.driver.refresh()
        browser.until(lambda: browser.all(".cards .card") and browser.is_displayed("#strip"), "the page")
        assert not browser.is_displayed("#warnings"), "dismissed in this tab"
        browser.driver.execute_script("window.warnings.length = 0")
        browser.until(
            lambda: not browser.driver.execute_script("return sessionStorage['tinsmith.dismissed']"), "its end"
        )
        browser.driver.execute_script("window.warnings.push(arguments[0])", lost)
        browser.until(lambda: browser.is_displayed("#warnings"), "a warning that came back")
        browser.click("#warnings a")
        browser.until(lambda: browser.text("h1").startswith("Run "), "the run")
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", {"identifier": added})
        browser.driver.execute_script("sessionStorage.removeItem('tinsmith.dismissed'); localStorage.clear()")
