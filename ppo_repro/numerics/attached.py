"""Store data that the kernels made for a module in the module itself.

A copy of the module starts without the data. The data is deleted with the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass
class Attached:
    """The `Network` of a trunk, and the `PackedMatrix` of a linear layer outside of trunks; None until a first pass."""

    network: Any = None
    matrix: Any = None

    def __reduce__(self) -> tuple[type[Attached], tuple[()]]:
        """Copy and save nothing: packed weights are computed again."""
        return Attached, ()


def attached_to(module: nn.Module) -> Attached:
    """Return the `Attached` of a module. The first call makes an empty one."""
    attached = vars(module).get("_attached")
    if not isinstance(attached, Attached):
        attached = Attached()
        module._attached = attached  # type: ignore[assignment]
    return attached


def attached_in(model: nn.Module) -> Iterator[Attached]:
    """Yield the `Attached` of each module of a model that has one."""
    for module in model.modules():
        if "_attached" in vars(module):
            yield attached_to(module)
