"""The device that a run's models compute on. It changes the speed, but no bit of an exact result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from ppo_repro.errors import UserError
from ppo_repro.numerics import backend
from ppo_repro.output import say

if TYPE_CHECKING:  # models need this module, and not pydantic
    from ppo_repro.config.run import RunConfig

CPU = torch.device("cpu")
Model = TypeVar("Model", bound=nn.Module)

UNTRIED = (
    "layout.device = cuda: this program was never run on a CUDA device; compare the run with a CPU by "
    "`ppo-repro rerun RUN --set layout.device=cpu`"
)


@dataclass(frozen=True)
class Place:
    """The device that `layout.device` is here, and why `auto` is that one; no reason where it was named."""

    device: Literal["cpu", "cuda"]
    reason: str = ""

    def said(self) -> list[str]:
        """What `auto` took, in a line."""
        return [f"layout.device = auto: {self.device} ({self.reason})"] if self.reason else []

    def warnings(self) -> list[str]:
        """What a run is told of a card."""
        return [UNTRIED] if self.device == "cuda" else []

    def tell(self, warn: Callable[[str], None]) -> None:
        """Say both, once; `warn` takes the warnings."""
        for line in self.said():
            say(line)
        for line in self.warnings():
            warn(line)

    def of(self, config: RunConfig) -> RunConfig:
        """The same run with this device in the place of `auto`."""
        return config.model_copy(update={"layout": config.layout.model_copy(update={"device": self.device})})


def placed(name: Literal["auto", "cpu", "cuda"], kernels: str, processes: int, bound: str = "") -> Place:
    """What `layout.device` is for some kernels and number of processes; `auto` takes cuda where that changes no bit.

    `bound`: the setting by which bits belong to a kind of machine, empty without one. UserError where cuda is named, or
    the kernels need it, and it cannot be; or where the kernels are missing (`backend.choose`).
    """
    if name == "cpu":
        return Place("cpu")
    if bound:
        against = f"with {bound} bits belong to a device"
    elif kernels in backend.BACKENDS[1:]:
        against = f"the kernels of layout.backend = {kernels} are for CPUs"
    elif processes > 1:  # their gradients are added up on the CPU
        against = f"it works in one process, and here are {processes}"
    else:
        against = "" if torch.cuda.is_available() else "torch sees no CUDA device here"
    if not against:
        backend.choose(kernels, "cuda")
        return Place("cuda", "torch sees one" if name == "auto" else "")
    if name == "auto" and kernels != backend.TRITON:
        return Place("cpu", against)
    asked = f"layout.device = {name}" if name == "cuda" else f"layout.backend = {kernels} needs a CUDA device"
    rest = "" if kernels != backend.TRITON else " and layout.backend = auto"
    raise UserError(f"{asked}: {against}; take layout.device = cpu{rest}")


def in_words(device: str) -> str:
    """`cpu`, or `cuda` with the name of the card."""
    return device if device == "cpu" else f"{device}: {torch.cuda.get_device_name()}"


def device_of(name: str) -> torch.device:
    """The device `cpu` or `cuda`, as `placed` allows it; UserError for another name.

    On CUDA products of float32 are kept from TF32, and sums of lower precision are off; exact results need neither.
    """
    if name == "cpu":
        return CPU
    if name != "cuda":
        raise UserError(f"layout.device = {name}: is decided for runs, DPO, probe and bisect; take cpu or cuda here")
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
