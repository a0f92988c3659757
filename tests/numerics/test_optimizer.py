"""The norm of gradients and AdamW against the definition on every bit, and near torch's; optimizers and their state."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from fractions import Fraction
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ppo_repro.base.errors import NumericsError
from ppo_repro.base.mode import Mode
from ppo_repro.numerics import library
from ppo_repro.numerics.adamw import AdamW, AdamWSettings
from ppo_repro.numerics.definition.elementary import Array, F
from ppo_repro.numerics.definition.optimizer import Moments, Settings, adamw, global_norm, sum_of_squares
from ppo_repro.numerics.native_optimizer import NativeAdamW
from ppo_repro.numerics.optimizer import Optimizer
from ppo_repro.numerics.sums import mean_of, run_sums

SETTINGS = AdamWSettings(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)
hard = st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 3e-20, 1.0, -1.5, 1e15, 3.4e38]) | st.floats(
    -10, 10, width=32
)


def random(rng: np.random.Generator, *shape: int) -> Array:
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-10, 11, shape))).astype(F)


def stepped(
    weights: dict[str, Array], gradients: list[dict[str, Array]], s: AdamWSettings
) -> tuple[AdamW, list[float]]:
    adam = AdamW({name: torch.from_numpy(p.copy()) for name, p in weights.items()})
    return adam, [adam.apply(s, {n: torch.from_numpy(g) for n, g in each.items()}) for each in gradients]


@given(st.lists(st.lists(hard, min_size=1, max_size=40), min_size=1, max_size=3), st.integers(1, 3))
def test_steps_on_hard_numbers_are_the_definition(values: list[list[float]], steps: int) -> None:
    names = [f"tensor {i}" for i in range(len(values))]
    weights = {name: np.array(row, F)[::-1] for name, row in zip(names, values, strict=True)}
    gradients = [{n: np.roll(np.array(row, F), t) for n, row in zip(names, values, strict=True)} for t in range(steps)]
    for clip in (0.0, 1.0):
        s = AdamWSettings(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, max_grad_norm=clip)
        compare(weights, gradients, s)


def compare(weights: dict[str, Array], gradients: list[dict[str, Array]], s: AdamWSettings) -> None:
    with np.errstate(over="ignore"):
        expected = {n: Moments(p, np.zeros_like(p), np.zeros_like(p)) for n, p in weights.items()}
        norms = []
        for t, each in enumerate(gradients, 1):
            norms.append(global_norm([each[n] for n in sorted(each)]))
            expected = {n: adamw(of, each[n], Settings(**asdict(s)), norms[-1], t) for n, of in expected.items()}
        beyond_float32 = any(np.isinf(F(norm)) for norm in norms)
    if beyond_float32:
        with pytest.raises(NumericsError, match="gradient norm is not finite in float32"):
            stepped(weights, gradients, s)
        return
    adam, found = stepped(weights, gradients, s)
    assert found == norms
    for name, of in expected.items():
        for tensor, array in ((adam.parameters[name], of.p), (adam.first[name], of.m), (adam.second[name], of.v)):
            assert tensor.numpy().tobytes() == np.ascontiguousarray(array).tobytes(), name


@pytest.mark.parametrize("threads", [1, 3])
def test_large_tensors_are_the_definition_whatever_the_threads(threads: int) -> None:
    rng = np.random.default_rng(0)
    shapes = {"b": (4096,), "a": (130, 300), "d": (1,), "c": (4097,), "e": (16384 + 17,)}
    weights = {name: random(rng, *shape) for name, shape in shapes.items()}
    gradients = [{name: random(rng, *shape) for name, shape in shapes.items()} for _ in range(2)]
    library.set_threads(threads)
    try:
        compare(weights, gradients, SETTINGS)
    finally:
        library.set_threads(1)


def test_another_order_shows_in_the_norm() -> None:
    gradients = [random(np.random.default_rng(seed), 3, 7000) for seed in range(8)]
    for gradient in gradients:
        exact = sum_of_squares(gradient)
        assert stepped({"w": gradient}, [{"w": gradient}], SETTINGS)[1] == [math.sqrt(exact)]
        assert sum_of_squares(gradient, 2048) == pytest.approx(exact, rel=1e-13)
    assert [sum_of_squares(g, 2048) for g in gradients] != [sum_of_squares(g) for g in gradients]
    assert [sum_of_squares(g[:, ::-1]) for g in gradients] != [sum_of_squares(g) for g in gradients]
    halves = {"a": gradients[0][:1], "b": gradients[0][1:]}
    assert stepped(halves, [halves], SETTINGS)[1] == [global_norm(list(halves.values()))]


def test_a_step_uses_all_of_its_settings() -> None:
    before, after = (
        AdamWSettings(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, max_grad_norm=0.0),
        AdamWSettings(learning_rate=1e-2, beta1=0.5, beta2=0.6, eps=1e-1, weight_decay=0.9, max_grad_norm=0.0),
    )
    rng = np.random.default_rng(3)
    start, gradients = random(rng, 4, 3), [random(rng, 4, 3) for _ in range(2)]

    changed, native, unchanged = (torch.from_numpy(start.copy()).requires_grad_() for _ in range(3))
    adams = AdamW({"w": changed}), NativeAdamW({"w": native}, before), NativeAdamW({"w": unchanged}, before)
    for each, gradient in zip((before, after), gradients, strict=True):
        for adam, settings in zip(adams, (each, each, before), strict=True):
            adam.apply(settings, {"w": torch.from_numpy(gradient.copy())})
    assert torch.allclose(changed, native, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(changed, unchanged, rtol=1e-6, atol=1e-6)


def test_steps_are_near_those_of_torch() -> None:
    rng = np.random.default_rng(2)
    start = random(rng, 40, 30)
    gradients = [random(rng, 40, 30) for _ in range(6)]
    for clip in (0.0, 0.5, 1e9):
        s = AdamWSettings(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, max_grad_norm=clip)
        adam, norms = stepped({"w": start}, [{"w": g} for g in gradients], s)
        native = NativeAdamW({"w": torch.from_numpy(start.copy()).requires_grad_()}, s)
        native_norms = [native.apply(s, {"w": torch.from_numpy(g.copy())}) for g in gradients]
        assert native_norms == pytest.approx(norms, rel=1e-5)
        p = torch.from_numpy(start).double().requires_grad_()
        torch_adam = torch.optim.AdamW([p], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for g, found in zip(gradients, norms, strict=True):
            p.grad = torch.from_numpy(g).double()
            assert float(nn.utils.clip_grad_norm_([p], clip or math.inf)) == pytest.approx(found, rel=1e-12)
            torch_adam.step()
        # six steps of about 1e-2, each with a few roundings of 2^-24, and weights up to 2^12 that are rounded six times
        assert torch.allclose(adam.parameters["w"].double(), p.detach(), rtol=6 * 2.0**-24, atol=1e-7)
        assert torch.allclose(native.parameters["w"].double(), p.detach(), rtol=6 * 2.0**-24, atol=1e-6)
        assert not torch.allclose(adam.parameters["w"], torch.from_numpy(start), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing(bad: float) -> None:
    weights = {name: np.ones((70, 100), F) for name in ("a", "layer.weight", "z")}
    gradients = {name: np.ones((70, 100), F) for name in weights}
    gradients["layer.weight"][69, 99] = bad
    adam = AdamW({name: torch.from_numpy(p) for name, p in weights.items()})
    with pytest.raises(NumericsError, match=r"the gradient of layer\.weight is not finite"):
        adam.apply(SETTINGS, {n: torch.from_numpy(g) for n, g in gradients.items()})
    assert all((p == 1).all() for p in weights.values())
    assert adam.steps == 0
    assert not any(m.any() for m in (*adam.first.values(), *adam.second.values()))


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_norm_that_float32_does_not_hold_is_refused_and_changes_nothing(max_grad_norm: float) -> None:
    """Of finite gradients; the largest norm that float32 holds is the control."""
    largest, settings = float(np.finfo(F).max), replace(SETTINGS, max_grad_norm=max_grad_norm)
    weights = {"a": torch.ones(2), "layer.weight": torch.ones(3)}
    adam, gradients = AdamW(weights), {"a": torch.tensor([largest, 1.0]), "layer.weight": torch.full((3,), largest)}
    with pytest.raises(NumericsError, match=r"^the gradient norm is not finite in float32; lower the learning rate$"):
        adam.apply(settings, gradients)
    assert all((p == 1).all() for p in weights.values())
    assert adam.steps == 0
    assert not any(m.any() for m in (*adam.first.values(), *adam.second.values()))
    assert adam.apply(settings, {**gradients, "layer.weight": torch.zeros(3)}) == largest
    assert adam.steps == 1


@pytest.mark.parametrize("mode", ["deterministic", "native"])
@pytest.mark.parametrize("field", ["first", "second", "steps"])
def test_a_state_without_one_parameter_is_refused_by_its_name(mode: Mode, field: str) -> None:
    weights = {name: torch.zeros(3) for name in ("a", "layer.weight", "z")}
    adam = AdamW(weights) if mode == "deterministic" else NativeAdamW(weights, SETTINGS)
    adam.load(adam.state())
    missing = {name: kept for name, kept in getattr(adam.state(), field).items() if name != "layer.weight"}
    with pytest.raises(ValueError, match=r"layer\.weight$"):
        adam.load(replace(adam.state(), **{field: missing}))


def test_a_misspelt_mode_is_not_stock_torch() -> None:
    with pytest.raises(ValueError, match=r"^mode = 'determinstic': must be one of deterministic, native$"):
        Optimizer(nn.Linear(2, 1), SETTINGS, cast(Mode, "determinstic"))


def test_parameters_that_step_alone_are_refused_by_name_in_deterministic_numerics() -> None:
    """As stock torch leaves them where an expert has no gradient."""
    native = NativeAdamW({"a": torch.zeros(3), "z": torch.zeros(3)}, SETTINGS)
    native.apply(SETTINGS, {"z": torch.ones(3)})
    with pytest.raises(ValueError, match="a has taken 0 steps, z 1"):
        AdamW({"a": torch.zeros(3), "z": torch.zeros(3)}).load(native.state())


@given(st.lists(st.floats(-1e6, 1e6), max_size=30), st.randoms())
def test_means_and_sums_are_rounded_once(values: list[float], order: object) -> None:
    exact = sum(map(Fraction, values))
    shuffled = list(values)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    found = [mean_of(torch.tensor(v, dtype=torch.float64)) for v in (values, shuffled)]
    assert found == [float(exact) / len(values) if values else 0.0] * 2
    cut = len(values) // 3
    of_runs = run_sums(torch.tensor(values, dtype=torch.float64), torch.tensor([cut, 0, len(values) - cut]))
    assert of_runs.tolist() == [float(sum(map(Fraction, run))) for run in (values[:cut], [], values[cut:])]
