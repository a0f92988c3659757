"""The digest of a configuration: equal exactly for equal values, and blind to a default, however it is written."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import ppo_repro
from ppo_repro.base.errors import UserError
from ppo_repro.config.fields import sections_of, tag_of
from ppo_repro.config.files import build_config, read_tree
from ppo_repro.config.kinds import CONFIGS
from ppo_repro.config.section import DEFAULTS, Experiment, Section, beyond_defaults
from ppo_repro.config.tree import set_field
from ppo_repro.records.changes import flat
from tests.support.paths import TINY

BASE = read_tree(TINY)
OMITTED = object()
OWN = {"kind": "function", "path": "f.py:f"}
VALUES: dict[str, list[Any]] = {
    "seed": [1, 2],
    "experiment": ["a", "b"],
    "ppo.entropy_coef": [OMITTED, 0, 0.0, -0.0, 1, 1.0],
    "ppo.objective": [OMITTED, {}, {"kind": "clip"}, {"clip_range": 0.2}, {"kind": "clip", "clip_range": 0.3}]
    + [{"kind": kind} for kind in ("sequence_clip", "cispo", "kl_penalty", "unclipped", "policy_gradient")]
    + [{"kind": "cispo", "cap": cap} for cap in (5, 6)]
    + [OWN | {"parameters": entry} for entry in ({}, {"a": 1}, {"a": 1.0}, {"a": True}, {"a": None}, {"b": {"a": 1}})],
    "ppo.rejection": [OMITTED, [], [{"kind": "veto"}], *([{"kind": "veto", "below": below}] for below in (1e-4, 0.1))]
    + [[{"kind": "veto"}, {"kind": "divergence", "above": 1, "estimator": e}] for e in ("k2", "k3")],
    "kl": [OMITTED, {}, {"placement": "reward"}, {"placement": "none"}, {"placement": "loss"}]
    + [{"controller": {"kind": "fixed"}}, {"controller": {"kind": "adaptive", "target_kl": 1, "horizon": 10000}}]
    + [{"placement": "loss", "estimator": estimator} for estimator in ("k1", "k3", OWN)],
    "advantages": [OMITTED, {"kind": "gae"}, {"gamma": 1}, {"gae_lambda": 1}, OWN, OWN | {"checked": False}],
    "value": [{"learning_rate": 1}, {"kind": "separate", "learning_rate": 1.0}, {"learning_rate": 1, "epochs": 2}],
    "lora": [OMITTED, None, {"rank": 2, "alpha": 2}, {"rank": 2, "alpha": 2.0, "target_modules": []}],
    "reward.terms": [OMITTED, [{"kind": "exact_match"}], [{"kind": "exact_match", "weight": 1}], [{"kind": "format"}]]
    + [[{"kind": kind} for kind in kinds] for kinds in (("exact_match", "format"), ("format", "exact_match"))],
    "rollout.engine": [OMITTED, {"kind": "torch"}, {"kind": "sglang"}, {"kind": "sglang", "servers": 1}, OWN],
    "mismatch": [OMITTED, {}, {"sampler": {"precision": {}}}, *({"trainer": {"dropout": share}} for share in (0, 0.5))],
    "layout.threads": [OMITTED, 1, 2],
    "records.level": [OMITTED, "full", "lean"],
}  # fmt: skip
CHOICES = {name: st.sampled_from(range(len(values))) for name, values in VALUES.items()}


def tree_of(choice: dict[str, int]) -> dict[str, Any]:
    tree: dict[str, Any] = deepcopy(BASE)
    for name, index in choice.items():
        if VALUES[name][index] is not OMITTED:
            set_field(tree, name, deepcopy(VALUES[name][index]))
    return tree


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two trees that differ in a few fields, or only in how a value is written."""
    first = draw(st.fixed_dictionaries(CHOICES))
    changed = draw(st.lists(st.sampled_from(list(VALUES)), max_size=2, unique=True))
    return tree_of(first), tree_of(first | {name: draw(CHOICES[name]) for name in changed})


def in_full(config: Experiment) -> str:
    """Every value, every default too."""
    return json.dumps(config.model_dump(mode="json", exclude={"records"}), sort_keys=True)


def require_one_digest_for_one_value(first: Experiment, second: Experiment) -> None:
    same = in_full(first) == in_full(second)
    assert (first.digest() == second.digest()) is same
    assert (first.canonical_json() == second.canonical_json()) is same  # no collision is drawn


@given(pairs())
def test_two_configurations_have_one_digest_exactly_if_all_values_are_equal(trees: tuple[Any, Any]) -> None:
    require_one_digest_for_one_value(*(build_config(tree, "file") for tree in trees))


@pytest.mark.parametrize("name", VALUES)
def test_each_way_to_write_a_field_has_the_digest_of_its_value(name: str) -> None:
    configs = [build_config(tree_of({name: index}), "file") for index in range(len(VALUES[name]))]
    for first in configs:
        for second in configs:
            require_one_digest_for_one_value(first, second)
    assert len({config.digest() for config in configs}) > 1 or name == "records.level"


@given(st.fixed_dictionaries(CHOICES), st.data())
def test_a_default_may_be_written_or_omitted(choice: dict[str, int], data: st.DataObject) -> None:
    whole = build_config(tree_of(choice), "file")
    tree = whole.model_dump(mode="json")
    for path in data.draw(st.lists(st.sampled_from(sorted(flat(tree))), min_size=1, max_size=5, unique=True)):
        without(tree, path)
    try:
        part = build_config(tree, "file")
    except UserError:  # it has no default
        return
    require_one_digest_for_one_value(whole, part)


def without(tree: Any, path: str) -> None:
    """Remove a field, unless it is an entry of a list."""
    *parents, leaf = path.split(".")
    for name in parents:
        tree = tree[int(name) if isinstance(tree, list) else name]
    if isinstance(tree, dict):
        del tree[leaf]


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Any, str], Experiment]]:
    """`build_config` of a later version, in which every section has one more field."""
    folder = tmp_path_factory.mktemp("later") / "config"
    shutil.copytree(Path(ppo_repro.__path__[0]) / "config", folder)
    section = (folder / "section.py").read_text()
    config = '    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)\n'
    assert section.count(config) == 1
    # a default of all fields of `SamplerPrecision`, which looks at all its fields
    (folder / "section.py").write_text(section.replace(config, f'{config}    added: str = "float32"\n'))
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("ppo_repro.config")]:
            patch.delitem(sys.modules, name)
        patch.setattr(ppo_repro, "__path__", [str(folder.parent), *ppo_repro.__path__])
        patch.setattr(ppo_repro, "config", None)
        build = importlib.import_module("ppo_repro.config.files").build_config
        for name in [name for name in sys.modules if name.startswith("ppo_repro.config")]:
            patch.delitem(sys.modules, name)
    yield build


@given(choice=st.fixed_dictionaries(CHOICES))
def test_a_new_field_with_a_default_changes_no_digest(
    later: Callable[[Any, str], Experiment], choice: dict[str, int]
) -> None:
    now, then = build_config(tree_of(choice), "file"), later(tree_of(choice), "file")
    assert in_full(then).count('"added": "float32"') > 8
    assert then.digest() == now.digest()
    for section in ("", "ppo.", "mismatch.trainer.", "layout."):
        tree = tree_of(choice)
        set_field(tree, f"{section}added", "float16")
        assert later(tree, "file").digest() != now.digest(), "the control: another value of the new field"


def sections_in(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A section and all sections below it."""
    yield section
    for field in section.model_fields.values():
        for below in sections_of(field.annotation):
            yield from sections_in(below)


SECTIONS = {section.__name__: section for model in CONFIGS.values() for section in sections_in(model)}


def defaults_of(section: type[BaseModel]) -> dict[str, Any]:
    """The defaults of a section; of a default section its class too."""
    fields = {name: field.default for name, field in section.model_fields.items() if not field.is_required()}
    sections = {name: type(value).__name__ for name, value in fields.items() if isinstance(value, Section)}
    values = {name: beyond_defaults(value) for name, value in fields.items()}
    return values | {name: [kind, values[name]] for name, kind in sections.items()}


def test_of_the_kinds_of_a_field_one_at_most_is_the_default() -> None:
    """The digest leaves the default kind out, so a second one would have the same digest."""
    for section in SECTIONS.values():
        for field in section.model_fields.values():
            kinds = [kind.model_fields.values() for kind in sections_of(field.annotation)]
            assert sum(not any(tag_of(f) and f.is_required() for f in fields) for fields in kinds) <= 1


def test_no_default_changes_without_a_new_number() -> None:
    """A new field needs no line in the file."""
    now = {name: defaults_of(section) for name, section in SECTIONS.items()}
    then = json.loads(Path(__file__).with_name("defaults.json").read_text())
    assert then.pop("DEFAULTS") == DEFAULTS, "write the number into the file"
    assert then.keys() <= now.keys(), "a section has another name or is gone: change the file too"
    changed = {
        f"{section}.{name}": [value, now[section][name]]
        for section, fields in then.items()
        for name, value in fields.items()
        if name in now.get(section, {}) and now[section][name] != value
    }
    assert changed == {}, "add 1 to DEFAULTS in ppo_repro/config/section.py, and write number and default into the file"
