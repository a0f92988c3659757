"""A run under the published keys of eight frameworks: `python -m analysis.dialects.report RUN`, or `--definitions`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.clipping.update_rows import IterationRows, load_iterations
from analysis.dialects import cleanrl, nemo_rl, openrlhf, prime_rl, slime, tinker, trl, verl, verl_rollout_corr
from analysis.dialects.definition import Definition
from analysis.program import program
from analysis.words import explained
from ppo_repro.errors import UserError
from ppo_repro.output import Parser, tell

KEYS = ("iteration", "epoch", "minibatch")


@dataclass(frozen=True)
class Dialect:
    """A framework: the definitions of its keys, and the functions that compute them from one iteration."""

    name: str
    definitions: tuple[Definition, ...]
    functions: tuple[Callable[[IterationRows], pd.DataFrame], ...]


DIALECTS = (
    Dialect("CleanRL", cleanrl.DEFINITIONS, (cleanrl.metrics,)),
    Dialect("TRL", trl.DEFINITIONS, (trl.ppo_metrics, trl.grpo_metrics, trl.sampling_metrics)),
    Dialect("verl", (*verl.DEFINITIONS, *verl_rollout_corr.DEFINITIONS), (verl.metrics, verl_rollout_corr.metrics)),
    Dialect("slime", slime.DEFINITIONS, (slime.metrics, slime.value_metrics)),
    Dialect("OpenRLHF", openrlhf.DEFINITIONS, (openrlhf.metrics,)),
    Dialect("NeMo-RL", nemo_rl.DEFINITIONS, (nemo_rl.metrics,)),
    Dialect("tinker-cookbook", tinker.DEFINITIONS, (tinker.metrics,)),
    Dialect("prime-rl", prime_rl.DEFINITIONS, (prime_rl.metrics,)),
)


def definitions() -> pd.DataFrame:
    """One row per published key: framework, key, formula, anchor, reduction, difference, is_derived, source, words.

    `in_words` explains the terms that occur in reduction and difference.
    """
    rows = []
    for dialect in DIALECTS:
        for definition in dialect.definitions:
            rows.append(
                {
                    "framework": dialect.name,
                    "key": definition.key,
                    "formula": definition.formula,
                    "anchor": definition.anchor,
                    "reduction": definition.reduction,
                    "difference": definition.difference,
                    "is_derived": definition.is_derived,
                    "repository": definition.source.repository,
                    "path": definition.source.path,
                    "commit": definition.source.commit,
                    "in_words": explained(f"{definition.reduction}; {definition.difference}"),
                }
            )
    return pd.DataFrame(rows)


def long_table(
    run_dir: Path | str, *, iterations: Sequence[int] | None = None, band: tuple[float, float] | None = None
) -> pd.DataFrame:
    """framework, key, iteration, epoch, minibatch, value; epoch and minibatch are null for keys of an iteration.

    Raises UserError where records are missing, or where nothing is clipped and there is no band.
    """
    parts = []
    for item in load_iterations(run_dir, iterations=iterations, band=band):
        for dialect in DIALECTS:
            for function in dialect.functions:
                table = function(item)
                by = [name for name in KEYS if name in table]
                melted = table.melt(id_vars=by, var_name="key", value_name="value")
                for name in ("epoch", "minibatch"):
                    column = melted[name] if name in melted else pd.Series(pd.NA, index=melted.index)
                    melted[name] = column.astype("Int64")
                parts.append(melted.assign(framework=dialect.name))
    return pd.concat(parts, ignore_index=True)[["framework", "key", *KEYS, "value"]]


@program
def main(argv: Sequence[str] | None) -> None:
    """Print each key's mean over the run, or the definitions of the keys; exit code 2 on a user error."""
    parser = Parser(
        prog="python -m analysis.dialects.report", description="a run under the published keys of other frameworks"
    )
    parser.add_argument("run", type=Path, nargs="?", help="folder of a run")
    parser.add_argument("--definitions", action="store_true", help="what each key means, with its source")
    parser.add_argument("--clip-range", type=float, nargs=2, metavar=("LOW", "HIGH"), help="in place of the run's own")
    arguments = parser.parse_args(argv)
    if arguments.definitions == (arguments.run is not None):
        parser.error("give either a run or --definitions")
    if arguments.definitions:
        if arguments.clip_range is not None:
            raise UserError("--clip-range: changes no definition; leave it out, or give a run")
        tell(definitions().to_csv(index=False, sep="\t"), end="")
        return
    band = None if arguments.clip_range is None else (arguments.clip_range[0], arguments.clip_range[1])
    table = long_table(arguments.run, band=band)
    means = table.groupby(["framework", "key"], sort=False)["value"].agg(["first", "mean", "last"])
    tell(means.to_string(float_format=lambda x: f"{x:.4g}"))


if __name__ == "__main__":
    sys.exit(main())
