"""`compile`: the machine code of kernels before a run needs it, as for containers."""

from __future__ import annotations

import argparse
import time

from ppo_repro.errors import PromiseBroken
from ppo_repro.output import print_result


def compile_command(arguments: argparse.Namespace) -> int:
    """compile the kernels of this processor into the cache folder, and compare them with the specification"""
    import torch

    from ppo_repro.numerics import backend
    from ppo_repro.numerics.kernels.core.cache import cache_folder
    from ppo_repro.numerics.proof import proof
    from ppo_repro.rollout.engine import Sampling
    from ppo_repro.rollout.sampler import sample

    start = time.perf_counter()
    name = backend.choose(arguments.backend)
    failed = proof.failure(name)
    if failed != proof.PASSED:
        raise PromiseBroken(f"{failed} of backend {name} differ from the specification on this machine")
    backend.use(name, 1)
    numbers = torch.arange(8)
    for top_k in (0, 3):  # the sampler's kernels, which are no part of a backend
        sample(torch.zeros(8, 16), numbers, numbers, Sampling(1.0, top_k, 1.0, 1), "exact")
    folder, seconds = cache_folder(), time.perf_counter() - start
    entries = [entry for entry in folder.iterdir() if entry.suffix != ".tmp"] if folder.exists() else []
    size = sum(entry.stat().st_size for entry in entries)
    value = {"backend": name, "folder": str(folder), "entries": len(entries), "bytes": size, "seconds": seconds}
    about = f"backend {name} gives the bits of the specification"
    print_result(arguments.json, value, [about, f"{len(entries)} entries, {size / 1e6:.1f} MB, in {folder}"])
    return 0
