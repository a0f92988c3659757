"""The cache of compiled kernels: shared by checkouts with the same sources, another one after any change of them."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ppo_repro.numerics.kernels.core import cache
from ppo_repro.numerics.kernels.core.cache import compiler_digest, sources_digest
from tests.support.paths import ROOT

PACKAGE = ROOT / "ppo_repro"
NUMERICS = PACKAGE / "numerics"
HASHED = ("ppo_repro.numerics.arithmetic", "ppo_repro.numerics.kernels")
# Compiled kernels refer to the exceptions of the first by name; the cache says by the second what is wrong.
WITHOUT_EFFECT = ("ppo_repro.errors", "ppo_repro.output")


@pytest.fixture
def numerics(tmp_path: Path) -> Path:
    """A small tree like that of `numerics`, with folders two deep."""
    for name in ("arithmetic/grid.py", "kernels/rows.py", "kernels/core/scalar.py", "kernels/core/deep/vectors.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"name = {name!r}\n")
    return tmp_path


def change_nested(numerics: Path) -> None:
    (numerics / "kernels/core/deep/vectors.py").write_text("name = 1\n")


def rename(numerics: Path) -> None:
    (numerics / "kernels/core/scalar.py").rename(numerics / "kernels/core/scalars.py")


def move(numerics: Path) -> None:
    (numerics / "kernels/core/scalar.py").rename(numerics / "kernels/scalar.py")


def move_between_folders(numerics: Path) -> None:
    (numerics / "arithmetic/grid.py").rename(numerics / "kernels/grid.py")


def add(numerics: Path) -> None:
    (numerics / "kernels/core/empty.py").touch()


def remove(numerics: Path) -> None:
    (numerics / "kernels/rows.py").unlink()


def move_bytes_to_the_next_file(numerics: Path) -> None:
    first, second = numerics / "kernels/core/deep/vectors.py", numerics / "kernels/core/scalar.py"
    text = first.read_text()
    first.write_text(text[:-5])
    second.write_text(text[-5:] + second.read_text())


CHANGES = (change_nested, rename, move, move_between_folders, add, remove, move_bytes_to_the_next_file)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_any_source_changes_the_digest(numerics: Path, change: Callable[[Path], None]) -> None:
    before = sources_digest(numerics)
    change(numerics)
    assert sources_digest(numerics) != before


def test_an_unchanged_tree_keeps_its_digest(numerics: Path) -> None:
    before = sources_digest(numerics)
    (numerics / "kernels/core/__pycache__").mkdir()
    (numerics / "kernels/core/__pycache__/scalar.cpython-311.pyc").write_bytes(b"1")
    change_nested(numerics)
    assert sources_digest(numerics) != before
    (numerics / "kernels/core/deep/vectors.py").write_text("name = 'kernels/core/deep/vectors.py'\n")
    assert sources_digest(numerics) == before


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (cache.numba, "__version__", "0"),
        (cache.llvmlite, "__version__", "0"),
        (cache.platform, "python_version", lambda: "0"),
        (cache.numba_config, "CPU_NAME", "generic"),
        (cache.numba_config, "OPT", "0"),
    ],
)
def test_another_compiler_or_processor_has_another_digest(
    module: object, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = compiler_digest()
    assert compiler_digest() == before
    monkeypatch.setattr(module, name, value)
    assert compiler_digest() != before


def imports(source: Path) -> Iterator[str]:
    """The modules, or names in modules, that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def inside(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def test_kernels_take_nothing_from_files_that_the_digest_leaves_out() -> None:
    sources = [path for folder in ("arithmetic", "kernels") for path in (NUMERICS / folder).rglob("*.py")]
    imported = {path.relative_to(PACKAGE).as_posix(): set(imports(path)) for path in sources}
    ours = {name: {i for i in names if inside(i, ("ppo_repro",))} for name, names in imported.items()}
    assert sum(len(names) for names in ours.values()) > 50, "the imports are imported"
    others = {name: {i for i in names if not inside(i, HASHED + WITHOUT_EFFECT)} for name, names in ours.items()}
    assert {name: names for name, names in others.items() if names} == {}


COMPILED_OR_LOADED = """
import numpy as np
from ppo_repro.numerics.kernels import layer_parts

x = np.ones((3, 5), np.float32)
layer_parts.add(x, x)
stats = layer_parts.add_flat.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()), layer_parts.__file__)
"""


def loaded_and_compiled(checkout: Path, folder: Path) -> tuple[int, int]:
    """How many times a process of this checkout loads a kernel from the cache, and compiles it."""
    environment = {"PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(folder), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", COMPILED_OR_LOADED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=checkout)
    hits, misses, file = done.stdout.split()
    assert Path(file).is_relative_to(checkout)
    return int(hits), int(misses)


@pytest.mark.slow
def test_checkouts_with_the_same_sources_share_what_is_compiled(tmp_path: Path) -> None:
    for name in ("first", "second"):  # copies are newer files in another place
        shutil.copytree(PACKAGE, tmp_path / name / "ppo_repro", ignore=shutil.ignore_patterns("__pycache__"))
    assert loaded_and_compiled(tmp_path / "first", tmp_path / "cache") == (0, 1)
    assert loaded_and_compiled(tmp_path / "second", tmp_path / "cache") == (1, 0)
    with (tmp_path / "second/ppo_repro/numerics/kernels/core/vectors.py").open("a") as source:
        source.write("# changed\n")
    assert loaded_and_compiled(tmp_path / "second", tmp_path / "cache") == (0, 1)
