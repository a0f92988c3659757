"""What is wrong with a configuration, one line for each mistake: field, value, what is allowed, what was meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from ppo_repro.output import closest, did_you_mean

if TYPE_CHECKING:  # the command line looks for words that were meant, and does without pydantic's 0.1 s
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

MOST = 30  # mistakes that are told; a screen holds no more
# of each kind of file a field that no other kind has, and the command that takes the file
COMMANDS = {"rollout": "run", "environment": "control", "dpo": "dpo", "axes": "grid", "base": "grid"}


def mistakes(model: type[BaseModel], tree: dict[str, Any], error: ValidationError) -> list[str]:
    """One line for each mistake that pydantic found in the tree of a `model`, in the order of its fields."""
    errors = error.errors(include_url=False)
    lines = [line for details in errors[:MOST] for line in _lines(model, tree, details)]
    return lines if len(errors) <= MOST else [*lines, f"{len(errors) - MOST} more mistakes; correct these first"]


def check_path(text: str) -> str:
    """The text; ValueError if it cannot be a path of this machine."""
    if "://" in text or re.search("[\0\ud800-\udfff]", text):
        raise ValueError("must be a path on this machine, in UTF-8")
    return text


def command_of(tree: object) -> str | None:
    """The command that takes a parsed file, by the fields it has; None if they do not say."""
    commands = {COMMANDS[name] for name in COMMANDS if isinstance(tree, dict) and name in tree}
    return commands.pop() if len(commands) == 1 else None


def field_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted path of every field that holds a value, once; of a group with several kinds the fields of all."""
    paths = dict[str, None]()
    for name, field in model.model_fields.items():
        below = sections_of(field.annotation)
        for section in below:
            paths |= dict.fromkeys(field_paths(section, f"{prefix}{name}."))
        if not below:
            paths[f"{prefix}{name}"] = None
    yield from paths


def sections_of(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The sections that an annotation names, through unions, lists and `Annotated`."""
    from pydantic import BaseModel

    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    return tuple(section for part in get_args(annotation) for section in sections_of(part))


def tag_of(section: type[BaseModel]) -> str | None:
    """The word that chooses this section among several; None for a group of one kind."""
    fields = [field.annotation for field in section.model_fields.values()]
    return next((get_args(a)[0] for a in fields if get_origin(a) is Literal and len(get_args(a)) == 1), None)


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
        case "literal_error":
            message += did_you_mean(str(details["input"])[:100], context["expected"].split("'")[1::2])
    if not path:
        return message.splitlines()  # a check of the whole file may find several
    if isinstance(details["input"], dict):
        return [f"{path}: {line}" for line in message.splitlines()]
    return [f"{path} = {details['input']!r}: {message[0].lower()}{message[1:]}"]


def _written(tree: Any, details: ErrorDetails) -> list[int | str]:
    """The path of a mistake without the kinds that pydantic puts into it."""
    steps: list[int | str] = []
    for index, step in enumerate(details["loc"]):
        is_missing = details["type"] == "missing" and index == len(details["loc"]) - 1
        if is_missing or isinstance(tree, list) or (isinstance(tree, dict) and step in tree):
            steps.append(step)
            tree = None if is_missing else tree[step]
    return steps


def _meant(model: type[BaseModel], path: str) -> str:
    """What may have been meant by an unknown field: a field of another kind, or a similar one of the file."""
    plain = re.sub(r"\.\d+", "", path)
    group, _, name = plain.rpartition(".")
    known = list(field_paths(model))
    if any(f"{other}.".startswith(f"{plain}.") for other in known):
        return f"; it belongs to another {group}.kind"
    last = closest(name, [other.rpartition(".")[2] for other in known])
    similar = [other for other in known if other.rpartition(".")[2] == last]
    own = f"{group}.{last}"
    return f"; did you mean {own if own in similar else ' or '.join(similar[:3])}?" if similar else ""
