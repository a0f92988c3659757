"""The entry point of `python -m ppo_repro`, which holds signals back until the command line can handle them."""

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    """Hold signals while modules are imported, run the command, and stop handling signals after it."""
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
    """Remove the folder that `python -m` puts first into the import path, so that every start finds the same modules.

    The folder stays if this package itself is in it.
    """
    first, here = sys.path[0], os.getcwd()
    if not sys.flags.safe_path and first in ("", here) and Path(__file__).parents[1] != Path(here):
        del sys.path[0]


if __name__ == "__main__":
    main()
