"""The head of a benchmark's table."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from experiments.benchmarks.timing import machine


def test_a_system_without_cpuinfo_has_a_head_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path, encoding: str | None = None) -> str:
        raise FileNotFoundError(path)

    assert machine()["cores"] == os.cpu_count()
    monkeypatch.setattr(Path, "read_text", missing)
    assert machine()["cores"] == os.cpu_count()
