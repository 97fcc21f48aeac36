"""The charts of a run in a browser: sections, pins, one chart enlarged, and their options in the address."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.browser import Browser
from support.dashboard_data import BASE, Site

STEPS = 5


@pytest.fixture(scope="module")
def cookbook_run(alice: Site) -> str:
    """A run with as many metrics as a cookbook's."""
    opened = alice.http.post("create_session", json={"tags": [], "display_name": "cookbook"}).raise_for_status().json()
    body = {"session_id": opened["session_id"], "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
    run = alice.http.post("create_model", json=body).raise_for_status().json()["model_id"]
    for names in (
        [f"time/part{index}" for index in range(20)] + [f"env/math/score{index}" for index in range(20)],
        [f"env/code/score{index}" for index in range(20)]
        + ["env/all/reward/total", "env/all/by_group/frac_mixed", "env/all/ac_tokens_per_turn", "optim/entropy"]
        + ["optim/kl_sample_train_v2", "progress/batch"],
    ):
        points = [
            {"step": step, "metrics": {name: step + index / 100 for index, name in enumerate(names)}}
            for step in range(1, STEPS + 1)
        ]
        alice.http.post("log_metrics", json={"model_id": run, "points": points}).raise_for_status()
    return run


@pytest.fixture
def page(cookbook_run: str, browser: Browser) -> Iterator[Browser]:
    browser.driver.execute_script("location.href === 'about:blank' || sessionStorage.removeItem('tinsmith.view')")
    browser.open(f"runs/{cookbook_run}", "Run ")
    browser.until(lambda: titles(browser), "the curves")
    yield browser


def titles(browser: Browser, section: str = "") -> list[str]:
    script = """
    return [...document.querySelectorAll("details.metric-group")]
      .filter((one) => one.open && one.querySelector("h2").textContent.startsWith(arguments[0]))
      .flatMap((one) => [...one.querySelectorAll("figure:not([hidden]) .name")].map((name) => name.textContent))"""
    return list(browser.driver.execute_script(script, section))


def reload(browser: Browser) -> None:
    address = browser.driver.current_url
    browser.driver.get("about:blank")
    browser.driver.get(address)
    browser.until(lambda: titles(browser), "the curves")


def test_key_metrics_are_those_of_the_kind_of_loss_and_the_others_stand_by_prefix(page: Browser, alice: Site) -> None:
    assert titles(page) == [
        "env/all/reward/total", "env/all/ac_tokens_per_turn", "env/all/by_group/frac_mixed", "optim/entropy",
        "optim/kl_sample_train_v2",
    ]  # fmt: skip
    sections = [text.partition(" (")[0] for text in page.texts(".metric-group h2")]
    assert sections == ["Key metrics", "env/code", "env/math", "progress", "time"]
    page.click(".metric-group > summary", "progress")
    page.until(lambda: titles(page, "progress") == ["progress/batch"], "the section")
    page.click(".metric-group > summary", "Key metrics")
    page.until(lambda: not titles(page, "Key"), "the section closed")
    reload(page)
    assert titles(page) == ["progress/batch"], "as in the address"
    page.open(f"runs/{alice.run}", "Run ")
    page.until(lambda: titles(page, "Key") == ["reward", "Loss per token", "Gradient norm"], "the curves")


def test_supervised_runs_begin_with_the_loss(page: Browser) -> None:
    script = """
    const done = arguments[arguments.length - 1];
    const metrics = { grad_norm: 1, learning_rate: 2, loss_per_token: 3, "test/nll": 4, tokens_per_second: 5, x: 6 };
    import("/dashboard/metrics.js").then(({ metricsOf }) => done(
      metricsOf([{ source: "server", step: 1, time: 1, metrics }])
        .filter((one) => one.group === "Key metrics").map((one) => one.name)))"""
    names = ["loss_per_token", "test/nll", "grad_norm", "learning_rate", "tokens_per_second"]
    assert page.driver.execute_async_script(script) == names


def test_pinned_charts_come_first_also_after_a_reload(page: Browser) -> None:
    page.click(".metric-group > summary", "time")
    page.click("button", "Pin time/part7")
    page.until(lambda: titles(page, "Pinned") == ["time/part7"], "the pinned chart")
    assert "time/part7" not in titles(page, "time")
    reload(page)
    assert titles(page)[0] == "time/part7" and page.one("figure.curve canvas")
    page.click("button", "Pin time/part7")
    page.until(lambda: not titles(page, "Pinned") and "time/part7" in titles(page, "time"), "its old place")


def test_one_chart_is_enlarged_with_its_own_scale_and_files(page: Browser, tmp_path: Path) -> None:
    allowed = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", allowed)
    page.click("button", "Enlarge env/all/reward/total")
    canvas = page.until(lambda: page.one("dialog.enlarged canvas"), "the chart")
    assert canvas.size["height"] > 300 and canvas.size["width"] > 700
    page.driver.execute_script(
        "const at = (id, value, name) => { const one = document.getElementById(id); one.value = value;"
        " one.dispatchEvent(new Event(name)); };"
        "at('chart-scale', 'log', 'change'); at('chart-smooth', 0.5, 'input')"
    )
    page.until(lambda: "charts=" in page.driver.current_url, "the address")
    page.click("dialog button", "as CSV")
    rows = list(csv.reader(page.until(lambda: finished(tmp_path, "*.csv"), "the file")[0].read_text().splitlines()))
    assert rows[0] == ["step", "env/all/reward/total"] and [row[0] for row in rows[1:]] == ["1", "2", "3", "4", "5"]
    assert float(rows[-1][1]) == pytest.approx(5.2), "as logged, not smoothed"
    page.click("dialog button", "as PNG")
    picture = page.until(lambda: finished(tmp_path, "*.png"), "the picture")[0].read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 2000
    page.click("dialog button", "Close")
    page.until(lambda: not page.all("dialog"), "its end")
    assert page.driver.switch_to.active_element.get_attribute("aria-label") == "Enlarge env/all/reward/total"
    reload(page)
    page.click("button", "Enlarge env/all/reward/total")
    page.until(lambda: page.all("dialog.enlarged canvas"), "the chart")
    values = "return ['chart-scale', 'chart-smooth'].map((id) => document.getElementById(id).value)"
    assert page.driver.execute_script(values) == ["log", "0.5"]
    page.click("dialog button", "Close")


def finished(directory: Path, pattern: str) -> list[Path]:
    """The files that the browser has written completely."""
    return [path for path in directory.glob(pattern) if path.stat().st_size]


def test_the_options_of_all_charts_are_in_the_address(page: Browser) -> None:
    page.click("#log")
    page.driver.execute_script(
        "const one = document.getElementById('smooth'); one.value = 0.6; one.dispatchEvent(new Event('input'))"
    )
    page.type("#search", "reward")
    page.until(lambda: titles(page) == ["env/all/reward/total"], "the match")
    page.driver.execute_script("sessionStorage.removeItem('tinsmith.view')")
    reload(page)
    assert titles(page) == ["env/all/reward/total"] and page.is_selected("#log")
    assert page.attribute("#smooth", "value") == "0.6"
    page.driver.execute_script("sessionStorage.removeItem('tinsmith.view')")


def test_filters_and_pages_of_other_lists_are_in_the_address(alice: Site, browser: Browser) -> None:
    browser.open("sessions", "Sessions")
    browser.type("#search", "quotes")
    browser.until(lambda: "search=quotes" in browser.driver.current_url, "the address")
    browser.driver.refresh()
    browser.until(lambda: len(browser.all("tbody tr")) == 1, "the session")
    browser.open("samples?sort=length&order=asc&text=hello", "Samples")
    browser.until(lambda: browser.all(".opener"), "the samples")
    assert browser.attribute("#search", "value") == "hello"
    browser.type("#sort", "Step")
    browser.until(lambda: "sort=step" in browser.driver.current_url, "the address")
    browser.driver.refresh()
    browser.until(lambda: browser.attribute("#sort", "value") == "step", "the order")
    assert browser.text(".filters button") == "Lowest first"
