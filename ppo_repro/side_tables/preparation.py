"""The tables of what was trained before PPO: the warm start, and a reward model on pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from ppo_repro.models.warm_start import WarmStartStep
from ppo_repro.preferences.training import PreferenceStep, RewardTraining
from ppo_repro.records import side_schema
from ppo_repro.records.arrow import WithNulls, to_arrow
from ppo_repro.tasks.tokenizer import decode

Columns = dict[str, Any]


def preparation_tables(
    warm_start: Sequence[WarmStartStep], training: RewardTraining | None, tokenizer: PreTrainedTokenizerBase
) -> dict[str, pa.Table]:
    """The tables of a preparation, by name; none of a training that did not take place."""
    columns: dict[str, Columns] = {}
    if warm_start:
        columns["warm_start_steps"] = _warm_start_steps(warm_start)
    if training is not None:
        columns["pairs"] = _pairs(training, tokenizer)
        columns["pair_updates"] = _pair_updates(training.steps)
        columns["pair_steps"] = _pair_steps(training.steps)
    by_name = {table.name: table for table in side_schema.PREPARATION}
    return {name: to_arrow(by_name[name], content) for name, content in columns.items()}


def _warm_start_steps(steps: Sequence[WarmStartStep]) -> Columns:
    names = ("epoch", "examples", "tokens", "loss", "learning_rate", "grad_norm", "accuracy")
    return {"step": list(range(len(steps))), **{name: [getattr(step, name) for step in steps] for name in names}}


def _pairs(training: RewardTraining, tokenizer: PreTrainedTokenizerBase) -> Columns:
    pairs, trained = [*training.pairs, *training.eval_pairs], len(training.pairs)
    held_out = np.arange(len(pairs)) >= trained

    def margins(of_held_out: Sequence[float]) -> WithNulls:
        return WithNulls(np.array([*[0.0] * trained, *of_held_out], dtype=np.float32), held_out)

    return {
        "pair": np.arange(len(pairs), dtype=np.int32),
        "held_out": held_out,
        "prompt_key": [pair.prompt_key for pair in pairs],
        "chosen": [decode(tokenizer, pair.chosen_ids) for pair in pairs],
        "rejected": [decode(tokenizer, pair.rejected_ids) for pair in pairs],
        "prompt_ids": [pair.prompt_ids for pair in pairs],
        "chosen_ids": [pair.chosen_ids for pair in pairs],
        "rejected_ids": [pair.rejected_ids for pair in pairs],
        "margin_before": margins(training.margins_before),
        "margin_after": margins(training.margins_after),
    }


def _pair_updates(steps: Sequence[PreferenceStep]) -> Columns:
    def of_minibatch(name: str) -> np.ndarray:
        return np.concatenate([np.full(step.pairs, getattr(step, name), np.int32) for step in steps])

    return {
        "epoch": of_minibatch("epoch"),
        "minibatch": of_minibatch("minibatch"),
        "pair": [index for step in steps for index in step.indices],
        "margins": np.array([margin for step in steps for margin in step.margins], dtype=np.float32),
        "losses": np.array([loss for step in steps for loss in step.losses], dtype=np.float32),
    }


def _pair_steps(steps: Sequence[PreferenceStep]) -> Columns:
    names = ("epoch", "minibatch", "pairs", "loss", "margin", "accuracy", "grad_norm")
    columns: Columns = {name: [getattr(step, name) for step in steps] for name in names}
    return {**columns, "reward_digest": [step.digest for step in steps]}
