"""Divide and cap the logits of a causal model, as its family does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import PretrainedConfig

from ppo_repro.numerics.devices import kernels_of
from ppo_repro.numerics.families import FAMILIES, number_of
from ppo_repro.numerics.interface import Struct, ffi, pointer


@dataclass(frozen=True)
class LogitScale:
    """Function of the head's logits z: z / divisor, then cap tanh(z / cap) unless cap is 0."""

    divisor: float
    cap: float

    def __call__(self, logits: Tensor, deterministic: bool) -> Tensor:
        """Apply the function to logits [n, V] float32, differentiably. Deterministic numerics change them in place."""
        if self == LogitScale(1.0, 0.0):
            return logits
        if deterministic:
            return _Scaled.apply(logits, self)
        scaled = logits / self.divisor
        return self.cap * torch.tanh(scaled / self.cap) if self.cap else scaled


def logit_scale_of(config: PretrainedConfig) -> LogitScale:
    """Return the divisor and the soft cap of a model's logits, from its config."""
    family = FAMILIES[config.model_type]
    return LogitScale(
        divisor=number_of(config, family.logit_divisor, 1.0),
        cap=number_of(config, family.logit_cap, 0.0),
    )


class _Scaled(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, scale: LogitScale) -> Tensor:
        kernels_of(logits.device).scale_logits(_struct(logits, logits.shape, scale))
        ctx.mark_dirty(logits)
        ctx.save_for_backward(logits.clone() if scale.cap else logits.new_empty(0))  # a copy: callers may write
        ctx.scale = scale
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (capped,) = ctx.saved_tensors
        grad, gradient = grad.contiguous(), torch.empty_like(grad)
        struct = _struct(capped, grad.shape, ctx.scale)
        struct.d_logits, struct.gradient = pointer(grad, grad.device), pointer(gradient, grad.device)
        kernels_of(grad.device).scale_logits_gradient(struct)
        return gradient, None


def _struct(logits: Tensor, shape: torch.Size, scale: LogitScale) -> Struct:
    members = dict(logits=pointer(logits, logits.device), n=shape[0], v=shape[1], divisor=scale.divisor, cap=scale.cap)
    return ffi.new("LogitScale *", members)
