"""A user's file: executed as it is now, with its own modules beside it, and mistakes by file and line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ppo_repro.base.beside import modules_beside
from ppo_repro.base.errors import UserError
from ppo_repro.user.file import UserCallable, execute, load_callable

FIELD, GETS = "ppo.objective.path", "; it gets batch, low by name"


def loaded(folder: Path, text: str, **parameters: object) -> UserCallable:
    (folder / "own.py").write_text(text)
    return load_callable(FIELD, f"{folder}/own.py:f", ["batch"], parameters)


def refusal(folder: Path, text: str, **parameters: object) -> str:
    with pytest.raises(UserError) as caught:
        loaded(folder, text, **parameters)
    return str(caught.value).removeprefix(f"{FIELD}: {folder}/own.py")


def test_modules_beside_a_file_are_found_as_they_are_now_and_are_its_own(tmp_path: Path) -> None:
    """Also where they are imported late, from a package, or have the name of an installed module."""
    text = "from helper import a\nimport pack.part\n\n"
    text += "def f(batch):\n    import torch\n    return a, pack.part.b, torch.c"
    functions = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        (folder / "pack").mkdir(parents=True)
        (folder / "helper.py").write_text(f"from deeper import x\na = x + {number}")
        (folder / "deeper.py").write_text("x = 10")
        (folder / "pack" / "__init__.py").write_text("")
        (folder / "pack" / "part.py").write_text(f"from .sub import y\nb = y + {number}")
        (folder / "pack" / "sub.py").write_text("y = 20")
        (folder / "torch.py").write_text(f"c = {number}")
        functions.append(loaded(folder, text))
    assert [f(None) for f in functions] == [(11, 21, 1), (12, 22, 2)]
    assert not {"helper", "deeper", "pack"} & sys.modules.keys()

    (tmp_path / "1" / "deeper.py").write_text("x = 30")  # as long as before, and written in the same second
    assert loaded(tmp_path / "1", text)(None) == (31, 21, 1)
    beside = ["deeper.py", "helper.py", "pack/__init__.py", "pack/part.py", "pack/sub.py", "torch.py"]
    assert [path.relative_to(tmp_path / "1").as_posix() for path in modules_beside(tmp_path / "1" / "own.py")] == beside


def test_a_folder_without_init_and_relative_imports_are_beside_a_file_too(tmp_path: Path) -> None:
    """But what is installed comes before such a folder, as for Python."""
    for name, text in (("lib/util", "from ..other import x"), ("other", "x = 3"), ("last", "y = 4"), ("yaml/no", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    text = "from lib.util import x\nfrom .other import x as z\nfrom . import last\nimport yaml\n"
    f = loaded(tmp_path, f"{text}\ndef f(batch): return x, z, last.y, yaml.safe_load('5')")
    assert f(None) == (3, 3, 4, 5)
    found = {path.relative_to(tmp_path).as_posix() for path in modules_beside(tmp_path / "own.py")}
    assert found == {"lib/util.py", "other.py", "last.py"}


def test_the_names_of_python_and_of_this_package_are_never_found_beside_a_file(tmp_path: Path) -> None:
    for name in ("json", "ppo_repro"):
        (tmp_path / f"{name}.py").write_text("raise ValueError")
    (tmp_path / "own.py").write_text("import json\nfrom ppo_repro.base.errors import UserError\n")
    assert execute(tmp_path / "own.py").json.dumps(1) == "1"
    assert modules_beside(tmp_path / "own.py") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "x = 1\nimport missing_one",
            ":2 fails to load (ModuleNotFoundError: No module named 'missing_one'; install it",
        ),
        ("x = 1\n\ndef f(:", ":3 fails to load (SyntaxError in Python 3."),
        ("import sys\nsys.exit(3)", ":2 fails to load (SystemExit: 3)"),
        ("f = 3", ": f is no function; make it one or rename it"),
        ("\ndef f(batch, beta): ...", ":2: f cannot be called (missing a required argument: 'beta')" + GETS),
        ("def f(batch): ...", ":1: f cannot be called (got an unexpected keyword argument 'low')" + GETS),
        ("def f(*, low): ...", ":1: f cannot be called (too many positional arguments)" + GETS),
    ],
)
def test_what_cannot_be_loaded_or_called_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text, low=0.1).startswith(message)


def test_a_name_that_the_file_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"own.py has no f$"):
        loaded(tmp_path, "def g(batch): ...")


@pytest.mark.parametrize("raised", ["{'a': 1}['b']", "__import__('sys').exit(0)", "helper.fails()"])
def test_what_a_function_raises_is_named_by_the_line_of_its_file(tmp_path: Path, raised: str) -> None:
    (tmp_path / "helper.py").write_text("def fails(): raise ValueError('no')")
    function = loaded(tmp_path, f"import helper\ndef f(batch):\n    return {raised}")
    with pytest.raises(UserError, match=r"own.py:3: f raised (KeyError|SystemExit|ValueError: no, helper.py:1)"):
        function(None)


def test_ctrl_c_and_a_lack_of_memory_stay_what_they_are(tmp_path: Path) -> None:
    function = loaded(tmp_path, "def f(batch): raise batch")
    for error in (KeyboardInterrupt(), MemoryError()):
        with pytest.raises(type(error)):
            function(error)
