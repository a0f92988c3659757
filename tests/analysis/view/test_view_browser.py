"""The view in a real browser: search, filters, tokens by keyboard, hostile texts, a run that is killed and resumed."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from ppo_repro.analysis.view import index
from ppo_repro.records import manifest
from ppo_repro.records.label import Label, write_label
from tests.analysis.report.hostile_run import make_hostile_run
from tests.support.browser import find, look, press
from tests.support.interrupts import started
from tests.support.paths import TINY
from tests.support.view import served
from tests.support.waiting import until

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def text(browser: Any, selector: str) -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0]).textContent", selector))


def shown(browser: Any) -> list[str]:
    script = "return [...document.querySelectorAll('#list tbody tr')].map(r => r.cells[1].textContent)"
    return list(browser.execute_script(script))


def test_search_filter_tokens_and_diff_by_keyboard_alone(browser: Any, native_run: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    with served(native_run) as server:
        look(browser)
        browser.get_log("browser")
        browser.get(server.address)
        until(lambda: len(shown(browser)) > 5, "responses")
        whole = text(browser, "#summary")
        press(browser, "/", "1")
        until(lambda: text(browser, "#summary") != whole, "the search")
        assert all("1" in response for response in shown(browser))
        assert find(browser, "#list mark"), "what was searched for is marked"
        press(browser, Keys.ESCAPE)
        assert browser.switch_to.active_element.tag_name == "tr"
        press(browser, Keys.ARROW_DOWN)
        until(lambda: find(browser, "#response:not([hidden]) [role=option]"), "the tokens")
        first = text(browser, "#title")
        press(browser, "m", "j")
        until(lambda: text(browser, "#title") != first, "the next response")
        press(browser, Keys.ENTER)
        until(lambda: browser.switch_to.active_element.get_attribute("id") == "title", "the response")
        for _ in range(12):
            press(browser, Keys.TAB)
            if browser.switch_to.active_element.get_attribute("id") == "diff":
                break
        press(browser, Keys.ENTER)
        until(lambda: find(browser, "#difference:not([hidden]) span, #difference:not([hidden]) ins"), "the diff")
        for _ in range(20):
            press(browser, Keys.TAB)
            if browser.switch_to.active_element.get_attribute("role") == "option":
                break
        press(browser, Keys.END)
        assert browser.switch_to.active_element.text.startswith("⟨end")
        (score,) = find(browser, "[name=score_max]")
        score.send_keys("0")
        until(
            lambda: "wrong" in text(browser, "#list tbody") and "right" not in text(browser, "#list tbody"), "a filter"
        )
        score.send_keys("x")
        until(lambda: "score_max = 0x: must be a finite number" in text(browser, "#error"), "one line about a mistake")
        assert "score_max" in browser.current_url, "the address holds the query"
        found = [entry for entry in browser.get_log("browser") if "status of 400" not in entry["message"]]
        assert found == []


def test_the_page_says_that_its_rows_may_be_old(
    browser: Any, native_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(target: Path, name: str) -> None:
        raise PermissionError(13, "Permission denied")

    with served(native_run) as server:
        browser.get(server.address)
        until(lambda: shown(browser), "responses")
        with monkeypatch.context() as broken:
            broken.setattr(index, "folders_with", fail)
            until(lambda: "the responses may be old: PermissionError" in text(browser, "#error"), "the error")
        until(lambda: text(browser, "#error") == "", "its end")


def test_exactly_what_was_searched_for_is_marked(browser: Any, native_run: Path) -> None:
    texts = [
        ("İİ one Word, another WORD", "word", None),  # lower case makes it longer
        ("1+1=2 or 1.1", "1+1", None),
        ("a\n(b) [c] \\d", "(b) [c] \\", 40),
        ("x" * 60 + "y", "y", 40),
        ("nothing", "", None),
    ]
    script = "return putHighlighted(make('p'), ...arguments[0]).innerHTML"
    with served(native_run) as server:
        look(browser)
        browser.get(server.address)
        assert [browser.execute_script(script, text) for text in texts] == [
            "İİ one <mark>Word</mark>, another <mark>WORD</mark>",
            "<mark>1+1</mark>=2 or 1.1",
            "a↵<mark>(b) [c] \\</mark>d",
            "… " + "x" * 40 + "<mark>y</mark>",
            "nothing",
        ]


# controls that are below their labels instead of beside them
BELOW = """
  const box = (node) => node.getBoundingClientRect();
  const pairs = [...document.querySelectorAll(".control label")].map((label) => [label, label.nextElementSibling]);
  return pairs.filter(([a, b]) => box(a).height > 30 || box(b).top > box(a).bottom).map(([a]) => a.textContent)"""


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1400, 800)])
def test_labels_scores_and_the_opened_response_are_in_view(
    browser: Any, native_run: Path, tmp_path: Path, width: int, height: int
) -> None:
    folder = tmp_path / "a-folder-with-a-name-that-is-long-enough-to-fill-the-line-of-a-telephone"
    run = Path(shutil.copytree(native_run, folder / native_run.name))
    write_label(run, Label(name="plain torch", tags=("control",), notes="why so many?"))
    with served(folder) as server:
        look(browser, width=width, height=height)
        browser.get(server.address)
        until(lambda: len(shown(browser)) > 5, "responses")
        assert browser.execute_script(BELOW) == []
        score = "[...document.querySelectorAll('#list tbody tr:first-child .number')][0].getBoundingClientRect().right"
        assert 0 < browser.execute_script(f"return {score}") <= width
        assert "plain torch (" in text(browser, "#run")
        browser.execute_script("document.querySelectorAll('#list tbody tr')[4].click()")
        until(lambda: find(browser, "#response:not([hidden]) .card.this"), "the response")
        assert text(browser, "#title").startswith("plain torch: iteration ")
        assert "control; why so many?" in text(browser, "#about")
        for selector in ("#list tr[aria-selected=true]", ".card.this .text"):
            box = f"document.querySelector('{selector}').getBoundingClientRect()"
            top, bottom = browser.execute_script(f"const b = {box}; return [b.top, b.bottom]")
            assert top >= 0
            assert bottom <= height, selector


CHANGED = "form.elements.run.dispatchEvent(new Event('input', { bubbles: true }))"


def chosen(browser: Any) -> str:
    return str(browser.execute_script("return form.elements.run.value"))


def test_the_run_of_the_address_is_chosen_until_the_reader_chooses(
    browser: Any, native_run: Path, tmp_path: Path
) -> None:
    runs = [Path(shutil.copytree(native_run, tmp_path / name)) for name in "ab"]
    with served(tmp_path) as server:
        look(browser)
        browser.get(f"{server.address}&run=1")
        until(lambda: shown(browser), "responses")
        assert chosen(browser) == "1"
        write_label(runs[0], Label(name="first", tags=(), notes=""))
        until(lambda: "first" in text(browser, "#run"), "the label")
        assert chosen(browser) == "1"
        browser.execute_script("form.elements.run.value = ''; " + CHANGED)
        until(lambda: "run=" not in browser.current_url, "the search", 10)
        write_label(runs[0], Label(name="second", tags=(), notes=""))
        until(lambda: "second" in text(browser, "#run"), "the next label")
        assert chosen(browser) == ""


def test_the_line_about_the_responses_has_the_right_share_if_each_of_their_runs_is_judged(
    browser: Any, native_run: Path, tmp_path: Path
) -> None:
    for name in "ab":
        shutil.copytree(native_run, tmp_path / name)
    with served(tmp_path) as server:
        server.index.runs[1].judged = "none"
        for run, is_judged in (("", False), ("0", True), ("1", False)):
            look(browser)
            browser.get(f"{server.address}&run={run}")
            until(lambda: " of " in text(browser, "#summary"), "responses")
            until(lambda run=run: chosen(browser) == run, "the run")  # type: ignore[misc]
            assert ("% right" in text(browser, "#summary")) is is_judged


def test_a_refused_token_is_not_called_an_ended_server(browser: Any, native_run: Path) -> None:
    with served(native_run) as server:
        look(browser)
        browser.get(server.address)
        until(lambda: shown(browser), "responses")
        old_token = "const ask = fetch; window.fetch = (url, how) => ask(url.replace(/token=.*/, 'token=old'), how)"
        browser.execute_script(old_token)
        until(
            lambda: "403: open the address that `ppo-repro view` printed" in text(browser, "#error"), "the refusal", 10
        )
        browser.get_log("browser")


def test_a_response_that_is_gone_leaves_the_search_as_it_is(browser: Any, native_run: Path) -> None:
    with served(native_run) as server:
        look(browser)
        browser.get(server.address)
        until(lambda: len(shown(browser)) > 5, "responses")
        browser.execute_script("document.querySelectorAll('#list tbody tr')[0].click()")
        until(lambda: find(browser, "#response:not([hidden]) .card.this"), "the response")
        browser.get_log("browser")
        address = browser.current_url
        browser.execute_script("state.chosen = { run: 99, iteration: 0, sequence: 0 }; at('same-prompt').click()")
        until(lambda: "run = 99" in text(browser, "#error"), "one line about the response")
        assert browser.current_url == address
        assert [entry for entry in browser.get_log("browser") if "status of 400" not in entry["message"]] == []


@pytest.mark.parametrize("framed", [True, False])
def test_no_page_can_frame_the_view(browser: Any, native_run: Path, tmp_path: Path, framed: bool) -> None:
    """Control: a page that allows it is framed."""
    with served(native_run) as server:
        (tmp_path / "inside.html").write_text("<p id=summary>free</p>")
        address = server.address if framed else (tmp_path / "inside.html").as_uri()
        (tmp_path / "outside.html").write_text(f'<iframe src="{address}"></iframe>')
        look(browser)
        browser.get((tmp_path / "outside.html").as_uri())
        browser.switch_to.frame(0)
        assert bool(find(browser, "#summary")) is not framed
        browser.switch_to.default_content()
        browser.get_log("browser")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hostile_texts_do_nothing_and_the_page_fits(
    browser: Any, native_run: Path, tmp_path: Path, scheme: str
) -> None:
    with served(make_hostile_run(native_run, tmp_path / "run")) as server:
        look(browser, scheme, 390)
        browser.get("about:blank")  # the page before asks its ended server for news
        browser.get_log("browser")
        browser.get(server.address)
        until(lambda: len(shown(browser)), "responses")
        for i in range(8):
            before = text(browser, "#title")
            browser.execute_script("document.querySelectorAll('#list tbody tr')[arguments[0]].click()", i)
            until(lambda before=before: text(browser, "#title") != before, "a response")  # type: ignore[misc]
        assert browser.execute_script("return window.hacked") is None
        assert find(browser, "main img, main b, main script, #response script") == []
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        addresses = "return performance.getEntriesByType('resource').map(e => new URL(e.name).hostname)"
        assert set(browser.execute_script(addresses)) == {"127.0.0.1"}
        assert browser.get_log("browser") == []


def test_a_run_is_followed_through_its_death_and_its_second_life(browser: Any, tmp_path: Path) -> None:
    with served(tmp_path) as server:
        look(browser)
        browser.get(server.address)
        until(lambda: "No response matches" in text(browser, "#summary"), "an empty page")
        process = started("run", TINY, "--set", "ppo.iterations=100", "--out", tmp_path)
        try:
            until(lambda: " of " in text(browser, "#summary"), "the first responses", 120)
            assert "running" in text(browser, "#runs")
            before = text(browser, "#summary")
            until(lambda: text(browser, "#summary") != before, "more of them")
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        until(lambda: "1 killed" in text(browser, "#runs"), "that nobody writes the run")
        (run,) = (path.parent for path in tmp_path.glob("*/*/manifest.json"))
        assert manifest.load_head(run).num_iterations < 100, "it was killed in time"
        resumed = started("resume", run)
        _, err = resumed.communicate(timeout=200)
        assert resumed.returncode == 0, err
        until(lambda: "1 complete" in text(browser, "#runs") and "100 of 100" in text(browser, "#runs"), "the rest")
        total = manifest.load(run).iterations
        responses = sum(entry.tables["sequences"].rows for entry in total)
        until(lambda: f" of {responses:,} responses" in text(browser, "#summary"), "the responses of the rest")
