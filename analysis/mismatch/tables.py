"""Do two log-probs of the same token agree, and where not? Tables of it, for a run or for files of other stacks.

`python -m analysis.mismatch RUN` prints the summary of a run, `--columns PRESET` that of dumped files.
Chunks of pairs (`analysis.pairs.runs`) go through sums that are merged, so memory does not grow with the run.
"""

from __future__ import annotations

import argparse
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

from analysis.mismatch import bucket as mismatch_bucket
from analysis.mismatch import correction as mismatch_correction
from analysis.mismatch import sums
from analysis.mismatch.bucket import BucketSums
from analysis.mismatch.correction import USUAL, Correction, CorrectionSums
from analysis.mismatch.metrics import update_table
from analysis.mismatch.sequence import DIVERGENCE_TAU, USUAL_BOUNDS, Bounds, mismatch_sequence
from analysis.mismatch.sums import MismatchSums
from analysis.mismatch.token import mismatch_token
from analysis.pairs.files import PRESETS, imported_pairs
from analysis.pairs.runs import PAIRS, iteration_of, masked_tokens, run_pairs, two_run_pairs
from ppo_repro.errors import UserError
from ppo_repro.records import reader

# metric, reduction, ideal value, what it says
IMPORTANT = (
    ("n_tokens", "count", None, "tokens compared"),
    ("n_masked", "count", None, "tokens that a mask took out"),
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
    """The long tables: `update` (see `update_table`), `bucket`, `correction`; the iteration is the first column."""

    update: pd.DataFrame
    bucket: pd.DataFrame
    correction: pd.DataFrame


def measure(pairs: Iterable[pd.DataFrame], corrections: Sequence[Correction] = USUAL) -> Iterator[Measured]:
    """The sums of every iteration, handed out when it ends; chunks hold whole sequences of one iteration in order."""
    current: Measured | None = None
    for chunk in pairs:
        found = _measure_chunk(chunk, corrections)
        if current is None or found.iteration == current.iteration:
            current = found if current is None else merge(current, found)
        else:
            yield current
            current = found
    if current is not None:
        yield current


def _measure_chunk(chunk: pd.DataFrame, corrections: Sequence[Correction]) -> Measured:
    tokens = mismatch_token(chunk)
    return Measured(
        iteration=iteration_of(chunk),
        mismatch=sums.mismatch_sums(tokens, masked_tokens(chunk)),
        buckets=mismatch_bucket.bucket_sums(tokens),
        corrections=mismatch_correction.correction_sums(tokens, corrections),
    )


def merge(a: Measured, b: Measured) -> Measured:
    """The sums over the sequences of both, under the iteration of the first."""
    return Measured(
        a.iteration,
        sums.merge(a.mismatch, b.mismatch),
        mismatch_bucket.merge_buckets(a.buckets, b.buckets),
        mismatch_correction.merge_corrections(a.corrections, b.corrections),
    )


def tables(measured: Iterable[Measured], labels: Mapping[str, str] | None = None) -> Tables:
    """The tables of all iterations, one below the other; raises UserError where there is no token.

    `labels`, such as {"run": ..., "pair": ...}, become the first columns, so that tables of several runs can be joined.
    """
    update, bucket, correction = [], [], []
    for one in measured:
        update.append(_with_iteration(update_table(one.mismatch), one.iteration))
        bucket.append(_with_iteration(mismatch_bucket.bucket_table(one.buckets), one.iteration))
        correction.append(_with_iteration(mismatch_correction.correction_table(one.corrections), one.iteration))
    if not update:
        raise UserError("there is no token to compare; give a run or a file with responses")
    joined = [pd.concat(parts, ignore_index=True) for parts in (update, bucket, correction)]
    for table in joined:
        for place, (name, label) in enumerate((labels or {}).items()):
            table.insert(place, name, label)
    return Tables(*joined)


def _with_iteration(table: pd.DataFrame, iteration: int) -> pd.DataFrame:
    table.insert(0, "iteration", iteration)
    return table


def whole(measured: Iterable[Measured]) -> Measured:
    """The sums of all iterations, as iteration -1; raises UserError where there is no token."""
    parts = iter(measured)
    first = next(parts, None)
    if first is None:
        raise UserError("there is no token to compare; give a run or a file with responses")
    return replace(reduce(merge, parts, first), iteration=-1)


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
        raise UserError(f"{target}: exists already; choose another name")
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
        raise UserError(
            f"{target}: cannot be written ({error.strerror or error}); make room or choose another"
        ) from error
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
    verify: reader.Verification = "contents",
) -> pd.DataFrame:
    """The most important metrics of a whole run beside their ideal values; see `summary_of`."""
    return summary_of(run_pairs(run_dir, pair, iterations=iterations, verify=verify))


def summary_of(pairs: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """metric, reduction, value, se (clustered by response; NaN where there is none), ideal, meaning."""
    chunks = (sums.mismatch_sums(mismatch_token(chunk), masked_tokens(chunk)) for chunk in pairs)
    first = next(chunks, None)
    if first is None:
        raise UserError("there is no token to compare; give a run or a file with responses")
    found = update_table(reduce(sums.merge, chunks, first)).set_index(["metric", "reduction"])
    rows = [
        (metric, reduction, *found.loc[(metric, reduction), ["value", "se"]], ideal, meaning)
        for metric, reduction, ideal, meaning in IMPORTANT
    ]
    table = pd.DataFrame(rows, columns=["metric", "reduction", "value", "se", "ideal", "meaning"])
    return table.astype({"value": "float64", "se": "float64", "ideal": "float64"})


def watched(pairs: Iterable[pd.DataFrame], advance: Callable[[int], None]) -> Iterator[pd.DataFrame]:
    """The same chunks; `advance` is told the tokens of each when the next one is asked for."""
    for chunk in pairs:
        yield chunk
        advance(len(chunk))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the summary; exit code 2 and one line where the arguments or the records are wrong."""
    parser = argparse.ArgumentParser(prog="python -m analysis.mismatch", description="Do two log-probs agree?")
    parser.add_argument("paths", nargs="+", type=Path, help="a run, two runs, or files with --columns")
    parser.add_argument("--pair", choices=PAIRS, default=PAIRS[0], help="which log-probs of a run")
    parser.add_argument("--columns", choices=sorted(PRESETS), help="whose names the columns of dumped files have")
    parser.add_argument("--pages", action="store_true", help="check the pages read instead of whole files: faster")
    chosen = parser.parse_args(arguments)
    try:
        pairs = _chosen_pairs(chosen.paths, chosen.pair, chosen.columns, "pages" if chosen.pages else "contents")
        with Progress(
            TextColumn("{task.completed:,} tokens"), TimeElapsedColumn(), console=Console(stderr=True)
        ) as bar:
            task = bar.add_task("", total=None)
            table = summary_of(watched(pairs, lambda tokens: bar.advance(task, tokens)))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(table.to_string(index=False, na_rep="", float_format=lambda x: f"{x:.6g}"))
    return 0


def _chosen_pairs(
    paths: Sequence[Path], pair: str, columns: str | None, verify: reader.Verification
) -> Iterator[pd.DataFrame]:
    if columns is not None:
        return imported_pairs(paths, columns)
    if len(paths) == 2:
        return two_run_pairs(paths[0], paths[1], verify=verify)
    if len(paths) > 2:
        raise UserError(f"{len(paths)} paths: one run or two, or files with --columns")
    return run_pairs(paths[0], pair, verify=verify)
