"""What becomes of memory that is freed."""

from __future__ import annotations

import ctypes

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of <malloc.h>
_LARGE = 4 << 20


def return_large_blocks() -> None:
    """Let the C library return blocks of 4 MiB and more to the system when they are freed. Nothing without glibc.

    On its own it keeps blocks of up to 32 MiB for later, which fit others of another size badly: the operands of one
    model's matrices left 1 of 17 GB in holes while another model was trained.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE)
