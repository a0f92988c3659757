"""Name, notes and tags that a person gives a run: label.json in the run folder. No digest covers this file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, ValidationError

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import atomic_write
from ppo_repro.base.output import shown
from ppo_repro.config.section import Many, Section

LABEL_NAME = "label.json"

Line = Annotated[str, StringConstraints(strip_whitespace=True, max_length=60, pattern=r"^\P{Cc}*$")]


class Label(Section):
    """Name, notes and tags of a run. All are empty by default."""

    name: Line = ""
    notes: Annotated[str, Field(max_length=2000)] = ""
    tags: Many[Line] = ()

    def lines(self) -> list[str]:
        """Return the nonempty fields of the label, one line each."""
        fields = {"name": self.name, "tags": ", ".join(self.tags), "notes": self.notes}
        return [f"{field:<12}{text}" for field, text in fields.items() if text]


UNLABELLED = Label()


def label_of(name: str | None, notes: str | None, tags: list[str] | None, before: Label = UNLABELLED) -> Label:
    """Return a copy of a label with some fields changed; an empty text removes a field.

    Args:
        name: one line; None: unchanged.
        notes: any text; None: unchanged.
        tags: one line each; None: unchanged.
        before: the label to change.

    Raises:
        UserError: a text is too long.
    """
    given = {"name": name, "notes": notes, "tags": None if tags is None else tuple(filter(None, tags))}
    try:
        return Label(**{**dict(before), **{field: value for field, value in given.items() if value is not None}})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = str(first["loc"][0]).replace("tags", "tag")
        what = "at most 2,000 characters" if option == "notes" else "one line of at most 60 characters"
        raise UserError(f"--{option} {shown(str(first['input']))}: must be {what}") from error


def read_label(run_dir: Path) -> Label:
    """Read the label of a run. It is empty if the run has none. Raises UserError if the file is damaged."""
    path = run_dir / LABEL_NAME
    try:
        return Label.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return UNLABELLED
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); make it readable, or remove it") from error
    except ValidationError as error:
        raise UserError(f"{path}: is no label; remove it, and give another with `ppo-repro show`") from error


def write_label(run_dir: Path, label: Label) -> None:
    """Write the label of a run; an empty label removes the file. Raises UserError if that fails."""
    path = run_dir / LABEL_NAME
    if label != UNLABELLED:
        atomic_write(path, label.model_dump_json(indent=1).encode() + b"\n")
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be removed ({error.strerror}); make the folder writable") from error
