"""Log-probs of the first iteration's responses after decoding and encoding them again, beside those sampled.

The model is the run's initial policy. In deterministic numerics, ids that encoding their text gives back, and ids
before the first that it does not, have the bits that the sampler recorded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from analysis.tokenization.retokenize import AUDIT_COLUMNS, encoded_again, retokenization
from analysis.tokenization.tokenizer import recorded_tokenizer, token_bytes
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import hidden_states
from ppo_repro.numerics.families import trunk_of
from ppo_repro.numerics.network import logits
from ppo_repro.numerics.optimizer import weights_digest
from ppo_repro.numerics.rows import Rows
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.records import reader
from ppo_repro.records.config_file import load_recorded_config
from ppo_repro.records.contents import reference_folder
from ppo_repro.runs.environment import check_inputs
from ppo_repro.runs.prepare import prepare
from ppo_repro.stages.chunks import in_chunks
from ppo_repro.stages.rollout import require_undisturbed

Ids = Sequence[Sequence[int]]
Floats = NDArray[np.float32]
COMPARED = (
    "same_tokens", "unequal", "tokens_again", "log_ratio", "response_outside", "aligned", "outside", "first_outside"
)  # fmt: skip
Drift = Literal["none", "cut", "special", "bytes"]
DRIFTS = {
    "none": "encoding the text gives the same ids",
    "cut": "the same bytes in other tokens",
    "special": "a token without text, other than the end of a response that stopped: no text contains it",
    "bytes": "other bytes: what is not UTF-8, or spells the name of a special token, does not survive as text",
}


def checked_config(run_dir: Path, control: bool) -> RunConfig:
    """The configuration of a run whose first log-probs can be compared; UserError where they cannot."""
    if reader.open_manifest(run_dir).kind != "language":
        raise UserError(f"{run_dir}: a control run has no text; give a run of a language model")
    config = load_recorded_config(run_dir)
    mode, rollout = config.numerics.mode, config.rollout
    if mode == "native" and not control:
        raise UserError(
            f"{run_dir}: numerics.mode = native promises no equal bits; run it in deterministic, or give --control"
        )
    if mode == "deterministic" and control:
        raise UserError(
            f"{run_dir}: numerics.mode = deterministic is no control; leave --control out, or give native runs"
        )
    require_undisturbed(config)
    if rollout.top_k or rollout.top_p < 1.0:
        raise UserError(
            f"{run_dir}: rollout.top_k = {rollout.top_k}, top_p = {rollout.top_p} truncate the distribution, and the "
            "remaining tokens are not recorded; give a run with top_k 0 and top_p 1"
        )
    return config


def start_model(run_dir: Path, config: RunConfig) -> PreTrainedModel:
    """The policy before its first step: made again, or the reference of the run's checkpoints.

    UserError where inputs changed, or where the weights have another digest than the manifest says.
    """
    manifest = reader.open_manifest(run_dir)
    check_inputs(manifest.inputs)
    folder = reference_folder(run_dir)
    state = prepare(config, lambda step, total, loss: None, folder if folder.is_dir() else None).state
    digest, recorded = weights_digest(state.reference.named_parameters()), manifest.final.get("initial_policy_digest")
    if digest != recorded:
        raise UserError(
            f"{run_dir}: started from weights {recorded}, made again they are {digest}; native numerics need the "
            "machine and packages of environment.json, deterministic ones the code"
        )
    return state.policy


@torch.no_grad()
def logprobs_of(policy: PreTrainedModel, prompts: Ids, responses: Ids, config: RunConfig) -> list[Floats]:
    """log p of each response's tokens, float32, nats, at the run's temperature, in its numerics and layout."""
    logprobs: list[Floats] = []
    size = config.layout.forward_micro_batch or max(1, len(prompts))
    for start in range(0, len(prompts), size):
        prompt_ids, response_ids = prompts[start : start + size], responses[start : start + size]
        batch = lay_out(prompt_ids, response_ids, config.layout.padding)

        def of_rows(hidden: Tensor, rows: slice, _: Rows, targets: Tensor = batch.targets) -> tuple[Tensor, ...]:
            temperature, mode = config.rollout.temperature, config.numerics.mode
            return token_statistics(logits(policy, hidden), targets[rows], temperature, None, mode)

        hidden = hidden_states(trunk_of(policy), batch)
        found = in_chunks(of_rows, hidden, batch.rows, policy.config.vocab_size)[0]
        ends = np.cumsum([len(row) for row in response_ids])
        logprobs += np.split(found.numpy(), ends[:-1])
    return logprobs


def kind_of_drift(ids: Sequence[int], again: Sequence[int], spelled: dict[int, bytes]) -> Drift:
    """The key of DRIFTS; `spelled`: the bytes of every token that has text."""
    if list(ids) == list(again):
        return "none"
    if any(token not in spelled for token in ids):
        return "special"
    # the new ids can have a special token if the text spells its name
    before, after = (b"".join(spelled.get(token, b"") for token in row) for row in (ids, again))
    return "cut" if before == after else "bytes"


def outside_band(log_ratios: NDArray[np.float64], clip_range: float) -> NDArray[np.bool_]:
    """Whether exp(log ratio) lies outside 1 ± clip_range."""
    return (log_ratios < math.log1p(-clip_range)) | (log_ratios > math.log1p(clip_range))


def compared(sampled: Floats, again: Floats, same: int, clip_range: float) -> dict[str, float]:
    """One response: log-probs of its sampled ids and of the new ids of its text, of which the first `same` are equal.

    `same_tokens` and how many of them differ in any bit (`unequal`); `tokens_again`; `log_ratio` = sum again - sum
    sampled, nats, 0 only if the sums are equal, and whether its ratio is outside 1 ± clip_range. By position, as in a
    trainer that cuts both to the shorter length: `aligned` tokens, how many of them are outside, and whether the first
    different token is (NaN where one side has none).
    """
    differs = sampled[:same].view(np.int32) != again[:same].view(np.int32)
    shorter = min(len(sampled), len(again))
    outside = outside_band(again[:shorter].astype(np.float64) - sampled[:shorter], clip_range)
    # an exact sum rounded once, so that 0 means equality
    log_ratio = math.fsum([*again.tolist(), *(-sampled).tolist()])
    return {
        "same_tokens": same,
        "unequal": int(differs.sum()),
        "tokens_again": len(again),
        "log_ratio": log_ratio,
        "response_outside": int(outside_band(np.array(log_ratio), clip_range)),
        "aligned": shorter,
        "outside": int(outside.sum()),
        "first_outside": float(outside[same]) if same < shorter else math.nan,
    }


def response_table(run_dir: Path, clip_range: float, control: bool) -> pd.DataFrame:
    """One row per response of the first iteration: drift (of DRIFTS), finish_reason, tokens, scored, and `compared`.

    A response without new ids, or with more than numerics.max_context including its prompt, has `scored` False and NaN.
    UserError as `checked_config` and `start_model`.
    """
    config = checked_config(run_dir, control)
    columns = [*AUDIT_COLUMNS, "prompt_ids"]
    sequences = reader.read_sequences(run_dir, iterations=[0], columns=columns)
    tokens = reader.read_tokens(run_dir, iterations=[0], columns=["sequence", "rollout_logprobs"])
    tokenizer = recorded_tokenizer(run_dir)
    spelled = token_bytes(tokenizer)
    drift = retokenization(sequences, tokenizer)
    text_ids, texts_ids = encoded_again(sequences, tokenizer)
    # a sampled end token, which has no text, ends the new ids too
    ends = [list(row[len(ids) :]) for row, ids in zip(sequences["response_ids"], text_ids, strict=True)]
    again = [[*ids, *map(int, end)] for ids, end in zip(texts_ids, ends, strict=True)]
    prompts = [list(map(int, row)) for row in sequences["prompt_ids"]]
    sampled = [rows.to_numpy(np.float32) for _, rows in tokens.groupby("sequence", sort=True)["rollout_logprobs"]]
    limit = config.numerics.max_context
    scored = [0 < len(new) <= limit - len(prompt) for prompt, new in zip(prompts, again, strict=True)]
    scored_rows = [i for i, can in enumerate(scored) if can]
    logprobs = logprobs_of(
        start_model(run_dir, config), [prompts[i] for i in scored_rows], [again[i] for i in scored_rows], config
    )
    first = drift["first_drift_pos"].to_numpy(np.float64)
    numbers = {
        i: compared(sampled[i], new, len(sampled[i]) if math.isnan(first[i]) else int(first[i]), clip_range)
        for i, new in zip(scored_rows, logprobs, strict=True)
    }
    table = pd.DataFrame(
        {
            "drift": [kind_of_drift(a, b, spelled) for a, b in zip(text_ids, texts_ids, strict=True)],
            "finish_reason": sequences["finish_reason"],
            "tokens": [len(row) for row in sampled],
            "scored": scored,
        }
    )
    return table.join(pd.DataFrame.from_dict(numbers, orient="index").reindex(columns=COMPARED))
