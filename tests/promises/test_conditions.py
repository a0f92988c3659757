"""A run of long responses has one fingerprint under every layout, instruction set and number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_repro.numerics import library
from ppo_repro.records import manifest, reader
from tests.support.language import small_run
from tests.support.paths import SMALL
from tests.support.ranks import fingerprint_of
from tests.support.variants import ABLE

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

# a policy that has not learnt to stop gives many tokens to compare
LONG = (
    "model.warm_start_steps=0",
    "rollout.samples_per_prompt=6",
    "rollout.max_response_tokens=48",
    "numerics.max_context=64",
    "ppo.minibatch_size=36",
    "ppo.iterations=2",
)
LAYOUTS = (
    ("rollout_slots=1",),
    ("rollout_slots=5", "prefill_chunk=3"),
    ("prefix_cache=false",),
    ("rollout_slots=160", "prefill_chunk=1"),
    ("forward_micro_batch=1", "update_micro_batch=1"),
    ("forward_micro_batch=3", "update_micro_batch=3"),
    ("gradient_checkpointing=true", "update_micro_batch=7"),
    ("threads=2",),
    ("threads=2", "rollout_slots=5", "update_micro_batch=3"),
)
# torch and NumPy without the wider instructions of the CPU
NARROW = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX2 FMA3",
}
ENVIRONMENTS = {variant.name: {library.CHOICE: variant.name} for variant in ABLE} | {"narrow torch and NumPy": NARROW}


def fingerprint_here(out: Path, *overrides: str) -> str:
    return manifest.load(small_run(out, *LONG, *overrides)).fingerprint


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    run_dir = small_run(tmp_path_factory.mktemp("as_configured"), *LONG)
    assert len(reader.read_tokens(run_dir, columns=["position"])) > 4_000
    return manifest.load(run_dir).fingerprint


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_no_layout_changes_the_fingerprint(expected: str, tmp_path: Path, layout: tuple[str, ...]) -> None:
    assert fingerprint_here(tmp_path, *(f"layout.{field}" for field in layout)) == expected


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_no_instruction_set_changes_the_fingerprint(
    expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: str
) -> None:
    for name, value in ENVIRONMENTS[environment].items():
        monkeypatch.setenv(name, value)
    assert fingerprint_of(1, SMALL, tmp_path, *LONG) == expected


@pytest.mark.parametrize("processes", [2, 4])
def test_no_number_of_processes_changes_the_fingerprint(expected: str, tmp_path: Path, processes: int) -> None:
    assert fingerprint_of(processes, SMALL, tmp_path, *LONG) == expected


@pytest.mark.usefixtures("row_noise")
def test_native_layouts_change_the_fingerprint(tmp_path: Path) -> None:
    """The negative control."""
    native = ("numerics.mode=native",)
    layouts = [(), *(tuple(f"layout.{field}" for field in layout) for layout in (LAYOUTS[0], LAYOUTS[4], LAYOUTS[5]))]
    found = {fingerprint_here(tmp_path / str(i), *native, *layout) for i, layout in enumerate(layouts)}
    assert len(found) == len(layouts)
