"""The page of the machine: charts of an hour, a day and 30 days, at two widths and in both themes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest

from support.browser import Browser
from support.dashboard_data import BASE, Site
from support.databases import database_url
from tinsmith.db.factory import open_database
from tinsmith.store.machine_history import MACHINE, MachineHistory, MachineWork

OTHER_SERVER = "there:1:/data"


@pytest.fixture(scope="module")
def history(alice: Site) -> Iterator[None]:
    """Twenty minutes of another server, with a pause of four, and an old hour."""
    database = open_database(database_url(alice.server.data_dir) or f"sqlite:///{alice.server.data_dir}/tinsmith.db")
    records, now = MachineHistory(database), time.time()
    for age in [
        *range(5 * 86400, 5 * 86400 - 3600, -600),
        *(age for age in range(1200, 0, -10) if not 400 < age < 640),
    ]:
        seconds = 600.0 if age > 86400 else 10.0
        wave = 1 + math.sin(age / 120)
        tokens = {"alice": (400 * wave * seconds, 30 * seconds), "bob": (200 * wave * seconds, 90 * seconds)}
        observed = MachineWork(seconds, seconds, 0.3 * seconds * wave, 0.2 * seconds, 0.02 * seconds, tenants=tokens)
        observed.trained_tokens, observed.sampled_tokens = 600 * wave * seconds, 120 * seconds
        observed.memory_byte_s = (6 + wave) * 2**30 * seconds
        machine = MachineWork(seconds, device_s=seconds, device_busy_s=0.4 * wave * seconds)
        records.add(OTHER_SERVER, now - age, {"org/large": observed, MACHINE: machine})
    yield
    database.close()


def resize(browser: Browser, width: int, height: int) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.fixture
def any_width(browser: Browser) -> Iterator[None]:
    yield
    browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def open_machine(browser: Browser, address: str = "machine") -> None:
    browser.open(address, "Machine")
    browser.until(lambda: len(browser.all("figure.curve canvas")) == 4, "the charts")


@pytest.mark.usefixtures("history", "any_width")
@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
def test_the_page_fits_and_is_drawn(browser: Browser, width: int, height: int) -> None:
    resize(browser, width, height)
    open_machine(browser)
    titles = browser.texts("figcaption .name")
    assert titles[:4] == [
        "Trained tokens per second", "Sampled tokens per second", "Memory of the engines (GiB)", "Utilisation (%)",
    ]  # fmt: skip
    assert "Time of org/large (%)" in titles
    assert "yours" in browser.texts("figure.curve")[1], "not all tenants' samples"
    wide = browser.driver.execute_script(
        "return [...document.querySelectorAll('main *')].filter((element) => !element.closest('.scroll, svg') && "
        "element.getBoundingClientRect().right > innerWidth + 1).map((element) => element.outerHTML.slice(0, 80))"
    )
    assert wide == []
    for theme in ("dark", "light"):
        browser.driver.execute_script("window.tinsmithTheme.set(arguments[0])", theme)
        colours = browser.driver.execute_script(
            "const style = getComputedStyle(document.querySelector('figcaption .name'));"
            "return [style.color, getComputedStyle(document.body).backgroundColor]"
        )
        assert colours[0] != colours[1]
    browser.driver.execute_script("window.tinsmithTheme.set('system')")


@pytest.mark.usefixtures("history")
def test_the_span_is_in_the_address_and_gaps_stay_gaps(browser: Browser) -> None:
    open_machine(browser, "machine?span=month")
    assert browser.attribute("#span", "value") == "month"
    browser.click("figure.curve summary")
    texts = browser.until(lambda: browser.texts("figure.curve table tbody tr"), "the numbers")
    assert all(text[2] == "-" for text in texts) and any(text.endswith(" -") for text in texts), texts[:5]
    browser.driver.execute_script(
        "const select = document.getElementById('span'); select.value = 'hour';"
        "select.dispatchEvent(new Event('change'))"
    )
    browser.until(lambda: "span=" not in browser.driver.current_url, "the default has no place in the address")
    browser.until(lambda: len(browser.all("figure.curve canvas")) == 4, "the charts")
    label = browser.attribute("figure.curve .plot", "aria-label") or ""
    assert "org/large" in label and BASE in label
    assert not browser.all("section table"), "only operators see tenants"
    open_machine(browser, "machine?span=never")
    assert browser.attribute("#span", "value") == "hour"


@pytest.mark.usefixtures("history")
def test_operators_see_the_tenants(browser: Browser) -> None:
    browser.open("overview", "Overview")
    browser.driver.execute_script(
        """
        const before = window.fetch;
        window.fetch = async (url, options) => {
          const answer = await before(url, options);
          if (!String(url).includes("/machine/history")) return answer;
          const shares = { trained_tokens: 1234.4, trained_share: 0.75, sampled_tokens: 5, sampled_share: 1 };
          const tenants = [{ tenant_id: "<b>bob", ...shares }];
          return Response.json({ ...(await answer.json()), is_operator: true, tenants });
        };
        location.hash = "#/machine";
        """
    )
    browser.until(lambda: browser.all("section tbody tr"), "the tenants")
    assert browser.texts("section tbody tr:first-child > *") == [
        "<b>bob",
        "1,234",
        "75 %",
        "5",
        "100 %",
    ]
    assert "yours" not in browser.texts("figure.curve")[1]


ONE_PERIOD = """
const before = window.fetch;
window.fetch = async (url, options) => {
  const answer = await before(url, options);
  if (!String(url).includes("/machine/history")) return answer;
  const history = await answer.json();
  const began_at = (Math.floor(history.now / history.step_s) - 1000) * history.step_s;
  const point = { began_at, trained_tokens: 12, sampled_tokens: 3, memory_bytes: 2 ** 30, training: 1, sampling: 0, loading: 0, idle: 0 };
  const model = { base_model: "org/new", trained_tokens: 4321, sampled_tokens: %s, points: [point] };
  return Response.json({ ...history, base_models: [model], device: [{ began_at, utilisation: 0.75 }] });
};
window.plots = [];
window.uPlot = new Proxy(window.uPlot, {
  construct(target, values) {
    const plot = new target(...values);
    window.plots.push(plot);
    return plot;
  },
});
location.hash = "#/machine?span=month";
"""  # noqa: E501
DOTS = """
return window.plots.map((plot) => {
  const index = plot.data[1].findIndex((value) => value !== null);
  const [x, y] = [plot.valToPos(plot.data[0][index], "x", true), plot.valToPos(plot.data[1][index], "y", true)];
  const [red, green, blue, alpha] = plot.ctx.getImageData(Math.round(x), Math.round(y), 1, 1).data;
  return alpha > 200 && Math.max(red, green, blue) - Math.min(red, green, blue) > 40;
});
"""


def show_one_period(browser: Browser, sampled: str) -> None:
    browser.open("overview", "Overview")
    browser.driver.execute_script(ONE_PERIOD % sampled)
    browser.until(lambda: len(browser.all("figure.curve canvas")) == 4, "the charts")


def test_a_single_period_is_a_dot_and_its_tokens_are_those_of_the_server(browser: Browser) -> None:
    show_one_period(browser, "7")
    browser.until(lambda: browser.driver.execute_script(DOTS) == [True] * 4, "a coloured dot in each chart")
    highest = browser.driver.execute_script("return plots.map((plot) => plot.scales.y.max * 10)")
    assert highest[3] == 100, "no share is above 100 %"
    assert highest[0] > 12, "other values have no largest one"
    assert "About 4.3k tokens were trained, and 7 sampled by you." in browser.text("main")
    assert all("willReadFrequently" in complaint for complaint in browser.complaints()), "pixels may be read again"


def test_unknown_samples_are_not_counted(browser: Browser) -> None:
    show_one_period(browser, "null")
    browser.until(lambda: "About 4.3k tokens were trained." in browser.text("main"), "the total")
