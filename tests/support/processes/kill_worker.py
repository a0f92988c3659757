"""A process that has imported and compiled everything, and forks children which run or resume, to be killed.

Reads lines `SECONDS run CONFIG OUT` and `SECONDS resume RUN`, kills the child after so many seconds (inf: never), and
says with which code it ended.
"""

from __future__ import annotations

import contextlib
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


def main() -> None:
    """Until stdin ends."""
    for line in sys.stdin:
        seconds, command = line.split(maxsplit=1)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os._exit(work(command))
            os._exit(1)
        if math.isfinite(float(seconds)):
            time.sleep(float(seconds))
            os.kill(child, signal.SIGKILL)  # not reaped yet, so the number is still this child's
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    work(sys.argv[1])  # so that everything is imported and compiled
    print("ready", flush=True)
    main()
