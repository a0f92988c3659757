"""Plain words: each choice that is explained can be made, and every field of a configuration has words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from analysis.dialects.report import definitions
from analysis.words import CHOICES, TERMS, config_in_words, explained, terms
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.files import load_config, load_control_config
from ppo_repro.config.run import RunConfig
from tests.support.paths import ROOT


def literals(annotation: object) -> Iterator[object]:
    """The values of every Literal in an annotation, and the sections in it."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for part in get_args(annotation):
            yield from literals(part)


def choices(model: type[BaseModel]) -> set[tuple[str, object]]:
    found: set[tuple[str, object]] = set()
    for name, field in model.model_fields.items():
        for part in literals(field.annotation):
            if isinstance(part, type):
                found |= choices(part)
            else:
                found.add((name, part))
    return found


def test_every_choice_that_is_explained_can_be_made() -> None:
    possible = choices(RunConfig) | choices(ControlConfig)
    assert set(CHOICES) <= possible
    assert ("aggregation", "nothing") not in possible


@pytest.mark.parametrize("name", ["quickstart.yaml", "control/cartpole_fast.yaml"])
def test_every_field_has_words(name: str) -> None:
    path = ROOT / "experiments" / name
    config = load_control_config(path) if "control" in name else load_config(path)
    rows = config_in_words(config).set_index("field")
    assert (rows["in words"].str.len() > 0).all() and rows.index.is_unique
    assert rows.loc["numerics.mode", "in words"] == CHOICES["mode", "deterministic"]
    assert rows.loc["ppo.learning_rate", "value"] == str(config.ppo.learning_rate)


def test_terms_are_found_as_words_of_their_own() -> None:
    assert explained("seq_mean_token_sum, padding included") == f"seq_mean_token_sum: {TERMS['seq_mean_token_sum']}"
    assert explained("a k12 and my_k1") == "" and explained("k1 of KL") == f"k1: {TERMS['k1']}"
    assert terms()["term"].tolist() == list(TERMS)
    table = definitions().set_index("key")
    assert "clip removed" in table.loc["actor/pg_clipfrac", "in_words"]
