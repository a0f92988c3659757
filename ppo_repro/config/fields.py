"""The fields of configurations: their reference, and one line for each mistake that a user made in one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import closest, did_you_mean
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.config.yaml_text import describe_value

LIMITS = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
SHOWN_BELOW = 1e5  # a limit that nobody reaches is not shown
WORDS = {bool: "true, false", int: "whole number", float: "number", str: "text", NoneType: "null"}

MAX_MISTAKES = 30  # lines that are printed; a screen holds no more
# of each kind of file a field that no other kind has, and the command that takes the file
COMMANDS = {"rollout": "run", "environment": "control", "dpo": "dpo", "axes": "grid", "base": "grid"}


@dataclass(frozen=True)
class Group:
    """The fields of one section, or of one kind of a section with several kinds."""

    path: str  # as after --set; empty for the top level of a file for `run`
    kind: str  # `kind: clip`; empty for a section with one kind
    meaning: str
    fields: tuple[dict[str, str], ...]  # name, allowed values, default (empty if it must be given), meaning


def groups(section: str | None = None) -> list[Group]:
    """Return all groups, or a section and the groups below it. Raises UserError for an unknown section."""
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
    below, rows, kind = list[tuple[type[BaseModel], str]](), list[dict[str, str]](), ""
    for name, info in model.model_fields.items():
        if sections := sections_of(info.annotation):
            below += [(section, f"{path}.{name}".lstrip(".")) for section in sections]
        elif get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1:
            kind = f"{name}: {get_args(info.annotation)[0]}"  # chooses this section among several
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
    """Describe the values that a field may have."""
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
    numbers = [f" {word} {limit:g}" for word, limit in seen if limit < SHOWN_BELOW and annotation in (int, float)]
    return WORDS.get(annotation, "mapping") + "".join(numbers)


def text(section: str | None = None) -> list[str]:
    """Return the lines that `ppo-repro fields` prints."""
    lines: list[str] = []
    for group in groups(section):
        lines += ["", ", ".join(filter(None, (group.path or "run", group.kind))), f"  {group.meaning}"]
        for field in group.fields:
            default = f"default {field['default']}" if field["default"] else "must be given"
            lines += [f"  {field['name']}: {field['allowed']}; {default}", f"      {field['meaning']}"]
    return lines[1:]


def mistakes(model: type[BaseModel], tree: dict[str, Any], error: ValidationError) -> list[str]:
    """Return one line for each mistake that pydantic found in the tree of a `model`, in the order of its fields."""
    errors = error.errors(include_url=False)
    lines = [line for details in errors[:MAX_MISTAKES] for line in _lines(model, tree, details)]
    return (
        lines
        if len(errors) <= MAX_MISTAKES
        else [*lines, f"{len(errors) - MAX_MISTAKES} more mistakes; correct these first"]
    )


def command_of(tree: object) -> str | None:
    """Return the command that takes a parsed file, by the fields it has; None if they do not say."""
    commands = {COMMANDS[name] for name in COMMANDS if isinstance(tree, dict) and name in tree}
    return commands.pop() if len(commands) == 1 else None


def field_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every field that holds a value, once.

    A group with several kinds gives the fields of all kinds.
    """
    paths = dict[str, None]()
    for name, field in model.model_fields.items():
        below = sections_of(field.annotation)
        for section in below:
            paths |= dict.fromkeys(field_paths(section, f"{prefix}{name}."))
        if not below:
            paths[f"{prefix}{name}"] = None
    yield from paths


def sections_of(annotation: Any) -> tuple[type[BaseModel], ...]:
    """Return the sections that an annotation names, through unions, lists and `Annotated`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    return tuple(section for part in get_args(annotation) for section in sections_of(part))


def _lines(model: type[BaseModel], tree: dict[str, Any], details: ErrorDetails) -> list[str]:
    steps = _written(tree, details)
    path, message = ".".join(map(str, steps)), details["msg"].removeprefix("Value error, ")
    context = details.get("ctx", {})
    chooser = str(context.get("discriminator", "")).strip("'")
    match details["type"]:
        case "missing":
            return [f"{path}: missing; add it"]
        case "union_tag_not_found":
            return [f"{path}.{chooser}: missing; add it"]
        case "extra_forbidden":
            return [f"{path}: unknown field; remove it or correct its name{_meant(model, path)}"]
        case "union_tag_invalid":
            tag, allowed = str(context["tag"]), context["expected_tags"]
            meant = did_you_mean(tag, allowed.replace("'", "").split(", "))
            return [f"{path}.{chooser} = {tag!r}: must be one of {allowed}{meant}"]
        case "tuple_type" | "list_type":
            message = "must be a list"
        case "dict_type" | "model_type" | "model_attributes_type":
            message = "must be a mapping of fields"
        case "literal_error":
            message += did_you_mean(str(details["input"])[:100], context["expected"].split("'")[1::2])
    if not path:
        return message.splitlines()  # a check of the whole file may find several
    if isinstance(details["input"], dict) and details["type"] == "value_error":
        return [f"{path}: {line}" for line in message.splitlines()]
    return [f"{path} = {details['input']!r}: {message[0].lower()}{message[1:]}"]


def _written(tree: Any, details: ErrorDetails) -> list[int | str]:
    """Return the path of a mistake without the kinds that pydantic puts into it."""
    steps: list[int | str] = []
    for index, step in enumerate(details["loc"]):
        is_missing = details["type"] == "missing" and index == len(details["loc"]) - 1
        is_entry = isinstance(step, int) if isinstance(tree, list) else isinstance(tree, dict) and step in tree
        if is_missing or is_entry:
            steps.append(step)
            tree = None if is_missing else tree[step]
    return steps


def _meant(model: type[BaseModel], path: str) -> str:
    """Suggest what an unknown field may mean: a field of another kind, or a similar one of the file."""
    plain = re.sub(r"\.\d+", "", path)
    group, _, name = plain.rpartition(".")
    known = list(field_paths(model))
    if any(f"{other}.".startswith(f"{plain}.") for other in known):
        return f"; it belongs to another {group}.kind"
    last = closest(name, [other.rpartition(".")[2] for other in known])
    similar = [other for other in known if other.rpartition(".")[2] == last]
    own = f"{group}.{last}"
    return f"; did you mean {own if own in similar else ' or '.join(similar[:3])}?" if similar else ""
