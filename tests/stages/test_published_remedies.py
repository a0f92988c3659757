"""Every published remedy for mismatch as a run has it: its loss by hand, and beside a few lines of NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from ppo_repro.buffers import Coefficients, ReturnStatistics
from ppo_repro.config.files import load_config
from ppo_repro.stages.objective import make_terms
from ppo_repro.stages.update import with_chosen
from tests.support.paths import TINY

Array = np.ndarray
LENGTHS = np.array([2, 2])
# log-probs in units of log 2. w = pi_old / pi_rollout: 1, 4 | 1/8, 2; of the responses 4 | 1/4; their roots 2 | 1/2
SAMPLER = np.array([-4.0, -4.0, -4.0, -4.0])
OLD = SAMPLER + np.array([0.0, 2.0, -3.0, 1.0])
NEW = OLD + np.array([1.0, 0.0, -1.0, 1.0])  # r = 2, 1 | 1/2, 2
ADVANTAGES = np.array([1.0, 1.0, -1.0, -1.0])
LN2 = float(np.log(2.0))


def mean_of_response(x: Array, lengths: Array) -> Array:
    return np.repeat([part.mean() for part in np.split(x, lengths.cumsum()[:-1])], lengths)


def clipped(r: Array, a: Array, low: float = 0.5, high: float = 0.5) -> Array:
    return -np.minimum(r * a, np.clip(r, 1 - low, 1 + high) * a)


def covariance(new: Array, a: Array) -> Array:
    return (new - new.mean()) * (a - a.mean())


def weighted(weight: Callable[[Array], Array], level: str = "token") -> Callable[..., Array]:
    def loss(new: Array, old: Array, sampler: Array, a: Array, lengths: Array) -> Array:
        log = old - sampler
        mean = mean_of_response(log, lengths)
        logs = {"token": log, "geometric": mean, "sequence": mean * np.repeat(lengths, lengths)}
        return clipped(np.exp(new - old), a) * weight(np.exp(logs[level]))

    return loss


def gspo(new: Array, old: Array, sampler: Array, a: Array, lengths: Array) -> Array:
    return clipped(np.exp(mean_of_response(new - old, lengths)), a, 0.25, 0.25)


def clip_cov(new: Array, old: Array, sampler: Array, a: Array, lengths: Array) -> Array:
    r, cov = np.exp(new - old), covariance(new, a)
    inside = ~((a > 0) & (r > 1.6)) & ~((a < 0) & (r < 0.4))
    return np.where(inside & (cov > 1) & (cov < 2), 0.0, clipped(r, a, 0.6, 0.6))


def kl_cov(new: Array, old: Array, sampler: Array, a: Array, lengths: Array) -> Array:
    cov = covariance(new, a)
    largest = cov >= np.sort(cov)[-max(int(0.25 * len(cov)), 1)]
    return -np.exp(new - old) * a + np.where(largest, np.abs(new - old), 0.0)


def within(low: float, high: float) -> Callable[[Array], Array]:
    return lambda w: np.where((w >= low) & (w <= high), w, 0.0)


WEIGHTS = "ppo.importance_weights="
CLIP = "ppo.objective={clip_range: 0.5}"
# name: what a run is told beside ratio_anchor = old, the loss of each token by hand, the same in NumPy
REMEDIES: dict[str, tuple[tuple[str, ...], list[float], Callable[..., Array]]] = {
    "recomputed anchor": ((CLIP,), [-1.5, -1, 0.5, 2], weighted(np.ones_like)),
    "anchor of the sampler": (
        (CLIP, "ppo.ratio_anchor=rollout"),  # r = 2, 4 | 1/16, 4
        [-1.5, -1.5, 0.5, 4],
        lambda new, old, sampler, a, lengths: clipped(np.exp(new - sampler), a),
    ),
    "decoupled PPO": ((CLIP, WEIGHTS + "{kind: truncated, cap: null}"), [-1.5, -4, 1 / 16, 4], weighted(lambda w: w)),
    "TIS": (
        (CLIP, WEIGHTS + "{kind: truncated, cap: 3}"),
        [-1.5, -3, 1 / 16, 4],
        weighted(lambda w: np.minimum(w, 3)),
    ),
    "TIS by response": (
        (CLIP, WEIGHTS + "{kind: truncated, level: sequence, cap: 3}"),
        [-4.5, -3, 1 / 8, 1 / 2],
        weighted(lambda w: np.minimum(w, 3), "sequence"),
    ),
    "MIS": ((CLIP, WEIGHTS + "{kind: masked, cap: 3}"), [-1.5, 0, 0, 4], weighted(within(1 / 3, 3))),
    "MIS by response": (
        (CLIP, WEIGHTS + "{kind: masked, level: sequence, floor: 0.3, cap: 5}"),
        [-6, -4, 0, 0],
        weighted(within(0.3, 5), "sequence"),
    ),
    "IcePop": (
        (CLIP, WEIGHTS + "{kind: masked, floor: 0.1, cap: 3.5}"),
        [-1.5, 0, 1 / 16, 4],
        weighted(within(0.1, 3.5)),
    ),
    "length-normalised ratio": (
        (CLIP, WEIGHTS + "{kind: truncated, level: geometric, cap: null}"),
        [-3, -2, 1 / 4, 1],
        weighted(lambda w: w, "geometric"),
    ),
    "rejection by the length-normalised ratio": (
        (CLIP, "ppo.rejection=[{kind: ratio, level: geometric, low: 0.6, high: 3}]"),
        [-1.5, -1, 0, 0],
        weighted(lambda w: np.where((w >= 0.6) & (w <= 3), 1.0, 0.0), "geometric"),
    ),
    # s = root of 2 | 1
    "GSPO": (
        ("ppo.objective={kind: sequence_clip, clip_range: 0.25, clip_range_high: 0.25}",),
        [-1.25, -1.25, 1, 1],
        gspo,
    ),
    # covariances in units of log 2: 3/4, 7/4 | 17/4, -7/4; only the second lies within 1 and 2 nats
    "Clip-Cov": (
        ("ppo.objective={kind: clip_cov, share: 1, covariance_low: 1, covariance_high: 2, clip_range: 0.6}",),
        [-1.6, 0, 0.5, 2],
        clip_cov,
    ),
    "KL-Cov": (
        ("ppo.objective={kind: kl_cov, share: 0.25, penalty_coef: 1}",),
        [-2, -1, 0.5 + LN2, 2],
        kl_cov,
    ),
}


def loss_of(overrides: tuple[str, ...], new: Array, old: Array, sampler: Array, a: Array, lengths: Array) -> Array:
    """The loss of each token as the update of such a run has it."""
    config = load_config(
        TINY,
        [
            *("value={kind: none}", "advantages={kind: group}", "kl={placement: none}", "ppo.entropy_coef=0"),
            *("ppo.ratio_anchor=old", *overrides),
        ],
    )
    new32, old32, sampler32, a32 = (torch.tensor(x, dtype=torch.float32) for x in (new, old, sampler, a))
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rollout = SimpleNamespace(rollout_logprobs=sampler32, lengths=torch.tensor(lengths), sequence_of_token=lambda: rows)
    forward = SimpleNamespace(old_logprobs=old32, ref_logprobs=old32)
    coefficients = Coefficients(0.0, 0.0, 0.0, ReturnStatistics())
    terms = make_terms(
        config, coefficients, cast(Any, rollout), cast(Any, forward), cast(Any, SimpleNamespace(advantages=a32))
    ).policy
    tokens = torch.arange(len(new))
    terms = with_chosen(terms, tokens, new32, (0, 0, 0))
    return terms.of(tokens, new32, torch.zeros(len(new)), None).losses.numpy().astype(np.float64)


@pytest.mark.parametrize("name", REMEDIES)
def test_every_published_remedy_by_hand(name: str) -> None:
    overrides, expected, in_numpy = REMEDIES[name]
    case = NEW * LN2, OLD * LN2, SAMPLER * LN2, ADVANTAGES, LENGTHS
    # float32: exponentials and products rounded by 2^-24
    np.testing.assert_allclose(loss_of(overrides, *case), expected, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(in_numpy(*case), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", REMEDIES)
def test_every_published_remedy_beside_numpy(name: str) -> None:
    overrides, _, in_numpy = REMEDIES[name]
    plain = REMEDIES["recomputed anchor"][2]
    rng, differs = np.random.default_rng(3), 0
    for _ in range(5):
        lengths = rng.integers(1, 6, 12)
        count = int(lengths.sum())
        old = rng.uniform(-4.0, -0.5, count).astype(np.float32).astype(np.float64)
        new, sampler = ((old + rng.normal(0.0, 0.8, count)).astype(np.float32).astype(np.float64) for _ in range(2))
        a = rng.normal(0.0, 1.5, count).astype(np.float32).astype(np.float64)
        case = new, old, sampler, a, lengths
        # float32 log-ratios of up to 4 are rounded by 2^-22
        np.testing.assert_allclose(loss_of(overrides, *case), in_numpy(*case), rtol=3e-6, atol=1e-6)
        differs += not np.allclose(in_numpy(*case), plain(*case), rtol=1e-2)
    assert differs == (0 if name == "recomputed anchor" else 5), "a remedy that changes nothing would pass"
