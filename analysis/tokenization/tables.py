"""Tokenization and KL of a recorded run, iteration by iteration: `python -m analysis.tokenization RUN`.

Words and boundary: `words`; tables by token, word and response: `kl`; units, shares and standard errors: `summary`;
clip band for words: `clip`; decay of credit: `credit`; numbers: `digits`; decoding and encoding again: `retokenize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.pairs.runs import chosen_iterations
from analysis.program import program
from analysis.tokenization.clip import UPDATE_COLUMNS, clip_table, word_ratios
from analysis.tokenization.credit import char_matched_lambda, half_life_tokens
from analysis.tokenization.digits import digit_table
from analysis.tokenization.kl import SEQUENCE_COLUMNS, TOKEN_COLUMNS, sequence_table, token_table, word_table
from analysis.tokenization.retokenize import AUDIT_COLUMNS, drift_summary, retokenization
from analysis.tokenization.summary import Cluster, summary_table
from analysis.tokenization.tokenizer import RecordedTokenizer, recorded_tokenizer
from analysis.tokenization.words import BOUNDARIES, Boundary
from ppo_repro.config.algorithm import GaeAdvantages
from ppo_repro.config.objectives import AdaptiveClipObjective, ClipObjective
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError
from ppo_repro.output import Parser, tell
from ppo_repro.records import reader
from ppo_repro.records.config_file import load_recorded_config
from ppo_repro.records.manifest import has_responses


@dataclass(frozen=True)
class TokenizationTables:
    """The tables of one iteration; `tok_clip` is None for objectives without a clip band."""

    tok_token: pd.DataFrame
    tok_word: pd.DataFrame
    tok_seq: pd.DataFrame
    tok_summary: pd.DataFrame
    tok_clip: pd.DataFrame | None
    digit_table: pd.DataFrame
    mixed_numbers: int  # numbers that `digit_table` leaves out


def iteration_tables(
    run_dir: Path | str, iteration: int, *, boundary: Boundary, cluster: Cluster
) -> TokenizationTables:
    """All tables of one iteration of a language run; UserError where records are missing or damaged."""
    if not has_responses(reader.open_manifest(run_dir)):
        raise UserError(f"{run_dir}: a run on an environment has no tokens of text; give a run of a language model")
    config = load_recorded_config(run_dir)
    tokens = reader.read_tokens(run_dir, iterations=[iteration], columns=TOKEN_COLUMNS)
    sequences = reader.read_sequences(run_dir, iterations=[iteration], columns=SEQUENCE_COLUMNS)
    table = token_table(tokens, sequences, boundary=boundary)
    words, by_sequence = word_table(table, sequences), sequence_table(table, sequences)
    digits, mixed = digit_table(table, sequences)
    return TokenizationTables(
        tok_token=table,
        tok_word=words,
        tok_seq=by_sequence,
        tok_summary=summary_table(by_sequence, words, cluster=cluster),
        tok_clip=_clip(run_dir, iteration, config, table, tokens),
        digit_table=digits,
        mixed_numbers=mixed,
    )


def _clip(
    run_dir: Path | str, iteration: int, config: RunConfig, table: pd.DataFrame, tokens: pd.DataFrame
) -> pd.DataFrame | None:
    objective = config.ppo.objective
    if isinstance(objective, ClipObjective):
        low, high = objective.clip_range, objective.high
    elif isinstance(objective, AdaptiveClipObjective):
        (low,) = reader.read_iterations(run_dir, iterations=[iteration], columns=["clip_range"])["clip_range"]
        high = low
    else:
        return None
    updates = reader.read_updates(run_dir, iterations=[iteration], columns=UPDATE_COLUMNS)
    anchor = tokens[f"{config.ppo.ratio_anchor}_logprobs"]
    return clip_table(word_ratios(table, anchor, updates, clip_low=low, clip_high=high))


def run_summary(
    run_dir: Path | str, *, boundary: Boundary, cluster: Cluster, iterations: Sequence[int] | None
) -> pd.DataFrame:
    """`tok_summary` of these iterations (None: all), concatenated; UserError as `iteration_tables`."""
    chosen = chosen_iterations(run_dir, iterations)
    tables = [iteration_tables(run_dir, i, boundary=boundary, cluster=cluster).tok_summary for i in chosen]
    return pd.concat(tables, ignore_index=True)


def run_drift(
    run_dir: Path | str, tokenizer: RecordedTokenizer, *, iterations: Sequence[int] | None = None
) -> pd.DataFrame:
    """`drift_summary` of these iterations (None: all), one row each; UserError as `retokenization`."""
    rows = []
    for iteration in chosen_iterations(run_dir, iterations):
        sequences = reader.read_sequences(run_dir, iterations=[iteration], columns=AUDIT_COLUMNS)
        rows.append({"iteration": iteration, **drift_summary(retokenization(sequences, tokenizer))})
    return pd.DataFrame(rows)


def credit_line(config: RunConfig, tokens_per_char: float) -> str:
    """How far a reward at the end of a response reaches back."""
    advantages = config.advantages
    if not isinstance(advantages, GaeAdvantages):
        return "credit: advantages without GAE: every token gets the score of its response"
    gamma, gae_lambda = advantages.gamma, advantages.gae_lambda
    in_tokens, matched = (
        half_life_tokens(gamma, gae_lambda),
        char_matched_lambda(gamma, gae_lambda, tokens_per_char, 1.0),
    )
    return (
        f"credit: gamma {gamma:g}, lambda {gae_lambda:g}: half life {in_tokens:.4g} tokens, "
        f"{in_tokens / tokens_per_char:.4g} characters; the same decay per character with one token for each: "
        f"lambda {matched:.6g}"
    )


def report(run_dir: Path, iteration: int | None, boundary: Boundary, cluster: Cluster) -> list[str]:
    """The printed lines of one iteration (None: the last); UserError as `iteration_tables`."""
    number = len(reader.open_manifest(run_dir).iterations) - 1 if iteration is None else iteration
    tables = iteration_tables(run_dir, number, boundary=boundary, cluster=cluster)
    drift = run_drift(run_dir, recorded_tokenizer(run_dir), iterations=[number])
    (fertility,) = tables.tok_summary.query("metric == 'tokens' and unit == 'char'")["value"]
    lines = [f"{run_dir}: iteration {number}, boundary {boundary}, nats, standard errors by {cluster}"]
    lines.append(tables.tok_summary.drop(columns="iteration").to_string(index=False, float_format="%.6g"))
    if tables.tok_clip is not None:
        lines += ["", "clip band", tables.tok_clip.to_string(index=False, float_format="%.4g")]
    lines += ["", f"numbers ({tables.mixed_numbers} with other text in a token)"]
    lines.append(tables.digit_table.head(8).to_string(index=False, float_format="%.4g"))
    lines += ["", "encode(decode(ids))", drift.to_string(index=False, float_format="%.4g")]
    return [*lines, "", credit_line(load_recorded_config(run_dir), float(fertility))]


@program
def main(argv: Sequence[str] | None) -> None:
    """Print the tables of one iteration; exit code 2 and one line on a user error."""
    parser = Parser(
        prog="python -m analysis.tokenization",
        description="KL and entropy of a run per sequence, token, word, char and byte",
    )
    parser.add_argument("run", type=Path, help="folder of a recorded run")
    parser.add_argument("--iteration", type=int, help="default: the last one")
    parser.add_argument(
        "--boundary",
        required=True,
        choices=BOUNDARIES,
        help="whether white space belongs to the word after or before it",
    )
    parser.add_argument(
        "--cluster", choices=("sequence", "prompt"), default="sequence", help="clusters of the standard errors"
    )
    arguments = parser.parse_args(argv)
    tell("\n".join(report(arguments.run, arguments.iteration, arguments.boundary, arguments.cluster)))
