"""Kernels that compute something else are refused: each library gives the answer that is written in the source."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.numerics import build, library
from tests.support.variants import ABLE, FASTEST

ARM_LIBC = Path("/usr/aarch64-linux-gnu")


@pytest.mark.parametrize("variant", ABLE, ids=[variant.name for variant in ABLE])
def test_every_variant_that_this_cpu_runs_gives_the_known_answer(variant: build.Variant) -> None:
    kernels = library.open_library(library.locate(variant, build.SOURCES))
    assert kernels.known_answer() == library.KNOWN_ANSWER


def test_kernels_of_another_order_give_another_answer(tmp_path: Path) -> None:
    path = build.compile_variants(FASTEST, tmp_path, "-DBLOCK_TERMS=64")[0]
    with pytest.raises(UserError) as error:
        library.open_library(path)
    assert f"where {library.KNOWN_ANSWER:#x} is right, so results would differ; PPO_REPRO_KERNELS" in str(error.value)
    assert path.name in str(error.value)


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("qemu-aarch64") and ARM_LIBC.exists()), reason="needs Debian's qemu-user and libc6-arm64-cross"
)
def test_an_emulated_arm_processor_gives_the_known_answer(tmp_path: Path) -> None:
    where = build.PLATFORMS["Linux", "aarch64"]
    kernels = build.compile_variants(where, tmp_path)[0]
    (tmp_path / "main.c").write_text(
        "#include <stdio.h>\nunsigned long long known_answer(void);\n"
        'int main(void) { printf("%llx\\n", known_answer()); return 0; }\n'
    )
    command = [*build.compiler(where.target), "main.c", kernels.name, "-o", "main"]
    subprocess.run(command, cwd=tmp_path, env=build.compiler_environment(tmp_path / "zig"), check=True)
    environment = {**os.environ, "QEMU_LD_PREFIX": str(ARM_LIBC), "QEMU_SET_ENV": f"LD_LIBRARY_PATH={tmp_path}"}
    said = subprocess.run(["qemu-aarch64", tmp_path / "main"], env=environment, capture_output=True, text=True)
    assert (said.stderr, int(said.stdout or "0", 16)) == ("", library.KNOWN_ANSWER)
