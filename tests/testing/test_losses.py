"""The kits for losses and advantages find what a layout changes and at which token, and nothing where nothing does."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.errors import UserError
from ppo_repro.testing import AdvantageBatch, LossBatch, LossRollout, check_advantages, check_loss
from ppo_repro.testing.advantages import Kind
from ppo_repro.testing.losses import Combine


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


EXAMPLE = LossRollout(
    lengths=(5, 1, 2),
    new_logprobs=column(-1.0, -2.0, -0.5, -1.5, -3.0, -0.25, -2.5, -0.75),
    columns={
        "old_logprobs": column(-1.25, -2.0, -0.75, -1.25, -3.5, -0.5, -2.25, -1.0),
        "advantages": column(0.1, 0.1, 0.1, 0.1, 0.1, 1.0, -1.4, -1.4),
    },
)


def log_ratios(batch: LossBatch) -> Tensor:
    return (batch.new_logprobs - batch.columns["old_logprobs"]).masked_fill(~batch.mask, 0.0)


def surrogates(batch: LossBatch, most: float = 20.0) -> Tensor:
    advantages = batch.columns["advantages"].masked_fill(~batch.mask, 0.0)
    return -advantages * log_ratios(batch).clamp(-most, most).exp()


def step_mean(batch: LossBatch) -> Tensor:
    return surrogates(batch).sum() / batch.step_tokens


def masked_afterwards(batch: LossBatch) -> Tensor:
    ratios = (batch.new_logprobs - batch.columns["old_logprobs"]).exp()
    return (-batch.columns["advantages"] * ratios * batch.mask).sum() / batch.step_tokens


def micro_batch_mean(batch: LossBatch) -> Tensor:
    return surrogates(batch).sum() / batch.mask.sum()


def kl_cov(batch: LossBatch) -> Tensor:
    """A penalty on the quarter of the tokens of a micro-batch with the largest covariance (Cui et al., 2025)."""
    advantages, logprobs = batch.columns["advantages"][batch.mask], batch.new_logprobs[batch.mask]
    covariances = (advantages - advantages.mean()) * (logprobs - logprobs.mean()).detach()
    chosen = covariances.topk(max(1, len(covariances) // 4)).indices
    return (surrogates(batch).sum() + log_ratios(batch)[batch.mask].abs()[chosen].sum()) / batch.step_tokens


def chosen_before(batch: LossBatch) -> Tensor:
    chosen = batch.columns["is_penalised"].masked_fill(~batch.mask, 0.0)
    return (surrogates(batch) + log_ratios(batch).abs() * chosen).sum() / batch.step_tokens


def unmasked(batch: LossBatch) -> Tensor:
    return batch.new_logprobs.sum() / batch.step_tokens


def unclamped(batch: LossBatch) -> Tensor:
    return surrogates(batch, math.inf).sum() / batch.step_tokens


def k3_clipped_after_exp(batch: LossBatch) -> Tensor:
    x = log_ratios(batch)
    return (x.exp() - 1.0 - x).clamp(max=10.0).sum() / batch.step_tokens


def changed(
    loss: Callable[[LossBatch], Tensor], combine: Combine = "sum", rollout: LossRollout = EXAMPLE
) -> dict[str, str]:
    return check_loss(loss, rollout, combine=combine, log_ratios=())


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(0, 1 << 32))
def test_a_mean_over_the_step_and_tokens_chosen_before_it_conform(lengths: list[int], seed: int) -> None:
    generator, count = torch.Generator().manual_seed(seed), sum(lengths)
    new, moved, advantages, numbers = torch.randn(4, count, generator=generator).double()
    mask = numbers > 0
    mask[torch.tensor((0, *lengths[:-1])).cumsum(0)] = True  # a token of each response counts
    columns = {"old_logprobs": -new.abs() + 0.5 * moved, "advantages": advantages, "is_penalised": (moved > 0).double()}
    rollout = LossRollout(tuple(lengths), -new.abs(), columns, mask)
    assert changed(step_mean, rollout=rollout) == changed(chosen_before, rollout=rollout) == {}


@pytest.mark.parametrize(
    ("loss", "combine", "found", "not_found"),
    [
        (micro_batch_mean, "mean", ("micro batch 1", "micro batch 2", "ranks 3"), ("padding left", "extra 3")),
        (kl_cov, "sum", ("micro batch 1", "ranks 3"), ("padding packed",)),
        (lambda b: surrogates(b).mean(), "sum", ("extra 3", "padding packed", "inserted 2"), ("order reversed",)),
        (unmasked, "sum", ("extra 3", "inserted 2"), ("padding packed",)),
        (masked_afterwards, "sum", ("extra 1, junk not finite",), ("extra 3", "micro batch 1")),
    ],
)
def test_faults_of_training_stacks_are_found(
    loss: Callable[[LossBatch], Tensor], combine: Combine, found: tuple[str, ...], not_found: tuple[str, ...]
) -> None:
    layouts = changed(loss, combine)
    assert set(found) <= set(layouts) and not set(not_found) & set(layouts)


def test_a_finding_by_hand() -> None:
    found = changed(micro_batch_mean, "mean")["micro batch 1"]
    ratios = torch.exp(EXAMPLE.new_logprobs - EXAMPLE.columns["old_logprobs"])
    losses = (-EXAMPLE.columns["advantages"] * ratios).split([5, 1, 2])
    value, whole = float(sum(part.mean() for part in losses)) / 3, float(torch.cat(losses).mean())
    # one response of five tokens has a third of the weight instead of five eighths: every token changes
    assert found.startswith(f"value {value:.9g} instead of {whole:.9g}; gradient differs at 8 tokens")
    assert found.endswith("first at sequence 0, position 0")
    assert changed(kl_cov)["micro batch 1"].endswith("first at sequence 0, position 2")
    assert changed(unmasked)["extra 3"].endswith("16 positions under the mask have a gradient")


def test_what_is_no_loss_is_refused() -> None:
    with pytest.raises(UserError, match="must return a tensor with one number"):
        check_loss(lambda batch: batch.new_logprobs, EXAMPLE, combine="sum")
    with pytest.raises(UserError, match="at least one response"):
        LossRollout((), EXAMPLE.new_logprobs[:0], {})
    with pytest.raises(UserError, match=r"advantages is torch.float32 \[8\]; must be torch.float64 \[8\]"):
        replace(EXAMPLE, columns={"advantages": EXAMPLE.columns["advantages"].float()})


@pytest.mark.parametrize(("loss", "log_ratio"), [(unclamped, 100.0), (k3_clipped_after_exp, 200.0)])
def test_overflow_in_float32_is_named_at_its_token(loss: Callable[[LossBatch], Tensor], log_ratio: float) -> None:
    assert math.isfinite(math.exp(log_ratio)) and log_ratio > math.log(3.4028235e38)  # finite in float64 alone
    found = check_loss(loss, EXAMPLE, combine="sum", log_ratios=(20.0, log_ratio))
    more = ("", ", advantage of the other sign", ", advantage 0")
    assert found == {f"float32, log-ratio {log_ratio:g}{x}": "not finite at sequence 0, position 4" for x in more}


def test_one_token_that_overflows_in_float64_too_is_blamed_and_no_layout() -> None:
    new, old = EXAMPLE.new_logprobs.clone(), EXAMPLE.columns["old_logprobs"].clone()
    new[6], old[6] = 0.0, -800.0
    rollout = replace(EXAMPLE, new_logprobs=new, columns={**EXAMPLE.columns, "old_logprobs": old})
    found = check_loss(unclamped, rollout, combine="sum")
    assert found == {"all at once, padded right": "not finite at sequence 2, position 0"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_loss_passes_in_narrow_dtypes_with_every_extreme(dtype: torch.dtype) -> None:
    assert check_loss(step_mean, EXAMPLE, combine="sum", dtypes=(dtype,)) == {}


def test_tool_tokens_inside_a_response_have_junk_of_their_own_in_each_column() -> None:
    rollout = replace(EXAMPLE, mask=torch.tensor([True, False, False, True, True, True, True, False]))
    assert changed(step_mean, rollout=rollout) == {}

    def counts_them(batch: LossBatch) -> Tensor:
        apart = batch.new_logprobs - batch.columns["old_logprobs"]  # 0 if one number filled every column
        return apart.masked_fill(batch.sequences < 0, 0.0).square().sum() / batch.step_tokens

    assert {"extra 1, junk finite", "inserted 1, junk not finite"} <= set(changed(counts_them, rollout=rollout))


# advantages


def gae(batch: AdvantageBatch) -> Tensor:
    """Over the tokens that count only, whatever is between them."""
    out = torch.zeros_like(batch.values)
    for row in range(len(out)):
        after = value = torch.zeros((), dtype=out.dtype)
        for t in reversed(batch.mask[row].nonzero()[:, 0].tolist()):
            after = batch.rewards[row, t] + 0.9 * value - batch.values[row, t] + 0.9 * 0.95 * after
            value = batch.values[row, t]
            out[row, t] = after
    return out


def to_go(batch: AdvantageBatch) -> Tensor:
    return batch.rewards.masked_fill(~batch.mask, 0.0).flip(1).cumsum(1).flip(1)


def group_mean(batch: AdvantageBatch) -> Tensor:
    means = torch.stack([batch.scores[batch.groups == g].mean() for g in batch.groups])
    return (batch.scores - means)[:, None].expand_as(batch.rewards)


@pytest.mark.parametrize(
    ("kind", "estimator", "gamma"), [("gae", gae, 0.9), ("rewards_to_go", to_go, 1.0), ("group_mean", group_mean, 1.0)]
)
def test_right_estimators_conform(kind: Kind, estimator: Callable[[AdvantageBatch], Tensor], gamma: float) -> None:
    assert check_advantages(estimator, kind, gamma=gamma) == {}


def test_advantages_that_reset_at_tool_tokens_and_junk_are_found() -> None:
    def resetting(batch: AdvantageBatch) -> Tensor:
        out, after = torch.zeros_like(batch.rewards), torch.zeros(len(batch.rewards), dtype=batch.rewards.dtype)
        for t in reversed(range(out.shape[1])):
            out[:, t] = after = (batch.rewards[:, t] + after) * batch.mask[:, t]
        return out

    found = check_advantages(resetting, "rewards_to_go")
    assert not {"all at once, padded right", "padding left", "extra 3", "order shuffled"} & set(found)
    assert found["inserted 2"].endswith("at sequence 0, position 0")
    assert found["inserted 1, junk not finite"].startswith("nan instead of")


@pytest.mark.parametrize("name", ["losses", "advantages"])
def test_the_examples_run(name: str) -> None:
    found = doctest.testmod(import_module(f"ppo_repro.testing.{name}"))
    assert found.attempted and not found.failed
