"""Implement `ppo-repro analyse mismatch`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pandas as pd

from ppo_repro.analysis.mismatch import mismatch_summary
from ppo_repro.analysis.run_pairs import PAIRS, run_pairs
from ppo_repro.base.errors import UserError
from ppo_repro.base.latest import run_named
from ppo_repro.base.output import print_result
from ppo_repro.testing.dump_files import SUFFIXES
from ppo_repro.testing.dump_formats import FORMATS
from ppo_repro.testing.pairs import imported_pairs


def add_options(option: Callable[..., argparse.Action]) -> None:
    """Add the options of the command."""
    option("paths", nargs="+", type=run_named, help="a run, or files of another stack")
    option("--pair", choices=PAIRS, help=f"which log-probs of one run are compared ({PAIRS[0]})")
    option("--format", choices=FORMATS, help="the stack that wrote the files (default: told from their columns)")
    option("--remedies", action="store_true", help="what each published remedy would have done instead")


def command(arguments: argparse.Namespace) -> None:
    """Print how far apart two log-probs of the same tokens are, in a run or in a dump of another stack."""
    pairs = _chosen_pairs(arguments.paths, arguments.pair, arguments.format)
    if arguments.remedies:
        from ppo_repro.analysis.remedies import remedy_table  # imports torch, which takes seconds

        name, table = "remedies", remedy_table(pairs)
    else:
        name, table = "metrics", mismatch_summary(pairs)
    text = table.to_string(index=False, na_rep="", float_format=lambda x: f"{x:.6g}")
    print_result(arguments.json, {name: table.to_dict("records")}, [text])


def _chosen_pairs(paths: Sequence[Path], pair: str | None, form: str | None) -> Iterator[pd.DataFrame]:
    """Return the pairs to compare. Raises UserError for an option that would change nothing."""
    if form is not None or any(path.is_file() or path.suffix in SUFFIXES for path in paths):
        if pair is not None:
            raise UserError(f"--pair {pair}: is for recorded runs, not for files of other stacks; leave it out")
        return imported_pairs(paths, form)
    if len(paths) > 1:
        raise UserError(
            f"{len(paths)} folders: give one run, or files of another stack; `ppo-repro analyse compare` takes two runs"
        )
    return run_pairs(paths[0], pair or PAIRS[0])
