"""Every field of the configuration: written and read back, never changed, always finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from ppo_repro.base.errors import Mistakes, UserError
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.fields import field_paths, sections_of, types_of_fields
from ppo_repro.config.files import build_config, dump_yaml, read_tree, validated
from ppo_repro.config.kinds import CONFIGS
from ppo_repro.config.run import RunConfig
from ppo_repro.config.section import FIXED, MAX_FLOAT, PathText, ProgramText, Section
from ppo_repro.config.tree import from_folder, path_fields, set_field
from ppo_repro.config.yaml_text import parse_yaml
from tests.support.paths import ROOT, SMALL, SMALL_CONTROL
from tests.support.runs import small_config

WRONG = (None, True, -1, 2**70, float("nan"), "", "x" * 2000, [], [1], {"a": 1}, {1: 2}, {"kind": "x"}, object())


def tree() -> dict[str, Any]:
    """`small.yaml` with every default written out."""
    return small_config("ppo.ratio_anchor=old", "ppo.importance_weights={kind: truncated}").model_dump(mode="json")


def numbers(node: Any, prefix: str = "") -> Iterator[str]:
    """The dotted path of every number that need not be whole."""
    for name, value in node.items() if isinstance(node, dict) else ():
        yield from numbers(value, f"{prefix}{name}.")
        if isinstance(value, float):
            yield f"{prefix}{name}"


def fields_by_type(model: type[BaseModel]) -> Iterator[tuple[str, bool, bool]]:
    """The name of every field of a configuration; whether its type is a path of an input, and whether a program."""
    for name, hint in get_type_hints(model, include_extras=True).items():
        if name in model.model_fields:
            yield name, *(wanted in (hint, *get_args(hint)) for wanted in (PathText, ProgramText))
            for section in sections_of(hint):
                yield from fields_by_type(section)


@pytest.mark.parametrize("model", CONFIGS.values(), ids=CONFIGS)
def test_a_name_has_the_type_of_a_path_in_every_section_or_in_none(model: type[BaseModel]) -> None:
    by_type = set(fields_by_type(model))
    assert len({name for name, *_ in by_type}) == len(by_type)
    for name, is_input, is_program in by_type:
        tree = {name: "folder/file"}
        assert bool(list(path_fields(tree))) == is_input, name
        assert (from_folder(tree, Path("/above"))[name] == "/above/folder/file") == (is_input or is_program), name


class Below(Section):
    folder: PathText
    words: str


class Above(Section):
    below: Below | None
    many: tuple[Below, ...]
    other: PathText | None
    program: ProgramText
    fixed: Annotated[PathText, FIXED]
    fixed_or_none: Annotated[PathText | None, FIXED]


def test_a_new_path_is_found_by_its_type_alone() -> None:
    types = list(types_of_fields(Above))
    assert [name for name, declared in types if declared == PathText] == [
        *("folder", "folder", "other", "fixed", "fixed_or_none")
    ]
    assert [name for name, declared in types if declared == ProgramText] == ["program"]


def test_a_path_in_the_arguments_of_a_library_stays_as_it_is() -> None:
    written = {"task": {"path": "a", "template_arguments": {"path": "b"}}, "reward": [{"parameters": {"run": "c"}}]}
    assert [field for field, *_ in path_fields(written)] == ["task.path"]


def test_the_tree_of_a_caller_stays_as_it_is_whatever_objects_it_has() -> None:
    tree = {"task": {"path": "a"}, "ppo": [math]}
    assert from_folder(tree, Path("/above")) == {"task": {"path": "/above/a"}, "ppo": [math]}
    assert tree == {"task": {"path": "a"}, "ppo": [math]}


def test_only_an_interpreter_with_a_slash_starts_at_the_folder() -> None:
    for python, there in (("python3.12", "python3.12"), ("env/bin/python", "/above/env/bin/python")):
        tree = {"rollout": {"engine": {"python": python}}}
        assert from_folder(tree, Path("/above"))["rollout"]["engine"]["python"] == there
        assert list(path_fields(tree)) == []


@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0:"), min_size=1, max_size=60),
    st.floats(0, MAX_FLOAT, exclude_min=True),
    st.integers(0, 2**63 - 1),
)
def test_any_text_and_any_number_read_back_equal(path: str, rate: float, seed: int) -> None:
    config = build_config({**tree(), "seed": seed, "model": {"kind": "folder", "path": path}}, "file")
    config = config.model_copy(update={"ppo": config.ppo.model_copy(update={"learning_rate": rate})})
    assert build_config(parse_yaml(dump_yaml(config)), "file") == config


def test_no_section_can_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        small_config().ppo.epochs = 2  # type: ignore[misc]


@pytest.mark.parametrize("path", ["seed", *numbers(tree())])
def test_no_number_is_taken_that_is_not_finite(path: str) -> None:
    build_config(tree(), "file")  # the control
    for bad in (float("nan"), float("inf"), -float("inf")):
        changed = tree()
        set_field(changed, path, bad)
        with pytest.raises(UserError, match=f"^file: .*{path.rpartition('.')[2]} = {bad}"):
            build_config(changed, "file")


@pytest.mark.parametrize(
    ("model", "path"),
    [(RunConfig, SMALL), (DPOConfig, ROOT / "experiments" / "dpo.yaml"), (ControlConfig, SMALL_CONTROL)],
)
def test_every_field_refuses_wrong_values_in_lines_that_name_its_section(
    model: type[RunConfig | DPOConfig | ControlConfig], path: Path
) -> None:
    plain, unnamed = read_tree(path), []
    for field in field_paths(model):
        lines: list[str] = []
        for value in WRONG:
            changed = deepcopy(plain)
            set_field(changed, field, value)
            try:
                validated(model, changed, "file")
            except Mistakes as found:
                lines += found.lines
        if not any(line.startswith(f"file: {field.rpartition('.')[0]}") for line in lines):
            unnamed.append(field)
    assert unnamed == []
