"""A signal at the begin of a command, and after its end: at no moment a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.interrupts import hearing_ctrl_c
from tests.support.paths import ROOT

# a signal while the module is imported that parses arguments, two of which the second comes as the first is answered,
# or one when the interpreter is about to end
A_COMMAND = """
import atexit, runpy, signal, sys

number = signal.Signals[sys.argv[2]]

def at_the_import(event, arguments):
    if event == "import" and arguments[0] == "argparse":
        signal.raise_signal(number)

class AtTheAnswer:
    def write(self, text):
        sys.stderr = sys.__stderr__
        signal.raise_signal(number)

    def flush(self):
        pass

if sys.argv[1] == "begins":
    sys.addaudithook(at_the_import)
if sys.argv[1] == "again":
    from ppo_repro.commands import cli
    cli.build_parser = lambda: signal.raise_signal(number)
    sys.stderr = AtTheAnswer()
if sys.argv[1] == "ends":
    atexit.register(signal.raise_signal, number)
way = sys.argv[3]
sys.argv = ["ppo-repro", "--version"]
if way == "process":
    runpy.run_module("ppo_repro", run_name="__main__")
else:
    from ppo_repro.commands import cli
    cli.main()
"""


def a_command(moment: str, number: signal.Signals, way: str, folder: Path) -> tuple[int, str]:
    command = [sys.executable, "-c", A_COMMAND, moment, number.name, way]
    with hearing_ctrl_c():
        found = subprocess.run(
            command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False
        )
    return found.returncode, found.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "terminated\n")]
)
def test_a_signal_before_a_command_can_answer_is_answered(
    number: signal.Signals, code: int, said: str, tmp_path: Path
) -> None:
    assert a_command("begins", number, "process", tmp_path) == (code, said)


@pytest.mark.slow
def test_a_signal_after_the_last_word_of_a_command_ends_it_without_one(tmp_path: Path) -> None:
    assert a_command("ends", signal.SIGINT, "process", tmp_path) == (-signal.SIGINT, "")


@pytest.mark.slow
def test_a_second_ctrl_c_is_no_more_than_the_first(tmp_path: Path) -> None:
    assert a_command("again", signal.SIGINT, "process", tmp_path) == (130, "")


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["begins", "again", "ends"])
def test_without_the_process_of_commands_there_is_a_traceback(moment: str, tmp_path: Path) -> None:
    assert "Traceback" in a_command(moment, signal.SIGINT, "function", tmp_path)[1]
