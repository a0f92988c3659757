"""What every group of configuration fields is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Whitening = Literal["none", "scale", "full"]


class Section(BaseModel):
    """A frozen group of fields; an unknown field or a value of another type is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def with_usual(tree: Any, usual: Sequence[tuple[str, str, str]]) -> Any:
    """A tree of fields in which each (group, field, value) holds where the group is there and leaves the field out."""
    if not isinstance(tree, dict):
        return tree
    tree = dict(tree)
    for group, field, value in usual:
        if isinstance(tree.get(group), dict):
            tree[group] = {field: value, **tree[group]}
    return tree
