"""Every field of the configuration: described, seen by the digest, written and read back, never changed."""

from __future__ import annotations

import json
import math
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ppo_repro.config import RunConfig, Section
from ppo_repro.config_yaml import build_config, dump_yaml, parse_yaml
from ppo_repro.errors import UserError
from tests.runs_for_tests import small_config
from tests.test_config import FOLDER, JSONL, tree


def other_tree() -> dict[str, Any]:
    """The other variants of model and task."""
    return {**tree(), "model": FOLDER, "task": JSONL}


def leaf_fields(model: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field a user writes, with all variants of model and task."""
    for name, field in model.model_fields.items():
        variants = [field.annotation, *typing.get_args(field.annotation)]
        sections = [v for v in variants if isinstance(v, type) and issubclass(v, Section)]
        if sections:
            for section in sections:
                yield from leaf_fields(section, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def leaves(node: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, (*prefix, name))
        else:
            yield (*prefix, name), value


def with_leaf(node: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    name, *rest = path
    return {**node, name: with_leaf(node[name], tuple(rest), value) if rest else value}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("path", [path for path, field in leaf_fields(RunConfig) if field.annotation is float])
def test_numbers_that_are_not_finite_are_refused(path: str, value: float) -> None:
    with pytest.raises(UserError, match=re.escape(path)):
        build_config(with_leaf(tree(), tuple(path.split(".")), value), "file")


def test_the_order_of_fields_in_the_file_does_not_show() -> None:
    def backwards(node: Any) -> Any:
        return {key: backwards(node[key]) for key in reversed(node)} if isinstance(node, dict) else node

    text = yaml.safe_dump(backwards(tree()), sort_keys=False)
    assert list(parse_yaml(text)) == list(tree())[::-1]
    config = build_config(parse_yaml(text), "file")
    assert config.canonical_json() == small_config().canonical_json() and config.digest() == small_config().digest()
    found = json.loads(config.canonical_json())
    assert config.canonical_json() == json.dumps(found, sort_keys=True, separators=(",", ":"))
    assert found == config.model_dump(mode="json"), "defaults are written out"


CANDIDATES = ["eager", "old", "k2", "native", "left", "rewards.py:f", "other"]


def neighbours(value: Any) -> list[Any]:
    """Other values of the same type, some of which the field will allow."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, list):
        return [[*value, 1]]
    if isinstance(value, int):
        found: list[Any] = [value + 1, value * 2, value - 1, value // 2, 14]
    else:
        found = [value / 2, value / 2 + 0.25] if isinstance(value, float) else CANDIDATES
    return [other for other in found if other != value]


@pytest.mark.parametrize("start", [tree, other_tree])
def test_the_digest_sees_every_single_field(start: Any) -> None:
    full = build_config(start(), "file").model_dump(mode="json")
    digests = {build_config(full, "file").digest()}
    paths = [path for path, _ in leaves(full) if path[-1] != "kind"]  # a kind cannot change alone
    for path in paths:
        value = dict(leaves(full))[path]
        for candidate in neighbours(value):
            try:
                config = build_config(with_leaf(full, path, candidate), "file")
            except UserError:
                continue
            assert dict(leaves(config.model_dump(mode="json")))[path] == candidate
            digests.add(config.digest())
            break
        else:
            pytest.fail(f"no other value found for {path}")
    assert len(digests) == 1 + len(paths)
    assert all(re.fullmatch("[0-9a-f]{12}", digest) for digest in digests)


def read_back(config: RunConfig) -> RunConfig:
    return build_config(parse_yaml(dump_yaml(config)), "file")


@pytest.mark.parametrize("start", [tree, other_tree])
def test_a_written_configuration_reads_back_equal(start: Any) -> None:
    config = build_config(start(), "file")
    assert read_back(config) == config and read_back(config).digest() == config.digest()


@pytest.mark.parametrize("name", ["1e5", "08", "1", "1.5", "1e-3", "no", "true", "null", "1.", "12345678901234567890"])
def test_a_name_that_looks_like_a_number_reads_back_as_text(name: str) -> None:
    config = build_config({**tree(), "experiment": name}, "file")
    assert read_back(config).experiment == name


@pytest.mark.parametrize(
    "path", ["\x85", "a\u2028b", "\u2029", "\n", " a ", "a\n b", "\ufeff", "\0", "'\"", "#", ": ", "é世😀"]
)
def test_a_path_of_awkward_characters_reads_back_equal(path: str) -> None:
    config = build_config({**tree(), "model": {**FOLDER, "path": path}}, "file")
    assert read_back(config) == config


@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.floats(0, 1e300, exclude_min=True),
    st.integers(0, 2**63 - 1),
)
def test_any_text_and_any_number_read_back_equal(path: str, rate: float, seed: int) -> None:
    config = build_config({**tree(), "seed": seed, "model": {**FOLDER, "path": path}}, "file")
    config = config.model_copy(update={"ppo": config.ppo.model_copy(update={"learning_rate": rate})})
    assert read_back(config) == config


def test_every_field_has_a_description_of_one_sentence() -> None:
    for path, field in leaf_fields(RunConfig):
        assert field.description, path
        assert re.fullmatch(r"[A-Z0-9`][^\n]*\.", field.description), f"{path}: {field.description}"
        assert not re.search(r"[.!?] +[A-Z]", field.description), f"{path} has more than one sentence"


def test_there_are_few_fields() -> None:
    assert 40 < len(list(leaf_fields(RunConfig))) <= 70


def test_a_configuration_cannot_be_changed() -> None:
    config = small_config()
    for section, name in [(config, "seed"), (config.ppo, "epochs"), (config.model, "kind"), (config, "colour")]:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, 3)
    assert config == small_config()
