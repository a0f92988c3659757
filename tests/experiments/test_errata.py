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
from ppo_repro.ppo.clip import Clip
from ppo_repro.ppo.objective import probability_ratios
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
    assert change[0] > 1.2 and change[1] < 0.8
    # the third action has advantage 0 and moves too: clipping sees tokens, the softmax moves them all
    assert change[2].item() != 1.0


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
    assert outside > 0.3 and ratios.mean() < 1.0


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
    assert perfect.tolist() == [0.0, 0.0, 0.0] and mixed.abs().min() > 5.0


def test_a_mean_over_tokens_of_several_nats_is_a_sum_over_responses() -> None:
    """Claim: "mean KL across tokens: typically 3-8". Per token that is a policy the reference hardly ever samples."""
    per_token, tokens = 3.0, 512
    # typical token of such a policy under its reference, and a whole response
    assert math.exp(-per_token) < 0.05 and per_token * tokens > 1500
