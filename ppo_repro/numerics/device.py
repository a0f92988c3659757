"""The device that a run's models compute on. It changes the speed, but no bit of an exact result."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ppo_repro.errors import UserError


def device_of(name: str) -> torch.device:
    """The device `cpu` or `cuda`; UserError where there is no such device.

    On CUDA products of float32 are kept from TF32, and sums of lower precision are off; exact results need neither.
    """
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(f"layout.device = {name}: torch sees no CUDA device here; must be cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return torch.device(name)


def state_on_cpu(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model as files take it: on the CPU, without a copy where it already is there."""
    return {name: x.cpu() for name, x in model.state_dict().items()}
