"""Kernels with a planted mistake: copies of the sources in which a text is replaced by another."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from ppo_repro.numerics import build
from tests.support.variants import FASTEST

Changes = Sequence[tuple[str, str]]


def broken_sources(folder: Path, file: str, changes: Changes) -> Path:
    """Copy the C sources into a folder, with changes of one file; each changed text must stand there once."""
    sources = folder / "c"
    shutil.copytree(build.SOURCES, sources, ignore=shutil.ignore_patterns("*.so", "*.ptx"))
    text = (sources / file).read_text()
    for old, new in changes:
        assert text.count(old) == 1, (file, old, text.count(old))
        text = text.replace(old, new)
    (sources / file).write_text(text)
    return sources


def broken_library(folder: Path, file: str, *changes: tuple[str, str]) -> Path:
    """Compile the changed sources for this CPU. The compiler's -O1 saves seconds; no level of it changes a bit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCES", broken_sources(folder, file, changes))
        (path,) = build.compile_variants(FASTEST, folder, "-O1")
    return path
