"""Which operations of torch have the same bits on a CPU and on CUDA, watched while code runs.

Watched are operations that CUDA rewrites (a division by a number is a product with its reciprocal), may fuse
(`addcmul`, `lerp`, `add` with alpha), leaves to a library (exp, sqrt of the CPU), or adds up in another order.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_FUSED = {"addcmul", "addcdiv", "lerp", "addmm", "baddbmm", "addmv", "addr", "addbmm"}
_OF_LIBRARIES = {
    "exp", "exp2", "expm1", "log", "log2", "log1p", "log10", "cos", "sin", "tan", "tanh", "sigmoid", "silu", "gelu",
    "erf", "pow", "sqrt", "rsqrt", "_softmax", "_log_softmax", "logsumexp", "logaddexp",
}  # fmt: skip
_ROUNDED_SUMS = {"mean", "var", "std", "norm", "linalg_vector_norm", "prod", "cumprod", "logcumsumexp"}
# sums of float64 here are sums of integers, exact in every order; the tests of the kernels' bits watch over that
_SUMS = {"sum", "cumsum"}


class WatchedOperations(TorchDispatchMode):
    """Collects in `others` what does not keep its bits on CUDA, with the line of the package that called it.

    Code in `exempt` folders or files of the package is not watched.
    """

    def __init__(self, exempt: Sequence[str] = ()) -> None:
        super().__init__()
        self.exempt, self.others = tuple(exempt), set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        fault = _fault(func.overloadpacket.__name__.removesuffix("_"), args, kwargs)
        if fault is not None:
            frames = [f for f in traceback.extract_stack() if "/ppo_repro/" in f.filename or "/tests/" in f.filename]
            last = next((f for f in reversed(frames) if f.filename != __file__), None)
            where = "?" if last is None else f"{last.filename.rpartition('/ppo_repro/')[2]}:{last.lineno}"
            if not where.startswith(self.exempt):
                self.others.add(f"{fault} ({where})")
        return func(*args, **kwargs)


def _fault(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    x = args[0] if args and isinstance(args[0], Tensor) else None
    if name in ("div", "true_divide", "divide") and x is not None and not isinstance(args[1], Tensor):
        is_power_of_two = abs(math.frexp(float(args[1]))[0]) == 0.5
        return None if is_power_of_two else f"division by the number {args[1]}"
    if name in _FUSED:
        return f"{name}, which may fuse"
    if name in ("add", "sub") and kwargs.get("alpha", 1) != 1:
        return f"{name} with alpha"
    if name in _OF_LIBRARIES:
        return f"{name} of a library"
    is_sum = name in _ROUNDED_SUMS or (name in _SUMS and x is not None and x.dtype in (torch.float32, torch.bfloat16))
    return f"{name}, rounded in an order of its own" if is_sum else None
