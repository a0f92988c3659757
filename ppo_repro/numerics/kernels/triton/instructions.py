"""What the compiled kernels consist of: compiled for a card, on any machine, and read in its assembly.

`python -m ppo_repro.numerics.kernels.triton.instructions [--capability 80|90|100]` prints a table; exit status 1 if a
kernel has an instruction that is approximate, fused where it rounds, or flushes denormal numbers, keeps registers in
memory, or lacks the product of the tensor cores. 2 where Triton is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CAPABILITIES = (80, 90, 100)
WITHOUT_FLOAT64 = 100  # exact sums of products in float64 are fused multiply-adds there, without tensor cores
# bytes that the assembler keeps in memory with registers to spare, as around the subroutine of a division in float64
TO_SPARE = 32
# of PTX: results that are not the correctly rounded ones of IEEE 754
APPROXIMATE = re.compile(
    r"\b((?:ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh|div)\.(?:approx|full)[.\w]*|[a-z]\w*\.[.\w]*ftz[.\w]*)"
)
FUSED = re.compile(r"\b(fma\.[.\w]*f(?:32|64))\b")
TENSOR = re.compile(r"\b(wgmma\.mma_async\.[.\w]+|tcgen05\.mma[.\w]*|mma\.sync\.[.\w]+)")
USED = re.compile(r"Used (\d+) registers")
SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Case:
    """A kernel as it is started."""

    name: str
    function: Any
    signature: dict[str, str]  # types by argument
    constants: dict[str, Any]
    product: str = ""  # what the instruction of its tensor cores contains
    warps: int = 4
    only: tuple[int, ...] = CAPABILITIES  # the cards on which it is started


@dataclass(frozen=True)
class Compiled:
    """What a compiled kernel consists of."""

    name: str
    registers: int
    spilled: int  # bytes of registers that are kept in memory for a time
    products: tuple[str, ...]
    fused: tuple[str, ...]
    approximate: tuple[str, ...]
    faults: tuple[str, ...]


def compiled(case: Case, capability: int, fusion: bool = False) -> Compiled:
    """Compile a kernel for cards of a compute capability, 90 for 9.0, and read it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**case.signature, **dict.fromkeys(case.constants, "constexpr")}
    names = case.function.arg_names
    assert set(signature) == set(names), (case.name, set(signature) ^ set(names))
    # memory of torch begins at multiples of 16 bytes; Triton looks at numbers itself when a kernel is started
    whole = [name for name, kind in case.signature.items() if kind[0] == "*" or name == "padded"]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in whole}
    source = ASTSource(
        fn=case.function, signature={name: signature[name] for name in names}, constexprs=case.constants, attrs=aligned
    )
    options = {"num_warps": case.warps, "enable_fp_fusion": fusion}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled = _usage(kernel.asm["ptx"], fusion)
    return _judged(case, kernel.asm["ptx"], registers, spilled, capability)


def _usage(ptx: str, fusion: bool) -> tuple[int, int]:
    """Registers, and bytes spilled, as the assembler says with the options that Triton gives it."""
    import triton

    target = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    assert target is not None
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        newest = tool / ("ptxas-blackwell" if target[1] >= "sm_100" and len(target[1]) > 5 else "ptxas")
        command: list[str | Path] = [newest, "-v", f"--gpu-name={target[1]}", *([] if fusion else ["--fmad=false"])]
        said = subprocess.run([*command, path, "-o", Path(folder, "kernel.cubin")], capture_output=True, text=True)
    used, spilled = USED.search(said.stderr), SPILLED.search(said.stderr)
    assert used is not None and spilled is not None, said.stderr
    return int(used[1]), int(spilled[1]) + int(spilled[2])


def _judged(case: Case, ptx: str, registers: int, spilled: int, capability: int) -> Compiled:
    body = "\n".join(line for line in ptx.splitlines() if not line.lstrip().startswith(("//", ".")))
    approximate, fused = (tuple(sorted(set(pattern.findall(body)))) for pattern in (APPROXIMATE, FUSED))
    products = tuple(sorted(set(TENSOR.findall(body))))
    faults = [f"approximate: {name}" for name in approximate]
    multiplied = any(case.product in name for name in products)
    by_hand = ".f64" in case.product and capability == WITHOUT_FLOAT64
    # elementwise parts are not fused there either, or the cards with such a product would show it
    faults += [] if by_hand and not multiplied else [f"fused: {name}" for name in fused]
    if spilled > TO_SPARE:
        faults.append(f"{spilled} bytes of registers in memory")
    if case.product and not (multiplied or by_hand):
        faults.append(f"no product of {case.product}")
    return Compiled(case.name, registers, spilled, products, fused, approximate, tuple(faults))


def table(results: list[Compiled]) -> str:
    """One line for each kernel."""
    lines = [f"{'kernel':<28}{'registers':>9}{'spilled':>9}  {'tensor cores':<58}{'faults'}"]
    for r in results:
        products = " ".join(name.replace("mma_async.sync.aligned.", "") for name in r.products) or "-"
        lines.append(f"{r.name:<28}{r.registers:>9}{r.spilled:>9}  {products:<58}{'; '.join(r.faults) or '-'}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Compile every kernel for one capability and print the table."""
    parser = argparse.ArgumentParser(description="what the compiled kernels consist of, without a card")
    parser.add_argument("--capability", type=int, choices=CAPABILITIES, default=90, help="of the card (default 90)")
    parser.add_argument("--only", default="", help="kernels whose names begin with this")
    options = parser.parse_args(arguments)
    os.environ["TRITON_INTERPRET"] = "0"  # read when Triton is imported
    try:
        import triton
    except ImportError:
        print("error: Triton is not installed; pip install 'ppo_repro[gpu]'", file=sys.stderr)
        return 2
    from ppo_repro.numerics.kernels.triton.cases import CASES

    chosen = [case for case in CASES if case.name.startswith(options.only) and options.capability in case.only]
    results = [compiled(case, options.capability) for case in chosen]
    print(f"Triton {triton.__version__}, compute capability {options.capability}")
    print(table(results))
    return int(any(result.faults for result in results))


if __name__ == "__main__":
    sys.exit(main())
