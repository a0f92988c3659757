"""Docstrings of public names say what a reader needs, and the pages made from them have every name and no dead link."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from html import unescape
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

import pytest

import ppo_repro
from ppo_repro import testing
from tests.support.paths import ROOT

PAGES = {"ppo_repro": tuple(ppo_repro.__all__), "ppo_repro.testing": tuple(testing.__all__)}


def documented() -> dict[str, str]:
    """The docstring of each public name, by its dotted name."""
    found = {}
    for module, names in PAGES.items():
        for name in names:
            found[f"{module}.{name}"] = inspect.getdoc(getattr(import_module(module), name)) or ""
    return found


CODE = re.compile(r"(<script[^>]*>).*?(?=</script>)", re.DOTALL)  # of the search, which makes links itself
LINK = re.compile(r'(?:href|src)="([^"]*)"')
ANCHOR = re.compile(r'\bid="([^"]*)"')


def dead_links(folder: Path) -> list[str]:
    """Links of the pages that lead nowhere in the folder; what a page would load from elsewhere is one too."""
    pages = {path: CODE.sub(r"\1", path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    anchors = {path: set(map(unescape, ANCHOR.findall(text))) for path, text in pages.items()}
    dead = []
    for path, text in pages.items():
        for link in map(unescape, LINK.findall(text)):
            if link.startswith(("https://", "data:")):
                continue
            name, _, anchor = unquote(link).partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.is_file() or (anchor and anchor not in anchors.get(target, ())):
                dead.append(f"{path.relative_to(folder)}: {link}")
        dead += [f"loads {link}" for link in re.findall(r'<(?:script|img)[^>]*src="(https?:[^"]*)"', text)]
    return dead


def test_arguments_are_documented_by_their_names() -> None:
    """`Args` names parameters that there are, in their order; a parameter whose name says all has no entry."""
    found = {}
    for path in sorted((ROOT / "ppo_repro").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = (ast.get_docstring(node) or "") if isinstance(node, ast.FunctionDef) else ""
            if not isinstance(node, ast.FunctionDef) or "Args:\n" not in text:
                continue
            lines = re.findall(r"^    (\w[\w, ]*): ", re.split(r"\n(?=\S)", text.split("Args:\n")[1])[0], re.MULTILINE)
            names = [name for line in lines for name in line.split(", ")]
            given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            expected = [argument.arg for argument in given if argument.arg in names]
            if names != expected:
                found[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = (names, expected)
    assert found == {}


@pytest.mark.slow
def test_every_public_name_is_on_a_page_and_no_link_is_dead(tmp_path: Path) -> None:
    pytest.importorskip("pdoc", reason="the extra [docs] is not installed")
    folder = tmp_path / "docs"
    command = [sys.executable, str(ROOT / ".ci" / "docs.py"), str(folder)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")  # a type that cannot be shown is a warning
    assert (folder / "index.html").is_file()
    for module, names in PAGES.items():
        page = (folder / f"{module.replace('.', '/')}.html").read_text(encoding="utf-8")
        shown = re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", "", page)))
        for name in names:
            assert f'id="{name}"' in page, f"{module}.{name}"
            words = re.findall(r"\w{4,}", (documented().get(f"{module}.{name}") or "\n").splitlines()[0])
            assert all(word in shown for word in words), f"{module}.{name}"
        assert "&lt;span" not in page, module
        assert not re.search(r"numpy\.(?:ndarray|dtype)|typing\.|Callable\[\w+, ", shown), module
    assert dead_links(folder) == []
