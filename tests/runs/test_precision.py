"""Runs whose sampler or trainer rounds: one fingerprint under every layout, a mismatch only where the two differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ppo_repro.analysis.agreement import run_agreement
from ppo_repro.models.load import load_folder
from ppo_repro.models.networks import in_dtype
from ppo_repro.records import manifest, reader
from ppo_repro.runs.accuracy import Text, reference_scores, stock_scores
from tests.support.language import tiny_run
from tests.support.recipes import OTHER_LAYOUT

BFLOAT16 = "{weights: bfloat16, activations: bfloat16, logits: bfloat16}"
W8A8 = "{weights: float8_e4m3, activations: float8_e4m3, rest: bfloat16, kv_cache: float8_e4m3}"
SIDES = {
    "sampler bfloat16": (f"mismatch.sampler.precision={BFLOAT16}",),
    "sampler w8a8": (f"mismatch.sampler.precision={W8A8}",),
    "sampler float16": ("mismatch.sampler.precision={weights: float16, logits: float16}", "ppo.ratio_anchor=old"),
    "int8 weights, head": ("mismatch.sampler.precision.weights=int8", "value={kind: head}"),
    "int8 weights, lora": (
        "mismatch.sampler.precision.weights=int8",
        "lora={rank: 2, alpha: 4.0}",
        "value={learning_rate: 1e-3, lora: {rank: 2, alpha: 4.0}}",
        "layout.gradient_checkpointing=true",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIDES)
def test_a_rounded_side_is_a_mismatch_of_its_own_that_no_layout_changes(name: str, tmp_path: Path) -> None:
    first = tiny_run(tmp_path / "first", *SIDES[name])
    again = tiny_run(tmp_path / "again", *SIDES[name], *OTHER_LAYOUT)
    assert manifest.load(first).fingerprint == manifest.load(again).fingerprint
    found = run_agreement(first)
    assert found.unequal_values == 0
    assert found.tokens > 30
    assert found.unequal_old_rollout_logprobs > found.tokens / 2
    assert 1e-5 < found.max_abs_old_rollout < 2.0
    if "ppo.ratio_anchor=old" in SIDES[name]:
        assert found.unequal_first_ratios == 0
    else:
        assert found.unequal_first_ratios > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stock_torch_samples_with_the_error_of_its_dtype(dtype: str, tmp_path: Path) -> None:
    """The mismatch of the first iteration beside the model in float64 and in that dtype, each response by itself."""
    run_dir = tiny_run(tmp_path, f"mismatch.sampler.stock={dtype}", "ppo.iterations=1", "checkpoints.every=1")
    found = run_agreement(run_dir)
    assert found.unequal_old_rollout_logprobs > found.tokens / 2
    sequences, tokens = reader.read_sequences(run_dir), reader.read_tokens(run_dir)
    text = Text([list(ids) for ids in sequences["prompt_ids"]], [list(ids) for ids in sequences["response_ids"]])
    model, _ = load_folder(run_dir / "checkpoints" / "reference")
    reference = reference_scores(model, text).logprobs
    expected = stock_scores(in_dtype(model, getattr(torch, dtype)), text).logprobs.double() - reference
    delta = torch.from_numpy(tokens["rollout_logprobs"].to_numpy(np.float64) - tokens["old_logprobs"].to_numpy())

    def rms(x: torch.Tensor) -> float:
        return float(x.square().mean().sqrt())

    # decoding over a cache rounds other sums than a whole pass, so single tokens differ and the size does not
    assert 0.5 < rms(delta) / rms(expected) < 2
    low, high = (4e-3, 4e-2) if dtype == "bfloat16" else (5e-4, 4e-3)  # spacing of numbers: a factor of 8
    assert low < rms(expected) < high, "one dtype would pass for the other"
