"""The address that `track` prints, opened in Chromium on the server that the printed command starts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ppo_repro.commands.cli import _run
from ppo_repro.records import manifest
from ppo_repro.tracking.mlflow_copy import LOCAL_PAGES
from tests.support.browser import look
from tests.support.ranks import free_port

# the run's state, a parameter, a curve, a verdict, a table; the list of runs of the experiment
WORDS = ("Finished", "ppo.objective.clip_range", "iteration/reward_mean", "verdict.values_agree", "sequences (", "Runs")
PATIENCE = 240.0  # MLflow starts four processes, each of which imports it


@contextmanager
def served(command: list[str]) -> Iterator[None]:
    """A server in a group of its own, which its workers share, so that all of them end."""
    server = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def shown(browser: Any, address: str, words: list[str]) -> str:
    """The text of a page once all words are there, or at the end of the patience."""
    from selenium.common.exceptions import WebDriverException

    give_up, text = time.monotonic() + PATIENCE, ""
    while time.monotonic() < give_up and not all(word in text for word in words):
        try:
            if browser.current_url != address or not text:
                browser.get(address)
            time.sleep(1.0)
            text = browser.execute_script("return document.body.innerText")
        except WebDriverException:  # nothing listens yet
            time.sleep(1.0)
    return text


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.timeout(600)
def test_the_printed_address_shows_the_run(
    deterministic_run: Path,
    browser: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # as an activated environment does
    monkeypatch.chdir(tmp_path)  # the default store is a file in the current folder
    assert _run(["track", str(deterministic_run)]) == 0
    said = capsys.readouterr().out
    command = shlex.split(re.search(r"served by +(mlflow ui .+)", said)[1])  # type: ignore[index]
    address = re.search(r"MLflow +(http\S+)", said)[1]  # type: ignore[index]
    port = str(free_port())
    address = address.replace(LOCAL_PAGES, f"http://127.0.0.1:{port}")
    fingerprint = manifest.load(deterministic_run).fingerprint
    with served([*command, "--port", port, "--workers", "1"]):
        look(browser, width=1400)
        text = shown(browser, address, [*WORDS, deterministic_run.name, fingerprint[:12]])
        browser.save_screenshot(str(tmp_path / "page.png"))
    missing = [word for word in (*WORDS, deterministic_run.name, fingerprint[:12]) if word not in text]
    assert not missing, text
