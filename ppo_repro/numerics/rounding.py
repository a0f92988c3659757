"""Round deliberately to the number formats of other stacks, in C (rounding.c)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.numerics.devices import kernels_of
from ppo_repro.numerics.interface import names, pointer

FORMATS = names("NumberFormat", "FORMAT_")  # by their number in C
NARROW = FORMATS[3:]  # formats of 8 bits, with a scale for each row


@dataclass(frozen=True)
class NumberFormats:
    """Format of each kind of number; float32 does not round."""

    weights: str = "float32"  # of the linear layers of attention and MLP
    other_weights: str = "float32"  # embedding, norms, biases, router, head
    linear_inputs: str = "float32"  # of the linear layers of attention and MLP
    activations: str = "float32"  # wherever a step of the network ends
    kv_cache: str = "float32"  # as attention reads keys and values
    logits: str = "float32"


EXACT = NumberFormats()


def round_rows(x: Tensor, form: str, scaled: bool = True) -> Tensor:
    """Return x [.., K] float32 rounded to a format. Formats of 8 bits have a scale for each row.

    s = fl(max |x| / L) with L the largest number of the format, y = fl(s rne(fl(x / s))). A row too small to have a
    scale gives zeros. With `scaled` False the scale is 1 in floating-point formats.
    """
    rounded = x.detach().to(torch.float32).clone(memory_format=torch.contiguous_format)
    if form != "float32" and rounded.numel():
        width = rounded.shape[-1]
        memory = pointer(rounded, rounded.device)
        kernels_of(rounded.device).round_tensor(FORMATS.index(form), scaled, memory, rounded.numel() // width, width)
    return rounded
