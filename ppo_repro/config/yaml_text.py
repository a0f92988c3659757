"""Read and write YAML: plain data of limited size, numbers as numbers.

Tags and aliases are refused, because a `--set` would change both fields that share an alias.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import open_regular
from ppo_repro.base.output import has_password

MAX_BYTES = 256 * 1024
_NUMBER = "-+.0123456789"
_SCALARS = {  # of YAML 1.2: pattern, first characters
    "bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    "null": (r"^(?:null|Null|NULL|~|)$", ("n", "N", "~", "")),
    "int": (r"^[-+]?[0-9]+$", _NUMBER),
    "float": (r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$", _NUMBER),
}
# YAML 1.1 reads all but None as true or false; a template takes any text for true
_AMBIGUOUS = re.compile(r"^(?:yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF|None)$")
WITH_EXPONENT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")


def _at(mark: Any, text: str) -> UserError:
    return UserError(f"line {mark.line + 1}: {text}")


class _Loader(yaml.SafeLoader):
    """Loads YAML 1.2 scalars: `1e-3` is a number, a plain `no` or a repeated key is an error."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.tag is not None:
            raise _at(event.start_mark, "has a tag or an alias; write the value out")
        if isinstance(event, yaml.ScalarEvent) and event.style is None and _AMBIGUOUS.match(event.value):
            word = event.value
            raise _at(event.start_mark, f'{word} may be a text or not; write true, false, null, or "{word}" in quotes')
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: list[Any] = [key.value for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if key.value in names[:number]:
                raise _at(key.start_mark, f"field '{key.value}' is given twice; keep one")
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node))  # PyYAML reads 010 as octal


class _Dumper(yaml.SafeDumper):
    """Quotes every text that a YAML 1.1 reader or `_Loader` would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML's other styles lose line breaks such as U+0085
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')


_Loader.yaml_implicit_resolvers = {}
for _name, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), list(_first))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", _AMBIGUOUS, list("yYnNoO"))  # in quotes
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Dumper.add_representer(str, _Dumper.represent_str)


def parse_yaml(text: str) -> Any:
    """Parse YAML with numbers as numbers. Raises UserError, naming the line, for anything except plain data."""
    for number, line in enumerate(text.splitlines(), 1):
        if has_password(line):
            raise UserError(f"line {number}: has a URI or option with a password, which records would keep; remove it")
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        reason = " ".join(str(getattr(error, "problem", error)).split())
        raise UserError(f"{where}not valid YAML: {reason}") from error


def read_yaml(path: Path) -> Any:
    """Parse a YAML file of at most MAX_BYTES. Raises UserError if anything is wrong."""
    try:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(f"{path}: has more than {MAX_BYTES // 1024} KiB, which no YAML file here needs")
        text = content.decode()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text; give the path of a YAML file") from error
    try:
        return parse_yaml(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def write_yaml(tree: Any) -> str:
    """Write plain data as YAML that reads back to an equal tree."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def describe_value(value: Any) -> str:
    """Return a value as it looks in a YAML file, on one line."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
