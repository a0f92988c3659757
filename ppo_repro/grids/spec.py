"""Read a grid file (a question, a base configuration, axes and seeds) and expand it into cells."""

from __future__ import annotations

import copy
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ppo_repro.base.errors import UserError
from ppo_repro.config.files import read_tree, validated
from ppo_repro.config.kinds import CONFIGS, GRID, AnyConfig, kind_of
from ppo_repro.config.section import PathText, Section
from ppo_repro.config.tree import from_folder, set_field
from ppo_repro.config.yaml_text import describe_value

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")


class GridFile(Section):
    """Content of a grid file."""

    question: str = Field(min_length=1, description="What the grid is to answer.")
    expectation: str = Field(min_length=1, description="The answer expected before anything ran.")
    base: PathText = Field(description="Configuration that every cell starts from, of any kind of run.")
    set: dict[str, Any] = Field({}, description="Fields that differ from the base in every cell, by dotted path.")
    axes: dict[str, Any] = Field(
        {}, description="By dotted field a list of values, or by a name of its own a mapping: label -> fields."
    )
    seeds: Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(min_length=1)] = Field(
        description="Seeds; every setting, one combination of the axes, is run with each."
    )
    read_with: str = Field("", description="The command or module that answers the question from the results.")


@dataclass(frozen=True)
class Choice:
    """One value of one axis: its label, and the dotted fields that it sets."""

    axis: str
    label: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One run of a grid: a seed and one choice of each axis; `labels` maps each axis to the label of its choice."""

    name: str  # made of the labels and the seed
    labels: Mapping[str, str]
    seed: int
    config: AnyConfig


@dataclass(frozen=True)
class Grid:
    """Grid file and its cells."""

    name: str
    file: GridFile
    cells: tuple[Cell, ...]


def _choices(axis: str, values: Any) -> list[Choice]:
    if isinstance(values, list):
        choices = [Choice(axis, describe_value(value), {axis: value}) for value in values]
    elif isinstance(values, dict):
        for label, fields in values.items():
            if not isinstance(label, str) or not isinstance(fields, dict):
                raise UserError(f"axes.{axis}.{label}: must be a text label with a mapping of fields")
        choices = [Choice(axis, label, fields) for label, fields in values.items()]
    else:
        raise UserError(f"axes.{axis} = {describe_value(values)}: must be a list of values or a mapping of labels")
    if not choices:
        raise UserError(f"axes.{axis}: is empty; give it at least one value or remove it")
    (label, times), *_ = Counter(choice.label for choice in choices).most_common(1)
    if times > 1:
        raise UserError(f"axes.{axis}: has {label!r} twice; keep one")
    return choices


def _cell_name(choices: tuple[Choice, ...], seed: int) -> str:
    """Return a cell's name `axis=label,...,seed=n`, in characters that every file system accepts."""
    labels = [f"{choice.axis.rsplit('.', 1)[-1]}={choice.label}" for choice in choices]
    return re.sub(r"[^A-Za-z0-9._=,+-]", "_", ",".join([*labels, f"seed={seed}"]))[:200]


def _cells(path: Path, file: GridFile, axes: Sequence[Sequence[Choice]], base: dict[str, Any]) -> Iterator[Cell]:
    for choices in itertools.product(*axes):
        for seed in file.seeds:
            tree = copy.deepcopy(base)
            name = _cell_name(choices, seed)
            source = f"{path}: cell {name}"
            for fields in (file.set, *(choice.fields for choice in choices), {"seed": seed}):
                for field, value in fields.items():
                    try:
                        set_field(tree, field, value)
                    except UserError as error:
                        raise UserError(f"{source}: {field}: {error}") from error
            tree = from_folder(tree, path.parent)
            labels = {choice.axis: choice.label for choice in choices}
            yield Cell(name, labels, seed, validated(CONFIGS[kind_of(base)], tree, source))


def _check_fields(path: Path, file: GridFile, axes: Sequence[Sequence[Choice]]) -> None:
    """Raise UserError if two sources set the same field, so that one of them would have no effect."""
    sources = [(f"set.{field}", field) for field in file.set]
    for choices in axes:
        sources += [(f"axes.{choices[0].axis}", field) for field in sorted({f for c in choices for f in c.fields})]
    sources.append(("seeds", "seed"))
    for (earlier, above), (source, field) in itertools.combinations(sources, 2):
        if f"{field}.".startswith(f"{above}.") or f"{above}.".startswith(f"{field}."):
            raise UserError(f"{path}: {earlier} and {source} both set {field}; keep one")


def load_grid(path: Path) -> Grid:
    """Read a grid file and expand it into cells. Raises UserError for any mistake, before anything runs."""
    file = validated(GridFile, read_tree(path, kinds=(GRID,)), str(path))
    if not NAME.match(path.stem):
        raise UserError(f"{path}: the file name is the grid's name; use letters, digits, '.', '_' and '-'")
    base = read_tree(path.parent / file.base)
    if not isinstance(base, dict):
        raise UserError(f"{path.parent / file.base}: must be a mapping of fields, found {type(base).__name__}")
    try:
        axes = [_choices(axis, values) for axis, values in file.axes.items()]
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    _check_fields(path, file, axes)
    cells = tuple(_cells(path, file, axes, base))
    by_config: dict[str, str] = {}
    for cell in cells:
        other = by_config.setdefault(cell.config.canonical_json(), cell.name)
        if other != cell.name:
            raise UserError(f"{path}: cells {other} and {cell.name} are the same run; an axis has no effect")
    (name, times), *_ = Counter(cell.name for cell in cells).most_common(1)
    if times > 1:
        raise UserError(f"{path}: two cells would be called {name}; choose other labels")
    return Grid(path.stem, file, cells)
