"""An analysis as a program: what goes wrong is one line on stderr and an exit code, as with `ppo-repro`.

Also the tables it reads, where a recorded run's own reader is not the one that tells what is wrong.
"""

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
    """The same function for `sys.exit`: 0 done, also where nobody reads on; 2 what the user wrote is wrong; 130 Ctrl-C.

    `work` gets the arguments (None: those of the process), parses them with `Parser` of `ppo_repro.base.output`, and
    prints with `tell` from there.
    """

    @wraps(work)
    def main(argv: Sequence[str] | None = None) -> int:
        prepare_streams()
        try:
            if sys.stdout is None:
                raise UserError("stdout is closed; use `> /dev/null` where no output is wanted")
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
    """Say what a user can do about an error of the system; None where it is one of this code."""
    if is_out_of_memory(error):
        return UserError("memory: too little for this; close other programs, or take a smaller run")
    if isinstance(error, OSError) and isinstance(error.filename, str):
        return UserError(f"{error.filename}: cannot be used ({error.strerror}); check the path and its permissions")
    return None


def read_table(path: Path) -> pd.DataFrame:
    """Return a Parquet file; UserError where it cannot be read."""
    try:
        return pd.read_parquet(path)
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read ({reason}); give a whole Parquet file") from error
