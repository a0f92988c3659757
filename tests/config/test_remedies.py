"""The remedies of the page can be written as the page writes them."""

from __future__ import annotations

import re

import pytest

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
