"""The pages of the dashboard, their headings and screens, and what overflows on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from support.browser import Browser
from support.dashboard_data import Site

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

CANNED_ANSWERS = """
const answers = %s;
window.fetch = async (where) => {
  const path = Object.keys(answers).find((end) => where.split("?")[0].endsWith(end));
  (window.asked ??= []).push(path);
  return { ok: true, status: 200, json: async () => answers[path] };
};
"""


def details_of(alice: Site) -> dict[str, str]:
    """The detail pages, and how their headings begin."""
    session_id = alice.run.partition(":")[0]
    return {
        f"sessions/{session_id}": "Session ",
        f"runs/{alice.run}": "Run ",
        f"runs/compare/{alice.run}/{alice.strange_run}": "Comparison of 2 runs",
        f"samples/{alice.sample}": "Sample ",
        f"jobs/{alice.job_id}": "Job ",
        f"checkpoints/{alice.checkpoints[0].removeprefix('tinker://')}": "Checkpoint first",
    }


def rows(browser: Browser) -> list[str]:
    return browser.texts("tbody tr")


SCREENS = {"wide": (1440, 900), "narrow": (390, 844)}

THEMES = ("light", "dark")
# What ends to the right of the screen, or of a box that does not scroll, and so cannot be read.

OVERFLOWING = """
const width = document.documentElement.clientWidth;
const scrolls = (element) => element.closest(".scroll, .across, details > div, pre, .hidden, .skip, svg, .uplot");
const wide = [...document.querySelectorAll("body *")].filter((element) => {
  const box = element.getBoundingClientRect();
  return box.width && box.height && (box.right > width + 1 || box.left < -1) && !scrolls(element);
});
const tables = [...document.querySelectorAll("main .scroll")].filter((box) => box.scrollWidth > box.clientWidth);
const page = document.documentElement.scrollWidth > innerWidth ? [document.documentElement] : [];
return [...page, ...wide, ...tables].map((element) => element.outerHTML.slice(0, 160));
"""


@contextmanager
def screen(browser: Browser, name: str) -> Iterator[None]:
    width, height = SCREENS[name]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": name == "narrow"}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        yield
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def find_overflows(browser: Browser) -> dict[str, list[str]]:
    """What overflows, by theme."""
    overflows: dict[str, list[str]] = {}
    for theme in THEMES:
        browser.driver.execute_script("tinsmithTheme.set(arguments[0])", theme)
        overflows[theme] = browser.driver.execute_script(OVERFLOWING)
    browser.driver.execute_script("tinsmithTheme.set('system')")
    return {theme: elements for theme, elements in overflows.items() if elements}
