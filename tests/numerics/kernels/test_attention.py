"""Attention by kernels is the reference bit for bit, however the work is split up, on every instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic.grid import HIGH_START, LEFT_BITS, RIGHT_BITS
from ppo_repro.numerics.kernels.attention import keys, tiles
from ppo_repro.numerics.kernels.core import pool
from ppo_repro.numerics.kernels.core.compile import kernel
from ppo_repro.numerics.layers import attention as reference
from ppo_repro.numerics.layers import fused_attention
from ppo_repro.numerics.layers.attention import attention
from ppo_repro.numerics.layers.kv_cache import GridCache
from tests.support.cases.attention import DIMS, NUMBERS, REACHES, Case, make_case, outcome, random_case
from tests.support.models import qwen2_config, unequal
from tests.support.paths import ROOT

# parts of kernels, which Python cannot call, as kernels
PARTS = tiles.set_rows, tiles.set_scores, tiles.add_rows, keys.raise_maxima
set_rows, set_scores, add_rows, raise_maxima = (kernel(part.py_func) for part in PARTS)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Even the smallest work is split among threads."""
    monkeypatch.setattr(pool, "LEAST_NANOSECONDS", 1e-3)
    yield
    backend.use("eager", 1)


def differences(case: Case, threads: int) -> int:
    """Elements of the result and its gradients that differ from the reference in any bit."""
    expected, got = outcome(case), outcome(case, threads)
    if expected is None or got is None:
        assert expected is None and got is None
        return 0
    return sum(unequal(a, b) for a, b in zip(expected, got, strict=True))


cases = st.builds(
    make_case,
    length=st.one_of(*[st.integers(1, 12)] * 3, st.integers(13, 130)),
    groups=st.integers(1, 4),
    dim=st.sampled_from(DIMS),
    reach=st.sampled_from(REACHES),
    kind=st.sampled_from(NUMBERS),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=300)
@given(cases, st.integers(1, 3))
def test_kernels_give_the_bits_of_the_reference(case: Case, threads: int) -> None:
    assert differences(case, threads) == 0


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_kernels_give_the_bits_of_the_reference_in_many_cases() -> None:
    finite = 0
    for seed in range(6_000):
        case = random_case(seed)
        assert differences(case, 1 + seed % 3) == 0, seed
        finite += outcome(case, 1) is not None
    assert finite > 4_500


@settings(max_examples=40)
@given(cases)
def test_neither_recomputed_weights_nor_short_spans_change_a_bit(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_attention, "_MOST_WEIGHTS", 0)
        patch.setattr(fused_attention, "_LEAST_SPAN", 1)
        assert differences(case, 1) == 0


def cached(case: Case, cuts: list[int], threads: int) -> list[Tensor]:
    """Results [R, L, H, D] of the pieces between cuts, with a cache whose slots are in reverse order."""
    rows, length, dim = len(case.q), case.q.shape[2], case.q.shape[3]
    config = qwen2_config(head_dim=dim, num_key_value_heads=case.k.shape[1], num_hidden_layers=1)
    cache = GridCache(config, rows + 1, case.context, torch.device("cpu"))
    slots = torch.arange(rows, 0, -1)
    backend.use("float64" if threads else "eager", threads or 1)
    module: Any = SimpleNamespace(layer_idx=0, max_context=case.context)
    outs = []
    for begin, end in zip([0, *cuts], [*cuts, length], strict=True):
        pieces = [x[:, :, begin:end] for x in (case.q, case.k, case.v)]
        # row 1, where there is one, is a token shorter: its last query is padding
        valid = torch.ones(rows, end - begin, dtype=torch.bool)
        valid[1:, -1] = end < length
        positions = torch.where(valid, torch.arange(begin, end), 0)
        cache.aim(slots, positions, valid)
        outs.append(attention(module, *pieces, None, case.scaling, case.window, kv_cache=cache)[0])
    return [torch.cat(outs, 1), cache.keys[0], cache.values[0], cache.value_scales[0]]


@settings(max_examples=150)
@given(cases, st.integers(1, 3), st.data())
def test_cached_kernels_give_the_bits_of_the_reference_and_of_the_full_forward(
    case: Case, threads: int, data: st.DataObject
) -> None:
    length = case.q.shape[2]
    case = replace(case, first_key=torch.zeros_like(case.first_key))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=4))) if length > 1 else []
    try:
        expected = cached(case, cuts, 0)
    except NumericsError:
        with pytest.raises(NumericsError, match="layer 0: attention is not finite"):
            cached(case, cuts, threads)
        return
    got = cached(case, cuts, threads)
    assert sum(unequal(a, b) for a, b in zip(expected, got, strict=True)) == 0
    with torch.no_grad():
        module: Any = SimpleNamespace(layer_idx=0, max_context=case.context)
        full, _ = attention(module, case.q, case.k, case.v, None, case.scaling, case.window, first_key=case.first_key)
    assert unequal(full[0], got[0][0]) == 0 and unequal(full[:, :-1], got[0][:, :-1]) == 0


# sums of fewer than 16 terms and of several groups of 16, over the dimension, over keys and over queries
@pytest.mark.parametrize("dim", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("length", [15, 17, 130])
def test_kernels_give_the_bits_of_the_reference_at_every_width(dim: int, length: int) -> None:
    assert differences(make_case(length, 2, dim, "causal", "normal", dim + length), 1) == 0


@pytest.mark.parametrize(("dim", "kind"), [(8, "exponents"), (64, "normal"), (128, "ties")])
def test_kernels_give_the_bits_of_the_reference_over_more_than_1024_keys(dim: int, kind: str) -> None:
    assert differences(make_case(1100, 1, dim, "causal", kind, 4), 2) == 0


def full_range(bits: int, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Integers below 2^bits, some of them as large as they can be; float64."""
    top = 2**bits - 1
    x = rng.integers(-top, top + 1, shape)
    return np.where(rng.random(shape) < rng.choice([0.0, 0.5, 1.0]), top, x).astype(np.float64)


@settings(max_examples=150)
@given(st.integers(1, 3000), st.sampled_from([1, 2, 4]), st.integers(0, 2**32))
def test_sums_of_products_are_those_of_python_integers_rounded_once(terms: int, vectors: int, seed: int) -> None:
    rng, columns = np.random.default_rng(seed), vectors * tiles.LANES
    a, b = full_range(LEFT_BITS, (tiles.ROWS, terms), rng), full_range(RIGHT_BITS, (terms, columns), rng)
    a[a == 2**LEFT_BITS - 1] += 1  # the rounding of a float64 reaches the end of its grid
    exact = a.astype(np.int64).astype(object) @ b.astype(np.int64).astype(object)
    wanted = np.vectorize(float)(exact)
    result = np.empty((tiles.ROWS, columns))
    sizes = 0, columns, terms, columns
    set_rows(a.reshape(-1), 0, terms, 1, b.reshape(-1), 0, columns, result.reshape(-1), *sizes)
    assert np.array_equal(result, wanted)
    units = 2.0 ** rng.integers(-124, 105, columns)
    set_scores(a.reshape(-1), 0, terms, 1, (b * units).reshape(-1), 0, columns, result.reshape(-1), *sizes)
    assert np.array_equal(result / units, wanted)
    high, low = np.full(result.size, HIGH_START), np.zeros(result.size)
    for begin in range(0, terms, 40):
        count = min(40, terms - begin)
        part = a.reshape(-1), begin, terms, 1, b.reshape(-1), begin * columns, columns
        add_rows(*part, high, low, 0, columns, count, columns)
    assert np.array_equal(((high - HIGH_START) + low).reshape(result.shape), wanted)


def test_max_context_changes_no_bit() -> None:
    case = make_case(200, 2, 64, "causal", "normal", 8)
    for threads in (0, 1):
        short, long = (outcome(replace(case, context=context), threads) for context in (256, 32768))
        assert short is not None and long is not None
        assert sum(unequal(a, b) for a, b in zip(short, long, strict=True)) == 0


def narrow_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take four bits from the grids of the reference."""
    monkeypatch.setattr(reference, "LEFT_BITS", LEFT_BITS - 4)
    monkeypatch.setattr(reference, "RIGHT_BITS", RIGHT_BITS - 4)


def test_four_grid_bits_less_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(40, 2, 16, "causal", "normal", 0)
    assert differences(case, 1) == 0
    narrow_grids(monkeypatch)
    assert differences(case, 1) > 1000


def stock_outcome(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Result and gradients of stock attention in float32 or float64."""
    leaves = [x.to(dtype).requires_grad_() for x in (case.q, case.k, case.v)]
    out = nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, scale=case.scaling, enable_gqa=True)
    return [out.detach().transpose(1, 2), *torch.autograd.grad(out, leaves, case.grad.to(dtype))]


def errors_beside_stock(case: Case, threads: int = 1) -> list[float]:
    """Root mean square errors of the result and its gradients, over those of stock float32."""
    wanted, stock, got = stock_outcome(case, torch.float64), stock_outcome(case, torch.float32), outcome(case, threads)
    assert got is not None
    return [float((a - c).norm() / (b - c).norm()) for a, b, c in zip(got, stock, wanted, strict=True)]


def normal_case(length: int, dim: int) -> Case:
    case = make_case(length, 2, dim, "causal", "normal", 3)
    return replace(case, scaling=dim**-0.5)


# 0.3 to 1.2 were measured
@pytest.mark.parametrize(("length", "dim"), [(40, 8), (130, 64), (300, 128), (1100, 64), (3000, 64)])
def test_errors_are_those_of_stock_float32(length: int, dim: int) -> None:
    assert max(errors_beside_stock(normal_case(length, dim))) < 2


@pytest.mark.parametrize("channels", [slice(None), slice(3, 4)], ids=["all", "one"])
def test_errors_are_those_of_stock_float32_for_keys_with_a_large_bias(channels: slice) -> None:
    case = normal_case(300, 64)
    keys = case.k.clone()
    keys[..., channels] += 300.0
    # 0.2 to 1.3 were measured
    assert max(errors_beside_stock(replace(case, k=keys))) < 4


def test_four_grid_bits_less_are_not_as_accurate_as_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(errors_beside_stock(normal_case(130, 64), threads=0)) < 2
    narrow_grids(monkeypatch)
    assert min(errors_beside_stock(normal_case(130, 64), threads=0)) > 2


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_and_the_layer_is_named(threads: int, name: str, bad: float) -> None:
    case = make_case(9, 2, 8, "causal", "normal", 1)
    getattr(case, name)[0, 0, 4, 3] = bad
    backend.use("float64" if threads else "eager", 1)
    module: Any = SimpleNamespace(layer_idx=7, max_context=case.context)
    with pytest.raises(NumericsError, match="layer 7: attention is not finite"):
        attention(module, case.q, case.k, case.v, None, case.scaling, first_key=case.first_key)


@pytest.mark.parametrize("threads", [0, 1])
def test_a_gradient_that_is_not_finite_is_refused(threads: int) -> None:
    case = make_case(9, 2, 8, "causal", "normal", 1)
    assert outcome(case, threads) is not None
    case.grad[0, 0, 4, 3] = float("nan")
    assert outcome(case, threads) is None


@pytest.mark.parametrize("threads", [0, 1])
def test_more_keys_than_max_context_are_refused(threads: int) -> None:
    case = make_case(9, 2, 8, "causal", "normal", 1)
    backend.use("float64" if threads else "eager", 1)
    module: Any = SimpleNamespace(layer_idx=0, max_context=8)
    with pytest.raises(NumericsError, match=r"layer 0: a query sees 9 keys; numerics\.max_context = 8"):
        attention(module, case.q, case.k, case.v, None, case.scaling, first_key=case.first_key)
    # fewer in every sequence, though the row is longer
    first = torch.tensor([[0, 0, 0, 0, 4, 4, 4, 4, 4]]).expand_as(case.first_key)
    attention(module, case.q, case.k, case.v, None, case.scaling, first_key=first)


def test_the_cache_refuses_positions_and_slots_it_does_not_have() -> None:
    cache = GridCache(qwen2_config(), 2, 16, torch.device("cpu"))
    one = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(NumericsError, match=r"position 16 is not in 0\.\.15"):
        cache.aim(torch.tensor([0]), torch.tensor([[16]]), one)
    with pytest.raises(NumericsError, match=r"slot -1 is not in 0\.\.1"):
        cache.aim(torch.tensor([-1]), torch.tensor([[0]]), one)


def test_maxima_are_the_bits_of_the_largest_magnitude() -> None:
    largest = np.array([0, 0, np.float64(3.0).view(np.int64)])
    raise_maxima(np.array([-2.0, 0.0, 1.0]), 0.5, largest)
    assert largest.view(np.float64).tolist() == [1.0, 0.0, 3.0]


# they differ in the width of vectors and in whether they have fused multiply-add
MACHINES = {"host": {}, "haswell": {"NUMBA_CPU_NAME": "haswell"}, "generic": {"NUMBA_CPU_NAME": "generic"}}
REPORT = """
from tests.support.cases.attention import digest
print(digest(200))
from ppo_repro.numerics.kernels.attention import backward, block, forward, keys, tiles
def asm(part):
    return part.compiled.inspect_asm(part.compiled.signatures[0])
rounded = [block.quantise_row, block.round_scores, block.weigh, forward.fold, forward.store_block,
           backward.differentiate, backward.fold_scores, keys.raise_maxima, keys.store_keys]
print(sum("vfmadd" in asm(part) or "vfnmadd" in asm(part) or "vfmsub" in asm(part) for part in rounded))
print("vfmadd" in asm(tiles.set_rows), "zmm" in asm(tiles.set_rows))
"""


def on_machine(name: str, folder: Path) -> list[str]:
    """Digest, number of kernels with forbidden fused operations, whether products are fused and 512 bits wide."""
    features = {} if name == "host" else {"NUMBA_CPU_FEATURES": ""}
    environment = {**os.environ, **MACHINES[name], **features, "NUMBA_CACHE_DIR": str(folder / name)}
    done = subprocess.run(
        [sys.executable, "-c", REPORT], capture_output=True, text=True, cwd=ROOT, env=environment, check=True
    )
    return done.stdout.split("\n")[:3]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_instruction_set_gives_the_same_bits(tmp_path: Path) -> None:
    host, haswell, generic = (on_machine(name, tmp_path) for name in MACHINES)
    assert haswell[2] == "True False" and generic[2] == "False False"
    assert host[0] == haswell[0] == generic[0]
    assert host[1] == haswell[1] == generic[1] == "0"
