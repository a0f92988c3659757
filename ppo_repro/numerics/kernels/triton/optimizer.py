"""AdamW in one kernel, every operation rounded to float32 as in `optim.adamw`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ppo_repro.numerics.kernels.optimizer import StepConstants
from ppo_repro.numerics.kernels.triton.launch import WARPS4

BLOCK = 1024


@triton.jit
def adamw(
    parameter, gradient, first, second, clip, beta1, rest1, beta2, rest2, second_scale, eps, decay, step_size, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One step in place."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    g = tl.load(gradient + i, mask=live, other=0.0) * clip
    m = tl.load(first + i, mask=live, other=0.0) * beta1 + g * rest1
    v = tl.load(second + i, mask=live, other=0.0) * beta2 + (g * g) * rest2
    scale = tl.zeros((BLOCK,), dtype=tl.float32) + second_scale
    denominator = tl.div_rn(tl.sqrt_rn(v), scale) + eps
    p = tl.load(parameter + i, mask=live, other=0.0) * decay
    tl.store(parameter + i, p - tl.div_rn(m, denominator) * step_size, mask=live)
    tl.store(first + i, m, mask=live)
    tl.store(second + i, v, mask=live)


def take_step(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, constants: StepConstants) -> None:
    """One step of AdamW on contiguous float32 tensors of one shape, in place."""
    tensors = [x.detach() for x in (parameter, gradient, first, second)]
    assert all(x.is_contiguous() for x in tensors)
    count = parameter.numel()
    adamw[(triton.cdiv(count, BLOCK),)](*tensors, *constants, count, BLOCK=BLOCK, **WARPS4)
