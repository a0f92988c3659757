"""The studies are grid files: every cell is a valid configuration, names what it changes, and has a reader."""

from __future__ import annotations

import importlib
import json

import pytest

from experiments.tokenization import oracle, topics
from ppo_repro.config.run import RunConfig
from ppo_repro.grids.spec import load_grid
from tests.support.paths import ROOT

FOLDER = ROOT / "experiments" / "tokenization"
STUDIES = sorted(path.stem for path in FOLDER.glob("e*.yaml"))
README = (FOLDER / "README.md").read_text(encoding="utf-8")


def configs(name: str) -> list[RunConfig]:
    """The cells of a study, first seed alone."""
    grid = load_grid(FOLDER / f"{name}.yaml")
    return [cell.config for cell in grid.cells if cell.seed == 0 and isinstance(cell.config, RunConfig)]


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_a_grid_with_a_reader(name: str) -> None:
    grid = load_grid(FOLDER / f"{name}.yaml")
    assert len(grid.file.seeds) >= 5 and grid.file.question.endswith("?")
    assert len(grid.cells) == len(configs(name)) * len(grid.file.seeds) > len(grid.file.seeds)
    module, _, function = grid.file.read_with.rpartition(".")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_prompts_are_those_the_command_writes() -> None:
    lines = (FOLDER / "topics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == topics.entries() and len(lines) == topics.PROMPTS


def test_the_reward_by_hand() -> None:
    a, b, c, d, e = topics.LEXICON[0][:5]
    other = topics.LEXICON[1][0]
    prompt = f"{a} {b}:"
    assert topics.score(prompt, f" {b} {c} {d} {e}", "") == 1.0
    assert topics.score(prompt, f" {b} {b} {d} {other}", "") == 0.5, "said twice, and of another topic"
    assert topics.score(prompt, f" {b} {c} {d}", "") == topics.score(prompt, f" {b} {c} {d} {e} {a}", "") == 0.0
    assert topics.score(prompt, " qq qq qq qq", "") == 0.0
    assert len(topics.TOPIC_OF) == topics.TOPICS * topics.WORDS, "no word is of two topics"


def test_the_exact_table_holds_and_a_broken_one_is_named() -> None:
    rows = oracle.table()
    assert oracle.broken(rows) == [] and rows["KL cuts"].iloc[-1] > 0.1 and len(rows) == 6
    assert oracle.broken(rows.assign(**{"sum k1": rows["sum k1"] + 1e-8}))[0] == "characters: sum k1 is not the KL"
    assert oracle.broken(rows.assign(**{"sum k2": 5.0})) == ["sum k2 is the same for all tokenizers"]
