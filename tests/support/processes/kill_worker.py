"""A process that has imported and compiled everything, and forks children which run or resume, to be killed.

Reads lines `SECONDS run CONFIG OUT` and `SECONDS resume RUN`, kills the child after so many seconds (inf: never), and
says with which code it ended. With `writes.c` preloaded, `at:N` in place of the seconds kills it instead of the N-th
change below OUT or RUN, and `count` says first how many changes there were.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from ppo_repro.config.files import load_config
from ppo_repro.errors import UserError
from ppo_repro.watcher import Silent
from tests.support.language import resume, run


def work(line: str) -> int:
    """The exit code of one command."""
    command, *arguments = line.split()
    try:
        if command == "run":
            run(load_config(Path(arguments[0])), Path(arguments[1]), Silent())
        else:
            resume(Path(arguments[0]), Silent())
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        return 2
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def observed(when: str, command: str) -> int:
    """The exit code of a command that is killed at a change, or whose changes are counted."""
    library, folder = ctypes.CDLL(None), command.split()[-1]
    library.writes_watch(folder.encode(), ctypes.c_long(int(when.removeprefix("at:")) if when != "count" else -1))
    code = work(command)
    if when == "count":
        print(library.writes_count(), flush=True)
    return code


def main() -> None:
    """Until stdin ends."""
    for line in sys.stdin:
        when, command = line.split(maxsplit=1)
        is_timed = not when.startswith(("at:", "count"))
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os._exit(work(command) if is_timed else observed(when, command))
            os._exit(1)
        if is_timed and math.isfinite(float(when)):
            time.sleep(float(when))
            os.kill(child, signal.SIGKILL)  # not reaped yet, so the number is still this child's
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    work(sys.argv[1])  # so that everything is imported and compiled
    print("ready", flush=True)
    main()
