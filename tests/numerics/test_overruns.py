"""The kernels read and write within their buffers: before or after each one lies memory that ends the process.

A child process makes the tensors and arrays of `ppo_repro.numerics` in pages of their own, up against a page without
access. Control: one output that begins one number too early, or ends one too late.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ppo_repro.numerics import library
from ppo_repro.numerics import token_statistics as tokens
from ppo_repro.numerics.gradient_sums import GradientSums
from ppo_repro.numerics.interface import ints, pointer
from ppo_repro.numerics.lowering import Lowered
from ppo_repro.numerics.network import Network
from ppo_repro.numerics.rows import ragged, slots_of
from tests.support.models import CONFIGS, MIXTURES, small_model

PAGE, SLOTS, CONTEXT, LENGTHS = mmap.PAGESIZE, 8, 180, (17, 1, 40, 165)
MADE_BY = {torch: ("empty", "zeros", "empty_like", "zeros_like", "cat", "randn"), np: ("empty", "ascontiguousarray")}


def guarded(x: Any, side: str) -> Any:
    """A copy right after, or right before, a page that cannot be read or written."""
    if isinstance(x, Tensor):
        return torch.from_numpy(guarded(x.detach().numpy(), side)) if x.numel() and x.is_contiguous() else x
    if not x.nbytes:
        return x
    pages = -(-x.nbytes // PAGE) * PAGE
    memory = mmap.mmap(-1, pages + PAGE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    guard, offset = (begin, PAGE) if side == "before" else (begin + pages, pages - x.nbytes)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), PAGE, 0) == 0
    copy = np.frombuffer(memory, x.dtype, x.size, offset).reshape(x.shape)
    copy[...] = x
    return copy


def run_kernels(side: str) -> None:
    """The kernels of sampling, scoring and training, at sizes beside the widths of vectors and tiles."""
    for n, v in ((1, 1), (3, 17), (2, 129), (5, 300)):
        z, q, targets = torch.randn(n, v).requires_grad_(), torch.randn(n, v), guarded(torch.arange(n) % v, side)
        eligible, rank, _ = tokens.cut_tokens(z.detach(), v // 2 + 1, 0.9)
        eligible[torch.arange(n), targets] = True
        for kept in (None, eligible):
            found = tokens.token_statistics(z, targets, 0.7, kept, "deterministic")
            torch.autograd.backward((*found, tokens.kl_divergence(z, q, 1.0, kept)), [torch.randn(n)] * 3)
            tokens.sample_tokens(z, targets, targets, 0.7, None if kept is None else (kept, rank))
        tokens.normal_noise(targets, targets, v)
    for family, options in (("qwen3", {}), ("gpt2", {}), ("qwen3_moe", {}), ("mistral", {"sliding_window": 20})):
        config = (CONFIGS | MIXTURES)[family](**options)
        config.max_position_embeddings = CONTEXT
        trunk = small_model(config, 1).base_model
        for parameter in trunk.parameters():
            parameter.data = guarded(parameter.data, side)
        network, ids = Network(trunk, Lowered(CONTEXT)), [np.arange(n) % 3 for n in LENGTHS]
        sums, batch = GradientSums(trunk.named_parameters(), SLOTS), ragged(ids, slots=slots_of(range(4), 4, SLOTS))
        hidden, _ = network.over_batch(batch, ints(np.arange(len(batch.ids))))
        hidden.backward(torch.randn(hidden.shape))
        sums.finish()
        cache = network.make_cache(5, CONTEXT)
        for past in (0, 1):  # a prefill of all but the last token, then one token a sequence
            parts = [part for i in ids if len(part := i[-1:] if past else i[:-1])]
            starts = [len(i) - 1 if past else 0 for i in ids if past or len(i) > 1]
            network.over_cache(ragged(parts, starts), cache, range(len(parts)))


@pytest.mark.slow
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("what", ["kernels", "control"])
def test_no_kernel_leaves_its_buffers(what: str, side: str) -> None:
    code = subprocess.run([sys.executable, "-m", __name__, what, side], check=False).returncode
    assert code == (0 if what == "kernels" else -signal.SIGSEGV)


if __name__ == "__main__":
    what, side = sys.argv[1:]
    load = library.load()
    if what == "control":
        array = guarded(np.zeros(5, np.float32), side)
        at = pointer(torch.from_numpy(array))
        load.exp_float32(at, at + (1 if side == "after" else -1), 5)
    for module, names in MADE_BY.items():
        for name in names:
            made = getattr(module, name)
            setattr(module, name, lambda *a, made=made, **k: guarded(made(*a, **k), side))
    run_kernels(side)
