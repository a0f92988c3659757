"""Ctrl-C and SIGTERM end a command with their exit code, also if a library makes another exception of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from ppo_repro.base import interrupts
from ppo_repro.base.errors import Terminated
from ppo_repro.commands import cli


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_is_raised_at_once(number: int, expected: type[BaseException]) -> None:
    interrupts.install()
    with pytest.raises(expected) as at_once:
        signal.raise_signal(number)
    assert at_once.type is expected


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (None, None)])
def test_an_exception_after_a_signal_is_the_interrupt(
    number: int | None, code: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(argv: list[str]) -> int:
        try:
            if number is not None:
                signal.raise_signal(number)
        except KeyboardInterrupt:
            pass
        raise ImportError("as torch's import does")

    monkeypatch.setattr(cli, "_command", command)
    if code is None:  # the control: without a signal it is a fault of ours
        with pytest.raises(ImportError):
            cli.exit_code_of([])
        return
    assert cli.exit_code_of([]) == code
    assert capsys.readouterr().err in ("interrupted\n", "terminated\n")


def test_a_process_that_is_to_ignore_ctrl_c_ignores_it() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for what it starts in the background
    interrupts.install()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
