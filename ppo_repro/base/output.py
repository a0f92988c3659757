"""The output of a command: on stdout lines for people or one JSON object, on stderr mistakes; never a password.

Every text is escaped when it is printed, so that file names, models and users' functions cannot control a terminal.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from ppo_repro.base.errors import UserError

SECONDS_TO_SPEAK = 2  # torchrun ends all processes when one ends: the one that prints the mistake ends first
LONGEST_LINE = 1000  # characters of an error
_SHOWN = 100  # characters of a text in a message
LIKE = 0.65  # share of letters in common from which one word may be meant by another
# matches `user:password@` or `token@`; a password may have slashes, but digits and a slash are a port and a path
_LOGIN = re.compile(r"(?<=\w:)//(?:[^\s/]{1,500}|[^\s/@:]{0,500}:(?!\d+/)\S{1,500})@")
_PARAMETER = re.compile(
    r"([?&;](?:password|passwd|pwd|secret|token|access_token|api_key)=)[^\s&;\"'\\]+", re.IGNORECASE
)
_OPTION_NAME = r"--(?:[\w-]{0,50}[-_])?(?:api[-_]key|password|passwd|secret|token)"
# matches `--api-key VALUE`, `--api-key=VALUE`, and both as words of a list
_OPTION = re.compile(rf"({_OPTION_NAME}(?:=|[\"']?,?\s+[\"']?))[^\s\"',\]]+", re.IGNORECASE)


def tell(text: str, end: str = "\n", secrets: bool = False) -> None:
    """Print text on stdout at once. Raises UserError if that fails.

    Prints nothing if the reader is gone, as after `| head -1`. `secrets` prints the values that `masked` hides.
    """
    try:
        print(visible(text if secrets else masked(text)), end=end, flush=True)
    except BrokenPipeError:
        _discard(sys.stdout)
    except OSError as error:
        _discard(sys.stdout)
        raise UserError(
            f"stdout: cannot be written ({error.strerror}); what was computed and recorded is kept"
        ) from error


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong command line on one line, like every other mistake."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; try {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            allowed = list(map(str, action.choices))
            meant = did_you_mean(str(value), allowed)
            raise argparse.ArgumentError(action, f"{value!r} must be one of {', '.join(allowed)}{meant}")

    def _print_message(self, message: str, file: Any = None) -> None:
        tell(message, end="")  # argparse itself is silent where the help cannot be written


def print_json(value: dict[str, Any]) -> None:
    """Print an object on one line: NaN and infinities as words, unprintable characters as JSON escapes."""
    line = json.dumps(finite(value), ensure_ascii=False, allow_nan=False)
    tell("".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line))


def print_result(as_json: bool, value: dict[str, Any], lines: Sequence[str]) -> None:
    """Print `value` as JSON or, unless `as_json`, print `lines` as text."""
    if as_json:
        print_json(value)
    else:
        tell("\n".join(lines))


def visible(text: str) -> str:
    """Return the text with the characters that control a terminal escaped, except line ends and tabs."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)


def printable(text: str) -> str:
    """Return the text on one line, with the characters that control a terminal escaped."""
    line = " ".join(text.splitlines())
    return "".join(c if c.isprintable() else _escaped(c) for c in line)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def shown(text: str, longest: int = _SHOWN) -> str:
    """Return a user's text for a message: on one line, a long text cut."""
    return printable(text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)")


def type_and_message(error: BaseException) -> str:
    """Return type and message of an error on one line: a message may be empty, or only the name of a missing key."""
    name, message = type(error).__name__, " ".join(str(error).split())
    return f"{name}: {shown(message, 4 * _SHOWN)}" if message else name


def size(count: int) -> str:
    """Return a number of bytes in decimal units, such as `1.2 GB`."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


def finite(value: Any) -> Any:
    """Return the value with NaN and infinities replaced by words, because JSON has no numbers for them."""
    if isinstance(value, dict):
        return {key: finite(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [finite(child) for child in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def speaks() -> bool:
    """Return whether this process prints: it is the only process of a run, or a launcher numbered it 0."""
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return not (rank.isdecimal() and size.isdecimal() and 0 < int(rank) < int(size))


def say_here(line: str) -> None:
    """Print one line on stderr; of several processes on a machine, only the first one prints."""
    if speaks() or os.environ.get("LOCAL_RANK") == "0":
        say_anyway(line)


def say(line: str) -> None:
    """Print one line on stderr; if a run has several processes, only the first one prints."""
    if speaks():
        say_anyway(line)


def say_anyway(line: str) -> None:
    """Print one line on stderr from any process. A line that cannot be printed is dropped and does not end the run."""
    try:
        print(printable(masked(line)), file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line; a long message loses its middle."""
    text = printable(str(error))
    if len(text) <= LONGEST_LINE:
        return text
    half = LONGEST_LINE // 2  # the field is named at the start, what to do at the end
    return f"{text[:half]} [... {len(text) - 2 * half} more characters ...] {text[-half:]}"


def prepare_streams() -> None:
    """Make stdout and stderr usable for any text. A closed stream is opened on the null device.

    Otherwise the next file that is opened would get the stream's number, and a library's prints would go into that
    file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _discard(stream: TextIO) -> None:
    """Send the remaining output of a stream, its unwritten buffer included, to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def did_you_mean(word: str, allowed: Sequence[str]) -> str:
    """Return `; did you mean X?` if an allowed word is close to `word`, else an empty text."""
    close = closest(word, allowed)
    return f"; did you mean {close}?" if close else ""


def closest(word: str, allowed: Sequence[str], like: float = LIKE) -> str | None:
    """Return the allowed word most like `word`; None if no word has at least the similarity `like` (0 to 1)."""
    folded = {name.lower().replace("-", "_"): name for name in allowed}
    matches = difflib.get_close_matches(word.lower().replace("-", "_"), folded, n=1, cutoff=like)
    return folded[matches[0]] if matches else None


def has_password(text: str) -> bool:
    """Return whether the text contains a URI that logs in, or an option whose value is a secret."""
    return masked(text) != text


def masked(text: str) -> str:
    """Return the text with `***` in place of the login in every URI and the value of every secret option."""
    return _OPTION.sub(r"\1***", _PARAMETER.sub(r"\1***", _LOGIN.sub("//***@", text)))
