"""Digests of what the kernels make of fixed cases, and the widest registers they use; run on kinds of CPUs.

python -m tests.support.processes.kernel_digests prints {"digest": ..., "registers": ...}.
Numba reads the CPU from the environment.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
import torch

from ppo_repro.numerics.kernels import activations, gumbel, layer_norm, norms, optimizer
from ppo_repro.numerics.kernels import token_statistics as statistics
from ppo_repro.numerics.optim.optimizer import AdamWSettings
from tests.support.cases.gelu import GATES
from tests.support.cases.gelu import results as gelu_results
from tests.support.cases.gumbel import CUTS, samples
from tests.support.cases.norms import NORMS, norm_of, normed, trained
from tests.support.cases.token_statistics import MASKS, TEMPERATURES
from tests.support.cases.token_statistics import statistics as token_statistics
from tests.support.kernels import KINDS, outcome, using, values
from tests.support.optimizer import steps

COMPILED = (
    statistics._forward,
    statistics._backward,
    statistics._compare,
    gumbel._sample,
    optimizer._adamw,
    optimizer._squares,
    layer_norm._forward,
    layer_norm._backward,
    norms.rms_norm_rows,
    norms.backward_rows,
    activations._gelu,
    activations._gelu_backward,
    activations._gelu_tanh,
    activations._gelu_tanh_backward,
)


def digest() -> str:
    """SHA-256 over the bits of all cases by the backend in use."""
    found = hashlib.sha256()
    step = AdamWSettings(1e-2, 0.9, 0.95, 1e-8, 0.1, 1.0)
    for kind in KINDS:
        for seed, (size, mask) in enumerate(zip((1, 13, 89, 512), MASKS, strict=True)):
            for temperature in TEMPERATURES:
                found.update(
                    repr(outcome(lambda a=(seed, 3, size, kind, mask, temperature): token_statistics(*a))).encode()
                )
            for cuts in CUTS:
                found.update(repr(outcome(lambda a=(seed, 3, size, kind, cuts, 0.7, False): samples(*a))).encode())
            found.update(repr(outcome(lambda a=(seed, size * 7, kind, step): steps(*a))).encode())
            x, upstream = (torch.from_numpy(values(kind, (5, size), np.random.default_rng(seed + s))) for s in (0, 1))
            for norm in NORMS:
                layer = trained(norm_of(norm, size, seed))
                found.update(repr(outcome(lambda a=(layer, x, upstream): normed(*a))).encode())
            for gate in GATES.values():
                found.update(repr(outcome(lambda a=(gate, x, upstream): gelu_results(*a))).encode())
    return found.hexdigest()


def main() -> None:
    """Compute by kernels and print."""
    with using("float64"):
        found = digest()
    assembly = "".join(text for kernel in COMPILED for text in kernel.inspect_asm().values())
    registers = next(name for name in ("zmm", "ymm", "xmm") if f"%{name}" in assembly)
    print(json.dumps({"digest": found, "registers": registers}))


if __name__ == "__main__":
    main()
