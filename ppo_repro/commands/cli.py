"""The command line: errors in one line each, exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ppo_repro import interrupts
from ppo_repro.commands.arguments import build_parser
from ppo_repro.commands.memory import OUT_OF_MEMORY
from ppo_repro.commands.runs import fork_command, processes, rerun_command, resume_command, run_command
from ppo_repro.errors import Mistakes, PromiseBroken, RankLost, Terminated, UserError, is_out_of_memory
from ppo_repro.output import one_line, prepare_streams, say


def _say_mistakes(error: UserError) -> None:
    lines = error.lines if isinstance(error, Mistakes) else (str(error),)
    for line in lines:
        say(f"error: {one_line(UserError(line))}")


def _run(argv: Sequence[str]) -> int:
    try:
        interrupts.install()
        if sys.stdout is None:
            raise UserError("stdout is closed; use `> /dev/null` where no output is wanted")
        try:
            arguments = build_parser().parse_args(argv or ["--help"])
        except SystemExit:  # after --help and --version
            return 0
        if processes()[1] > 1 and arguments.command not in (run_command, fork_command, rerun_command, resume_command):
            raise UserError(
                "only run, fork, rerun and resume work in several processes; start this command without torchrun"
            )
        return int(arguments.command(arguments))
    except UserError as error:
        _say_mistakes(error)
        return 2
    except (MemoryError, RuntimeError, OSError) as error:
        if is_out_of_memory(error):
            say(f"error: {OUT_OF_MEMORY}")
        elif isinstance(error, OSError) and isinstance(error.filename, str):
            say(f"error: {one_line(UserError(f'{error.filename}: cannot be used ({error.strerror})'))}")
        else:
            raise
        return 2
    except RankLost as error:
        say(f"stopped: {one_line(error)}")
        return 3
    except PromiseBroken as error:
        say(f"promise broken: {one_line(error)}")
        return 1
    except Terminated as error:
        say(f"terminated{_what_is_kept(error)}")
        return 143
    except KeyboardInterrupt as error:
        say(f"interrupted{_what_is_kept(error)}")
        return 130


def _what_is_kept(error: KeyboardInterrupt) -> str:
    return f"; {one_line(error)}" if str(error) else ""


def main() -> None:
    """Entry point. Exit 0 done, 1 a promise did not hold, 2 what the user wrote is wrong, 3 a process of the run was
    lost, 130 Ctrl-C, 143 SIGTERM."""
    prepare_streams()
    code = _run(sys.argv[1:])
    if "ppo_repro.ranks" in sys.modules:  # only commands that imported torch have it
        from ppo_repro.ranks import end_process

        end_process(code)
    sys.exit(code)
