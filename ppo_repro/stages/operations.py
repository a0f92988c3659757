"""The operations of torch whose bits depend on the machine, and a watch that notes which operations a block calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# operations of torch whose bits depend on the machine, the library or how a tensor is cut; and what to take instead
_EXACT = "ppo_repro.numerics"
_SUMS = "batch.response_sums or batch.response_means"
MACHINE_DEPENDENT = {
    **{name: f"{_EXACT}.{name}" for name in ("exp", "log", "sigmoid", "softplus", "sqrt", "tanh")},
    **dict.fromkeys(("sum", "mean", "cumsum", "prod", "nansum"), _SUMS),
    "log_sigmoid_forward": f"-{_EXACT}.softplus(-x)",
    "pow": "x * x, or exp and log of ppo_repro.numerics",
    **dict.fromkeys(
        ("exp2", "expm1", "log1p", "log2", "log10", "sin", "cos", "tan", "erf", "rsqrt", "silu", "gelu", "logit"),
        f"exp and log of {_EXACT}",
    ),
    **dict.fromkeys(("logsumexp", "_softmax", "_log_softmax", "logcumsumexp", "std", "var", "norm"), _SUMS),
    **dict.fromkeys(("linalg_vector_norm", "dot", "mm", "bmm", "addmm", "mv", "cumprod", "var_mean"), _SUMS),
}


class Watch(TorchDispatchMode):
    """Notes the operations on floating-point tensors of several numbers in a block, including a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(named or {}))
        first = arguments[0] if arguments else None
        name = function._schema.name.removeprefix("aten::").rstrip("_")
        is_product = name == "pow" and not isinstance(arguments[1], Tensor) and arguments[1] in (1, 2)
        if isinstance(first, Tensor) and first.is_floating_point() and first.numel() > 1 and not is_product:
            self.names.add(name)
        return result

    @property
    def machine_dependent(self) -> list[str]:
        """Return the noted operations whose bits depend on the machine, by name."""
        return sorted(self.names & MACHINE_DEPENDENT.keys())
