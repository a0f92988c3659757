"""Refuse calls and memory of an emulated GPU, and repeat what failed: `python -m tests.gpu.failures DRIVER`.

The program prints a line for each failure that is no error, or after which bits or memory differ.
"""

from __future__ import annotations

import ctypes
import random
import sys
from pathlib import Path

from ppo_repro.base.errors import OutOfMemory, UserError
from tests.gpu.emulator.device import use_card
from tests.support.failing_memory import backward, checkpointed, forward, same, sampling

CASES = 6  # of each work and kind of failure


def main(driver: str) -> None:
    card, variables = use_card(Path(driver)), ctypes.CDLL(driver)
    calls, refused, memory, most = (
        ctypes.c_long.in_dll(variables, f"emulated_{name}") for name in ("calls", "refused", "memory", "most")
    )
    draw, enough = random.Random(0), most.value
    for make in (forward, backward, checkpointed, sampling):
        work, expected = make("qwen3_moe", "cuda"), make("qwen3_moe")()
        work()
        card.free_scratch()
        calls.value, least = 0, memory.value
        work()
        cases = [(UserError, draw.randrange(calls.value), enough) for _ in range(CASES)]
        cases += [(OutOfMemory, -1, draw.randrange(least, memory.value)) for _ in range(CASES)]
        for kind, calls_before, bytes_at_most in cases:
            case = make.__name__, calls_before, bytes_at_most
            card.free_scratch()
            calls.value, refused.value, most.value = 0, calls_before, bytes_at_most
            try:
                work()
                print(*case, "no error")
            except UserError as error:
                if type(error) is not kind:
                    print(*case, repr(error))
            refused.value, most.value = -1, enough
            if not same(work(), expected):
                print(*case, "other bits after the failure")
            card.free_scratch()
            if memory.value != least:
                print(*case, f"{memory.value - least} bytes were not freed")


if __name__ == "__main__":
    main(sys.argv[1])
