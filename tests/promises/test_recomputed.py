"""The arithmetic of the stages holds in the records of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from analysis.mismatch.parity import parity
from ppo_repro.records import reader
from ppo_repro.watcher import Silent
from tests.support.language import run
from tests.support.runs import small_config


def test_top_k_and_top_p_score_the_distribution_sampled_from(tmp_path: Path) -> None:
    config = small_config("rollout.top_k=4", "rollout.top_p=0.9", "rollout.temperature=0.8", "ppo.iterations=2")
    run_dir = run(config, tmp_path, Silent())[0]
    found = parity(run_dir)
    assert (found.unequal_old_rollout_logprobs, found.unequal_first_ratios) == (0, 0)
    tokens = reader.read_tokens(run_dir, columns=["log_kept_mass", "entropies"])
    assert tokens["log_kept_mass"].max() <= 0 and tokens["log_kept_mass"].min() < -0.01
    assert tokens["entropies"].max() <= np.log(4) + 1e-6  # at most 4 tokens are eligible; one float32 rounding


def test_arithmetic_holds_in_the_records(deterministic_run: Path) -> None:
    tokens, sequences = reader.read_tokens(deterministic_run), reader.read_sequences(deterministic_run)
    key = ["iteration", "sequence"]
    ends = tokens.groupby(key)["position"].transform("max") == tokens["position"]
    scores = tokens.merge(sequences[[*key, "scores"]], on=key)["scores"].to_numpy(np.float32)
    expected = -tokens["kl_penalties"].to_numpy() + np.where(ends, scores, np.float32(0))
    np.testing.assert_array_equal(tokens["rewards"].to_numpy(), expected)
    np.testing.assert_array_equal(tokens["returns"], tokens["raw_advantages"] + tokens["values"])
    log_ratio = tokens["old_logprobs"] - tokens["ref_logprobs"]
    np.testing.assert_array_equal(tokens["kl_penalties"], (log_ratio * np.float32(0.05)).astype(np.float32))
    assert abs(tokens["advantages"].mean()) < 1e-3  # whitened per iteration, stored as float32
