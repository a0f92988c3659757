"""Change parsed configurations before they are checked: relative paths, data of PyYAML, overrides."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from ppo_repro.base.errors import Mistakes, UserError
from ppo_repro.base.latest import LATEST, run_named
from ppo_repro.config.fields import types_of_fields
from ppo_repro.config.kinds import CONFIGS
from ppo_repro.config.section import Foreign, PathText, ProgramText
from ppo_repro.config.yaml_text import WITH_EXPONENT, parse_yaml

# Names of fields. A tree is searched by name before it is checked, so a name has one type in all sections.
_TYPES = [pair for model in CONFIGS.values() for pair in types_of_fields(model)]
PATHS, PROGRAMS, FOREIGN = (
    frozenset(name for name, declared in _TYPES if declared == wanted) for wanted in (PathText, ProgramText, Foreign)
)


def path_fields(tree: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield for every path of an input in a parsed configuration its dotted field, its section, and its name there."""
    return _texts(tree, PATHS)


def _texts(tree: Any, names: frozenset[str], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted field, section and name of every path in a field with one of these names."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in children:
        if name in names and isinstance(value, str) and value and "://" not in value:
            yield f"{prefix}{name}", tree, name
        elif name not in FOREIGN:
            yield from _texts(value, names, f"{prefix}{name}.")


def from_pyyaml(tree: Any) -> Any:
    """Return plain data of PyYAML as `parse_yaml` reads it: texts such as `1e-3` are numbers, dates are texts.

    Texts in a FOREIGN field stay texts. A name may be dotted, as in overrides.
    """
    return _from_pyyaml(tree, is_foreign=False)


def _from_pyyaml(tree: Any, is_foreign: bool) -> Any:
    if isinstance(tree, Mapping):
        return {
            name: _from_pyyaml(value, is_foreign or not FOREIGN.isdisjoint(str(name).split(".")))
            for name, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [_from_pyyaml(value, is_foreign) for value in tree]
    if isinstance(tree, date):
        return tree.isoformat()
    return float(tree) if not is_foreign and isinstance(tree, str) and WITH_EXPONENT.fullmatch(tree) else tree


def from_folder(tree: Any, folder: Path) -> Any:
    """Return a parsed configuration whose relative paths start at `folder`; `run: latest` is the newest run here."""
    tree = _copy(tree)
    for _, section, name in _texts(tree, PATHS | PROGRAMS):
        if name in PROGRAMS and "/" not in section[name]:
            continue
        is_latest = name == "run" and section[name] == LATEST
        section[name] = os.path.abspath(folder / (Path.cwd() / run_named(LATEST) if is_latest else section[name]))
    return tree


def _copy(tree: Any) -> Any:
    """Return a tree of new dicts and lists with the same values: a caller in Python may have put in any object."""
    if isinstance(tree, dict):
        return {name: _copy(value) for name, value in tree.items()}
    return [_copy(value) for value in tree] if isinstance(tree, list) else tree


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply `a.b=c` overrides to a parsed configuration. Raises Mistakes with a line for each wrong override."""
    wrong = []
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            wrong.append(f"--set {override}: must be FIELD=VALUE, for example --set ppo.learning_rate=1e-4")
            continue
        try:
            set_field(tree, path, parse_yaml(text))
        except UserError as error:
            wrong.append(f"--set {override}: {error}")
    if wrong:
        raise Mistakes(wrong)


def set_field(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set the dotted `path` of a parsed tree to `value`; missing groups and groups that are null are made.

    Raises UserError if the path leads through a plain value.
    """
    node: Any = tree
    *parents, leaf = path.split(".")
    if not leaf or not all(parents) or len(parents) > 20:
        raise UserError("a field is up to 20 names with a dot between them")
    for name in parents:
        child = _entry(node, name) if isinstance(node, list) else node.get(name)
        if child is None and isinstance(node, dict):
            child = node[name] = {}
        if not isinstance(child, dict | list):
            raise UserError(f"'{name}' is a value, not a group of fields")
        node = child
    if isinstance(node, list):
        _entry(node, leaf)
        node[int(leaf)] = value
    else:
        node[leaf] = value


def _entry(values: list[Any], index: str) -> Any:
    """Return an entry of a list by its number from 0. Raises UserError if there is none."""
    if not index.isdecimal() or int(index) >= len(values):
        raise UserError(f"'{index}' must be the number of an entry, from 0 to {len(values) - 1}")
    return values[int(index)]
