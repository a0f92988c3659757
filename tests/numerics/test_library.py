"""The library of kernels: variants, a known answer, and one line for each thing that can be wrong with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ppo_repro.base.errors import UserError
from ppo_repro.numerics import build, library
from ppo_repro.numerics.linear import linear
from tests.support.variants import ABLE

X86_64 = build.PLATFORMS["Linux", "x86_64"]
V3 = frozenset(["sse4_2", "avx2", "fma", "bmi1", "bmi2", "f16c", "abm", "movbe"])
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
VNNI = V4 | {"avx512_vnni"}


@pytest.mark.parametrize(
    ("flags", "fastest"),
    [
        (frozenset(), "x86_64"),
        (V3, "x86_64_v3"),
        (V3 | {"avx_vnni"}, "x86_64_v3_vnni"),
        (V4, "x86_64_v4"),
        (V4 - {"movbe"}, "x86_64"),
        (VNNI, "x86_64_v4_vnni"),
    ],
)
def test_the_fastest_variant_that_the_cpu_runs_is_chosen(flags: frozenset[str], fastest: str) -> None:
    assert library.choose(X86_64, flags, None).name == fastest
    assert library.choose(X86_64, flags, "x86_64").name == "x86_64"


# asks for 13 GB where the process may have 6, then for little
WITHOUT_MEMORY = """
import resource
from ppo_repro.base.errors import OutOfMemory
from ppo_repro.numerics import library
from ppo_repro.numerics.interface import ffi
kernels, gradient = library.load(), ffi.new("float[]", 1)
sums = ffi.new("Sums *", {"level": [gradient], "last": 1})
matrix = ffi.new("Matrix *", {"n": 1, "k": 1, "bias_grad": -1})
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
try:
    kernels.linear_backward(matrix, ffi.NULL, ffi.NULL, 1 << 30, ffi.NULL, ffi.NULL, ffi.NULL, sums, ffi.NULL)
except OutOfMemory as error:
    print(error)
print(kernels.known_answer(0) == library.KNOWN_ANSWER)
"""


@pytest.mark.slow
def test_a_process_without_memory_raises_one_line_and_goes_on() -> None:
    child = subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines() == [
        "out of memory: the kernels asked for 12.885 GB; make the batch smaller, or see `ppo-repro plan`",
        "True",
    ]


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


# ---------------------------------------------------------------------------------------------- several threads


@pytest.fixture
def two_threads() -> Iterator[None]:
    library.set_threads(2)
    yield
    library.set_threads(1)


@pytest.mark.parametrize("count", [0, 257])
@pytest.mark.usefixtures("two_threads")
def test_a_number_of_threads_that_no_pool_has_changes_nothing(count: int) -> None:
    with pytest.raises(UserError, match=f"threads = {count}: the kernels take 1 to 256"):
        library.set_threads(count)
    assert library.load().threads == 2


# a thread needs 8 MB of addresses for its stack; the process may have 64 MB more than it has
WITHOUT_THREADS = """
import os, resource, time
from ppo_repro.base.errors import UserError
from ppo_repro.numerics import library
alone = len(os.listdir("/proc/self/task"))
library.set_threads(3)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
try:
    library.set_threads(200)
except UserError as error:
    print(error)
end = time.monotonic() + 20  # a thread that has ended stays in the list for an instant
while (count := len(os.listdir("/proc/self/task")) - alone + 1) != 3 and time.monotonic() < end:
    time.sleep(0.01)
print(count, library.load().threads)
"""


def test_a_system_without_more_threads_changes_nothing() -> None:
    child = subprocess.run([sys.executable, "-c", WITHOUT_THREADS], capture_output=True, text=True)
    assert child.stdout.splitlines() == [
        "threads = 200: the kernels take 1 to 256 threads, and the system may start fewer; use fewer",
        "3 3",
    ], child.stderr


@pytest.mark.usefixtures("two_threads")
def test_calls_of_several_python_threads_give_their_own_results() -> None:
    torch.manual_seed(0)
    layers, x = [nn.Linear(300, 200).requires_grad_(False) for _ in range(2)], torch.randn(40, 300)
    expected = [linear(x, layer) for layer in layers]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda i: linear(x, layers[i % 2]), range(200)))
    assert all(torch.equal(y, expected[i % 2]) for i, y in enumerate(found))


class _Meeting:
    """A library with a function in which two threads wait for each other."""

    last_failure = staticmethod(lambda: SimpleNamespace(count=0))
    begin_call = staticmethod(lambda stream: None)

    def __init__(self, seconds: float) -> None:
        self.barrier = Barrier(2, timeout=seconds)

    def linear(self, *_: Any) -> bool:
        """Whether both threads were here at once."""
        try:
            self.barrier.wait()
        except BrokenBarrierError:
            return False
        return True


@pytest.mark.parametrize("in_turn", [True, False])
def test_one_thread_at_a_time_is_in_a_kernel(in_turn: bool) -> None:
    """Control: without `Kernels` two are."""
    function = _Meeting(0.3 if in_turn else 60.0)
    kernels: Any = library.Kernels(function) if in_turn else function
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: kernels.linear(), range(2))) == [not in_turn] * 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_computes_while_another_thread_is_in_a_kernel() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(300, 200).requires_grad_(False), torch.randn(40, 300)
    expected = linear(x, layer)
    with ThreadPoolExecutor(1) as pool:
        calls = pool.submit(lambda: [linear(x, layer) for _ in range(300)])
        for _ in range(5):
            child = os.fork()
            if child == 0:
                is_alone = library.load().threads == 1
                os._exit(0 if is_alone and torch.equal(linear(x, layer), expected) else 1)
            assert os.waitpid(child, 0)[1] == 0
        calls.result()
