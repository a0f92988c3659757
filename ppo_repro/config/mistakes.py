"""Describe mistakes in a configuration, one line each: field, value, what is allowed, what to do."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ppo_repro.base.output import closest, did_you_mean
from ppo_repro.config.fields import field_paths, sections_of, tag_of
from ppo_repro.config.suggestions import NEARLY, has_meaning, sections_in, what_to_do
from ppo_repro.config.yaml_text import describe_value

MAX_MISTAKES = 30  # lines that are printed; a screen holds no more
LIMIT = "must be "  # how the limits of a value begin

# messages by pydantic's type of an error, with the limits that pydantic gives
MUST = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "invalid_key": "must be text, because it is a name",
    "invalid-json-value": "must be text, a number, true, false, null, a list or a mapping",
    "model_type": "must be a mapping of fields",
    "model_attributes_type": "must be a mapping of fields",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "string_too_short": "must have a length of at least {min_length}",
    "string_too_long": "must have a length of at most {max_length}",
    "string_pattern_mismatch": "must match the pattern {pattern}",
}


class Mistake(NamedTuple):
    """One mistake: a field, with its value unless that is a section, and what is wrong with it."""

    about: str  # empty: of the whole configuration
    wrong: str


def mistakes(model: type[BaseModel], tree: dict[str, Any], error: ValidationError) -> list[str]:
    """Return one line for each mistake that pydantic found in the tree of a `model`, in the order of its fields.

    The fields that belong to another kind of a section share one line. The allowed types of a value share one line too.
    """
    pairs = dict.fromkeys(mistake for details in error.errors() for mistake in _found(model, tree, details))
    merged: dict[Mistake, str] = {}  # what is wrong; the key has no limits, which share a line
    for about, wrong in pairs:
        key = Mistake(about, LIMIT if wrong.startswith(LIMIT) else wrong)
        merged[key] = f"{merged[key]} or {wrong.removeprefix(LIMIT)}" if key in merged else wrong
    lines = [f"{about}: {wrong}" if about else wrong for (about, _), wrong in merged.items()]
    more = len(lines) - MAX_MISTAKES
    return lines if more <= 0 else [*lines[:MAX_MISTAKES], f"{more} more mistakes; correct these first"]


def _found(model: type[BaseModel], tree: dict[str, Any], details: ErrorDetails) -> list[Mistake]:
    steps, value, context = _written(tree, details), details["input"], details.get("ctx", {})
    path = ".".join(map(str, steps))
    match details["type"]:
        case "missing":
            return [Mistake(path, "missing; add it")]
        case "union_tag_not_found":
            return _without_kind(model, steps, value)
        case "union_tag_invalid":
            return [_unknown_kind(model, steps, str(context["tag"]))]
        case "extra_forbidden":
            return _unknown(model, tree, steps, details)
        case "value_error":  # a check of ours, which may find several mistakes
            about = path if isinstance(value, dict) or not path else f"{path} = {value!r}"
            return [Mistake(about, line) for line in str(context["error"]).splitlines()]
        case "literal_error":
            words = context["expected"].split("'")[1::2]
            meant = did_you_mean(str(value)[:100], words)
            allowed = f"{'one of ' * (len(words) > 1)}{', '.join(words)}{meant}"
            return [Mistake(f"{path} = {value!r}", LIMIT + allowed)]
        case kind:
            must = MUST[kind].format_map(context) if kind in MUST else details["msg"]
            return [Mistake(f"{path} = {value!r}", must)]


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


def _sections_at(model: type[BaseModel], steps: Sequence[int | str]) -> tuple[type[BaseModel], ...]:
    """Return the possible kinds of the section at a path."""
    sections: tuple[type[BaseModel], ...] = (model,)
    for step in (step for step in steps if isinstance(step, str)):
        having = [section.model_fields[step] for section in sections if step in section.model_fields]
        sections = tuple(below for field in having for below in sections_of(field.annotation))
    return sections


def _tags(kinds: Sequence[type[BaseModel]]) -> tuple[str, dict[str, type[BaseModel]]]:
    """Return the field that selects one of several kinds, and the kinds by the field's values."""
    tagged = {name: tag_of(field) for name, field in kinds[0].model_fields.items()}
    chooser = next(name for name, tag in tagged.items() if tag is not None)
    return chooser, {str(tag_of(kind.model_fields[chooser])): kind for kind in kinds}


def _without_kind(model: type[BaseModel], steps: Sequence[int | str], section: Mapping[str, Any]) -> list[Mistake]:
    """Return the mistakes of a section that names no kind: the possible kinds, and the fields that no kind has."""
    path, (chooser, kinds) = ".".join(map(str, steps)), _tags(_sections_at(model, steps))
    known = {name for kind in kinds.values() for name in kind.model_fields}
    fitting = [tag for tag, kind in kinds.items() if known & section.keys() <= kind.model_fields.keys()]
    likely = f"; with these fields {fitting[0]}" if len(fitting) == 1 else ""
    every = field_paths(model)
    strange = [Mistake(f"{path}.{name}", what_to_do(f"{path}.{name}", every)) for name in section if name not in known]
    return [Mistake(f"{path}.{chooser}", f"missing; must be one of {', '.join(kinds)}{likely}"), *strange]


def _unknown_kind(model: type[BaseModel], steps: Sequence[int | str], tag: str) -> Mistake:
    chooser, kinds = _tags(_sections_at(model, steps))
    meant = did_you_mean(tag, list(kinds))
    if ".py" in tag and "function" in kinds:
        meant = f"; a function of your own is {{{chooser}: function, path: {tag!r}}}"
    return Mistake(f"{'.'.join(map(str, steps))}.{chooser} = {tag!r}", f"must be one of {', '.join(kinds)}{meant}")


def _unknown(model: type[BaseModel], tree: Any, steps: Sequence[int | str], details: ErrorDetails) -> list[Mistake]:
    """Return the mistakes of a field that its section does not have.

    For a section of another framework, such as `algorithm: {lam: 1}`, each of its known fields has a line.
    """
    *above, name = steps
    kinds, path = _sections_at(model, above), ".".join(map(str, steps))
    if any(name in kind.model_fields for kind in kinds):
        return [_of_another_kind(kinds, tree, above, str(details["loc"][-2]))]
    known = field_paths(model)
    unknown = [path]
    if isinstance(details["input"], dict) and not closest(str(name), sections_in(known), NEARLY):
        unknown = [leaf for leaf in _leaves(path, details["input"]) if has_meaning(leaf, known)] or [path]
    return [Mistake(field, what_to_do(field, known)) for field in unknown]


def _of_another_kind(kinds: Sequence[type[BaseModel]], tree: Any, above: Sequence[int | str], chosen: str) -> Mistake:
    """Return the mistake of all fields of a section that its chosen kind does not have, and an override that works."""
    section = tree
    for step in above:
        section = section[step]
    path, (chooser, by_tag) = ".".join(map(str, above)), _tags(kinds)
    kind = by_tag[chosen]
    others = [name for name in section if name not in kind.model_fields and any(name in k.model_fields for k in kinds)]
    kept = {name: value for name, value in section.items() if name in kind.model_fields}
    missing = {name: name.upper() for name, field in kind.model_fields.items() if field.is_required()}
    works = {chooser: chosen} | missing | kept
    fields = ", ".join(f"{name}: {describe_value(value)}" for name, value in works.items())
    option = shlex.quote(f"{path}={{{fields}}}")
    them, belong = ("it", "belongs") if len(others) == 1 else ("them", "belong")
    return Mistake(
        ", ".join(f"{path}.{name}" for name in others),
        f"{belong} to another {path}.{chooser} than {chosen}; remove {them}, or replace the section: --set {option}",
    )


def _leaves(path: str, value: Any) -> list[str]:
    """Return the dotted path of every value in an unknown field."""
    if not isinstance(value, dict) or not value:
        return [path]
    return [leaf for name, below in value.items() for leaf in _leaves(f"{path}.{name}", below)]
