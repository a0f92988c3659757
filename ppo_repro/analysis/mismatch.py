"""Do two log-probs of the same token agree? Tables for a run or for dumps of other stacks.

`ppo-repro analyse mismatch RUN` prints the summary of a run. `--columns PRESET` reads dumped files instead of a run.
`--remedies` prints what truncation, masking and rejection would have done. One iteration is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppo_repro.analysis.mismatch_buckets import Buckets, bucket_sums
from ppo_repro.analysis.pairs import NO_TOKEN, PAIRS, imported_pairs, iteration_of, masked_tokens, run_pairs
from ppo_repro.analysis.remedies import remedy_table
from ppo_repro.base.errors import UserError
from ppo_repro.base.latest import run_named
from ppo_repro.base.output import Parser, tell
from ppo_repro.statistics.mismatch import METRICS, MismatchSums, merged_sums, metric_table, mismatch_sums, with_mismatch
from ppo_repro.testing.dumps import FORMATS


@dataclass(frozen=True)
class IterationMismatch:
    """Sums of one iteration: `merged_sums` and `metric_table` take `sums`, `bucket_table` takes `buckets`."""

    iteration: int
    sums: MismatchSums
    buckets: Buckets


def mismatch_by_iteration(pairs: Iterable[pd.DataFrame]) -> Iterator[IterationMismatch]:
    """Yield the sums of each chunk of pairs (`run_pairs`). Raises UserError if a chunk cannot be read."""
    for chunk in pairs:
        tokens = with_mismatch(chunk)
        yield IterationMismatch(iteration_of(chunk), mismatch_sums(tokens, masked_tokens(chunk)), bucket_sums(tokens))


def mismatch_table(iterations: Iterable[IterationMismatch]) -> pd.DataFrame:
    """Return `metric_table` of each iteration, below each other; the first column is the iteration.

    Raises UserError if there is no token.
    """
    tables = [metric_table(one.sums).assign(iteration=one.iteration) for one in iterations]
    if not tables:
        raise UserError(NO_TOKEN)
    return pd.concat(tables).set_index("iteration").reset_index()


def mismatch_summary(pairs: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Return METRICS of pairs beside their ideal values.

    Columns: metric, reduction, value, se (clustered by response, NaN if undefined), ideal, meaning. KL and differences
    of log-probs are in nats. Raises UserError if there is no token.
    """
    parts = [mismatch_sums(with_mismatch(chunk), masked_tokens(chunk)) for chunk in pairs]
    if not parts:
        raise UserError(NO_TOKEN)
    ideal = pd.Series([metric.ideal for metric in METRICS], dtype="float64")
    explained = metric_table(merged_sums(parts)).assign(ideal=ideal, meaning=[metric.meaning for metric in METRICS])
    return explained[["metric", "reduction", "value", "se", "ideal", "meaning"]]


def main(argv: Sequence[str]) -> None:
    """Print the summary or the remedies."""
    parser = Parser(prog="ppo-repro analyse mismatch", description="Do two log-probs agree?")
    parser.add_argument("paths", nargs="+", type=run_named, help="a run, or files with --columns")
    parser.add_argument("--pair", choices=PAIRS, help=f"which log-probs of one run ({PAIRS[0]})")
    parser.add_argument("--columns", choices=FORMATS, help="the stack whose column names the files have")
    parser.add_argument("--remedies", action="store_true", help="what each published remedy would have done instead")
    arguments = parser.parse_args(argv)
    pairs = _chosen_pairs(arguments.paths, arguments.pair, arguments.columns)
    table = remedy_table(pairs) if arguments.remedies else mismatch_summary(pairs)
    tell(table.to_string(index=False, na_rep="", float_format=lambda x: f"{x:.6g}"))


def _chosen_pairs(paths: Sequence[Path], pair: str | None, columns: str | None) -> Iterator[pd.DataFrame]:
    """Return the pairs to compare. Raises UserError for an option that would change nothing."""
    if columns is not None:
        if pair is not None:
            raise UserError(f"--pair {pair}: is for recorded runs, --columns for files of other stacks; leave one out")
        return imported_pairs(paths, columns)
    if len(paths) > 1:
        raise UserError(
            f"{len(paths)} paths: give one run, or files with --columns; `ppo-repro analyse compare` takes two runs"
        )
    return run_pairs(paths[0], pair or PAIRS[0])
