"""Runs on a GPU: one line says what makes a GPU unfit, and an emulated GPU computes the CPU's bits."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ppo_repro.base.errors import UserError
from ppo_repro.numerics import build, devices
from ppo_repro.numerics.interface import ffi
from ppo_repro.numerics.library import KNOWN_ANSWER
from ppo_repro.records import manifest
from ppo_repro.runs.plan import plan_run
from tests.gpu.device_check import NOT_EMULATED, STEPS
from tests.gpu.emulator import stand_in
from tests.gpu.emulator.device import current_stream
from tests.support.cli import sets
from tests.support.language import tiny_run
from tests.support.paths import ROOT, TINY
from tests.support.ranks import end, start_ranks
from tests.support.runs import small_config

REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no driver": (lambda folder: devices.open_card(0, str(folder / "libcuda.so.1")), "cuda:0: no driver: "),
    "another library": (lambda _: devices.open_card(0, "libm.so.6"), "the driver is too old: libm.so.6 lacks cuInit"),
    "kernels of other sources": (devices.locate, "was built from other sources; run `make setup`"),
    "no kernels": (lambda folder: devices.locate(folder / "none"), "is missing; run `make setup`"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_card_that_cannot_be_used_is_refused(case: str, tmp_path: Path) -> None:
    (tmp_path / "gpu-0123456789ab.so").touch()
    use, message = REFUSALS[case]
    with pytest.raises(UserError, match=r"^layout\.device = cuda") as error:
        use(tmp_path)
    assert message in str(error.value)


# a driver that does nothing, with a GPU of any age; `faults` has the results of some functions
DRIVER = """
#include <string.h>
#define DOES_NOTHING(name) int name(void) { return 0; }
int faults[4], major = 8;
int cuInit(unsigned flags) { return flags ? 1 : faults[0]; }
int cuModuleLoadDataEx(void) { return faults[1]; }
int cuModuleGetFunction(void) { return faults[2]; }
int cuMemAlloc_v2(unsigned long long *memory) { *memory = 4096; return faults[3]; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGetName(char *name) { strcpy(name, "Old Card"); return 0; }
int cuDeviceGetAttribute(int *value, int attribute) { *value = attribute == 75 ? major : 5; return 0; }
int cuGetErrorString(int code, const char **text) { *text = code == 100 ? "no CUDA device" : "failed"; return 0; }
int cuDriverGetVersion(int *version) { *version = 11000; return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *all) { *free = 1000000000; *all = 4000000000; return 0; }
DOES_NOTHING(cuDeviceGet) DOES_NOTHING(cuDevicePrimaryCtxRetain) DOES_NOTHING(cuCtxSetCurrent)
DOES_NOTHING(cuFuncSetAttribute) DOES_NOTHING(cuLaunchKernel) DOES_NOTHING(cuMemFree_v2)
DOES_NOTHING(cuMemcpyHtoDAsync_v2) DOES_NOTHING(cuMemcpyDtoHAsync_v2) DOES_NOTHING(cuMemsetD8Async)
long waits, waited_for;
int cuStreamSynchronize(void *stream) { waits++; waited_for = (long)stream; return 0; }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here, folder = build.this_platform(), tmp_path_factory.mktemp("driver")
    if here is None:
        pytest.skip("no kernels for this platform")
    (folder / "driver.c").write_text(DRIVER)
    command = [*build.compiler(here.target), "-Wno-error", "-w", "-shared", "-fPIC", "driver.c", "-o", "driver.so"]
    subprocess.run(command, cwd=folder, env=build.compiler_environment(folder / "zig"), check=True, capture_output=True)
    return folder / "driver.so"


@pytest.mark.parametrize(
    ("faults", "major", "message"),
    [
        ((100, 0), 8, "cuda:0: no GPU: no CUDA device (100); take layout.device = cpu"),
        ((0, 0), 7, "cuda:0: Old Card has compute capability 7.5, and the kernels need 8.0; take layout.device = cpu"),
        ((0, 218), 8, "cuda:0: the driver (CUDA 11.0) does not load the kernels: failed"),
    ],
    ids=["no GPU", "old GPU", "old driver"],
)
def test_a_card_that_is_too_old_or_absent_is_refused(
    faults: tuple[int, int], major: int, message: str, driver: Path
) -> None:
    library = ctypes.CDLL(str(driver))
    (ctypes.c_int * 4).in_dll(library, "faults")[:2] = faults
    ctypes.c_int.in_dll(library, "major").value = major
    with pytest.raises(UserError) as error:
        devices.open_card(0, str(driver))
    assert message in str(error.value)


def test_a_call_on_another_stream_waits_for_the_stream_before(driver: Path) -> None:
    path, kernels = devices.locate(build.SOURCES)
    functions, library = ffi.dlopen(str(path)), ctypes.CDLL(str(driver))
    (ctypes.c_int * 4).in_dll(library, "faults")[:] = (0, 0, 0, 0)
    ctypes.c_int.in_dll(library, "major").value = 8
    assert functions.gpu_open(str(driver).encode(), kernels.encode(), 0, ffi.new("GpuFacts *")) == ffi.NULL
    functions.begin_call(ffi.cast("void *", 7))
    waits = ctypes.c_long.in_dll(library, "waits")
    waits.value = 0
    functions.begin_call(ffi.cast("void *", 7))
    assert waits.value == 0
    functions.begin_call(ffi.cast("void *", 8))
    assert (waits.value, ctypes.c_long.in_dll(library, "waited_for").value) == (1, 7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (
            "0, 0, 0, 2",
            "OutOfMemory: out of memory on the GPU: the kernels asked for 0.008 GB, and 1.000 of 4.000 GB are free",
        ),
        ("0, 0, 500, 0", "UserError: the GPU has no kernel embedding_row; set layout.device=cpu"),
        ("0, 0, 1, 0", "UserError: the GPU: embedding_row: failed (1)"),
    ],
    ids=["no memory", "no kernel", "another error"],
)
def test_what_fails_on_a_card_is_one_error_and_the_process_lives(faults: str, message: str, driver: Path) -> None:
    lines = (
        "import ctypes, torch; from ppo_repro.numerics import devices",
        "from tests.gpu.emulator.device import current_stream; torch.cuda.current_stream = current_stream",
        f"library = ctypes.CDLL({str(driver)!r})",
        f"(ctypes.c_int * 4).in_dll(library, 'faults')[:] = ({faults})",
        "try:",
        f"    devices.open_card(0, {str(driver)!r})",
        "except devices.UserError as error:",
        "    print(f'{type(error).__name__}: {error}')",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(message)
    assert done.stdout.count("\n") == 1


def test_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match="was built without CUDA; install another build"):
        devices.card()


def test_the_plan_of_a_card_has_packed_weights_in_precision_high_alone() -> None:
    on_cpu, on_card = plan_run(small_config()), plan_run(small_config("layout.device=cuda"))
    assert on_cpu.rows["packed weights"]
    assert not on_card.rows.get("packed weights")
    assert on_card.rows["weights"] == on_cpu.rows["weights"]
    assert plan_run(small_config("layout.device=cuda", "numerics.precision=high")).rows["packed weights"]


# ---------------------------------------------------------------------------------------------- an emulated GPU


@pytest.fixture(scope="module")
def driver_of_emulated_card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if build.this_platform() is None:
        pytest.skip("no kernels for this platform")
    return stand_in(tmp_path_factory.mktemp("driver"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_step_for_a_card_finds_the_bits_of_the_cpu(driver_of_emulated_card: Path, tmp_path: Path) -> None:
    """`make test-gpu` but for the quickstart, on small sizes."""
    command = [sys.executable, "-m", "tests.gpu.device_check", "--seconds", "880", "--out", tmp_path]
    command += ["--stand-in", driver_of_emulated_card]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True)
    results = json.loads((tmp_path / "device_check.json").read_text())
    assert {name: step["failed"] for name, step in results.items() if "failed" in step} == {}
    assert {name: step["differ"] for name, step in results.items() if step.get("differ")} == {}
    assert done.returncode == 0, done.stdout[-3000:]
    assert results.keys() == STEPS.keys() - set(NOT_EMULATED)


ON_CPU = """
from ppo_repro.commands import cli
from ppo_repro.numerics.devices import CPU
from ppo_repro.runs import machine_memory, prepare

machine_memory.torch_device = prepare.torch_device = lambda *arguments: CPU
cli.main()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_with_a_card_each_beside_processes_on_the_cpu_have_the_fingerprint_of_the_cpu(
    driver_of_emulated_card: Path, tmp_path: Path
) -> None:
    """Ranks 0 and 1 have a card: sums pass between two cards, and between a card and a CPU."""
    overrides = ("model.warm_start_steps=4", "ppo.iterations=1")
    alone = tiny_run(tmp_path / "cpu", *overrides)
    words = ["run", str(TINY), "--out", str(tmp_path / "card"), "--json", *sets(*overrides, "layout.device=cuda")]
    on_card = ["-m", "tests.gpu.emulator.device", str(driver_of_emulated_card), *words]
    on_cpu = ["-c", ON_CPU, *words]
    ended = end(start_ranks(on_card, on_card, on_cpu, on_cpu))
    assert [process.code for process in ended] == [0] * 4, ended
    assert json.loads(ended[0].out)["fingerprint"] == manifest.load(alone).fingerprint


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_a_refused_call_a_card_computes_the_bits_of_the_cpu(driver_of_emulated_card: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.failures", str(driver_of_emulated_card)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.slow
def test_kernels_that_contract_products_and_sums_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    other = stand_in(tmp_path, "source", "-ffp-contract=fast")
    with pytest.raises(
        UserError, match=rf"the kernels compute 0x[0-9a-f]+ on emulated GPU .* where {KNOWN_ANSWER:#x} is right"
    ):
        devices.open_card(0, str(other))
