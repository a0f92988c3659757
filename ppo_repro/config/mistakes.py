"""What is wrong with a configuration, one line for each mistake: field, value, what is allowed, what was meant."""

from __future__ import annotations

import os
import typing
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ppo_repro.output import closest, did_you_mean

if TYPE_CHECKING:  # the command line looks for words that were meant, and does without pydantic's 0.1 s
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

    Sections = tuple[type[BaseModel], ...]

MOST = 30  # mistakes that are told; a screen holds no more
LONGEST_PATH = 3000  # bytes, which leaves room for the files of a run below what systems allow
LONGEST_NAME = 255  # bytes
# of each kind of file a field that no other kind has, and the command that takes the file
COMMANDS = {"rollout": "run", "environment": "control", "dpo": "dpo", "axes": "grid", "base": "grid"}


def mistakes(model: type[BaseModel], error: ValidationError) -> list[str]:
    """One line for each mistake that pydantic found in a `model`, in the order of its fields."""
    found = error.errors(include_url=False)
    lines = [line for details in found[:MOST] for line in _lines(model, details)]
    return lines if len(found) <= MOST else [*lines, f"{len(found) - MOST} more mistakes; correct these first"]


def check_path(text: str) -> str:
    """The text; ValueError where no file of this machine can have this path."""
    if "\0" in text:
        raise ValueError("must be a path; no path has a NUL character")
    if "://" in text:
        raise ValueError("must be a path on this machine, not a URI")
    try:
        path = os.path.abspath(text).encode()
    except UnicodeEncodeError as error:
        raise ValueError("must be a path in UTF-8") from error
    if len(path) > LONGEST_PATH or max(map(len, path.split(b"/"))) > LONGEST_NAME:
        raise ValueError(
            f"must be a shorter path: at most {LONGEST_PATH} bytes as an absolute path, {LONGEST_NAME} for a name in it"
        )
    return text


def command_of(tree: object) -> str | None:
    """The command that takes a parsed file, by the fields it has; None where they do not say."""
    found = {COMMANDS[name] for name in COMMANDS if isinstance(tree, dict) and name in tree}
    return found.pop() if len(found) == 1 else None


def field_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted path of every field that holds a value; of a group with several kinds those of all of them."""
    for name, field in model.model_fields.items():
        below = _sections(field.annotation)
        if not below or _in_list(field.annotation):
            yield f"{prefix}{name}"
        else:
            yield from dict.fromkeys(path for section in below for path in field_paths(section, f"{prefix}{name}."))


def _lines(model: type[BaseModel], details: ErrorDetails) -> list[str]:
    words, sections, kind = _located(model, details["loc"])
    path, message = ".".join(words), details["msg"].removeprefix("Value error, ")
    if details["type"] == "missing":
        return [f"{path}: missing; add it"]
    if details["type"] == "extra_forbidden":
        advice = _for_unknown(model, words, sections, kind)
        return [f"{path}: unknown field; remove it or correct its name{advice}"]
    if details["type"] == "union_tag_invalid":
        context = details["ctx"]
        tags = context["expected_tags"].replace("'", "").split(", ")
        meant = did_you_mean(str(context["tag"]), tags)
        chooser = context["discriminator"].strip("'")
        return [f"{path}.{chooser} = {context['tag']!r}: must be one of {context['expected_tags']}{meant}"]
    if details["type"] == "union_tag_not_found":
        return [f"{path}.{details['ctx']['discriminator'].strip(chr(39))}: missing; add it"]
    if not path:
        return message.splitlines()  # a check of the whole file may find several
    if isinstance(details["input"], dict):
        return [f"{path}: {line}" for line in message.splitlines()]
    if details["type"] == "literal_error":
        allowed = details["ctx"]["expected"].split("'")[1::2]
        message += did_you_mean(str(details["input"])[:100], allowed)
    return [f"{path} = {details['input']!r}: {message[0].lower()}{message[1:]}"]


def _located(model: type[BaseModel], place: Sequence[int | str]) -> tuple[list[str], Sections, str | None]:
    """The path as users write it, the sections that may hold its last field, and the kind chosen among them.

    pydantic puts the chosen kind of a group into the path; users do not write it there.
    """
    words: list[str] = []
    sections: Sections = (model,)
    chosen: type[BaseModel] | None = model
    for index, step in enumerate(place):
        tagged = None if chosen is not None else next((s for s in sections if step in _tags(s)), None)
        if tagged is not None:
            chosen = tagged
            continue
        words.append(str(step))
        if index == len(place) - 1:
            break
        if isinstance(step, str) and chosen is not None and step in chosen.model_fields:
            sections = _sections(chosen.model_fields[step].annotation)
            chosen = sections[0] if len(sections) == 1 else None
    if chosen is None or chosen not in sections:
        return words, sections, None
    return words, (chosen, *(s for s in sections if s is not chosen)), next(iter(_tags(chosen)), None)


def _for_unknown(model: type[BaseModel], words: list[str], sections: Sections, kind: str | None) -> str:
    """What may have been meant by an unknown field: one of another kind, of the same group, or elsewhere."""
    name = words[-1]
    own, others = (sections[0], sections[1:]) if sections else (model, ())
    having = [tag for other in others if name in other.model_fields for tag in _tags(other)]
    if having and kind is not None:
        return f"; it belongs to kind {' or '.join(having)}, and this is {kind}"
    close = closest(name, list(own.model_fields))
    if close is not None:
        return f"; did you mean {'.'.join([*words[:-1], close])}?"
    paths = list(dict.fromkeys(field_paths(model)))
    elsewhere = [path for path in paths if path.rpartition(".")[2] == name]
    if not elsewhere:
        last = closest(name, [path.rpartition(".")[2] for path in paths])
        elsewhere = [path for path in paths if path.rpartition(".")[2] == last]
    return f"; did you mean {' or '.join(elsewhere[:3])}?" if elsewhere else ""


def _tags(section: type[BaseModel]) -> set[str]:
    """The word that chooses this section among several; empty for a group of one kind."""
    choices = [typing.get_args(f.annotation) for f in section.model_fields.values() if _is_literal(f.annotation)]
    return {words[0] for words in choices if len(words) == 1}


def _sections(annotation: Any) -> Sections:
    """The sections that an annotation names, through unions, lists and `Annotated`."""
    from pydantic import BaseModel

    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    if _is_literal(annotation):
        return ()
    return tuple(section for part in typing.get_args(annotation) for section in _sections(part))


def _is_literal(annotation: Any) -> bool:
    return typing.get_origin(annotation) is Literal


def _in_list(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (tuple, list, dict)
