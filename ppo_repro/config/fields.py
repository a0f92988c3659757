"""The fields of configurations: their reference, and one line for each mistake that a user made in one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import closest, did_you_mean
from ppo_repro.config import coming_from
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.config.yaml_text import describe_value

LIMITS = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
SHOWN_BELOW = 1e5  # a limit that nobody reaches is not shown
WORDS = {bool: "true, false", int: "whole number", float: "number", str: "text", NoneType: "null"}

MAX_MISTAKES = 30  # lines that are printed; a screen holds no more
NEARLY = 0.8  # share of letters in common by which a field of another section may be meant
# of each kind of file a field that no other kind has, and the command that takes the file
COMMANDS = {"rollout": "run", "environment": "control", "dpo": "dpo", "axes": "grid", "base": "grid"}


@dataclass(frozen=True)
class Group:
    """The fields of one section, or of one kind of a section with several kinds."""

    path: str  # as after --set; empty for the top level of a file for `run`
    kind: str  # `kind: clip`; empty for a section with one kind
    meaning: str
    fields: tuple[dict[str, str], ...]  # name, allowed values, default (empty if it must be given), meaning


def groups(sections: Sequence[str] = ()) -> list[Group]:
    """Return the groups of some sections and below them, of all if none is named. UserError for an unknown section."""
    every = [
        *_groups(RunConfig, "", "A file for `run`: PPO on a language model."),
        *_groups(ControlConfig, "control", "A file for `control`: PPO on a Gymnasium environment."),
        *_groups(DPOConfig, "dpo", "A file for `dpo`: DPO on the responses of a recorded run."),
    ]
    found = []
    for section in sections:
        below = [group for group in every if group.path == section or group.path.startswith(f"{section}.")]
        if not below:
            paths = list(dict.fromkeys(group.path for group in every if group.path))
            raise UserError(f"fields {section}: must be one of {', '.join(paths)}{did_you_mean(section, paths)}")
        found += [group for group in below if group not in found]
    return found if sections else every


def _groups(model: type[BaseModel], path: str, meaning: str) -> Iterator[Group]:
    below, rows, kind = list[tuple[type[BaseModel], str]](), list[dict[str, str]](), ""
    for name, info in model.model_fields.items():
        sections = sections_of(info.annotation)
        below += [(section, f"{path}.{name}".lstrip(".")) for section in sections]
        if sections and not _has_values(info.annotation):
            continue
        if get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1:
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


def _has_values(annotation: Any) -> bool:
    """Return whether a field may hold a word instead of a section."""
    parts = get_args(annotation)
    return get_origin(annotation) is not Literal and any(get_origin(p) is Literal or _has_values(p) for p in parts)


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


def text(sections: Sequence[str] = ()) -> list[str]:
    """Return the lines that `ppo-repro fields` prints."""
    lines: list[str] = []
    for group in groups(sections):
        lines += ["", ", ".join(filter(None, (group.path or "run", group.kind))), f"  {group.meaning}"]
        for field in group.fields:
            default = f"default {field['default']}" if field["default"] else "must be given"
            lines += [f"  {field['name']}: {field['allowed']}; {default}", f"      {field['meaning']}"]
    return lines[1:]


def mistakes(model: type[BaseModel], tree: dict[str, Any], error: ValidationError) -> list[str]:
    """Return one line for each mistake that pydantic found in the tree of a `model`, in the order of its fields.

    The fields of a section that belong to another kind of it share a line.
    """
    lines = dict.fromkeys(line for details in error.errors(include_url=False) for line in _lines(model, tree, details))
    shown = list(lines)[:MAX_MISTAKES]
    return (
        shown
        if len(lines) <= MAX_MISTAKES
        else [*shown, f"{len(lines) - MAX_MISTAKES} more mistakes; correct these first"]
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
        if not below or _has_values(field.annotation):
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
            kinds, known = _sections_at(model, steps), list(field_paths(model))
            tags = [str(_tag(kind.model_fields[chooser])) for kind in kinds]
            missing = (
                f"{path}.{chooser}: missing; must be one of {', '.join(tags)}{_likely(kinds, tags, details['input'])}"
            )
            strange = [name for name in details["input"] if not any(name in kind.model_fields for kind in kinds)]
            return [missing, *(_unknown_line(f"{path}.{name}", known) for name in strange)]
        case "extra_forbidden":
            return _unknown(model, tree, steps, details)
        case "union_tag_invalid":
            tag, allowed = str(context["tag"]), context["expected_tags"]
            meant = did_you_mean(tag, allowed.replace("'", "").split(", "))
            if ".py" in tag and "'function'" in allowed:
                meant = f"; a function of your own is {{{chooser}: function, path: {tag!r}}}"
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


def _unknown(model: type[BaseModel], tree: Any, steps: Sequence[int | str], details: ErrorDetails) -> list[str]:
    """Return the lines for a field that its section does not have.

    A section of another framework, as in `algorithm: {lam: 1}`, has a line for each field in it that has one here.
    """
    *above, name = steps
    kinds, path = _sections_at(model, above), ".".join(map(str, steps))
    if any(name in kind.model_fields for kind in kinds):
        return [_of_another_kind(kinds, tree, above, str(details["loc"][-2]))]
    known = list(field_paths(model))
    if isinstance(details["input"], dict) and not closest(str(name), _sections_in(known), NEARLY):
        leaves = [leaf for leaf in _leaves(path, details["input"]) if _same(leaf, known) or coming_from.reason(leaf)]
        return [_unknown_line(leaf, known) for leaf in leaves or [path]]
    return [_unknown_line(path, known)]


def _unknown_line(path: str, known: Sequence[str]) -> str:
    found = _same(path, known)
    why = None if found else coming_from.reason(path)
    if why is not None:
        return f"{path}: no such field: {why}"
    similar = found or _alike(path, known)
    advice = f"; did you mean {' or '.join(similar[:3])}?" if similar else ""
    return f"{path}: unknown field; remove it or correct its name{advice}"


def _leaves(path: str, value: Any) -> list[str]:
    """Return the dotted path of every value in an unknown field."""
    if not isinstance(value, dict) or not value:
        return [path]
    return [leaf for name, below in value.items() for leaf in _leaves(f"{path}.{name}", below)]


def _same(path: str, known: Sequence[str]) -> list[str]:
    """Return the fields that another framework calls as this path, or that have its name in another section.

    Those that share most sections with the path come alone.
    """
    plain = _plain(path)
    found = coming_from.meant(plain, {*known, *_sections_in(known)})
    found += [other for other in known if other.rpartition(".")[2] == plain.rpartition(".")[2] and other not in found]
    most = max((_shared(plain, other) for other in found), default=0)
    return [other for other in found if _shared(plain, other) == most]


def _alike(path: str, known: Sequence[str]) -> list[str]:
    """Return the field or section beside a path that is called like it, or fields much like it elsewhere."""
    section, _, name = _plain(path).rpartition(".")
    own = {other.rpartition(".")[2]: other for other in (*known, *_sections_in(known)) if _parent(other) == section}
    last = closest(name, list(own))
    if last is not None:
        return [own[last]]
    last = closest(name, [other.rpartition(".")[2] for other in known], NEARLY)
    return [other for other in known if other.rpartition(".")[2] == last]


def _plain(path: str) -> str:
    """Return a path without the numbers of entries in lists."""
    return re.sub(r"\.\d+", "", path)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _sections_in(known: Sequence[str]) -> list[str]:
    """Return the path of every section that some fields are in."""
    return list(dict.fromkeys(other[: dot.start()] for other in known for dot in re.finditer(r"\.", other)))


def _shared(path: str, other: str) -> int:
    """Return how many sections two dotted paths have in common, from the left."""
    pairs = list(zip(path.split(".")[:-1], other.split(".")[:-1], strict=False))
    return next((count for count, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _sections_at(model: type[BaseModel], steps: Sequence[int | str]) -> tuple[type[BaseModel], ...]:
    """Return the kinds that the section at a path may have."""
    sections: tuple[type[BaseModel], ...] = (model,)
    for step in (step for step in steps if isinstance(step, str)):
        having = [section.model_fields[step] for section in sections if step in section.model_fields]
        sections = tuple(below for field in having for below in sections_of(field.annotation))
    return sections


def _of_another_kind(kinds: Sequence[type[BaseModel]], tree: Any, above: Sequence[int | str], chosen: str) -> str:
    """Return the line for all fields of a section that its chosen kind does not have, with the option that works."""
    section = tree
    for step in above:
        section = section[step]
    path = ".".join(map(str, above))
    kind, chooser = next(
        (kind, name) for kind in kinds for name, field in kind.model_fields.items() if _tag(field) == chosen
    )
    others = [name for name in section if name not in kind.model_fields and any(name in k.model_fields for k in kinds)]
    kept = {name: value for name, value in section.items() if name in kind.model_fields}
    missing = {name: name.upper() for name, field in kind.model_fields.items() if field.is_required()}
    fields = ", ".join(f"{n}: {describe_value(value)}" for n, value in ({chooser: chosen} | missing | kept).items())
    option = shlex.quote(f"{path}={{{fields}}}")
    them, belong = ("it", "belongs") if len(others) == 1 else ("them", "belong")
    return (
        f"{', '.join(f'{path}.{name}' for name in others)}: {belong} to another {path}.{chooser} than {chosen}; remove "
        f"{them}, or replace the section: --set {option}"
    )


def _likely(kinds: Sequence[type[BaseModel]], tags: Sequence[str], section: Mapping[str, Any]) -> str:
    """Suggest the one kind that has every field of a section that any kind has; nothing if there are several."""
    written = [name for name in section if any(name in kind.model_fields for kind in kinds)]
    having = [tag for tag, kind in zip(tags, kinds, strict=True) if all(name in kind.model_fields for name in written)]
    return f"; with these fields {having[0]}" if len(having) == 1 else ""


def _tag(field: FieldInfo) -> str | None:
    """Return the kind that a field chooses among several, None if it chooses none."""
    values = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return values[0] if len(values) == 1 else None
