"""Distributions by hand, by definition and in float64; draws and initial weights by name."""

from __future__ import annotations

import hashlib
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.base.mode import Mode
from ppo_repro.config.control import NetworkConfig
from ppo_repro.control.environments import DiscreteActions
from ppo_repro.control.networks import Agent, Categorical, DiagonalGaussian, gumbels, normals, orthogonal
from ppo_repro.numerics.gradient_sums import GradientSums
from ppo_repro.numerics.sequences import single_row_sequences, slots_of
from tests.support.float32 import bits, finite, tensor

MODES = ["deterministic", "native"]
sizes = st.integers(1, 4)


def gaussian(log_std: list[float], mode: Mode = "deterministic") -> DiagonalGaussian:
    found = DiagonalGaussian(len(log_std), mode)
    with torch.no_grad():
        found.log_std.copy_(tensor(log_std))
    return found


def rows_of(size: int, low: float, high: float) -> st.SearchStrategy[list[list[float]]]:
    return st.lists(st.lists(finite(low, high), min_size=size, max_size=size), min_size=1, max_size=12)


@given(sizes.flatmap(lambda n: st.tuples(rows_of(n, -9, 9), rows_of(n, -9, 9), rows_of(n, -3, 3))))
def test_gaussian_by_definition(drawn: tuple[list[list[float]], ...]) -> None:
    means, actions, deviations = drawn
    count = min(len(means), len(actions))
    found = gaussian(deviations[0])
    m, a = (tensor(x[:count]) for x in (means, actions))  # type: ignore[arg-type]
    logprobs, entropies = found.statistics(m, a)
    sigma = [math.exp(s) for s in found.log_std.tolist()]
    for row, (centre, at) in enumerate(zip(m.tolist(), a.tolist(), strict=True)):
        terms = [
            (x - c) ** 2 / (2 * s * s) + math.log(s) + math.log(2 * math.pi) / 2
            for c, x, s in zip(centre, at, sigma, strict=True)
        ]
        # rounded once to float32; 1e-12 of the largest term for the float64 before
        assert logprobs[row].item() == pytest.approx(-math.fsum(terms), rel=2.0**-23, abs=1e-11 * max(map(abs, terms)))
        expected = math.fsum(math.log(s) + math.log(2 * math.pi * math.e) / 2 for s in sigma)
        assert entropies[row].item() == pytest.approx(expected, rel=2.0**-23, abs=1e-11)


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_gaussian_gradients_equal_float64_autograd_and_do_not_depend_on_the_chunks(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    means, actions = (torch.randn(40, 3, generator=generator) for _ in range(2))
    g_logprob, g_entropy = torch.randn(2, 40, generator=generator)
    found = gaussian([-0.5, 0.0, 0.8])

    def backward(size: int, slots: int = 8) -> tuple[Tensor, Tensor]:
        sums = GradientSums(found.named_parameters(), slots)
        parts = []
        for part in torch.arange(40).split(size):
            leaf = means[part].clone().requires_grad_()
            rows = single_row_sequences(len(part), slots_of(part.tolist(), 40, slots), sums)
            statistics = found.statistics(leaf, actions[part], rows)
            torch.autograd.backward(statistics, [g_logprob[part], g_entropy[part]])
            assert leaf.grad is not None
            parts.append(leaf.grad)
        return torch.cat(parts), sums.finish()["log_std"].clone()

    expected, got = backward(40), backward(chunk)
    assert [bits(x) for x in got] == [bits(x) for x in expected]
    assert bits(backward(chunk, slots=4)[1]) != bits(expected[1]), "the slots are part of the law"
    m, s = means.double().requires_grad_(), found.log_std.detach().double().requires_grad_()
    normal = torch.distributions.Normal(m, s.exp().expand_as(m))
    torch.autograd.backward(
        [normal.log_prob(actions.double()).sum(-1), normal.entropy().sum(-1)], [g_logprob.double(), g_entropy.double()]
    )
    assert m.grad is not None
    assert s.grad is not None
    assert torch.allclose(got[0].double(), m.grad, rtol=1e-6, atol=0)  # one rounding to float32
    # 40 float32 numbers of about 1
    assert torch.allclose(got[1].double(), s.grad, rtol=1e-6, atol=2e-6)


def test_categorical_by_hand() -> None:
    # odds 1 : 3
    outputs = tensor([[0.0, math.log(3.0)]]).view(1, 2).expand(2, 2)  # type: ignore[list-item]
    for mode in MODES:
        logprobs, entropies = Categorical(2, mode).statistics(outputs, tensor([0.0, 1.0])[:, None])
        assert logprobs.exp().tolist() == pytest.approx([0.25, 0.75], rel=1e-6)
        assert entropies[0].item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75), rel=1e-6)


def test_draws_have_their_distributions() -> None:
    """Kolmogorov's statistic; the seeds are fixed, and 1.95 / sqrt(n) is passed by chance once in a thousand."""
    n = 50_000
    ranks = (np.arange(n) + 0.5) / n
    cases = {
        "normal": (np.sort(normals(n, "n", 0).numpy()), NormalDist().cdf),
        "gumbel": (np.sort(gumbels(n, "g", 0).numpy()), lambda x: math.exp(-math.exp(-x))),
    }
    for name, (draws, cdf) in cases.items():
        distance = np.abs(np.array([cdf(float(x)) for x in draws]) - ranks).max()
        assert distance < 1.95 / math.sqrt(n), name
    wrong = np.array([NormalDist(0.05).cdf(float(x)) for x in cases["normal"][0]])
    assert np.abs(wrong - ranks).max() > 1.95 / math.sqrt(n), "a mean of 0.05 must not pass"


def test_names_choose_the_weights() -> None:
    one = orthogonal(8, 8, 1.0, "weights", 0, "actor", 1)
    assert (one == orthogonal(8, 8, 1.0, "weights", 0, "actor", 1)).all()
    for other in (("weights", 1, "actor", 1), ("weights", 0, "critic", 1), ("weights", 0, "actor", 0)):
        assert (one != orthogonal(8, 8, 1.0, *other)).all()
    digest = hashlib.sha256(orthogonal(64, 4, 1.0, "pinned").astype(np.float32).tobytes()).hexdigest()[:16]
    assert digest == "d3db41994f542b63", "a machine or library that changes any bit must not pass unseen"


def test_weights_are_orthogonal_with_their_gains_and_biases_zero() -> None:
    agent = Agent(5, DiscreteActions(count=3, start=0), NetworkConfig(), "deterministic", 0)
    parameters = dict(agent.named_parameters())
    gains = {"actor.0": math.sqrt(2), "actor.2": math.sqrt(2), "actor.4": 0.01, "critic.4": 1.0}
    for name, gain in gains.items():
        assert torch.linalg.svdvals(parameters[f"{name}.weight"]).tolist() == pytest.approx(
            [gain] * min(parameters[f"{name}.weight"].shape), rel=1e-5
        )
    assert all(not p.any() for name, p in parameters.items() if name.endswith("bias"))
