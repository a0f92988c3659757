"""Models on a device. A run computes on the CPU; `accuracy` and `audit` also take models that lie elsewhere."""

from __future__ import annotations

from typing import TypeVar, cast

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")
Model = TypeVar("Model", bound=nn.Module)


def moved(model: Model, device: torch.device) -> Model:
    """The same model, with its parameters and buffers on a device."""
    return cast(Model, nn.Module.to(model, device))  # transformers' own has no types


def state_on_cpu(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model as files take it: on the CPU, without a copy where it already is there."""
    return {name: x.cpu() for name, x in model.state_dict().items()}
