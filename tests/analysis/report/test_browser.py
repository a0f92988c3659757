"""The report in a real browser: no error, token view by pointer and by key, hostile texts, light and dark, narrow."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from analysis.report import build
from ppo_repro.watcher import Silent
from tests.analysis.report.hostile_run import HOSTILE, LONG, make_hostile_run
from tests.support.browser import find, look, opened
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
        "hostile": make_hostile_run(folder / "grid" / "run"),
    }
    found = {name: build.write_report([run], folder / f"{name}.html", None if name != "hostile" else 15)[0]
             for name, run in runs.items()}  # fmt: skip
    cut = folder / "cut" / deterministic_run.name
    shutil.copytree(deterministic_run, cut)
    cut_back(cut, 2, "interrupted")
    control = control_run(small_control("ppo.iterations=2"), folder / "control", Silent())[0]
    others = {"grid": [folder / "grid"], "cut": [cut], "control": [control], "pair": [deterministic_run, native_run]}
    more = {name: build.write_report(runs, folder / f"{name}.html", None)[0] for name, runs in others.items()}
    return {**found, **more}


def one(browser: Any, selector: str) -> Any:
    (found,) = find(browser, selector)
    return found


def choose(browser: Any, selector: str, value: str) -> None:
    one(browser, f"{selector} option[value='{value}']").click()


def values(browser: Any) -> dict[str, str]:
    """The panel beside the tokens."""
    rows = "[...document.querySelectorAll('#tv-detail tr')]"
    script = f"return {rows}.map(r => [r.cells[0].textContent, r.cells[1].textContent])"
    return dict(browser.execute_script(script))


def press(browser: Any, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    for key in keys:
        ActionChains(browser).send_keys(key).perform()


def show(browser: Any, iteration: int, sequence: int) -> dict[str, Any]:
    """Choose a response by its numbers; what the page holds of it."""
    data = embedded(Path(browser.current_url.removeprefix("file://")).read_text())
    choose(browser, "#tv-iteration", str(iteration))
    index, found = next((i, r) for i, r in enumerate(data["responses"])
                        if (r["iteration"], r["sequence"]) == (iteration, sequence))  # fmt: skip
    choose(browser, "#tv-sequence", str(index))
    return dict(found)


NAMES = ["deterministic", "native", "hostile", "grid", "cut", "control", "pair"]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_opens_without_a_word_on_the_console_and_loads_nothing(
    browser: Any, pages: dict[str, Path], name: str
) -> None:
    opened(browser, pages[name])
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    # a parser that had to mend something would have moved, added or dropped a tag
    text = pages[name].read_text()
    mended = "new DOMParser().parseFromString(arguments[0], 'text/html')"
    script = f"return [...{mended}.querySelectorAll('*')].map(n => n.localName)"
    assert browser.execute_script(script, text) == tags(tree(text))


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder to this machine and remembers what it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_request(self, code: object = "-", size: object = "-") -> None:
        assert isinstance(self.server, Server)
        self.server.asked.append(self.path)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing on stderr."""


BARE = "<!DOCTYPE html><title>t</title><link rel='icon' href='data:,'><p>no policy</p>"
ATTACK = """
  window.ran = 0;
  const [name, done] = arguments, script = document.createElement("script"), image = new Image();
  script.textContent = "window.ran = 1";
  image.onload = image.onerror = () => done(window.ran);
  image.src = "/" + name;
  document.body.append(script, image)"""


def test_the_policy_stops_what_a_text_might_smuggle_in(browser: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "bare.html").write_text(BARE)
    shutil.copy(pages["native"], tmp_path / "page.html")
    with Server(tmp_path) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ran = {}
        for name in ("bare", "page"):
            browser.get(f"http://127.0.0.1:{server.server_port}/{name}.html")
            ran[name] = browser.execute_async_script(ATTACK, f"{name}.png")
        server.shutdown()
    assert ran == {"bare": 1, "page": 0}, "the page without a policy is the control"
    assert server.asked == ["/bare.html", "/bare.png", "/page.html"]


def test_tokens_by_pointer(browser: Any, pages: dict[str, Path]) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    opened(browser, pages["deterministic"])
    assert one(browser, "#tv-column").get_attribute("value") == "advantages", "there is no mismatch to see"
    opened(browser, pages["native"])
    assert one(browser, "#tv-column").get_attribute("value") == "delta"
    assert find(browser, "#tv-tokens [class*='token p'], #tv-tokens [class*='token n']"), "some token has a colour"
    data = embedded(pages["native"].read_text())
    shown = max(data["responses"], key=lambda r: r["max_abs_delta"])
    assert f"iteration {shown['iteration']}, sequence {shown['sequence']};" in one(browser, "#tv-about").text
    tokens = find(browser, "#tv-tokens [role=option]")
    assert len(tokens) == len(shown["ids"])
    tokens[0].click()
    assert browser.switch_to.active_element == tokens[0] and tokens[0].get_attribute("aria-selected") == "true"
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


def test_tokens_by_key(browser: Any, pages: dict[str, Path]) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(browser, pages["hostile"])
    shown = show(browser, 0, 0)
    one(browser, "#tv-words").send_keys("")
    for _ in range(20):
        if browser.switch_to.active_element.get_attribute("role") == "option":
            break
        press(browser, Keys.TAB)
    assert browser.switch_to.active_element.get_attribute("role") == "option", "Tab has to lead to the tokens"
    outline = "const s = getComputedStyle(document.activeElement); return [s.outlineStyle, parseFloat(s.outlineWidth)]"
    style, width = browser.execute_script(outline)
    assert style == "solid" and width >= 2

    def at() -> int:
        return int(browser.switch_to.active_element.get_attribute("data-i"))

    press(browser, Keys.HOME)
    assert at() == 0
    press(browser, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert at() == 2 and values(browser)["token id"] == str(shown["ids"][2])
    press(browser, Keys.ARROW_LEFT)
    assert at() == 1
    press(browser, Keys.END, Keys.ARROW_RIGHT)
    assert at() == len(shown["ids"]) - 1
    ring = "return getComputedStyle(document.activeElement).boxShadow"
    assert "inset" in browser.execute_script(ring), "the chosen token is marked, a special one too"
    press(browser, Keys.PAGE_DOWN)
    assert "iteration 0, sequence 1;" in one(browser, "#tv-about").text and at() == 0
    press(browser, Keys.PAGE_UP)
    assert "iteration 0, sequence 0;" in one(browser, "#tv-about").text


def test_colours_follow_the_column_and_words_add_up(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["hostile"])
    shown = show(browser, 0, 2)
    classes = {}
    for key in ("delta", "flag_1", "old_logprobs", "ratio_1", "values"):
        choose(browser, "#tv-column", key)
        classes[key] = [t.get_attribute("class") for t in find(browser, "#tv-tokens [role=option]")]
        assert len(find(browser, "#tv-legend li")) >= 5
    assert len({tuple(found) for found in classes.values()}) == 5
    for flag, name in zip(shown["columns"]["flag_1"], classes["flag_1"], strict=True):
        assert (f"f-{flag}" in name) == (flag != "none")
    choose(browser, "#tv-column", "delta")
    one(browser, "#tv-words").click()
    assert len(find(browser, "#tv-tokens .word")) == len(set(shown["words"]))
    find(browser, "#tv-tokens [role=option]")[0].click()
    first = [i for i, word in enumerate(shown["words"]) if word == 0]
    assert len(first) == 2 and values(browser)["tokens"] == "0 to 1"
    total = sum(shown["columns"]["delta"][i] for i in first)
    # the panel has six digits, and what it adds up has six as well
    assert float(values(browser)["mismatch, old - rollout log-prob (sum) [nats]"]) == pytest.approx(total, rel=1e-5)


def test_hostile_texts_are_shown_and_do_nothing(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["hostile"])
    for sequence in range(len(HOSTILE)):
        show(browser, 0, sequence)
        options = find(browser, "#tv-tokens [role=option]")
        assert all(o.tag_name == "bdi" and o.get_attribute("dir") == "auto" for o in options)
        assert options[-1].get_attribute("textContent") == "⟨end 1⟩"
        for option, piece in zip(options, HOSTILE[sequence], strict=False):
            shown = option.get_attribute("textContent")
            plain = all(c.isascii() and c.isprintable() and c != " " for c in piece)
            assert shown == piece if plain else shown.strip()
            assert not set("\x01\x1b\x7f\x85\u2028\u2029\u202e\u2066\ufeff") & set(shown)
    assert browser.execute_script("return window.hacked") is None
    assert find(browser, "#tv-tokens img, #tv-tokens script, #tv-tokens b") == []
    show(browser, 0, 6)
    assert len(find(browser, "#tv-tokens br")) == 2
    assert browser.get_log("browser") == []


def test_ten_thousand_tokens_are_quick(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["hostile"])
    show(browser, 1, 0)
    long = one(browser, "#tv-sequence option:last-child").get_attribute("value")
    script = """
      const [key, value] = arguments, box = document.getElementById(key), start = performance.now();
      box.value = value; box.dispatchEvent(new Event("change")); document.body.offsetHeight;
      return performance.now() - start"""
    drawn = browser.execute_script(script, "tv-sequence", long)
    assert len(find(browser, "#tv-tokens [role=option]")) == LONG
    painted = browser.execute_script(script, "tv-column", "entropies")
    # a machine with other work to do may be ten times slower than an idle one; quadratic code would take minutes
    assert drawn < 5000 and painted < 5000


def luminance(colour: list[float]) -> float:
    parts = [c / 255 for c in colour[:3]]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def over(colour: list[float], ground: list[float]) -> list[float]:
    alpha = colour[3] if len(colour) > 3 else 1.0
    return [c * alpha + g * (1 - alpha) for c, g in zip(colour[:3], ground[:3], strict=True)]


def contrast(text: list[float], ground: list[float]) -> float:
    a, b = sorted((luminance(text), luminance(ground)))
    return (b + 0.05) / (a + 0.05)


def rgb(text: str) -> list[float]:
    return [float(part) for part in re.findall(r"[\d.]+", text)]


CLASSES = [*(f"{k}{i}" for k in "pnq" for i in range(1, 5)), "f-clip_high", "f-clip_low", "f-clip_dual", "special"]
CLASSES += [f"special {name}" for name in ("p1", "p4", "n2", "n4", "q2", "f-clip_high", "f-wrong_high", "f-wrong_low")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_in_dark(browser: Any, pages: dict[str, Path], scheme: str) -> None:
    opened(browser, pages["native"])
    look(browser, scheme)
    style = "const s = getComputedStyle(arguments[0]); return [s.color, s.backgroundColor, s.fill]"
    body = [rgb(c) for c in browser.execute_script(style, one(browser, "body"))]
    ground = body[1]
    assert (luminance(ground) > 0.8) == (scheme == "light") and contrast(body[0], ground) > 7
    token = find(browser, "#tv-tokens [role=option]")[0]
    for name in CLASSES:
        browser.execute_script("arguments[0].className = 'token ' + arguments[1]", token, name)
        text, back, _ = (rgb(c) for c in browser.execute_script(style, token))
        assert contrast(text, over(back, ground)) >= 4.5, f"{name} in {scheme}"
    card = rgb(browser.execute_script(style, find(browser, "figure")[0])[1])
    for selector in (".chart .label", "figcaption", ".quiet", "nav a", "dt"):
        node = find(browser, selector)[0]
        colours = browser.execute_script(style, node)
        text = rgb(colours[2]) if selector.startswith(".chart") else rgb(colours[0])
        assert contrast(text, card) >= 4.5, f"{selector} in {scheme}"


def test_a_chart_says_its_values_where_the_pointer_is(browser: Any, pages: dict[str, Path]) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    opened(browser, pages["native"])
    for chart in find(browser, "svg[data-hover]"):
        data = json.loads(chart.get_attribute("data-hover"))
        ActionChains(browser).move_to_element(chart).perform()
        tip = chart.find_element("xpath", "following-sibling::div[@class='tip']")
        text = tip.get_attribute("textContent")
        if "at" in data:
            assert tip.is_displayed() and text in [said for _, said in data["at"]]
        elif tip.is_displayed():
            assert text.split("\n")[0] in data["xn"] and text.endswith(data["what"])
    first = find(browser, "svg[data-hover]")[0]
    said = [text for _, text in json.loads(first.get_attribute("data-hover"))["at"]]
    browser.execute_script("arguments[0].focus()", first)
    shown = []
    for _ in said:
        press(browser, Keys.ARROW_RIGHT)
        shown.append(find(browser, ".tip")[0].get_attribute("textContent"))
    assert shown[: len(said)] == said
    press(browser, Keys.ESCAPE)
    assert not find(browser, ".tip")[0].is_displayed() and browser.get_log("browser") == []


def test_the_numbers_of_a_chart_are_saved_as_csv(browser: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    opened(browser, pages["native"])
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    link = find(browser, "a.csv")[0]
    browser.execute_script("arguments[0].click()", link)
    path = tmp_path / str(link.get_attribute("download"))
    for _ in range(100):
        if path.exists():
            break
        time.sleep(0.1)
    text = unquote(str(link.get_attribute("href")).partition(",")[2])
    assert path.read_text() == text and text.startswith("iteration,value,low,high\n")
