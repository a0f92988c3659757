"""Execute a command line, with errors in one line each and exit codes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from ppo_repro.base import interrupts
from ppo_repro.base.errors import PromiseBroken, RankLost, Terminated, UserError, mistakes_in
from ppo_repro.base.output import SECONDS_TO_SPEAK, one_line, prepare_streams, say, say_here, speaks
from ppo_repro.base.processes import processes
from ppo_repro.base.program import refused, require_stdout
from ppo_repro.commands.arguments import build_parser
from ppo_repro.commands.runs import fork_command, rerun_command, resume_command, run_command
from ppo_repro.user.file import described, raised_by_user


def exit_code_of(argv: Sequence[str]) -> int:
    """Execute a command line, print an error as one line on stderr, and return the exit code."""
    try:
        interrupts.install()
        return _command(argv)
    except KeyboardInterrupt as error:
        return _interrupted(error)
    except Exception as error:
        interrupt = interrupts.was_heard()
        return _failed(error) if interrupt is None else _interrupted(interrupt)


def _command(argv: Sequence[str]) -> int:
    require_stdout()
    try:
        arguments = build_parser().parse_args(argv or ["--help"])
    except SystemExit:  # after --help and --version
        return 0
    if processes()[1] > 1 and arguments.command not in (run_command, fork_command, rerun_command, resume_command):
        raise UserError("only run, fork, rerun and resume work in several processes; start this without torchrun")
    return int(arguments.command(arguments))


def _failed(error: Exception) -> int:
    """Print a line for each mistake and return the exit code; raise `error` if it is a fault of this package."""
    if isinstance(error, PromiseBroken):
        say(f"promise broken: {one_line(error)}")
        return 1
    lines = mistakes_in(error)
    if not lines and (place := raised_by_user(error)) is not None:  # in a backward pass or a thread: no guarded call
        lines = (f"{place}: raised {described(error)}",)
    if not lines:
        raise error
    return refused(lines)


def _interrupted(error: KeyboardInterrupt) -> int:
    """Print the cause of an interruption and the command to resume; return the exit code."""
    if isinstance(error, RankLost):
        say_here(f"stopped: {one_line(error)}")
        return RankLost.EXIT_CODE
    is_terminated = isinstance(error, Terminated)
    say(f"{'terminated' if is_terminated else 'interrupted'}{f'; {one_line(error)}' if str(error) else ''}")
    return 143 if is_terminated else 130


def main() -> None:
    """Execute the command line of this process.

    Exit codes: 0 done, 1 broken promise, 2 wrong input, 3 lost process, 130 Ctrl-C, 143 SIGTERM.
    """
    prepare_streams()
    code = exit_code_of(sys.argv[1:])
    if code == 2 and not speaks():
        interrupts.ending()
        time.sleep(SECONDS_TO_SPEAK)
    if "ppo_repro.base.ranks" in sys.modules:  # only commands that imported torch have it
        from ppo_repro.base.ranks import end_process

        end_process(code)
    sys.exit(code)
