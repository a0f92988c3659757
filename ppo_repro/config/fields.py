"""Read the fields of configurations from the sections, for `ppo-repro fields`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import did_you_mean
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.config.section import FIXED
from ppo_repro.config.yaml_text import describe_value

LIMITS = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
SHOWN_BELOW = 1e5  # a limit that nobody reaches is not shown
WORDS = {bool: "true, false", int: "whole number", float: "number", str: "text", NoneType: "null"}


@dataclass(frozen=True)
class Field:
    """The description of one field."""

    name: str
    allowed: str  # `whole number from 1`
    default: str  # as in a YAML file; empty if the field must be given
    meaning: str


@dataclass(frozen=True)
class Group:
    """The fields of one section, or of one kind of a section with several kinds."""

    file: str  # the kind of file that has it: run, control or dpo
    path: str  # as after --set; empty for the top level of the file
    kind: str  # `kind: clip`; empty for a section with one kind
    meaning: str
    fields: tuple[Field, ...]


def groups(sections: Sequence[str] = ()) -> list[Group]:
    """Return the groups of these sections and of all sections below them; without `sections` all groups.

    `run`, `control` and `dpo` name all groups of one kind of file. Raises UserError for an unknown section.
    """
    every = [
        *_groups(RunConfig, "run", "", "A file for PPO on a language model."),
        *_groups(ControlConfig, "control", "", "A file for PPO on a Gymnasium environment."),
        *_groups(DPOConfig, "dpo", "", "A file for DPO on the responses of a recorded run, or on a file of pairs."),
    ]
    inner = []
    for section in sections:
        below = [g for g in every if section in (g.file, g.path) or g.path.startswith(f"{section}.")]
        if not below:
            names = list(dict.fromkeys(group.path or group.file for group in every))
            raise UserError(f"fields {section}: must be one of {', '.join(names)}{did_you_mean(section, names)}")
        inner += [group for group in below if group not in inner]
    return inner if sections else every


def _groups(model: type[BaseModel], file: str, path: str, meaning: str) -> Iterator[Group]:
    """Yield the group of a section if it has a value, then the groups of the sections in it."""
    kind, fields = "", []
    for name, info in model.model_fields.items():
        if (tag := tag_of(info)) is not None:
            kind = f"{name}: {tag}"
        elif _holds_value(info):
            value = list(info.default) if isinstance(info.default, tuple) else info.default
            default = "" if value is PydanticUndefined else describe_value(value)
            fields.append(Field(name, _allowed(info.annotation, info.metadata), default, str(info.description)))
    if fields or kind:
        yield Group(file, path, kind, meaning, tuple(fields))
    for name, info in model.model_fields.items():
        for section in sections_of(info.annotation):
            first_paragraph = (section.__doc__ or "").split("\n\n")[0].strip()
            yield from _groups(section, file, f"{path}.{name}".lstrip("."), first_paragraph)


def _holds_value(field: FieldInfo) -> bool:
    """Return whether a field may have a number or a word as its value, not only a section."""
    return not sections_of(field.annotation) or _has_words(field.annotation)


def _has_words(annotation: Any) -> bool:
    """Return whether one of the types of a field is a choice of words."""
    parts = get_args(annotation)
    return get_origin(annotation) is not Literal and any(get_origin(p) is Literal or _has_words(p) for p in parts)


def _allowed(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """Describe the values that a field may have; `limits` are objects with an attribute `ge`, `gt`, `le` or `lt`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        notes = [note.metadata if isinstance(note, FieldInfo) else [note] for note in inner[1:]]
        return _allowed(inner[0], list(chain.from_iterable(notes)))
    if origin is Literal:
        return ", ".join(inner)
    if origin in (Union, UnionType):
        return " or ".join(_allowed(part) for part in inner)
    if origin is tuple:
        return f"list of {_allowed(inner[0])}"
    if annotation not in (int, float):
        return WORDS.get(annotation, "mapping")
    limits_by_word = [(word, getattr(limit, name, None)) for name, word in LIMITS.items() for limit in limits]
    shown = [f"{word} {number:g}" for word, number in limits_by_word if number is not None and number < SHOWN_BELOW]
    return " ".join([WORDS[annotation], *shown])


def text(chosen: Sequence[Group]) -> list[str]:
    """Return the lines that `ppo-repro fields` prints of some groups."""
    lines: list[str] = []
    for group in chosen:
        file = f"in a {group.file} file" if group.path and group.file != "run" else ""
        lines += ["", ", ".join(filter(None, (group.path or group.file, group.kind, file))), f"  {group.meaning}"]
        for field in group.fields:
            default = f"default {field.default}" if field.default else "must be given"
            lines += [f"  {field.name}: {field.allowed}; {default}", f"      {field.meaning}"]
    return lines[1:]


def field_paths(model: type[BaseModel]) -> list[str]:
    """Return the dotted path of every field that has a value, once, with the fields of all kinds of a group."""
    paths = dict[str, None]()
    for group in _groups(model, "", "", ""):
        names = [*group.kind.split(":")[:1], *(field.name for field in group.fields)]
        paths |= dict.fromkeys(".".join(filter(None, (group.path, name))) for name in names if name)
    return list(paths)


def marked_fields(model: type[BaseModel], mark: str) -> Iterator[str]:
    """Yield the dotted path of every field and section whose type is annotated with a mark."""
    for name, info in model.model_fields.items():
        if mark in info.metadata:
            yield name
            continue
        for section in sections_of(info.annotation):
            yield from (f"{name}.{below}" for below in marked_fields(section, mark))


def types_of_fields(model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    """Yield the name and each type of every field in a section and in all sections below it, without the mark FIXED."""
    for name, hint in get_type_hints(model, include_extras=True).items():
        if name in model.model_fields:
            declared = _without_mark(hint)
            yield from ((name, each) for each in (declared, *get_args(declared)))
        for section in sections_of(hint):
            yield from types_of_fields(section)


def _without_mark(hint: Any) -> Any:
    if get_origin(hint) is not Annotated:
        return hint
    declared, *metadata = get_args(hint)
    kept = [entry for entry in metadata if entry != FIXED]
    return Annotated[(declared, *kept)] if kept else declared


def sections_of(annotation: Any) -> tuple[type[BaseModel], ...]:
    """Return the sections that an annotation names, through unions, lists and `Annotated`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    return tuple(section for part in get_args(annotation) for section in sections_of(part))


def tag_of(field: FieldInfo) -> str | None:
    """Return the kind that a field selects among several; None if the field selects none."""
    values = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return values[0] if len(values) == 1 else None
