"""The kernels of a GPU compute the CPU's bits: every function of `c/interface.h`, in three orders of threads.

No GPU is needed: threads are fibers (`emulator/`), of the kernels' source and of their PTX. Controls: kernels with one
mistake each, which the same cases must find.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from ppo_repro.numerics import build, library
from ppo_repro.numerics.interface import ffi
from tests.gpu.emulator import compile_for_host, stand_in
from tests.gpu.twins import Case, GpuSide, Side, all_cases, differences, quick_cases
from tests.support.broken import broken_sources
from tests.support.variants import FASTEST

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="the library that drives a GPU is for Linux")
RISING, FALLING, SHUFFLED = range(3)  # `Order` of emulate.h
ORDERS = (RISING, FALLING, SHUFFLED)
QUICK = dict(quick_cases())

BESIDE_OUTLIERS = ("product in high beside outliers",)

Open = Callable[..., GpuSide]


@pytest.fixture(scope="module")
def cpu() -> Side:
    return Side(ffi.dlopen(str(build.SOURCES / build.file_name(FASTEST.variants[0]))))


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Opens a stand-in for the driver in a library of its own: each library drives one GPU."""

    def open_side(*flags: str, form: str = "source", sources: Path = build.SOURCES) -> GpuSide:
        folder = tmp_path_factory.mktemp("gpu")
        driver = stand_in(folder, form, *flags, source=sources / "gpu" / "kernels.c")
        host = compile_for_host(folder / "host.so", "-shared", *flags, str(sources / "gpu" / "host.c"), "-ldl")
        functions, ptx = ffi.dlopen(str(host)), (build.SOURCES / build.ptx_name()).read_bytes()
        fault = functions.gpu_open(str(driver).encode(), ptx, 0, ffi.new("GpuFacts *"))
        assert fault == ffi.NULL, ffi.string(fault)
        return GpuSide(functions, driver)

    return open_side


@pytest.fixture(scope="module")
def source(opened: Open) -> GpuSide:
    return opened()


@pytest.fixture(scope="module", params=["source", "ptx"])
def either(request: pytest.FixtureRequest, opened: Open) -> GpuSide:
    return opened(form=request.param)


def take_turns(gpu: GpuSide, order: int) -> None:
    """Set in which order threads run."""
    ctypes.c_int.in_dll(gpu.driver, "emulated_order").value = order


def assert_same(case: Case, cpu: Side, gpu: GpuSide) -> None:
    size, wrong = differences(case, cpu, gpu)
    assert size > 0
    assert wrong == []


@pytest.mark.parametrize("name", QUICK)
def test_a_gpu_computes_the_bits_of_the_cpu(name: str, cpu: Side, source: GpuSide) -> None:
    take_turns(source, FALLING)
    assert_same(QUICK[name], cpu, source)


@pytest.mark.parametrize("precision", library.KNOWN_ANSWERS)
def test_a_gpu_gives_the_known_answer(precision: int, source: GpuSide) -> None:
    take_turns(source, SHUFFLED)
    assert source.call("known_answer", precision) == library.KNOWN_ANSWERS[precision]


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_source_and_ptx_give_the_known_answer_in_any_order_of_threads(order: int, either: GpuSide) -> None:
    take_turns(either, order)
    found = {precision: either.call("known_answer", precision) for precision in library.KNOWN_ANSWERS}
    assert found == library.KNOWN_ANSWERS


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("order", ORDERS)
def test_source_and_ptx_compute_the_bits_of_the_cpu_in_hard_shapes(order: int, cpu: Side, either: GpuSide) -> None:
    take_turns(either, order)
    wrong = {name: found for name, case in all_cases() if (found := differences(case, cpu, either)[1])}
    assert wrong == {}


# ---------------------------------------------------------------------------------------------------------- controls


class Break(NamedTuple):
    """A mistake: texts of a source file and what stands there instead, or a compiler's flag; cases that find it."""

    cases: tuple[str, ...]
    file: str = ""
    changes: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()
    order: int = FALLING


TREE = (*((f"y[q][{i}] = y[q][{i}] + subtree.{axis};", "") for i, axis in ((1, "y"), (2, "z"), (3, "w"))),)
BREAKS = {
    "terms of a stage fall": Break(
        ("product (33, 70, 131)",), "gpu/tiles.c", (("int k = 0; k < TERMS; k++", "int k = TERMS - 1; k >= 0; k--"),)
    ),
    "blocks of 64 terms": Break(("product (33, 70, 131)", "model"), "interface.h", (("BLOCK = 128", "BLOCK = 64"),)),
    "blocks fall": Break(
        ("product (130, 200, 300)",),
        "gpu/products.c",
        (("y = y + a->partial[block", "y = y + a->partial[(tiles_of(a->terms, BLOCK) - 1 - block)"),),
    ),
    "products are contracted": Break(("model",), flags=("-ffp-contract=fast",)),
    "fma rounds twice": Break(
        ("product (130, 200, 300)",),
        "gpu/tiles.c",
        (("fma32(x_rows[i], w_rows[j], acc[i][j])", "x_rows[i] * w_rows[j] + acc[i][j]"),),
    ),
    "a barrier is missing": Break(("product (130, 200, 300)",), "gpu/tiles.c", (("takes\n    barrier();", "takes"),)),
    "copies are not waited for": Break(
        ("product (130, 200, 300)",), "gpu/tiles.c", (("wait_copies(STAGES - 2)", "wait_copies(STAGES)"),)
    ),
    "lanes do not meet": Break(
        ("sampling of few tokens",), "tokens.c", (("  MEET_LANES;\n  return count;", "  return count;"),)
    ),
    "lanes are joined from the nearest on": Break(
        ("statistics",),
        "gpu/lanes.h",
        (("for (int width = LANES / 2; width; width /= 2) sum", "for (int width = 1; width < LANES; width *= 2) sum"),),
    ),
    "slots are added one by one": Break(
        ("gradients",),
        "gpu/gradients.c",
        (
            ("y[q][0] = y[q][0] + subtree.x;", "(void)subtree;"),
            *TREE,
            ("      y[q][0] = y[q][1] = y[q][2] = y[q][3] = 0.0f;\n", ""),
        ),
    ),
    "columns are summed in float32": Break(
        ("model",),
        "gpu/gradients.c",
        (("  double sum = 0.0;\n  long t", "  float sum = 0.0f;\n  long t"),),
    ),
    "low bytes lose a bit": Break(
        ("product in high (33, 70, 131)", "gradients in high"),
        "gpu/integers.c",
        (("low[i] = as_bits(", "low[i] = 254 & as_bits("),),
    ),
    "ties away from zero": Break(
        ("product in high of ties",),
        "gpu/integers.c",
        (
            (
                "const int bits = (int)as_bits(x + WHOLE);",
                "const int bits = (int)as_bits(__builtin_roundf(x) + WHOLE);",
            ),
        ),
    ),
    "a clip at 4,096": Break(
        ("product in high of ties",),
        "gpu/integers.c",
        (("return as_float((uint32_t)(bits > most ? most : bits < lowest ? lowest : bits));", "return x + WHOLE;"),),
    ),
    "high bytes are too small": Break(
        ("product in high (33, 70, 131)", "gradients in high"),
        "gpu/integers.c",
        (("1.0f / RADIX", "0.5f / RADIX"),),
    ),
    "no remainders": Break(BESIDE_OUTLIERS, "gpu/integers.c", (("is_product && any_of_warp", "0 && any_of_warp"),)),
    "31 is not small": Break(BESIDE_OUTLIERS, "gpu/integers.c", (("SMALL = 32", "SMALL = 31"),)),
    "remainders of 10 bits": Break(
        BESIDE_OUTLIERS, "gpu/integers.c", (("(whole[i] - WHOLE), 0x1p11f", "(whole[i] - WHOLE), 0x1p10f"),)
    ),
    "a block of a gradient is asked": Break(
        BESIDE_OUTLIERS, "gpu/launches.c", (("!w->transposed, 1), 0)", "!w->transposed, 1), 1)"),)
    ),
    "the middle bytes once": Break(
        ("product in high (33, 70, 131)", "gradients in high"),
        "gpu/integers.c",
        (("if (highs == 1) multiply_bytes(sums, xl, wh);", ""),),
    ),
    "sums are not scaled back": Break(
        ("product in high (33, 70, 131)", "gradients in high"), "gpu/integers.c", (("falls ? RADIX", "0 ? RADIX"),)
    ),
    "a chunk in another place": Break(
        ("product in high (33, 70, 131)", "gradients in high"),
        "gpu/integers.c",
        (("4 * (thread_index() % 8 ^ row % 8)", "4 * (thread_index() % 8 ^ row % 4)"),),
    ),
    "halves are not waited for": Break(
        ("product in high (33, 70, 131)", "gradients in high"),
        "gpu/integers.c",
        (("wait_copies(INTEGER_STAGES - 2)", "wait_copies(INTEGER_STAGES)"),),
    ),
    "a barrier between halves is missing": Break(
        ("product in high (33, 70, 131)", "gradients in high"), "gpu/integers.c", (("takes\n    barrier();", "takes"),)
    ),
    "positions are divided one by one": Break(
        ("model over a cache",),
        "gpu/attention.c",
        (("= y / totals[i / head_dim]", "= y * (1.0f / totals[i / head_dim])"),),
    ),
    "scores have no cap": Break(
        ("capped scores over a cache", "model of a fourth kind"),
        "gpu/attention.c",
        (("if (cap && j >= from && j < to) s[j]", "if (0) s[j]"),),
    ),
    "scores have no cap in the backward pass": Break(
        ("model of a fourth kind",),
        "gpu/attention.c",
        (("a->score_cap ? soft_cap(p[j], a->score_cap) : p[j]", "p[j]"),),
    ),
    "rows of an id fall": Break(("model",), "gpu/gradients.c", (("a->sorted[i];", "a->sorted[begin + end - 1 - i];"),)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKS)
def test_control_a_mistake_changes_bits(name: str, cpu: Side, opened: Open, tmp_path: Path) -> None:
    mistake = BREAKS[name]
    sources = broken_sources(tmp_path, mistake.file, mistake.changes) if mistake.file else build.SOURCES
    gpu = opened(*mistake.flags, sources=sources)
    take_turns(gpu, mistake.order)
    for case in mistake.cases:
        assert differences(QUICK[case], cpu, gpu)[1] != []
