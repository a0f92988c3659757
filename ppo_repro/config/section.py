"""Define `Section`, the base of every group of fields, and `Experiment`, the base of a whole configuration.

The module begins with types of numbers, names and paths.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, JsonValue, Tag

from ppo_repro.base.files import check_path

MAX_COUNT = 2**31 - 1  # of anything that is counted
MAX_FLOAT = 1e30  # of numbers that meet others in float32
# A digest of a configuration leaves defaults out, and has this number. If a default gets another value or meaning, add
# 1: otherwise a run with the new default would get the name of a run with the old one. A new field needs no new number
# if its default does what the package did before.
DEFAULTS = 1

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Index = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Layers = Annotated[int, Field(ge=1, le=1024)]  # of a model made here; to lay out more takes minutes
Width = Annotated[int, Field(ge=1, le=2**20)]  # of a model made here
# MAX_WORKERS + 1 of c/threads.c. This machine's cores set no limit, because other machines may repeat the run.
MAX_THREADS = 256  # of the kernels
Threads = Annotated[int, Field(ge=1, le=MAX_THREADS)]
Positive = Annotated[float, Field(gt=0, le=MAX_FLOAT, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=MAX_FLOAT, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Whitening = Literal["none", "scale", "full"]
RateSchedule = Literal["constant", "linear", "cosine"]
T = TypeVar("T")
Many = Annotated[tuple[T, ...], Field(strict=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


def _known_device(name: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,2})?", name):
        raise ValueError("must be cpu, cuda or cuda:N")
    return name


Device = Annotated[str, AfterValidator(_known_device)]
# A file or folder that a run reads. By this type a run knows what to copy, to digest and to send to other machines.
PathText = Annotated[str, Field(min_length=1), AfterValidator(check_path)]
ProgramText = Annotated[PathText, "a program, looked up on PATH if it has no slash, and no input"]
# Marks a field that a fork cannot change. Such a field decides the weights, the unit of values, or a fault of the first
# iteration, and a fork computes none of them again. Held-out prompts, end tokens and tokenizer have no mark. They are
# compared by value when the fork is prepared.
FIXED = "fixed in a fork"
Foreign = dict[str, JsonValue]  # for a library, a function or a template: a path in it is not the package's


class Section(BaseModel):
    """A frozen group of fields, which refuses unknown fields and values of other types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Called(Section):
    """A function or class of your own, and its parameters."""

    path: PathText = Field(description="`FILE.py:NAME`.")
    parameters: Foreign = Field({}, description="Its further parameters, by name.")


class CheckedFunction(Called):
    """A function of your own, which a run tries on random batches before it begins."""

    kind: Literal["function"] = Field(description="Call a Python function.")
    checked: bool = Field(True, description="Refuse what depends on the layout, or on more than its input.")


def _word_or_function(value: object) -> str:
    return "function" if isinstance(value, dict | BaseModel) else "word"


# tags of a field that is a word or a user's function, so that a mistake is reported for the right one of the two
WORD, FUNCTION, WORD_OR_FUNCTION = Tag("word"), Tag("function"), Discriminator(_word_or_function)


class Experiment(Section):
    """A whole configuration: its name, its seed, and a digest of all its fields except `records`."""

    experiment: Name = Field(description="Name of the experiment; the folder its results share.")
    seed: Annotated[int, Field(ge=0, lt=2**63), FIXED] = Field(description="Every random stream is derived from this.")

    def canonical(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, without `records`, and the number of the defaults."""
        return {"defaults": DEFAULTS} | {name: v for name, v in beyond_defaults(self).items() if name != "records"}

    def canonical_json(self) -> str:
        """Return `canonical` as text; two configurations have the same text if and only if they are the same run."""
        return sorted_json(self.canonical())

    def digest(self) -> str:
        """Return the first 12 hex digits of the SHA-256 of the canonical JSON."""
        return short_digest(self.canonical_json())


def beyond_defaults(value: Any) -> Any:
    """Return a field's value as JSON has it; of each section in it, return the fields that differ from their defaults.

    A field without a default is always there, and so is a kind that is not the default kind. Values are compared as
    JSON text, in which 1, 1.0 and true, or 0.0 and -0.0, differ.
    """
    if isinstance(value, tuple):
        return [beyond_defaults(entry) for entry in value]
    if not isinstance(value, Section):
        return value
    changed = {}
    for name, field in type(value).model_fields.items():
        changed[name] = beyond_defaults(getattr(value, name))
        if not field.is_required() and sorted_json(changed[name]) == sorted_json(beyond_defaults(field.default)):
            del changed[name]
    return changed


def sorted_json(tree: Any) -> str:
    """Return sorted, compact JSON."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":"))


def short_digest(text: str) -> str:
    """Return the first 12 hex digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def default_kind(field: str, value: str) -> BeforeValidator:
    """Return the validator of a union that fills in `field`, the choice of a kind, where a written group omits it."""
    return BeforeValidator(lambda group: {field: value, **group} if isinstance(group, dict) else group)


def checked_functions(section: Section, prefix: str = "") -> Iterator[tuple[str, CheckedFunction]]:
    """Yield the dotted path and the value of every field in a section, or below it, that is a function of the user."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, CheckedFunction):
            yield f"{prefix}{name}", value
        elif isinstance(value, Section):
            yield from checked_functions(value, f"{prefix}{name}.")
