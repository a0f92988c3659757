"""The digest by which a server's installation is compared with the run's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ppo_repro
from ppo_repro.sampling.sglang.command import numerics_digest

SOURCES = shutil.ignore_patterns("*.so", "*.o", "__pycache__")


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("numerics/definition/rows.py", False),
        ("numerics/rows.md", False),
        ("numerics/network.py", True),
        ("numerics/c/rows.c", True),
        ("sampling/draw.py", True),
    ],
)
def test_files_that_decide_no_bit_do_not_count(file: str, counts: bool, tmp_path: Path) -> None:
    package = Path(ppo_repro.__file__).parent
    for folder in ("numerics", "sampling"):
        shutil.copytree(package / folder, tmp_path / folder, ignore=SOURCES)
    with (tmp_path / file).open("a") as changed:
        changed.write("\n// or # another comment\n")
    assert (numerics_digest(tmp_path) != numerics_digest(package)) == counts
