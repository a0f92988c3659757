"""Compare and copy weights by name: digests of their bits, and copies of every bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def weights_digest(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Return the first 16 hex digits of the SHA-256 over names and raw bits of the parameters, in the given order."""
    digest = hashlib.sha256()
    for name, parameter in parameters:
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(-1).numpy().data)
    return digest.hexdigest()[:16]


def require_same_names(expected: Iterable[str], actual: Iterable[str], what: str) -> None:
    """Raise ValueError, with the first names, for names that only one side has."""
    unmatched = sorted(set(expected) ^ set(actual))
    if unmatched:
        more = f" and {len(unmatched) - 3} more" if len(unmatched) > 3 else ""
        raise ValueError(f"one side only has {what} {', '.join(unmatched[:3])}{more}")


def require_same_shapes(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Raise ValueError, with the first name, unless tensors of one name have the same shape and dtype."""
    for name, target in targets.items():
        value = values[name]
        if (value.shape, value.dtype) != (target.shape, target.dtype):
            actual, expected = f"{value.dtype} {list(value.shape)}", f"{target.dtype} {list(target.shape)}"
            raise ValueError(f"tensor {name} is {actual}, expected {expected}")


def copy_named(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy every bit of `values` into `targets`. Raises ValueError unless names, shapes and dtypes are the same."""
    require_same_names(targets, values, "the tensors")
    require_same_shapes(targets, values)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(values[name])
