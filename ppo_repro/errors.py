"""The errors a user can meet, one class per exit code."""


class UserError(Exception):
    """What the user wrote or pointed at is wrong; one line, nothing was changed. Exit code 2."""


class PromiseBroken(Exception):
    """Something this project promises did not hold. Exit code 1."""


class NumericsError(PromiseBroken):
    """A number left the range in which the exact numerics are exact, or is not finite."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM; ends a run as Ctrl-C does. Exit code 143."""
