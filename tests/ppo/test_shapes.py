"""A wrong shape fails at once: PyTorch would broadcast it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.ppo import (
    advantages,
    corrections,
    covariance,
    kl,
    losses,
    preferences,
    rewards,
    sequences,
    weights,
)

BAND = losses.Band(0.2, 0.2)

# with the number of tensors [n] each takes; the other arguments are bound
ELEMENTWISE: dict[str, tuple[Callable[..., object], int]] = {
    "probability_ratios": (losses.probability_ratios, 2),
    "clip_flags": (lambda r, a: losses.clip_flags(r, a, BAND), 2),
    "clipped_surrogate": (lambda r, a: losses.clipped_surrogate(r, a, BAND), 2),
    "cispo_loss": (lambda new, r, a: losses.cispo_loss(new, r, a, 0.0, 5.0), 3),
    "weight_flags": (lambda r: losses.weight_flags(r, 0.0, 5.0), 1),
    "covariances": (covariance.covariances, 2),
    "largest_tokens": (lambda c: covariance.largest_tokens(c, 0.5), 1),
    "unclipped_surrogate": (losses.unclipped_surrogate, 2),
    "anchor_penalty": (lambda x: losses.anchor_penalty(x, 0.1), 1),
    "policy_gradient": (losses.policy_gradient, 2),
    "value_loss": (losses.value_loss, 2),
    "clipped_value_loss": (lambda v, old, r: losses.clipped_value_loss(v, old, r, 0.2), 3),
    "value_clip_binds": (lambda v, old, r: losses.value_clip_binds(v, old, r, 0.2), 3),
    "kl.loss": (lambda new, ref: kl.loss("k3", new, ref), 2),
    "whiten": (advantages.whiten, 1),
    "explained_variance": (advantages.explained_variance, 2),
    "token_rewards": (rewards.token_rewards, 2),
    "bradley_terry_losses": (preferences.bradley_terry_losses, 2),
    "dpo_margins": (lambda a, b, c, d: preferences.dpo_margins(a, b, c, d, 0.1), 4),
    "dpo_losses": (preferences.dpo_losses, 1),
    "preference_accuracy": (preferences.preference_accuracy, 1),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@given(n=st.integers(2, 6), data=st.data())
def test_elementwise_functions_take_equal_lengths_only(name: str, n: int, data: st.DataObject) -> None:
    function, count = ELEMENTWISE[name]
    good = [torch.zeros(n) for _ in range(count)]
    function(*good)
    wrong_one = data.draw(st.integers(0, count - 1))
    shapes = [(n, 1), (1, n), ()] if count == 1 else [(n, 1), (1, n), (), (1,), (n - 1,), (n + 1,)]
    shape = data.draw(st.sampled_from([shape for shape in shapes if shape != (n,)]))
    with pytest.raises(AssertionError):
        function(*(torch.zeros(shape) if index == wrong_one else x for index, x in enumerate(good)))


def ragged(lengths: Tensor) -> dict[str, tuple[Callable[..., object], list[Tensor]]]:
    """Functions of tokens [N] of B sequences, with arguments that fit."""
    n, count = int(lengths.sum()), len(lengths)
    token, word, score = torch.zeros(n), torch.zeros(n, dtype=torch.int64), torch.zeros(count, dtype=torch.float64)
    return {
        "gae": (lambda r, v, s, f: advantages.gae(r, v, s, f, 1.0, 0.9), [token, token, lengths, torch.zeros(count)]),
        "word_lengths": (rewards.word_lengths, [word, lengths]),
        "place_scores": (lambda s, t, w: rewards.place_scores(s, t, w, "last"), [score, lengths, word]),
        "charge_penalties": (lambda p, s, w: rewards.charge_penalties(p, s, w, "token"), [token, lengths, word]),
        "importance_ratios": (
            lambda a, b, s: corrections.importance_ratios(a, b, s, "sequence"),
            [token, token, lengths],
        ),
        "beyond_divergence": (
            lambda a, b, s: corrections.beyond_divergence(a, b, s, "k3", "mean", 0.1),
            [token, token, lengths],
        ),
        "normalized_weights": (lambda w, s: corrections.normalized_weights(w, s, True), [token, lengths]),
        "vetoed": (lambda w, s: corrections.vetoed(w, s, 0.1), [token, lengths]),
        "sequence_ratios": (sequences.sequence_ratios, [token, token, lengths]),
        "sequence_logprobs": (preferences.sequence_logprobs, [token, lengths]),
    }


@pytest.mark.parametrize("name", ragged(torch.tensor([1])))
@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_ragged_functions_take_as_many_tokens_as_the_lengths_say(
    name: str, lengths: list[int], data: st.DataObject
) -> None:
    function, good = ragged(torch.tensor(lengths))[name]
    function(*good)
    wrong_one = data.draw(st.integers(0, len(good) - 1))
    x = good[wrong_one]
    wrong = data.draw(st.sampled_from([torch.cat([x, x[:1]]), x[1:], x[:, None]]))
    with pytest.raises(AssertionError):
        function(*(wrong if index == wrong_one else other for index, other in enumerate(good)))


@pytest.mark.parametrize("function", [rewards.last_tokens, lambda x: weights.loss_weights("token_mean", x)])
def test_lengths_are_one_number_per_sequence(function: Callable[[Tensor], Tensor]) -> None:
    function(torch.tensor([1, 2]))
    with pytest.raises(AssertionError):
        function(torch.tensor([[1], [2]]))


def test_scores_and_groups_are_as_many() -> None:
    with pytest.raises(AssertionError):
        advantages.group_advantages([1.0, 2.0], ["a"], True)
