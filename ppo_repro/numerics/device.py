"""The device that a run's models compute on. It changes the speed, but no bit of an exact result."""

from __future__ import annotations

from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from ppo_repro.errors import UserError
from ppo_repro.numerics import backend

Model = TypeVar("Model", bound=nn.Module)

UNTRIED = (
    "layout.device = cuda: this program was never run on a CUDA device; compare the run with a CPU by "
    "`ppo-repro rerun RUN --set layout.device=cpu`"
)


def check_device(name: str, processes: int, kernels: str = "eager") -> None:
    """Raise UserError where there is no such device, where the kernels for it are missing (`backend.choose`), or where
    several processes are to share the work of a run.
    """
    if name == "cpu":
        return
    if processes > 1:  # their gradients are added up on the CPU
        raise UserError(
            f"layout.device = {name}: works in one process, and here are {processes}; start it without torchrun, "
            "or take cpu"
        )
    if not torch.cuda.is_available():
        raise UserError(f"layout.device = {name}: torch sees no CUDA device here; must be cpu")
    backend.choose(kernels)


def device_of(name: str) -> torch.device:
    """The device `cpu` or `cuda`, as `check_device` allows it.

    On CUDA products of float32 are kept from TF32, and sums of lower precision are off; exact results need neither.
    """
    if name == "cpu":
        return torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return torch.device(name)


def moved(model: Model, device: torch.device) -> Model:
    """The same model, with its parameters and buffers on a device."""
    return cast(Model, nn.Module.to(model, device))  # transformers' own has no types


def state_on_cpu(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model as files take it: on the CPU, without a copy where it already is there."""
    return {name: x.cpu() for name, x in model.state_dict().items()}
