"""The process of a command: no signal finds it where the command line cannot answer."""

import signal
import sys


def main() -> None:
    """Hold signals while modules are imported, and leave them alone once the command has ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    from ppo_repro.base import interrupts
    from ppo_repro.commands import cli

    try:
        cli.main()
    except KeyboardInterrupt:  # one more, while the first was answered
        sys.exit(130)
    finally:
        interrupts.leave_alone()


if __name__ == "__main__":
    main()
