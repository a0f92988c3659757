"""`check_loss` finds what a layout changes and at which token, and nothing where nothing does."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.base.errors import UserError
from ppo_repro.testing import LossBatch, check_loss, losses

EXAMPLE = pd.DataFrame(
    {
        "sequence": [0, 0, 0, 0, 0, 1, 2, 2],
        "new_logprobs": [-1.0, -2.0, -0.5, -1.5, -3.0, -0.25, -2.5, -0.75],
        "old_logprobs": [-1.25, -2.0, -0.75, -1.25, -3.5, -0.5, -2.25, -1.0],
        "advantages": [0.1, 0.1, 0.1, 0.1, 0.1, 1.0, -1.4, -1.4],
    }
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
    loss: Callable[[LossBatch], Tensor], combine: Literal["mean", "sum"] = "sum", frame: pd.DataFrame = EXAMPLE
) -> dict[str, str]:
    return check_loss(loss, frame, combine=combine, dtypes=())


@settings(max_examples=10)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(0, 1 << 32))
def test_a_mean_over_the_step_and_tokens_chosen_before_it_conform(lengths: list[int], seed: int) -> None:
    new, moved, advantages, numbers = np.random.default_rng(seed).normal(size=(4, sum(lengths)))
    mask = numbers > 0
    mask[np.cumsum((0, *lengths[:-1]))] = True  # a token of each response counts
    frame = pd.DataFrame(
        {
            "sequence": np.repeat(np.arange(len(lengths)), lengths), "new_logprobs": -abs(new), "mask": mask,
            "old_logprobs": -abs(new) + 0.5 * moved, "advantages": advantages, "is_penalised": moved > 0,
        }
    )  # fmt: skip
    assert changed(step_mean, frame=frame) == changed(chosen_before, frame=frame) == {}


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
    loss: Callable[[LossBatch], Tensor],
    combine: Literal["mean", "sum"],
    found: tuple[str, ...],
    not_found: tuple[str, ...],
) -> None:
    layouts = changed(loss, combine)
    assert set(found) <= set(layouts)
    assert not set(not_found) & set(layouts)


def test_a_finding_has_the_sequence_and_the_position_of_the_frame() -> None:
    later = EXAMPLE.assign(sequence=EXAMPLE["sequence"] + 285, position=[3, 4, 5, 6, 8, 0, 1, 2])
    found = check_loss(kl_cov, later, combine="sum")
    assert found["micro batch 1"].endswith("first at sequence 285, position 5")


def test_a_finding_by_hand() -> None:
    found = changed(micro_batch_mean, "mean")["micro batch 1"]
    of_tokens = -EXAMPLE["advantages"] * np.exp(EXAMPLE["new_logprobs"] - EXAMPLE["old_logprobs"])
    value, whole = of_tokens.groupby(EXAMPLE["sequence"]).mean().mean(), of_tokens.mean()
    # one response of five tokens has a third of the weight instead of five eighths: every token changes
    assert found.startswith(f"value {value:.9g} instead of {whole:.9g}; gradient differs at 8 tokens")
    assert found.endswith("first at sequence 0, position 0")
    assert changed(kl_cov)["micro batch 1"].endswith("first at sequence 0, position 2")
    assert changed(unmasked)["extra 3"].endswith("16 positions under the mask have a gradient")


def test_what_is_no_loss_is_refused() -> None:
    with pytest.raises(UserError, match="must return a tensor with one number"):
        check_loss(lambda batch: batch.new_logprobs, EXAMPLE, combine="sum")
    with pytest.raises(UserError, match="combine = 'Sum': must be 'mean' or 'sum'"):
        check_loss(step_mean, EXAMPLE, combine="Sum")  # type: ignore[arg-type]
    for frame, message in (
        (EXAMPLE.drop(columns="sequence"), "has no column 'sequence'"),
        (EXAMPLE.assign(sequence=EXAMPLE["sequence"].replace(1, np.nan)), "'sequence' has rows without a value"),
        (EXAMPLE[:0], "at least one response"),
        (EXAMPLE.assign(mask=EXAMPLE["sequence"] > 0), "in each a token that counts"),
        (EXAMPLE.assign(words="x"), "'words' holds no numbers"),
        (EXAMPLE.assign(advantages=np.nan), "'advantages' holds numbers that are not finite"),
    ):
        with pytest.raises(UserError, match=message):
            check_loss(step_mean, frame, combine="sum")


@pytest.mark.parametrize(("loss", "log_ratio"), [(unclamped, 100.0), (k3_clipped_after_exp, 200.0)])
def test_overflow_in_float32_is_named_at_its_token(
    loss: Callable[[LossBatch], Tensor], log_ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert math.isfinite(math.exp(log_ratio))
    assert log_ratio > math.log(3.4028235e38)  # finite in float64 alone
    monkeypatch.setattr(losses, "LOG_RATIOS", (20.0, log_ratio))
    found = check_loss(loss, EXAMPLE, combine="sum")
    more = ("", ", advantage of the other sign", ", advantage 0")
    assert found == {f"float32, log-ratio {log_ratio:g}{x}": "not finite at sequence 0, position 4" for x in more}


def test_one_token_that_overflows_in_float64_too_is_blamed_and_no_layout() -> None:
    frame = EXAMPLE.copy()
    frame.loc[6, ["new_logprobs", "old_logprobs"]] = 0.0, -800.0
    found = check_loss(unclamped, frame, combine="sum")
    assert found == {"all at once, padded right": "not finite at sequence 2, position 0"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_loss_passes_in_narrow_dtypes_with_every_extreme(dtype: torch.dtype) -> None:
    assert check_loss(step_mean, EXAMPLE, combine="sum", dtypes=(dtype,)) == {}


def test_tool_tokens_inside_a_response_have_junk_of_their_own_in_each_column() -> None:
    frame = EXAMPLE.assign(mask=[1, 0, 0, 1, 1, 1, 1, 0])
    assert changed(step_mean, frame=frame) == {}

    def counts_them(batch: LossBatch) -> Tensor:
        apart = batch.new_logprobs - batch.columns["old_logprobs"]  # 0 if one number filled every column
        return apart.masked_fill(batch.sequences < 0, 0.0).square().sum() / batch.step_tokens

    assert {"extra 1, junk finite", "inserted 1, junk not finite"} <= set(changed(counts_them, frame=frame))


def test_the_examples_run() -> None:
    found = doctest.testmod(losses)
    assert found.attempted
    assert not found.failed
