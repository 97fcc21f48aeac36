"""One browser and one server with data, shared by all tests of the dashboard; each opens the page that it checks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.browser import Browser, open_browser
from support.dashboard_data import Site, site


@pytest.fixture(scope="session")
def alice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("dashboard") / "data") as dashboard_site:
        yield dashboard_site


@pytest.fixture(scope="session")
def chromium(alice: Site) -> Iterator[Browser]:
    with open_browser(alice.server.url) as browser:
        yield browser


@pytest.fixture
def browser(alice: Site, chromium: Browser) -> Iterator[Browser]:
    """A browser with alice's key entered. A test fails if the console has an error or a warning."""
    if not chromium.driver.current_url.startswith(alice.server.url):
        chromium.driver.get(alice.server.url)
    chromium.driver.execute_script("sessionStorage.setItem('tinsmith.key', arguments[0])", alice.key)
    chromium.driver.get("about:blank")
    chromium.complaints()
    yield chromium
    assert chromium.complaints() == []
