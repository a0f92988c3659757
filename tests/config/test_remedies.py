"""The remedies of the page can be written as the page writes them."""

from __future__ import annotations

import re

import pytest

from ppo_repro.base.errors import UserError
from tests.support.paths import ROOT
from tests.support.runs import small_config

PAGE = ROOT / "ppo_repro" / "config" / "README.md"
EXPERTS = ("model.experts={family: qwen3_moe, count: 5, per_token: 2}", "model.intermediate_size=12")


def remedies() -> list[list[str]]:
    """The fields of `ppo` in each row of the table; `or` stands between two remedies."""
    table = PAGE.read_text(encoding="utf-8").split("## Remedies for mismatch")[1].split("|---|---|---|\n")[1]
    cells = [line.split(" | ")[1] for line in table.split("\n\n")[0].splitlines()]
    return [re.findall(r"`([^`]+)`", remedy) for cell in cells for remedy in cell.split(" or ")]


@pytest.mark.parametrize("fields", remedies(), ids=", ".join)
def test_a_remedy_of_the_page_is_accepted_as_it_stands_there(fields: list[str]) -> None:
    small_config(*EXPERTS, *(f"ppo.{field.replace(': ', '=', 1)}" for field in fields))


def test_importance_weights_without_their_anchor_would_be_refused() -> None:
    with pytest.raises(UserError, match=r"ppo\.importance_weights needs ppo\.ratio_anchor = old"):
        small_config("ppo.importance_weights={kind: truncated, cap: 2}")
