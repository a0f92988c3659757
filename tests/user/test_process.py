"""The user's functions: what they may return, how their mistakes are named, and that none of them costs a run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.base.errors import UserError
from ppo_repro.config.tasks import CalledReward, FunctionReward, TrlReward, VerlReward
from ppo_repro.tasks.problems import Problem, row_of
from ppo_repro.user import process
from ppo_repro.user.process import UserFunction, UserProcess, check_alone, check_repeats, load_reward
from tests.support.paths import ROOT
from tests.support.waiting import require_ended

FIELD = "reward.terms.0.path"
OF_FUNCTION = FunctionReward(kind="function", path="r.py:f")


def row(key: str, prompt: str, response: str, answer: str, fields: str = "{}", **more: Any) -> dict[str, Any]:
    problem = Problem(key, prompt, answer, fields)
    return row_of(problem, more.get("turns", [response]), response, more.get("full_text", ""))


ROWS = [row("k1", "p1", "r1", "a1"), row("k2", "p2", "r2", "a2")]
SIGNATURE = "def f(prompt, response, answer):\n    "


def loaded(folder: Path, text: str, term: CalledReward = OF_FUNCTION, name: str = "f") -> UserFunction:
    (folder / "r.py").write_text(text, encoding="utf-8")
    return load_reward(UserProcess(), FIELD, term.model_copy(update={"path": f"{folder / 'r.py'}:{name}"}))


def refusal(function: UserFunction, rows: list[dict[str, Any]] = ROWS) -> str:
    """The UserError of a call, without field and file."""
    with pytest.raises(UserError) as caught:
        function(rows)
    message, start = str(caught.value), f"{FIELD}: {function.file}:"
    assert message.startswith(start)
    assert message.isprintable()
    return message.removeprefix(start)


@pytest.fixture(scope="module")
def evaluating(tmp_path_factory: pytest.TempPathFactory) -> UserFunction:
    """A function that executes the text of a response, in one process for all tests of this file."""
    head = "import os, signal, sys, threading\nimport numpy as np, torch\nfrom decimal import Decimal\n"
    head += "from fractions import Fraction\n\n"
    return loaded(tmp_path_factory.mktemp("eval"), f"{head}{SIGNATURE}return eval(response)")


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1))
def test_every_finite_float32_arrives_bit_for_bit(evaluating: UserFunction, values: list[float]) -> None:
    found = evaluating([row("k", "p", repr(value), "a") for value in values])
    assert np.array_equal(np.array(found).view(np.int64), np.array(values).view(np.int64))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("None", "None of type NoneType"),
        ("float('nan')", "nan of type float"),
        ("1e39", "1e+39 of type float"),
        ("10**400", "1" + "0" * 99 + "... (401 characters) of type int"),
        ("Decimal('sNaN')", "Decimal('sNaN') of type Decimal"),
        ("[1.0]", "[1.0] of type list"),
        ("np.array([1.0])", "array([1.]) of type ndarray and shape (1,)"),
        ("torch.ones(2)", "tensor([1., 1.]) of type Tensor and shape (2,)"),
        ("'x' * 300", "'" + "x" * 99 + "... (302 characters) of type str"),
    ],
)
def test_everything_else_is_refused_by_value_and_type(evaluating: UserFunction, value: str, shown: str) -> None:
    expected = f"f returned {shown}; must be a finite number within float32 (3.4e+38); prompt key 'k'"
    assert refusal(evaluating, [row("k", "p", value, "a")]) == f"6: {expected}"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("{'a': 1.0}[prompt]", "KeyError: 'p'"),
        ("sys.exit(0)", "SystemExit: 0"),
        ("(_ for _ in ()).throw(ValueError('one\\ntwo \\x1b[31mred'))", r"ValueError: one two \x1b[31mred"),
        ("bytearray(1 << 60)", "MemoryError"),
    ],
)
def test_what_a_function_raises_is_named_with_line_and_prompt(evaluating: UserFunction, call: str, reason: str) -> None:
    assert refusal(evaluating, [row("k", "p", call, "a")]) == f"7: f raised {reason}; prompt key 'k'"
    assert evaluating([row("k", "p", "1.5", "a")]) == [1.5], "the process goes on"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("os._exit(3)", "ended its process (exit status 3); let it return or raise"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended its process (SIGSEGV, a crash in C code most likely)"),
        ("os.kill(os.getpid(), 9)", "ended its process (SIGKILL, as the system does when memory runs out)"),
        ("time.sleep(1000)", "gave no answer within 1 s; make it end"),
        ("re.match('(a+)+b', 'a' * 64)", "gave no answer within 1 s; make it end"),
    ],
)
def test_a_crash_an_exit_and_a_hang_are_one_line_and_the_run_goes_on(
    body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = loaded(tmp_path, f"import os, re, signal, time\n{SIGNATURE}if prompt == 'p2': {body}\n    return 1.0")
    monkeypatch.setattr(process, "ENDING_SECONDS", 0.2)
    assert refusal(replace(function, seconds=1.0)) == f"2: f {message}; prompt key 'k2'"


def test_the_process_ends_with_the_run_also_where_that_is_killed(tmp_path: Path) -> None:
    """A function in an endless search holds every lock of Python."""
    (tmp_path / "r.py").write_text(f"import os, re\n{SIGNATURE}print(os.getpid()); re.match('(a+)+b', 'a' * 64)")
    program = "from ppo_repro.config.tasks import FunctionReward\nfrom ppo_repro.user.process import *\n"
    program += f"term = FunctionReward(kind='function', path='{tmp_path}/r.py:f')\n"
    program += f"load_reward(UserProcess(), 'f', term)({[row('k', 'p', 'r', 'a')]})"
    run = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, cwd=ROOT)
    assert run.stderr is not None
    child = int(run.stderr.readline())
    run.kill()
    run.wait()
    run.stderr.close()
    require_ended(child)


def test_what_a_function_started_ends_also_where_its_own_process_is_gone(tmp_path: Path) -> None:
    body = "import os, subprocess, sys\n\ndef f(prompt, response, answer):\n"
    body += "    server = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
    body += f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(server.pid))\n    os._exit(3)\n"
    with pytest.raises(UserError, match="ended its process"):
        loaded(tmp_path, body)(ROWS[:1])
    require_ended(int((tmp_path / "pid").read_text()))


def test_a_process_that_has_ended_gets_no_second_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may have given its number to another process by then."""
    function, signalled = loaded(tmp_path, f"{SIGNATURE}return 1.0"), list[int]()
    kill = os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, number: (signalled.append(group), kill(group, number)))
    function.process.end()
    function.process.end()
    assert len(signalled) == 1


def test_ctrl_c_gets_out_of_a_function_that_catches_everything(tmp_path: Path) -> None:
    body = f"try:\n        os.kill({os.getpid()}, 2); time.sleep(1000)\n    except BaseException: return 0.0"
    function = loaded(tmp_path, f"import os, signal, time\n{SIGNATURE}{body}")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            function(ROWS)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_function_leaves_no_trace_in_the_run_and_keeps_the_state_that_its_file_made(tmp_path: Path) -> None:
    change = "torch.set_default_dtype(torch.float64); os.environ['PPO_REPRO_X'] = '3'; os.chdir('/')"
    body = "return torch.tensor(0.1) + int(os.environ['PPO_REPRO_X']) + (os.getcwd() == '/')"
    before = os.getcwd(), dict(os.environ), torch.get_default_dtype(), random.getstate()
    function = loaded(tmp_path, f"import os, random, torch\nrandom.seed(1)\n{change}\n{SIGNATURE}{body}")
    assert function(ROWS) == [4.1, 4.1]
    assert (os.getcwd(), dict(os.environ), torch.get_default_dtype(), random.getstate()) == before


def test_what_is_printed_goes_to_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = "print('{0} print'); os.write(1, b'{0} raw '); os.system('echo {0} program')"
    loaded(tmp_path, f"import os\n{said.format('file')}\n{SIGNATURE}{said.format('call')}; return 1.0")(ROWS[:1])
    out, err = capfd.readouterr()
    assert out == ""
    for part in ("file print", "file raw", "file program", "call print", "call program"):
        assert part in err


def test_what_is_printed_cannot_control_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded(tmp_path, f"import sys\n{SIGNATURE}print(response, file=sys.stderr); print(response); return 1.0")(
        [{**ROWS[0], "response": "\x1b[31m\x9b\u202ered\ta\nb"}]
    )
    assert capfd.readouterr().err == "\\x1b[31m\\x9b\\u202ered\ta\nb\n" * 2


GETS = (
    "it gets by name prompt (question), response (completion, solution_str), answer (ground_truth), "
    "fields (extra_info), turns, full_text"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "x = 1\nimport missing_one",
            ":2 fails to load (ModuleNotFoundError: No module named 'missing_one'; install it",
        ),
        ("x = 1\n\ndef f(:", ":3 fails to load (SyntaxError in Python 3."),
        ("import os\nos._exit(0)", " fails to load (it ended its process (exit status 0)"),
        ("f = 3", ": f is no function; make it one or rename it"),
        ("def f(prompt, response, answer, level): ...", f": f has a parameter 'level'; {GETS}"),
        ("def f(p, r, a): ...", f": f has a parameter 'p'; {GETS}"),
        ("def f(response, anwser=None): ...", f": f has a parameter 'anwser'; {GETS}; did you mean answer?"),
        ("def f(prompt, answer): ...", f": f has no parameter for the response; {GETS}"),
        ("def f(*parts): ...", f": f has no parameter for the response; {GETS}"),
        ("def f(prompts, completions, **others): ...", ": f has the parameters of a reward of kind trl; set kind: trl"),
        ("def f(data_source, solution_str, ground_truth): ...", ": f has the parameters of a reward of kind verl; set"),
        ("import math\nf = math.hypot", f": f has no parameter for the response; {GETS}"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_where_it_is_loaded(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        loaded(tmp_path, text)
    assert str(caught.value).startswith(f"{FIELD}: {tmp_path}/r.py{message}")
    assert str(caught.value).isprintable()


def test_a_mistake_in_a_module_beside_is_named_there_too(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def g(x):\n    return 1 / 0\n")
    said = refusal(loaded(tmp_path, "import helper\ndef f(response):\n    return helper.g(1)"))
    assert said == "3: f raised ZeroDivisionError: division by zero, helper.py:2; prompt key 'k1'"
    (tmp_path / "helper.py").write_text("x = 1\ndef g(:\n")
    with pytest.raises(UserError, match=r"r.py:1 fails to load \(SyntaxError in Python .*, helper.py:2\)$"):
        loaded(tmp_path, "import helper\ndef f(response): ...")


def test_what_is_imported_from_elsewhere_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "deep.py").write_text("x = 1.0")
    at = f"import sys, numpy, torch\nsys.path.append({str(tmp_path / 'src')!r})\nimport deep\n"
    assert loaded(tmp_path, f"{at}def f(response): return deep.x")(ROWS) == [1.0, 1.0]
    (said,) = capfd.readouterr().err.splitlines()
    assert said == f"warning: {FIELD}: imports {tmp_path}/src/deep.py, which is not copied: a rerun elsewhere lacks it"


def test_the_current_folder_has_modules_if_pythonpath_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, text = tmp_path / "here", "import stray\ndef f(response): return stray.x"
    here.mkdir()
    (here / "stray.py").write_text("x = 1.0")
    monkeypatch.chdir(here)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for current in ("", str(here)):  # as `python -c` and as `python -m` write it
        monkeypatch.setattr(sys, "path", [current, *sys.path])
        with pytest.raises(UserError, match="No module named 'stray'"):
            loaded(tmp_path, text)
    monkeypatch.setenv("PYTHONPATH", str(here))
    assert loaded(tmp_path, text)(ROWS) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("import random\nrandom.seed(0)", "return random.random()"),
        ("import numpy as np", "return np.random.rand()"),
        pytest.param("import torch", "return torch.rand(())", marks=pytest.mark.slow),
        ("calls = []", "calls.append(0); return len(calls)"),
        ("last = [None]", "before, last[0] = last[0], response; return float(before == response)"),
    ],
)
def test_a_function_with_two_scores_for_one_input_is_refused(tmp_path: Path, header: str, body: str) -> None:
    with pytest.raises(UserError, match=r"returned \S+ and then \S+ for the same input \(prompt key 'k\d'"):
        check_repeats(loaded(tmp_path, f"{header}\n{SIGNATURE}{body}\n"), ROWS)


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("response, prompt, answer", "r1 p1 a1"),
        ("prompt, completion, ground_truth", "p1 r1 a1"),
        ("question, solution_str, extra_info", "p1 r1 {}"),
        ("answer, response, /", "a1 r1"),
        ("tolerance=0.5, response='', /", "0.5 r1"),
        ("*, response", "r1"),
        ("response, tolerance=0.5", "r1 0.5"),
        ("response, *rest", "r1 ()"),
    ],
)
def test_a_function_is_called_by_the_names_of_its_parameters(tmp_path: Path, signature: str, expected: str) -> None:
    """In any order, with the aliases that the page lists."""
    names = [name.strip(" *").partition("=")[0] for name in signature.split(",") if name.strip() not in ("/", "*")]
    shown = " + ' ' + ".join(f"str({name})" for name in names)
    text = f"def f({signature}):\n    return {shown} == {expected!r}\n"
    assert loaded(tmp_path, text)(ROWS) == [1.0, 0.0]


@pytest.mark.parametrize("response", ["response", "response, /"])
def test_a_function_that_takes_all_others_gets_everything(tmp_path: Path, response: str) -> None:
    text = f"def f({response}, **others): return 10 * len(others) + (others['prompt'] == 'p1')"
    assert loaded(tmp_path, text)(ROWS) == [51.0, 50.0]


def test_a_decorator_that_hides_the_parameters_is_told_what_to_do(tmp_path: Path) -> None:
    hidden = "def hides(f):\n    def g(*args, **others): return f(*args, **others)\n    return g\n"
    said = refusal(loaded(tmp_path, f"{hidden}@hides\ndef f(prompt, response): return 1.0"))
    assert "f raised TypeError: f() got an unexpected keyword argument" in said
    assert "give the decorator functools.wraps; prompt key 'k1'" in said
    wraps = hidden.replace("    def g", "    @functools.wraps(f)\n    def g")
    assert loaded(tmp_path, f"import functools\n{wraps}@hides\ndef f(prompt, response): return 1.0")(ROWS) == [1.0, 1.0]


def test_what_async_functions_return_is_awaited(tmp_path: Path) -> None:
    """All in one loop, in which what the file keeps between calls can live."""
    text = "import asyncio\nloops = set()\nasync def f(response):\n    await asyncio.sleep(0)\n"
    text += "    loops.add(asyncio.get_running_loop())\n    return float(response[1]) + 10 * len(loops)\n"
    assert loaded(tmp_path, text)(ROWS) == [11.0, 12.0]
    trl = "async def f(completions, **_):\n    return [float(c[1]) for c in completions]\n"
    assert loaded(tmp_path, trl, OF_TRL)(ROWS) == [1.0, 2.0]
    assert "f raised ValueError: no" in refusal(loaded(tmp_path, "async def f(response):\n    raise ValueError('no')"))


def test_a_function_gets_by_name_what_it_asks_for(tmp_path: Path) -> None:
    text = "def f(prompt, response, answer, turns, fields, full_text):\n    fields['n'] += 1\n"
    text += "    return fields['n'] + 10 * [t.role for t in turns].count('environment') + 100 * full_text.count('<s>')"
    own = row("k", "p", "ab", "x", '{"n": 3}', turns=("a", "tool", "b"), full_text="a<s>b<s>")
    for _ in range(2):  # what it changes in them is lost
        assert loaded(tmp_path, text)([own, own]) == [214.0, 214.0]


# as in the documentation of TRL and verl
TRL = """
def accuracy(prompts, completions, answer, **kwargs):
    assert len(prompts) == len(completions) == len(answer) == 1
    return [1.0 if a in c else 0.0 for a, c in zip(answer, completions)]

def letters(prompts, completions, level, **kwargs):
    assert [m["role"] for m in prompts[0]] == ["user"]
    return [level[0] + float(len(set(completion[0]["content"]))) for completion in completions]

def wrapped(*args, **kwargs): return accuracy(*args, **kwargs)
def batch(completions, **kwargs): return [0.0, 1.0]
def single(completions, **kwargs): return 1.0
def skipped(completions, **kwargs): return [None]
def ids(completion_ids, **kwargs): return [float(len(completion_ids[0]))]
def narrow(completions, level): return [float(level[0])]
def missing(completions, colour): return [1.0]
def column(completions, colour, **kwargs): return [1.0]
def logs(completions, log_extra, log_metric=None, **kwargs):
    log_extra("kind", ["a"])
    log_metric("mean", 1.0)
    return [1.0]
def state(completions, trainer_state=None): return [1.0]
def chat(completions, **kwargs): return [len(completion[-1]["content"]) for completion in completions]
def text(completions, **kwargs): return [len(completion.strip()) for completion in completions]
def hidden(completions, **kwargs): return [float(kwargs["trainer_state"].global_step)]
"""
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == ("own" if extra_info else "openai/gsm8k")
    return 1.0 if solution_str.strip() == ground_truth else 0.1

def graded(data_source, solution_str, ground_truth, extra_info):
    return {"score": compute_score(data_source, solution_str, ground_truth, extra_info) / 2, "acc": True}

def nameless(data_source, solution_str, ground_truth, extra_info): return {"acc": True}
"""
OF_TRL = TrlReward(kind="trl", path="r.py:f")
OF_CHAT = TrlReward(kind="trl", path="r.py:f", conversational=True)
OF_VERL = VerlReward(kind="verl", path="r.py:f", data_source="openai/gsm8k")
FOUR = row("2", "2+2=", "four", "4", '{"level": 3, "data_source": "own", "completions": "not mine"}')


@pytest.mark.parametrize(
    ("term", "name", "expected"),
    [
        (OF_TRL, "accuracy", [1.0, 0.0]),
        (OF_TRL, "wrapped", [1.0, 0.0]),
        (OF_CHAT, "letters", [4.0, 7.0]),
        (OF_VERL, "compute_score", [1.0, 0.1]),
        (OF_VERL, "graded", [0.5, 0.05]),
    ],
)
def test_rewards_of_trl_and_verl_work(tmp_path: Path, term: CalledReward, name: str, expected: list[float]) -> None:
    fields = '{"level": 3}' if isinstance(term, TrlReward) else "{}"
    rows = [row("1", "1+1=", "2", "2", fields), FOUR]
    assert loaded(tmp_path, TRL + VERL, term, name)(rows) == expected


@pytest.mark.parametrize(
    ("term", "name", "message"),
    [
        (OF_TRL, "batch", "returned 2 numbers; must return a list of 1, for 1 completion"),
        (OF_TRL, "single", "returned a float; must be a list, one number for each completion"),
        (OF_TRL, "skipped", "returned None of type NoneType; must be a finite number"),
        (
            OF_TRL,
            "missing",
            "asks for 'colour', and there is only answer, level, data_source, completions, prompts, com",
        ),
        (OF_TRL, "hidden", "asks for trainer_state, which is not given: a score must follow from prompt and response"),
        (OF_TRL, "column", "asks for 'colour', and there is only answer, level, data_source, completions"),
        (OF_TRL, "chat", "; completions are texts, with conversational: true lists of chat messages;"),
        (OF_CHAT, "text", "; completions are lists of chat messages, with conversational: false texts;"),
        (OF_VERL, "nameless", "returned a dict with ['acc']; must be a number or a dict with 'score'"),
    ],
)
def test_what_is_wrong_in_them_is_one_line(tmp_path: Path, term: CalledReward, name: str, message: str) -> None:
    assert message in refusal(loaded(tmp_path, TRL + VERL, term, name), [FOUR])


def test_a_parameter_that_a_score_must_not_have_is_refused_where_the_file_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"r\.py: f asks for trainer_state, which is not given"):
        loaded(tmp_path, "def f(completions, trainer_state=None): ...", OF_TRL)


@pytest.mark.parametrize("term", [OF_TRL, OF_VERL])
def test_a_plain_reward_under_the_name_of_another_kind_is_told_its_kind(tmp_path: Path, term: CalledReward) -> None:
    with pytest.raises(UserError, match=r"f has the parameters of a reward of kind function; set kind: function$"):
        loaded(tmp_path, "def f(prompt, response, answer): ...", term)


def test_what_trl_passes_besides_is_there_and_what_is_not_recorded_is_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{**FOUR, "response_ids": [5, 6, 7]}] * 2
    for name, expected in (("ids", 3.0), ("narrow", 3.0), ("logs", 1.0)):
        assert loaded(tmp_path, TRL, OF_TRL, name)(rows) == [expected] * 2
    said, rest = capfd.readouterr().err.splitlines(), "is not recorded; a run records scores only"
    assert said == [f"log_extra('kind'): {rest}", f"log_metric('mean'): {rest}"]


ALONE = """
def alone(completions, **columns):
    (text,) = completions
    return [float(len(text))]

def length(completions, answer, **columns): return [len(text) + len(known) for text, known in zip(completions, answer)]

def bonus(completions, bonus=None, **columns): return [float(b or 0) for b in bonus or [None] * len(completions)]
"""


@pytest.mark.parametrize("name", ["alone", "length", "bonus"])
def test_a_reward_that_judges_each_completion_by_itself_is_taken(tmp_path: Path, name: str) -> None:
    check_alone(loaded(tmp_path, ALONE, OF_TRL, name), [FOUR, {**FOUR, "response": "5", "fields": '{"bonus": 2}'}])
