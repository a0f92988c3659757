"""The device that a run's models compute on. Only native numerics compute on a CUDA device, which no test has tried."""

from __future__ import annotations

from typing import Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from ppo_repro.errors import UserError

CPU = torch.device("cpu")
Model = TypeVar("Model", bound=nn.Module)


def device_of(name: Literal["cpu", "cuda"]) -> torch.device:
    """The device of `layout.device`; UserError where torch sees none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("layout.device = cuda: torch sees no CUDA device here; take cpu")
    return torch.device(name)


def moved(model: Model, device: torch.device) -> Model:
    """The same model, with its parameters and buffers on a device."""
    return cast(Model, nn.Module.to(model, device))  # transformers' own has no types


def state_on_cpu(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model as files take it: on the CPU, without a copy where it already is there."""
    return {name: x.cpu() for name, x in model.state_dict().items()}
