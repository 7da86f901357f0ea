"""What is exported to speedscope: against its published schema, and opened by itself."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from browser.chromium import chromium
from ttftprof.model import Report
from ttftprof.reports import speedscope
from unit import report_samples as samples

RELEASE = Path(__file__).parents[2] / ".engine/speedscope/package/dist/release"
pytestmark = [pytest.mark.browser, pytest.mark.speedscope]


@pytest.fixture(scope="module")
def published() -> Any:
    return json.loads((RELEASE / "file-format-schema.json").read_text())


@given(report=samples.any_report())
@settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
def test_any_report_satisfies_the_published_schema(published: Any, report: Report) -> None:
    out = io.StringIO()
    speedscope.write(report, out)
    jsonschema.validate(json.loads(out.getvalue()), published)


def test_speedscope_opens_it_and_tells_the_same_request_and_times(tmp_path: Path) -> None:
    report = samples.cold()
    file = tmp_path / "cold.speedscope.json"
    with file.open("w") as out:
        speedscope.write(report, out)
    with chromium(tmp_path, "--allow-file-access-from-files") as driver:
        wait = WebDriverWait(driver, 10)
        driver.get((RELEASE / "index.html").as_uri())
        wait.until(lambda d: d.find_elements(By.CSS_SELECTOR, "input[type=file]"))
        driver.find_element(By.CSS_SELECTOR, "input[type=file]").send_keys(str(file))
        wait.until(lambda d: d.title.startswith("cold"))
        assert "request 1 model-b" in driver.find_element(By.TAG_NAME, "body").text
        buttons = driver.find_elements(By.XPATH, "//*[contains(text(), 'Sandwich')]")
        buttons[-1].click()
        wait.until(lambda d: "prefill" in d.find_element(By.TAG_NAME, "body").text)
        shown = driver.find_element(By.TAG_NAME, "body").text
    told = {name: float(ms) for ms, name in re.findall(r"([\d.]+)ms \(.*\n.*\n(\w+)", shown)}
    request = report.requests[0]
    expected = request.phase_totals() | request.activity_totals()
    assert told == {name: pytest.approx(ns / 1e6, abs=0.006) for name, ns in expected.items()}
