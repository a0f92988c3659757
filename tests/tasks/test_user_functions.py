"""The user's functions: what they may return, how their mistakes are named, and that they leave no trace."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.errors import Terminated, UserError
from ppo_repro.tasks import containment, process_state
from ppo_repro.tasks.containment import contained
from ppo_repro.tasks.user_functions import (
    Texts,
    UserFunction,
    check_repeats,
    described,
    load,
    number,
    numbers,
    parse,
)

ROWS = [Texts("k1", "p1", "r1", "a1"), Texts("k2", "p2", "r2", "a2")]
SIGNATURE = "def f(prompt, response, answer):\n    "


def loaded(tmp_path: Path, text: str) -> UserFunction:
    (tmp_path / "r.py").write_text(text, encoding="utf-8")
    return load("reward.terms.0.path", f"{tmp_path / 'r.py'}:f")


def refusal(tmp_path: Path, text: str) -> str:
    """The message of the UserError that loading the file and calling its function give."""
    with pytest.raises(UserError) as caught:
        numbers(loaded(tmp_path, text), ROWS)
    message = str(caught.value)
    assert message.startswith(f"reward.terms.0.path: {tmp_path}/r.py:") and message.isprintable()
    return message.removeprefix(f"reward.terms.0.path: {tmp_path}/r.py:")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (-0.5, -0.5),
        (2**53, 2.0**53),
        (Fraction(1, 4), 0.25),
        (Decimal("0.5"), 0.5),
        (np.bool_(True), 1.0),
        (np.int32(-7), -7.0),
        (np.float16(0.1), 0.0999755859375),
        (np.float32(0.1), 0.10000000149011612),
        (np.longdouble("0.5"), 0.5),
        (np.array(2.5), 2.5),
        (torch.tensor(0.1), 0.10000000149011612),
        (torch.tensor(True), 1.0),
        (torch.tensor(3), 3.0),
        (torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True), 1.5),
        (3.4028234663852886e38, 3.4028234663852886e38),
    ],
)
def test_numbers_that_a_float_is_exactly_are_scores(value: Any, expected: float) -> None:
    found = number(value)
    assert type(found) is float and found == expected


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_every_finite_float32_is_a_score(value: float) -> None:
    assert number(value) == number(np.float32(value)) == number(torch.tensor(value)) == value


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("None", "None"),
        ("'1'", "'1' of type str"),
        ("float('nan')", "nan of type float"),
        ("float('inf')", "inf of type float"),
        ("-float('inf')", "-inf of type float"),
        ("1e39", "1e+39 of type float"),
        ("-3.5e38", "-3.5e+38 of type float"),
        ("10**400", "an int of 1329 bits"),
        ("2**53 + 1", "9007199254740993 of type int, which no float64 is exactly"),
        ("Fraction(1, 3)", "Fraction(1, 3) of type Fraction, which no float64 is exactly"),
        ("Decimal('0.1')", "Decimal('0.1') of type Decimal, which no float64 is exactly"),
        ("Decimal('NaN')", "Decimal('NaN') of type Decimal"),
        ("Decimal('sNaN')", "Decimal('sNaN') of type Decimal"),
        ("1j", "1j of type complex"),
        ("[1.0]", "[1.0] of type list"),
        ("np.array([1.0])", "a ndarray of shape (1,)"),
        ("torch.zeros(2, 1)", "a Tensor of shape (2, 1)"),
        ("torch.tensor(float('nan'))", "tensor(nan) of type Tensor"),
        ("np.float64('inf')", "np.float64(inf) of type float64"),
        ("'x' * 300", "'" + "x" * 99 + "... (302 characters) of type str"),
        ("'\\x1b[2J'", "'\\x1b[2J' of type str"),
    ],
)
def test_everything_else_is_refused_by_value_and_type(tmp_path: Path, value: str, shown: str) -> None:
    header = "import numpy as np, torch\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
    found = refusal(tmp_path, f"{header}{SIGNATURE}return {value}")
    expected = f"the function returned {shown} for prompt key 'k1'; must be a finite number within float32 (3.4e+38)"
    assert found == f"4: {expected}"


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("return {'a': 1.0}[prompt]", "KeyError: 'p1'"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import sys; sys.exit('bye')", "SystemExit: bye"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("from ppo_repro.errors import Terminated; raise Terminated", "Terminated"),
        ("raise MemoryError", "MemoryError"),
        ("raise ValueError('one\\ntwo \\x1b[31mred\\x07 \\u202e')", r"ValueError: one two \x1b[31mred\x07 \u202e"),
        ("raise ValueError('y' * 500)", "ValueError: " + "y" * 100 + "... (500 characters)"),
    ],
)
def test_whatever_a_function_raises_is_named_with_file_line_and_prompt_key(
    tmp_path: Path, statement: str, reason: str
) -> None:
    found = refusal(tmp_path, f"# a line\n{SIGNATURE}{statement}")
    assert found == f"3: the function raised {reason}; prompt key 'k1'"


def test_the_line_is_the_users_own_and_the_key_that_of_the_prompt(tmp_path: Path) -> None:
    text = f"import json\n\n{SIGNATURE}if prompt == 'p2':\n        json.loads('{{')\n    return 1.0"
    assert refusal(tmp_path, text).startswith("5: the function raised JSONDecodeError: ")
    assert refusal(tmp_path, text).endswith("; prompt key 'k2'")


def test_an_error_whose_message_cannot_be_made_is_named_by_its_type(tmp_path: Path) -> None:
    text = f"class E(Exception):\n    def __str__(self): raise SystemExit\n{SIGNATURE}raise E"
    assert refusal(tmp_path, text) == "4: the function raised E; prompt key 'k1'"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nimport no_such_module_anywhere", "2 fails to load (ModuleNotFoundError: No module named"),
        ("x = 1\n\ndef f(:", "3 fails to load (SyntaxError: invalid syntax"),
        ("\n1 / 0", "2 fails to load (ZeroDivisionError: division by zero)"),
        ("import sys\nsys.exit(0)", "2 fails to load (SystemExit: 0)"),
        ("raise KeyboardInterrupt", "1 fails to load (KeyboardInterrupt)"),
        ("x = '\\x1b]0;t'\nraise ValueError(x)", r"2 fails to load (ValueError: \x1b]0;t)"),
        ("def __getattr__(name): raise OSError('no')", "1 fails to load (OSError: no)"),
        ("# a\ndef f(prompt): return 1.0", "2: f cannot be called with prompt, response, answer (too many positional"),
        ("def f(a, b, c, d): return 1.0", "1: f cannot be called with prompt, response, answer (missing a required"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_where_it_is_loaded(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        loaded(tmp_path, text)
    found = str(caught.value)
    assert found.startswith(f"reward.terms.0.path: {tmp_path}/r.py:{message}") and found.isprintable()


def test_the_present_text_of_a_file_is_executed_not_a_compiled_one(tmp_path: Path) -> None:
    for value in ("1.0", "2.0"):
        assert numbers(loaded(tmp_path, f"{SIGNATURE}return {value}"), ROWS) == [float(value)] * 2
        os.utime(tmp_path / "r.py", (1e9, 1e9))  # two texts of one size and one time
    assert not list(tmp_path.rglob("*.pyc"))


# each changes the process for everybody; the name says how one sees it
CHANGES = {
    "folder": "os.chdir('/')",
    "variable": "os.environ['PPO_REPRO_X'] = '1'; os.environ.pop('PATH', None)",
    "dtype": "torch.set_default_dtype(torch.float64)",
    "device": "torch.set_default_device('meta')",
    "grad": "torch.set_grad_enabled(False)",
    "threads": "torch.set_num_threads(torch.get_num_threads() + 1)",
    "deterministic": "torch.use_deterministic_algorithms(True, warn_only=True)",
    "autocast": "torch.set_autocast_enabled('cpu', True)",
    "denormals": "torch.set_flush_denormal(True)",
    "precision": "torch.set_float32_matmul_precision('medium')",
    "newer precision": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "numpy errors": "np.seterr(all='raise')",
    "handler": "signal.signal(signal.SIGALRM, lambda *_: None); signal.signal(signal.SIGINT, signal.SIG_IGN)",
    "python seed": "random.seed(1)",
    "numpy seed": "np.random.seed(1)",
    "torch seed": "torch.manual_seed(1)",
}
IMPORTS = "import os, random, signal, sys, warnings\nimport numpy as np, torch\n"


def observed() -> list[Any]:
    """What the tests can see of the process, without the code they test."""
    return [
        os.getcwd(),
        dict(os.environ),
        torch.get_default_dtype(),
        torch.empty(1).device.type,
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_autocast_enabled("cpu"),
        repr(
            (torch.tensor([1e-310], dtype=torch.float64, device="cpu") * 1.0).tolist()
        ),  # as numbers they would be equal
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
        np.geterr(),
        signal.getsignal(signal.SIGALRM),
        signal.getsignal(signal.SIGINT),
        warnings.filters[:],
        random.getstate(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002
        torch.get_rng_state().tolist(),
    ]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_file_or_a_call_changes_in_the_process_is_put_back(tmp_path: Path, change: str) -> None:
    before = observed()
    assert numbers(loaded(tmp_path, f"{IMPORTS}{change}\n{SIGNATURE}return 1.0"), ROWS) == [1.0, 1.0]
    assert observed() == before, "by loading"
    function = loaded(tmp_path, f"{IMPORTS}{SIGNATURE}{change}; return 1.0")
    assert numbers(function, ROWS) == [1.0, 1.0] and observed() == before, "by a call"
    with pytest.raises(UserError, match="SystemExit"):
        numbers(loaded(tmp_path, f"{IMPORTS}{SIGNATURE}{change}; sys.exit(1)"), ROWS)
    assert observed() == before, "by a call that ends in an exception"


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_control_sees_every_change(change: str) -> None:
    """The same changes without containment: what the test above compares would differ."""
    state, before = process_state.read(), observed()
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        exec(IMPORTS + change)
        assert observed() != before
    finally:
        process_state.write(state)
        signal.signal(signal.SIGINT, interrupt)
    assert observed() == before


def test_a_function_is_called_in_the_state_its_file_left(tmp_path: Path) -> None:
    """Put back for everybody else, it would compute something else than the file says."""
    change = "torch.set_default_dtype(torch.float64); os.environ['PPO_REPRO_X'] = '3'; os.chdir('/')"
    body = "return torch.tensor(0.1) + int(os.environ['PPO_REPRO_X']) + (os.getcwd() == '/')"
    for _ in range(2):
        assert numbers(loaded(tmp_path, f"{IMPORTS}{change}\n{SIGNATURE}{body}"), ROWS) == [4.1, 4.1]


def test_a_folder_that_a_file_entered_and_that_is_gone_is_one_line(tmp_path: Path) -> None:
    gone, here = tmp_path / "gone", os.getcwd()
    gone.mkdir()
    function = loaded(tmp_path, f"import os\nos.chdir({str(gone)!r})\n{SIGNATURE}return 1.0")
    gone.rmdir()
    with pytest.raises(UserError, match=r"gone: cannot be the current directory any more \(No such file"):
        numbers(function, ROWS)
    assert os.getcwd() == here


def test_what_is_printed_goes_to_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = (
        "print('{0} print'); sys.__stdout__.write('{0} kept '); os.write(1, b'{0} raw'); os.system('echo {0} program')"
    )
    text = f"{IMPORTS}{said.format('file')}\n{SIGNATURE}{said.format('call')}; return 1.0"
    print("before")
    numbers(loaded(tmp_path, text), ROWS[:1])
    print("after")
    out, err = capfd.readouterr()
    assert out.split() == ["before", "after"]
    for part in ("file print", "file kept", "file raw", "file program", "call print", "call program"):
        assert part in err


@pytest.mark.parametrize("swallow", ["except BaseException: pass", "finally: pass"])
@pytest.mark.parametrize(("number", "raised"), [("SIGINT", KeyboardInterrupt), ("SIGTERM", Terminated)])
def test_ctrl_c_and_sigterm_get_out_also_of_code_that_catches_everything(
    tmp_path: Path, swallow: str, number: str, raised: type[BaseException]
) -> None:
    from ppo_repro import interrupts

    body = (
        f"try:\n        signal.raise_signal(signal.{number}); import time; time.sleep(5)\n    {swallow}\n    return 0.0"
    )
    function = loaded(tmp_path, f"{IMPORTS}{SIGNATURE}{body}")
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupts.install()
        installed = signal.getsignal(signal.SIGTERM)
        with pytest.raises(raised):
            numbers(function, ROWS)
        assert signal.getsignal(signal.SIGTERM) is installed
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


def test_a_handler_that_gives_its_place_to_another_one_keeps_that(tmp_path: Path) -> None:
    """As of several processes: the first Ctrl-C is noted for the next exchange, the second one raises at once."""

    def first(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.getsignal(signal.SIGINT)
    try:
        for times in (1, 2):
            signal.signal(signal.SIGINT, first)
            function = loaded(
                tmp_path, f"{IMPORTS}{SIGNATURE}[signal.raise_signal(2) for _ in range({times})]; return 1"
            )
            if times == 1:
                assert numbers(function, ROWS[:1]) == [1.0]
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            else:
                with pytest.raises(KeyboardInterrupt):
                    numbers(function, ROWS[:1])
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_alarm_that_a_call_leaves_behind_does_not_end_the_process() -> None:
    running = signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, 0)  # that of a test's own time limit
    try:
        with contained():
            signal.alarm(1000)
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *running)


def _spin() -> float:
    while True:
        pass


def _sleep() -> float:
    time.sleep(1000)
    return 0.0


def _catch_it_twice() -> float:
    for _ in range(2):
        with suppress(BaseException):
            _spin()
    return 0.0


@pytest.mark.parametrize("function", [_spin, _sleep, _catch_it_twice])
def test_a_call_without_end_is_ended_by_its_time_limit(
    function: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containment, "_AGAIN_SECONDS", 0.05)
    before, threads = signal.getsignal(signal.SIGVTALRM), threading.active_count()
    with contained() as inside, pytest.raises(UserError, match=r"^TookTooLong: no answer within 0\.05 s$"):
        inside.call(function, described, 0.05)
    assert signal.getsignal(signal.SIGVTALRM) is before and threading.active_count() == threads
    with contained() as inside:
        assert inside.call(lambda: 7, described, 1000) == 7, "a call within its limit is not disturbed"
    assert threading.active_count() == threads


def test_another_thread_can_call_a_function(tmp_path: Path) -> None:
    function, found = loaded(tmp_path, f"{SIGNATURE}return len(prompt)"), []
    thread = threading.Thread(target=lambda: found.extend(numbers(function, ROWS)))
    thread.start()
    thread.join()
    assert found == [2.0, 2.0]


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("import random", "return random.random()"),
        ("import random\nrandom.seed(0)", "return random.random()"),
        ("import numpy as np", "return np.random.rand()"),
        ("import torch", "return torch.rand(())"),
        ("calls = []", "calls.append(0); return len(calls)"),
        ("import time", "return time.perf_counter()"),
        ("last = [None]", "before, last[0] = last[0], response; return float(before == response)"),
    ],
)
def test_a_function_with_two_scores_for_one_input_is_refused(tmp_path: Path, header: str, body: str) -> None:
    function = loaded(tmp_path, f"{header}\n{SIGNATURE}{body}\n")
    with pytest.raises(UserError) as caught:
        check_repeats(function, ROWS)
    found = re.fullmatch(
        r"reward\.terms\.0\.path: \S+/r\.py:\d+: the function returned (\S+) and then (\S+) for the same input "
        r"\(prompt key 'k\d', response 'r\d'\); a score must follow from prompt, response and answer alone",
        str(caught.value),
    )
    assert found is not None and float(found[1]) != float(found[2])


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("", "return len(response)"),
        ("import random", "return random.Random(prompt).random()"),
        ("import torch", "torch.manual_seed(0); return torch.rand(())"),
        ("known = {}", "return known.setdefault(response, len(prompt))"),
    ],
)
def test_a_function_of_its_input_is_not_refused(tmp_path: Path, header: str, body: str) -> None:
    check_repeats(loaded(tmp_path, f"{header}\n{SIGNATURE}{body}\n"), ROWS)


def test_a_file_that_is_not_there_or_not_named_is_refused(tmp_path: Path) -> None:
    for name in ("exact", "r.py", "r.py:1f"):
        with pytest.raises(UserError, match=re.escape(f"reward.terms.0.path = {name!r}: must be FILE.py:FUNCTION")):
            parse("reward.terms.0.path", name)
