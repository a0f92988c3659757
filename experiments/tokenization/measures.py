"""The numbers of one run of a tokenization study: its scores, KL in several units, clip shares and drift."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from analysis.grids.outcomes import complete_cells
from analysis.tokenization.tables import iteration_tables, run_drift
from analysis.tokenization.tokenizer import recorded_tokenizer
from analysis.tokenization.words import BOUNDARIES
from ppo_repro.errors import UserError
from ppo_repro.records import reader

LAST = 3  # iterations whose mean is the end of a run
MEASURES = {
    "start": "mean score of the first iteration's responses, drawn from the reference",
    "score": f"mean score of the responses, last {LAST} iterations",
    "gain": "score - start",
    "accuracy": "greedy accuracy on held-out prompts after training",
    "kl": f"KL(policy || reference), exact, seq_mean_token_sum, nats, last {LAST} iterations",
    "kl_token": f"the same, token_mean, last {LAST} iterations",
    "k1": "KL(policy || reference) by k1, seq_mean_token_sum, nats, last iteration",
    "abs_ratio": "sum of |k1| over tokens / sum of exact divergences, last iteration",
    "abs_ratio_words": "the same with |k1| of whole words",
    "tokens": "tokens per response, its end included",
    "tokens_per_word": "tokens per word of text",
    "first_leading": "first token's share of exact KL, white space with the word after it",
    "first_trailing": "first token's share of exact KL, white space with the word before it",
    "entropy_leading": "first token's share of entropy, white space with the word after it",
    "entropy_trailing": "first token's share of entropy, white space with the word before it",
    "token_out": "share of tokens whose ratio was outside the clip band in the last epoch",
    "token_out_words": "token_out times tokens_per_word",
    "word_out": "share of words whose ratio was outside the clip band in the last epoch, white space leading",
    "gain_per_nat": "least squares slope through 0 of score - start on KL per response, over iterations",
    "gain_per_token_nat": "the same on KL per token",
    "drift_first": "share of responses whose text encodes to other ids, first iteration",
    "drift_last": "the same, last iteration",
}


def slope(x: pd.Series, y: pd.Series) -> float:
    """Least squares slope through 0, sum x y / sum x^2; NaN where x is 0 everywhere."""
    square = float((x * x).sum())
    return float((x * y).sum()) / square if square else float("nan")


def _value(summary: pd.DataFrame, metric: str, unit: str, reduction: str) -> float:
    rows = summary.query("metric == @metric and unit == @unit and reduction == @reduction")
    return float(rows["value"].iloc[0])


def of_run(run_dir: Path) -> dict[str, float]:
    """MEASURES of a recorded run; UserError where it has fewer than LAST + 1 iterations or no clip band."""
    rows = reader.read_iterations(run_dir)
    if len(rows) <= LAST:
        raise UserError(f"{run_dir}: has {len(rows)} iterations; the measures need at least {LAST + 1}")
    end, final = rows.tail(LAST), len(rows) - 1
    tables = {b: iteration_tables(run_dir, final, boundary=b) for b in BOUNDARIES}
    summary, clip = tables["leading"].tok_summary, tables["leading"].tok_clip
    if clip is None:
        raise UserError(f"{run_dir}: its objective has no clip band; the studies need `clip`")
    start, gains = float(rows["score_mean"].iloc[0]), rows["score_mean"] - rows["score_mean"].iloc[0]
    exact, per_word = (_value(summary, name, "word", "ratio_of_sums") for name in ("kl_exact", "tokens"))
    drift = run_drift(run_dir, recorded_tokenizer(run_dir), iterations=[0, final])
    measures = {
        "start": start,
        "score": float(end["score_mean"].mean()),
        "gain": float(end["score_mean"].mean()) - start,
        "accuracy": float(reader.open_manifest(run_dir).final["eval_accuracy"]),
        "kl": float(end["ref_kl_per_sequence"].mean()),
        "kl_token": float(end["ref_kl_per_token"].mean()),
        "k1": _value(summary, "kl_k1", "sequence", "seq_mean_token_sum"),
        "abs_ratio": _value(summary, "kl_abs_k1", "word", "ratio_of_sums") / exact,
        "abs_ratio_words": _value(summary, "kl_abs_k1_of_words", "word", "ratio_of_sums") / exact,
        "tokens": float(end["response_length_mean"].mean()),
        "tokens_per_word": per_word,
    }
    for boundary in BOUNDARIES:
        shares = tables[boundary].tok_summary
        measures[f"first_{boundary}"] = _value(shares, "kl_exact_first_share", "share", "ratio_of_sums")
        measures[f"entropy_{boundary}"] = _value(shares, "entropy_first_share", "share", "ratio_of_sums")
    return measures | {
        "token_out": float(clip["token_out"].iloc[-1]),
        "token_out_words": float(clip["token_out"].iloc[-1]) * per_word,
        "word_out": float(clip["word_out"].iloc[-1]),
        "gain_per_nat": slope(rows["ref_kl_per_sequence"], gains),
        "gain_per_token_nat": slope(rows["ref_kl_per_token"], gains),
        "drift_first": float(drift["drift_seq_frac"].iloc[0]),
        "drift_last": float(drift["drift_seq_frac"].iloc[-1]),
    }


def of_grid(grid: Path) -> pd.DataFrame:
    """One row per complete cell: point (labels of the axes), seed, fingerprint and MEASURES; UserError without any."""
    cells = complete_cells(grid)
    table = pd.DataFrame([of_run(grid / str(run_dir)) for run_dir in cells["run_dir"]])
    table.insert(0, "point", cells["point"])
    return pd.concat([table, cells[["seed", "fingerprint"]]], axis=1)
