"""Every flag that an objective can return has words, an effect, a colour and an entry in the legends."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from ppo_repro.analysis.clip_flags import DRAWN, RECORDED_FLAGS, flag_legend, recorded_clipped
from ppo_repro.analysis.html import page
from ppo_repro.analysis.report.data.token_view import token_view
from ppo_repro.analysis.report.run_page import run_page
from ppo_repro.ppo.objectives import ClipFlag, flag_names, removes_gradient
from ppo_repro.records import reader
from tests.support.html_page import check, embedded
from tests.support.language import small_run

NAMES = flag_names(torch.tensor(list(ClipFlag), dtype=torch.uint8))
STYLE = (page.HERE / "style.css").read_text()


def test_the_analyses_have_the_flags_of_the_objectives() -> None:
    assert sorted(RECORDED_FLAGS) == sorted(NAMES)
    assert len({flag.words for flag in RECORDED_FLAGS.values()}) == len(NAMES), "each flag has its own words"
    assert sorted(flag["name"] for flag in token_view([])["flags"]) == sorted(NAMES), (
        "the legend of the token view has every flag"
    )
    assert set(DRAWN) == set(NAMES) - {"none", "unknown"}


def test_the_flags_agree_with_training_about_the_gradient() -> None:
    removed = removes_gradient(torch.tensor(list(ClipFlag), dtype=torch.uint8)).tolist()
    assert recorded_clipped(pd.Series(NAMES)).tolist() == removed
    assert recorded_clipped(pd.Series([None, "clip_low"])).tolist() == [False, True]


@pytest.mark.parametrize("flag", flag_legend(), ids=lambda flag: flag["name"])
def test_every_flag_but_none_has_a_colour(flag: dict[str, str]) -> None:
    assert (flag["class"] == "") == (flag["name"] == "none")
    if flag["class"]:
        (rule,) = [line for line in STYLE.splitlines() if line.startswith(f".{flag['class']} {{")]
        assert "background" in rule


@pytest.fixture(scope="module")
def cispo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bounds = "ppo.objective={kind: cispo, cap: 1.01, floor: 0.99}"
    return small_run(tmp_path_factory.mktemp("cispo"), "numerics.mode=native", "ppo.iterations=2", bounds)


def test_the_page_of_a_cispo_run_says_whose_weight_was_bounded(cispo_run: Path) -> None:
    updates = reader.read_updates(cispo_run)
    bounded = updates["clip_flag"].isin(["bound_high", "bound_low"])
    assert bounded.any()
    made = run_page(cispo_run, 4)
    text = " ".join("".join(check(made).itertext()).split())
    assert f"Of {int(updates['clip_flag'].notna().sum()):,} token updates" in text
    assert "had a bounded weight and kept their gradient." in text
    assert "weight bounded above" in text
    assert "outside the band" not in text
    data = embedded(made)
    known = {flag["name"] for flag in data["flags"]}
    shown = {flag for response in data["responses"] for flag in response["columns"]["flag_1"]}
    assert "bound_high" in shown
    assert shown <= known
