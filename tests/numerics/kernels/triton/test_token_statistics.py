"""Log-probs, entropies, their gradients and sampled tokens by Triton's kernels: the eager code's bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic import distribution
from ppo_repro.numerics.logprobs import token_statistics
from ppo_repro.rollout.sampler import Sampling, sample
from tests.support.models import seeded, unequal
from tests.support.triton_kernels import using_triton


def logits_of(vocabulary: int) -> Tensor:
    """Rows of normal, equal, far and tied logits."""
    x = torch.randn(5, vocabulary, generator=seeded(vocabulary)) * 4
    x[1], x[2, ::7], x[3] = 0.0, -3e4, x[3].round()
    return x


def results(logits: Tensor, masked: bool, temperature: float = 0.7) -> list[Tensor]:
    """Log-probs, entropies and the gradient of both."""
    targets, eligible = torch.arange(5), None
    if masked:
        eligible = torch.rand(logits.shape, generator=seeded(1)) > 0.4
        eligible[torch.arange(5), targets] = True
    leaf = logits.clone().requires_grad_()
    logprobs, entropies = token_statistics(leaf, targets, temperature, eligible, "exact")
    upstream = [torch.randn(5, generator=seeded(seed)) for seed in (3, 4)]
    torch.autograd.backward([logprobs, entropies], upstream)
    assert leaf.grad is not None
    return [logprobs.detach(), entropies.detach(), leaf.grad]


@pytest.mark.parametrize(("vocabulary", "masked"), [(5, False), (61, True), (600, False)])
def test_statistics(vocabulary: int, masked: bool) -> None:
    logits = logits_of(vocabulary)
    expected = results(logits, masked)
    with using_triton():
        found = results(logits, masked)
    assert [unequal(a, b) for a, b in zip(found, expected, strict=True)] == [0, 0, 0]
    if not masked:
        exact = (logits.double() / 0.7).log_softmax(-1)[torch.arange(5), torch.arange(5)]
        # exp in float32 is within 1e-7, the rest of the sum is float64's; the result is rounded to float32
        assert ((found[0].double() - exact).abs() <= 3e-7 * (1 + exact.abs())).all()


def test_masses_of_another_unit_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: integer masses of 12 bits."""
    monkeypatch.setattr(distribution, "MASS_UNIT", 2.0**12)
    expected = results(logits_of(61), False)
    with using_triton():
        assert unequal(results(logits_of(61), False)[0], expected[0]) > 0


def test_sampled_tokens() -> None:
    logits, positions = logits_of(61), torch.arange(5) * 7
    seeds = torch.randint(-(2**62), 2**62, (5,), generator=seeded(8))
    sampling = Sampling(0.7, 0, 1.0, 1)
    expected = sample(logits, seeds, positions, sampling, "exact")
    with using_triton():
        found = sample(logits, seeds, positions, sampling, "exact")
        other = sample(logits, seeds + 1, positions, sampling, "exact")
    assert torch.equal(found.tokens, expected.tokens) and unequal(found.logprobs, expected.logprobs) == 0
    assert not torch.equal(other.tokens, expected.tokens), "another seed, other tokens"


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    logits = logits_of(9)
    logits[3, 4] = bad
    with using_triton(), pytest.raises(NumericsError, match="logits are not finite"):
        results(logits, False)
