"""The reference of all configuration fields: FIELDS.md and `ppo-repro fields` are made from the models here.

python -m ppo_repro.config.reference > ppo_repro/config/FIELDS.md
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ppo_repro.config.control import ControlConfig
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.config.yaml_text import describe_value
from ppo_repro.errors import UserError
from ppo_repro.output import did_you_mean

BEYOND_MEASURE = 1e5  # a limit that nobody reaches is not shown
FILES = {
    "": (RunConfig, "A file for `run`: PPO on a language model."),
    "control": (ControlConfig, "A file for `control`: PPO on a Gymnasium environment."),
    "dpo": (DPOConfig, "A file for `dpo`: DPO on the responses of a recorded run."),
}


@dataclass(frozen=True)
class Row:
    """One field: its name, what it may be, its default (empty if it must be given), and what it means."""

    name: str
    allowed: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Group:
    """The fields of one section; of a section with several kinds, the fields of one kind."""

    path: str  # as after --set; empty for the top level of a file for `run`
    kind: str  # `kind: clip`; empty for a section with one kind
    meaning: str
    fields: tuple[Row, ...]

    @property
    def title(self) -> str:
        return ", ".join(filter(None, (self.path or "run", self.kind)))


def groups(section: str | None = None) -> list[Group]:
    """All groups, or those of one section and below it; UserError for an unknown section."""
    seen: dict[type[BaseModel], str] = {}
    found = [group for name, (model, about) in FILES.items() for group in _groups(model, name, about, seen)]
    if section is None:
        return found
    below = [group for group in found if group.path == section or group.path.startswith(f"{section}.")]
    if not below:
        paths = list(dict.fromkeys(group.path for group in found if group.path))
        raise UserError(f"fields {section}: must be one of {', '.join(paths)}{did_you_mean(section, paths)}")
    return below


def _groups(model: type[BaseModel], path: str, about: str, seen: dict[type[BaseModel], str]) -> Iterator[Group]:
    if model in seen:
        yield Group(path, "", f"The fields of `{seen[model]}`.", ())
        return
    seen[model] = path
    rows, below = [], []
    kind = ""
    for name, info in model.model_fields.items():
        sections = _sections(info.annotation)
        where = f"{path}.{name}" if path else name
        if sections:
            below += [(section, where) for section in sections]
        elif _chooses(info):
            kind = f"{name}: {get_args(info.annotation)[0]}"
        else:
            rows.append(Row(name, _allowed(info.annotation, info.metadata), _default(info), str(info.description)))
    if rows or kind:
        yield Group(path, kind, about, tuple(rows))
    for section, where in below:
        yield from _groups(section, where, (section.__doc__ or "").split("\n\n")[0].strip(), seen)


def _chooses(info: FieldInfo) -> bool:
    """Whether the field is the word that chooses its section among several."""
    return get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections(part)]


def _allowed(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What a field may be, in words."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *constraints = get_args(annotation)
        return _allowed(inner, [c for x in constraints for c in (x.metadata if isinstance(x, FieldInfo) else (x,))])
    if origin is Literal:
        return ", ".join(f"`{word}`" for word in get_args(annotation))
    if origin in (Union, UnionType):
        return " or ".join(_allowed(part) for part in get_args(annotation))
    if origin is tuple:
        return f"list of {_allowed(get_args(annotation)[0])}"
    words = {bool: "true, false", int: "whole number", float: "number", str: "text", NoneType: "null"}
    return words.get(annotation, "mapping") + (_range(metadata) if annotation in (int, float) else "")


def _range(metadata: Sequence[Any]) -> str:
    bounds = {name: getattr(c, name) for c in metadata for name in ("ge", "gt", "le", "lt") if hasattr(c, name)}
    text = ""
    if "ge" in bounds:
        text += f" from {bounds['ge']:g}"
    if "gt" in bounds:
        text += f" above {bounds['gt']:g}"
    if bounds.get("le", BEYOND_MEASURE) < BEYOND_MEASURE:
        text += f" to {bounds['le']:g}"
    if bounds.get("lt", BEYOND_MEASURE) < BEYOND_MEASURE:
        text += f" below {bounds['lt']:g}"
    return text


def _default(info: FieldInfo) -> str:
    if info.default is PydanticUndefined:
        return ""
    value = list(info.default) if isinstance(info.default, tuple) else info.default
    return describe_value(value)


def page() -> str:
    """FIELDS.md."""
    lines = [
        "# All fields",
        "",
        "Made by `python -m ppo_repro.config.reference`. A field without a default must be given.",
    ]
    for group in groups():
        lines += ["", f"## `{group.title}`", "", group.meaning]
        if group.fields:
            lines += ["", "| field | allowed | default | meaning |", "|---|---|---|---|"]
        for field in group.fields:
            default = f"`{field.default}`" if field.default else ""
            cells = (f"`{field.name}`", field.allowed, default, field.meaning)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def text(section: str | None = None) -> list[str]:
    """The lines that `ppo-repro fields` prints."""
    lines: list[str] = []
    for group in groups(section):
        lines += ["", group.title, f"  {group.meaning}"]
        for field in group.fields:
            default = f"; default {field.default}" if field.default else "; must be given"
            lines += [f"  {field.name}: {field.allowed.replace('`', '')}{default}", f"      {field.meaning}"]
    return lines[1:]


if __name__ == "__main__":
    print(page(), end="")
