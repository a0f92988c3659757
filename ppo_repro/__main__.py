"""The process of a command: no signal finds it where the command line cannot answer."""

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    """Hold signals while modules are imported, and leave them alone once the command has ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    _leave_out_the_current_folder()
    from ppo_repro.base import interrupts
    from ppo_repro.commands import cli

    try:
        cli.main()
    except KeyboardInterrupt:  # one more, while the first was answered
        sys.exit(130)
    finally:
        interrupts.leave_alone()


def _leave_out_the_current_folder() -> None:
    """Forget the folder that `python -m` looks in first: what is found must not depend on how a command is started.

    It stays where this package itself is found there.
    """
    first, here = sys.path[0], os.getcwd()
    if not sys.flags.safe_path and first in ("", here) and Path(__file__).parents[1] != Path(here):
        del sys.path[0]


if __name__ == "__main__":
    main()
