"""What every page of the dashboard does, in Chromium on a live server: it fits wide and narrow screens in both themes,
copies ids and commands, shows the keys, and says how its first object is made.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files

import pytest
from selenium.webdriver.common.keys import Keys

from support.browser import Browser
from support.dashboard_data import BASE, Site
from support.dashboard_pages import SCREENS, find_overflows, screen

CONTENT = "main table, main form, main figure, main .tokens, main .facts"


def routes_of_the_menu() -> set[str]:
    """The pages that main.js routes to."""
    script = (files("tinsmith.api.dashboard") / "static" / "main.js").read_text()
    (names,) = re.findall(r"const PAGES = \{ (.+?) \};", script)
    return set(names.split(", "))


def addresses_of(alice: Site) -> list[str]:
    """Every page, with those of single objects and some states of their addresses."""
    session_id = alice.run.partition(":")[0]
    return [
        *(
            "overview",
            "runs",
            "sessions",
            "queue",
            "checkpoints",
            "playground",
            "samples",
            "jobs",
            "account",
            "machine",
        ),
        "runs?columns=loss,reward,created,duration,optimizer",
        f"runs/{alice.run}",
        f"runs/compare/{alice.run}/{alice.strange_run}",
        f"sessions/{session_id}",
        f"runs/{alice.run}/samples",
        f"samples/{alice.sample}",
        f"jobs/{alice.job_id}",
        f"checkpoints/{alice.checkpoints[0].removeprefix('tinker://')}",
        "checkpoints?search=answers",
        "playground?chat=off",
        "playground?tools=" + "x" * 400,
    ]


@contextmanager
def answers_of_server(browser: Browser, answers: dict[str, object]) -> Iterator[None]:
    """The server's answers are these, by the end of their path."""
    source = """
const answers = %s;
window.fetch = async (where) => {
  const path = Object.keys(answers).find((name) => where.split("?")[0].endsWith(name));
  return { ok: true, status: 200, json: async () => answers[path] };
};
"""
    script = {"source": source % json.dumps(answers)}
    added = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", script)["identifier"]
    browser.driver.get("about:blank")
    try:
        yield
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", {"identifier": added})
        browser.driver.get("about:blank")


def copied_text(browser: Browser, label: str) -> str:
    browser.driver.execute_script("navigator.clipboard.writeText = async (text) => (window.copied = text)")
    browser.click("button", label)
    return str(browser.until(lambda: browser.driver.execute_script("return window.copied"), "the text"))


def test_every_route_is_among_the_addresses(alice: Site) -> None:
    assert {re.split(r"[/?]", address)[0] for address in addresses_of(alice)} == routes_of_the_menu()


@pytest.mark.parametrize("size", SCREENS)
def test_nothing_overflows_any_page(alice: Site, browser: Browser, size: str) -> None:
    overflows: dict[str, dict[str, list[str]]] = {}
    with screen(browser, size):
        for address in addresses_of(alice):
            browser.driver.get("about:blank")
            browser.open(address)
            browser.until(lambda: browser.all(CONTENT), f"the content of {address}")
            if elements := find_overflows(browser):
                overflows[address] = elements
    assert overflows == {}


@pytest.mark.parametrize("size", SCREENS)
def test_nothing_overflows_a_conversation_or_a_dialog(alice: Site, browser: Browser, size: str) -> None:
    with screen(browser, size):
        browser.driver.get("about:blank")
        browser.open(
            f"playground?models={BASE.replace('/', '%252F')}&max_tokens=120&tool_choice=required", "Playground"
        )
        browser.click(".definitions summary")
        browser.click("button", "Insert an example")
        browser.type("#prompt", "x" * 300)
        browser.click("button.primary", "Send")
        browser.until(lambda: browser.all(".results"), "the call")
        assert find_overflows(browser) == {}
        browser.open(f"checkpoints/{alice.checkpoints[0].removeprefix('tinker://')}", "Checkpoint first")
        browser.click("button", "Use first")
        browser.until(lambda: browser.all("dialog .snippet-box"), "the lines")
        assert find_overflows(browser) == {}
        browser.click("dialog button", "Close")


def test_ids_paths_and_commands_are_copied(alice: Site, browser: Browser) -> None:
    session_id = alice.run.partition(":")[0]
    browser.open(f"runs/{alice.run}", "Run ")
    assert copied_text(browser, "Copy the path of the run") == f"tinker://{alice.run}"
    for address, label, text in (
        ("runs", f"Copy run {alice.run}", alice.run),
        ("sessions", f"Copy session {session_id}", session_id),
        (f"sessions/{session_id}", "Copy the id of the session", session_id),
        ("checkpoints", "Copy the path of first", alice.checkpoints[0]),
        ("account", "Copy the command that creates a key", "tinsmith keys create TENANT"),
    ):
        browser.driver.get("about:blank")
        browser.open(address)
        assert copied_text(browser, label) == text
    browser.driver.get("about:blank")
    browser.open(f"jobs/{alice.job_id}", "Job ")
    assert copied_text(browser, "Copy the path of the output").endswith("greetings.jsonl")
    browser.driver.get("about:blank")
    browser.open("checkpoints?search=first", "Checkpoints")
    link = copied_text(browser, "Copy link")
    assert link == browser.driver.current_url and link.endswith("#/checkpoints?search=first")


def test_lines_have_a_button_that_copies_them_and_the_merge_names_the_checkpoint(alice: Site, browser: Browser) -> None:
    browser.open(f"checkpoints/{alice.checkpoints[1].removeprefix('tinker://')}", "Checkpoint answers")
    browser.click("button", "Use answers")
    browser.until(lambda: browser.all("dialog .snippet-box"), "the lines")
    titles = browser.texts("dialog h3")
    assert titles[0] == "Sample" and "Continue training" not in titles, "it has no optimizer state"
    lines = copied_text(browser, "Copy the lines: Merge into the base model").split("\n")
    assert lines[0].startswith(f"export TINKER_BASE_URL={alice.server.url}")
    assert lines[1] == f'tinsmith checkpoints merge "{alice.checkpoints[1]}" merged --dtype bfloat16'
    browser.click("dialog button", "Close")


def test_the_keys_are_listed_by_a_button_and_the_focus_comes_back(browser: Browser) -> None:
    browser.open("overview", "Overview")
    browser.click("#shortcuts")
    browser.until(lambda: "Search on this page" in browser.text("dialog"), "the list of keys")
    assert browser.texts("dialog .actions button") == ["Close"]
    browser.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    browser.until(lambda: not browser.all("dialog"), "its end")
    assert browser.driver.switch_to.active_element.get_attribute("id") == "shortcuts"


def test_checkpoints_are_searched_and_the_words_are_in_the_address(alice: Site, browser: Browser) -> None:
    def names() -> list[str]:
        return [name.split()[0] for name in browser.texts("tbody th > span")]

    browser.driver.get("about:blank")
    browser.open("checkpoints", "Checkpoints")
    browser.until(lambda: {"first", "answers"} <= set(names()), "both")
    browser.type("#search", f"{alice.run} ANSW")
    browser.until(lambda: names() == ["answers"], "one")
    assert "search=" in browser.driver.current_url
    assert re.search(r"reward 0\.\d+\s+loss per token \d", browser.text("tbody tr")), "the metrics of its step"
    assert f"\n{8}" in browser.text("tbody tr") or " 8 " in browser.text("tbody tr")
    browser.type("#search", "nothing")
    browser.until(lambda: "No checkpoint has all of these words" in browser.text("main"), "none")


def test_pages_without_objects_say_the_next_command(browser: Browser) -> None:
    cursor = {"offset": 0, "limit": 50, "total_count": 0}
    empty = {
        "/me": {"name": "a", "key_id": 1},
        "/machine": {},
        "/warnings": {"warnings": []},
        "/overview": {"counts": {"runs": 0}, "engines": [{"base_model": BASE}], "seats": []},
        "/dashboard/runs": {"runs": [], "cursor": cursor},
        "/sessions/search": {"sessions": [], "next_cursor": None},
        "/dashboard/checkpoints": {"checkpoints": [], "cursor": cursor},
        "/checkpoint_jobs": {"checkpoint_jobs": [], "result_bytes": 0},
        "/batch/jobs": {"jobs": [], "total_count": 0},
    }
    with answers_of_server(browser, empty):
        for page, words in (
            ("runs", "python first.py"),
            ("sessions", "python first.py"),
            ("checkpoints", 'training_client.save_state("NAME")'),
            ("jobs", f'batch.Sample(model="{BASE}"'),
        ):
            browser.open(page)
            browser.until(lambda words=words: words in browser.text("main .empty pre"), f"the lines of {page}")
            assert copied_text(browser, "Copy the lines") == browser.text("main .empty pre")
            browser.driver.get("about:blank")


def test_the_first_jobs_lines_work(alice: Site, browser: Browser) -> None:
    """The lines that the page without jobs shows, run in a shell."""
    answers = {
        "/me": {"name": "a", "key_id": 1},
        "/machine": {},
        "/warnings": {"warnings": []},
        "/overview": {"engines": [{"base_model": BASE}]},
        "/batch/jobs": {"jobs": [], "total_count": 0},
    }
    with answers_of_server(browser, answers):
        browser.open("jobs", "Bulk jobs")
        lines = str(browser.until(lambda: browser.text("main .empty pre"), "the lines"))
    key = lines.replace("TINKER_API_KEY=...", f"TINKER_API_KEY={alice.key}").replace("python -", f"{sys.executable} -")
    subprocess.run(["bash", "-ec", key], check=True, timeout=120, env=os.environ, capture_output=True, text=True)
    output = alice.server.data_dir / "batch" / "alice" / "answers.jsonl"
    assert [set(json.loads(line)) >= {"text"} for line in output.read_text().splitlines()] == [True, True]
    newest = alice.http.get("batch/jobs?limit=1").json()["jobs"][0]
    assert newest["status"] == "SUCCEEDED" and newest["rows_ok"] == 2
