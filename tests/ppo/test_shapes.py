"""A wrong shape fails at once: PyTorch would broadcast it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ppo_repro.ppo import advantages, corrections, covariance, kl, preferences, rewards, value, weights
from ppo_repro.ppo.cispo import Cispo
from ppo_repro.ppo.clip import Clip
from ppo_repro.ppo.objective import Objective, probability_ratios
from ppo_repro.ppo.policy_gradient import PolicyGradient
from ppo_repro.ppo.sequence_clip import SequenceClip

X, W, D = torch.zeros(6), torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.float64)
LENGTHS = torch.tensor([2, 1, 3])
# with arguments that fit
FUNCTIONS: dict[str, tuple[Callable[..., object], list[Tensor]]] = {
    "probability_ratios": (probability_ratios, [X, X]),
    "unclipped": (lambda r, a: Objective().surrogates(r, a, X), [X, X]),
    "clip": (lambda r, a: Clip(0.2, 0.2).surrogates(r, a, X), [X, X]),
    "clip flags": (Clip(0.2, 0.2).flags, [X, X]),
    "sequence_clip": (SequenceClip(0.2, 0.2).ratios, [X, X, W]),
    "cispo": (Cispo(0.0, 5.0).surrogates, [X, X, X]),
    "policy_gradient": (lambda a, new: PolicyGradient().surrogates(X, a, new), [X, X]),
    "covariances": (covariance.covariances, [X, X]),
    "value_losses": (lambda v, old, r: value.value_losses(v, old, r, 0.2), [X, X, X]),
    "kl.loss": (lambda new, ref: kl.loss("k3", new, ref), [X, X]),
    "whiten": (advantages.whiten, [X]),
    "explained_variance": (advantages.explained_variance, [X, X]),
    "token_rewards": (rewards.token_rewards, [X, X]),
    "bradley_terry_losses": (preferences.bradley_terry_losses, [X, X]),
    "dpo_margins": (lambda a, b, c, d: preferences.dpo_margins(a, b, c, d, 0.1), [X, X, X, X]),
    "dpo_losses": (preferences.dpo_losses, [X]),
    "gae": (lambda r, v, s, f: advantages.gae(r, v, s, f, 1.0, 0.9), [X, X, LENGTHS, torch.zeros(3)]),
    "place_scores": (lambda s, t, w: rewards.place_scores(s, t, w, "last"), [D[:3], LENGTHS, W]),
    "charge_penalties": (lambda p, s, w: rewards.charge_penalties(p, s, w, "token"), [X, LENGTHS, W]),
    "importance_ratios": (lambda a, b, s: corrections.importance_ratios(a, b, s, "sequence"), [X, X, LENGTHS]),
    "beyond_divergence": (lambda *a: corrections.beyond_divergence(*a, "k3", "mean", 0.1), [X, X, LENGTHS]),
    "normalized_weights": (lambda w, s: corrections.normalized_weights(w, s, True), [X, LENGTHS]),
    "vetoed": (lambda w, s: corrections.vetoed(w, s, 0.1), [X, LENGTHS]),
    "sequence_logprobs": (preferences.sequence_logprobs, [X, LENGTHS]),
    "loss_weights": (lambda s, c: weights.loss_weights("token_mean", s, c), [LENGTHS, torch.ones(6, dtype=torch.bool)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_the_documented_shapes_only(name: str) -> None:
    function, fitting = FUNCTIONS[name]
    function(*fitting)
    for index, x in enumerate(fitting):
        longer = [] if len(fitting) == 1 else [torch.cat([x, x[:1]]), x[1:]]
        for wrong in (*longer, x[:, None], x[None, :]):
            with pytest.raises((AssertionError, RuntimeError)):
                function(*fitting[:index], wrong, *fitting[index + 1 :])
