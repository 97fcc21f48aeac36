"""The pages of checkpoints: the list, one checkpoint with its actions, and its merges and uploads."""

from __future__ import annotations

import tarfile
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from axe_core_python.selenium import Axe
from selenium.webdriver.common.keys import Keys
from tinker import types

from support import peft_adapters
from support.browser import Browser
from support.dashboard_data import Site
from support.dashboard_pages import find_overflows, rows


def test_a_checkpoint_is_published_kept_for_a_time_and_deleted(alice: Site, browser: Browser) -> None:
    path = alice.model.save_state("doomed").result().path

    def stored_checkpoints() -> dict[str, dict[str, object]]:
        answer = alice.http.get(f"training_runs/{alice.run}/checkpoints").json()
        return {str(checkpoint["tinker_path"]): checkpoint for checkpoint in answer["checkpoints"]}

    browser.open("checkpoints", "Checkpoints")
    browser.click("td a", "More of doomed")
    browser.until(lambda: "private" in browser.text("main .facts"), "the checkpoint")
    browser.click("button", "Publish doomed")
    browser.click("dialog button", "Publish")
    browser.until(lambda: "public" in browser.text("main .facts"), "its being public")
    assert stored_checkpoints()[path]["public"] is True
    browser.click("button", "Unpublish doomed")
    browser.click("dialog button", "Unpublish")
    browser.until(lambda: "private" in browser.text("main .facts"), "its being private")
    browser.click("button", "Expiry doomed")
    browser.until(lambda: browser.all("dialog[open]"), "the question")
    browser.driver.execute_script("document.querySelector('dialog #days').value = 2")
    browser.click("dialog button", "Set")
    browser.until(lambda: "never" not in browser.text("main .facts"), "the time")
    assert stored_checkpoints()[path]["expires_at"]
    browser.click("button", "Delete doomed")
    browser.click("dialog button", "Cancel")
    browser.until(lambda: not browser.all("dialog"), "the end of the question")
    assert browser.driver.switch_to.active_element.get_attribute("aria-label") == "Delete doomed"
    browser.click("button", "Delete doomed")
    browser.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    browser.until(lambda: not browser.all("dialog"), "the end of the question")
    assert path in stored_checkpoints()
    browser.click("button", "Delete doomed")
    browser.click("dialog button.danger", "Delete")
    browser.until(lambda: browser.text("h1") == "Checkpoints" and rows(browser), "the list")
    browser.until(lambda: not [row for row in rows(browser) if row.startswith("doomed")], "its end")
    assert path not in stored_checkpoints()


def test_a_checkpoint_shows_the_lines_that_continue_from_it_and_its_path_is_copied(
    alice: Site, browser: Browser
) -> None:
    training, sampling = alice.checkpoints
    browser.open(f"checkpoints/{training.removeprefix('tinker://')}", "Checkpoint first")
    browser.click("button", "Use first")
    browser.until(lambda: training in browser.text("dialog pre"), "the path")
    assert "create_training_client_from_state_with_optimizer" in browser.text("dialog pre")
    browser.click("dialog button", "Close")
    browser.until(lambda: not browser.all("dialog"), "its end")
    browser.open(f"checkpoints/{sampling.removeprefix('tinker://')}", "Checkpoint answers")
    browser.click("button", "Use answers")
    browser.until(lambda: f'create_sampling_client(model_path="{sampling}")' in browser.text("dialog pre"), "the lines")
    assert f'tinsmith checkpoints merge "{sampling}" merged' in browser.text("dialog")
    browser.click("dialog button", "Close")
    browser.open("checkpoints", "Checkpoints")
    browser.driver.execute_script("navigator.clipboard.writeText = async (text) => (window.copied = text)")
    browser.click("button", "Copy the path of first")
    browser.until(lambda: browser.driver.execute_script("return window.copied") == training, "the path")


def test_the_actions_of_the_list_are_whole_on_a_screen_of_1280_pixels(browser: Browser) -> None:
    emulated = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", emulated)
    try:
        browser.open("checkpoints", "Checkpoints")
        browser.until(lambda: rows(browser), "the checkpoints")
        script = "const box = document.querySelector('.scroll'); return box.scrollWidth - box.clientWidth"
        assert browser.driver.execute_script(script) == 0
        tops = {action.rect["y"] for action in browser.all("tbody tr:first-child .row-actions > a")}
        assert len(tops) == 1, "they stand in one line"
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_checkpoint_is_downloaded_by_a_link_without_the_key(alice: Site, browser: Browser) -> None:
    browser.open("checkpoints", "Checkpoints")
    browser.until(lambda: rows(browser), "the checkpoints")
    # A download keeps the page open. The test records the requested address; no file is written.
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "deny"})
    name = alice.checkpoints[0].rpartition("/")[2]
    browser.click("button", f"Download {name}")
    browser.until(lambda: "The download has started" in browser.text("#news"), "the news")
    run, kind, _ = alice.checkpoints[0].removeprefix("tinker://").split("/")
    link = alice.http.get(f"training_runs/{run}/checkpoints/{kind}/{name}/archive_link").json()["url"]
    assert httpx.get(link).headers["content-type"] == "application/x-tar"


def press(browser: Browser, label: str) -> None:
    """Press a button of a job, which a notice may cover for some seconds on a narrow screen."""
    script = 'document.querySelector(`.job-card button[aria-label="${arguments[0]}"]`).click()'
    browser.driver.execute_script(script, label)


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
def test_a_checkpoint_is_merged_watched_downloaded_and_computes_the_same(
    alice: Site, browser: Browser, tmp_path: Path, width: int, height: int
) -> None:
    page = f"checkpoints/{alice.checkpoints[0].removeprefix('tinker://')}"
    tokens = list(range(40, 60))
    sampler = alice.service.create_sampling_client(model_path=alice.checkpoints[0]).result()
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    emulated = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", emulated)
    downloads = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", downloads)
    try:
        browser.open(page, "Checkpoint first")
        browser.click("button", "Merge into the base model first")
        browser.until(lambda: browser.all("dialog[open] #dtype"), "the question")
        browser.driver.execute_script("document.querySelector('dialog #dtype').value = 'float32'")
        browser.click("dialog button", "Merge")
        browser.until(lambda: browser.all(".job-card progress"), "the progress")
        browser.driver.refresh()
        browser.until(lambda: "Merge in float32" in browser.text(".job-card h3"), "the job after a reload")
        browser.until(lambda: browser.text(".job-card .state") == "done", "its end")
        assert find_overflows(browser) == {}
        assert not Axe().run(browser.driver)["violations"]
        press(browser, "Download: Merge in float32")
        archive = tmp_path / f"{alice.run.replace(':', '_')}_weights_first_merged.tar"
        browser.until(archive.exists, "the archive")
        with tarfile.open(archive) as opened:
            opened.extractall(tmp_path / "model", filter="data")
        logits = peft_adapters.logits(tmp_path / "model", None, torch.tensor([tokens[:-1]])).double()
        merged = logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]].numpy()
        np.testing.assert_allclose(merged, np.array(scores[1:], float), rtol=1e-3, atol=1e-3)
        directory = Path(browser.text(".job-card .facts code"))
        press(browser, "Delete: Merge in float32")
        browser.click("dialog button.danger", "Delete")
        browser.until(lambda: "None yet." in browser.text("main"), "an empty list")
        assert not directory.exists()
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "deny"})


def test_an_upload_that_fails_says_why_and_starts_again_with_a_new_token(alice: Site, browser: Browser) -> None:
    browser.open(f"checkpoints/{alice.checkpoints[0].removeprefix('tinker://')}", "Checkpoint first")
    browser.click("button", "Upload to the hub first")
    browser.until(lambda: browser.all("dialog[open] #repository"), "the question")
    browser.type("dialog #repository", "someone/adapter")
    browser.driver.execute_script("document.querySelector('dialog #form').value = 'adapter'")
    browser.click("dialog button", "Upload")
    assert browser.all("dialog[open]"), "a token is required"
    browser.type("dialog #token", "hf_typed")
    browser.click("dialog button", "Upload")
    browser.until(lambda: browser.text(".job-card .state") == "failed", "its end")
    assert "HF_HUB_OFFLINE" in browser.text(".job-card .warning")
    browser.click(".job-card button", "Start again: Upload of the adapter to someone/adapter")
    browser.until(lambda: browser.all("dialog[open] #token"), "the question for a token")
    browser.click("dialog button", "Cancel")
    browser.until(lambda: not browser.all("dialog"), "the end of the question")
    browser.click(".job-card button", "Delete: Upload of the adapter")
    browser.click("dialog button.danger", "Delete")
    browser.until(lambda: "None yet." in browser.text("main"), "an empty list")
