"""Make the tables of tokenization and KL of a recorded run, iteration by iteration.

`words` finds the words; `token_kl` makes tables by token, word and response and averages them; `word_clip` computes the
clip band for words; `retokenize` decodes and encodes the responses again with the tokenizer of `recorded_tokenizer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppo_repro.analysis.clip_rules import token_rule
from ppo_repro.analysis.run_tables import RunTables, chosen_iterations
from ppo_repro.analysis.tokenization.recorded_tokenizer import RecordedTokenizer
from ppo_repro.analysis.tokenization.retokenize import DRIFT_COLUMNS, DriftSummary, drift_summary, retokenization
from ppo_repro.analysis.tokenization.token_kl import (
    KL_TOKEN_COLUMNS,
    SEQUENCE_COLUMNS,
    response_table,
    summary_table,
    token_table,
    word_table,
)
from ppo_repro.analysis.tokenization.word_clip import UPDATE_COLUMNS, clip_table, word_ratios
from ppo_repro.analysis.tokenization.words import Boundary
from ppo_repro.records import reader
from ppo_repro.records.manifest import Manifest, require_responses


@dataclass(frozen=True)
class TokenizationTables:
    """Tables of one iteration.

    `clip_band` is None for objectives without a clip band, and for iterations that a fork copied from its origin.
    """

    tokens: pd.DataFrame  # a row per `TokenRow`
    words: pd.DataFrame  # of `word_table`
    responses: pd.DataFrame  # of `response_table`
    summary: pd.DataFrame  # a row per `SummaryRow`, after the iteration
    clip_band: pd.DataFrame | None  # a row per `ClipBand`


def iteration_tables(
    run_dir: Path | str, iteration: int, *, boundary: Boundary, recorded: Manifest | None = None
) -> TokenizationTables:
    """Return all tables of one iteration of a language run. Raises UserError on missing or damaged records."""
    recorded = recorded or reader.open_manifest(run_dir)
    require_responses(run_dir, recorded)
    run = RunTables(run_dir, recorded, [iteration])
    tokens, sequences = run.read("tokens", KL_TOKEN_COLUMNS), run.read("sequences", SEQUENCE_COLUMNS)
    table = token_table(tokens, sequences, boundary=boundary)
    words, responses = word_table(table), response_table(table, sequences)
    return TokenizationTables(
        tokens=table,
        words=words,
        responses=responses,
        summary=summary_table(responses, words),
        clip_band=_clip_band(run, table, tokens),
    )


def _clip_band(run: RunTables, table: pd.DataFrame, tokens: pd.DataFrame) -> pd.DataFrame | None:
    """Return `clip_table` of the one iteration of `run`; None without a clip of token ratios, or if it was copied."""
    (iteration,) = run.iterations
    if iteration not in run.recorded.own_iterations:
        return None
    rule = token_rule(run.config.ppo, run.read("iterations", ["clip_range"])["clip_range"].item())
    if rule is None:
        return None
    updates = run.read("updates", UPDATE_COLUMNS)
    return clip_table(word_ratios(table, tokens[f"{rule.anchor}_logprobs"], updates, rule))


def summary_by_iteration(run_dir: Path | str, *, boundary: Boundary, iterations: Sequence[int] | None) -> pd.DataFrame:
    """Return the rows of `summary_table` for each of `iterations` (None: all).

    Raises UserError on missing or damaged records.
    """
    recorded = reader.open_manifest(run_dir)
    chosen = chosen_iterations(recorded, iterations)
    summaries = [
        iteration_tables(run_dir, iteration, boundary=boundary, recorded=recorded).summary for iteration in chosen
    ]
    return pd.concat(summaries, ignore_index=True)


def drift_by_iteration(
    run_dir: Path | str, tokenizer: RecordedTokenizer, *, iterations: Sequence[int] | None = None
) -> pd.DataFrame:
    """Return a `DriftSummary` for each of `iterations` (None: all).

    Raises UserError if the tokenizer is not the run's.
    """
    recorded = reader.open_manifest(run_dir)
    run = RunTables(run_dir, recorded, chosen_iterations(recorded, iterations))
    rows = [
        drift_summary(retokenization(run.read("sequences", DRIFT_COLUMNS, iteration), tokenizer))
        for iteration in run.iterations
    ]
    return pd.DataFrame(rows, columns=DriftSummary._fields)
