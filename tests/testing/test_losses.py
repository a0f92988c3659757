"""The conformance kit finds which layouts change a loss and at which token, and nothing in a loss that conforms."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import given
from torch import Tensor

from ppo_repro import testing
from ppo_repro.errors import UserError
from ppo_repro.testing import example_losses as examples
from ppo_repro.testing.conformance import Drift, check_loss, loss_drift
from ppo_repro.testing.losses import LossBatch, LossLayout, LossResult, LossRollout, evaluate_loss
from ppo_repro.testing.strategies import rollouts

EXAMPLE = examples.EXAMPLE


def changed(loss: Callable[[LossBatch], Tensor], combine: str, rollout: LossRollout = EXAMPLE) -> dict[str, Drift]:
    """The drifts of the layouts that change something, by layout."""
    found = check_loss(loss, rollout, combine=combine, log_ratios=())  # type: ignore[arg-type]
    return {drift.what: drift for drift in found.drifts if not drift.is_small}


@given(rollouts())
def test_a_token_mean_over_the_step_conforms_on_every_rollout(rollout: LossRollout) -> None:
    assert changed(examples.step_token_mean, "sum", rollout) == {}


@given(rollouts(columns=("old_logprobs", "advantages", "is_penalised")))
def test_tokens_chosen_for_the_whole_step_conform(rollout: LossRollout) -> None:
    assert changed(examples.kl_cov_of_the_step, "sum", rollout) == {}


def test_a_token_mean_by_micro_batch_is_found_by_hand() -> None:
    found = changed(examples.micro_batch_token_mean, "mean")
    assert {"micro batch 1", "micro batch 2", "ranks 2", "ranks 3"} < set(found)
    assert not {"padding left", "extra 3", "padding packed", "order reversed"} & set(found)
    drift = found["micro batch 1"]
    ratios = torch.exp(EXAMPLE.new_logprobs - EXAMPLE.columns["old_logprobs"])
    losses = (-EXAMPLE.columns["advantages"] * ratios).split([5, 1, 2])
    assert drift.value == pytest.approx(float(sum(part.mean() for part in losses)) / 3, rel=1e-12)
    assert drift.expected == pytest.approx(float(torch.cat(losses).mean()), rel=1e-12)
    # one response of five tokens has a third of the weight instead of five eighths: every token changes
    assert (drift.first, drift.tokens) == ((0, 0), 8)


def test_kl_cov_chooses_other_tokens_in_other_micro_batches() -> None:
    found = changed(examples.kl_cov, "sum")
    assert {"micro batch 1", "ranks 3"} <= set(found) and "padding packed" not in found
    assert found["micro batch 1"].first == (0, 2) and found["micro batch 1"].tokens == 1


def test_a_mean_over_padding_is_found() -> None:
    found = changed(examples.padded_token_mean, "sum")
    assert {"extra 3", "padding packed", "inserted 2"} <= set(found)
    assert not {"padding left", "order reversed"} & set(found)


def test_a_loss_that_forgets_the_mask_gives_padding_a_gradient() -> None:
    def unmasked(batch: LossBatch) -> Tensor:
        return batch.new_logprobs.sum() / batch.step_tokens

    with pytest.raises(AssertionError, match=r"extra 3: 3 positions|\d+ positions under the mask have a gradient"):
        testing.assert_loss_conforms(unmasked, EXAMPLE, combine="sum")
    found = changed(unmasked, "sum")
    assert found["extra 3"].padding_gradients == 7 + 9


def test_drift_from_another_loss_and_from_a_saved_result(tmp_path: Path) -> None:
    same = loss_drift(examples.step_token_mean, examples.micro_batch_token_mean, EXAMPLE)
    assert same.is_small  # at once they are equal
    assert not loss_drift(examples.kl_cov, examples.step_token_mean, EXAMPLE).is_small
    saved = evaluate_loss(examples.kl_cov, EXAMPLE, LossLayout(), "sum")
    saved.save(tmp_path / "loss.json")
    assert LossResult.load(tmp_path / "loss.json") == saved
    testing.assert_loss_drift_below(examples.kl_cov, tmp_path / "loss.json", EXAMPLE, limit=0.0)
    with pytest.raises(
        AssertionError, match=r"gradient differs at 2 tokens, by 0\.56, first at sequence 1, position 0"
    ):
        testing.assert_loss_drift_below(examples.step_token_mean, tmp_path / "loss.json", EXAMPLE, limit=0.1)
    testing.assert_loss_drift_below(examples.step_token_mean, tmp_path / "loss.json", EXAMPLE, limit=0.6)
    (tmp_path / "loss.json").write_text("[]")
    with pytest.raises(UserError, match=r"loss\.json: is no saved result"):
        loss_drift(examples.kl_cov, tmp_path / "loss.json", EXAMPLE)
    shorter = replace(saved, gradients=saved.gradients[:3])
    with pytest.raises(UserError, match="the baseline has 3 tokens, the rollout 8"):
        loss_drift(examples.kl_cov, shorter, EXAMPLE)


def test_what_is_no_loss_is_refused() -> None:
    with pytest.raises(UserError, match="must return a tensor with one number"):
        check_loss(lambda batch: batch.new_logprobs, EXAMPLE, combine="sum")
    with pytest.raises(UserError, match="at least one response"):
        LossRollout((), EXAMPLE.new_logprobs[:0], {})
    with pytest.raises(UserError, match=r"advantages is torch.float32 \[8\]; must be torch.float64 \[8\]"):
        replace(EXAMPLE, columns={"advantages": EXAMPLE.columns["advantages"].float()})


# faults of public reports, each with the number that a kit in float64 with one fill does not see


def test_a_mask_at_the_end_lets_junk_through() -> None:
    """0 * NaN is NaN: a NaN in the old log-prob of one padded slot reaches the whole gradient."""
    found = changed(examples.masked_afterwards, "sum")
    assert set(found) == {"extra 1, junk finite", "extra 1, junk not finite", "inserted 1, junk not finite"}
    described = found["extra 1, junk not finite"].describe()
    assert "positions under the mask have a gradient" in described or "not finite" in described
    assert not changed(examples.step_token_mean, "sum")


def ratio_behind_a_mask(batch: LossBatch) -> Tensor:
    ratios = (batch.new_logprobs - batch.columns["old_logprobs"]).masked_fill(~batch.mask, 0.0).exp()
    advantages = batch.columns["advantages"].masked_fill(~batch.mask, 0.0)
    return -(advantages * ratios).sum() / batch.step_tokens


def k3_clipped_after_exp(batch: LossBatch) -> Tensor:
    x = (batch.new_logprobs - batch.columns["old_logprobs"]).masked_fill(~batch.mask, 0.0)
    return (x.exp() - 1.0 - x).clamp(max=10.0).sum() / batch.step_tokens


@pytest.mark.parametrize(("loss", "log_ratio"), [(ratio_behind_a_mask, 100.0), (k3_clipped_after_exp, 200.0)])
def test_overflow_in_float32_is_named_at_its_token(loss: Callable[[LossBatch], Tensor], log_ratio: float) -> None:
    assert math.isfinite(math.exp(log_ratio)) and log_ratio > math.log(3.4028235e38)  # finite in float64 alone
    found = check_loss(loss, EXAMPLE, combine="sum", log_ratios=(20.0, log_ratio))
    bad = {d.what: d for d in found.drifts if not d.is_small}
    names = {
        f"float32, log-ratio {log_ratio:g}{more}" for more in ("", ", advantage of the other sign", ", advantage 0")
    }
    assert set(bad) == names
    assert all(
        d.not_finite == ((0, 4),) and "not finite at sequence 0, position 4" in d.describe() for d in bad.values()
    )


def test_one_token_that_overflows_in_float64_too_is_blamed_and_no_layout() -> None:
    new, old = EXAMPLE.new_logprobs.clone(), EXAMPLE.columns["old_logprobs"].clone()
    new[6], old[6] = 0.0, -800.0
    rollout = replace(EXAMPLE, new_logprobs=new, columns={**EXAMPLE.columns, "old_logprobs": old})
    found = check_loss(ratio_behind_a_mask, rollout, combine="sum")
    assert found.lines() == ["all at once, padded right: not finite at sequence 2, position 0"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_loss_passes_in_narrow_dtypes_with_every_extreme(dtype: torch.dtype) -> None:
    assert check_loss(examples.step_token_mean, EXAMPLE, combine="sum", dtypes=(dtype,)).conforms


def test_tool_tokens_inside_a_response_have_junk_of_their_own_in_each_column() -> None:
    rollout = replace(EXAMPLE, mask=torch.tensor([True, False, False, True, True, True, True, False]))
    assert changed(examples.step_token_mean, "sum", rollout) == {}

    def counts_them(batch: LossBatch) -> Tensor:
        apart = batch.new_logprobs - batch.columns["old_logprobs"]  # 0 if one number filled every column
        return apart.masked_fill(batch.sequences < 0, 0.0).square().sum() / batch.step_tokens

    assert {"extra 1, junk finite", "inserted 1, junk not finite"} <= set(changed(counts_them, "sum", rollout))


def test_a_constant_factor_is_said_as_such() -> None:
    def half(batch: LossBatch) -> Tensor:
        return examples.step_token_mean(replace(batch, step_tokens=2 * batch.step_tokens))

    described = loss_drift(half, examples.step_token_mean, EXAMPLE).describe()
    assert described == "step_token_mean: differs by the factor 0.5 everywhere"


@pytest.mark.parametrize("name", ["conformance", "strategies"])
def test_the_examples_run(name: str) -> None:
    found = doctest.testmod(import_module(f"ppo_repro.testing.{name}"), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted and not found.failed


def test_a_frame_is_a_dump(deterministic_run: Path, native_run: Path) -> None:
    from ppo_repro.records import reader

    testing.assert_mismatch_below(reader.read_tokens(deterministic_run), frac_unequal=0.0)
    frame = reader.read_tokens(native_run)
    with pytest.raises(
        AssertionError, match=r"the frame: of \d+ tokens frac_unequal is .* \(first at iteration 0, seq"
    ):
        testing.assert_mismatch_below(frame, frac_unequal=0.0)
    theirs = pd.DataFrame({"rollout_log_probs": [-1.0, -2.0], "old_log_probs": [-1.0, 9.0], "response_mask": [1, 0]})
    testing.assert_mismatch_below(theirs, max_abs=0.0)
    with pytest.raises(UserError, match="must have the two log-probs of one stack"):
        testing.assert_mismatch_below(theirs.drop(columns="old_log_probs"), max_abs=0.0)
    with pytest.raises(UserError, match="must be a list of log-probs"):
        testing.assert_mismatch_below(theirs.assign(old_log_probs="x"), max_abs=0.0)
