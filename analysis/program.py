"""Run the command line of an experiment; an error is one line on stderr and an exit code, as with `ppo-repro`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path

import pandas as pd
import pyarrow as pa

from ppo_repro.base.errors import UserError, is_out_of_memory
from ppo_repro.base.output import one_line, prepare_streams, say


def program(work: Callable[[Sequence[str] | None], None]) -> Callable[..., int]:
    """Return `work` as the main function of a program, which returns an exit code and prints each error as one line.

    The exit code is 0 if the work is done or the reader of stdout has gone, 2 if an input is wrong, and 130 after
    Ctrl-C. `work` receives the arguments (None: the arguments of the process), parses them with `Parser`, and prints
    with `tell`; both are in `ppo_repro.base.output`.
    """

    @wraps(work)
    def main(argv: Sequence[str] | None = None) -> int:
        prepare_streams()
        try:
            if sys.stdout is None:
                raise UserError("stdout is closed; use `> /dev/null` if no output is wanted")
            work(argv)
        except SystemExit:  # after --help
            return 0
        except KeyboardInterrupt:
            say("interrupted")
            return 130
        except UserError as error:
            say(f"error: {one_line(error)}")
            return 2
        except (MemoryError, RuntimeError, OSError, ValueError) as error:
            if (mistake := _mistake(error)) is None:
                raise
            say(f"error: {one_line(mistake)}")
            return 2
        return 0

    return main


def _mistake(error: Exception) -> UserError | None:
    """Return an error of memory or files as a message to the user; None for a fault of this code."""
    if is_out_of_memory(error):
        return UserError("memory: too little for this; close other programs, or take a smaller run")
    if isinstance(error, OSError) and isinstance(error.filename, str):
        return UserError(f"{error.filename}: cannot be used ({error.strerror}); check the path and its permissions")
    return None


def read_table(path: Path) -> pd.DataFrame:
    """Read a Parquet file that is not a table of a run. Raises UserError if that fails."""
    try:
        return pd.read_parquet(path)
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read ({reason}); give a whole Parquet file") from error
