"""The page of an audit in a real browser: nothing is loaded, nothing is cut, wide or narrow, light or dark."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from ppo_repro.audit.judge import Audit, Side
from ppo_repro.audit.page import page
from ppo_repro.audit.search import Tried
from tests.support.browser import look, opened
from tests.support.models import seeded

pytestmark = [pytest.mark.browser, pytest.mark.slow]
HOSTILE = "<script>document.title='ran'</script>"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of 3,000 tokens in 40 responses of three turns, with long causes and tokens that are markup."""
    generator, n = seeded(1), 3000
    reference = -torch.rand(n, generator=generator).double() * 5
    sampler = reference + 0.2 * torch.randn(n, generator=generator)
    sampler[5] = torch.nan
    index = torch.arange(n)
    columns = {"row": index // 75, "turn": index % 75 // 25 + 1, "position": index % 75, "token_id": index % 97}
    columns |= {"reference": reference, "sampler": sampler, "trainer": reference + 1e-7}
    tokens = pd.DataFrame({name: x.numpy() for name, x in columns.items()})
    words = (f"weights of /checkpoints/{'deep/' * 30}step_100 and top-p", "as it is")
    tried = tuple(Tried(w, "", 0.1 * (i + 1), i == 0, 1) for i, w in enumerate(words))
    numbers = ("tempered", n - 1, 1, 0.2, 0.9, 0.01, 40, False)
    wrong = Side("sampler", *numbers, "unknown", "do something", 0.2, ("right up to token 3",), tried, 512)
    right = replace(wrong, name="trainer", empty=0, wrong_responses=0, is_right=True, cause="", advice="", tried=())
    path = tmp_path_factory.mktemp("audit") / "page.html"
    path.write_text(page(Audit(40, 1e-6, wrong, right, tokens), f"Audit of {'x' * 200}", lambda i: HOSTILE))
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_nothing_is_loaded_run_or_cut(browser: Any, shown: Path, scheme: str, width: int) -> None:
    opened(browser, shown)
    look(browser, scheme, width)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.title.startswith("Audit of x") and HOSTILE not in shown.read_text()
    # what is wider than the window scrolls in its own box; everything else fits
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    outside = (
        "[...document.querySelectorAll('h1, h2, p, li')].filter(n => n.getBoundingClientRect().right > innerWidth)"
    )
    assert browser.execute_script(f"return {outside}.length") == 0
    colours = "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    text, ground = (
        sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in browser.execute_script(f"return {colours}")
    )
    assert abs(text - ground) > 400 and (text > ground) == (scheme == "dark")
