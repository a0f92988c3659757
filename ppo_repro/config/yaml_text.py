"""YAML as this project reads and writes it: plain data of modest size, numbers as numbers, nothing hidden.

What YAML has beyond that is refused in one line: tags, aliases (a kilobyte of them can stand for gigabytes, and what
two fields share a `--set` would change in both), deep nesting, endless files.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

import yaml

from ppo_repro.errors import UserError
from ppo_repro.output import has_password

MAX_BYTES = 256 * 1024
MAX_DEPTH = 50
MAX_DIGITS = 100  # of a whole number; Python's own limit is 4300, and no field takes more than 19


def _at(mark: Any, text: str) -> UserError:
    return UserError(f"line {mark.line + 1}: {text}")


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: `1e-3` is a number, `no` and `on` are words, a repeated key is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _at(event.start_mark, f"*{event.anchor} repeats what is written elsewhere; write it out here")
        if event.tag is not None:
            raise _at(event.start_mark, f"not valid YAML: tag '{event.tag}'; write the value without a tag")
        if self.depth == MAX_DEPTH:
            raise _at(event.start_mark, f"groups and lists are nested more than {MAX_DEPTH} deep")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _at(key.start_mark, "a field name must be a word, not a list or group")
            if key.value in names:
                raise _at(key.start_mark, f"field '{key.value}' is given twice; keep one")
            names.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        if len(text) > MAX_DIGITS:
            raise _at(node.start_mark, f"a number of {len(text)} digits; at most {MAX_DIGITS} are read")
        return int(text)  # PyYAML reads 010 as octal


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
    """Quotes every text that a YAML 1.1 reader or `_Loader` would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # `_Loader` reads none

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML's other styles lose line breaks such as U+0085
        style = None if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


for _character, _resolvers in _Loader.yaml_implicit_resolvers.items():
    for _tag, _regexp in _resolvers:
        _Dumper.add_implicit_resolver(_tag, _regexp, [_character])
_Dumper.add_representer(str, _Dumper.represent_str)


def parse_yaml(text: str) -> Any:
    """Parse YAML with numbers as numbers; raises UserError with the line on anything else than plain data."""
    for number, line in enumerate(text.splitlines(), 1):
        if has_password(line):
            raise UserError(
                f"line {number}: has a URI with a password or an option with one, which records would keep; "
                "remove the password"
            )
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        reason = " ".join(str(getattr(error, "problem", error)).split())
        raise UserError(f"{where}not valid YAML: {reason}") from error


def read_yaml(path: Path) -> Any:
    """Parse a YAML file of at most MAX_BYTES; raises UserError on anything wrong."""
    try:
        # a pipe can keep a reader waiting, and a device need not end
        if not stat.S_ISREG(path.stat().st_mode):
            reason = "Is a directory" if path.is_dir() else "not a regular file"
            raise UserError(f"{path}: cannot be read ({reason}); give the path of a YAML file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from error
    if len(content) > MAX_BYTES:
        raise UserError(f"{path}: has more than {MAX_BYTES // 1024} KiB, which no YAML file here needs")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text; give the path of a YAML file") from error
    try:
        return parse_yaml(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def write_yaml(tree: Any) -> str:
    """Plain data as YAML that reads back to an equal tree."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def describe_value(value: Any) -> str:
    """A value as one would write it in a YAML file, on one line."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
