"""Every field of the configuration: seen by the digest, written and read back, never changed, always finite."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ppo_repro.config.files import build_config, dump_yaml
from ppo_repro.config.run import RunConfig
from ppo_repro.config.section import LARGEST
from ppo_repro.config.yaml_text import parse_yaml
from ppo_repro.errors import UserError
from tests.config.trees import FOLDER, TREES, config_of, kinds_in, sections_in, tree
from tests.support.runs import small_config

CONFIGS = {name: config_of(name) for name in TREES}


def test_the_trees_hold_every_section() -> None:
    assert {type(s) for config in CONFIGS.values() for s in sections_in(config)} == set(kinds_in(RunConfig))


@pytest.mark.parametrize("name", TREES)
def test_the_digest_sees_every_field_but_how_much_is_recorded(name: str) -> None:
    config = CONFIGS[name]
    fields = config.model_dump(mode="json")
    of_no_result = {name: fields[name] for name in ("records", "checkpoints")}
    assert json.loads(config.canonical_json()) | of_no_result == fields
    digests = [other.digest() for other in CONFIGS.values()]
    assert digests.count(config.digest()) == 1
    assert small_config("records.level=deep").digest() == small_config().digest()


def test_the_digest_sees_no_order_and_no_empty_section() -> None:
    def backwards(node: Any) -> Any:
        return {key: backwards(node[key]) for key in reversed(node)} if isinstance(node, dict) else node

    plain = small_config()
    assert build_config(backwards(tree()), "file").canonical_json() == plain.canonical_json()
    for same in ("mismatch={}", "mismatch.sampler={}"):
        assert small_config(same).digest() == plain.digest()


def read_back(config: RunConfig) -> RunConfig:
    return build_config(parse_yaml(dump_yaml(config)), "file")


@pytest.mark.parametrize("name", TREES)
def test_a_written_configuration_reads_back_equal(name: str) -> None:
    assert read_back(CONFIGS[name]) == CONFIGS[name]


@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0:"), min_size=1, max_size=60),
    st.floats(0, LARGEST, exclude_min=True),
    st.integers(0, 2**63 - 1),
)
def test_any_text_and_any_number_read_back_equal(path: str, rate: float, seed: int) -> None:
    config = build_config({**tree(), "seed": seed, "model": {**FOLDER, "path": path}}, "file")
    config = config.model_copy(update={"ppo": config.ppo.model_copy(update={"learning_rate": rate})})
    assert read_back(config) == config


def test_no_section_can_be_changed_or_takes_a_number_that_is_not_finite() -> None:
    for section in (section for config in CONFIGS.values() for section in sections_in(config)):
        type(section).model_validate(section.model_dump())  # the control: as it is, it is taken
        for name, value in section:
            with pytest.raises(ValidationError, match="frozen"):
                setattr(section, name, value)
            if isinstance(value, float):
                for bad in (float("nan"), float("inf"), -float("inf")):
                    with pytest.raises(ValidationError):
                        type(section).model_validate({**section.model_dump(), name: bad})
    with pytest.raises(UserError, match=r"^file: seed = nan"):
        build_config({**tree(), "seed": float("nan")}, "file")
