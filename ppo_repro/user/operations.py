"""Watch for operations of torch whose bits may depend on the machine: all operations but those listed here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# operations whose results are exact or rounded once
_ARITHMETIC = (
    "abs add ceil clamp clamp_max clamp_min copysign div floor mul neg reciprocal round rsub sgn sign sub trunc"
)
_CHOICE = "amax amin argmax argmin masked_fill max maximum min minimum nan_to_num relu sort threshold_backward where"
_COMPARISON = "all any eq equal ge gt isfinite isin isinf isnan le logical_and logical_not logical_or lt ne nonzero"
_PLACES = """
    _local_scalar_dense _reshape_alias _unsafe_view alias as_strided cat constant_pad_nd diagonal expand flip gather
    index index_select masked_scatter masked_select permute repeat roll select select_backward slice slice_backward
    split split_with_sizes squeeze stack t transpose unbind unsqueeze view
"""
_COPIES = """
    _to_copy arange clone copy detach empty empty_like empty_strided fill full full_like lift_fresh new_empty
    new_empty_strided new_full new_ones new_zeros ones ones_like scalar_tensor zero zeros zeros_like
"""
# of two zeros with different signs, torch's loop over vectors and its scalar rest choose different ones
_EXTREMES = ("amax", "amin", "clamp", "clamp_max", "clamp_min", "max", "maximum", "min", "minimum")
_SAME_BITS = frozenset(" ".join((_ARITHMETIC, _CHOICE, _COMPARISON, _PLACES, _COPIES)).split())

_EXACT = "ppo_repro.numerics"
_SUMS = "batch.response_sums or batch.response_means"
_INSTEAD = {
    **{name: f"{_EXACT}.{name}" for name in ("exp", "log", "sigmoid", "softplus", "sqrt", "tanh")},
    **dict.fromkeys(("sum", "mean", "cumsum", "nansum", "logsumexp", "_softmax", "_log_softmax"), _SUMS),
    **dict.fromkeys(("std", "var", "var_mean", "linalg_vector_norm", "dot", "mv", "mm", "bmm", "addmm"), _SUMS),
    **dict.fromkeys(("index_add", "index_put", "scatter_add"), "batch.of_tokens for the number of several tokens"),
    "log_sigmoid_forward": f"-{_EXACT}.softplus(-x)",
    **dict.fromkeys(_EXTREMES, "x + 0.0 for each argument x, so that no zero is negative"),
    "pow": f"x * x, or exp and log of {_EXACT}",
}


def instead_of(name: str) -> str:
    """Return what a function may call instead of an operation of torch whose bits may depend on the machine."""
    return _INSTEAD.get(name, f"+ - * /, comparisons, where, indexing, and the functions of {_EXACT}")


class Watch(TorchDispatchMode):
    """Notes operations on real or complex numbers in a block, also of a backward pass, that may differ by machine.

    Attributes:
        machine_dependent: Names of the noted operations, without "aten::".
    """

    def __init__(self) -> None:
        super().__init__()
        self.machine_dependent = set[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(named or {}))
        inputs = dict(zip((a.name for a in function._schema.arguments), arguments, strict=False)) | (named or {})
        name = function._schema.name.removeprefix("aten::").rstrip("_")
        kinds = {x.dtype for x in tree_leaves((inputs, result)) if isinstance(x, Tensor)}
        is_real = any(kind.is_floating_point for kind in kinds)
        if any(kind.is_complex for kind in kinds) or (is_real and not _has_same_bits(name, inputs, result)):
            self.machine_dependent.add(name)
        return result


def _has_same_bits(name: str, inputs: dict[str, Any], result: Any) -> bool:
    """Return whether an operation with these arguments has the same bits on every machine."""
    if name in ("sum", "mean"):
        return inputs["self"].numel() <= result.numel()  # each sum has one number or none
    if name == "pow":
        return not isinstance(inputs["exponent"], Tensor) and inputs["exponent"] in (1, 2)
    if name in ("index_put", "scatter", "scatter_add"):
        return "reduce" not in inputs and not _repeats(inputs)
    if name in _EXTREMES and _chooses_a_zero(inputs, result):
        return False
    # with alpha, x + 0.1 * y is rounded once or twice, which depends on the machine
    is_plain = inputs.get("alpha", 1) == 1 and inputs.get("rounding_mode") is None and "decimals" not in inputs
    return name in _SAME_BITS and is_plain


def _chooses_a_zero(inputs: dict[str, Any], result: Any) -> bool:
    """Return whether an extreme may be one of two zeros of opposite signs."""
    x, *others = (inputs[name] for name in ("self", "other", "min", "max") if isinstance(inputs.get(name), Tensor))
    if others:
        return any(bool(((x == 0) & (y == 0) & (x.signbit() != y.signbit())).any()) for y in others)
    largest = tree_leaves(result)[0]
    signs = x[x == 0].signbit()
    is_reduced = largest.numel() < x.numel()  # a clamp by numbers keeps the sign of a zero
    return is_reduced and bool((largest == 0).any()) and bool(signs.any()) and not bool(signs.all())


def _repeats(inputs: dict[str, Any]) -> bool:
    """Return whether several numbers go to one place, as in the gradient of x[index] if `index` repeats an entry."""
    counts = torch.zeros(inputs["self"].shape, dtype=torch.int64)
    if "index" in inputs:
        counts.scatter_add_(inputs["dim"], inputs["index"], torch.ones_like(inputs["index"]))
    else:
        counts = torch.ops.aten.index_put(counts, inputs["indices"], torch.tensor(1), accumulate=True)
    return bool((counts > 1).any())
