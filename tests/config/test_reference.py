"""`ppo-repro fields` describes every field, and prints a section."""

from __future__ import annotations

import json
import re

import pytest

from ppo_repro.config.control import ControlConfig
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.mistakes import field_paths
from ppo_repro.config.reference import groups
from ppo_repro.config.run import RunConfig
from tests.support.cli import Cli, one_line


@pytest.mark.parametrize(("prefix", "model"), [("", RunConfig), ("control.", ControlConfig), ("dpo.", DPOConfig)])
def test_every_field_is_described_in_one_sentence(prefix: str, model: type) -> None:
    rows = {f"{group.path}.{row.name}".removeprefix("."): row for group in groups() for row in group.fields}
    kinds = {f"{group.path}.{group.kind.partition(':')[0]}".removeprefix(".") for group in groups() if group.kind}
    paths = {f"{prefix}{path}" for path in field_paths(model)}
    assert paths - set(rows) - kinds <= {"reward.terms", "ppo.rejection"}
    for path, row in rows.items():
        assert re.fullmatch(r"[A-Z0-9`][^\n]*\.", row.meaning) and not re.search(r"[.!?] +[A-Z]", row.meaning), path


def test_a_section_is_printed(cli: Cli) -> None:
    code, out, _ = cli("fields", "ppo.objective")
    assert code == 0 and out.startswith("ppo.objective, kind: clip\n")
    assert "  clip_range: number above 0 below 1; default 0.2\n      Ratios below" in out and "gae_lambda" not in out
    code, out, _ = cli("fields", "dpo", "--json")
    assert code == 0 and {group["path"] for group in json.loads(out)["sections"]} >= {"dpo", "dpo.dpo"}
    code, out, err = cli("fields", "ppo.objectiv")
    assert (code, out) == (2, "") and one_line(err).endswith("; did you mean ppo.objective?")
