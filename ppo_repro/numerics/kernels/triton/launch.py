"""How kernels are started: which device, and never with contraction to fused multiply-add."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

# without contraction every operation is rounded by itself, as the elementwise law asks
WARPS4, WARPS8 = {"num_warps": 4, "enable_fp_fusion": False}, {"num_warps": 8, "enable_fp_fusion": False}
INTERPRETED = bool(triton.knobs.runtime.interpret)  # TRITON_INTERPRET=1: kernels on tensors of the CPU, for tests


def runs_on(x: Tensor) -> bool:
    """Whether kernels take this tensor: on a CUDA device, or on the CPU in Triton's interpreter."""
    return x.device.type == ("cpu" if INTERPRETED else "cuda")


def rows_of_a_tile(x: Tensor) -> int:
    """Rows of a tile of 8-bit digits: as many as the tensor cores of 9.0 take, elsewhere as many as fit into registers.

    No result depends on it: sums are exact.
    """
    return 64 if INTERPRETED or torch.cuda.get_device_capability(x.device)[0] == 9 else 32


def blocks_of(columns: int, most: int = 1024) -> tuple[int, int]:
    """How many columns of a row, and how many rows, a program holds at a time: powers of two, 2,048 numbers at most."""
    block = min(most, max(16, triton.next_power_of_2(columns)))
    return block, min(32, 2048 // block)
