"""First ratios when text is encoded again before training: `python -m experiments.tokenization.reencode FOLDER...`.

FOLDER is a run or a grid of runs. Each response of a run's first iteration is decoded, its text is encoded again, and
the run's initial policy scores the new ids. Exit code 1 if ids that did not change, or ids before the first that did,
have other log-probs than were sampled, which deterministic numerics rule out. `--control` takes native runs, which must
fail this test.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from analysis.grids.outcomes import complete_cells
from analysis.grids.table import markdown
from analysis.tokenization.retokenize import AUDIT_COLUMNS, encoded_again, retokenization
from analysis.tokenization.tokenizer import recorded_tokenizer, token_bytes
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import policy_logits
from ppo_repro.numerics.optimizer import weights_digest
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.records import reader
from ppo_repro.records.config_file import load_recorded_config
from ppo_repro.records.contents import REFERENCE
from ppo_repro.runs.prepare import prepare

DRIFTS = {
    "none": "encoding the text gives the same ids",
    "cut": "the same bytes in other tokens",
    "special": "a token without text, other than the end of a response that stopped: no text contains it",
    "bytes": "other bytes: what is not UTF-8, or spells the name of a special token, does not survive as text",
}
SCORED = ("same_tokens", "unequal", "tokens_again", "log_ratio")


def checked_config(run_dir: Path, control: bool) -> RunConfig:
    """The configuration of a run whose first log-probs can be compared; UserError where they cannot."""
    if reader.open_manifest(run_dir).kind != "language":
        raise UserError(f"{run_dir}: a control run has no text; give a run of a language model")
    config = load_recorded_config(run_dir)
    mode, rollout = config.numerics.mode, config.rollout
    if (mode == "native") != control:
        raise UserError(f"{run_dir}: numerics.mode = {mode}; give deterministic runs, or native ones with --control")
    if rollout.top_k or rollout.top_p < 1.0 or rollout.mismatch_sigma:
        raise UserError(f"{run_dir}: sampled from another distribution than the model's; give a run without top-k, "
                        "top-p and mismatch_sigma")  # fmt: skip
    return config


def start_model(run_dir: Path, config: RunConfig) -> PreTrainedModel:
    """The policy before its first step: made again, or the reference of the run's checkpoints.

    UserError where the weights have another digest than the manifest says.
    """
    manifest = reader.open_manifest(run_dir)
    folder = run_dir / REFERENCE
    state = prepare(config, lambda step, total, loss: None, folder if folder.is_dir() else None).state
    digest, recorded = weights_digest(state.reference.named_parameters()), manifest.final.get("initial_policy_digest")
    if digest != recorded:
        raise UserError(
            f"{run_dir}: started from weights {recorded}, made again they are {digest}; native numerics need the "
            "machine and packages of environment.json, deterministic ones the code"
        )
    return state.policy


def kind_of_drift(ids: Sequence[int], again: Sequence[int], spelled: dict[int, bytes]) -> str:
    """The key of DRIFTS; `spelled`: the bytes of every token that has text."""
    if list(ids) == list(again):
        return "none"
    if any(token not in spelled for token in ids):
        return "special"
    # the new ids can have a special token if the text spells its name
    before, after = (b"".join(spelled.get(token, b"") for token in row) for row in (ids, again))
    return "cut" if before == after else "bytes"


def compared(sampled: np.ndarray, again: np.ndarray, same: int) -> tuple[int, int, int, float]:
    """SCORED of one response: log-probs of its sampled ids and of the new ids, of which the first `same` are equal.

    How many of those differ in any bit (`unequal`); log_ratio = sum again - sum sampled, nats, rounded once, so that 0
    means equality.
    """
    unequal = int((sampled[:same].view(np.int32) != again[:same].view(np.int32)).sum())
    return same, unequal, len(again), math.fsum([*again.tolist(), *(-sampled).tolist()])


def response_table(run_dir: Path, control: bool) -> pd.DataFrame:
    """One row per response of the first iteration: drift (of DRIFTS), tokens, and SCORED.

    These are NaN for a response without new ids, or with more than numerics.max_context including its prompt. UserError
    as `checked_config` and `start_model`.
    """
    config = checked_config(run_dir, control)
    sequences = reader.read_sequences(run_dir, iterations=[0], columns=[*AUDIT_COLUMNS, "prompt_ids"])
    tokens = reader.read_tokens(run_dir, iterations=[0], columns=["sequence", "rollout_logprobs"])
    tokenizer = recorded_tokenizer(run_dir)
    first = retokenization(sequences, tokenizer)["first_drift_pos"]
    old, new = encoded_again(sequences, tokenizer)
    spelled, policy, rows = token_bytes(tokenizer), start_model(run_dir, config), []
    for i, (_, group) in enumerate(tokens.groupby("sequence", sort=True)):
        sampled = group["rollout_logprobs"].to_numpy(np.float32)
        # a sampled end token, which has no text, ends the new ids too
        again = [*new[i], *map(int, sequences["response_ids"][i][len(old[i]) :])]
        prompt = list(map(int, sequences["prompt_ids"][i]))
        scored: tuple[float, ...] = (math.nan,) * len(SCORED)
        if 0 < len(again) <= config.numerics.max_context - len(prompt):
            batch, temperature = lay_out([prompt], [again], "right"), config.rollout.temperature
            with torch.no_grad():
                logits = policy_logits(policy, batch)
                found, _ = token_statistics(logits, batch.targets, temperature, None, config.numerics.mode)
            scored = compared(sampled, found.numpy(), len(sampled) if np.isnan(first[i]) else int(first[i]))
        rows.append((kind_of_drift(old[i], new[i], spelled), len(sampled), *scored))
    return pd.DataFrame(rows, columns=["drift", "tokens", *SCORED])


def counts(table: pd.DataFrame, clip_range: float = 0.2) -> dict[str, float]:
    """Of a `response_table`: responses by kind of drift, tokens that must not change, and first ratios in nats."""
    moved = table["drift"] != "none"
    logs = table[moved]["log_ratio"].dropna()
    outside = (logs < math.log1p(-clip_range)) | (logs > math.log1p(clip_range))
    return {
        "responses": len(table),
        **{name: int((table["drift"] == name).sum()) for name in DRIFTS},
        "not scored": int(table["log_ratio"].isna().sum()),
        "tokens without drift": int(table[~moved]["same_tokens"].sum()),
        "unequal": int(table[~moved]["unequal"].sum()),
        "tokens before drift": int(table[moved]["same_tokens"].sum()),
        "unequal before": int(table[moved]["unequal"].sum()),
        "exactly 1": int((logs == 0).sum()),
        "above 1": int((logs > 0).sum()),
        "median": float(logs.median()),
        "min": float(logs.min()),
        "max": float(logs.max()),
        "outside": float(outside.mean()),
    }


def of_run(run_dir: Path) -> dict[str, float]:
    """`counts` of a run; UserError as `response_table`."""
    return counts(response_table(run_dir, False))


def verdict(responses: pd.DataFrame, control: bool) -> tuple[str, bool]:
    """One line about the bits, and whether they are as expected: none unequal, or in a control some."""
    tokens, unequal = int(responses["same_tokens"].sum()), int(responses["unequal"].sum())
    line = f"{unequal} of {tokens} tokens before any different id have another log-prob than was sampled"
    if control:
        return f"{line}; a control must have some", unequal > 0
    return f"{line}; in deterministic numerics there must be none", tokens > 0 and unequal == 0


def runs_of(folder: Path) -> list[tuple[str, Path]]:
    """(point, run folder) of a grid's complete cells, or of a single run; UserError where it is neither."""
    if not (folder / "cells.parquet").is_file():
        return [(str(folder), folder)]
    cells = complete_cells(folder)
    return [
        (f"{folder.name}: {point}", folder / str(run))
        for point, run in zip(cells["point"], cells["run_dir"], strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; exit code 1 where bits are not as expected, 2 and one line on a user error."""
    parser = argparse.ArgumentParser(description="first ratios when the text is encoded again before training")
    parser.add_argument("folders", metavar="FOLDER", type=Path, nargs="+", help="a recorded run, or a grid of them")
    parser.add_argument("--control", action="store_true", help="native runs, where some bits must differ")
    arguments = parser.parse_args(argv)
    try:
        runs = [run for folder in arguments.folders for run in runs_of(folder)]
        responses = pd.concat(
            [response_table(run, arguments.control).assign(point=point) for point, run in runs], ignore_index=True
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    rows = [{"point": point, **counts(group)} for point, group in responses.groupby("point", sort=False)]
    print(markdown(pd.DataFrame(rows).round(3)), end="\n\n")
    line, as_expected = verdict(responses, arguments.control)
    print(line)
    return 0 if as_expected else 1


if __name__ == "__main__":
    sys.exit(main())
