"""A headless Chromium, for tests of the dashboard and its screenshots."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

T = TypeVar("T")

PATIENCE_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--lang=en-GB",
)


class Browser:
    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, page: str, heading: str = "") -> None:
        """Go to a page by its address, and wait for its heading (the beginning of it)."""
        self.driver.get(f"{self.url}/#/{page}")
        if heading:
            self.until(lambda: self.text("h1").startswith(heading), f"the page {heading}")

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def read(self, look: Callable[[], T]) -> T:
        """What a look at the page sees; a page that is redrawn between two commands is looked at again."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return look()
            except StaleElementReferenceException:
                assert time.monotonic() < deadline, "the page was redrawn at each look"

    def text(self, selector: str) -> str:
        return self.read(lambda: self.one(selector).text)

    def texts(self, selector: str) -> list[str]:
        return self.read(lambda: [element.text for element in self.all(selector)])

    def type(self, selector: str, *keys: str) -> None:
        self.read(lambda: self.one(selector).send_keys(*keys))

    def attribute(self, selector: str, name: str) -> str | None:
        return self.read(lambda: self.one(selector).get_attribute(name))

    def is_displayed(self, selector: str) -> bool:
        return self.read(lambda: self.one(selector).is_displayed())

    def is_enabled(self, selector: str) -> bool:
        return self.read(lambda: self.one(selector).is_enabled())

    def is_selected(self, selector: str) -> bool:
        return self.read(lambda: self.one(selector).is_selected())

    def click(self, selector: str, words: str = "") -> None:
        """Click the first element of the selector that has these words in its text or name."""

        def click() -> bool:
            for element in self.all(selector):
                if words in element.text or words in (element.get_attribute("aria-label") or ""):
                    element.click()
                    return True
            return False

        self.until(click, f"{selector} {words}")

    def until(self, condition: Callable[[], T], description: str) -> T:
        """Wait for a condition; the page may be redrawn at any moment."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(NoSuchElementException, StaleElementReferenceException):
                if value := condition():
                    return value
            assert time.monotonic() < deadline, f"{description} did not come:\n{self.text('body')[:3000]}"
            time.sleep(0.05)

    def complaints(self) -> list[str]:
        """New messages of the browser's console."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser")]


@contextlib.contextmanager
def open_browser(url: str, width: int = 1280, height: int = 900) -> Iterator[Browser]:
    chromium, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver_path is None:
        pytest.fail("the dashboard is tested in Chromium: run scripts/setup-browser, or install chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver_path))
    driver.set_page_load_timeout(PATIENCE_S)
    driver.set_script_timeout(PATIENCE_S)
    try:
        yield Browser(driver, url)
    finally:
        driver.quit()
