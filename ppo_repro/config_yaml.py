"""A configuration from YAML and to YAML: numbers parse as numbers, every mistake is one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ppo_repro.config import JsonlTask, ModelFolder, RunConfig, Section
from ppo_repro.errors import UserError


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: `1e-3` is a number, `no` and `on` are words, a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise UserError(f"line {key.start_mark.line + 1}: a field name must be a word, not a list or group")
            if key.value in seen:
                raise UserError(f"line {key.start_mark.line + 1}: field '{key.value}' is given twice; keep one")
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node))  # PyYAML reads 010 as octal


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|false)$", "tf"),
    ("null", r"^(?:null|~|)$", "n~\0"),
    ("int", r"^[-+]?[0-9]+$", "-+0123456789"),
    ("float", r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
):
    for _character in _first:
        _Loader.yaml_implicit_resolvers.setdefault("" if _character == "\0" else _character, []).append(
            (f"tag:yaml.org,2002:{_tag}", re.compile(_pattern))
        )


class _Dumper(yaml.SafeDumper):
    """Quotes every text that a YAML 1.1 reader or `_Loader` would take for something else."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML's other styles lose line breaks such as U+0085
        style = None if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


for _character, _resolvers in _Loader.yaml_implicit_resolvers.items():
    for _tag, _regexp in _resolvers:
        _Dumper.add_implicit_resolver(_tag, _regexp, [_character])
_Dumper.add_representer(str, _Dumper.represent_str)


def parse_yaml(text: str) -> Any:
    """Parse YAML with numbers as numbers; raises UserError with the line on bad syntax."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        reason = " ".join(str(getattr(error, "problem", error)).split())
        raise UserError(f"{where}not valid YAML: {reason}") from error
    except ValueError as error:  # a value that does not fit its explicit tag, such as `!!int x`
        raise UserError(f"not valid YAML: {error}") from error


def _apply_override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise UserError(f"--set {override}: must be FIELD=VALUE, for example --set ppo.clip_range=0.1")
    node = tree
    *parents, leaf = path.split(".")
    for name in parents:
        child = node.setdefault(name, {})
        if not isinstance(child, dict):
            raise UserError(f"--set {override}: '{name}' is a value, not a group of fields")
        node = child
    try:
        node[leaf] = parse_yaml(text)
    except UserError as error:
        raise UserError(f"--set {override}: {error}") from error


def _absolute_paths(config: RunConfig) -> RunConfig:
    """Relative paths start at the current directory; recorded ones must not depend on it."""

    def absolute(path: str) -> str:
        return str(Path(path).absolute())

    model, task = config.model, config.task
    if isinstance(model, ModelFolder):
        model = model.model_copy(update={"path": absolute(model.path)})
    if isinstance(task, JsonlTask):
        task = task.model_copy(update={"path": absolute(task.path)})
    if task.reward != "exact_match":
        task = task.model_copy(update={"reward": absolute(task.reward)})
    return config.model_copy(update={"model": model, "task": task})


def describe(error: ValidationError, source: str) -> str:
    """One line: field path, the value found, what is allowed, what to do."""
    first, *rest = error.errors(include_url=False)
    steps = [str(step) for step in first["loc"]]
    # pydantic names the chosen variant of a union in the path; users do not write it
    path = ".".join(s for i, s in enumerate(steps) if not (i == 1 and s in {"tiny", "folder", "arithmetic", "jsonl"}))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        text = f"{path}: missing; add it"
    elif first["type"] == "extra_forbidden":
        text = f"{path}: unknown field; remove it or correct its name"
    elif first["type"] == "union_tag_invalid":
        text = f"{path}.kind = {first['ctx']['tag']!r}: must be one of {first['ctx']['expected_tags']}"
    elif first["type"] == "union_tag_not_found":
        text = f"{path}.kind: missing; add it"
    elif not path:
        text = message
    elif isinstance(first["input"], dict):
        text = f"{path}: {message}"
    else:
        text = f"{path} = {first['input']!r}: {message[0].lower()}{message[1:]}"
    more = f" (and {len(rest)} more)" if rest else ""
    return f"{source}: {text}{more}"


def _require_mapping(tree: Any, source: str) -> None:
    if not isinstance(tree, dict):
        raise UserError(f"{source}: must be a mapping of fields, found {type(tree).__name__}")


def build_config(tree: Any, source: str) -> RunConfig:
    """Validate a parsed tree; raises UserError naming field, value and what is allowed."""
    _require_mapping(tree, source)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError(describe(error, source)) from error


def load_tree(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The fields of a YAML file with `a.b=c` overrides applied, not yet validated; raises UserError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text; give the path of a YAML file") from error
    try:
        tree = parse_yaml(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    _require_mapping(tree, str(path))
    for override in overrides:
        _apply_override(tree, override)
    return tree


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML configuration and apply `a.b=c` overrides; raises UserError on anything wrong."""
    return _absolute_paths(build_config(load_tree(path, overrides), str(path)))


def dump_yaml(config: Section) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal config."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
