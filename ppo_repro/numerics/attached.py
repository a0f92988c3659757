"""What the kernels keep between calls for the modules and parameters of this process: one object, `ATTACHED`.

Modules stay as transformers made them, so nothing is stored in them: a copy of a module starts without, and what is
attached to a module goes when the module goes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary


class Packed(Protocol):
    """Packed copies of weights: a `Network` or a `PackedMatrix`."""

    def forget(self) -> None: ...


class Attached:
    """The kernels' view of trunks and linear layers, and who collects the gradient of a parameter."""

    def __init__(self) -> None:
        self.networks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # of a lowered trunk its `Network`
        self.matrices: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # of a linear layer its `PackedMatrix`
        self._sums = WeakTensorKeyDictionary()  # of a parameter a weak reference to its `GradientSums`

    def packed(self, model: nn.Module) -> Iterator[Packed]:
        """Yield what has packed copies of the weights of a model's modules."""
        for module in model.modules():
            for views in (self.networks, self.matrices):
                if module in views:
                    yield views[module]

    def collect(self, parameter: Tensor, sums: Any) -> None:
        """Let `GradientSums` collect the gradient of a parameter from now on, in place of any earlier ones."""
        self._sums[parameter] = weakref.ref(sums)

    def sums_of(self, *parameters: Tensor) -> Any:
        """Return the `GradientSums` that collect the gradients of some parameters; None if nothing collects them."""
        found = (self._sums[p]() for p in parameters if p.requires_grad and p in self._sums)
        return next((sums for sums in found if sums is not None), None)


ATTACHED = Attached()
