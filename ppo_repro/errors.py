"""The errors a user can see, by exit code."""


class UserError(Exception):
    """Wrong input or files of the user; one line, what is complete stays. Exit code 2."""


class PromiseBroken(Exception):
    """A guarantee of this project did not hold. Exit code 1."""


class NumericsError(UserError):
    """A number is not finite, or outside the range in which the exact numerics are exact: settings led there."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM; ends a run as Ctrl-C does. Exit code 143."""


class RankLost(KeyboardInterrupt):
    """Another process of this run is gone or does not answer; ends a run as Ctrl-C does. Exit code 3."""
