"""Random attentions with all that is awkward about them, and a digest of what the kernels make of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import backend
from ppo_repro.numerics.layers.attention import attention

DIMS = (2, 3, 5, 7, 8, 12, 16, 31, 33, 64, 80, 128)
REACHES = ("causal", "window", "left", "packed", "any")
NUMBERS = ("normal", "ties", "denormal", "zeros", "exponents", "large")


@dataclass(frozen=True)
class Case:
    q: Tensor  # [R, H, L, D]
    k: Tensor  # [R, Hk, L, D]
    v: Tensor
    grad: Tensor
    first_key: Tensor  # [R, L]
    window: int | None
    scaling: float
    context: int


def numbers(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    """float32 [.., D] of one kind of awkwardness."""
    x = rng.standard_normal(shape)
    rows = (*shape[:-1], 1)
    if kind == "ties":
        x = rng.integers(-3, 4, shape) * 0.5 + 2.0**-20 * rng.integers(-1, 2, shape)
    elif kind == "denormal":
        x = x * 2.0 ** rng.integers(-149, -120, rows)
    elif kind == "zeros":
        x = np.where(rng.random(shape) < 0.5, x, -0.0) * (rng.random(rows) < 0.6)
    elif kind == "exponents":
        x = x * 2.0 ** rng.integers(-60, 61, rows)
    elif kind == "large":
        x = x * 2.0 ** rng.integers(0, 6, rows)
    return torch.from_numpy(x.astype(np.float32))


def laid_out(x: Tensor, how: int) -> Tensor:
    """The same numbers in other places of memory."""
    if how == 0:
        return x
    if how == 1:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((*x.shape[:3], 2 * x.shape[3] + 1), float("nan"))
    wide[..., 1::2] = x
    return wide[..., 1::2]


def first_keys(kind: str, rows: int, length: int, rng: np.random.Generator) -> Tensor:
    own = np.arange(length)
    if kind == "left":
        starts = rng.integers(0, length, (rows, 1))
        return torch.from_numpy(np.where(own < starts, own, starts))
    if kind == "packed":
        begins = np.maximum.accumulate(np.where(rng.random((rows, length)) < 0.1, own, 0), axis=1)
        return torch.from_numpy(begins)
    if kind == "any":
        return torch.from_numpy(own - rng.integers(-1, length + 1, (rows, length)))
    return torch.zeros(rows, length, dtype=torch.int64)


def make_case(length: int, groups: int, dim: int, reach: str, kind: str, seed: int) -> Case:
    """Queries, keys, values and gradients; one of the four is of the given kind, which the seed chooses."""
    rng = np.random.default_rng(seed)
    rows, kv_heads, odd = int(rng.integers(1, 3)), int(rng.integers(1, 3)), int(rng.integers(4))
    heads = (kv_heads * groups, kv_heads, kv_heads, kv_heads * groups)
    kinds = [kind if i == odd or kind in ("ties", "zeros") else "normal" for i in range(4)]
    q, k, v, grad = (
        laid_out(numbers(kinds[i], (rows, heads[i], length, dim), rng), int(rng.integers(3))) for i in range(4)
    )
    window = int(rng.integers(1, length + 1)) if reach == "window" else None
    context = length + int(rng.integers(0, 2)) * int(rng.integers(1, 4000))
    scaling = float(rng.choice([dim**-0.5, 0.35, 1.0]))
    return Case(q, k, v, grad, first_keys(reach, rows, length, rng), window, scaling, context)


def outcome(case: Case, threads: int = 0, kernels: str = "float64") -> list[Tensor] | None:
    """Result [R, L, H, D] and gradients of q, k and v, or None where they leave float32; threads = 0: the reference."""
    backend.use(kernels if threads else "eager", threads or 1)
    module = SimpleNamespace(layer_idx=0, max_context=case.context)
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    try:
        out, _ = attention(
            module,  # type: ignore[arg-type]
            *leaves,
            None,
            case.scaling,
            case.window,
            first_key=case.first_key,
        )
        return [out.detach(), *torch.autograd.grad(out, leaves, case.grad.transpose(1, 2))]
    except NumericsError:
        return None
    finally:
        backend.use("eager", 1)


def random_case(seed: int) -> Case:
    """A case whose shape and kind the seed chooses."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 131)) if seed % 4 == 0 else int(rng.integers(1, 40))
    reach, kind = str(rng.choice(REACHES)), str(rng.choice(NUMBERS))
    return make_case(length, int(rng.integers(1, 5)), int(rng.choice(DIMS)), reach, kind, seed)


def digest(count: int) -> str:
    """sha256 of the bits that the kernels give for `count` random cases."""
    found = hashlib.sha256()
    for seed in range(count):
        for x in outcome(random_case(seed), threads=1) or []:
            found.update(x.contiguous().numpy().tobytes())
    return found.hexdigest()
