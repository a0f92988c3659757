"""Causes of every kind in one run: one fingerprint under another layout and number of threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_repro.config.files import load_config
from ppo_repro.records import manifest
from ppo_repro.watcher import Silent
from tests.support.language import run
from tests.support.paths import TINY

COMMON = (
    *("ppo.iterations=3", "ppo.minibatch_size=5", "ppo.ratio_anchor=old", "numerics.max_context=24"),
    *("task.num_eval_prompts=2", "model.warm_start_steps=0", "model.vocab_size=40", "rollout.max_response_tokens=6"),
    *("rollout.temperature=0.8", "ppo.importance_weights={kind: truncated}", "ppo.rejection=[{kind: veto}]"),
)
SAMPLER, TRAINER = "mismatch.sampler", "mismatch.trainer"
CAUSES = (
    f"{SAMPLER}.precision={{weights: float8_e4m3, activations: float8_e4m3, rest: bfloat16, kv_cache: int8}}",
    f"{SAMPLER}.lag=2",
    f"{SAMPLER}.token_bias=0.1",
    "rollout.mismatch_sigma=0.1",
    f"{TRAINER}.temperature_scored=false",
    f"{TRAINER}.prompt_before='<eos>'",
    f"{TRAINER}.padding_leak=7",
    f"{TRAINER}.retokenize=0.5",
    f"{TRAINER}.eos_in_loss=false",
    f"{TRAINER}.dropout=0.1",
)
LAYOUT = (
    *("layout.rollout_slots=4", "layout.prefill_chunk=2", "layout.prefix_cache=false", "layout.padding=left"),
    *("layout.forward_micro_batch=4", "layout.update_micro_batch=2", "layout.gradient_checkpointing=true"),
    "layout.threads=2",
)


def fingerprint(out: Path, *overrides: str) -> str:
    return manifest.load(run(load_config(TINY, [*COMMON, *overrides]), out, Silent())[0]).fingerprint


@pytest.mark.slow
def test_all_causes_together_have_one_fingerprint_under_another_layout(tmp_path: Path) -> None:
    expected = fingerprint(tmp_path / "first", *CAUSES)
    assert fingerprint(tmp_path / "again", *CAUSES, *LAYOUT) == expected
    assert fingerprint(tmp_path / "control", *CAUSES[:-1]) != expected, "one cause less is another run"
