"""Do two log-probs of the same token agree, and where not? Tables for a run or for files of other stacks.

`python -m analysis.mismatch RUN` prints the summary of a run, `--columns PRESET` that of dumped files; `--remedies`
what truncation, masking and rejection would have done.
Chunks of pairs (`analysis.pairs.runs`) are reduced to sums that are merged, so memory does not grow with the run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from analysis.mismatch.bucket import BucketSums, bucket_sums, bucket_table, merge_buckets
from analysis.mismatch.correction import (
    USUAL,
    Correction,
    CorrectionSums,
    correction_sums,
    correction_table,
    merge_corrections,
)
from analysis.mismatch.metrics import update_table
from analysis.mismatch.remedies import remedy_table
from analysis.mismatch.sequence import DIVERGENCE_TAU, USUAL_BOUNDS, Bounds, mismatch_sequence
from analysis.mismatch.sums import MismatchSums, merge_sums, mismatch_sums
from analysis.mismatch.token import mismatch_token
from analysis.pairs.files import PRESETS, imported_pairs
from analysis.pairs.runs import PAIRS, iteration_of, masked_tokens, run_pairs, two_run_pairs
from analysis.program import program, unwritable
from ppo_repro.errors import UserError
from ppo_repro.output import Parser, tell

# metric, reduction, ideal value, what it says
IMPORTANT = (
    ("n_tokens", "count", None, "tokens compared"),
    ("n_masked", "count", None, "tokens that a mask removed"),
    ("n_nonfinite", "count", 0.0, "tokens with an infinite or NaN log-prob, left out below"),
    ("frac_bitwise_equal", "token_mean", 1.0, "log-probs equal in every bit"),
    ("frac_diverged", "seq", 0.0, "responses with an unequal token"),
    ("ulp_p99", "token", 0.0, "float32 steps between the two, where |log-prob| > 0.01"),
    ("ulp_max", "token", 0.0, ""),
    ("abs_mean", "token_mean", 0.0, "|delta|, nats; delta = b - a"),
    ("abs_p99", "token", 0.0, ""),
    ("abs_max", "token", 0.0, ""),
    ("prob_abs_mean", "token_mean", 0.0, "difference of probabilities"),
    ("prob_abs_max", "token", 0.0, ""),
    ("pearson_prob_gap", "token", 0.0, "1 - correlation of probabilities"),
    ("k1", "token_mean", 0.0, "KL(a || b), nats per token, signed estimator"),
    ("k3", "token_mean", 0.0, "KL(a || b), nats per token, never negative"),
    ("k3", "seq_mean_token_sum", 0.0, "KL(a || b), nats per response"),
    ("kl_pg_nonneg", "token_mean", 0.0, "KL(b || a), nats per token"),
    ("tv", "token_mean", 0.0, "total variation"),
    ("mult_err", "token_mean", 1.0, "mean of exp |delta|"),
    ("rho_mean", "token_mean", 1.0, "mean of rho = exp(delta)"),
    ("rho_min", "token", 1.0, ""),
    ("rho_max", "token", 1.0, ""),
    ("ess_frac", "token", 1.0, "effective sample size of the weights rho, share of tokens"),
    ("ess_seq", "seq", 1.0, "the same of products over responses, share of responses"),
    ("chi2_seq", "seq", 0.0, "chi-squared of products over responses"),
    ("log_ppl_abs_diff", "seq_mean", 0.0, "|log perplexity difference| of a response"),
)


@dataclass(frozen=True)
class Measured:
    """The sums of one iteration, or of a run (iteration -1)."""

    iteration: int
    mismatch: MismatchSums
    buckets: dict[str, BucketSums]
    corrections: dict[Correction, CorrectionSums]


@dataclass(frozen=True)
class Tables:
    """The long tables `update` (see `update_table`), `bucket` and `correction`; the first column is the iteration."""

    update: pd.DataFrame
    bucket: pd.DataFrame
    correction: pd.DataFrame


def measure(pairs: Iterable[pd.DataFrame], corrections: Sequence[Correction] = USUAL) -> Iterator[Measured]:
    """The sums of every iteration, yielded when it ends; a chunk holds whole sequences of one iteration, in order.

    Reading the chunks raises what `run_pairs` does, UserError where records are missing or damaged.
    """
    current: Measured | None = None
    for chunk in pairs:
        sums_of_chunk = _measure_chunk(chunk, corrections)
        if current is None or sums_of_chunk.iteration == current.iteration:
            current = sums_of_chunk if current is None else merge(current, sums_of_chunk)
        else:
            yield current
            current = sums_of_chunk
    if current is not None:
        yield current


def _measure_chunk(chunk: pd.DataFrame, corrections: Sequence[Correction]) -> Measured:
    tokens = mismatch_token(chunk)
    return Measured(
        iteration=iteration_of(chunk),
        mismatch=mismatch_sums(tokens, masked_tokens(chunk)),
        buckets=bucket_sums(tokens),
        corrections=correction_sums(tokens, corrections),
    )


def merge(a: Measured, b: Measured) -> Measured:
    """The sums over the sequences of both, under the iteration of the first."""
    return Measured(
        a.iteration,
        merge_sums(a.mismatch, b.mismatch),
        merge_buckets(a.buckets, b.buckets),
        merge_corrections(a.corrections, b.corrections),
    )


def tables(measured: Iterable[Measured], labels: Mapping[str, str] | None = None) -> Tables:
    """The tables of all iterations, concatenated; raises UserError where there is no token.

    `labels`, such as {"run": ..., "pair": ...}, become the first columns, so that tables of several runs can be joined.
    """
    update, bucket, correction = [], [], []
    for sums in measured:
        update.append(_with_iteration(update_table(sums.mismatch), sums.iteration))
        bucket.append(_with_iteration(bucket_table(sums.buckets), sums.iteration))
        correction.append(_with_iteration(correction_table(sums.corrections), sums.iteration))
    if not update:
        raise UserError("there is no token to compare; give a run or a file with responses")
    tables_of_run = [pd.concat(frames, ignore_index=True) for frames in (update, bucket, correction)]
    for table in tables_of_run:
        for index, (name, label) in enumerate((labels or {}).items()):
            table.insert(index, name, label)
    return Tables(*tables_of_run)


def _with_iteration(table: pd.DataFrame, iteration: int) -> pd.DataFrame:
    table.insert(0, "iteration", iteration)
    return table


def whole(measured: Iterable[Measured]) -> Measured:
    """The sums of all iterations, as iteration -1; raises UserError where there is no token."""
    remaining = iter(measured)
    first = next(remaining, None)
    if first is None:
        raise UserError("there is no token to compare; give a run or a file with responses")
    return replace(reduce(merge, remaining, first), iteration=-1)


def token_tables(pairs: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """`mismatch_token` of every chunk."""
    return map(mismatch_token, pairs)


def sequence_tables(
    pairs: Iterable[pd.DataFrame], bounds: Bounds = USUAL_BOUNDS, divergence_tau: float = DIVERGENCE_TAU
) -> Iterator[pd.DataFrame]:
    """`mismatch_sequence` of every chunk."""
    return (mismatch_sequence(mismatch_token(chunk), bounds, divergence_tau) for chunk in pairs)


def write_parquet(frames: Iterable[pd.DataFrame], path: Path | str) -> int:
    """Write the frames to one file as they come, in zstd; the number of rows.

    Raises UserError where the file exists, where there is no frame, and where it cannot be written.
    """
    target = Path(path)
    rows, writer = 0, None
    if target.exists():
        raise UserError(f"{target}: already exists; choose another name")
    temporary = target.with_name(target.name + ".tmp")
    try:
        for frame in frames:
            data = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
            writer = writer or pq.ParquetWriter(temporary, data.schema, compression="zstd", write_page_checksum=True)
            writer.write_table(data)
            rows += len(frame)
        if writer is None:
            raise UserError(f"{target}: there is nothing to write")
        writer.close()
        temporary.rename(target)
    except OSError as error:
        raise unwritable(target, error) from error
    finally:
        if writer is not None:
            writer.close()
        temporary.unlink(missing_ok=True)
    return rows


def summary(
    run_dir: Path | str,
    pair: str = "rollout_vs_old",
    *,
    iterations: Sequence[int] | None = None,
) -> pd.DataFrame:
    """The most important metrics of a whole run beside their ideal values, see `summary_of`; UserError as `run_pairs`.

    KL and differences of log-probs are in nats.
    """
    return summary_of(run_pairs(run_dir, pair, iterations=iterations))


def summary_of(pairs: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """metric, reduction, value, se (clustered by response; NaN where there is none), ideal, meaning."""
    chunks = (mismatch_sums(mismatch_token(chunk), masked_tokens(chunk)) for chunk in pairs)
    first = next(chunks, None)
    if first is None:
        raise UserError("there is no token to compare; give a run or a file with responses")
    metrics = update_table(reduce(merge_sums, chunks, first)).set_index(["metric", "reduction"])
    rows = [
        (metric, reduction, *metrics.loc[(metric, reduction), ["value", "se"]], ideal, meaning)
        for metric, reduction, ideal, meaning in IMPORTANT
    ]
    table = pd.DataFrame(rows, columns=["metric", "reduction", "value", "se", "ideal", "meaning"])
    return table.astype({"value": "float64", "se": "float64", "ideal": "float64"})


def watched(pairs: Iterable[pd.DataFrame], advance: Callable[[int], None]) -> Iterator[pd.DataFrame]:
    """The same chunks; `advance` gets the number of tokens of each chunk when the next one is requested."""
    for chunk in pairs:
        yield chunk
        advance(len(chunk))


@program
def main(argv: Sequence[str] | None) -> None:
    """Print the summary; exit code 2 and one line where the arguments or the records are wrong."""
    parser = Parser(prog="python -m analysis.mismatch", description="Do two log-probs agree?")
    parser.add_argument("paths", nargs="+", type=Path, help="a run, two runs, or files with --columns")
    parser.add_argument("--pair", choices=PAIRS, help=f"which log-probs of one run ({PAIRS[0]})")
    parser.add_argument("--columns", choices=sorted(PRESETS), help="the stack whose column names the files have")
    parser.add_argument("--remedies", action="store_true", help="what each published remedy would have done instead")
    arguments = parser.parse_args(argv)
    pairs = _chosen_pairs(arguments.paths, arguments.pair, arguments.columns)
    shown = TextColumn("{task.completed:,} tokens"), TimeElapsedColumn()
    # nobody watches a file, and one that is full would end the analysis
    with Progress(*shown, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None)
        seen = watched(pairs, lambda tokens: bar.advance(task, tokens))
        table = remedy_table(seen) if arguments.remedies else summary_of(seen)
    tell(table.to_string(index=False, na_rep="", float_format=lambda x: f"{x:.6g}"))


def _chosen_pairs(paths: Sequence[Path], pair: str | None, columns: str | None) -> Iterator[pd.DataFrame]:
    """What is compared; UserError for an option that would change nothing."""
    if columns is not None:
        if pair is not None:
            option = f"--pair {pair}"
            raise UserError(f"{option}: is for recorded runs, --columns for files of other stacks; leave one out")
        return imported_pairs(paths, columns)
    if len(paths) > 2:
        raise UserError(f"{len(paths)} paths: one run or two, or files with --columns")
    if len(paths) == 2:
        if pair is not None:
            raise UserError(f"--pair {pair}: is for one run; two are compared by their old_logprobs; leave it out")
        return two_run_pairs(paths[0], paths[1])
    return run_pairs(paths[0], pair or PAIRS[0])
