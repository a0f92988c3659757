"""Integer gradients of steps with so many tokens that one int64 for each parameter would overflow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ppo_repro.numerics import backend, gradients
from ppo_repro.numerics.gradients import GradientAccumulator, needs_two_limbs
from ppo_repro.numerics.layers import norms
from ppo_repro.numerics.layers.linear import ExactLinear
from ppo_repro.numerics.layers.norms import ExactRMSNorm
from ppo_repro.numerics.optim.adamw import AdamWSettings
from ppo_repro.numerics.optimizer import make_optimizer, weights_digest
from ppo_repro.ranks import Ranks
from tests.support.models import seeded, unequal
from tests.support.thread_ranks import in_threads

BACKENDS = ("eager", "float64")
SETTINGS = AdamWSettings(1e-3, 0.9, 0.95, 1e-8, 0.01, 1.0)


def total_of(accumulator: GradientAccumulator, name: str) -> list[int]:
    """The sums of a parameter as Python integers."""
    low = accumulator.sums[name].flatten().tolist()
    high = accumulator.high[name].flatten().tolist() if name in accumulator.high else [0] * len(low)
    return [(h << 42) + x for h, x in zip(high, low, strict=True)]


@pytest.mark.parametrize("kernels", BACKENDS)
def test_sums_of_many_of_the_largest_terms_are_those_of_python_integers(kernels: str) -> None:
    backend.use(kernels, 2)
    tokens, grid = 20_000, 0
    rng = np.random.default_rng(0)
    # the largest contributions that a grid admits, of one sign in most places: 2^63 after 16,384 tokens
    x = torch.from_numpy(rng.uniform(1.0, 2.0, (tokens, 3)).astype(np.float32))
    grad = torch.from_numpy(rng.uniform(2.0, 4.0, (tokens, 2)).astype(np.float32))
    grad[:, 1] *= torch.from_numpy(rng.choice([1.0, -1.0, -1.0], tokens).astype(np.float32))
    z = np.rint(grad.double().numpy() * 2.0 ** (1 + 27 - 3)).astype(np.int64).astype(object)
    integers = np.rint(x.double().numpy() * 2.0**21).astype(np.int64).astype(object)
    expected = [int(v) for v in (z.T @ integers).flatten()]
    assert max(map(abs, expected)) > 2**62
    for transposed in (False, True):
        for split in (tokens, 3_000, 700):
            weight = torch.zeros((3, 2) if transposed else (2, 3))
            accumulator = GradientAccumulator([("w", weight)])
            accumulator.grids["w"] = grid
            for a, b in zip(x.split(split), grad.split(split), strict=True):
                accumulator.add_linear(weight, a, b, transposed)
            found = total_of(accumulator, "w")
            assert found == (np.array(expected, object).reshape(2, 3).T.flatten().tolist() if transposed else expected)
            result = accumulator.finish()
            assert result is not None
            floats = [np.float32(float(total) * 2.0 ** (3 - 49)) for total in found]
            assert result["w"].flatten().tolist() == floats


@pytest.mark.parametrize("kernels", BACKENDS)
def test_sums_of_many_rows_are_those_of_python_integers(kernels: str) -> None:
    backend.use(kernels, 2)
    rows = np.random.default_rng(0).uniform(4.0, 8.0, (40_000, 3)).astype(np.float32)
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, 2, len(rows)))
    integers = np.rint(rows.astype(np.float64) * 2.0**46).astype(np.int64).astype(object)
    for shape in ((3,), (2, 3)):
        parameter = torch.zeros(shape)
        accumulator = GradientAccumulator([("p", parameter)])
        accumulator.grids["p"] = 0
        accumulator.add_rows(parameter, torch.from_numpy(rows), ids if len(shape) == 2 else None)
        places = [integers] if len(shape) == 1 else [integers[(ids == i).numpy()] for i in range(2)]
        expected = [int(v) for place in places for v in place.sum(0)]
        assert total_of(accumulator, "p") == expected and max(expected) > 2**62


def contribute(accumulator: GradientAccumulator, tokens: int, seed: int, split: int) -> None:
    """Every kind of contribution to the four parameters of an accumulator."""
    linear, conv, table, bias = accumulator.parameters.values()
    x, grad = (torch.randn(tokens, n, generator=seeded(seed + n)) for n in (3, 5))
    ids = torch.randint(0, 7, (tokens,), generator=seeded(seed))
    for a, b, i in zip(x.split(split), grad.split(split), ids.split(split), strict=True):
        accumulator.add_linear(linear, a, b)
        accumulator.add_linear(conv, a, b, transposed=True)
        accumulator.add_linear(table, b, a.new_ones(len(a), 7))
        accumulator.add_rows(table, b, i)
        accumulator.add_rows(bias, b)


def new_accumulator() -> GradientAccumulator:
    shapes = {"linear": (5, 3), "conv": (3, 5), "table": (7, 5), "bias": (5,)}
    return GradientAccumulator((name, torch.zeros(shape)) for name, shape in shapes.items())


def gradient(accumulator: GradientAccumulator, tokens: int, seed: int, split: int, announced: int) -> dict[str, Tensor]:
    result = None
    while result is None:
        accumulator.begin(announced)
        contribute(accumulator, tokens, seed, split)
        result = accumulator.finish()
    return {name: value.clone() for name, value in result.items()}


def with_short_limbs(patched: pytest.MonkeyPatch) -> None:
    """From now on a lower limb holds a few terms only."""
    patched.setattr(gradients, "SUM_BITS", 50)
    for module in (gradients, norms):
        patched.setattr(module, "PIECE", 1)


@pytest.mark.parametrize("kernels", BACKENDS)
@settings(max_examples=15)
@given(st.integers(1, 80), st.integers(0, 10**6), st.integers(1, 80))
def test_one_and_two_limbs_give_the_same_gradient(kernels: str, tokens: int, seed: int, split: int) -> None:
    backend.use(kernels, 1)
    whole = new_accumulator()
    one = gradient(whole, tokens, seed, tokens, tokens)
    assert set(whole.high) == set()
    with pytest.MonkeyPatch.context() as patched:
        with_short_limbs(patched)
        several = new_accumulator()
        two = gradient(several, tokens, seed, split, tokens)
        # the bound of a linear layer's terms follows the largest token of a pass
        assert tokens < 40 or set(several.high) >= {"table", "bias"}
        assert tokens < 40 or split < tokens or set(several.high) == {"linear", "conv", "table", "bias"}
    assert all(unequal(one[name], two[name]) == 0 for name in one)


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("shares", [(40, 20), (0, 60), (59, 1)])
def test_ranks_add_up_both_limbs(short: bool, shares: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    backend.use("eager", 1)
    # the same tokens twice over, once in one process and once on two ranks
    alone = new_accumulator()
    expected = None
    while expected is None:
        alone.begin(120)
        for seed, tokens in enumerate(shares):
            if tokens:
                contribute(alone, tokens, seed, tokens)
        expected = alone.finish()
    if short:
        with_short_limbs(monkeypatch)

    def work(ranks: Ranks) -> dict[str, Tensor]:
        accumulator, result = new_accumulator(), None
        while result is None:
            accumulator.begin(120)
            if shares[ranks.rank]:
                contribute(accumulator, shares[ranks.rank], ranks.rank, 7)
            result = accumulator.finish(ranks)
        return result

    found = in_threads(2, work)
    for rank in range(2):
        assert all(unequal(found[rank][name], expected[name]) == 0 for name in expected)


def test_the_second_limb_is_kept_for_steps_that_need_it() -> None:
    assert not needs_two_limbs(4096) and 2 * 4096 * 2**49 == 2**62
    assert needs_two_limbs(4097)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = seeded(0)
        self.norm = ExactRMSNorm(nn.Parameter(torch.randn(6, generator=generator)), 1e-6, "norm")
        source = nn.Linear(6, 4)
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.linear = ExactLinear(source, "linear")

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(self.norm(x))
        return result


def test_a_step_of_65536_tokens_does_not_depend_on_its_split() -> None:
    tokens = 65_536
    x, upstream = torch.randn(tokens, 6, generator=seeded(1)), torch.rand(tokens, 4, generator=seeded(2)) + 0.5
    digests = set()
    for kernels, split in (("eager", tokens), ("float64", tokens), ("float64", 5_000)):
        backend.use(kernels, 2)
        model = Model()
        optimizer = make_optimizer(model, SETTINGS, "exact")

        def backward(model: Model = model, split: int = split) -> None:
            for a, b in zip(x.split(split), upstream.split(split), strict=True):
                model(a).backward(b)

        norm = optimizer.step(backward, tokens).grad_norm
        digests.add((weights_digest(model.named_parameters()), norm))
    assert len(digests) == 1
    twin = Model().double()
    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * twin.norm.weight
    y = normed @ twin.linear.weight.t() + twin.linear.bias
    y.backward(upstream.double())
    squares = sum(float(p.grad.square().sum()) for p in twin.parameters() if p.grad is not None)
    # a float32 model against one in float64, its gradient's norm: a few parts in 10^7
    assert norm == pytest.approx(squares**0.5, rel=1e-6)


@pytest.mark.parametrize("tokens", [1024, 8192])
def test_a_weight_gradient_is_about_as_accurate_as_a_float32_product(tokens: int) -> None:
    backend.use("eager", 1)
    x, grad = (torch.randn(tokens, n, generator=seeded(n)) for n in (96, 80))
    weight = torch.zeros(80, 96)
    accumulator, result = GradientAccumulator([("w", weight)]), None
    while result is None:
        accumulator.begin()
        accumulator.add_linear(weight, x, grad)
        result = accumulator.finish()
    exact = grad.double().t() @ x.double()
    ours, stock = (float((found.double() - exact).norm()) for found in (result["w"], grad.t() @ x))
    # inputs are rounded to 22 bits of the largest of a row, stock rounds none; 2.5 times its error was measured
    assert 0 < ours < 3 * stock
