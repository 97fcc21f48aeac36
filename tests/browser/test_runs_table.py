"""The table of runs in a browser: columns, filters, groups, notes and addresses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from support.browser import Browser
from support.dashboard_data import Site
from support.databases import database_url
from tinsmith.db.factory import open_database
from tinsmith.db.schema import CURVE_POINTS, MODELS

SWEEP = {
    f"sweep:train:{index}": (lr, seed)
    for index, (lr, seed) in enumerate((lr, s) for lr in (1e-4, 0.1) for s in range(3))
}


@pytest.fixture(scope="module")
def sweep(alice: Site) -> Iterator[None]:
    """Runs of two learning rates with three seeds; the reward is the seed + 10 lr."""
    data_dir = alice.server.data_dir
    database = open_database(database_url(data_dir) or f"sqlite:///{data_dir / 'tinsmith.db'}")
    with database.write() as connection:
        row = dict(connection.execute(sa.select(MODELS).where(MODELS.c.model_id == alice.run)).one()._mapping)
        for run, (lr, seed) in SWEEP.items():
            metadata = {"name": f"math-{lr:g}-{seed}", "lr": f"{lr:g}", "seed": str(seed), "tags": "sweep"}
            connection.execute(MODELS.insert(), row | {"model_id": run, "user_metadata": metadata})
    for run, (lr, seed) in SWEEP.items():
        metrics = {"env/all/reward/total": seed + 10 * lr, "optim/entropy": 1.5}
        alice.http.post("log_metrics", json={"model_id": run, "step": 7, "metrics": metrics}).raise_for_status()
    yield
    with database.write() as connection:
        connection.execute(MODELS.delete().where(MODELS.c.model_id.startswith("sweep:")))
        connection.execute(CURVE_POINTS.delete().where(CURVE_POINTS.c.model_id.startswith("sweep:")))
    database.close()


def first_column(browser: Browser) -> list[str]:
    return browser.texts("tbody th a")


def heads(browser: Browser) -> list[str]:
    return [head.text.strip(" \u2191\u2193") for head in browser.all("thead th")]


def test_a_filter_an_order_and_columns_are_in_the_address_and_come_back(sweep: None, browser: Browser) -> None:
    browser.open("runs", "Runs")
    browser.until(lambda: len(first_column(browser)) >= 6, "the runs")
    browser.type("#filter", "lr > 1e-3 and seed != 1 and tag = sweep")
    browser.until(lambda: sorted(first_column(browser)) == ["math-0.1-0", "math-0.1-2"], "the runs that fit")
    browser.click("button", "Columns")
    browser.until(lambda: browser.all("dialog .choices label"), "the names")
    browser.type("#find-column", "im/entropy")
    visible = [label for label in browser.all("dialog .choices label") if label.is_displayed()]
    assert [label.text for label in visible] == ["optim/entropy"]
    visible[0].click()
    browser.type("#find-column", Keys.CONTROL, "a")
    browser.type("#find-column", Keys.DELETE)
    for name in ("reward", "curve"):
        browser.click(f"dialog input[value='{name}']")
    browser.click("dialog button", "Show")
    browser.until(
        lambda: heads(browser)[-2:] == ["optim/entropy", "Reward"] and "Curve" not in heads(browser), "columns"
    )
    browser.click("button.sort", "Reward")
    browser.until(lambda: first_column(browser) == ["math-0.1-2", "math-0.1-0"], "the best first")
    browser.click("button.sort", "Reward")
    browser.until(lambda: first_column(browser) == ["math-0.1-0", "math-0.1-2"], "the best last")
    address, columns = browser.driver.current_url, heads(browser)
    browser.driver.get("about:blank")
    browser.driver.get(address)
    browser.until(lambda: first_column(browser) == ["math-0.1-0", "math-0.1-2"], "the same runs")
    assert heads(browser) == columns
    assert browser.attribute("#filter", "value") == "lr > 1e-3 and seed != 1 and tag = sweep"


def test_seeds_are_grouped_with_mean_and_deviation(sweep: None, browser: Browser) -> None:
    browser.open("runs?filter=tag+%3D+sweep&columns=reward,step&sort=reward", "Runs")
    browser.until(lambda: len(first_column(browser)) == 6, "the runs")
    browser.until(
        lambda: "lr" in [option.get_attribute("value") for option in browser.all("#group option")], "settings"
    )
    Select(browser.one("#group")).select_by_value("lr")
    browser.until(lambda: first_column(browser) == ["0.1", "0.0001"], "the groups, best first")
    best = browser.texts("tbody tr")[0].split("\n")[0]
    assert best.split()[:2] == ["0.1", "3"] and "2 \u00b1 1" in best
    assert "group=lr" in browser.driver.current_url
    browser.click("tbody a", "0.1")
    browser.until(lambda: browser.text("h1") == "Comparison of 3 runs", "the runs of the group")


def test_a_mistake_in_a_filter_is_shown_with_its_place_until_it_is_corrected(sweep: None, browser: Browser) -> None:
    browser.open("runs?filter=tag+%3D", "Runs")
    browser.until(lambda: "at character 6" in browser.text("main .warning"), "the place")
    browser.type("#filter", " sweep")
    browser.until(lambda: len(first_column(browser)) == 6, "the runs")
    assert not browser.is_displayed("main .warning")
    browser.type("#filter", " and lrr > 1")
    browser.until(lambda: 'No run has "lrr"' in browser.text("main"), "the name that is wrong")
    assert all("400" in complaint for complaint in browser.complaints())


def test_notes_of_a_run_are_kept(alice: Site, browser: Browser) -> None:
    browser.open(f"runs/{alice.run}", "Run ")
    browser.click("button", "Edit the name")
    browser.type("#notes", "Baseline.\nSecond line")
    browser.click("dialog button", "Save")
    browser.until(lambda: browser.text("pre.notes") == "Baseline.\nSecond line", "the notes")
    try:
        browser.open("runs", "Runs")
        browser.type("#search", "second line")
        browser.until(lambda: [row for row in browser.all("tbody tr") if "notes" in row.text], "the run by its notes")
    finally:
        alice.http.put(f"dashboard/runs/{alice.run}", json={"notes": ""}).raise_for_status()


def test_the_usual_columns_fit_a_screen(sweep: None, browser: Browser) -> None:
    browser.driver.set_window_size(1440, 900)
    try:
        browser.open("runs", "Runs")
        browser.until(lambda: len(first_column(browser)) >= 6 and browser.all(".spark"), "the runs")
        clipped = "const one = document.querySelector('main .scroll'); return one.scrollWidth - one.clientWidth"
        assert browser.driver.execute_script(clipped) == 0
    finally:
        browser.driver.set_window_size(1280, 900)
