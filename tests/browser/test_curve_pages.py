"""Charts of runs in the dashboard: axes, curves of any values, growth, and files."""

from __future__ import annotations

import itertools
import math
import random
from decimal import Decimal

import pytest
from selenium.webdriver.common.keys import Keys

from support.browser import Browser
from support.dashboard_data import Site
from tinsmith.runtime.sizes import format_bytes


def numbers_of_all_kinds() -> list[list[float]]:
    """Values of curves, in the hundreds of thousands and near 1e-300, equal, nearly equal, missing, not finite."""
    rng = random.Random(0)
    noise = [1.0, 1.0000001, 0.9999999, 1.0000002]
    series = [
        [],
        [0.0],
        [-0.0, 0.0],
        [3.0],
        [-3.0],
        [1.0] * 9,
        noise,
        [-noise_value for noise_value in noise],
        [math.nan],
        [math.inf],
    ]
    series += [[math.nan, 1.0, math.inf, -math.inf, 2.0], [1e308, -1e308], [1e308], [5e-324], [5e-324, 0.0], [0, 1e300]]
    series += [[0.1 + 0.2, 0.3], [1e15, 1e15 + 1], [2e9, 2e9 + 7], [-5.0, -4.0], [0.0, 1.0], [0.001] * 3, [1e-4, 2e-4]]
    for _ in range(300):
        size, width = 10.0 ** rng.randint(-300, 300), 10.0 ** rng.randint(-18, 2)
        middle = rng.choice((0.0, -1.0, 1.0)) * size
        series.append([middle + size * width * rng.uniform(-1, 1) for _ in range(rng.randint(1, 8))])
    return series


def modules(browser: Browser, names: str, body: str, *arguments: object) -> object:
    """Return the result of a function of the dashboard's modules; `done` receives it."""
    loads = ", ".join(f'import("/dashboard/{name}.js")' for name in names.split())
    head = f"const done = arguments[arguments.length - 1]; Promise.all([{loads}]).then(([{names.replace(' ', ', ')}])"
    script = head + " => {" + body + "}).catch((error) => done(String(error.stack)))"
    return browser.driver.execute_async_script(script, *arguments)


def test_an_axis_has_a_range_and_round_numbers_for_any_values(browser: Browser) -> None:
    browser.open("overview", "Overview")
    series = numbers_of_all_kinds()
    body = """
    done(arguments[0].map((texts) => {
      const exponent = scale.exponentOf(texts.map(Number));
      const values = scale.scaled(texts.map(Number), exponent);
      const found = values.filter((value) => value !== null);
      const range = scale.valueRange(...(found.length ? [Math.min(...found), Math.max(...found)] : [null, null]));
      const ticks = scale.ticksOf(...range, 5);
      return { exponent, values, range, ticks, labels: scale.labelsOf(ticks, exponent) };
    }))"""
    axes = modules(browser, "scale", body, [[repr(text) for text in row] for row in _to_literals(series)])
    assert isinstance(axes, list), axes
    for series_values, axis in zip(series, axes, strict=True):
        (low, high), ticks, labels = axis["range"], axis["ticks"], axis["labels"]
        finite = [value for value in axis["values"] if value is not None]
        assert len(finite) == sum(map(math.isfinite, series_values)), series_values
        assert math.isfinite(low) and low < high, series_values
        assert all(low <= value <= high for value in finite), series_values
        assert 2 <= len(ticks) <= 6 and all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks), series_values
        assert all(after > before for before, after in itertools.pairwise(ticks)), series_values
        assert len(set(labels)) == len(labels), (series_values, labels)
        step = Decimal(ticks[1]) - Decimal(ticks[0])
        for tick, label in zip(ticks, labels, strict=True):
            read = Decimal(label.replace(",", "")).scaleb(-axis["exponent"])
            assert abs(read - Decimal(tick)) < step / 100, (series_values, labels)


def _to_literals(series: list[list[float]]) -> list[list[object]]:
    """JavaScript literals of numbers, including infinities and NaN, which JSON lacks."""

    class Spelled(float):
        def __repr__(self) -> str:
            name = {math.inf: "Infinity", -math.inf: "-Infinity"}.get(float(self), float.__repr__(self))
            return "NaN" if math.isnan(self) else name

    return [[Spelled(value) for value in row] for row in series]


def test_steps_have_whole_numbers_wherever_a_run_begins(browser: Browser) -> None:
    browser.open("overview", "Overview")
    ends = [[0, 0], [7, 7], [1, 2], [0, 9], [3, 1000], [2**53 - 1, 2**53 - 1], [0, 2**53 - 1], [1795350324, 1795350400]]
    body = """
    const ranges = arguments[0].map((ends) => scale.stepRange(...ends));
    done(ranges.map((range) => [range, scale.ticksOf(...range, 8, true)]))"""
    axes = modules(browser, "scale", body, ends)
    assert isinstance(axes, list), axes
    for (first, last), ((low, high), ticks) in zip(ends, axes, strict=True):
        assert low <= first <= last <= high and low < high
        assert 1 <= len(ticks) <= 9 and all(float(tick).is_integer() for tick in ticks)
        assert ticks == sorted(set(ticks))


def test_curves_of_any_values_are_drawn(browser: Browser) -> None:
    browser.open("overview", "Overview")
    series = [[0.0], *numbers_of_all_kinds()[:40]]
    body = """
    const signal = new AbortController().signal;
    const main = document.getElementById("main");
    done(arguments[0].map((texts) => {
      const values = texts.map(Number).map((value) => (Number.isFinite(value) ? value : null));
      const made = charts.curve("a curve", "", signal);
      main.append(made.figure);
      made.update(values.map((_, index) => index + 1), values);
      made.update(values.map((_, index) => index + 1), values);
      const canvas = made.figure.querySelector("canvas");
      const pixels = canvas?.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      const drawn = pixels ? pixels.some((part, index) => index % 4 === 3 && part > 0) : made.figure.textContent;
      made.figure.remove();
      return drawn;
    }))"""
    drawn = modules(browser, "charts", body, [[repr(text) for text in row] for row in _to_literals(series)])
    assert isinstance(drawn, list), drawn
    assert [(curve, outcome) for curve, outcome in zip(series, drawn, strict=True) if outcome is not True] == []


def test_equal_values_have_a_curve_and_bars_of_strange_sizes_are_drawn(alice: Site, browser: Browser) -> None:
    noise = [1.0, 1.0000001192092896, 0.9999998807907104]
    for step, value in enumerate(noise, 1):
        body = {"model_id": alice.strange_run, "step": step, "metrics": {"ratio": value, "share": 0.0}}
        alice.http.post("log_metrics", json=body).raise_for_status()
    browser.open(f"runs/{alice.strange_run}", "Run ")
    browser.until(lambda: len(browser.all("figure.curve canvas")) == 2, "both curves")
    assert browser.all("main .warning") == []
    body = """
    const kinds = [{ name: "one", style: "s1" }, { name: "none", style: "s2" }];
    const bars = [null, NaN, -4, 0, 5].map((part) => ({ label: "at", parts: [part, 0] }));
    const figure = charts.stacked("bars", kinds, bars);
    done([figure.textContent, [...figure.querySelectorAll("rect.s1")].map((rect) => rect.getAttribute("height"))])"""
    text, heights = modules(browser, "charts", body)  # type: ignore[misc]
    assert heights == ["0", "0", "0", "0", "100"]
    assert "none" not in text, "a kind that no bar has"


def test_a_chart_that_fails_fails_alone(alice: Site, browser: Browser) -> None:
    browser.open("overview", "Overview")
    browser.until(lambda: browser.all(".cards .card"), "the page")
    browser.driver.execute_script("""
    const real = window.uPlot;
    let made = 0;
    window.uPlot = function (options, ...rest) {
      made += 1;
      if (made === 2) options.axes[1].splits = () => new Array(-1);
      if (made === 4) throw new Error("no room");
      return new real(options, ...rest);
    };
    """)
    browser.driver.execute_script("location.hash = arguments[0]", f"#/runs/{alice.run}")
    browser.until(lambda: len(browser.all("figure.curve")) > 5, "the curves")
    warnings = browser.until(lambda: browser.texts("figure.curve .warning"), "what failed")
    reasons = ["This chart cannot be drawn: Invalid array length", "This chart cannot be drawn: no room"]
    assert warnings == reasons
    assert len(browser.all("figure.curve canvas")) == len(browser.all("figure.curve")) - 2
    browser.until(lambda: browser.all("section tbody tr"), "the checkpoints")
    assert browser.text("h1").startswith("Run ")


def test_numbers_are_written_as_they_are_read(browser: Browser) -> None:
    browser.open("overview", "Overview")
    written = {
        "count": {0: "0", 1234: "1,234"},
        "number": {0: "0", 0.5: "0.5000", 2296.7: "2,296.7", 12345678: "12,345,678", 1e-7: "1.00e-7", 2e12: "2.00e12"},
        "percent": {0: "0 %", 1: "100 %", 0.0001: "under 0.1 %", 0.9999: "over 99.9 %", 0.5: "50 %", 0.025: "2.5 %"},
        "seconds": {0: "0 ms", 0.0001: "under 1 ms", 0.9996: "1.0 s", 45: "45 s", 90: "2 min", 7200: "2 h"},
        "bytes": {size: format_bytes(size) for size in (0, 1023, 1024, 1048575, 131 * 2**30 + 2**29, 2**52)},
    }
    calls = [[name, value, text] for name, texts in written.items() for value, text in texts.items()]
    body = """
    const written = arguments[0].map(([name, value, text]) => [name, value, text, format[name](value)]);
    const wrong = written.filter(([, , text, got]) => text !== got);
    const unknown = [null, undefined, NaN, Infinity, -Infinity];
    const dashes = arguments[1]
      .flatMap((name) => unknown.map((value) => [name, String(value), format[name](value)]))
      .filter(([, , got]) => got !== "-");
    const plurals = [format.counted(1, "token"), format.counted(0, "token"), format.counted(2, "batch", "batches")];
    done([wrong, dashes, plurals, format.number(-0)])"""
    plurals = ["1 token", "0 tokens", "2 batches"]
    names = ["count", "short", "some", "number", "percent", "seconds", "bytes", "ago", "when", "clock", "shortId"]
    assert modules(browser, "format", body, calls, names) == [[], [], plurals, "0"]


def test_curves_grow_on_an_open_page(alice: Site, browser: Browser) -> None:
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
    assert "values up to step" in (browser.attribute("figure.curve [role=img]", "aria-label") or "")
    browser.click("figure.curve summary")
    browser.until(
        lambda: len(browser.one("figure.curve").find_elements("css selector", "tbody tr")) == steps + 2, "the numbers"
    )


def test_a_band_smoothing_a_log_scale_and_files_of_the_curves(alice: Site, browser: Browser) -> None:
    points = [{"step": step, "metrics": {"spread": [0.0, float(step), 9.0]}} for step in range(1, 21)]
    alice.http.post("log_metrics", json={"model_id": alice.strange_run, "points": points}).raise_for_status()
    browser.open(f"runs/{alice.strange_run}", "Run ")
    names_script = "[...document.querySelectorAll('figure.curve .name')].map((one) => one.textContent)"
    browser.until(lambda: "spread" in browser.driver.execute_script(f"return {names_script}"), "the curve")
    assert not [name for name in browser.driver.execute_script(f"return {names_script}") if ":p" in name], "in its band"
    for selector in ("#log", "#time"):
        browser.click(selector)
        browser.until(lambda: browser.all("figure.curve canvas") and not browser.all("main .warning"), "the curves")
        browser.click(selector)
    browser.driver.execute_script(
        "const smooth = document.getElementById('smooth'); smooth.value = 0.9; smooth.dispatchEvent(new Event('input'))"
    )
    body = """
    const even = metrics.csvOf([
      { step: 1, source: "client", time: 0, metrics: { "a,b": 1, c: null } },
      { step: 1, source: "server", time: 2, metrics: { c: 3 } },
    ]);
    const hints = [["ppo_kl:mean"], ["ppo_kl:mean", "reward"], ["loss_per_token"]].map((names) =>
      metrics.rewardless(names.map((name) => ({ name }))));
    done([charts.smoothed([1, 1, null, 1], 0.9), charts.smoothed([0, 1], 0.5), even, hints])"""
    flat, half, text, hints = modules(browser, "charts metrics", body)  # type: ignore[misc]
    assert flat[2] is None and [share for share in flat if share] == pytest.approx([1, 1, 1])
    assert half == pytest.approx([0, 2 / 3])
    assert hints == [True, False, False], "only a run that learns from advantages is asked for its reward"
    assert text == 'step,time,"a,b",c (client),c (server)\n1,1970-01-01T00:00:02.000Z,1,,3\n', "a row for each step"


def test_many_metrics_stand_in_groups_that_open_and_a_search_finds_one(alice: Site, browser: Browser) -> None:
    """As many as a cookbook's run logs: the page stays short until a group is opened."""
    for prefix in ("time/part", "env/all/score"):
        metrics = {"reward": 1.0} | {f"{prefix}{index}": float(index) for index in range(40)}
        points = [{"step": step, "metrics": metrics} for step in (1, 2)]
        alice.http.post("log_metrics", json={"model_id": alice.strange_run, "points": points}).raise_for_status()
    browser.open(f"runs/{alice.strange_run}", "Run ")

    def titles() -> list[str]:
        return [title.text for title in browser.all("figure.curve .name") if title.is_displayed()]

    browser.until(lambda: "reward" in titles(), "the key metrics")
    key_titles = titles()
    assert not [title for title in key_titles if "part" in title or "score" in title]
    assert browser.driver.execute_script("return document.documentElement.scrollHeight") < 2500
    browser.click(".metric-group > summary", "time (")
    browser.until(lambda: len(titles()) == len(key_titles) + 40, "the group")
    assert len(browser.all("figure.curve canvas")) == len(titles()), "only these are drawn"
    browser.type("#search", "score7")
    browser.until(lambda: titles() == ["env/all/score7"], "the match")
    browser.type("#search", Keys.CONTROL, "a")
    browser.type("#search", Keys.DELETE)
    browser.until(lambda: len(titles()) == len(key_titles) + 40, "the groups as they were")
