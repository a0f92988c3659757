"""The conformance kit finds which layouts change a loss and at which token, and nothing in a loss that conforms."""

from __future__ import annotations

import doctest
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
from ppo_repro.testing.losses import LossBatch, LossLayout, LossResult, LossRollout, evaluate_loss, rollout_of
from ppo_repro.testing.strategies import rollouts

EXAMPLE = examples.EXAMPLE


def changed(loss: Callable[[LossBatch], Tensor], combine: str, rollout: LossRollout = EXAMPLE) -> dict[str, Drift]:
    """The drifts of the layouts that change something, by layout."""
    found = check_loss(loss, rollout, combine=combine)  # type: ignore[arg-type]
    return {drift.what: drift for drift in found.drifts if not drift.is_small}


@given(rollouts())
def test_a_token_mean_over_the_step_conforms_on_every_rollout(rollout: LossRollout) -> None:
    assert changed(examples.step_token_mean, "sum", rollout) == {}


@given(rollouts(columns=("old_logprobs", "advantages", "is_penalised")))
def test_tokens_chosen_for_the_whole_step_conform(rollout: LossRollout) -> None:
    assert changed(examples.kl_cov_of_the_step, "sum", rollout) == {}


def test_a_token_mean_by_micro_batch_is_found_by_hand() -> None:
    found = changed(examples.micro_batch_token_mean, "mean")
    assert {"micro_batch 1", "micro_batch 2", "ranks 2", "ranks 3"} < set(found)
    assert not {"padding left", "extra 3", "padding packed", "order reversed"} & set(found)
    drift = found["micro_batch 1"]
    ratios = torch.exp(EXAMPLE.new_logprobs - EXAMPLE.columns["old_logprobs"])
    losses = (-EXAMPLE.columns["advantages"] * ratios).split([5, 1, 2])
    assert drift.value == pytest.approx(float(sum(part.mean() for part in losses)) / 3, rel=1e-12)
    assert drift.expected == pytest.approx(float(torch.cat(losses).mean()), rel=1e-12)
    # one response of five tokens has a third of the weight instead of five eighths: every token changes
    assert (drift.first, drift.tokens) == ((0, 0), 8)


def test_kl_cov_chooses_other_tokens_in_other_micro_batches() -> None:
    found = changed(examples.kl_cov, "sum")
    assert {"micro_batch 1", "ranks 3"} <= set(found) and "padding packed" not in found
    assert found["micro_batch 1"].first == (0, 2) and found["micro_batch 1"].tokens == 1


def test_a_mean_over_padding_is_found() -> None:
    found = changed(examples.padded_token_mean, "sum")
    assert {"extra 3", "extra 1, fill 1.0", "padding packed"} <= set(found)
    assert not {"padding left", "order reversed"} & set(found)


def test_a_loss_that_forgets_the_mask_gives_padding_a_gradient() -> None:
    def unmasked(batch: LossBatch) -> Tensor:
        return batch.new_logprobs.sum() / batch.step_tokens

    with pytest.raises(AssertionError, match=r"extra 3: 3 positions|\d+ positions of padding have a gradient"):
        testing.assert_loss_conforms(unmasked, EXAMPLE, combine="sum")
    found = changed(unmasked, "sum")
    assert found["extra 3"].padding_gradients == 7 + 9 and "micro_batch 1" not in found


def test_a_loss_that_reads_neighbours_across_packed_responses_is_found() -> None:
    def smoothed(batch: LossBatch) -> Tensor:
        before = torch.nn.functional.pad(batch.new_logprobs * batch.mask, (1, 0))[:, :-1]
        return ((batch.new_logprobs + before) * batch.mask).pow(2).sum() / batch.step_tokens

    found = changed(smoothed, "sum")
    assert set(found) == {"padding packed"}  # one response in each pass has no neighbour
    assert found["padding packed"].first == (0, 4)


def test_sequences_of_a_packed_row_are_named() -> None:
    """A sequence mean written with `sequences` conforms; one that takes rows for sequences does not."""

    def by_sequence(batch: LossBatch) -> Tensor:
        owners = batch.sequences[batch.mask]
        return sum(
            batch.new_logprobs[batch.mask][owners == owner].pow(2).mean() for owner in owners.unique()
        ) / torch.tensor(float(batch.step_sequences))

    def by_row(batch: LossBatch) -> Tensor:
        squares = (batch.new_logprobs * batch.mask).pow(2)
        return (squares.sum(1) / batch.mask.sum(1)).sum() / batch.step_sequences

    assert changed(by_sequence, "sum") == {}
    assert set(changed(by_row, "sum")) == {"padding packed"}


def test_frames_are_rollouts() -> None:
    rows = [(s, p) for s, length in enumerate(EXAMPLE.lengths) for p in range(length)]
    frame = pd.DataFrame(rows, columns=["sequence", "position"])
    frame["new_logprobs"] = EXAMPLE.new_logprobs.numpy()
    for name, values in EXAMPLE.columns.items():
        frame[name] = values.numpy()
    shuffled = frame.sample(frac=1.0, random_state=0)
    assert check_loss(examples.kl_cov, shuffled, combine="sum") == check_loss(examples.kl_cov, EXAMPLE, combine="sum")
    assert check_loss(examples.kl_cov, frame, combine="sum").frame()["tokens"].iloc[0] == 1
    for bad, message in (
        (frame.drop(columns="new_logprobs"), "no column 'new_logprobs'"),
        (frame.assign(text="a"), "column 'text' holds no numbers"),
        (frame.assign(advantages=float("nan")), "'advantages' holds numbers that are not finite"),
    ):
        with pytest.raises(UserError, match=message):
            rollout_of(bad)


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

    def not_a_number(batch: LossBatch) -> Tensor:
        return (batch.new_logprobs / batch.mask.to(torch.float64)).sum()

    assert "micro_batch 2" in changed(not_a_number, "sum")


@pytest.mark.parametrize("name", ["conformance", "strategies"])
def test_the_examples_run(name: str) -> None:
    found = doctest.testmod(import_module(f"ppo_repro.testing.{name}"), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted and not found.failed


def test_every_name_is_there() -> None:
    for name in testing.__all__:
        assert getattr(testing, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'assert_los'"):
        _ = testing.assert_los


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
    with pytest.raises(UserError, match="has not the log-probs of one known stack"):
        testing.assert_mismatch_below(theirs.drop(columns="old_log_probs"), max_abs=0.0)
    with pytest.raises(UserError, match="must be numbers"):
        testing.assert_mismatch_below(theirs.assign(old_log_probs="x"), max_abs=0.0)
