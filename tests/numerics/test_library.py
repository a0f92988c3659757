"""The library of kernels: variants, a known answer, and one line for each thing that can be wrong with it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ppo_repro.errors import UserError
from ppo_repro.numerics import build, library
from tests.support.cli import one_line
from tests.support.paths import ROOT, TINY
from tests.support.variants import ABLE, FASTEST

X86_64 = build.PLATFORMS["Linux", "x86_64"]
V3 = frozenset(["sse4_2", "avx2", "fma", "bmi1", "bmi2", "f16c", "abm", "movbe"])
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("flags", "fastest"),
    [(frozenset(), "x86_64"), (V3, "x86_64_v3"), (V4, "x86_64_v4"), (V4 - {"movbe"}, "x86_64")],
)
def test_the_fastest_variant_that_the_cpu_runs_is_chosen(flags: frozenset[str], fastest: str) -> None:
    assert library.choose(X86_64, flags, None).name == fastest
    assert library.choose(X86_64, flags, "x86_64").name == "x86_64"


def test_a_variant_that_the_cpu_does_not_run_is_refused() -> None:
    with pytest.raises(UserError) as error:
        library.choose(X86_64, V3, "x86_64_v4")
    assert str(error.value) == (
        "PPO_REPRO_KERNELS = 'x86_64_v4': this CPU lacks avx512bw, avx512cd, avx512dq, avx512f, avx512vl; "
        "it runs x86_64_v3, x86_64"
    )


@pytest.mark.slow
def test_an_unknown_variant_ends_a_run_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ppo_repro", "run", TINY, "--out", tmp_path / "runs"]
    environment = {**os.environ, library.CHOICE: "avx2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and not (tmp_path / "runs").exists()
    assert "PPO_REPRO_KERNELS = 'avx2': there is no such variant; this CPU runs " in one_line(done.stderr)


def test_a_platform_without_kernels_is_refused() -> None:
    with pytest.raises(UserError, match="ppo_repro runs on Linux x86_64, Linux aarch64, Darwin arm64"):
        library.choose(None, frozenset(), None)


def test_a_missing_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is missing: run `make setup` or `pip install -e"):
        library.locate(ABLE[0], tmp_path)


def test_a_library_of_other_sources_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"kernels-{ABLE[0].name}-0123456789ab.so").touch()
    with pytest.raises(UserError, match="were built from other sources: run `make setup` or `pip install -e"):
        library.locate(ABLE[0], tmp_path)


def test_a_damaged_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / build.file_name(ABLE[0])
    path.write_bytes(b"no library")
    with pytest.raises(UserError, match=r"^the kernels do not load: .*; run `make setup`"):
        library.open_library(path)


def test_flushed_denormals_are_refused() -> None:
    library.check_denormals()
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot flush denormal numbers on this CPU")
    try:
        with pytest.raises(UserError, match=r"call torch.set_flush_denormal\(False\) first"):
            library.check_denormals()
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_begins_its_threads_anew() -> None:
    library.set_threads(2)
    assert library.load().known_answer() == library.KNOWN_ANSWER
    child = os.fork()
    if child == 0:
        library.set_threads(2)
        os._exit(library.load().known_answer() != library.KNOWN_ANSWER)
    assert os.waitpid(child, 0)[1] == 0
    library.set_threads(1)


def test_old_libraries_go_and_new_ones_replace_loaded_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    (tmp_path / "all.c").write_text('__attribute__((visibility("default"))) int answer(void) { return 1; }\n')
    build.compile_in_place(FASTEST)
    old = next(tmp_path.glob("*.so"))
    loaded = ctypes.CDLL(str(old))
    shutil.copy(old, tmp_path / "kernels-x86_64-0123456789ab.so")
    build.compile_in_place(FASTEST)
    assert list(tmp_path.glob("*.so")) == [old] and loaded.answer() == 1


def test_the_compiler_needs_no_home_to_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZIG_GLOBAL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert Path(build.compiler_environment(tmp_path / "spare")["ZIG_GLOBAL_CACHE_DIR"]).is_relative_to(
        tmp_path / "home"
    )
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # a folder cannot be made there
    assert build.compiler_environment(tmp_path / "spare")["ZIG_GLOBAL_CACHE_DIR"] == str(tmp_path / "spare")
