"""The reference of all configuration fields: `ppo-repro fields` prints it, and `make docs` writes it as a page."""

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
from ppo_repro.config.mistakes import sections_of, tag_of
from ppo_repro.config.run import RunConfig
from ppo_repro.config.yaml_text import describe_value
from ppo_repro.errors import UserError
from ppo_repro.output import did_you_mean

LIMITS = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
UNSEEN = 1e5  # a limit that nobody reaches is not shown
WORDS = {bool: "true, false", int: "whole number", float: "number", str: "text", NoneType: "null"}


@dataclass(frozen=True)
class Group:
    """The fields of one section, or of one kind of a section with several kinds."""

    path: str  # as after --set; empty for the top level of a file for `run`
    kind: str  # `kind: clip`; empty for a section with one kind
    meaning: str
    fields: tuple[dict[str, str], ...]  # name, allowed values, default (empty if it must be given), meaning


def groups(section: str | None = None) -> list[Group]:
    """All groups, or a section and the groups below it; UserError for an unknown section."""
    every = [
        *_groups(RunConfig, "", "A file for `run`: PPO on a language model."),
        *_groups(ControlConfig, "control", "A file for `control`: PPO on a Gymnasium environment."),
        *_groups(DPOConfig, "dpo", "A file for `dpo`: DPO on the responses of a recorded run."),
    ]
    if section is None:
        return every
    below = [group for group in every if group.path == section or group.path.startswith(f"{section}.")]
    if not below:
        paths = list(dict.fromkeys(group.path for group in every if group.path))
        raise UserError(f"fields {section}: must be one of {', '.join(paths)}{did_you_mean(section, paths)}")
    return below


def _groups(model: type[BaseModel], path: str, meaning: str) -> Iterator[Group]:
    tag, below = tag_of(model), []
    rows, kind = list[dict[str, str]](), ""
    for name, info in model.model_fields.items():
        if sections := sections_of(info.annotation):
            below += [(section, f"{path}.{name}".lstrip(".")) for section in sections]
        elif tag is not None and get_args(info.annotation) == (tag,):
            kind = f"{name}: {tag}"
        else:
            value = list(info.default) if isinstance(info.default, tuple) else info.default
            default = "" if value is PydanticUndefined else describe_value(value)
            allowed = _allowed(info.annotation, info.metadata)
            rows.append({"name": name, "allowed": allowed, "default": default, "meaning": str(info.description)})
    if rows or kind:
        yield Group(path, kind, meaning, tuple(rows))
    for section, where in below:
        yield from _groups(section, where, (section.__doc__ or "").split("\n\n")[0].strip())


def _allowed(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """What a field may be, in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _allowed(
            inner[0], [limit for x in inner[1:] for limit in (x.metadata if isinstance(x, FieldInfo) else [x])]
        )
    if origin is Literal:
        return ", ".join(inner)
    if origin in (Union, UnionType):
        return " or ".join(_allowed(part) for part in inner)
    if origin is tuple:
        return f"list of {_allowed(inner[0])}"
    seen = [(word, getattr(x, name)) for name, word in LIMITS.items() for x in limits if hasattr(x, name)]
    numbers = [f" {word} {limit:g}" for word, limit in seen if limit < UNSEEN and annotation in (int, float)]
    return WORDS.get(annotation, "mapping") + "".join(numbers)


def text(section: str | None = None) -> list[str]:
    """The lines that `ppo-repro fields` prints."""
    lines: list[str] = []
    for group in groups(section):
        lines += ["", ", ".join(filter(None, (group.path or "run", group.kind))), f"  {group.meaning}"]
        for field in group.fields:
            default = f"default {field['default']}" if field["default"] else "must be given"
            lines += [f"  {field['name']}: {field['allowed']}; {default}", f"      {field['meaning']}"]
    return lines[1:]
