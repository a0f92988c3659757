"""Separate formulas in NumPy give the recorded rewards, returns and KL penalties."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ppo_repro.records import reader


def unequal(tokens: pd.DataFrame, sequences: pd.DataFrame) -> dict[str, int]:
    """In how many tokens a recorded column is not what the others give, in float32 operations."""
    key = ["iteration", "sequence"]
    ends = tokens.groupby(key)["position"].transform("max") == tokens["position"]
    scores = tokens.merge(sequences[[*key, "scores"]], on=key)["scores"].to_numpy(np.float32)
    expected = {
        "rewards": -tokens["kl_penalties"] + np.where(ends, scores, np.float32(0)),
        "returns": tokens["raw_advantages"] + tokens["values"],
        "kl_penalties": (tokens["old_logprobs"] - tokens["ref_logprobs"]) * np.float32(0.05),
    }
    return {name: int((tokens[name] != values.astype(np.float32)).sum()) for name, values in expected.items()}


def test_arithmetic_holds_in_the_records(deterministic_run: Path) -> None:
    tokens, sequences = reader.read_tokens(deterministic_run), reader.read_sequences(deterministic_run)
    assert unequal(tokens, sequences) == {"rewards": 0, "returns": 0, "kl_penalties": 0}
    assert abs(tokens["advantages"].mean()) < 1e-3  # whitened per iteration, stored as float32


@pytest.mark.parametrize("column", ["rewards", "returns", "kl_penalties"])
def test_one_flipped_bit_of_a_column_is_counted(column: str, deterministic_run: Path) -> None:
    tokens = reader.read_tokens(deterministic_run)
    tokens.loc[5, column] = np.nextafter(np.float32(tokens.loc[5, column]), np.float32(9))
    assert unequal(tokens, reader.read_sequences(deterministic_run))[column] == 1


def test_every_epoch_sees_each_response_once_in_an_order_of_its_own(deterministic_run: Path) -> None:
    updates = reader.read_updates(deterministic_run, columns=["iteration", "epoch", "minibatch", "sequence"])
    orders = set()
    for _, epoch in updates.groupby(["iteration", "epoch"]):
        order = epoch.drop_duplicates(["minibatch", "sequence"])["sequence"].tolist()
        assert sorted(order) == list(range(48))
        orders.add(tuple(order))
    assert len(orders) == 6, "two epochs in each of three iterations"


def test_figures_of_an_iteration_follow_from_its_responses_and_tokens(deterministic_run: Path) -> None:
    """By pandas, whose sums are not rounded as the recorded ones are."""
    sequences, tokens = reader.read_sequences(deterministic_run), reader.read_tokens(deterministic_run)
    steps, found = reader.read_steps(deterministic_run), reader.read_iterations(deterministic_run)
    of = tokens["iteration"]
    by_response, by_token = sequences.groupby("iteration"), tokens.groupby("iteration")
    returns, values = (tokens[name].astype("float64") for name in ("returns", "values"))
    of_response = tokens.groupby(["iteration", "sequence"])[["rewards", "ref_kl"]].sum().groupby("iteration").mean()
    expected = {
        "sequences": by_response.size(),
        "tokens": by_token.size(),
        "score_mean": by_response["scores"].mean(),
        "accuracy": by_response["is_correct"].mean(),
        "reward_mean": of_response["rewards"],
        "response_length_mean": by_response["response_length"].mean(),
        "truncated_fraction": (sequences["finish_reason"] == "length").groupby(sequences["iteration"]).mean(),
        "entropy": by_token["entropies"].mean(),
        "policy_steps": steps.groupby("iteration").size(),
        "ref_kl_per_token": by_token["ref_kl"].mean(),
        "ref_kl_per_sequence": of_response["ref_kl"],
        "explained_variance": 1 - (returns - values).groupby(of).var() / returns.groupby(of).var(),
    }
    for name, figures in expected.items():
        np.testing.assert_allclose(found[name], figures, rtol=1e-5, atol=1e-9, err_msg=name)
