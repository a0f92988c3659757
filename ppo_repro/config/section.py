"""The base of every group of configuration fields, and of a whole configuration with its digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ppo_repro.config.mistakes import check_path

MOST = 2**31 - 1  # of anything that is counted
LARGEST = 1e30  # of numbers that meet others in float32

Count = Annotated[int, Field(ge=1, le=MOST)]
Index = Annotated[int, Field(ge=0, le=MOST)]
Layers = Annotated[int, Field(ge=1, le=1024)]  # of a model made here; to lay out more takes minutes
Width = Annotated[int, Field(ge=1, le=2**20)]  # of a model made here
Threads = Annotated[int, Field(ge=1, le=1024)]  # not the cores of this machine: a run is repeated on others
Positive = Annotated[float, Field(gt=0, le=LARGEST, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Whitening = Literal["none", "scale", "full"]
Schedule = Literal["constant", "linear", "cosine"]
T = TypeVar("T")
Many = Annotated[tuple[T, ...], Field(strict=False)]
PathText = Annotated[str, Field(min_length=1), AfterValidator(check_path)]


class Section(BaseModel):
    """A frozen group of fields; an unknown field or a value of another type is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class NumericsMode(Section):
    """How numbers are computed."""

    mode: Literal["deterministic", "native"] = Field(
        "deterministic",
        description="`deterministic`: one written order for every sum, so layout cannot matter; `native`: stock torch.",
    )


class Experiment(Section):
    """A whole configuration: what it is called, its seed, and a digest of all its fields but `records`."""

    experiment: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = Field(
        description="Name of the experiment; the folder its results share."
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(description="Every random stream is derived from this.")

    def canonical_json(self) -> str:
        """Sorted, compact JSON without `records`: configurations of the same run give equal text."""
        return canonical_json(self.model_dump(mode="json"))

    def digest(self) -> str:
        """First 12 hex digits of the SHA-256 of the canonical JSON."""
        return short_digest(self.canonical_json())


def canonical_json(tree: Mapping[str, Any]) -> str:
    """Sorted, compact JSON of a configuration's tree, without `records`."""
    tree = {name: value for name, value in tree.items() if name != "records"}
    return json.dumps(tree, sort_keys=True, separators=(",", ":"))


def short_digest(text: str) -> str:
    """First 12 hex digits of the SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def with_usual(tree: Any, usual: Sequence[tuple[str, str, str]]) -> Any:
    """The tree with default fields filled in: for each (group, field, value), where the group leaves the field out."""
    if not isinstance(tree, dict):
        return tree
    tree = dict(tree)
    for group, field, value in usual:
        if isinstance(tree.get(group), dict):
            tree[group] = {field: value, **tree[group]}
    return tree
