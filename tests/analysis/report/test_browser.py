"""The report in a real browser: no error, token view by pointer and by key, hostile texts, light and dark, narrow."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ppo_repro.analysis.report.build import write_report
from ppo_repro.analysis.report.run_page import RESPONSES, run_page
from tests.analysis.report.hostile_run import make_hostile_run
from tests.support.browser import find, look, opened, press
from tests.support.control import run as control_run
from tests.support.control import small_control
from tests.support.html_page import embedded, tags, tree
from tests.support.synthetic_run import cut_back

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="session")
def pages(deterministic_run: Path, native_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of six kinds of run and of a folder of runs."""
    folder = tmp_path_factory.mktemp("pages")
    runs = {
        "deterministic": deterministic_run,
        "native": native_run,
        "hostile": make_hostile_run(native_run, folder / "grid" / "run"),
    }
    found = {name: folder / f"{name}.html" for name in runs}
    for name, run in runs.items():
        found[name].write_text(run_page(run, 200 if name == "hostile" else RESPONSES))
    cut = folder / "cut" / deterministic_run.name
    shutil.copytree(deterministic_run, cut)
    cut_back(cut, 2, "interrupted")
    control = control_run(small_control("ppo.iterations=2"), folder / "control")[0]
    others = {"grid": [folder / "grid"], "cut": [cut], "control": [control], "pair": [deterministic_run, native_run]}
    more = {name: write_report(runs, folder / f"{name}.html")[0] for name, runs in others.items()}
    return {**found, **more}


def one(browser: Any, selector: str) -> Any:
    (found,) = find(browser, selector)
    return found


def values(browser: Any) -> dict[str, str]:
    """The panel beside the tokens."""
    rows = "[...document.querySelectorAll('#tv-detail tr')]"
    script = f"return {rows}.map(r => [r.cells[0].textContent, r.cells[1].textContent])"
    return dict(browser.execute_script(script))


NAMES = ["deterministic", "native", "hostile", "grid", "cut", "control", "pair"]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_opens_without_a_word_on_the_console_and_loads_nothing(
    browser: Any, pages: dict[str, Path], name: str
) -> None:
    opened(browser, pages[name])
    assert browser.get_log("browser") == []
    assert browser.execute_script("return window.hacked") is None
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    # a parser that had to mend something would have moved, added or dropped a tag
    text = pages[name].read_text()
    mended = "new DOMParser().parseFromString(arguments[0], 'text/html')"
    script = f"return [...{mended}.querySelectorAll('*')].map(n => n.localName)"
    assert browser.execute_script(script, text) == tags(tree(text))


def test_tokens_by_pointer(browser: Any, pages: dict[str, Path]) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    opened(browser, pages["deterministic"])
    assert one(browser, "#tv-column").get_attribute("value") == "advantages", "there is no mismatch to see"
    opened(browser, pages["native"])
    assert one(browser, "#tv-column").get_attribute("value") == "delta"
    assert find(browser, "#tv-tokens [class*='token p'], #tv-tokens [class*='token n']"), "some token has a colour"
    data = embedded(pages["native"].read_text())
    shown = max(data["responses"], key=lambda r: r["mismatch"])
    assert f"iteration {shown['iteration']}, sequence {shown['sequence']};" in one(browser, "#tv-about").text
    tokens = find(browser, "#tv-tokens [role=option]")
    assert len(tokens) == len(shown["ids"])
    tokens[0].click()
    assert browser.switch_to.active_element == tokens[0]
    assert tokens[0].get_attribute("aria-selected") == "true"
    assert values(browser)["token id"] == str(shown["ids"][0])
    assert float(values(browser)["entropy [nats]"]) == pytest.approx(shown["columns"]["entropies"][0], rel=1e-5)
    ActionChains(browser).move_to_element(tokens[-1]).perform()
    assert values(browser)["token id"] == str(shown["ids"][-1]), "pointing is enough"
    assert tokens[0].get_attribute("aria-selected") == "true"
    before = one(browser, "#tv-about").text
    one(browser, "#tv-next").click()
    assert one(browser, "#tv-about").text != before
    one(browser, "#tv-previous").click()
    assert one(browser, "#tv-about").text == before
    for button in find(browser, "#tv-jumps button"):
        button.click()
        assert button.text.lower() in one(browser, "#tv-about").text
    assert browser.get_log("browser") == []


LONG = """
  const data = JSON.parse(at("token-data").textContent);
  const response = data.responses.find((found) => found.why.includes("mismatch"));
  const repeated = (values, value) => [...Array(arguments[0]).fill(value), ...values];
  for (const name of ["texts", "ids", "special"]) response[name] = repeated(response[name], response[name][0]);
  for (const key of Object.keys(response.columns)) response.columns[key] = repeated(response.columns[key], null);
  tokenView.load({ ...data, responses: [response] });
  return [...document.querySelectorAll("#tv-tokens [role=option]")].findIndex((token) => token.tabIndex === 0)"""


def test_the_largest_mismatch_of_a_response_of_any_length_is_found(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["native"])
    short, long = (browser.execute_script(LONG, more) for more in (0, 150_000))
    assert long == 150_000 + short


CUT = """
  const box = (node) => node.getBoundingClientRect();
  const within = (a, b) => a.left > b.left - 1 && a.right < b.right + 1 && a.top > b.top - 1 && a.bottom < b.bottom + 1;
  const texts = [...document.querySelectorAll("svg.chart text")].filter((t) => t.textContent);
  const cut = texts.filter((t) => !within(box(t), box(t.closest("svg"))));
  return [texts.length, cut.map((t) => t.textContent)]"""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_is_never_wider_than_the_window(browser: Any, pages: dict[str, Path], name: str, width: int) -> None:
    opened(browser, pages[name])
    look(browser, width=width)
    browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    texts, cut = browser.execute_script(CUT)
    assert texts > 20, "a label of a chart is cut"
    assert cut == [], "a label of a chart is cut"


@pytest.mark.parametrize("name", ["deterministic", "grid", "control", "pair"])
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1400, 800)])
def test_the_first_screen_has_a_chart_and_no_card_is_cut(
    browser: Any, pages: dict[str, Path], name: str, width: int, height: int
) -> None:
    opened(browser, pages[name])
    look(browser, width=width, height=height)
    assert browser.execute_script("return document.querySelector('h1').getBoundingClientRect().top") > 10
    bottom = "return document.querySelector('svg.chart').getBoundingClientRect().bottom"
    assert browser.execute_script(bottom) <= height
    cut = "[...document.querySelectorAll('.answer .scroll')].filter(n => n.scrollWidth > n.clientWidth + 1)"
    assert browser.execute_script(f"return {cut}.map(n => n.textContent.slice(0, 80))") == []
    browser.execute_script("document.querySelector('.answer').style.paddingTop = '900px'")
    assert browser.execute_script(bottom) > height, "the control"


# words of letters alone that stand on two lines, and texts whose contrast with their background is below 4.5
BROKEN = """
  const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  const found = [];
  while (walk.nextNode()) {
    const node = walk.currentNode;
    if (node.parentElement.closest("code, pre, svg, script, style, bdi, .unseen")) continue;
    for (const word of node.data.matchAll(/[A-Za-z]{3,30}/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      if (range.getClientRects().length > 1) found.push(word[0]);
    }
  }
  return found"""
FAINT = """
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, w, i) =>
    sum + w * (c[i] / 255 <= 0.04045 ? c[i] / 255 / 12.92 : ((c[i] / 255 + 0.055) / 1.055) ** 2.4), 0);
  const ground = (node) => {
    const colour = parts(getComputedStyle(node).backgroundColor);
    return colour.length < 4 || colour[3] === 1 || !node.parentElement ? colour : ground(node.parentElement);
  };
  const found = [];
  const texts = "main p, main li, th, td, dt, dd, h2, h3, figcaption, summary, a, button";
  for (const node of document.querySelectorAll(texts)) {
    if (!node.getClientRects().length || node.disabled) continue;
    const both = [light(parts(getComputedStyle(node).color)), light(ground(node))].sort((a, b) => b - a);
    if ((both[0] + 0.05) / (both[1] + 0.05) < 4.5) found.push(node.tagName + " " + node.textContent.slice(0, 40));
  }
  return found"""


@pytest.mark.parametrize("name", ["native", "grid", "pair"])
def test_no_word_is_broken_and_no_text_is_faint(browser: Any, pages: dict[str, Path], name: str) -> None:
    opened(browser, pages[name])
    for width, scheme in ((1400, "light"), (390, "dark")):
        look(browser, scheme, width)
        assert browser.execute_script(BROKEN) == [], (width, scheme)
        assert browser.execute_script(FAINT) == [], (width, scheme)
    browser.execute_script("document.querySelector('main h2').style.cssText = 'width: 20px; overflow-wrap: anywhere'")
    browser.execute_script("document.querySelector('main h2').style.color = '#666'")
    assert browser.execute_script(BROKEN), "the control"
    assert browser.execute_script(FAINT), "the control"


def test_a_chart_says_its_values_where_the_pointer_is(browser: Any, pages: dict[str, Path]) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    opened(browser, pages["native"])
    for chart in find(browser, "svg[data-hover]"):
        data = json.loads(chart.get_attribute("data-hover"))
        ActionChains(browser).move_to_element(chart).perform()
        tip = chart.find_element("xpath", "following-sibling::div[@class='tip']")
        text = tip.get_attribute("textContent")
        assert tip.is_displayed()
        assert text in [said for _, said in data["at"]]
    legend = find(browser, "svg[data-hover] .legend text")[0]
    ActionChains(browser).move_to_element(legend).perform()
    assert not legend.find_element("xpath", "ancestor::*[local-name()='svg']/following-sibling::div").is_displayed()
    first = find(browser, "svg[data-hover]")[0]
    said = [text for _, text in json.loads(first.get_attribute("data-hover"))["at"]]
    browser.execute_script("arguments[0].focus()", first)
    shown = []
    for _ in said:
        press(browser, Keys.ARROW_RIGHT)
        shown.append(find(browser, ".tip")[0].get_attribute("textContent"))
    assert shown[: len(said)] == said
    press(browser, Keys.ESCAPE)
    assert not find(browser, ".tip")[0].is_displayed()
    assert browser.get_log("browser") == []
