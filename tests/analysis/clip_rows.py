"""Iterations made by hand or at random for the clip analyses, without any training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ppo_repro.analysis.clip_rules import ClipRule
from ppo_repro.analysis.visits import IterationRows, join_tokens

RULE = ClipRule("token", "old", 0.2, 0.2)
VALUE_REACH = 0.2


def make_item(
    lengths: Sequence[int],
    log_ratios: np.ndarray,
    advantages: np.ndarray,
    rule: ClipRule = RULE,
    minibatches: int = 1,
    old_logprobs: np.ndarray | None = None,
    delta: np.ndarray | None = None,
    values: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
) -> IterationRows:
    """`log_ratios` [epochs, tokens]; responses go to minibatches in turn; delta = old - rollout log-probs.

    `values`: old [tokens], new [epochs, tokens], returns [tokens].
    """
    count, epochs = int(sum(lengths)), len(log_ratios)
    sequence = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    old = np.full(count, -1.0) if old_logprobs is None else np.asarray(old_logprobs, dtype=np.float64)
    rollout = old if delta is None else old - delta
    anchor = old if rule.anchor == "old" else rollout
    position = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    tokens = pd.DataFrame(
        {
            "iteration": 0,
            "sequence": sequence,
            "position": position,
            "rollout_logprobs": rollout,
            "old_logprobs": old,
            "entropies": -old,
            "values": np.zeros(count) if values is None else values[0],
            "advantages": np.asarray(advantages, dtype=np.float64),
            "returns": np.zeros(count) if values is None else values[2],
        }
    )
    parts = []
    for epoch in range(epochs):
        part = pd.DataFrame({"epoch": epoch, "minibatch": sequence % minibatches, "sequence": sequence})
        part["position"], part["new_logprobs"] = position, anchor + log_ratios[epoch]
        with np.errstate(over="ignore"):
            part["ratios"] = np.exp(log_ratios[epoch]).astype(np.float32)
        part["clip_flag"], part["value_clipped"], part["new_entropies"] = "none", False, -old
        part["loss_weights"], part["importance_weights"] = 1.0, np.nan
        part["new_values"] = np.zeros(count) if values is None else values[1][epoch]
        part["exact_log_ratios"] = log_ratios[epoch]
        parts.append(part.sort_values(["minibatch", "sequence", "position"], kind="stable"))
    rows = join_tokens(tokens, pd.concat(parts, ignore_index=True), rule.anchor)
    rows["log_ratios"] = rows.pop("exact_log_ratios")  # without the rounding of + anchor - anchor
    steps = rows[["epoch", "minibatch"]].drop_duplicates().reset_index(drop=True)
    return IterationRows(0, rule, VALUE_REACH, steps, rows)


def single(log_ratios: Sequence[float], advantages: Sequence[float], rule: ClipRule = RULE) -> IterationRows:
    """One response, one step."""
    return make_item([len(log_ratios)], np.array([log_ratios]), np.array(advantages), rule)
