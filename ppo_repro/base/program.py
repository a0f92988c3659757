"""Run a program of `experiments/` like a command of `ppo-repro`: an error is one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps

from ppo_repro.base.errors import UserError, mistakes_in
from ppo_repro.base.output import one_line, prepare_streams, say


def program(work: Callable[[Sequence[str] | None], None]) -> Callable[..., int]:
    """Return `work` as the main function of a program, which returns an exit code and prints each error as one line.

    The exit code is 0 if the work is done or the reader of stdout has gone, 2 if an input is wrong, and 130 after
    Ctrl-C. `work` receives the arguments (None: the arguments of the process), parses them with `Parser`, and prints
    with `tell`. Both are in `ppo_repro.base.output`.
    """

    @wraps(work)
    def main(argv: Sequence[str] | None = None) -> int:
        prepare_streams()
        try:
            require_stdout()
            work(argv)
        except SystemExit:  # after --help
            return 0
        except KeyboardInterrupt:
            say("interrupted")
            return 130
        except Exception as error:
            if not (lines := mistakes_in(error)):
                raise
            return refused(lines)
        return 0

    return main


def require_stdout() -> None:
    """Raise UserError if stdout is closed."""
    if sys.stdout is None:
        raise UserError("stdout is closed; use `> /dev/null` if no output is wanted")


def refused(lines: Sequence[str]) -> int:
    """Print a line for each mistake of the user and return the exit code 2."""
    for line in lines:
        say(f"error: {one_line(UserError(line))}")
    return 2
