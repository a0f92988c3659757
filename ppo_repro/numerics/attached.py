"""Store the kernels' state for the modules and parameters of this process between calls, in one object, `ATTACHED`.

Modules stay as transformers made them, so no state is stored in them. A copy of a module starts without state, and the
state of a module is deleted with the module.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary


class Packed(Protocol):
    """Owner of packed copies of weights: a `Network` or a `PackedMatrix`."""

    def forget(self) -> None: ...


class Attached:
    """State of trunks, linear layers and parameters: networks, packed matrices, and the collectors of gradients."""

    def __init__(self) -> None:
        self.networks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # of a lowered trunk its `Network`
        self.matrices: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # of a linear layer its `PackedMatrix`
        self._sums = WeakTensorKeyDictionary()  # of a parameter a weak reference to its `GradientSums`

    def packed(self, model: nn.Module) -> Iterator[Packed]:
        """Yield the owners of packed copies of the weights of a model's modules."""
        for module in model.modules():
            for views in (self.networks, self.matrices):
                if module in views:
                    yield views[module]

    def collect(self, parameter: Tensor, sums: Any) -> None:
        """Let `sums` collect the gradient of a parameter from now on, in place of an earlier collector."""
        self._sums[parameter] = weakref.ref(sums)

    def sums_of(self, *parameters: Tensor) -> Any:
        """Return the `GradientSums` that collect the gradients of some parameters, or None."""
        found = (self._sums[p]() for p in parameters if p.requires_grad and p in self._sums)
        return next((sums for sums in found if sums is not None), None)


ATTACHED = Attached()
