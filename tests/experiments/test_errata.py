"""Often printed claims about PPO that do not hold, each against a calculation; listed in experiments/errata."""

from __future__ import annotations

import ast
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.ppo.advantages import gae, whiten
from ppo_repro.ppo.kl import k3
from ppo_repro.ppo.losses import value_losses
from ppo_repro.ppo.objectives import Clip, probability_ratios
from ppo_repro.ppo.rewards import charge_penalties
from tests.support.float32 import pairs_of_categoricals, tensor
from tests.support.paths import ROOT

TABLE = ROOT / "experiments" / "errata" / "README.md"


def test_every_row_of_the_table_names_a_test_or_a_command_that_exists() -> None:
    claims = TABLE.read_text().split("\n## ")[0]  # what follows is what a command printed
    rows = [line for line in claims.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert len(rows) >= 20
    for row in rows:
        shown_by = row.rstrip("| ").rsplit("|", 1)[-1]
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", shown_by)
        commands = re.findall(r"`python -m ([\w.]+)", shown_by)
        assert named or commands or "arithmetic:" in shown_by, row
        for file, test in named:
            tree = ast.parse((ROOT / "tests" / file).read_text())
            assert test in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, row
        for command in commands:
            assert (ROOT / Path(*command.split("."))).with_suffix(".py").is_file(), row


def true_value(logits: Tensor, rewards: Tensor) -> float:
    return float((torch.softmax(logits.detach().to(torch.float64), 0) * rewards).sum())


def clipped_updates(seed: int, samples: int) -> list[float]:
    """The true objective before and after each of 20 PPO-Clip iterations on a bandit of three arms."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.tensor([1.0, 0.6, 0.0], dtype=torch.float64)
    logits = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    found = [true_value(logits, rewards)]
    for _ in range(20):
        with torch.no_grad():
            anchor = torch.log_softmax(logits, 0)
            actions = torch.multinomial(anchor.exp(), samples, replacement=True, generator=generator)
            noise = torch.randn(samples, generator=generator)
            advantages = whiten(rewards[actions].to(torch.float32) + noise)
        for _ in range(4):
            optimizer.zero_grad()
            ratios = probability_ratios(torch.log_softmax(logits, 0)[actions], anchor[actions])
            Clip(0.2, 0.2).surrogates(ratios, advantages, logits).mean().backward()
            optimizer.step()
        found.append(true_value(logits, rewards))
    return found


def test_improvement_is_not_monotonic() -> None:
    """Claim: "monotonic improvement with probability 1"."""
    runs = [clipped_updates(seed, samples=16) for seed in range(10)]
    worse = sum(after < before for run in runs for before, after in itertools.pairwise(run))
    assert worse > 5, f"only {worse} of 200 iterations made the policy worse"
    assert sum(run[-1] > run[0] for run in runs) > 5, "it does improve, in the mean"


def test_probabilities_change_by_more_than_the_clip_range() -> None:
    """Claim: "action probabilities can at most increase or decrease by 20 % per update"."""
    logits = torch.zeros(3, requires_grad=True)
    anchor = torch.log_softmax(logits, 0).detach()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        ratios = probability_ratios(torch.log_softmax(logits, 0), anchor)
        Clip(0.2, 0.2).surrogates(ratios, tensor([1.0, -1.0, 0.0]), logits).sum().backward()
        optimizer.step()
    change = (torch.log_softmax(logits, 0) - anchor).exp()
    assert change[0] > 1.2
    assert change[1] < 0.8
    # the third action has advantage 0 and moves too: clipping sees tokens, the softmax moves them all
    assert change[2].item() != 1.0


def surrogate(ratio: float, advantage: float, clip_range: float = 0.2) -> tuple[float, float]:
    """The loss of one token and its gradient in the ratio."""
    ratios = tensor([ratio]).requires_grad_()
    loss = Clip(clip_range, clip_range).surrogates(ratios, tensor([advantage]), ratios).sum()
    return loss.item(), torch.autograd.grad(loss, ratios)[0].item()


def test_clipping_does_not_bound_the_ratio() -> None:
    """Claim: "trapped at the bound". Adam's momentum carries the ratio on without any gradient."""
    logits = torch.zeros(2, requires_grad=True)
    anchor = torch.log_softmax(logits, 0)[:1].detach()
    optimizer = torch.optim.Adam([logits], lr=0.05)
    history = []
    for _ in range(40):
        optimizer.zero_grad()
        ratios = probability_ratios(torch.log_softmax(logits, 0)[:1], anchor)
        Clip(0.2, 0.2).surrogates(ratios, torch.ones(1), logits).sum().backward()
        assert logits.grad is not None
        history.append((ratios.item(), logits.grad.abs().max().item()))
        optimizer.step()
    crossed = next(i for i, (ratio, _) in enumerate(history) if ratio > 1.2)
    assert crossed < 10, "the clip removes the gradient"
    assert all(slope == 0 for _, slope in history[crossed:]), "the clip removes the gradient"
    assert history[-1][0] > 1.3, "and bounds nothing"


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_gradient_at_a_ratio_of_one_is_the_policy_gradient(advantage: float) -> None:
    """Claim: "the gradient is zero if r A >= clip(r) A". In the band both are equal, so nothing would learn."""
    assert surrogate(1.0, advantage) == (-advantage, -advantage)


def test_a_ratio_is_not_brought_back_into_the_band() -> None:
    """Claim: "ratio 1.5 is clipped to 1.2, 0.7 to 0.8". On the side where it hurts, nothing is clipped."""
    for ratio, advantage in ((1.5, -1.0), (0.5, 1.0)):
        assert surrogate(ratio, advantage) == (-ratio * advantage, -advantage)


def test_added_to_a_loss_the_surrogate_needs_its_sign() -> None:
    """Claim: "L = L_CLIP + c1 L_VF + c2 L_S", minimised. That unlearns good tokens; the loss is -L_CLIP."""
    loss, slope = surrogate(1.0, 1.0)
    assert loss == -1.0, "a step down the loss raises the ratio of a good token"
    assert slope < 0, "a step down the loss raises the ratio of a good token"


def test_a_smaller_band_allows_less() -> None:
    """Claim: "policy too deterministic: decrease eps_clip, which allows more change"."""
    assert surrogate(1.15, 1.0, 0.1)[1] == 0.0
    assert surrogate(1.15, 1.0, 0.2)[1] == -1.0


def test_a_large_value_error_keeps_its_gradient() -> None:
    """Claim: "clip the value loss to [-10, 10] for stability". That removes the largest errors' gradient."""
    value = tensor([1000.0]).requires_grad_()
    limited = (0.5 * value**2).clamp(-10, 10).sum()
    assert torch.autograd.grad(limited, value)[0].item() == 0
    for old in (1000.0, 0.0):  # not yet moved, and moved away from the return
        losses, _ = value_losses(value, tensor([old]), tensor([0.0]), 0.2)
        assert torch.autograd.grad(losses.sum(), value)[0].item() == 1000


@given(pairs_of_categoricals())
def test_mean_new_minus_old_is_a_divergence_with_the_wrong_sign(pair: tuple[list[float], list[float]]) -> None:
    """Claim: "stop early once mean(new - old) > 0.015". Its expectation under old is -KL(old || new) <= 0."""
    old, new = (torch.tensor([math.log(p) for p in side], dtype=torch.float64) for side in pair)
    claimed = math.fsum((old.exp() * (new - old)).tolist())
    ours = math.fsum((old.exp() * k3(old - new)).tolist())
    # float64 roundings; the float32 exponential inside k3
    assert claimed <= 1e-13
    assert ours >= 0.0
    assert ours == pytest.approx(-claimed, abs=8e-7)


def test_splitting_a_word_raises_a_total_only_if_kl_per_token_stays() -> None:
    """Claim: "more tokens cost more KL". log p(word) / q(word) is a sum of conditionals, whatever the split."""
    one, word = tensor([0.5]), torch.zeros(4, dtype=torch.int64)
    total = charge_penalties(one, torch.tensor([1]), word[:1], "last_sum").sum()
    for split, times in ((one.repeat(4), 4.0), (one.repeat(4) / 4, 1.0)):
        assert charge_penalties(split, torch.tensor([4]), word, "last_sum").sum() == times * total


def test_a_large_beta_stays_close_to_the_reference_and_a_small_one_moves_away() -> None:
    """Claim: "DPO with large beta moves aggressively". pi* ~ pi_ref exp(r / beta)."""
    reference, rewards = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.0, 0.5, 1.0]).double()
    best = [torch.softmax(reference.log() + rewards / beta, 0) for beta in (0.2, 0.5, 2.0)]
    distances = [float((pi * (pi / reference).log()).sum()) for pi in best]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 1.0
    assert distances[2] < 0.03


@given(pairs_of_categoricals(), st.integers(1, 3))
def test_scoring_another_distribution_than_the_sampled_one_shifts_every_ratio(
    pair: tuple[list[float], list[float]], kept: int
) -> None:
    """Claim: the ratio is 1 at the start, while sampling has top-p or top-k and log-probs come from the plain softmax.

    Its mean under the sampler is the mass that the sampler kept: below 1 as soon as anything is cut.
    """
    p = torch.tensor(pair[0], dtype=torch.float64)
    eligible = torch.zeros_like(p)
    eligible[p.argsort(descending=True)[:kept]] = 1.0
    mass = (p * eligible).sum()
    q = p * eligible / mass
    ratios = torch.where(eligible > 0, p / q.clamp(min=1e-300), 0.0)
    assert (q * ratios).sum().item() == pytest.approx(mass.item(), rel=1e-12)
    assert ratios[eligible > 0].tolist() == pytest.approx([mass.item()] * int(eligible.sum()), rel=1e-12)


def test_temperature_alone_clips_most_tokens_of_an_unchanged_policy() -> None:
    """The same for temperature 0.7: of an unchanged policy most ratios leave [0.8, 1.2]."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2000, 50, generator=generator) * 3.0
    sampler, scored = torch.log_softmax(logits / 0.7, -1), torch.log_softmax(logits, -1)
    tokens = torch.multinomial(sampler.exp(), 1, generator=generator)
    ratios = (scored.gather(1, tokens) - sampler.gather(1, tokens)).exp()
    outside = ((ratios - 1.0).abs() > 0.2).to(torch.float64).mean().item()
    assert outside > 0.3
    assert ratios.mean() < 1.0


@given(pairs_of_categoricals())
def test_entropy_from_sampled_log_probs_has_no_gradient_in_expectation(pair: tuple[list[float], list[float]]) -> None:
    """Claim: `entropy_bonus = compute_entropy(new_log_probs)`. Of sampled tokens that is noise around no bonus."""
    logits = torch.log(torch.tensor(pair[0], dtype=torch.float64)).requires_grad_()
    logp = torch.log_softmax(logits, 0)
    p = logp.detach().exp()
    sampled = torch.autograd.grad(-(p * logp).sum(), logits, retain_graph=True)[0]
    true = torch.autograd.grad(-(logp.exp() * logp).sum(), logits)[0]
    assert sampled.abs().max() < 1e-14
    flat = max(p) - min(p) < 1e-12
    assert flat or true.abs().max() > 1e-9


def test_a_reward_on_the_last_column_depends_on_the_longest_response() -> None:
    """Claim: `rewards[i, -1] = score` on padded rows. The score then decays over the padding."""

    def first_advantage(padding: int) -> float:
        rewards = torch.zeros(2 + padding)
        rewards[-1] = 1.0
        lengths = torch.tensor([len(rewards)])
        return gae(rewards, torch.zeros(len(rewards)), lengths, torch.zeros(1), 1.0, 0.95)[0].item()

    assert first_advantage(0) == pytest.approx(0.95, rel=1e-6)
    assert first_advantage(30) == pytest.approx(0.95**31, rel=1e-5)


def test_whitening_over_padding_changes_real_advantages() -> None:
    """Claim: `(adv - adv.mean()) / adv.std()` over the padded matrix."""
    real = tensor([1.0, 2.0, 3.0])
    padded = torch.cat([real, torch.zeros(5)])
    usual = (padded - padded.mean()) / (padded.std() + 1e-8)
    assert usual[0] > 0 > whiten(real)[0], "even the sign of the first one"


def test_returns_normalised_per_batch_are_no_targets_for_values_in_reward_units() -> None:
    """Claim: "normalise returns". The next deltas r + gamma V' - V then mix units: a perfect value model errs."""
    returns = tensor([10.0, 20.0, 30.0])
    values = whiten(returns)  # perfectly fitted to the normalised targets
    rewards = tensor([-10.0, -10.0, 30.0])  # whose returns-to-go are 10, 20, 30
    perfect = gae(rewards, returns, torch.tensor([3]), torch.zeros(1), 1.0, 0.0)
    mixed = gae(rewards, values, torch.tensor([3]), torch.zeros(1), 1.0, 0.0)
    assert perfect.tolist() == [0.0, 0.0, 0.0]
    assert mixed.abs().min() > 5.0
