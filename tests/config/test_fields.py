"""Every field of the configuration: described, seen by the digest, written and read back, never changed."""

from __future__ import annotations

import itertools
import json
import math
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ppo_repro.config.files import build_config, dump_yaml
from ppo_repro.config.run import RunConfig
from ppo_repro.config.section import LARGEST
from ppo_repro.config.yaml_text import parse_yaml
from ppo_repro.errors import UserError
from tests.config.trees import (
    FOLDER,
    TREES,
    Key,
    Leaf,
    at,
    choosers,
    config_of,
    has,
    held,
    leaf_fields,
    leaves,
    parts,
    tree,
    variants,
    with_value,
    written,
)
from tests.support.runs import small_config

every_tree = pytest.mark.parametrize("name", TREES)
FIELDS = leaf_fields(RunConfig)
FLOATS = {key for key, (_, field) in FIELDS.items() if float in parts(field.annotation)}
# for each field that chooses a variant the group it stands in
CHOOSERS = {key: FIELDS[key][0].split(".")[-2] for key in choosers(RunConfig)}
WORDS = {
    group: [word for key, name in CHOOSERS.items() if name == group for word in get_args(FIELDS[key][1].annotation)]
    for group in CHOOSERS.values()
}


def test_the_trees_hold_every_variant_and_every_field() -> None:
    configs = [config_of(name) for name in TREES]
    reached: dict[Key, set[str]] = {}
    for there in (there for config in configs for there in held(config)):
        reached.setdefault(there.holder, set()).add(type(there.section).__name__)
    assert reached == variants(RunConfig)
    assert {"LoraConfig", "NoneType"} == reached["RunConfig", "lora"] == reached["SeparateValue", "lora"]
    assert {leaf.key for config in configs for leaf in leaves(config)} == set(FIELDS)


@every_tree
def test_numbers_that_are_not_finite_are_refused(name: str) -> None:
    full = config_of(name)
    numbers = [leaf.path for leaf in leaves(full) if leaf.key in FLOATS]
    assert len(numbers) > 15
    for path, value in zip(numbers, itertools.cycle([math.nan, math.inf, -math.inf]), strict=False):
        with pytest.raises(UserError, match=f"^file: {re.escape(written(path))} = "):
            build_config(with_value(full.model_dump(mode="json"), path, value), "file")


def test_the_digest_sees_no_order_and_no_empty_section() -> None:
    def backwards(node: Any) -> Any:
        return {key: backwards(node[key]) for key in reversed(node)} if isinstance(node, dict) else node

    plain = small_config()
    assert build_config(backwards(tree()), "file").canonical_json() == plain.canonical_json()
    fields = plain.model_dump(mode="json")
    of_no_result = {name: fields[name] for name in ("records", "checkpoints")}
    assert {**json.loads(plain.canonical_json()), **of_no_result} == fields
    for same in ("mismatch={}", "mismatch.sampler={}"):
        assert small_config(same).digest() == plain.digest() and dump_yaml(small_config(same)) == dump_yaml(plain)


def neighbours(leaf: Leaf) -> list[Any]:
    """Other values of the field's types, some of which it will allow; all other words of a choice."""
    kinds, value = parts(leaf.annotation), leaf.value
    found: list[Any] = [word for kind in kinds for word in typing.get_args(kind)]
    if leaf.key in CHOOSERS:
        found = WORDS[CHOOSERS[leaf.key]]
    if isinstance(value, dict):
        found = [{**value, "min_terms": 3}]
    elif isinstance(value, list):
        found = [[*value, 1], [*value, "q_proj"], [*value, "http://localhost:1"]]
    elif bool in kinds:
        found = [not value]
    elif int in kinds:
        found = [3] if value is None else [value + 1, value * 2, value - 1, value // 2]
    elif float in kinds:
        found = [0.3, 3.0] if value is None else [value / 2, value / 2 + 0.25]
    elif str in kinds:
        found = ["rewards.py:f", "other"]
    found += [None] * (NoneType in kinds)
    return [other for index, other in enumerate(found) if other != value and other not in found[:index]]


def digests_beside(name: str) -> Iterator[tuple[Key, str]]:
    """The digests of all configurations that differ from one of TREES in a single field."""
    config = config_of(name)
    full = config.model_dump(mode="json")
    for leaf in leaves(config):
        for candidate in neighbours(leaf):
            try:
                changed = build_config(with_value(full, leaf.path, candidate), "file")
            except UserError:
                continue
            found = changed.model_dump(mode="json")
            absolute = str(Path.cwd() / candidate) if isinstance(candidate, str) else candidate  # paths become absolute
            assert not has(found, leaf.path) or at(found, leaf.path) in (candidate, absolute)
            yield leaf.key, changed.digest()


NO_RESULT = {("RecordsConfig", "level")}


@pytest.mark.slow
def test_the_digest_sees_every_single_field_but_how_much_is_recorded() -> None:
    seen = set()
    for name in TREES:
        own = config_of(name).digest()
        beside = list(digests_beside(name))
        keys, digests = zip(*(pair for pair in beside if pair[0] not in NO_RESULT), strict=True)
        assert len({own, *digests}) == 1 + len(digests)
        assert {digest for key, digest in beside if key in NO_RESULT} == {own}
        assert all(re.fullmatch("[0-9a-f]{12}", digest) for digest in digests)
        seen |= set(keys)
    # most variants have fields that others lack, so their word cannot change alone; the next test has those
    assert set(FIELDS) - seen - NO_RESULT < set(CHOOSERS)
    assert {("UnclippedObjective", "kind"), ("NoKL", "placement"), ("ExactMatch", "kind")} < seen


def read_back(config: RunConfig) -> RunConfig:
    return build_config(parse_yaml(dump_yaml(config)), "file")


@every_tree
def test_a_written_configuration_reads_back_equal(name: str) -> None:
    config = config_of(name)
    assert read_back(config) == config and read_back(config).digest() == config.digest()


@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0:"), min_size=1, max_size=60),
    st.floats(0, LARGEST, exclude_min=True),
    st.integers(0, 2**63 - 1),
)
def test_any_text_and_any_number_read_back_equal(path: str, rate: float, seed: int) -> None:
    config = build_config({**tree(), "seed": seed, "model": {**FOLDER, "path": path}}, "file")
    config = config.model_copy(update={"ppo": config.ppo.model_copy(update={"learning_rate": rate})})
    assert read_back(config) == config


def test_a_configuration_cannot_be_changed() -> None:
    for there in (there for name in TREES for there in held(config_of(name))):
        for name in [] if there.section is None else type(there.section).model_fields:
            with pytest.raises(ValidationError, match="frozen"):
                setattr(there.section, name, getattr(there.section, name))
