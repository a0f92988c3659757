"""The library of kernels: variants, a known answer, and one line for each thing that can be wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.numerics import build, library
from tests.support.variants import ABLE

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


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "variant beyond the CPU": (
        lambda _: library.choose(X86_64, V3, "x86_64_v4"),
        "PPO_REPRO_KERNELS = 'x86_64_v4': this CPU lacks avx512bw, avx512cd, avx512dq, avx512f, avx512vl; "
        "it runs x86_64_v3, x86_64",
    ),
    "unknown variant": (
        lambda _: library.choose(X86_64, V3, "avx2"),
        "'avx2': there is no such variant; this CPU runs ",
    ),
    "platform": (lambda _: library.choose(None, V3, None), "runs on Linux x86_64, Linux aarch64, Darwin arm64"),
    "no library": (lambda folder: library.locate(ABLE[0], folder / "none"), "is missing: run `make setup` or `pip"),
    "other sources": (
        lambda folder: library.locate(ABLE[0], folder),
        "from other sources: run `make setup`",
    ),
    "damaged": (lambda folder: library.open_library(folder / "damaged.so"), "the kernels do not load: "),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_kernels_that_cannot_be_used_are_refused(case: str, tmp_path: Path) -> None:
    (tmp_path / f"kernels-{ABLE[0].name}-0123456789ab.so").touch()
    (tmp_path / "damaged.so").write_bytes(b"no library")
    use, message = REFUSALS[case]
    with pytest.raises(UserError) as error:
        use(tmp_path)
    assert message in str(error.value)
