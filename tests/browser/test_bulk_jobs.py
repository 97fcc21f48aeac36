"""Bulk jobs in the dashboard while they run and after they ended."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest

from support.browser import Browser
from support.dashboard_data import Site
from support.dashboard_pages import CANNED_ANSWERS, rows


@pytest.fixture
def running(alice: Site) -> Iterator[int]:
    job_id = alice.long_job()
    yield job_id
    alice.http.post(f"batch/jobs/{job_id}/cancel")  # a job that stays would slow down all later tests


def test_bulk_jobs_show_progress_and_failures_and_can_be_cancelled(alice: Site, browser: Browser, running: int) -> None:
    browser.open("jobs", "Bulk jobs")
    browser.until(lambda: len(rows(browser)) == 2, "the jobs")
    assert browser.all("progress")
    browser.open(f"jobs/{alice.job_id}", "Job ")
    browser.until(lambda: "succeeded" in browser.text("main dl"), "the end")
    assert "greetings.jsonl" in browser.text("main")
    browser.until(lambda: [row for row in rows(browser) if row.startswith("4 ")], "the failed row")
    trace = browser.text("main details[open] pre")
    assert trace.startswith("row 4 is {") and "Traceback" in trace
    browser.open(f"jobs/{running}", "Job ")
    browser.until(lambda: [row for row in rows(browser) if " to " in row], "committed batches")
    browser.click("button.danger", "Cancel the job")
    browser.click("dialog button.danger", "Cancel the job")
    browser.until(lambda: "cancelled" in browser.text("main dl"), "the end")
    browser.click("button.primary", "Resume")
    browser.click("dialog button.primary", "Resume")
    browser.until(lambda: f"job {running}" in browser.text("main dl"), "the new job")
    new_id = browser.driver.current_url.rpartition("/")[2]
    alice.http.post(f"batch/jobs/{new_id}/cancel").raise_for_status()


JOB = {
    "job_id": 9, "name": "", "pool": "local", "weight": 1.0, "status": "FAILED", "total_rows": 100, "rows_ok": 61,
    "rows_failed": 3, "tokens_in": 0, "tokens_out": 0, "resume_from": None, "error": "Traceback:\n  File\nValueError",
    "created_at": 1.0, "started_at": 2.0, "ended_at": 3.0, "batch_total_batches": 4, "batch_completed_batches": 2,
    "outputs": [], "workers": [{"worker_id": "2-c1a0658c", "kind": "local", "state": "starting"}],
}  # fmt: skip


PARTS = [{"start_idx": start, "end_idx": start + 31, "parts": [{"path": f"part-{start}"}]} for start in (0, 32)]


def job_page_text(browser: Browser, job: dict[str, object], errors: Sequence[object], batches: Sequence[object]) -> str:
    """Return the text of a job's page for these answers of the server."""
    me = {"name": "alice", "key_id": 1}
    failures = {"/9/errors": {"errors": errors}, "/9/error_kinds": {"kinds": []}}
    answers = {"/me": me, "/jobs/9": job, "/9/partial": {"batches": batches}, **failures}
    script = {"source": CANNED_ANSWERS % json.dumps(answers)}
    added = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", script)["identifier"]
    try:
        browser.driver.get("about:blank")
        browser.open("jobs/9", "Job 9")
        browser.until(lambda: "Submitted" in browser.text("main"), "the job")
        # The answer for the parts arrives last and is drawn before the next timer.
        browser.until(lambda: browser.driver.execute_script("return window.asked.includes('/9/partial')"), "the parts")
        browser.driver.execute_async_script("setTimeout(arguments[0], 100)")
        return browser.text("main")
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", {"identifier": added})


def test_a_job_that_failed_has_its_rows_as_they_are_numbered_and_no_worker(browser: Browser) -> None:
    text = job_page_text(browser, JOB, [], PARTS)
    assert [row.split()[:3] for row in rows(browser)] == [["0", "to", "31"], ["32", "to", "63"]]
    assert "starting" not in text and "Workers" not in text, "it has ended"
    assert "Failed rows" not in text, "there is nothing to list"
    assert "61 of 100 done, 3 failed" in text and "The job has ended without output." in text
    assert "Traceback:\n  File\nValueError" in text, "on lines of its own"


def test_a_job_without_rows_has_no_sections_of_zeros(browser: Browser) -> None:
    counts = {"total_rows": 0, "rows_ok": 0, "rows_failed": 0, "batch_total_batches": 0, "batch_completed_batches": 0}
    outputs = [{"path": "none.jsonl", "rows": 0, "bytes": 0}]
    text = job_page_text(browser, JOB | counts | {"status": "SUCCEEDED", "error": None, "outputs": outputs}, [], [])
    assert browser.all("h2") and browser.texts("h2") == ["Outputs"]
    assert "no batches" in text and "not counted" not in text and "0 done" not in text


def test_a_job_that_runs_has_its_workers(browser: Browser) -> None:
    text = job_page_text(browser, JOB | {"status": "RUNNING", "error": None, "ended_at": None}, [], PARTS[:1])
    assert "2-c1a0658c" in text and "starting" in text
    assert "The outputs are published when all batches are done." in text
